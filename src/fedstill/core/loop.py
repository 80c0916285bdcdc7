"""Loops: inner loops described rather than run; no choice of gradient operator."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Generic, TypeVar

from torch import Tensor

from fedstill.core.mechanism import Gradient, Mechanism, Scored
from fedstill.core.model import Network
from fedstill.core.optim import Optimizer
from fedstill.core.records import Weights, is_buffer

C = TypeVar("C")
T = TypeVar("T")
Given = Mapping[str, Any]


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
    mechanism: Mechanism | None = None

    def _key(self) -> tuple[Any, ...]:
        functions = (_identity(self.objective), _identity(self.project))
        return (*functions, self.model, self.optimizer, self.mechanism)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Descent) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __call__(
        self, carry: tuple[Any, Any], given: Given, batch: Any, gradient: Gradient
    ) -> tuple[tuple[Any, Any], Tensor]:
        value, memory = carry
        moving = moved_part(value)

        def loss_on(batch: Any) -> Scored:
            def scored(candidate: Any) -> tuple[Tensor, Weights]:
                notes: Weights = {}
                model = self.model.train(notes)
                loss = self.objective(model, joined(value, candidate), batch, **given)
                return loss, notes

            return scored

        if self.mechanism is None:
            grad, loss, notes = gradient(loss_on(batch), moving)
        else:
            grad, loss, notes = self.mechanism.gradient(loss_on, moving, batch, gradient)
        moving, memory = self.optimizer.step(moving, grad, memory)
        value = joined(value, {**moving, **notes} if notes else moving)
        if self.project is not None:
            value = self.project(value, **given)
        return (value, memory), loss

    @property
    def stacks_well(self) -> bool:
        """Whether such loops are faster as a stack: the kernels for it make plain gradients."""
        return self.model.stacks_well and self.mechanism is None


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
    mechanism: Mechanism | None = None,
    **given: Any,
) -> T:
    """Where `optimizer` comes from `start` on `objective(model, value, batch, **given)`.

    The value may be weights, images or any dict of tensors; statistics among weights are
    carried along, not optimised. `project(value, **given)` is applied after every step.
    A `mechanism` makes the gradient in its own way; it then gets the batches as they are.
    """
    body = Descent(objective, model, optimizer, project, mechanism)
    memory = optimizer.start(moved_part(start))
    carry: tuple[T, Any] = (start, memory)
    return (await Loop(body, carry, given, batches))[0]
