"""FCCL: agree on public data, learn on the own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Never

import pytest
import torch

from fedstill.core import Adam, Batch, Inbox, Node, Weights, at_clients, minimize
from fedstill.core.errors import BadValue
from fedstill.methods.fccl import FCCL, Consensus, Opinion
from fedstill.methods.local import Local, Own
from fedstill.parts.losses import cross_correlation, divergence
from fedstill.parts.opinions import opinions
from worlds import engine_for, finished, pictures, played, vectors

PLAIN: dict[str, Any] = {"inter_weight": 0.0, "intra_weight": 0.0, "public_epochs": 0}
FAST: dict[str, Any] = {"lr": 0.02, "batch_size": 8, "public_batch": 10, "pretrain_epochs": 3}


@dataclass(frozen=True)
class LocalAdam(Local):
    """Local with another optimiser."""

    @at_clients
    async def learn(self, client: Node[Own], inbox: Inbox[Never]) -> None:
        """Train on the own examples."""
        batches = client.data.batches(self.batch_size, client.rng("order"), epochs=self.epochs)
        start, optimizer = client.state.weights, Adam(self.lr, weight_decay=self.weight_decay)
        weights = await minimize(self.objective, client.model, start, batches, optimizer)
        client.state = Own(weights)


def test_without_weights_public_passes_and_training_before_it_is_local_training() -> None:
    values: dict[str, Any] = {"lr": 0.02, "batch_size": 8, "epochs": 2, "weight_decay": 1e-3}
    world = vectors(mixed=True)
    ours, _ = played(FCCL(**values, **PLAIN, pretrain_epochs=0), world, rounds=3)
    theirs, _ = played(LocalAdam(**values), world, rounds=3)
    for client in world.clients:
        for name, reached in ours.states[client].weights.items():
            assert torch.equal(reached, theirs.states[client].weights[name])


def test_training_before_the_first_round_ends_where_both_networks_begin() -> None:
    world = vectors()
    begun = engine_for(FCCL(**FAST), world)
    engine, _ = played(FCCL(**FAST), world, rounds=0)
    for client in world.clients:
        state, start = engine.states[client], begun.node(client, 0, "look").state
        assert all(torch.equal(state.weights[n], state.intra[n]) for n in state.weights)
        assert not torch.equal(state.weights["head.weight"], start.weights["head.weight"])
    later, _ = played(FCCL(**FAST), world, rounds=2)
    for client in world.clients:
        kept, first = later.states[client].intra, engine.states[client].intra
        assert all(torch.equal(kept[name], first[name]) for name in kept)


def test_the_consensus_is_the_mean_of_what_was_said() -> None:
    server: Node[None] = Node("server", 1, None, model=vectors().server_model)
    said = {"c0": Opinion(torch.tensor([[1.0, 0.0]])), "c1": Opinion(torch.tensor([[3.0, 4.0]]))}
    assert FCCL().agree(server, Inbox(said)).logits.tolist() == [[2.0, 2.0]]


def test_each_client_says_its_logits_and_hears_their_mean() -> None:
    world, heard = vectors(mixed=True), {}

    class Ear:
        def carry(self, message, sender, round, step):  # type: ignore[no-untyped-def]
            heard[sender] = message.logits
            return message

    method = FCCL(**FAST)
    before, _ = played(method, world, rounds=0)
    played(method, world, rounds=1, meddling=[Ear()])
    for client in world.clients:
        truth = opinions(world.models[client], before.states[client].weights, world.public)
        assert torch.allclose(heard[client], truth, atol=1e-6)
    mean = torch.stack([heard[client] for client in world.clients]).mean(0)
    assert torch.allclose(heard["server"], mean, atol=1e-6)


def test_a_client_without_examples_says_nothing_and_hears_the_others() -> None:
    world = vectors((20, 0, 23, 30), mixed=True)
    engine, log = played(FCCL(**FAST), world, rounds=1)
    assert [row.sender for row in log.messages if row.direction == "up"] == ["c0", "c2", "c3"]
    begun = engine_for(FCCL(**FAST), world).node("c1", 0, "look").state.weights
    assert not torch.equal(engine.states["c1"].weights["head.weight"], begun["head.weight"])


def test_as_many_floats_travel_as_public_examples_times_classes() -> None:
    _, log = played(FCCL(**FAST), vectors(mixed=True), rounds=2)
    rows = [(row.round, row.sender, row.direction, row.floats, row.hearers) for row in log.messages]
    size = 24 * 3
    for round in (1, 2):
        ups = [(round, f"c{i}", "up", size, 1) for i in range(4)]
        assert [row for row in rows if row[0] == round] == [
            *ups,
            (round, "server", "down", size, 4),
        ]
    assert not [row for row in rows if row[0] == 0]


def test_a_step_of_collaboration_by_hand() -> None:
    world, method = vectors(), FCCL(public_lr=0.01, public_batch=100)
    node = engine_for(method, world).node("c0", 1, "learn")
    start, x = node.state.weights, world.public.all().x
    consensus = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))

    def loss(weights: Weights) -> torch.Tensor:
        return cross_correlation(node.model(weights, x), consensus, off_diagonal=0.0051)

    grad = torch.func.grad(loss)(start)
    reached = finished(method.aligned(node, start, consensus))
    for name, tensor in reached.items():
        if name == "head.bias":  # a common shift of a logit is not felt
            assert torch.equal(tensor, start[name])
        else:
            moved = 0.01 * grad[name] / (grad[name].abs() + 1e-5)
            assert torch.allclose(tensor, start[name] - moved, atol=1e-5)


def test_the_local_loss_by_hand() -> None:
    world = vectors()
    model, (x, y) = world.server_model, world.party("c1").data.all()
    now, inter, intra = (model.init(seed) for seed in (1, 2, 3))
    method = FCCL(inter_weight=0.5, intra_weight=2.0)
    logits = model(now, x)
    wanted = torch.nn.functional.cross_entropy(logits, y)
    wanted += 0.5 * divergence(logits, model(inter, x)) + 2 * divergence(logits, model(intra, x))
    found = method.objective(model, now, Batch(x, y), inter=inter, intra=intra)
    assert torch.allclose(found, wanted)


def test_the_inter_teacher_is_the_network_before_this_rounds_collaboration() -> None:
    world, method = vectors(), FCCL(**FAST)
    node = engine_for(method, world).node("c0", 1, "learn")
    before, steps = node.state.weights, method.learn(node, Inbox({"server": Consensus(
        torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    )}))  # fmt: skip
    public = steps.send(None)  # the loop on public data
    carry = public.carry
    moved = ({name: tensor + 1 for name, tensor in carry[0].items()}, carry[1])
    private = steps.send(moved)
    assert all(torch.equal(private.given["inter"][n], before[n]) for n in before)
    assert all(torch.equal(private.carry[0][n], before[n] + 1) for n in before)
    steps.close()


def test_a_dead_logit_harms_nobody() -> None:
    # The trap: a deviation of zero is divided by, and everything becomes NaN.
    world, method = vectors(), FCCL(**FAST)
    node = engine_for(method, world).node("c0", 1, "learn")
    head = node.state.weights["head.weight"].clone()
    head[1] = 0.0
    start = {**node.state.weights, "head.weight": head}
    consensus = opinions(node.model, start, world.public)
    reached = finished(method.aligned(node, start, consensus))
    assert all(torch.isfinite(tensor).all() for tensor in reached.values())


def test_collaboration_brings_logits_into_line() -> None:
    world = pictures()
    method = FCCL(lr=1e-9, public_lr=0.01, public_batch=24, public_epochs=20, pretrain_epochs=0)

    def spread(rounds: int) -> float:
        engine, _ = played(method, world, rounds=rounds)
        nodes = [engine.states[c].weights for c in world.clients]
        said = [opinions(world.server_model, weights, world.public) for weights in nodes]
        mean = torch.stack(said).mean(0)
        return float(sum(cross_correlation(z, mean, off_diagonal=0.0051) for z in said))

    assert spread(3) < spread(1)


@pytest.mark.parametrize("field", ["inter_weight", "intra_weight", "off_diagonal", "lr"])
def test_values_out_of_range_are_refused(field: str) -> None:
    with pytest.raises(BadValue, match=f"{field} = -1.0"):
        FCCL(**{field: -1.0})
