"""Scalable: networks whose hidden layers can be narrowed; what is kept is not chosen here.

Layers that must keep the same units form a stream: all that adds into one residual path, and
whatever reads from it. A network names its streams and says which layer writes and reads which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor

from fedstill.core.errors import BadValue
from fedstill.core.model import NO_OPTION, Model

CLASSES = "classes"  # of the head's outputs; never narrowed
IMAGE = "image"  # what the first layer reads; never narrowed

Wiring = dict[str, tuple[str, ...]]
"""For each layer the stream it writes and, if it mixes units, the stream it reads."""


@dataclass(frozen=True)
class Scalable(Model):
    """A classifier that can keep a share `rate` of the units of every hidden layer.

    With `scaler`, training divides what every hidden layer makes by the rate, so that the layers
    after it see sums as large as those of the whole network; evaluation never does.
    """

    rate: float = field(default=1.0, kw_only=True, repr=False, metadata=NO_OPTION)
    scaler: bool = field(default=False, kw_only=True, repr=False, metadata=NO_OPTION)

    def streams(self) -> dict[str, int]:
        """The width of every stream of the whole network."""
        raise TypeError(f"{type(self).__name__} must define streams()")

    def wiring(self) -> Wiring:
        """Which streams each layer writes and reads."""
        raise TypeError(f"{type(self).__name__} must define wiring()")

    def narrowed(self, rate: float, *, scaler: bool = False) -> Self:
        """The network with a share of its units, or why it cannot be."""
        name = type(self).__name__.lower()
        if not 0 < rate <= 1:
            raise BadValue(f"{name}: rate = {rate!r}: must be in (0, 1]")
        small = replace(self, rate=rate, scaler=scaler)
        empty = [stream for stream, width in self.streams().items() if small.units(width) < 1]
        if empty:
            raise BadValue(f"{name}: rate = {rate!r} leaves {', '.join(empty)} without units")
        small.initial()  # refuses widths that a layer cannot take
        return small

    def units(self, width: int) -> int:
        """How many units of a stream are kept: the rate's share, rounded up."""
        return math.ceil(round(self.rate * width, 6))  # 0.1 · 30 is 3, whatever its last bit says

    def scaled(self, x: Tensor) -> Tensor:
        """The output of a hidden layer, divided by the rate in training."""
        return x / self.rate if self.scaler and self.training and self.rate != 1 else x


def four(name: str, numbers: tuple[int, ...], field: str = "widths") -> tuple[int, ...]:
    """A number for each of four layers or groups, or what is wrong with them."""
    if len(numbers) != 4 or not all(isinstance(each, int) and each > 0 for each in numbers):
        raise BadValue(f"{name}: {field} = {list(numbers)}: must be four whole numbers above 0")
    return numbers


def check_groups(name: str, norm: str, widths: Sequence[int], kept: Sequence[int]) -> None:
    """Refuse channels that a norm of four groups cannot divide among them."""
    for width, left in zip(widths, kept, strict=True):
        if norm == "group" and left % 4:
            raise BadValue(
                f"{name}: norm = 'group' has four groups, and {left} of {width} channels cannot "
                "be divided among them; use another width, rate or norm"
            )
