"""The outbox: messages coded by channels where their sender is; no delivery."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from torch import Generator

from fedstill.channels import Channel, Edge, sent
from fedstill.channels.channel import Memory
from fedstill.core.algebra import not_finite
from fedstill.core.content import LARGEST
from fedstill.core.node import SERVER, Addressed, Inbox, Node
from fedstill.core.records import Direction, Message, NodeId, State, Weights

_MARK = "\x1fchannels"  # no node has it in its name


class Kept(State):
    """What channels remember at a node: for each kind of message, by place in the row."""

    messages: dict[str, dict[str, Weights]]


def channels_of(node: NodeId) -> NodeId:
    """The name under which lies what channels remember at a node."""
    return node + _MARK


def owner(name: NodeId) -> NodeId:
    """The node to which a memory of this name belongs."""
    return name.removesuffix(_MARK)


def kind_of(name: NodeId, own: type[State] | None) -> type[State] | None:
    """The kind of a memory of this name, where the node's own is of a given kind."""
    return Kept if name.endswith(_MARK) else own


class Outbox:
    """Codes what nodes send; what channels remember lies beside the nodes' own memories."""

    def __init__(self, channels: Sequence[Channel], states: MutableMapping[NodeId, State | None]):
        self.channels, self.states = channels, states

    def acts(self, direction: Direction | None) -> bool:
        """Whether some channel stands on a way."""
        return any(direction in channel.directions for channel in self.channels)

    def coded(
        self, node: Node[Any], inbox: Inbox[Any], message: Any, direction: Direction, step: str
    ) -> tuple[Any, bool]:
        """A message, or one for each hearer, as it travels; and whether one was lost.

        The very same message for several hearers is coded once. One with NaN or immense numbers
        stays as it is: it will not be delivered, and no channel shall remember it.
        """
        if not isinstance(message, Addressed):
            made = self._one(node, inbox, message, direction, step)
            return made, made is None
        done: dict[int, Message | None] = {}
        for hearer, one in sorted(message.items()):
            if id(one) not in done:
                good = not not_finite(one, LARGEST)
                key = f"{step} to {hearer}"
                done[id(one)] = self._one(node, inbox, one, direction, key) if good else one
        kept = {hearer: done[id(one)] for hearer, one in message.items()}
        arriving = {hearer: one for hearer, one in kept.items() if one is not None}
        return Addressed(arriving), len(arriving) < len(kept)

    def _one(
        self, node: Node[Any], inbox: Inbox[Any], message: Message, direction: Direction, key: str
    ) -> Message | None:
        def rng(purpose: str) -> Generator:
            return node.rng(f"{key}: {purpose}")

        name = channels_of(node.id)
        kept = self.states.get(name)
        messages = kept.messages if isinstance(kept, Kept) else {}
        before: Memory = messages.get(key, {})
        heard = inbox.get(SERVER) if direction == "up" else None
        made, after = sent(self.channels, message, Edge(direction, rng, heard), before)
        if after:
            self.states[name] = Kept({**messages, key: after})
        return made
