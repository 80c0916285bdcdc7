"""Gradients of single examples that lie aside, smaller than the usual way would have them.

A gradient that goes the usual way has the precision of its weights, and for each example it is as
large as they are: most of the time of a private step goes into writing and reading it. Who makes
one may put it aside instead, in half precision with the sums of its squares, or as the two
vectors whose product it is, and hand zeros on that take no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fedstill.core.torch_internals import is_wrapped

Place = tuple[int, torch.Size, tuple[int, ...]]  # where a tensor lies, and how


class Outer(NamedTuple):
    """[example, output, input], each example's a product of two vectors: of a linear layer."""

    told: Tensor  # [example, output]
    seen: Tensor  # [example, input]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.told.shape, self.seen.shape[1]))

    def whole(self) -> Tensor:
        """All numbers."""
        return torch.mul(self.told.unsqueeze(2), self.seen.unsqueeze(1))

    def squares(self) -> Tensor:
        """[example], the sums of squares, in double precision."""
        told, seen = (torch.linalg.vector_norm(one, dim=1, dtype=torch.float64) for one in self)
        return torch.mul(told, seen).square()

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """[output, input], over examples, each times its factor; those of 0 leave no trace."""
        counts = (factors != 0).unsqueeze(1)
        told, seen = (torch.where(counts, one, 0.0) for one in self)
        return torch.matmul((factors.unsqueeze(1) * told).mT, seen)


class Aside(NamedTuple):
    """What one use of some weights told them."""

    gradient: Tensor | Outer  # [example, …] of the weights' shape; a tensor is in half precision
    squares: Tensor  # [example], in double precision
    zeros: Tensor  # what was handed on in its place


class Taken(NamedTuple):
    """A gradient of single examples; its sum of squares, [example], where it is known."""

    gradient: Tensor | Outer
    squares: Tensor | None = None


_open: dict[Place, list[Aside]] | None = None


@contextmanager
def kept(weights: Sequence[Tensor]) -> Iterator[list[list[Aside]]]:
    """Inside, gradients of these weights may be put aside; they are found in the list of each."""
    global _open
    found: list[list[Aside]] = [[] for _ in weights]
    places = zip((_place(one) for one in weights), found, strict=True)
    before, _open = _open, {place: own for place, own in places if place is not None}
    try:
        yield found
    finally:
        _open = before


def wanted(weight: Tensor) -> list[Aside] | None:
    """Where a gradient of these very weights may be put; None where it goes the usual way."""
    place = None if _open is None else _place(weight)
    return None if _open is None or place is None else _open.get(place)


def put(place: list[Aside], gradient: Tensor | Outer, squares: Tensor) -> Tensor:
    """Put a gradient aside, and give the zeros that are handed on."""
    zeros = torch.zeros((), device=squares.device).expand(gradient.shape)
    place.append(Aside(gradient, squares, zeros))
    return zeros


def taken(gradient: Tensor, own: Sequence[Aside]) -> Taken:
    """The whole gradient: what came the usual way, and what lies aside.

    Where nothing but one that lies aside was told, it stays as it lies.
    """
    if not own:
        return Taken(gradient)
    if gradient.data_ptr() == own[0].zeros.data_ptr() and own[0].gradient.shape == gradient.shape:
        return Taken(own[0].gradient, own[0].squares)
    for one in own:
        more = one.gradient
        gradient = gradient + (more.whole() if isinstance(more, Outer) else more)
    return Taken(gradient)


def _place(tensor: Tensor) -> Place | None:
    """None for a tensor without memory of its own: of `torch.func`, or of a step being traced."""
    plain = type(tensor) in (Tensor, Parameter) and not is_wrapped(tensor)
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if plain else None
