"""What an author is told of common mistakes: method, step, node, and what to write instead."""

from __future__ import annotations

from typing import Any, Never

import pytest
import torch
from torch import Tensor

from fedstill.core import Addressed, Inbox, Node, Place, at_clients, at_server, minimize
from fedstill.core.errors import BadValue, StepError
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.methods.fedavg import Down, FedAvg, Global, Own, Up
from fedstill.testing import worlds


class Unawaited(FedAvg):
    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        start, batches = inbox.only().weights, client.data.batches(9, client.rng("order"))
        made: Any = minimize(self.objective, client.model, start, batches, self.optimizer)
        return Up(made, len(client.data))


class Bare(FedAvg):
    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        return inbox.only().weights  # type: ignore[return-value]


class Unaddressed(FedAvg):
    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Addressed[Down]:
        said: Any = {client: Down(server.state.weights) for client in server.models}
        return said  # type: ignore[no-any-return]


class Misdirected(FedAvg):
    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Addressed[Down]:
        return Addressed({"client-0": Down(server.state.weights)})


class Writing(FedAvg):
    @at_server
    def aggregate(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        server.state.weights = {}  # type: ignore[misc]


class Blank(FedAvg):
    @at_clients
    async def update(self, client: Node[Own], inbox: Inbox[Down]) -> Up:
        return Up(client.state.weights, 1)


class Plain(FedAvg):
    @at_server
    def aggregate(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        server.state = self.averaged(server.state.weights, list(inbox.values()))  # type: ignore[assignment]


class PlainFirst(FedAvg):
    def server_state(self, server: Node[Any]) -> Any:
        return {"weights": {}}


class Fails(FedAvg):
    def client_state(self, client: Node[Any]) -> Any:
        return client.model.nothing  # type: ignore[attr-defined]


class Wordy(FedAvg):
    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Down:
        server.log(mood="good")  # type: ignore[arg-type]
        return Down(server.state.weights)


class Wide(FedAvg):
    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Down:
        server.log(sizes=torch.zeros(2))
        return Down(server.state.weights)


class Torch(FedAvg):
    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        start, batches = inbox.only().weights, client.data.batches(9, client.rng("order"))
        theirs: Any = torch.optim.SGD(start.values(), lr=0.1)
        weights = await minimize(self.objective, client.model, start, batches, theirs)
        return Up(weights, len(client.data))


class Decided(FedAvg):
    def predict(self, node: Node[Any], x: Tensor) -> Tensor:
        return super().predict(node, x).argmax(1)


class Iterating(FedAvg):
    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        return [batch for batch in client.data]  # type: ignore[attr-defined,return-value]


class Weightless(FedAvg):
    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        return client.model(client.data.all().x)  # type: ignore[call-arg,arg-type,return-value]


class Moody(FedAvg):
    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        return client.model.eval()  # type: ignore[attr-defined,no-any-return]


class Unremembered(FedAvg):
    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        return client.previous  # type: ignore[attr-defined,no-any-return]


MISTAKES = [
    (Unawaited, "update failed on c0 in round 1", "Up.weights is a coroutine; write await before"),
    (
        Bare,
        "update failed on c0 in round 1",
        r"it returned a dict, but .* sends Up; return Up\(…\)",
    ),
    (Unaddressed, "broadcast failed on server in round 1", "it returned a dict, .* or Addressed"),
    (Misdirected, "broadcast failed on server in round 1", "for 'client-0', but there is no such"),
    (Writing, "aggregate failed on server in round 1", "replaced: node.state = node.state.replace"),
    (Blank, "update failed on c0 in round 1", "before its first step, client_state or server_"),
    (
        Plain,
        "aggregate failed on server in round 1",
        "it gave a dict to be remembered; a memory is",
    ),
    (PlainFirst, "server_state failed on server in round 0", "it gave a dict to be remembered"),
    (Fails, "client_state failed on c0 in round 0", "no attribute 'nothing'; a network holds"),
    (Iterating, "update failed on c0 in round 1", r"examples come in batches: data.batches\(size"),
    (Weightless, "update failed on c0 in round 1", r"holds no weights; write model\(weights, x\)"),
    (Moody, "update failed on c0 in round 1", r"model.evaluating\(weights, x\) as in evaluation"),
    (Unremembered, "update failed on c0 in round 1", "what a party remembers is in node.state"),
    (Wordy, "broadcast failed on server in round 1", "log: mood = 'good': must be a number"),
    (Wide, "broadcast failed on server in round 1", r"log: sizes is a tensor of shape \[2\]"),
    (Torch, "update failed on c0 in round 1", r"such as SGD\(0.1\) .* not a torch.optim.sgd.SGD"),
    (
        Decided,
        "predict failed on server in round 1",
        r"it gave \[\d+\] for \d+ examples; logits are",
    ),
]


@pytest.mark.filterwarnings("ignore:coroutine", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("engine", [InProcess, Batched])
@pytest.mark.parametrize(
    ("kind", "where", "says"), MISTAKES, ids=[k.__name__ for k, *_ in MISTAKES]
)
def test_a_mistake_is_told_with_its_place_and_what_to_do(
    engine: Any, kind: type[FedAvg], where: str, says: str
) -> None:
    with pytest.raises(StepError, match=rf"^{kind.__name__}\.{where}: .*{says}"):
        worlds.played(kind(lr=0.1), worlds.pictures(), 1, engine)


class ByHand(FedAvg):
    """Trains with an optimiser of torch, whose weights have graphs, and so begins the server."""

    def server_state(self, server: Node[Any]) -> Global:
        weights = super().server_state(server).weights
        return Global({name: torch.nn.Parameter(weight) for name, weight in weights.items()})

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        weights = {n: w.clone().requires_grad_() for n, w in inbox.only().weights.items()}
        optimizer = torch.optim.SGD(weights.values(), self.lr)
        for batch in client.data.batches(self.batch_size, client.rng("order")):
            optimizer.zero_grad()
            self.objective(client.model, weights, batch, weights).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return Up(weights, len(client.data))


@pytest.mark.parametrize("engine", [InProcess, Batched])
def test_what_a_step_leaves_has_no_graph_of_gradients(engine: type[InProcess]) -> None:
    by_hand, _ = worlds.played(ByHand(lr=0.1), worlds.pictures(), 3, engine)
    fedavg, _ = worlds.played(FedAvg(lr=0.1), worlds.pictures(), 3, engine)
    found, expected = (one.states["server"].tensors() for one in (by_hand, fedavg))
    assert not any(tensor.requires_grad for tensor in found.values())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_whose_models_are_scored_is_said_by_a_place() -> None:
    class Spelled(FedAvg):
        scored = "clients"  # type: ignore[assignment]

    with pytest.raises(
        BadValue, match=r"scored = 'clients': must be Place.SERVER or Place.CLIENTS"
    ):
        Spelled()
    assert FedAvg.scored is Place.SERVER
