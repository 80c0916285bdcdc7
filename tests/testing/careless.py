"""A method that does not say what its messages hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Never

import torch
from torch import Tensor

from fedstill.core import Inbox, Message, Method, Node, State, Step, at_clients, at_server


class Own(State):
    """What a party remembers."""

    weights: dict[str, Tensor]


class Opinion(Message):
    """What a client says of the public data."""

    logits: Tensor


@dataclass(frozen=True)
class Careless(Method):
    """Clients speak of the public data, and nobody learns from it."""

    def each_round(self) -> Sequence[Step]:
        return [self.speak, self.hear]

    def server_state(self, server: Node[Any]) -> Own:
        return Own(server.model.init(0))

    @at_clients
    def speak(self, client: Node[None], inbox: Inbox[Never]) -> Opinion:
        """Send zeros."""
        return Opinion(torch.zeros(len(client.public), client.model.classes))

    @at_server
    def hear(self, server: Node[Own], inbox: Inbox[Opinion]) -> None:
        """Listen."""
