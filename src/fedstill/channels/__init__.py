"""How messages are coded on their way; no counting, no delivery.

A channel is a pair: `send` where the sender is, `receive` where the message is read.
"""

from fedstill.channels.channel import Channel, Edge, received, sent
from fedstill.channels.coded import Coded
from fedstill.channels.eight_bit import EightBit
from fedstill.channels.half import Half
from fedstill.channels.low_rank import LowRank
from fedstill.channels.tensors import TensorChannel
from fedstill.channels.top_k import TopK
from fedstill.core.names import Names, subclass_fault

CHANNELS: dict[str, type[Channel]] = {
    "half": Half,
    "eight_bit": EightBit,
    "top_k": TopK,
    "low_rank": LowRank,
}
"""The names of channels in a recipe."""

CHANNEL_NAMES: Names[type[Channel]] = Names(
    "channel", CHANNELS, "fedstill.channels", subclass_fault(Channel)
)

__all__ = [
    "CHANNELS",
    "CHANNEL_NAMES",
    "Channel",
    "Coded",
    "Edge",
    "EightBit",
    "Half",
    "LowRank",
    "TensorChannel",
    "TopK",
    "received",
    "sent",
]
