"""HeteroFL, and what it shares with Federated Dropout and FedRolex: parts of one network."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedstill.core import Inbox, Message, Node, Weights
from fedstill.core.errors import BadMessage, BadValue
from fedstill.core.node import SERVER
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.run import run
from fedstill.federation.sampling import Scripted
from fedstill.logbook.rows import Rows
from fedstill.logbook.summary import summarise
from fedstill.logbook.writer import MemoryLog
from fedstill.methods.fedavg import FedAvg, Global
from fedstill.methods.feddropout import FedDropout
from fedstill.methods.fedrolex import FedRolex
from fedstill.methods.heterofl import HeteroFL, Own, Trained
from fedstill.models import MLP, AlexNet, PreResNet18
from fedstill.parts.statistics import measured
from fedstill.parts.submodels import held_mask
from worlds import World, engine_for, experiment, pictures, played, vectors

RULES = [HeteroFL, FedDropout, FedRolex]
SMALL = {"lr": 0.1, "batch_size": 8}


def weights_of(engine: InProcess) -> Weights:
    weights: Weights = engine.states[SERVER].weights  # type: ignore[union-attr]
    return weights


def residual(**options: Any) -> World:
    """The pictures with a small residual network for everybody."""
    world = pictures(**options)
    model = PreResNet18((1, 8, 8), 3, widths=(4, 4, 6, 8))
    parties = {name: replace(party, model=model) for name, party in world.parties.items()}
    return World(parties, model)


@cache
def averaged(world: Any, weighting: Any) -> tuple[InProcess, MemoryLog]:
    return played(FedAvg(weighting=weighting, **SMALL), world(), 3)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("world", [vectors, pictures, residual])
def test_full_width_for_all_is_fedavg_bit_for_bit(kind: type[HeteroFL], world: Any) -> None:
    for weighting in ("examples", "uniform"):
        plain, log = averaged(world, weighting)
        same, other = played(kind(weighting=weighting, rho=0, **SMALL), world(), 3)  # type: ignore[arg-type]
        assert weights_of(plain).keys() == weights_of(same).keys()
        for name, tensor in weights_of(plain).items():
            assert torch.equal(tensor, weights_of(same)[name]), name
        scores = [row.value for row in log.metrics if row.name in ("accuracy", "loss")]
        assert scores == [row.value for row in other.metrics if row.name in ("accuracy", "loss")]


def test_the_first_units_are_trained_and_averaged_over_their_holders() -> None:
    world = vectors((20, 27))  # MLP 4-8-3
    method = HeteroFL(lr=0.5, batch_size=100, budgets=(1.0, 0.5), scaler=False)
    start = engine_for(method, world).node(SERVER, 0, "look").state.weights
    engine, _ = played(method, world, 1)

    def stepped(client: str, weights: Weights, model: Any) -> Weights:
        batch = world.party(client).data.all()
        grad = torch.func.grad(lambda w: cross_entropy(model(w, batch.x), batch.y))(weights)
        return {name: weights[name] - 0.5 * grad[name] for name in weights}

    half = {
        "layer0.weight": start["layer0.weight"][:4],
        "layer0.bias": start["layer0.bias"][:4],
        "head.weight": start["head.weight"][:, :4],
        "head.bias": start["head.bias"],
    }
    large = stepped("c0", start, world.server_model)
    small = stepped("c1", half, MLP((4,), 3, hidden=(4,), activation="tanh"))
    found = weights_of(engine)

    def mean(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (20 * a + 27 * b) / 47

    close = {"atol": 1e-6}
    both = mean(large["layer0.weight"][:4], small["layer0.weight"])
    assert torch.allclose(found["layer0.weight"][:4], both, **close)
    assert torch.allclose(found["layer0.weight"][4:], large["layer0.weight"][4:], **close)
    both = mean(large["head.weight"][:, :4], small["head.weight"])
    assert torch.allclose(found["head.weight"][:, :4], both, **close)
    assert torch.allclose(found["head.weight"][:, 4:], large["head.weight"][:, 4:], **close)
    assert torch.allclose(found["head.bias"], mean(large["head.bias"], small["head.bias"]), **close)


def test_what_nobody_holds_stays_as_it_was() -> None:
    world = vectors()
    method = HeteroFL(budgets=(0.5, 0.25, 0.5, 0.25), **SMALL)
    start = engine_for(method, world).node(SERVER, 0, "look").state.weights
    found = weights_of(played(method, world, 3)[0])
    assert torch.equal(found["layer0.weight"][4:], start["layer0.weight"][4:])
    assert torch.equal(found["head.weight"][:, 4:], start["head.weight"][:, 4:])
    assert not torch.isclose(found["layer0.weight"][:4], start["layer0.weight"][:4]).any()


@pytest.mark.parametrize(
    ("weighting", "shares"), [("examples", [3, 1]), ("uniform", [1, 1]), ("width", [1, 0.5])]
)
def test_the_mean_over_holders_is_weighted_as_asked(weighting: Any, shares: list[float]) -> None:
    model = MLP((1,), 2, hidden=(2,))
    method = HeteroFL(budgets=(1.0, 0.5), weighting=weighting)
    zero = {name: torch.zeros_like(tensor) for name, tensor in model.init(0).items()}
    server: Node[Global] = Node(
        SERVER, 1, Global(zero), model=model, models={"c0": model, "c1": model}
    )
    half = model.narrowed(0.5).init(0)
    ups = {
        "c0": Trained({name: tensor + 1 for name, tensor in zero.items()}, 3, None),
        "c1": Trained({name: torch.full_like(tensor, 5) for name, tensor in half.items()}, 1, None),
    }
    method.aggregate(server, Inbox(ups))
    mean = (shares[0] * 1 + shares[1] * 5) / sum(shares)
    assert server.state.weights["layer0.bias"].tolist() == pytest.approx([mean, 1])
    assert server.state.weights["head.bias"].tolist() == pytest.approx([mean, mean])


def test_as_many_floats_travel_as_each_part_has() -> None:
    world = vectors()
    _, log = played(HeteroFL(rho=3), world, 1)  # widths 8, 4, 2, 1
    sizes = [4 * w + w + 3 * w + 3 for w in (8, 4, 2, 1)]
    up = {
        row.sender: row.floats
        for row in log.messages
        if row.field == "weights" and row.direction == "up"
    }
    assert list(up.values()) == sizes
    assert [row.floats for row in log.messages if row.direction == "down"] == sizes
    assert sum(row.floats for row in log.messages if row.field == "held") == 0


def test_clients_of_one_budget_hear_one_message() -> None:
    _, log = played(HeteroFL(budgets=(1.0, 0.5, 0.5, 0.5)), vectors(), 1)
    assert [row.hearers for row in log.messages if row.direction == "down"] == [1, 3]


def test_only_those_who_are_awake_are_sent_their_part() -> None:
    _, log = played(HeteroFL(rho=3), vectors(), 1, sampling=Scripted({1: ["c0"]}))
    assert len([row for row in log.messages if row.direction == "down"]) == 3


@pytest.mark.parametrize("kind", RULES)
def test_engines_agree_with_clients_of_different_widths(kind: type[HeteroFL]) -> None:
    method = kind(budgets=(1.0, 0.5, 0.5, 0.25), masked=True, **SMALL)
    plain, _ = played(method, vectors(), 3)
    stacked, _ = played(method, vectors(), 3, engine=Batched)
    for name, tensor in weights_of(plain).items():
        assert torch.allclose(tensor, weights_of(stacked)[name], atol=1e-5), name


def test_the_scaler_is_used_in_training_and_can_be_left_out() -> None:
    world, method = vectors(), HeteroFL(rho=3)
    node = engine_for(method, world).node("c1", 1, "update")
    assert method.narrowed(node, "c1").scaler and method.narrowed(node, "c1").rate == 0.5
    assert not HeteroFL(scaler=False).narrowed(node, "c1").scaler
    with_it, without = (
        weights_of(played(HeteroFL(rho=3, scaler=on, **SMALL), world, 1)[0]) for on in (True, False)
    )
    assert not torch.equal(with_it["head.weight"], without["head.weight"])


def test_masked_logits_are_zero_and_rows_of_lacking_classes_are_not_averaged() -> None:
    world = vectors()  # c0 lacks class 2
    method = HeteroFL(masked=True, rho=0, **SMALL)
    model, batch = world.server_model, world.party("c0").data.all()
    weights = model.init(0)
    mask = held_mask(engine_for(method, world).node("c0", 1, "update"))
    assert mask.tolist() == [1, 1, 0]
    logits = model(weights, batch.x)
    logits[:, 2] = 0  # not minus infinity
    expected = cross_entropy(logits, batch.y)
    found = method.objective(model, weights, batch, weights, held=mask)
    assert float(found) == pytest.approx(float(expected))
    start = engine_for(method, world).node(SERVER, 0, "look").state.weights
    away = Scripted({1: ["c1", "c2", "c3"]})
    alone, log = played(method, world, 1, sampling=away)
    assert torch.equal(weights_of(alone)["head.weight"][2], start["head.weight"][2])
    assert not torch.isclose(weights_of(alone)["head.weight"][:2], start["head.weight"][:2]).any()
    assert [row.floats for row in log.messages if row.field == "held"] == [3]


def test_without_masks_every_row_is_averaged() -> None:
    world, method = vectors(), HeteroFL(rho=0, **SMALL)
    start = engine_for(method, world).node(SERVER, 0, "look").state.weights
    alone, _ = played(method, world, 1, sampling=Scripted({1: ["c1", "c2", "c3"]}))
    assert not torch.isclose(weights_of(alone)["head.weight"][2], start["head.weight"][2]).any()


def test_rows_of_lacking_classes_can_be_left_out_without_masking_logits() -> None:
    world, method = vectors(), HeteroFL(rho=0, head_rows="held", **SMALL)  # c0 lacks class 2
    start = engine_for(method, world).node(SERVER, 0, "look").state.weights
    away = Scripted({1: ["c1", "c2", "c3"]})
    alone, _ = played(method, world, 1, sampling=away)
    plain, _ = played(HeteroFL(rho=0, **SMALL), world, 1, sampling=away)
    found, trained = weights_of(alone), weights_of(plain)
    assert torch.equal(found["head.weight"][2], start["head.weight"][2])
    # What is trained is the same: the logits of class 2 took part in the loss.
    assert torch.equal(found["head.weight"][:2], trained["head.weight"][:2])
    assert torch.equal(found["layer0.weight"], trained["layer0.weight"])


def test_statistics_of_static_norms_are_measured_by_clients_before_evaluation() -> None:
    world = pictures(norm="static")
    method = HeteroFL(rho=2, norm_statistics="clients", batch_size=100, lr=0.1)
    engine, log = played(method, world, 2)
    found = weights_of(engine)
    model = world.server_model
    trained = {name: found[name] for name in model.initial()}
    data = [world.party(client).data for client in world.clients]
    means = [measured(model, trained, each, 100)["norm0.running_mean"] for each in data]
    expected = sum(n * mean for n, mean in zip([20, 27, 23], means, strict=True)) / 70
    assert torch.allclose(found["norm0.running_mean"], expected, atol=1e-6)
    down = [row.floats for row in log.messages if row.step == "show"]
    up = [row.floats for row in log.messages if row.field == "statistics"]
    assert down == [sum(model.floats().values())] * 2
    assert up == [2 * (4 + 4)] * 6


def test_measured_statistics_are_not_trained_and_not_sent_to_clients() -> None:
    world = pictures(norm="static")
    method = HeteroFL(rho=2, norm_statistics="clients", **SMALL)
    plain = HeteroFL(rho=2, **SMALL)
    with_them, log = played(method, world, 3)
    without, _ = played(plain, world, 3)
    for name, tensor in weights_of(without).items():
        assert torch.equal(tensor, weights_of(with_them)[name])
    sizes = {
        row.floats for row in log.messages if row.step == "broadcast" and row.field == "weights"
    }
    assert max(sizes) == sum(world.server_model.floats().values())


def test_parts_are_scored_on_their_own_test_sets_under_their_own_name() -> None:
    world = vectors()
    method = HeteroFL(rho=3, score_parts=True, **SMALL)
    engine, log = played(method, world, 2)
    rows = [row for row in log.metrics if row.step == "evaluate" and row.name == "accuracy"]
    assert {(row.node, row.target) for row in rows if row.node != SERVER} == {
        (client, client) for client in world.clients
    }
    summary = summarise(Rows(log.metrics, [], []))
    last = {row.node: row.value for row in rows if row.round == 2 and row.node != SERVER}
    assert summary["averaged_local_accuracy"] == pytest.approx(sum(last.values()) / 4)
    server = [row.value for row in rows if row.round == 2 and row.node == SERVER]
    assert summary["average_accuracy"] == pytest.approx(sum(server) / 4)
    # A client's score is that of the part it trained.
    test = world.party("c3").test.all()
    small = world.server_model.narrowed(1 / 8)
    said = small(engine.states["c3"].weights, test.x).argmax(1)
    assert last["c3"] == pytest.approx(float((said == test.y).float().mean()))
    plain, _ = played(HeteroFL(rho=3, **SMALL), world, 2)
    assert all(torch.equal(t, weights_of(plain)[n]) for n, t in weights_of(engine).items())
    assert plain.states["c0"] is None


def test_only_parts_that_were_trained_are_scored() -> None:
    method = HeteroFL(rho=3, score_parts=True, **SMALL)
    _, log = played(method, vectors(), 1, sampling=Scripted({1: ["c1"]}))
    assert {row.node for row in log.metrics if row.step == "evaluate"} == {SERVER, "c0", "c2", "c3"}


def test_a_run_with_kept_parts_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    world, method = vectors(), FedDropout(rho=3, score_parts=True, **SMALL)
    straight, _ = played(method, world, 3)
    first = engine_for(method, world, rounds=2)

    def save(round: int) -> None:
        first.save(tmp_path, round, digest="d")

    run(first, MemoryLog(), save=save)
    second, again = engine_for(method, world, rounds=3), MemoryLog()
    saved = second.load(tmp_path, digest="d")
    assert saved is not None and isinstance(saved.states["c1"], Own)
    run(second, again, done=2)
    assert all(torch.equal(t, weights_of(straight)[n]) for n, t in weights_of(second).items())
    assert len([r for r in again.metrics if r.name == "accuracy"]) == 4 + 4


class Swapped:
    """A channel on which one client's part becomes that of another width."""

    def __init__(self, client: str):
        self.client = client

    def carry(self, message: Message, sender: str, round: int, step: str) -> Message:
        if sender != self.client or round != 2:
            return message
        assert isinstance(message, Trained)
        return message.replace(weights=vectors().server_model.narrowed(0.25).init(0))


@pytest.mark.parametrize("kind", RULES)
def test_a_part_of_another_shape_is_left_out_by_name_and_the_round_goes_on(
    kind: type[HeteroFL],
) -> None:
    world, method = vectors(), kind(rho=3, **SMALL)
    engine, log = played(method, world, 3, meddling=[Swapped("c1")], bad_messages="leave_out")
    notes = [(note.round, note.kind, note.node) for note in log.notes]
    assert notes == [(2, "left out", "c1")]
    assert "layer0.weight is (2, 4) and not (4, 4)" in log.notes[0].text

    def gone(_: Any, step: str, round: int, node: str) -> str | None:
        return "away" if (step, round, node) == ("update", 2, "c1") else None

    without, _ = played(method, world, 3, absences=gone)
    for name, tensor in weights_of(engine).items():
        assert torch.equal(tensor, weights_of(without)[name])


@pytest.mark.parametrize("engine", [InProcess, Batched])
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"examples": -3}, "c1 sent examples = -3: must be in"),
        ({"held": torch.ones(2)}, "c1 sent held of shape [2]; expected [class = 3]"),
    ],
)
def test_a_part_whose_numbers_cannot_be_is_left_out_by_name(
    engine: Any, changes: dict[str, Any], why: str
) -> None:
    class Changed(Swapped):
        def carry(self, message: Any, sender: str, round: int, step: str) -> Message:
            changed = message.replace(**changes) if sender == self.client else message
            return changed  # type: ignore[no-any-return]

    method, options = HeteroFL(rho=3, masked=True, **SMALL), {"bad_messages": "leave_out"}
    _, log = played(method, vectors(), 1, engine, meddling=[Changed("c1")], **options)
    assert [note.text.startswith(why) for note in log.notes] == [True]


def test_a_part_of_another_shape_stops_a_run_that_asks_for_it() -> None:
    with pytest.raises(BadMessage, match=r"c1 sent another network .* \(HeteroFL.update, round 2"):
        played(HeteroFL(rho=3, **SMALL), vectors(), 3, meddling=[Swapped("c1")])


def test_when_nobody_sends_a_fitting_part_the_network_stays() -> None:
    class All(Swapped):
        def carry(self, message: Message, sender: str, round: int, step: str) -> Message:
            self.client = sender
            return message if sender == SERVER else super().carry(message, sender, 2, step)

    world, method = vectors(), HeteroFL(rho=0, **SMALL)
    start = engine_for(method, world).node(SERVER, 0, "look").state.weights
    engine, log = played(method, world, 1, meddling=[All("")], bad_messages="leave_out")
    assert [note.kind for note in log.notes] == ["left out"] * 4 + ["skipped"]
    assert all(torch.equal(tensor, start[name]) for name, tensor in weights_of(engine).items())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"budgets": (1.0, 0.0)}, r"budgets = \[1.0, 0.0\]: each must be in \(0, 1\]"),
        ({"budgets": (2,)}, "each must be in"),
        ({"budgets": ("half",)}, "each must be in"),
        ({"budgets": (True,)}, "each must be in"),
        ({"rho": -1}, "rho = -1: must be at least 0"),
        ({"sigma": 0.5}, "sigma = 0.5: must be a whole number"),
        ({"weighting": "updates"}, "unknown choice 'updates'"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadValue, match=words):
        HeteroFL(**values)


def test_networks_that_cannot_be_narrowed_are_refused_before_the_first_round() -> None:
    world = vectors()
    with pytest.raises(BadValue, match="HeteroFL: budgets are 2 for 4 clients; give one for each"):
        experiment(HeteroFL(budgets=(1.0, 0.5)), world)
    with pytest.raises(BadValue, match="HeteroFL: budgets are 5 for 4 clients"):
        experiment(HeteroFL(budgets=(1.0,) * 5), world)
    with pytest.raises(BadValue, match="c1: mlp: rate = 1e-09 leaves layer0 without units"):
        experiment(HeteroFL(budgets=(1.0, 1e-9, 1.0, 1.0)), world)
    net = AlexNet((1, 8, 8), 3)
    parties = {name: replace(p, model=net) for name, p in pictures().parties.items()}
    with pytest.raises(BadValue, match="HeteroFL: alexnet cannot be narrowed; use one of conv4"):
        experiment(HeteroFL(), World(parties, net))
    with pytest.raises(BadValue, match="c2: convnet: norm = 'group' has four groups, and 1 of 4"):
        experiment(HeteroFL(rho=2), pictures(norm="group"))
    with pytest.raises(BadValue, match="FedRolex: c1 has another network than the server"):
        experiment(FedRolex(), vectors(mixed=True))
    with pytest.raises(BadValue, match='norm_statistics = "clients" is for networks with norm'):
        experiment(HeteroFL(rho=0, norm_statistics="clients"), pictures())
