"""Secret: what noise is drawn from that nobody else may know."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from fedstill.core import seeds
from fedstill.core.seeds import Name

MAGNITUDE = 2**63 - 1  # all bits of a number but its sign
FINE = 2**53 - 1  # as many bits as a number between 0 and 1 holds


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
        drawn = self._numbers(into.numel(), names)
        # One bit is the sign, the others say how far out the number lies.
        beyond = ((drawn & MAGNITUDE).double() + 0.5) * 2.0**-64
        below = torch.special.ndtri(beyond)
        return into.copy_(torch.where(drawn < 0, below, -below).reshape(into.shape))

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

    def _numbers(self, count: int, names: tuple[Name, ...]) -> Tensor:
        """[number], whole numbers of 64 bits."""
        if not count:
            return torch.zeros(0, dtype=torch.long)
        assert isinstance(self.seed, bytes)
        made = hashlib.shake_256(self.seed + repr(names).encode())
        return torch.frombuffer(bytearray(made.digest(8 * count)), dtype=torch.long)
