"""Optimisers as functions of gradient, memory and value; no nn.Module."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.core.torch_internals import (
    add_each,
    is_wrapped,
    product_each,
    quotient_each,
    raised_each,
    root_each,
    sum_each,
    times_each,
)

T = TypeVar("T")


class Optimizer(Protocol):
    """Frozen and hashable; its memory is a tree of tensors that starts from the value's shapes."""

    def start(self, value: Any) -> Any: ...

    def step(self, value: T, gradient: T, memory: Any) -> tuple[T, Any]: ...


def _times(tensors: list[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Each tensor times a factor; in one operation for all, but under `torch.func`."""
    if _wrapped(tensors):
        return [tensor * factor for tensor in tensors]
    return times_each(tensors, factor)


def _sum(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """Each tensor plus its counterpart."""
    if _wrapped(left) or _wrapped(right):
        return [a + b for a, b in zip(left, right, strict=True)]
    return sum_each(left, right)


def _plus(left: list[Tensor], right: list[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Each tensor plus its counterpart times a factor; one operation where only a GPU rounds."""
    if isinstance(factor, Tensor) or not all(tensor.is_cuda for tensor in left):
        return _sum(left, _times(right, factor))
    if _wrapped(left) or _wrapped(right):
        return [torch.add(a, b, alpha=factor) for a, b in zip(left, right, strict=True)]
    return sum_each(left, right, factor)


def _plus_over(left: list[Tensor], right: list[Tensor], factor: float | Tensor) -> list[Tensor]:
    """As `_plus`, to the same bits; what comes out is written over what stands left."""
    if isinstance(factor, Tensor) or not all(tensor.is_cuda for tensor in left):
        right, factor = _times(right, factor), 1.0
    if _wrapped(left) or _wrapped(right):
        return [a.add_(b, alpha=factor) for a, b in zip(left, right, strict=True)]
    add_each(left, right, factor)
    return left


def _products(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """Each tensor times its counterpart."""
    if _wrapped(left) or _wrapped(right):
        return [a * b for a, b in zip(left, right, strict=True)]
    return product_each(left, right)


def _over(tensors: list[Tensor], divisor: Tensor) -> list[Tensor]:
    """Each tensor over a number."""
    if _wrapped([*tensors, divisor]):
        return [tensor / divisor for tensor in tensors]
    return quotient_each(tensors, divisor)


def _quotients(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """Each tensor over its counterpart."""
    if _wrapped(left) or _wrapped(right):
        return [a / b for a, b in zip(left, right, strict=True)]
    return quotient_each(left, right)


def _roots(tensors: list[Tensor], more: float) -> list[Tensor]:
    """The square root of each tensor, plus a number."""
    if _wrapped(tensors):
        return [tensor.sqrt() + more for tensor in tensors]
    return raised_each(root_each(tensors), more)


def _wrapped(tensors: list[Tensor]) -> bool:
    return any(map(is_wrapped, tensors))


@dataclass(frozen=True)
class SGD:
    """v ← momentum · v + (g + decay · w);  w ← w - lr · v (v starts at the first gradient)."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def start(self, value: Any) -> Any:
        return trees.map_tensors(torch.zeros_like, value) if self.momentum else ()

    def step(
        self, value: T, gradient: T, memory: Any, rate: Tensor | None = None, *, over: bool = False
    ) -> tuple[T, Any]:
        """What a step comes to; written `over` the value where nobody reads that any more."""
        columns = trees.columns([value, gradient, memory] if self.momentum else [value, gradient])
        if not columns:  # nothing to move
            return value, memory
        moving, grads, *speeds = (list(column) for column in zip(*columns, strict=True))
        if self.weight_decay:
            grads = _plus(grads, moving, self.weight_decay)
        if self.momentum:
            grads = _plus(grads, speeds[0], self.momentum)
            memory = trees.with_tensors(value, grads)
        factor = -(self.lr if rate is None else rate)
        moved = (_plus_over if over else _plus)(moving, grads, factor)
        return trees.with_tensors(value, moved), memory


@dataclass(frozen=True)
class Adam:
    """Adam with bias correction; weight decay is added to the gradient."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def start(self, value: Any) -> Any:
        first = trees.map_tensors(torch.zeros_like, value)
        second = trees.map_tensors(torch.zeros_like, value)
        count = torch.zeros((), device=trees.tensors(value)[0].device)
        return {"first": first, "second": second, "count": count}

    def step(self, value: T, gradient: T, memory: Any, rate: Tensor | None = None) -> tuple[T, Any]:
        columns = trees.columns([value, gradient, memory["first"], memory["second"]])
        moving, grads, first, second = (list(column) for column in zip(*columns, strict=True))
        if self.weight_decay:
            grads = _plus(grads, moving, self.weight_decay)
        b1, b2 = self.betas
        count = memory["count"] + 1
        first = _sum(_times(first, b1), _times(grads, 1 - b1))
        second = _sum(_times(second, b2), _products(_times(grads, 1 - b2), grads))
        roots = _roots(_over(second, 1 - b2**count), self.eps)
        way = _times(_over(first, 1 - b1**count), -(self.lr if rate is None else rate))
        moved = trees.with_tensors(value, _sum(moving, _quotients(way, roots)))
        averages = [trees.with_tensors(value, average) for average in (first, second)]
        return moved, {"first": averages[0], "second": averages[1], "count": count}


Schedule = Literal["constant", "halfway", "cosine"]


@dataclass(frozen=True)
class Scheduled:
    """Another optimiser whose rate falls: its steps are shortened to a share that falls.

    `halfway`: to a tenth after half of the steps; `cosine`: to zero along half a cosine. A step of
    SGD and of Adam is proportional to the rate, and their memories do not depend on it.
    """

    base: Optimizer
    # Later steps are as the last. It lives in the memory: loops of other lengths can be stacked.
    steps: int = field(compare=False)
    fall: Schedule = "cosine"

    def start(self, value: Any) -> Any:
        count = torch.zeros((), device=trees.tensors(value)[0].device)
        return {"base": self.base.start(value), "count": count, "steps": count + self.steps}

    def step(self, value: T, gradient: T, memory: Any) -> tuple[T, Any]:
        moved, kept = self.base.step(value, gradient, memory["base"])
        done = (memory["count"] / memory["steps"]).clamp(max=1)
        if self.fall == "cosine":
            share = (1 + torch.cos(math.pi * done)) / 2
        else:
            share = torch.where(done < 0.5, 1.0, 0.1)
        value = trees.map_tensors(lambda old, new: old + share * (new - old), value, moved)
        return value, {**memory, "base": kept, "count": memory["count"] + 1}


def scheduled(base: Optimizer, steps: int, fall: Schedule) -> Optimizer:
    """The optimiser with its rate falling over so many steps; itself when the rate is constant."""
    return base if fall == "constant" else Scheduled(base, steps, fall)


@dataclass(frozen=True)
class Rated:
    """SGD or Adam whose rate lies in its memory; with another rate it is the same optimiser.

    So a loop whose rate falls from round to round is the same loop, which is recorded once.
    """

    base: SGD | Adam  # of any rate
    rate: float = field(compare=False)

    def start(self, value: Any) -> Any:
        rate = torch.full((), self.rate, device=trees.tensors(value)[0].device)
        return {"base": self.base.start(value), "rate": rate}

    def step(self, value: T, gradient: T, memory: Any) -> tuple[T, Any]:
        moved, kept = self.base.step(value, gradient, memory["base"], memory["rate"])
        return moved, {**memory, "base": kept}


def rated(optimizer: SGD | Adam) -> Rated:
    """The optimiser with its rate in its memory."""
    return Rated(replace(optimizer, lr=1.0), optimizer.lr)


@dataclass(frozen=True)
class Clipped:
    """Another optimiser, whose gradients are shortened to a length where they are longer."""

    base: Optimizer
    longest: float

    def start(self, value: Any) -> Any:
        return self.base.start(value)

    def step(self, value: T, gradient: T, memory: Any) -> tuple[T, Any]:
        squares = [tensor.square().sum() for tensor in trees.tensors(gradient)]
        length = torch.stack(squares).sum().sqrt()
        share = (self.longest / length.clamp(min=self.longest)).detach()
        shorter = trees.map_tensors(lambda tensor: tensor * share, gradient)
        return self.base.step(value, shorter, memory)


@dataclass(frozen=True)
class PerEntry:
    """Another optimiser for each entry of a dict."""

    optimizers: tuple[tuple[str, Optimizer], ...]

    def start(self, value: Any) -> Any:
        return {name: optimizer.start(value[name]) for name, optimizer in self.optimizers}

    def step(self, value: T, gradient: T, memory: Any) -> tuple[T, Any]:
        moved: dict[str, Any] = {}
        kept: dict[str, Any] = {}
        for name, optimizer in self.optimizers:
            moved[name], kept[name] = optimizer.step(value[name], gradient[name], memory[name])  # type: ignore[index]
        return {name: moved[name] for name in value}, kept  # type: ignore[attr-defined,return-value]
