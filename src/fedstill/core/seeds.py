"""Draws from names: every random number is a function of a seed and of what it is for."""

from __future__ import annotations

import hashlib
from functools import partial

import torch
from torch import Generator, Tensor

from fedstill.core.beside import at_once

BLOCK = 2**17  # numbers that one generator draws in a row

Name = str | int


def draw(seed: int, *names: Name) -> int:
    """A 63-bit number that depends on the seed and on every name, and on nothing else."""
    text = "\x1f".join([f"{type(name).__name__}:{name}" for name in (seed, *names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *names: Name, device: torch.device | str = "cpu") -> Generator:
    """A fresh generator for one purpose; on the host unless a device is named."""
    return Generator(device=device).manual_seed(draw(seed, *names))


def fill_normal(numbers: Tensor, seed: int, device: torch.device | str = "cpu") -> None:
    """Write standard normal numbers into a tensor of the host that lies in one piece.

    Every block of them has a generator of its own, so that several threads may draw where a GPU,
    the `device`, waits for them.
    """
    blocks = numbers.view(-1).split(BLOCK)
    sources = [generator(seed)]
    sources += [generator(seed, "block", number) for number in range(1, len(blocks))]
    pairs = zip(blocks, sources, strict=True)
    at_once([partial(block.normal_, generator=source) for block, source in pairs], device)
