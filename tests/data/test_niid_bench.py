"""NIID-Bench's partition: NumPy's older draws in its order."""

from __future__ import annotations

import numpy as np
import pytest

from fedstill.core.errors import DataError
from fedstill.data.partitions import described
from fedstill.data.partitions.niid_bench import NIIDBench


def test_one_class_over_two_clients_is_a_shuffle_cut_at_the_first_share() -> None:
    labels = np.zeros(100, np.int64)
    first, second = NIIDBench(clients=2, alpha=1.0, min_size=1).split(labels, 7)
    np.random.seed(7)
    rows = np.arange(100)
    np.random.shuffle(rows)
    cut = int(np.random.dirichlet([1.0, 1.0])[0] * 100)
    assert sorted(first) == sorted(rows[:cut]) and sorted(second) == sorted(rows[cut:])


def test_the_offset_is_added_to_the_seed() -> None:
    labels = np.arange(400) % 4
    shifted = NIIDBench(clients=3, alpha=0.5, offset=5363).split(labels, 2)
    plain = NIIDBench(clients=3, alpha=0.5).split(labels, 5365)
    assert all(np.array_equal(a, b) for a, b in zip(shifted, plain, strict=True))


def test_every_example_goes_to_one_client_and_everyone_has_enough() -> None:
    labels = np.arange(2000) % 10
    held = NIIDBench(clients=10, alpha=0.1).split(labels, 0)
    assert sorted(np.concatenate(held)) == list(range(2000))
    assert min(map(len, held)) >= 10


def test_whoever_has_just_enough_has_enough() -> None:
    held = NIIDBench(clients=2, alpha=1e6, min_size=100).split(np.zeros(200, np.int64), 0)
    assert [len(rows) for rows in held] == [100, 100]  # nothing else would do


class Draws:
    """Stands for a generator: the Dirichlet draws are given, and shuffles leave the order."""

    def __init__(self, *draws: list[float]):
        self.draws = iter(draws)

    def dirichlet(self, alphas: np.ndarray) -> np.ndarray:
        return np.array(next(self.draws))

    def shuffle(self, rows: np.ndarray) -> None:
        pass


def test_a_draw_that_lies_with_full_clients_only_is_kept() -> None:
    # Even share 3: client 0 has 4 after the first class, so its .5 of the second is zeroed; of the
    # third it is given everything.
    rng = Draws([1.0, 0.0], [0.5, 0.5], [1.0, 0.0])
    rule, labels = NIIDBench(clients=2, alpha=1.0), np.array([0, 0, 0, 0, 1, 2])
    held = rule._drawn(labels, rng)  # type: ignore[arg-type]
    assert [rows.tolist() for rows in held] == [[0, 1, 2, 3, 5], [4]]


def as_dfrd_draws(labels: np.ndarray, clients: int, alpha: float, seed: int) -> tuple[int, list]:
    """How many tries there were and who holds what, when every try ends with shuffled clients."""
    np.random.seed(seed)
    tries, held = 0, [[0]]
    while min(map(len, held)) < 10:
        tries, held = tries + 1, [[] for _ in range(clients)]
        for label in range(labels.max() + 1):
            rows = np.flatnonzero(labels == label)
            np.random.shuffle(rows)
            share = np.random.dirichlet([alpha] * clients)
            share = share * [len(own) < len(labels) / clients for own in held]
            cuts = (np.cumsum(share / share.sum()) * len(rows)).astype(int)[:-1]
            for own, more in zip(held, np.split(rows, cuts), strict=True):
                own += more.tolist()
        for own in held:
            np.random.shuffle(own)
    return tries, held


def test_tries_that_fail_may_draw_orders_too_as_in_dfrds_code() -> None:
    labels, state = np.arange(3000) % 10, np.random.get_state()
    try:
        tries, wanted = as_dfrd_draws(labels, 10, 0.01, 5363)
    finally:
        np.random.set_state(state)
    alike = NIIDBench(clients=10, alpha=0.01, offset=5363, shuffle_each_try=True).split(labels, 0)
    assert tries > 1
    assert [rows.tolist() for rows in alike] == [sorted(rows) for rows in wanted]
    plain = NIIDBench(clients=10, alpha=0.01, offset=5363).split(labels, 0)
    assert [*map(len, plain)] != [*map(len, alike)]


def test_no_global_generator_is_moved() -> None:
    before = np.random.get_state()[1].copy()  # type: ignore[union-attr,index]
    NIIDBench(clients=2, alpha=1.0).split(np.zeros(50, np.int64), 0)
    assert (np.random.get_state()[1] == before).all()  # type: ignore[index]


def test_it_is_known_to_recipes_by_its_kind() -> None:
    table = {"kind": "niid-bench", "clients": 2, "alpha": 0.5, "offset": 1}
    assert described(table) == NIIDBench(2, 0.5, offset=1)


def test_a_draw_that_cannot_be_had_is_explained() -> None:
    with pytest.raises(DataError, match="raise alpha, lower clients or min_size"):
        NIIDBench(clients=10, alpha=0.01, min_size=20, retries=2).split(np.arange(200) % 2, 0)
