"""Loops: inner loops described rather than run; no choice of gradient operator."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from fedstill.core.model import Network
from fedstill.core.optim import Optimizer
from fedstill.core.records import Weights, is_buffer

C = TypeVar("C")
T = TypeVar("T")
Given = Mapping[str, Any]


class Gradient(Protocol):
    """An engine's gradient operator: of a scalar function, with what it notes on the way."""

    def __call__(
        self, function: Callable[[Any], tuple[Tensor, Any]], value: Any
    ) -> tuple[Any, Tensor, Any]:
        """Gradient, value of the function, and its notes."""


@dataclass(frozen=True, eq=False)
class Loop(Generic[C]):
    """`carry, loss = body(carry, given, batch, gradient)` for each batch; awaitable.

    A step awaits it and an engine runs it: alone, or together with others that can be stacked.
    """

    body: Callable[[C, Given, Any, Gradient], tuple[C, Tensor]]
    carry: C
    given: Given
    batches: Sequence[Any]

    def __await__(self) -> Generator[Loop[C], C, C]:
        return (yield self)


@dataclass(frozen=True, eq=False)
class Descent:
    """The body of `minimize`: one step of an optimiser on one batch.

    Two are equal when they do the same: same functions of equal owners, model and optimiser.
    """

    objective: Callable[..., Tensor]
    model: Network
    optimizer: Optimizer
    project: Callable[..., Any] | None = None
    privacy: Any = None

    def _key(self) -> tuple[Any, ...]:
        functions = (_identity(self.objective), _identity(self.project))
        return (*functions, self.model, self.optimizer, self.privacy)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Descent) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __call__(
        self, carry: tuple[Any, Any], given: Given, batch: Any, gradient: Gradient
    ) -> tuple[tuple[Any, Any], Tensor]:
        value, memory = carry
        moving = moved_part(value)

        def scored(candidate: Any) -> tuple[Tensor, Weights]:
            notes: Weights = {}
            model = self.model.train(notes)
            loss = self.objective(model, joined(value, candidate), batch, **given)
            return loss, notes

        if self.privacy is not None:
            gradient = self.privacy.operator(gradient, batch)
        grad, loss, notes = gradient(scored, moving)
        moving, memory = self.optimizer.step(moving, grad, memory)
        value = joined(value, {**moving, **notes} if notes else moving)
        if self.project is not None:
            value = self.project(value, **given)
        return (value, memory), loss


def _identity(function: Callable[..., Any] | None) -> Any:
    """What makes a function the same: for a method, the owner's value rather than the object."""
    if isinstance(function, MethodType):
        return (function.__func__, function.__self__)
    return function


def moved_part(value: Any) -> Any:
    """What is optimised: everything but the statistics of a state dict."""
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if not is_buffer(name)}


def joined(value: Any, changes: Any) -> Any:
    """A value with some entries changed, in the order it had."""
    return {**value, **changes} if isinstance(value, dict) else changes


async def minimize(
    objective: Callable[..., Tensor],
    model: Network,
    start: T,
    batches: Sequence[Any],
    optimizer: Optimizer,
    /,
    *,
    project: Callable[..., T] | None = None,
    privacy: Any = None,
    **given: Any,
) -> T:
    """Where `optimizer` comes from `start` on `objective(model, value, batch, **given)`.

    The value may be weights, images or any dict of tensors; statistics among weights are
    carried along, not optimised. `project(value, **given)` is applied after every step.
    """
    body = Descent(objective, model, optimizer, project, privacy)
    memory = optimizer.start(moved_part(start))
    carry: tuple[T, Any] = (start, memory)
    return (await Loop(body, carry, given, batches))[0]
