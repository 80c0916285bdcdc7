"""Secret: what noise is drawn from that nobody else may know."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import accumulate

import torch
from torch import Generator, Tensor

from fedstill.core import seeds
from fedstill.core.seeds import Name

MAGNITUDE = 2**63 - 1  # all bits of a number but its sign
FINE = 2**53 - 1  # as many bits as a number between 0 and 1 holds
# How often each whole part of a normal number is tried, in steps of 2**-63: those above 9 hardly
# come, and of all numbers 1e-17 are wrong by that.
TRIED = [(Decimal(-k * k) / 2).exp() for k in range(13)]
UP_TO = torch.tensor(
    [min(MAGNITUDE, int(2**63 * some / sum(TRIED))) for some in accumulate(TRIED[:-1])]
)


@dataclass(frozen=True)
class Secret:
    """Draws for one purpose, from 32 bytes that only a site can make, or simulated from a seed.

    torch's generators on a host keep 32 bits of their seed, so all of them can be tried, and what
    they drew tells what they will draw. What is really secret is therefore drawn by SHAKE-256.
    """

    seed: int | bytes = field(repr=False)

    def normal(self, into: Tensor, *names: Name) -> Tensor:
        """`into` with standard normal numbers, which depend on the secret and on every name."""
        if isinstance(self.seed, int):
            return into.normal_(generator=seeds.generator(self.seed, *names, device=into.device))
        below, whole, fraction = self._exact(into.numel(), names)
        size = whole + (fraction.double() + 0.5) * 2.0**-53
        return into.copy_(torch.where(below, -size, size).reshape(into.shape))

    def whole(self, into: Tensor, bits: int, *names: Name) -> Tensor:
        """2**bits times standard normal numbers, rounded down, in the shape of `into`.

        The rounding is exact. What is simulated is drawn into `into` first.
        """
        if isinstance(self.seed, int):
            return (self.normal(into, *names).double() * 2.0**bits).floor().long()
        below, whole, fraction = self._exact(into.numel(), names)
        steps = (whole << bits) | (fraction >> (53 - bits))
        return torch.where(below, ~steps, steps).reshape(into.shape).to(into.device)

    def uniform(self, count: int, *names: Name) -> Tensor:
        """[number], numbers from 0 up to 1, on the host."""
        if isinstance(self.seed, int):
            return torch.rand(count, generator=seeds.generator(self.seed, *names))
        return (self._numbers(count, names) & FINE).double() * 2.0**-53

    def generator(self, *names: Name) -> Generator:
        """A generator on the host, for draws that depend on the secret but need not be one."""
        if isinstance(self.seed, int):
            return seeds.generator(self.seed, *names)
        return seeds.generator(int(self._numbers(1, ("generator", *names))))

    def _exact(self, count: int, names: tuple[Name, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """[number] each, of normal numbers: whether below 0, whole part, fraction in 2**-53.

        By rejection (after Karney, ACM TOMS 2016): k is tried with a chance in proportion to
        exp(-k²/2), a fraction x uniformly, and kept with the chance exp(-x(2k + x)/2). Every number
        below 5 is as likely as it should be to one part in 2**45 or better; the inverse of the
        distribution function would only be near to that for the first bits.
        """
        below = torch.empty(count, dtype=torch.bool)
        whole, fraction = torch.empty(2, count, dtype=torch.long)
        left, attempt = torch.arange(count), 0
        while len(left):
            first, x, chance = self._numbers(3 * len(left), (*names, "try", attempt)).view(3, -1)
            k, x = torch.searchsorted(UP_TO, first & MAGNITUDE, right=True), x & FINE
            size = (x.double() + 0.5) * 2.0**-53
            keep = (chance & MAGNITUDE) >> 1 < (torch.exp(-size * (size / 2 + k)) * 2.0**62).long()
            kept = keep.nonzero().squeeze(1)
            at = left[kept]
            below[at], whole[at], fraction[at] = first[kept] < 0, k[kept], x[kept]
            left, attempt = left[~keep], attempt + 1
        return below, whole, fraction

    def _numbers(self, count: int, names: tuple[Name, ...]) -> Tensor:
        """[number], whole numbers of 64 bits."""
        if not count:
            return torch.zeros(0, dtype=torch.long)
        assert isinstance(self.seed, bytes)
        made = hashlib.shake_256(self.seed + repr(names).encode())
        return torch.frombuffer(bytearray(made.digest(8 * count)), dtype=torch.long)
