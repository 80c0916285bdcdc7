"""Random networks for the steps of a loop, drawn some at a time on the device that uses them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator

from fedstill.core import seeds
from fedstill.core.records import Weights

MOST = 8  # networks of a pool
NUMBERS = 2**22  # of all networks of a pool, unless one alone has more

Draw = Callable[[Generator, int], list[Weights]]


def size(numbers: int, device: torch.device | str) -> int:
    """How many networks of so many numbers each are drawn at once.

    On a GPU a draw is mostly launches, which a pool saves; on a CPU there is nothing to save.
    """
    if torch.device(device).type != "cuda":
        return 1
    return max(1, min(MOST, NUMBERS // max(1, numbers)))


def networks(
    seed: int, draw: Draw, numbers: int, device: torch.device | str
) -> Callable[[int], Weights]:
    """The network of each step; the latest pool is kept, any other is drawn anew when asked for.

    A pool has a generator of its own, so a step's network does not depend on which were asked for
    before. `draw` makes so many networks of `numbers` numbers.
    """
    count = size(numbers, device)
    latest: dict[int, list[Weights]] = {}

    def network(step: int) -> Weights:
        number, place = divmod(step, count)
        if number not in latest:
            latest.clear()
            latest[number] = draw(seeds.generator(seed, number, device=device), count)
        return latest[number][place]

    return network
