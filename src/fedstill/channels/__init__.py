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

CHANNELS: dict[str, type[Channel]] = {
    "half": Half,
    "eight_bit": EightBit,
    "top_k": TopK,
    "low_rank": LowRank,
}
"""The names of channels in a recipe."""

__all__ = [
    "CHANNELS",
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
