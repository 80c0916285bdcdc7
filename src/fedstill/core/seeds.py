"""Draws from names: every random number is a function of a seed and of what it is for."""

from __future__ import annotations

import hashlib

import torch
from torch import Generator

Name = str | int


def draw(seed: int, *names: Name) -> int:
    """A 63-bit number that depends on the seed and on every name, and on nothing else."""
    text = "\x1f".join([f"{type(name).__name__}:{name}" for name in (seed, *names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *names: Name, device: torch.device | str = "cpu") -> Generator:
    """A fresh generator for one purpose; on the host unless a device is named."""
    return Generator(device=device).manual_seed(draw(seed, *names))
