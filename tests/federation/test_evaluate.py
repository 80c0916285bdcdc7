"""Scores: whose model on whose test set, and the averages of the papers by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Never

import numpy as np
import pytest
import torch
from torch import Tensor

from fedstill.core import SERVER, Data, Inbox, Method, Node, Place, State, Step, at_clients
from fedstill.data.sites import Collection, Examples, Site
from fedstill.engines.scoring import score
from fedstill.federation.evaluate import evaluate
from fedstill.federation.population import Party, Population
from fedstill.logbook.rows import Rows
from fedstill.logbook.summary import summarise
from fedstill.methods.local import Local
from fedstill.metrics import ALWAYS, chosen
from fedstill.metrics.measured import CHUNK
from fedstill.models import MLP, ConvNet
from worlds import World, engine_for, vectors

MODEL = MLP((1,), 3, hidden=(2,))
# What each client's model says whatever it sees; classes of each client's four test examples.
OPINION = {"a": 0, "b": 1, "c": 2}
TESTS = {"a": [0, 0, 0, 1], "b": [0, 0, 1, 1], "c": [1, 1, 2, 0]}
BOTH = chosen(ALWAYS)
SURE = math.log(2)  # logits log 2, 0, 0: chances 1/2, 1/4, 1/4


@dataclass(frozen=True)
class Stubborn(Method):
    """Every client has one answer to everything."""

    scored: ClassVar[Place] = Place.CLIENTS

    def each_round(self) -> Sequence[Step]:
        return [self.act]

    @at_clients
    def act(self, client: Node[None], inbox: Inbox[Never]) -> None:
        """Do nothing."""

    def predict(self, node: Node[Any], x: Tensor) -> Tensor:
        logits = torch.zeros(len(x), 3)
        logits[:, OPINION.get(node.id, 0)] = SURE
        calls.append((node.id, len(x)))
        return logits


@dataclass(frozen=True)
class Central(Stubborn):
    """The same, but the server's model counts; it says 0."""

    scored: ClassVar[Place] = Place.SERVER


@dataclass(frozen=True)
class Both(Central):
    """The server's model counts, and clients' models beside it."""

    @property
    def scores_own(self) -> bool:
        return True


calls: list[tuple[str, int]] = []


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


def labelled(labels: Sequence[int]) -> Data:
    return Data.of(torch.zeros(len(labels), 1), torch.tensor(labels))


def world() -> World:
    nothing = labelled([0])
    return World({n: Party(nothing, labelled(y), MODEL) for n, y in TESTS.items()}, MODEL)


def scores(method: Method, population: Any, acted: Sequence[str] = "abc", **options: Any) -> Rows:
    engine = engine_for(method, population, **options)
    engine.restore(dict.fromkeys(acted))
    return Rows(list(evaluate(engine, 1)), [], [])


def test_each_model_on_each_test_set_gives_the_averages_of_the_papers():
    rows = scores(Stubborn(), world())
    matrix = rows.matrix(1)
    assert matrix.nodes == matrix.targets == ("a", "b", "c")
    assert matrix.values.tolist() == [[3 / 4, 2 / 4, 1 / 4], [1 / 4, 2 / 4, 2 / 4], [0, 0, 1 / 4]]
    summary = summarise(rows)
    # Averaged global accuracy: the mean over all test sets, its own among them, then over models.
    assert summary["averaged_global_accuracy_by_client"] == pytest.approx(
        {"a": 6 / 12, "b": 5 / 12, "c": 1 / 12}
    )
    assert summary["averaged_global_accuracy"] == pytest.approx(12 / 36)
    # Inter accuracy leaves the own test set out.
    assert summary["inter_accuracy"] == pytest.approx((3 / 8 + 3 / 8 + 0) / 3)
    assert summary["averaged_local_accuracy"] == pytest.approx((3 + 2 + 1) / 12)


def test_own_scores_are_the_diagonal():
    rows = scores(Stubborn(), world(), scores="own")
    own = {row.node: row.value for row in rows.metrics if row.name == "accuracy"}
    assert own == {"a": 3 / 4, "b": 2 / 4, "c": 1 / 4}
    assert all(row.node == row.target for row in rows.metrics)


def test_a_server_is_scored_on_every_test_set_and_averaged_without_weights():
    uneven = world()
    uneven.parties["d"] = Party(labelled([0]), labelled([0] * 100), MODEL)
    for how in ("cross", "own"):
        rows = scores(Central(), uneven, scores=how)
        found = {row.target: row.value for row in rows.metrics if row.name == "accuracy"}
        assert found == {"a": 3 / 4, "b": 2 / 4, "c": 1 / 4, "d": 1}
        assert {row.node for row in rows.metrics} == {SERVER}
        assert summarise(rows)["average_accuracy"] == pytest.approx((3 + 2 + 1 + 4) / 16)


def test_clients_can_be_scored_beside_the_server_each_on_its_own_test_set():
    engine = engine_for(Both(), world())
    engine.restore({"a": State(), "b": None, "c": State()})
    rows = Rows(list(evaluate(engine, 1)), [], [])
    found = {(row.node, row.target) for row in rows.metrics}
    assert found == {(SERVER, t) for t in "abc"} | {("a", "a"), ("c", "c")}
    summary = summarise(rows)
    assert summary["average_accuracy"] == pytest.approx((3 + 2 + 1) / 12)
    assert summary["averaged_local_accuracy"] == pytest.approx((3 + 1) / 8)
    assert summary["averaged_global_accuracy"] is None


def test_loss_is_the_mean_cross_entropy():
    rows = scores(Stubborn(), world(), scores="own")
    loss = {row.node: row.value for row in rows.metrics if row.name == "loss"}
    right, wrong = math.log(2), math.log(4)
    expected = {"a": 3 * right + wrong, "b": 2 * (right + wrong), "c": right + 3 * wrong}
    assert loss == pytest.approx({name: value / 4 for name, value in expected.items()})


def test_only_clients_that_have_acted_are_scored():
    rows = scores(Stubborn(), world(), acted="ac")
    assert {row.node for row in rows.metrics} == {"a", "c"}
    assert {row.target for row in rows.metrics} == {"a", "b", "c"}


def test_a_client_without_test_examples_is_passed_over():
    population = world()
    population.parties["b"] = Party(labelled([0]), Data(), MODEL)
    assert {row.target for row in scores(Central(), population).metrics} == {"a", "c"}


def sites(shared: bool) -> Population:
    """Three clients of one pool, with one test set or with three equal ones."""

    def drawn() -> Examples:
        return Examples(np.zeros((4, 1, 1, 1), np.uint8), np.array([0, 0, 1, 2], np.int64))

    pool, test = drawn(), drawn()
    each = tuple(
        Site(name, pool, np.array([i], np.int64), test if shared else drawn(), (0.5,), (0.5,))
        for i, name in enumerate("abc")
    )
    collection = Collection("three", each, ("0", "1", "2"))
    return Population(collection, MLP)


@pytest.mark.parametrize(("shared", "examples"), [(True, 4), (False, 12)])
def test_a_test_set_that_clients_share_is_passed_once(shared, examples):
    rows = scores(Central(), sites(shared))
    assert calls == [(SERVER, examples)]
    assert [row.value for row in rows.metrics if row.name == "accuracy"] == [2 / 4] * 3


def test_clients_that_normalise_differently_do_not_share_a_pass():
    data = sites(shared=True).data
    assert data is not None
    first = data.sites[0]
    other = Site("b", first.pool, first.rows, first.test, (0.1,), (0.5,))
    collection = Collection("two", (first, other), ("0", "1", "2"))
    scores(Central(), Population(collection, MLP), acted="ab")
    assert calls == [(SERVER, 8)]


def test_two_parts_of_one_pool_are_two_test_sets():
    whole = labelled([0, 0, 1, 1])
    ((pool, rows),) = whole.parts
    population = world()
    for name, part in (("a", rows[:2]), ("b", rows[2:])):
        population.parties[name] = Party(whole, Data((type(whole.parts[0])(pool, part),)), MODEL)
    found = {
        r.target: r.value for r in scores(Central(), population).metrics if r.name == "accuracy"
    }
    assert (found["a"], found["b"]) == (1, 0)


def test_a_large_test_set_is_passed_in_chunks_with_the_same_result():
    labels = [0] * CHUNK + [1] * 10
    node = engine_for(Stubborn(), world()).node("a", 1, "evaluate")
    (found,) = score(Stubborn(), node, [labelled(labels)], BOTH)
    assert found["accuracy"] == CHUNK / (CHUNK + 10)
    assert calls == [("a", CHUNK), ("a", 10)]


def test_small_sets_go_through_a_model_together_with_the_same_results():
    sizes = [3, CHUNK - 4, 2, CHUNK + 1, 5, 1]
    tests = [labelled([0] * (size // 2) + [1] * (size - size // 2)) for size in sizes]
    node = engine_for(Stubborn(), world()).node("a", 1, "evaluate")
    found = score(Stubborn(), node, tests, BOTH)
    assert [count for _, count in calls] == [CHUNK - 1, 2, CHUNK, 7]
    assert [each["accuracy"] for each in found] == [size // 2 / size for size in sizes]
    for size, each in zip(sizes, found, strict=True):
        expected = math.log(4) - each["accuracy"] * math.log(2)
        assert each["loss"] == pytest.approx(expected, rel=1e-6), size
    assert score(Stubborn(), node, [], BOTH) == []


def test_sets_stay_apart_where_answers_depend_on_the_batch():
    net = ConvNet((1, 4, 4), 3, depth=1, width=2, norm="static")
    rng = torch.Generator().manual_seed(0)
    tests = [
        Data.of(torch.randn(6, 1, 4, 4, generator=rng) + i, torch.arange(6) % 3) for i in (0, 5)
    ]
    population = World({"a": Party(tests[0], tests[0], net)}, net)
    node = engine_for(Local(), population).node("a", 1, "evaluate")
    together, (first,), (second,) = (
        score(Local(), node, sets, BOTH) for sets in (tests, tests[:1], tests[1:])
    )
    assert together == [first, second]


def test_scoring_changes_no_memory_and_draws_nothing():
    population = vectors()
    before = torch.get_rng_state()
    rows = scores(Stubborn(), population, acted=population.clients)
    assert len(rows.metrics) == 4 * 4 * 2
    assert torch.equal(before, torch.get_rng_state())
