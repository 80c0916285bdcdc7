"""FedLGD: its limits, who is told what and when, and the two refinements by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import Batch, Data, Inbox, Weights, algebra
from fedstill.core.node import SERVER
from fedstill.federation.sampling import Scripted
from fedstill.logbook.writer import MemoryLog
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedlgd import Down, FedLGD, Global, Own
from fedstill.methods.fedprox import FedProx
from fedstill.methods.scaffold import Scaffold
from fedstill.methods.virtual import Statistics, Virtual
from fedstill.parts import pixels
from fedstill.parts.losses import mmd, supervised_contrastive
from fedstill.parts.matching import grad, gradient_distance, loss_on
from fedstill.parts.synthetic_sets import class_statistics, sorted_by_class
from worlds import CLASSES, World, engine_for, pictures, played

WARM: dict[str, Any] = {"per_class": 3, "warm_up_steps": 2, "real_batch": 8}
SMALL: dict[str, Any] = {
    **WARM, "global_per_class": 2, "local_steps": 2, "global_steps": 2, "lr": 0.1, "batch_size": 4,
}  # fmt: skip
SIZE = CLASSES * 2 * 64  # numbers of the global set


def weights_of(engine: Any) -> Weights:
    weights: Weights = engine.states[SERVER].weights
    return weights


def assert_equal(left: Weights, right: Weights) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def distilled(world: World, **values: Any) -> World:
    """The same people, each holding what the warm-up made of its examples."""
    engine, _ = played(Virtual(**{**WARM, **values}), world, rounds=0)
    parties = {
        name: replace(party, data=Data.of(*engine.states[name].as_set().flat()))
        for name, party in world.parties.items()
    }
    return World(parties, world.server_model)


class Spied(FedLGD):
    """Writes down what its clients train with and what the server tells whom."""

    def objective(self, model: Any, weights: Weights, batch: Any, **given: Any) -> Tensor:  # type: ignore[override]
        LEANT.append(len(given["anchors"].x))
        return super().objective(model, weights, batch, **given)


LEANT: list[int] = []


# Limits


def test_without_refinement_and_weight_it_is_fedavg_on_virtual_data() -> None:
    world = pictures()
    ours, _ = played(FedLGD(**SMALL, weight=0.0, refine_every=0), world, rounds=3)
    theirs, _ = played(
        FedAvg(lr=0.1, batch_size=4, weighting="uniform"), distilled(world), rounds=3
    )
    assert_equal(weights_of(ours), weights_of(theirs))


def test_without_refinement_the_weight_does_not_matter() -> None:
    heavy, _ = played(FedLGD(**SMALL, weight=10.0, refine_every=0), pictures(), rounds=2)
    light, _ = played(FedLGD(**SMALL, weight=0.0, refine_every=0), pictures(), rounds=2)
    assert_equal(weights_of(heavy), weights_of(light))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"local_update": "fedprox", "mu": 0.5}, FedProx(mu=0.5, weighting="uniform", lr=0.1)),
        ({"local_update": "scaffold"}, Scaffold(lr=0.1)),
    ],
    ids=["fedprox", "scaffold"],
)
def test_other_local_updates_without_refinement_are_those_methods(ours: Any, theirs: Any) -> None:
    world = pictures()
    left, _ = played(FedLGD(**SMALL, refine_every=0, **ours), world, rounds=3)
    right, _ = played(replace(theirs, batch_size=4), distilled(world), rounds=3)
    for name, reached in weights_of(left).items():
        assert torch.allclose(reached, weights_of(right)[name], atol=1e-6), name


def test_fedprox_without_its_term_is_plain() -> None:
    plain, _ = played(FedLGD(**SMALL, refine_every=2), pictures(), rounds=3)
    prox, _ = played(
        FedLGD(**SMALL, refine_every=2, local_update="fedprox", mu=0.0), pictures(), rounds=3
    )
    assert_equal(weights_of(plain), weights_of(prox))


def test_the_first_round_of_scaffold_is_plain_and_the_second_is_not() -> None:
    values: dict[str, Any] = {**SMALL, "refine_every": 2}
    made = {
        (kind, rounds): weights_of(
            played(FedLGD(**values, local_update=kind), pictures(), rounds=rounds)[0]
        )
        for kind in ("plain", "scaffold")
        for rounds in (1, 2)
    }
    assert_equal(made["plain", 1], made["scaffold", 1])
    assert not torch.equal(made["plain", 2]["head.bias"], made["scaffold", 2]["head.bias"])


def test_controls_of_all_clients_sum_to_the_common_one() -> None:
    engine, _ = played(FedLGD(**SMALL, local_update="scaffold"), pictures(), rounds=3)
    common = engine.states[SERVER].control
    own = [engine.states[f"c{i}"].control for i in range(3)]
    for name, control in common.items():
        assert torch.allclose(sum(c[name] for c in own) / 3, control, atol=1e-4), name


def test_its_warm_up_is_that_of_virtual_with_the_same_values() -> None:
    world = pictures()
    ours, _ = played(FedLGD(**SMALL), world, rounds=0)
    theirs, _ = played(Virtual(**WARM), world, rounds=0)
    for client in world.clients:
        for one, other in zip(
            ours.states[client].as_set(), theirs.states[client].as_set(), strict=True
        ):
            assert torch.equal(one, other)
    assert FedLGD().warming == Virtual().warming
    assert FedLGD().per_class == Virtual().per_class and FedLGD().start == Virtual().start


# When


def test_rounds_of_refinement_are_every_fifth_from_the_first_to_the_fifty_first() -> None:
    method = FedLGD()
    assert [t for t in range(100) if method.refines(t + 1)] == list(range(0, 51, 5))
    never = FedLGD(refine_every=0)
    assert not any(never.refines(round) for round in range(1, 100))


def sets_by_round(method: FedLGD, world: World, rounds: int) -> list[tuple[Tensor, Tensor]]:
    """The first client's own set and the server's after each round, beginning before the first."""
    found = []
    for last in range(rounds + 1):
        engine, _ = played(method, world, rounds=last)
        server = engine.node(SERVER, last, "look").state
        found.append((engine.states["c1"].images, server.anchors))
    return found


def test_the_global_set_changes_in_rounds_1_and_6_and_own_sets_in_round_6_alone() -> None:
    sets = sets_by_round(FedLGD(**SMALL), pictures(), 7)
    own = [not torch.equal(sets[r][0], sets[r - 1][0]) for r in range(1, 8)]
    common = [not torch.equal(sets[r][1], sets[r - 1][1]) for r in range(1, 8)]
    assert own == [r == 6 for r in range(1, 8)]
    assert common == [r in (1, 6) for r in range(1, 8)]


def test_own_sets_are_refined_from_the_second_round_on_where_every_round_refines() -> None:
    sets = sets_by_round(FedLGD(**{**SMALL, "refine_every": 1}), pictures(), 2)
    assert [not torch.equal(sets[r][0], sets[r - 1][0]) for r in (1, 2)] == [False, True]


def test_clients_lean_on_the_global_set_only_in_rounds_without_refinement() -> None:
    LEANT.clear()
    # Three clients, 6 + 9 + 9 own images and 6 common ones each, in batches of four.
    each_round = sum(-(-(own + 6) // 4) for own in (6, 9, 9))
    played(Spied(**SMALL, refine_every=2), pictures(), rounds=4)
    expected = [0] * each_round + [6] * each_round
    assert expected * 2 == LEANT


@pytest.mark.parametrize("values", [{"weight": 0.0}, {"regulariser": "none"}])
def test_without_a_regulariser_nobody_leans(values: dict[str, Any]) -> None:
    LEANT.clear()
    played(Spied(**SMALL, refine_every=2, **values), pictures(), rounds=2)
    assert not any(LEANT)


# Who is told what


def anchors_sent(log: MemoryLog) -> dict[int, tuple[int, int]]:
    """For each round the numbers of the global set that were said, and how many heard them."""
    rows = [row for row in log.messages if row.field == "anchors" and row.floats]
    assert len({row.round for row in rows}) == len(rows)  # said once for all hearers
    return {row.round: (row.floats, row.hearers) for row in rows}


def test_the_global_set_is_sent_once_after_each_change_to_everybody_at_once() -> None:
    _, log = played(FedLGD(**SMALL, refine_every=3, refine_until=3), pictures(), rounds=6)
    # At the start, and after the refinements of rounds 1 and 4.
    assert anchors_sent(log) == {1: (SIZE, 3), 2: (SIZE, 3), 5: (SIZE, 3)}


def test_a_client_that_slept_when_the_global_set_changed_gets_it_later() -> None:
    method = FedLGD(**SMALL, refine_every=3, refine_until=0)  # one change, after round 1
    engine, log = played(method, pictures(), rounds=4, sampling=Scripted({2: ["c1"], 3: ["c1"]}))
    assert anchors_sent(log) == {1: (SIZE, 3), 2: (SIZE, 2), 4: (SIZE, 1)}
    latest = engine.states[SERVER].anchors
    assert all(torch.equal(engine.states[f"c{i}"].anchors, latest) for i in range(3))


def test_a_client_that_did_not_answer_is_sent_the_global_set_again() -> None:
    def gone(_: Any, step: str, round: int, node: str) -> str | None:
        return "no answer" if (step, round, node) == ("update", 2, "c2") else None

    method = FedLGD(**SMALL, refine_every=3, refine_until=0)
    _, log = played(method, pictures(), rounds=3, absences=gone)
    assert anchors_sent(log)[3] == (SIZE, 1)


def test_without_refinement_the_messages_are_those_of_fedavg() -> None:
    world = pictures()
    script = Scripted({1: ["c1"], 2: ["c0"]})
    _, log = played(FedLGD(**SMALL, refine_every=0), world, rounds=3, sampling=script)
    _, other = played(FedAvg(), world, rounds=3, sampling=script)

    def floats(log: MemoryLog) -> list[tuple[int, str, int]]:
        rows = [row for row in log.messages if row.field == "weights"]
        return [(row.round, row.sender, row.floats) for row in rows]

    assert floats(log) == floats(other)
    assert not any(row.floats for row in log.messages if row.field != "weights")


def test_virtual_sets_never_leave_their_client() -> None:
    _, log = played(FedLGD(**SMALL), pictures(), rounds=2)
    assert {row.field for row in log.messages if row.direction == "up"} == {"weights", "control"}


# Local training


def heard(client: str, world: World, method: FedLGD, round: int, own: Own, down: Down) -> Any:
    """The outcome of one client's round, and what it remembers."""
    engine = engine_for(method, world)
    engine.restore({client: own})
    made = engine.play(method.update, round, {client: Inbox({SERVER: down})})[client]
    return made.message, engine.states[client]


def surroundings(method: FedLGD, world: World, client: str) -> tuple[Own, Down, Global]:
    """A client's memory after the warm-up, and what the server tells it first."""
    engine, _ = played(method, world, rounds=0)
    server: Global = engine.node(SERVER, 0, "look").state
    return engine.states[client], Down(server.weights, server.anchors, server.control), server


@pytest.mark.parametrize("regulariser", ["contrastive", "mmd"])
def test_one_step_goes_down_the_loss_on_both_sets_and_the_regulariser(regulariser: Any) -> None:
    world = pictures()
    method = FedLGD(**{**SMALL, "batch_size": 1000}, weight=0.5, regulariser=regulariser)
    own, down, server = surroundings(method, world, "c1")
    model, start = world.server_model, down.weights
    x, y = own.as_set().flat()
    x, y = torch.cat([x, server.anchors]), torch.cat([y, torch.tensor([0, 0, 1, 1, 2, 2])])

    def loss(weights: Weights) -> Tensor:
        features = model.features(weights, x)
        lean = model.features(weights, server.anchors)  # not cut off: anchors pull both ways
        if regulariser == "mmd":
            term = mmd(features, lean)
        else:
            labels = torch.cat([y, torch.tensor([0, 0, 1, 1, 2, 2])])
            term = supervised_contrastive(torch.cat([features, lean]), labels)
        return cross_entropy(model(weights, x), y) + 0.5 * term

    grads = torch.func.grad(loss)(start)
    up, _ = heard("c1", world, method, 2, own, down)
    for name, reached in up.weights.items():
        assert torch.allclose(reached, start[name] - 0.1 * grads[name], atol=1e-4), name
    plain, _ = heard("c1", world, method, 1, own, down)  # a round of refinement
    grads = torch.func.grad(lambda w: cross_entropy(model(w, x), y))(start)
    for name, reached in plain.weights.items():
        assert torch.allclose(reached, start[name] - 0.1 * grads[name], atol=1e-5), name


def test_each_local_refinement_is_fresh_matching_under_the_weights_that_were_sent() -> None:
    world = pictures()
    values = {**SMALL, "local_steps": 1, "real_batch": 1000, "augmentation": "none"}
    method = FedLGD(**values)
    own, down, _ = surroundings(method, world, "c0")
    model, (x, y) = world.server_model, world.party("c0").data.all()
    classes = own.classes.tolist()

    def apart(images: Tensor) -> Tensor:
        gaps = [
            model.features(down.weights, images[row]).mean(0)
            - model.features(down.weights, x[y == c]).mean(0)
            for row, c in enumerate(classes)
        ]
        return torch.stack([gap.square().sum() for gap in gaps]).sum()

    assert own.classes.tolist() == [0, 1]  # the class it lacks has no images
    for round in (6, 11):  # with rate 1, and no momentum left over from round 6
        expected = own.images - torch.func.grad(apart)(own.images)
        _, own = heard("c0", world, method, round, own, down)
        assert torch.allclose(own.images, expected, atol=1e-5)


# The global set


def test_the_global_set_moves_so_that_its_gradient_points_along_the_common_change() -> None:
    world = pictures()
    method = FedLGD(**{**SMALL, "global_steps": 1})
    engine, _ = played(method, world, rounds=1)
    before: Global = played(method, world, rounds=0)[0].node(SERVER, 0, "look").state
    after: Global = engine.states[SERVER]
    change = algebra.sub(before.weights, after.weights)
    labels = torch.tensor([0, 0, 1, 1, 2, 2])

    def apart(anchors: Tensor) -> Tensor:
        own = grad(loss_on(world.server_model, Batch(anchors, labels)), before.weights)
        return gradient_distance(own, change)  # its length does not matter

    expected = before.anchors - torch.func.grad(apart)(before.anchors)
    assert torch.allclose(after.anchors, expected, atol=2e-3)
    assert after.version == before.version + 1


def test_many_steps_bring_the_gradient_of_the_global_set_nearer() -> None:
    world = pictures()
    method = FedLGD(**{**SMALL, "global_steps": 40})
    before: Global = played(method, world, rounds=0)[0].node(SERVER, 0, "look").state
    after: Global = played(method, world, rounds=1)[0].states[SERVER]
    change = algebra.sub(before.weights, after.weights)

    def apart(anchors: Tensor) -> float:
        examples = sorted_by_class(anchors, CLASSES)
        own = grad(loss_on(world.server_model, examples), before.weights)
        return float(gradient_distance(own, change))

    assert apart(after.anchors) < 0.8 * apart(before.anchors)


def test_labels_of_the_global_set_are_sorted_by_class() -> None:
    labelled = sorted_by_class(torch.zeros(6, 1, 8, 8), 3)
    assert labelled.y.tolist() == [0, 0, 1, 1, 2, 2]
    assert sorted_by_class(torch.zeros(0, 1, 8, 8), 3).y.tolist() == []


def test_the_global_set_starts_from_noise_that_knows_no_data() -> None:
    anchors = surroundings(FedLGD(**{**SMALL, "global_per_class": 50}), pictures(), "c0")[2].anchors
    assert anchors.shape == (150, 1, 8, 8)
    assert float(anchors.mean()) == pytest.approx(0, abs=0.05)
    assert float(anchors.std()) == pytest.approx(1, abs=0.05)


AVERAGED: dict[str, Any] = {**SMALL, "global_start": "averaged_statistics"}


def collected(
    method: FedLGD, world: World, sent: Mapping[str, Statistics]
) -> tuple[Global, Global]:
    """The server's memory before and after it collects."""
    engine = engine_for(method, world)
    before = engine.node(SERVER, 0, "look").state
    engine.play(method.collect, 0, {SERVER: Inbox(sent)})
    after = engine.states[SERVER]
    assert isinstance(after, Global)
    return before, after


def test_statistics_are_averaged_over_the_holders_of_a_class() -> None:
    sent = {
        "c0": Statistics(torch.tensor([[1.0], [5.0]]), torch.tensor([[2.0], [0.5]]),
                         torch.tensor([0, 1])),
        "c1": Statistics(torch.tensor([[3.0]]), torch.tensor([[4.0]]), torch.tensor([0])),
    }  # fmt: skip
    before, after = collected(FedLGD(**AVERAGED), pictures(), sent)
    noise = before.anchors
    assert torch.allclose(after.anchors[:2], noise[:2] * 3 + 2)  # the means of 2, 4 and of 1, 3
    assert torch.allclose(after.anchors[2:4], noise[2:4] * 0.5 + 5)
    assert torch.equal(after.anchors[4:], noise[4:])  # nobody holds the third class


def test_a_client_sends_a_mean_and_a_deviation_for_each_class_it_holds() -> None:
    world = pictures()
    _, log = played(FedLGD(**AVERAGED), world, rounds=0)
    sent = [row for row in log.messages if row.step == "describe"]
    by_client = {c: sum(r.floats for r in sent if r.sender == c) for c in world.clients}
    assert by_client == {"c0": 2 * 2, "c1": 2 * 3, "c2": 2 * 3}  # one channel
    engine = engine_for(FedLGD(**AVERAGED), world)
    engine.play(FedLGD(**AVERAGED).warm_up, 0, {"c0": Inbox()})
    told = engine.play(FedLGD(**AVERAGED).describe, 0, {"c0": Inbox()})["c0"].message
    x, y = world.party("c0").data.all()
    assert isinstance(told, Statistics)
    assert told.classes.tolist() == [0, 1]
    for row in range(2):
        assert float(told.mean[row]) == pytest.approx(float(x[y == row].mean()), abs=1e-5)
        assert float(told.std[row]) == pytest.approx(float(x[y == row].std(unbiased=False)), 1e-4)


def test_statistics_are_not_asked_for_unless_they_are_used() -> None:
    assert [s.name for s in FedLGD().before()] == ["warm_up"]
    assert [s.name for s in FedLGD(**AVERAGED, refine_every=0).before()] == ["warm_up"]
    assert [s.name for s in FedLGD(**AVERAGED).before()] == ["warm_up", "describe", "collect"]
    engine, _ = played(FedLGD(**AVERAGED), pictures(), rounds=2)
    assert torch.isfinite(engine.states[SERVER].anchors).all()


# Values


def test_the_defaults_are_those_of_the_code_for_digits() -> None:
    method = FedLGD()
    assert (method.per_class, method.global_per_class, method.warm_up_steps) == (10, 10, 10_000)
    assert (method.local_steps, method.global_steps) == (100, 500)
    assert (method.lr, method.epochs, method.batch_size) == (0.01, 1, 32)
    assert (method.weight, method.temperature) == (10, 0.07)
    assert (method.pixel_lr, method.pixel_momentum, method.real_batch) == (1, 0.5, 256)
    retina = FedLGD(**FedLGD.presets["retina"])
    assert (retina.weight, retina.lr) == (0.1, 0.001)


def test_virtual_sets_of_eight_bits_have_256_levels_between_black_and_white() -> None:
    world = pictures()
    values = {"warm_up_steps": 2, "per_class": 2, "real_batch": 8}
    made = {}
    for bits in (False, True):
        method = FedLGD(**values, eight_bits=bits, local_steps=1, global_steps=1)
        engine, _ = played(method, world, 1)
        made[bits] = pixels.to_pixels(world.party("c1").data, engine.states["c1"].images) * 255
    assert torch.allclose(made[True], made[True].round(), atol=1e-3)
    assert float(made[True].min()) >= -1e-3 and float(made[True].max()) <= 255 + 1e-3
    assert torch.allclose(made[False].clamp(0, 255), made[True], atol=0.501)
    assert not torch.allclose(made[False], made[False].round(), atol=1e-3)


def test_the_released_start_reaches_the_servers_set_too() -> None:
    world, method = pictures(), FedLGD(**FedLGD.presets["released"])
    client = engine_for(method, world).node("c2", 0, "describe")
    said = method.describe(client, Inbox({}))
    counts = world.party("c2").data.counts(3)
    mean, _ = class_statistics(world.party("c2").data, [0, 1, 2], 3)
    assert torch.allclose(said.mean, mean * (counts / counts.sum()).unsqueeze(1), atol=1e-6)
