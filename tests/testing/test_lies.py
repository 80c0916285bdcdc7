"""The lies of the contract, for the forms of messages that methods send only when asked."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from fedstill.core import Addressed, Inbox, Message, Node, Weights, at_clients, at_server
from fedstill.core.content import Axes
from fedstill.methods import METHODS
from fedstill.methods.fedavg import Down, FedAvg, Global, Up
from fedstill.testing import Broken, check, worlds
from fedstill.testing.lies import lies

FORMS: list[tuple[str, dict[str, Any]]] = [
    ("feddm", {"client_weight": "examples"}),
    ("fedproto", {"weighting": "examples"}),
    ("fedproto", {"inference": "prototype"}),
    ("heterofl", {"masked": True}),
    ("fedlgd", {"local_update": "scaffold", "global_start": "averaged_statistics"}),
    ("desa", {"combination": "union"}),
    ("desa", {"combination": "union", "mix": "flood", "mix_steps": 2}),
    ("desa", {"mix": "fastmix", "mix_steps": 2}),
    ("desa", {"anchors": "generator"}),
    ("vhl", {"sharing": "images"}),
    ("dfrd", {"role": "data_free"}),
    ("feddf", {"average": False}),
]


@pytest.mark.parametrize(("name", "values"), FORMS)
def test_every_form_of_a_message_is_looked_at(name: str, values: dict[str, Any]) -> None:
    kind = METHODS[name]
    check(kind(**{**kind.presets["small"], **values}), only=["content"])


def test_statistics_of_static_norms_are_looked_at() -> None:
    method = METHODS["heterofl"](lr=0.1, batch_size=8, rho=2, norm_statistics="clients")
    check(method, world=worlds.pictures(norm="static"), only=["content"])


class Word(Message):
    """A tensor, a table and a number."""

    values: torch.Tensor
    named: dict[str, torch.Tensor]
    count: int
    weights: Weights


def test_each_field_is_lied_about_in_every_way() -> None:
    word = Word(torch.zeros(3), {"a": torch.tensor([1, 2])}, 5, {"w": torch.zeros(1)})
    told = {(lie.field, lie.what) for lie in lies(word)}
    assert {what for field, what in told if field == "values"} == {
        "its first row alone", "one row more", "one axis more", "another type",
        "values of 1e30", "NaN",
    }  # fmt: skip
    assert {what for field, what in told if field == "named"} == {"with one more name"}
    assert ("weights", "without 'w'") in told
    assert ("named.a", "values of -1") in told and ("count", "-1 in place of 5") in told
    assert word.values.sum() == 0 and word.count == 5, "the message itself stays as it was"


EXAMPLES = {name: len(worlds.pictures().party(name).data) for name in worlds.pictures().clients}


class DownWithLogits(Down):
    """Weights, and logits of the examples of whoever hears it."""

    logits: Annotated[Tensor, Axes("example", "class")]


class Looking(FedAvg):
    """Is told logits of a client's examples; how many there are, only the client knows."""

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Any]) -> Addressed[DownWithLogits]:
        """Send each client a row for each of its examples."""
        weights, classes = server.state.weights, server.model.classes
        return Addressed(
            {who: DownWithLogits(weights, torch.zeros(n, classes)) for who, n in EXAMPLES.items()}
        )

    @at_clients
    async def update(self, client: Node[Any], inbox: Inbox[DownWithLogits]) -> Up:
        """Train, once the logits were looked at."""
        if len(inbox.only().logits) != len(client.data):
            client.reject("server", "sent logits of other examples")
        weights, _ = await self.trained(client, inbox.only().weights)
        return Up(weights, len(client.data))


class Failing(Looking):
    """Fails over logits that it did not look at."""

    @at_clients
    async def update(self, client: Node[Any], inbox: Inbox[DownWithLogits]) -> Up:
        """Train, and count on as many logits as there are examples."""
        assert len(inbox.only().logits) == len(client.data)
        weights, _ = await self.trained(client, inbox.only().weights)
        return Up(weights, len(client.data))


def test_what_a_message_must_be_may_be_seen_by_the_step_that_reads_it() -> None:
    check(Looking(lr=0.1, batch_size=8), only=["content", "purity"])
    with pytest.raises(Broken, match=r"its first row alone is not refused.*node\.reject"):
        check(Failing(lr=0.1, batch_size=8), only=["content"])
