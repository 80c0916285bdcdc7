"""`fedstill.testing.check`: for each promise a method that breaks it, and is told so by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Never

import numpy as np
import pytest
import torch
from tests.testing import sly
from tests.testing.careless import Careless
from torch import Tensor

from fedstill.core import (
    Batch,
    Inbox,
    Message,
    Method,
    Model,
    Node,
    Step,
    Weights,
    algebra,
    at_clients,
    at_server,
)
from fedstill.core.errors import FedstillError
from fedstill.methods.fedavg import Down, FedAvg, Global, Up
from fedstill.testing import CHECKS, Broken, Case, check, small, worlds
from fedstill.testing.closely import global_generators


class TorchDice(FedAvg):
    """Draws from torch's global generator."""

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Down:
        """Send weights with noise."""
        noise = {n: 1e-3 * torch.randn_like(w) for n, w in server.state.weights.items()}
        return Down(algebra.add(server.state.weights, noise))


class Twice(FedAvg):
    """Trains once more where the weights say so, which the records made."""

    @at_clients
    async def update(self, client: Node[Any], inbox: Inbox[Down]) -> Up:
        """Train, and train again unless nothing has moved."""
        start = inbox.only().weights
        weights, _ = await self.trained(client, start)
        if not all(torch.equal(weights[name], start[name]) for name in start):
            weights, _ = await self.trained(client, weights)
        return Up(weights, len(client.data))


class NumpyDice(FedAvg):
    """Draws from numpy's global generator."""

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Down:
        """Roll a die and send weights."""
        np.random.random()
        return Down(server.state.weights)


class Restless(FedAvg):
    """Writes into itself."""

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Down:
        """Send the weights, and count."""
        object.__setattr__(self, "epochs", self.epochs + 1)
        return Down(server.state.weights)


class Scribbler(FedAvg):
    """Writes into what it received."""

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        """Train in place."""
        weights = inbox.only().weights
        for tensor in weights.values():
            tensor.mul_(0.9)
        return Up(weights, len(client.data))


class Singular(FedAvg):
    """Two objects of the same values are not equal."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class Shown(Message):
    """Weights, and the first example."""

    weights: Weights
    examples: int
    example: Tensor


class Indiscreet(FedAvg):
    """Sends an example and does not say so."""

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Shown:
        """Train, and show an example."""
        weights, _ = await self.trained(client, inbox.only().weights)
        return Shown(weights, len(client.data), client.data.all().x[:1])

    @at_server
    def aggregate(self, server: Node[Global], inbox: Inbox[Shown]) -> None:
        """Take the mean."""
        server.state = Global(algebra.mean([up.weights for up in inbox.values()]))


class Stored(Indiscreet):
    """Sends an example as it is stored."""

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Shown:
        """Train, and show an example."""
        weights, _ = await self.trained(client, inbox.only().weights)
        return Shown(weights, len(client.data), client.data.parts[0].pool.stored[:1])


class Boaster(FedAvg):
    """Says that it sends examples and does not."""

    @property
    def sends_examples(self) -> bool:
        return True


class Unheard(FedAvg):
    """Its aggregate reads a message that nobody sends."""

    def each_round(self) -> Sequence[Step]:
        return [self.broadcast, self.aggregate]


class Unread(FedAvg):
    """Nobody reads what its clients send."""

    def each_round(self) -> Sequence[Step]:
        return [self.broadcast, self.update]


class Shouting(FedAvg):
    """Says at once again what nobody has read."""

    def each_round(self) -> Sequence[Step]:
        return [self.broadcast, self.broadcast, self.update, self.aggregate]


class Silent(FedAvg):
    """Has a step without words."""

    @at_server
    def aggregate(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        server.state = Global(algebra.mean([up.weights for up in inbox.values()]))


class Bare(Message):
    weights: Weights


class Wordless(FedAvg):
    """Sends a message without words."""

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Bare:
        """Send the weights."""
        return Bare(server.state.weights)

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Bare]) -> Up:
        """Train."""
        weights, _ = await self.trained(client, inbox.only().weights)
        return Up(weights, len(client.data))


@dataclass(frozen=True)
class Undocumented(FedAvg):
    more: int = 1


class InTurn(FedAvg):
    """A client starts where the one before it ended: the order of play matters."""

    last: ClassVar[dict[int, Weights]] = {}

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        """Train on from the neighbour's weights."""
        start = self.last.get(client.round, inbox.only().weights)
        weights, _ = await self.trained(client, start)
        self.last[client.round] = weights
        return Up(weights, len(client.data))

    @at_server
    def aggregate(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        """Take the mean, and begin anew."""
        self.last.clear()
        server.state = Global(algebra.mean([up.weights for up in inbox.values()]))


class Forgetful(FedAvg):
    """Remembers outside of its memory how often it has spoken."""

    kept: ClassVar[list[int]] = []

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Down:
        """Send weights that shrink by what this process has seen."""
        self.kept.append(server.round)
        return Down({n: 0.99 ** len(self.kept) * w for n, w in server.state.weights.items()})


class Counting(FedAvg):
    """Its objective depends on how often it was called."""

    calls: ClassVar[list[int]] = []

    def objective(self, model: Model, weights: Weights, batch: Batch, start: Weights) -> Tensor:
        self.calls.append(1)
        factor = 1 + 0.1 * (len(self.calls) % 3)
        return factor * super().objective(model, weights, batch, start)


class Branching(FedAvg):
    """Its objective branches on a tensor's value."""

    def objective(self, model: Model, weights: Weights, batch: Batch, start: Weights) -> Tensor:
        loss = super().objective(model, weights, batch, start)
        return 2 * loss if loss > 0.5 else loss


class Weighed(Up):
    """Weights, and whole numbers that are not marked as such."""

    counts: Tensor  # should be hinted Exact


class Fragile(FedAvg):
    """Needs whole numbers, and lets channels round them."""

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Weighed:
        """Train, and count labels in single precision."""
        weights, _ = await self.trained(client, inbox.only().weights)
        counts = client.data.counts(client.model.classes).float()
        return Weighed(weights, len(client.data), counts)

    @at_server
    def aggregate(self, server: Node[Global], inbox: Inbox[Weighed]) -> None:
        """Take the mean where counts add up."""
        for up in inbox.values():
            if float(up.counts.sum()) != up.examples:
                raise ValueError("counts do not add up")
        server.state = Global(algebra.mean([up.weights for up in inbox.values()]))


class AllOrNothing(FedAvg):
    """Cannot go on without everybody."""

    @at_server
    def aggregate(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        """Take the mean over all clients."""
        ups = [inbox[client].weights for client in server.models]
        server.state = Global(algebra.mean(ups))


class Dividing(FedAvg):
    """Divides by the number of a client's examples."""

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        """Train, and weigh by one over the number of examples."""
        weights, _ = await self.trained(client, inbox.only().weights)
        return Up(weights, 100 // len(client.data))


class Listed(Message):
    """Weights in a list."""

    weights: list[Tensor]


class Listing(Method):
    """Sends what the wire cannot write."""

    def each_round(self) -> Sequence[Step]:
        return [self.speak, self.hear]

    @at_clients
    def speak(self, client: Node[None], inbox: Inbox[Never]) -> Listed:
        """Say something."""
        return Listed([torch.zeros(2)])

    @at_server
    def hear(self, server: Node[None], inbox: Inbox[Listed]) -> None:
        """Listen."""

    def predict(self, node: Node[Any], x: Tensor) -> Tensor:
        return torch.zeros(len(x), worlds.CLASSES)


class Odd(Global):
    """Says a number and keeps a text."""

    number: int


class Mistyped(FedAvg):
    """Keeps a memory that its hints do not allow."""

    def server_state(self, server: Node[Any]) -> Odd:  # type: ignore[override]
        return Odd(super().server_state(server).weights, "seven")  # type: ignore[arg-type]

    @at_server
    def aggregate(self, server: Node[Odd], inbox: Inbox[Up]) -> None:
        """Take the mean."""
        mean = algebra.mean([up.weights for up in inbox.values()])
        server.state = server.state.replace(weights=mean)


class Longer(Up):
    """More than the step's hints say."""


class Talkative(FedAvg):
    """Sends another kind of message than its hints name."""

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        """Train."""
        weights, _ = await self.trained(client, inbox.only().weights)
        return Longer(weights, len(client.data))


class Lazy(FedAvg):
    """Learns nothing."""

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        """Send back what came."""
        return Up(inbox.only().weights, len(client.data))


class Exploding(FedAvg):
    """Its memory is not finite."""

    @at_server
    def aggregate(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        """Take the mean, divided by the number of absent clients."""
        mean = algebra.mean([up.weights for up in inbox.values()])
        absent = len(server.models) - len(inbox)
        factor = float("inf") if absent and server.round == 4 else 1.0
        server.state = Global({name: factor * w for name, w in mean.items()})


WRONG: list[tuple[type[Method], str, str]] = [
    (Unheard, "plan", "Unheard.aggregate reads Up, but the step before it, broadcast, sends Down"),
    (Unread, "plan", "Unread.update sends Up to nobody: no step comes after it"),
    (Shouting, "plan", "sends Down to nobody: the step after it, broadcast, reads nothing"),
    (Silent, "plan", "Silent.aggregate has no docstring"),
    (Wordless, "plan", "Bare, which Wordless.broadcast sends, has no docstring"),
    (Undocumented, "plan", "Undocumented has no docstring"),
    (Counting, "engines agree", "is not the same in_process and batched"),
    (Counting, "engines agree", "a rounding error decides something"),
    (Branching, "compiled", "a loop is not compiled"),
    (sly.OwnDice, "repeat", "Does it read the clock, draw otherwise than by node.rng"),
    (Forgetful, "resume", "is not the same a straight run and one resumed after round 2"),
    (Fragile, "channels", "ValueError: counts do not add up"),
    (InTurn, "order", "is not the same the first client first and the last client first"),
    (AllOrNothing, "part-time", "AllOrNothing.aggregate failed on server in round 1: KeyError"),
    (Exploding, "part-time", "of server is not finite"),
    (Dividing, "empty client", "Dividing.update failed on c2 in round 1: ZeroDivisionError"),
    (Listing, "wire", "Listed.weights is hinted list[Tensor], which cannot be sent"),
    (Mistyped, "wire", "Odd.number: expected int, came 'seven'"),
    (Careless, "content", "Opinion.logits, sent in Careless.speak: its first row alone is not"),
    (sly.Partial, "content", "head.weight is missing, head.bias is missing (Partial.update, round"),
    (sly.Partial, "content", "and by layout where a part of a network travels"),
    (Talkative, "walls", "Longer is sent, but no step of the method has it in its hints"),
    (sly.Pooled, "walls", "in one process Number(round=1, step='update', node='c0', name='loss'"),
    (TorchDice, "purity", "it drew from torch's global generator"),
    (NumpyDice, "purity", "it drew from numpy's global generator"),
    (Restless, "purity", "its values changed while it was played"),
    (Scribbler, "purity", "was written into later"),
    (sly.Popping, "purity", "weights.head.bias, which server sent in broadcast, was written into"),
    (sly.Adding, "purity", "update of c0 wrote into rounds of its memory"),
    (sly.Relabelling, "purity", "the examples of c0 were changed while it was played"),
    (sly.Elsewhere, "purity", "KEPT of tests.testing.sly changed while it was played"),
    (sly.Neighbour, "purity", "Neighbour.first changed while it was played"),
    (Singular, "purity", "two objects of the same values are not equal"),
    (Indiscreet, "privacy", "example, sent by c0 in update holds a training example"),
    (Stored, "privacy", "example, sent by c0 in update holds a training example"),
    (sly.Telling, "privacy", "more, sent by c0 in update holds a training example"),
    (Boaster, "privacy", "sends_examples is True, but no message holds a training example"),
    (Twice, "budget", "update of c0 asks more of records in round 2 than was planned"),
    (sly.Exact, "budget", "more, which c0 sent in update, depends on single records and has no"),
    (sly.ThroughNoise, "budget", "more, which c0 sent in update, depends on single records"),
    (sly.InTheNextRound, "budget", "more, which c0 sent in update, depends on single records"),
    (sly.Logging, "budget", "brightness, which c0 logged in update, depends on single records"),
    (sly.Bare, "budget", "FedAvg.objective is to be minimised on private samples without their"),
    (sly.Unsealing, "budget", "more, sent by c0 in update holds a training example"),
    (Lazy, "learning", "the mean accuracy is"),
]


@pytest.mark.parametrize(("kind", "promise", "says"), WRONG, ids=lambda each: str(each)[:20])
def test_a_wrong_method_is_caught_by_name(kind: type[Method], promise: str, says: str) -> None:
    with pytest.raises(Broken) as error:
        check(kind, only=[promise])
    assert (error.value.method, error.value.check) == (kind.__name__, promise)
    assert str(error.value).startswith(f"{kind.__name__} breaks {promise!r}: ")
    assert says in error.value.problem


def test_every_check_has_a_method_that_breaks_it() -> None:
    assert {promise for _, promise, _ in WRONG} == set(CHECKS)


def test_a_right_method_gets_a_table_of_what_it_keeps() -> None:
    report = check(FedAvg(lr=0.1, batch_size=8), only=["plan", "order"])
    assert report.broken == [] and list(report.problems) == ["plan", "order"]
    first, plan, order = str(report).split("\n")
    assert first == "FedAvg: 0 of 2 broken"
    assert plan.startswith("plan   kept  Each step reads what the step before sends")
    assert order.startswith("order  kept  Playing nodes in another order changes nothing.")


def test_without_raising_every_check_is_made_and_the_report_says_which_were_broken() -> None:
    report = check(Silent, only=["order", "plan"], raising=False)
    assert report.broken == ["plan"]
    assert "plan   BROKEN" in str(report) and "Silent.aggregate has no docstring" in str(report)
    unmade = check(Unheard, raising=False)
    assert unmade.broken == ["plan"]


def test_a_class_is_checked_with_its_small_preset() -> None:
    assert small(FedAvg) == FedAvg(lr=0.1, batch_size=12)

    class Without(FedAvg):
        presets: ClassVar = {}

    assert small(Without) == Without()


def test_a_method_can_be_checked_in_another_federation() -> None:
    seen: list[Case] = []
    world = worlds.vectors()
    CHECKS["seen"] = seen.append
    try:
        check(FedAvg, world=world, only=["seen", "resume"])
    finally:
        del CHECKS["seen"]
    assert seen[0].world is world and seen[0].plain is world


def test_a_method_that_adds_its_own_noise_is_private() -> None:
    assert check(sly.Noisy, only=["privacy", "budget"]).broken == []


def test_a_report_says_what_a_private_method_spends_and_which_one_cannot_be_private() -> None:
    spends = check(FedAvg, only=["budget"])
    assert spends.remarks["budget"] == "in 2 rounds c0 spends 4 x DP-SGD at rate 0.6"
    refused = check(sly.Telling, only=["budget"])
    assert refused.broken == []
    said = "refused: privacy: Telling cannot be private as it stands: its step update: it reads"
    assert refused.remarks["budget"].startswith(said)
    assert str(refused).split("\n")[2].strip().startswith(said)


class Finished(FedAvg):
    """Steps after the last round change the server's memory."""

    def after(self) -> Sequence[Step]:
        return [self.finish]

    @at_server
    def finish(self, server: Node[Global], inbox: Inbox[Never]) -> None:
        """Halve the weights."""
        server.state = Global(algebra.scale(server.state.weights, 0.5))


def test_a_method_that_ends_with_steps_of_their_own_resumes_before_them() -> None:
    assert check(Finished, only=["resume", "channels"]).broken == []


def test_a_check_that_is_not_there_is_named() -> None:
    with pytest.raises(FedstillError, match="unknown check 'ordre'; did you mean 'order'"):
        check(FedAvg, only=["ordre"])


def test_a_single_draw_from_numpy_is_seen_wherever_its_generator_stands() -> None:
    before = global_generators()
    np.random.random()
    assert global_generators() != before
