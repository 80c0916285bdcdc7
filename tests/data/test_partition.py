"""Splits cover what they promise, are the same for the same seed, and refuse the impossible."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.made_up import image_set
from fedstill.core.errors import DataError
from fedstill.data import partition
from fedstill.data.partition import PARTITIONS, Dirichlet, Domains, Iid, described, partitioned

MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
few = settings(max_examples=40, derandomize=True, deadline=None, database=None)
label_vectors = st.lists(st.integers(0, 4), min_size=60, max_size=200).map(
    lambda labels: np.array(labels, np.int64)
)
COVERING = {
    "iid": lambda labels, clients, seed: partition.iid(labels, clients=clients, seed=seed),
    "dirichlet": lambda labels, clients, seed: partition.dirichlet_label(
        labels, clients=clients, alpha=0.5, seed=seed, min_size=1
    ),
    "quantity": lambda labels, clients, seed: partition.quantity_skew(
        labels, clients=clients, beta=0.5, seed=seed, min_size=1
    ),
    "classes": lambda labels, clients, seed: partition.classes_per_client(
        labels, clients=clients, classes=len(np.unique(labels)), seed=seed
    ),
}


def mnist_labels():
    return np.repeat(np.arange(10, dtype=np.int64), MNIST_COUNTS)


def balanced(classes=10, each=20):
    return np.tile(np.arange(classes, dtype=np.int64), each)


@pytest.mark.parametrize("name", COVERING)
@few
@given(labels=label_vectors, clients=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_every_example_lands_with_exactly_one_client(name, labels, clients, seed):
    try:
        parts = COVERING[name](labels, clients, seed)
    except DataError as fault:  # a class with fewer examples than holders
        assert "examples for" in str(fault)
        return
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert all(len(part) and part.dtype == np.int64 for part in parts)
    assert all(np.array_equal(part, np.sort(part)) for part in parts)


@few
@given(labels=label_vectors, clients=st.integers(1, 7), seed=st.integers(0, 2**32))
def test_a_prior_gives_all_clients_the_same_number_and_no_example_twice(labels, clients, seed):
    parts = partition.dirichlet_prior(
        labels, clients=clients, alpha=0.1, seed=seed, allow_missing_classes=True
    )
    assert {len(part) for part in parts} == {len(labels) // clients}
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)


@pytest.mark.parametrize("name", COVERING)
def test_the_same_seed_gives_the_same_split_and_another_seed_another(name):
    labels = balanced()
    first, again, other = (COVERING[name](labels, 4, seed) for seed in (1, 1, 2))
    assert all(map(np.array_equal, first, again))
    assert not all(map(np.array_equal, first, other))


def test_no_split_moves_the_global_generator():
    before = np.random.get_state()[1].copy()
    for split in COVERING.values():
        split(balanced(), 4, 0)
    assert np.array_equal(before, np.random.get_state()[1])


def test_iid_sizes_differ_by_one_at_most():
    sizes = [len(part) for part in partition.iid(balanced(10, 1), clients=3, seed=0)]
    assert sorted(sizes) == [3, 3, 4]


@pytest.mark.parametrize("seed", range(5))
def test_a_tiny_alpha_still_splits_mnist_over_ten_clients(seed):
    labels = mnist_labels()
    parts = partition.dirichlet_label(labels, clients=10, alpha=0.01, seed=seed)
    assert min(map(len, parts)) >= 10
    assert sum(map(len, parts)) == 60_000


def test_a_huge_alpha_gives_every_client_nearly_its_even_share_of_every_class():
    # Every draw is nearly 1/4, so that each class of 100 is cut near 25, 50 and 75.
    labels = balanced(3, 100)
    parts = partition.dirichlet_label(labels, clients=4, alpha=1e7, seed=0)
    counts = np.array([np.bincount(labels[part], minlength=3) for part in parts])
    assert np.abs(counts - 25).max() <= 1


class Draws:
    """Stands for a generator: the Dirichlet draws are given."""

    def __init__(self, *draws):
        self.draws = iter(draws)

    def dirichlet(self, alphas):
        return np.array(next(self.draws))


def test_a_client_with_its_even_share_gets_nothing_of_the_next_class():
    # Even share 4. Class 0 (4): floor(.75 * 4) = 3, 1. Class 1 (2): floor(.5 * 2) = 1, 1: client 0
    # now holds 4. Class 2 (2): its .9 is zeroed, all goes to client 1.
    rng = Draws([0.75, 0.25], [0.5, 0.5], [0.9, 0.1])
    cuts = partition._dirichlet_cuts(np.array([4, 2, 2]), 2, 1.0, rng)
    assert cuts.tolist() == [[0, 3, 4], [0, 1, 2], [0, 0, 2]]


def test_a_draw_that_lies_with_full_clients_only_is_kept():
    rng = Draws([1.0, 0.0], [1.0, 0.0])
    cuts = partition._dirichlet_cuts(np.array([4, 2]), 2, 1.0, rng)
    assert cuts.tolist() == [[0, 4, 4], [0, 2, 2]]


def test_a_split_that_never_succeeds_says_what_was_tried_and_what_to_change():
    with pytest.raises(DataError, match=r"in 3 tries .* 30 clients 6 .* alpha 0.01; raise alpha"):
        partition.dirichlet_label(balanced(), clients=30, alpha=0.01, seed=0, min_size=6, retries=3)
    with pytest.raises(DataError, match=r"in 2 tries .* beta 0.01; raise beta"):
        partition.quantity_skew(balanced(), clients=20, beta=0.01, seed=0, retries=2)


def test_each_client_holds_exactly_the_asked_number_of_classes():
    labels = balanced()
    parts = partition.classes_per_client(labels, clients=10, classes=3, seed=0)
    assert [len(np.unique(labels[part])) for part in parts] == [3] * 10
    # 30 places for 10 classes: three holders each, 20 examples split as 7, 7, 6.
    assert {len(part) for part in parts} <= {18, 19, 20, 21}
    assert sum(map(len, parts)) == 200


def test_a_class_that_nobody_holds_is_named_unless_that_is_allowed():
    with pytest.raises(DataError, match=r"no client holds classes \d, \d.*allow_missing_classes"):
        partition.classes_per_client(balanced(), clients=4, classes=2, seed=0)
    parts = partition.classes_per_client(
        balanced(), clients=4, classes=2, seed=0, allow_missing_classes=True
    )
    assert sum(map(len, parts)) == 8 * 20


def test_a_rare_class_left_over_by_a_prior_is_named():
    # Three examples, two clients: one example goes to nobody, and with it its class.
    with pytest.raises(DataError, match=r"no client holds class \d; raise alpha or lower clients"):
        partition.dirichlet_prior(np.arange(3), clients=2, alpha=1.0, seed=0)


def test_more_holders_than_examples_of_a_class_are_refused():
    with pytest.raises(DataError, match=r"class \d has 2 examples for 3 clients; lower clients"):
        partition.classes_per_client(balanced(3, 2), clients=3, classes=3, seed=0)


def test_quantity_skew_makes_sizes_unequal_and_keeps_the_minimum():
    parts = partition.quantity_skew(balanced(10, 100), clients=5, beta=0.5, seed=0)
    sizes = [len(part) for part in parts]
    assert min(sizes) >= 10
    assert max(sizes) > 2 * min(sizes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clients": 11}, "11 clients with at least one example each need 11 examples, but .* 10"),
        ({"clients": 0}, "clients must be a whole number above 0, but is 0"),
        ({"clients": 2.5}, "clients must be a whole number above 0, but is 2.5"),
    ],
)
def test_an_impossible_number_of_clients_is_refused(values, message):
    with pytest.raises(DataError, match=message):
        partition.iid(np.arange(10), seed=0, **values)


@pytest.mark.parametrize("alpha", [0, -1, float("nan"), float("inf"), "small", True])
def test_an_alpha_that_is_not_a_positive_number_is_refused(alpha):
    with pytest.raises(DataError, match=r"alpha must be"):
        partition.dirichlet_label(balanced(), clients=2, alpha=alpha, seed=0)


def test_more_examples_asked_for_than_there_are_is_refused_before_any_draw():
    with pytest.raises(DataError, match=r"10 examples each need 300 .* there are 200; lower"):
        partition.dirichlet_label(balanced(), clients=30, alpha=1.0, seed=0)


def test_a_recipe_table_becomes_the_partition_it_describes():
    table = {"kind": "dirichlet", "clients": 10, "alpha": 0.5}
    assert described(table) == Dirichlet(clients=10, alpha=0.5)


@pytest.mark.parametrize("kind", PARTITIONS)
def test_every_kind_can_be_described_and_split(kind):
    values = {"clients": 4, "alpha": 1.0, "beta": 1.0, "classes": 5}
    known = PARTITIONS[kind].__dataclass_fields__
    table = {"kind": kind} | {key: value for key, value in values.items() if key in known}
    parts = described(table).split(balanced(4, 30) if kind == "domains" else balanced(), 0)
    assert len(parts) == 4


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "dirichlett"}, "unknown partition kind 'dirichlett'; did you mean 'dirichlet'"),
        ({"clients": 3}, "unknown partition kind 'None'.*known: classes-per-client"),
        ({"kind": "iid", "client": 3}, "unknown key of partition iid 'client'.*'clients'"),
        ({"kind": "dirichlet", "clients": 3}, "partition dirichlet needs .*clients, alpha"),
    ],
)
def test_a_faulty_partition_table_is_explained(table, message):
    with pytest.raises(DataError, match=message):
        described(table)


def test_clients_share_pool_and_test_and_their_names_sort():
    whole = image_set(balanced())
    made = partitioned(whole, Iid(12), seed=0)
    names = [site.name for site in made.sites]
    assert names == sorted(names)
    assert names[:2] == ["client-00", "client-01"]
    assert all(site.pool is whole.train and site.test is whole.test for site in made.sites)


def test_what_goes_to_nobody_is_noted():
    made = partitioned(image_set(balanced(2, 5)), PARTITIONS["dirichlet-prior"](3, 1.0), seed=0)
    assert made.notes[0].startswith("1 training examples were given to nobody")


def test_a_split_by_domains_needs_domains():
    with pytest.raises(DataError, match=r"single domain.*use another partition: classes-per"):
        partitioned(image_set([0, 1]), Domains(), seed=0)
    made = partitioned(image_set([0, 1, 1], domains=np.array([1, 0, 1])), Domains(), seed=0)
    assert [site.rows.tolist() for site in made.sites] == [[1], [0, 2]]


def test_client_names_need_a_place_for_the_number():
    with pytest.raises(DataError, match=r"client_name must contain \{i\}"):
        partitioned(image_set([0, 1]), Iid(2), seed=0, client_name="hospital")
