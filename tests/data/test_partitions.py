"""Splits cover what they promise, are the same for the same seed, and refuse the impossible."""

import hashlib
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.made_up import image_set
from fedstill.core.errors import DataError
from fedstill.data import partitioned
from fedstill.data.partitions import (
    PARTITIONS,
    ClassesPerClient,
    Dirichlet,
    DirichletPrior,
    Domains,
    FromFile,
    Iid,
    Partition,
    QuantitySkew,
    described,
)
from fedstill.data.partitions.dirichlet import dirichlet_cuts
from fedstill.data.partitions.partition import generator

MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
few = settings(max_examples=40, derandomize=True, deadline=None, database=None)
label_vectors = st.lists(st.integers(0, 4), min_size=60, max_size=200).map(
    lambda labels: np.array(labels, np.int64)
)
COVERING = {
    "iid": lambda labels, clients: Iid(clients),
    "dirichlet": lambda labels, clients: Dirichlet(clients, alpha=0.5, min_size=1),
    "quantity": lambda labels, clients: QuantitySkew(clients, beta=0.5, min_size=1),
    "classes": lambda labels, clients: ClassesPerClient(clients, len(np.unique(labels))),
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
        parts = COVERING[name](labels, clients).split(labels, seed)
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
    parts = DirichletPrior(clients, 0.1, allow_missing_classes=True).split(labels, seed)
    assert {len(part) for part in parts} == {len(labels) // clients}
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)


@pytest.mark.parametrize("name", COVERING)
def test_the_same_seed_gives_the_same_split_and_another_seed_another(name):
    labels = balanced()
    first, again, other = (COVERING[name](labels, 4).split(labels, seed) for seed in (1, 1, 2))
    assert all(map(np.array_equal, first, again))
    assert not all(map(np.array_equal, first, other))


def test_no_split_moves_the_global_generator():
    before = np.random.get_state()[1].copy()
    for made in COVERING.values():
        made(balanced(), 4).split(balanced(), 0)
    assert np.array_equal(before, np.random.get_state()[1])


def test_iid_sizes_differ_by_one_at_most():
    sizes = [len(part) for part in Iid(3).split(balanced(10, 1), 0)]
    assert sorted(sizes) == [3, 3, 4]


@pytest.mark.parametrize("seed", range(5))
def test_a_tiny_alpha_still_splits_mnist_over_ten_clients(seed):
    labels = mnist_labels()
    parts = Dirichlet(10, 0.01).split(labels, seed)
    assert min(map(len, parts)) >= 10
    assert sum(map(len, parts)) == 60_000


def test_a_huge_alpha_gives_every_client_nearly_its_even_share_of_every_class():
    # Every draw is nearly 1/4, so that each class of 100 is cut near 25, 50 and 75.
    labels = balanced(3, 100)
    parts = Dirichlet(4, 1e7).split(labels, 0)
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
    cuts = dirichlet_cuts(np.array([4, 2, 2]), 2, 1.0, rng)
    assert cuts.tolist() == [[0, 3, 4], [0, 1, 2], [0, 0, 2]]


def test_a_draw_that_lies_with_full_clients_only_is_kept():
    rng = Draws([1.0, 0.0], [1.0, 0.0])
    cuts = dirichlet_cuts(np.array([4, 2]), 2, 1.0, rng)
    assert cuts.tolist() == [[0, 4, 4], [0, 2, 2]]


def test_a_split_that_never_succeeds_says_what_was_tried_and_what_to_change():
    with pytest.raises(DataError, match=r"in 3 tries .* 30 clients 6 .* alpha 0.01; raise alpha"):
        Dirichlet(30, 0.01, min_size=6, retries=3).split(balanced(), 0)
    with pytest.raises(DataError, match=r"in 2 tries .* beta 0.01; raise beta"):
        QuantitySkew(20, 0.01, retries=2).split(balanced(), 0)


def test_each_client_holds_exactly_the_asked_number_of_classes():
    labels = balanced()
    parts = ClassesPerClient(10, 3).split(labels, 0)
    assert [len(np.unique(labels[part])) for part in parts] == [3] * 10
    # 30 places for 10 classes: three holders each, 20 examples split as 7, 7, 6.
    assert {len(part) for part in parts} <= {18, 19, 20, 21}
    assert sum(map(len, parts)) == 200


def test_a_class_that_nobody_holds_is_named_unless_that_is_allowed():
    with pytest.raises(DataError, match=r"no client holds classes \d, \d.*allow_missing_classes"):
        ClassesPerClient(4, 2).split(balanced(), 0)
    parts = ClassesPerClient(4, 2, allow_missing_classes=True).split(balanced(), 0)
    assert sum(map(len, parts)) == 8 * 20


def test_a_rare_class_left_over_by_a_prior_is_named():
    # Three examples, two clients: one example goes to nobody, and with it its class.
    with pytest.raises(DataError, match=r"no client holds class \d; raise alpha or lower clients"):
        DirichletPrior(2, 1.0).split(np.arange(3), 0)


def test_more_holders_than_examples_of_a_class_are_refused():
    with pytest.raises(DataError, match=r"class \d has 2 examples for 3 clients; lower clients"):
        ClassesPerClient(3, 3).split(balanced(3, 2), 0)


def test_more_classes_for_each_client_than_there_are_is_refused():
    with pytest.raises(DataError, match=r"classes must lie in 1..3 \(those present\), but is 4"):
        ClassesPerClient(2, 4).split(balanced(3, 10), 0)


def test_quantity_skew_makes_sizes_unequal_and_keeps_the_minimum():
    parts = QuantitySkew(5, 0.5).split(balanced(10, 100), 0)
    sizes = [len(part) for part in parts]
    assert min(sizes) >= 10
    assert max(sizes) > 2 * min(sizes)
    even = QuantitySkew(2, 1e6, min_size=100).split(balanced(), 0)  # nothing else would do
    assert [len(part) for part in even] == [100, 100]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clients": 11}, "11 clients with at least one example each need 11 examples, but .* 10"),
        ({"clients": 0}, "Iid: clients = 0: must be at least 1"),
        ({"clients": 2.5}, "Iid: clients = 2.5: must be a whole number"),
    ],
)
def test_an_impossible_number_of_clients_is_refused(values, message):
    with pytest.raises(DataError, match=message):
        Iid(**values).split(np.arange(10), 0)


@pytest.mark.parametrize("alpha", [0, -1, float("nan"), float("inf"), "small", True])
def test_an_alpha_that_is_not_a_positive_number_is_refused(alpha):
    with pytest.raises(DataError, match=r"Dirichlet: alpha = .*: must be"):
        Dirichlet(2, alpha)


def test_more_examples_asked_for_than_there_are_is_refused_before_any_draw():
    for rule in (Dirichlet(30, 1.0), QuantitySkew(30, 1.0)):
        with pytest.raises(DataError, match=r"10 examples each need 300 .* there are 200; lower"):
            rule.split(balanced(), 0)


def test_a_recipe_table_becomes_the_partition_it_describes():
    table = {"kind": "dirichlet", "clients": 10, "alpha": 0.5}
    assert described(table) == Dirichlet(clients=10, alpha=0.5)


@pytest.mark.parametrize("kind", sorted(set(PARTITIONS) - {"file"}))
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
        ({"kind": "dirichlet", "clients": 3}, "dirichlet needs more than it was given: alpha$"),
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
    many = [[site.name for site in partitioned(whole, Iid(n), seed=0).sites] for n in (100, 101)]
    assert (many[0][-1], many[1][-1]) == ("client-99", "client-100")
    assert many[1][0] == "client-000"
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


LABELS = {
    "many": np.array([(i * i + 3 * i // 7) % 10 for i in range(1000)], np.int64),
    "few": np.array([(i * i + 3 * i // 7) % 4 for i in range(97)], np.int64),
}
RECORDED = [  # with seed 5: the first 16 digits of the sha256 of every client's size and rows
    (Iid(clients=7), "many", "be47af67f4ae5b29"),
    (Iid(clients=7), "few", "f5b5f140bccf5d07"),
    (Dirichlet(clients=10, alpha=0.1), "many", "47731063beefdba9"),
    (Dirichlet(clients=5, alpha=0.5, min_size=3), "many", "e75c80ae3aca26ca"),
    (Dirichlet(clients=5, alpha=0.5, min_size=3), "few", "631424f97fe5ca47"),
    (DirichletPrior(clients=6, alpha=0.3), "many", "a17f7cc4d0e6252d"),
    (DirichletPrior(clients=6, alpha=0.3), "few", "1f269127a096fdce"),
    (DirichletPrior(clients=5, alpha=0.05, allow_missing_classes=True), "many", "726b2d5673372321"),
    (DirichletPrior(clients=5, alpha=0.05, allow_missing_classes=True), "few", "aa2b4aae3f9b201c"),
    (ClassesPerClient(clients=8, classes=3), "many", "8a34c5c02036c8b3"),
    (ClassesPerClient(clients=8, classes=3), "few", "6e36906836ba1dec"),
    (
        ClassesPerClient(clients=2, classes=2, allow_missing_classes=True),
        "many",
        "23ecb033b7b73e81",
    ),
    (ClassesPerClient(clients=2, classes=2, allow_missing_classes=True), "few", "4c4d55416c1a074c"),
    (QuantitySkew(clients=6, beta=0.5, min_size=2), "many", "f31a12017bc77eaf"),
    (QuantitySkew(clients=6, beta=0.5, min_size=2), "few", "ff49829b643264d0"),
    (Domains(), "many", "8284b8fbcb60a35a"),
    (Domains(), "few", "cca8e49d33e1ba06"),
]


@pytest.mark.parametrize(("partition", "labels", "recorded"), RECORDED)
def test_splits_stay_what_they_were(partition, labels, recorded):
    found = hashlib.sha256()
    for rows in partition.split(LABELS[labels], 5):
        found.update(len(rows).to_bytes(8, "little") + rows.astype("<i8").tobytes())
    assert found.hexdigest()[:16] == recorded


def test_a_dirichlet_split_is_drawn_again_until_even_the_smallest_client_has_enough():
    # Of 200 first draws some leave a client with 11 of 48 examples; none may be taken for 12.
    labels = balanced(4, 12)
    firsts = [
        np.diff(dirichlet_cuts(np.bincount(labels), 3, 2.0, generator(seed)), axis=1).sum(0).min()
        for seed in range(200)
    ]
    assert 11 in firsts
    split = Dirichlet(3, 2.0, min_size=12)
    assert min(len(rows) for seed in range(200) for rows in split.split(labels, seed)) == 12


@dataclass(frozen=True)
class Halves(Partition):
    """The first half of the examples for one client, the second for the other."""

    swapped: bool = False

    def split(self, labels, seed):
        parts = np.array_split(np.arange(len(labels)), 2)
        return parts[::-1] if self.swapped else parts


def test_a_partition_of_ones_own_is_a_class_with_fields_and_a_split():
    made = partitioned(image_set([0, 1, 0, 1]), Halves(swapped=True), seed=0)
    assert [site.rows.tolist() for site in made.sites] == [[2, 3], [0, 1]]
    with pytest.raises(DataError, match="Halves: swapped = 3: must be true or false"):
        Halves(swapped=3)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 1], [1, 2]], r"Careless: a training example .* row 1 stands 2 times, with client-00"),
        ([[0], [4]], r"client 'client-01': rows must lie in 0\.\.3 .* from 4 to 4"),
        ([[0], []], r"client 'client-01' has no rows"),
        ([[0], [1.5]], r"client 'client-01' must have a list of whole numbers.*\[1.5\]"),
        ([], r"Careless names no client"),
    ],
)
def test_the_mistakes_of_a_partition_of_ones_own_are_named(rows, message):
    class Careless(Partition):
        def split(self, labels, seed):
            return rows

    with pytest.raises(DataError, match=message):
        partitioned(image_set([0, 1, 0, 1]), Careless(), seed=0)


FILES = {
    "split.json": '{"ward b": [2, 0], "ward a": [1, 3]}',
    "split.csv": "row,client\n2,ward b\n1,ward a\n0,ward b\n3,ward a\n",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_which_client_has_which_rows(name, tmp_path):
    (tmp_path / name).write_text(FILES[name])
    partition = described({"kind": "file", "path": str(tmp_path / name)})
    made = partitioned(image_set([0, 1, 0, 1]), partition, seed=0)
    rows = {site.name: site.rows.tolist() for site in made.sites}
    assert rows == {"ward b": [0, 2], "ward a": [1, 3]}
    assert not made.notes


def test_rows_that_a_file_leaves_out_are_noted(tmp_path):
    (tmp_path / "split.json").write_text('{"a": [0], "b": [3]}')
    made = partitioned(image_set([0, 1, 0, 1]), FromFile(str(tmp_path / "split.json")), seed=0)
    assert made.notes[0].startswith("2 training examples were given to nobody by FromFile")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gone.json", None, r"gone.json cannot be read"),
        ("split.txt", "", r"split.txt is no file of a partition; use a JSON file"),
        ("split.json", "{", r"split.json is not a JSON file"),
        ("split.json", "[1, 2]", r"split.json must hold a table of clients, but holds '\[1, 2\]'"),
        ("split.json", '{"a": [0], "a": [1]}', r"it names a twice"),
        ("split.json", '{"a": 3}', r"client 'a' must have a list of whole numbers"),
        ("split.json", '{"a": [[0], [1, 2]]}', r"client 'a' must have a list of rows, but it is r"),
        ("split.json", '{"a": [true]}', r"client 'a' must have a list of whole numbers"),
        ("split.json", '{"a": []}', r"client 'a' has no rows"),
        ("split.json", "{}", r"split.json names no client"),
        ("split.json", '{"a": [0, 9]}', r"client 'a': rows must lie in 0..3"),
        ("split.json", '{"a": [0], "b": [0]}', r"row 0 stands 2 times, with a, b"),
        (
            "split.csv",
            "client,rows\na,1",
            r"must begin with a line .* but begins with 'client,rows",
        ),
        ("split.csv", "client,row\na,1\nb,-2", r"line 3: a client and a whole .* 'b' and '-2'"),
        ("split.csv", "client,row\na", r"line 2: .* 'a' and None"),
        ("split.csv", "", r"split.csv must begin with a line"),
    ],
)
def test_a_faulty_file_is_refused_by_name(name, text, message, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        partitioned(image_set([0, 1, 0, 1]), FromFile(str(tmp_path / name)), seed=0)
