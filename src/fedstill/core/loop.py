"""Loops: inner loops described rather than run; no choice of gradient operator."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.core.data import Batches, Gather
from fedstill.core.errors import BadValue
from fedstill.core.mechanism import Gradient, Mechanism, Scored
from fedstill.core.model import Network
from fedstill.core.optim import SGD, Optimizer
from fedstill.core.records import Weights, is_buffer
from fedstill.core.release import ClippedGradient, Sampled
from fedstill.core.seeds import generator
from fedstill.core.torch_internals import unwrapped

C = TypeVar("C")
T = TypeVar("T")
M = TypeVar("M")
Given = Mapping[str, Any]

_OVERWRITING: ContextVar[Any] = ContextVar("overwriting", default=None)  # the body, if any


@contextmanager
def overwriting(body: Any) -> Iterator[None]:
    """Inside, a step of this body may write what it comes to over its carry, sparing a copy.

    That is for who wants the carry only as the next step's. A body within this one keeps its own
    carry, which may be what others read.
    """
    token = _OVERWRITING.set(body)
    try:
        yield
    finally:
        _OVERWRITING.reset(token)


@dataclass(frozen=True, eq=False)
class Loop(Generic[C]):
    """`carry, loss = body(carry, given, batch, gradient)` for each batch; awaitable.

    A step awaits it and an engine runs it: alone, or together with others that can be stacked.
    A loop that is one of several parts says how many steps they have together.
    """

    body: Callable[[C, Given, Any, Gradient], tuple[C, Tensor]]
    carry: C
    given: Given
    batches: Sequence[Any]
    in_all: int = 0  # steps of all its parts, where it is one of several

    @property
    def steps(self) -> int:
        """How often the body is run: in this loop, or in all of which it is a part."""
        return max(self.in_all, len(self.batches))

    def __await__(self) -> Generator[Loop[C], C, C]:
        return (yield self)

    @property
    def tells_loss(self) -> bool:
        """Whether its losses may be written down: not where they would tell of single examples."""
        body = self.body
        if isinstance(body, Descent):
            return not isinstance(body.mechanism, ClippedGradient)
        return not getattr(body, "silent", False)

    def drawing(self, draw: Callable[[], int]) -> Loop[C]:
        """The same loop, whose batches bring a seed each where its network draws in training."""
        if not isinstance(self.body, Descent) or not self.body.model.draws:
            return self
        rng = generator(draw(), "steps")
        seeds = torch.randint(2**32, (len(self.batches), 2), generator=rng)
        device = next(iter(trees.tensors(self.carry))).device
        return replace(self, batches=SeededBatches(self.batches, seeds.to(device)))


class Several(NamedTuple):
    """Loops of one node that do not need each other; their answers come as a list."""

    loops: tuple[Loop[Any], ...]


async def side_by_side(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What each of several works of one step returns, whose loops do not need each other.

        images = await side_by_side([matched(one) for one in sets])

    They go on together from loop to loop, so that an engine may stack these loops, or run them
    beside each other, as it does with the loops of different nodes.
    """
    return await _SideBySide(works)


@dataclass(frozen=True, eq=False)
class _SideBySide(Generic[T]):
    works: Sequence[Coroutine[Any, Any, T]]

    def __await__(self) -> Generator[Several, list[Any], list[T]]:
        ended: dict[int, T] = {}
        answers: dict[int, Any] = dict.fromkeys(range(len(self.works)))
        while answers:
            asked: dict[int, Loop[Any]] = {}
            for place, answer in answers.items():
                try:
                    asked[place] = self.works[place].send(answer)
                except StopIteration as end:
                    ended[place] = end.value
            found = (yield Several(tuple(asked.values()))) if asked else []
            answers = dict(zip(asked, found, strict=True))
        return [ended[place] for place in range(len(self.works))]


class Seeded(NamedTuple):
    """A batch, and what its step's draws depend on."""

    batch: Any
    seed: Tensor  # [2], whole numbers below 2**32


@dataclass(frozen=True, eq=False)
class SeededBatches(Batches[Seeded]):
    """Batches with a seed for each step."""

    plain: Sequence[Any]
    seeds: Tensor  # [step, 2]

    def __len__(self) -> int:
        return len(self.plain)

    def at(self, step: int) -> Seeded:
        return Seeded(self.plain[step], self.seeds[step])

    def ahead(self, step: int, count: int) -> Seeded | None:
        found = self.plain.ahead(step, count) if isinstance(self.plain, Batches) else None
        return None if found is None else Seeded(found, self.seeds[step : step + count])

    @classmethod
    def together(cls, plans: Sequence[Sequence[Seeded]]) -> Gather[Seeded]:
        known = [plan for plan in plans if isinstance(plan, SeededBatches)]
        first = known[0].plain if len(known) == len(plans) else None
        if not isinstance(first, Batches):
            return super().together(plans)
        gather = first.together([plan.plain for plan in known])

        def gathered(active: int, step: int) -> list[tuple[list[int], Seeded]]:
            return [
                (places, Seeded(batch, torch.stack([known[i].seeds[step] for i in places])))
                for places, batch in gather(active, step)
            ]

        return gathered


class Prepared(NamedTuple):
    """What `prepare` has made of a batch."""

    batch: Any


@dataclass(frozen=True, eq=False)
class Descent:
    """The body of `minimize`: one step of an optimiser on one batch.

    Two are equal when they do the same: same functions of equal owners, model and optimiser.
    """

    recordable: ClassVar[bool] = True  # its steps may be recorded, as those of any such body

    objective: Callable[..., Tensor]
    model: Network
    optimizer: Optimizer
    project: Callable[..., Any] | None = None
    mechanism: Mechanism | None = None
    prepare: Callable[..., Any] | None = None

    def _key(self) -> tuple[Any, ...]:
        given = (self.objective, self.project, self.prepare)
        functions = tuple(map(_identity, given))
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
        network = self.model
        if isinstance(batch, Seeded):
            network, batch = network.drawing(batch.seed), batch.batch

        def loss_on(batch: Any) -> Scored:
            def scored(candidate: Any) -> tuple[Tensor, Weights]:
                notes: Weights = {}
                model = network.train(notes)
                seen = self._prepared(network.train({}), batch, given)
                loss = self.objective(model, joined(value, candidate), seen, **given)
                return checked_loss(loss, self.objective), notes

            return scored

        if self.mechanism is None:
            _check_exact(batch, self.objective)
            grad, loss, notes = gradient(loss_on(batch), moving)
        else:
            grad, loss, notes = self.mechanism.gradient(loss_on, moving, batch, gradient)
        if _OVERWRITING.get() is self and type(self.optimizer) is SGD:
            # Either may be a weight itself.
            loss, notes = loss.clone(), apart_from(trees.tensors(moving), notes)
            moving, memory = self.optimizer.step(moving, grad, memory, over=True)
        else:
            moving, memory = self.optimizer.step(moving, grad, memory)
        if notes:
            _check_notes(notes, value, self.objective)
        value = joined(value, {**moving, **notes} if notes else moving)
        if self.project is not None:
            value = self.project(value, **given)
        return (value, memory), loss

    def prepared(self, given: Given, batch: Any) -> Prepared:
        """What a step makes of its batch before it looks at the value; a step takes it instead."""
        return Prepared(self._prepared(self.model.train({}), batch, given))

    def _prepared(self, model: Network, batch: Any, given: Given) -> Any:
        if isinstance(batch, Prepared):
            return batch.batch
        if self.prepare is None:
            return batch
        with torch.no_grad():
            return self.prepare(model, batch, **given)

    @property
    def prepares(self) -> bool:
        """Whether steps begin with what the value does not change, and nothing there is drawn."""
        return self.prepare is not None and self.mechanism is None and not self.model.draws

    @property
    def stacks_well(self) -> bool:
        """Whether such loops are faster as a stack: the kernels for it make plain gradients."""
        return self.model.stacks_well and self.mechanism is None


def checked_loss(loss: Tensor, objective: Callable[..., Tensor]) -> Tensor:
    """A loss that can be minimised; one that depends on nothing that is trained is warned of."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    name = _name_of(objective)
    if not isinstance(loss, Tensor):
        raise BadValue(f"{name} gave a {type(loss).__name__}; a loss is a tensor of one number")
    if loss.numel() != 1:
        raise BadValue(
            f"{name} gave a tensor of shape {list(loss.shape)}; a loss is one number, e.g. its mean"
        )
    warnings.warn(
        f"{name} gave a loss that does not depend on what is trained, so nothing is learned from "
        "it; is there a detach() or a no_grad() on its way?",
        stacklevel=2,
    )
    return loss


def _check_exact(batch: Any, objective: Callable[..., Tensor]) -> None:
    """Private samples need the mechanism that came with them, or nothing would guard them."""
    if isinstance(batch, Sampled):
        raise BadValue(
            f"{_name_of(objective)} is to be minimised on private samples without their mechanism; "
            "hand on both that training returned: batches, mechanism = training(…), "
            "minimize(…, mechanism=mechanism)"
        )


def _check_notes(notes: Weights, value: Any, objective: Callable[..., Tensor]) -> None:
    """Statistics of norm layers must belong to what is trained, or they would be lost."""
    lost = next((name for name in notes if not isinstance(value, dict) or name not in value), None)
    if lost is None:
        return
    raise BadValue(
        f"{_name_of(objective)} gave a batch to a norm layer whose statistics, {lost}, are not in "
        "what is trained; train them along, call model.evaluating where a network rests, or train "
        "two networks as a parts.pairs.Pair"
    )


def _name_of(objective: Callable[..., Tensor]) -> str:
    return getattr(objective, "__qualname__", type(objective).__name__)


def _identity(function: Callable[..., Any] | None) -> Any:
    """What makes a function the same: for a method, the owner's value rather than the object."""
    if isinstance(function, MethodType):
        return (function.__func__, function.__self__)
    return function


def apart_from(moving: Sequence[Tensor], notes: Weights) -> Weights:
    """The same notes, none of which lies where a moving tensor does."""
    taken = {unwrapped(tensor).untyped_storage().data_ptr() for tensor in moving}
    return {
        name: note.clone() if unwrapped(note).untyped_storage().data_ptr() in taken else note
        for name, note in notes.items()
    }


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
    prepare: Callable[..., Any] | None = None,
    **given: Any,
) -> T:
    """Where `optimizer` comes from `start` on `objective(model, value, batch, **given)`.

    The value may be weights, images or any dict of tensors; statistics among weights are
    carried along, not optimised. `project(value, **given)` is applied after every step.
    A `mechanism` makes the gradient in its own way; it then gets the batches as they are.
    The objective gets `prepare(model, batch, **given)` instead of the batch where that is given:
    what a step needs of its batch whatever the value, without gradients; statistics that its
    network notes there are not kept. An engine may make it for the next steps while this one runs.
    """
    memory = _known(optimizer).start(moved_part(start))
    value, _ = await minimize_further(
        objective, model, start, memory, batches, optimizer,
        project=project, mechanism=mechanism, prepare=prepare, **given,
    )  # fmt: skip
    return value


async def minimize_further(
    objective: Callable[..., Tensor],
    model: Network,
    start: T,
    memory: M,
    batches: Sequence[Any],
    optimizer: Optimizer,
    /,
    *,
    project: Callable[..., T] | None = None,
    mechanism: Mechanism | None = None,
    prepare: Callable[..., Any] | None = None,
    **given: Any,
) -> tuple[T, M]:
    """As `minimize`, with an optimiser's memory that comes from an earlier loop and is kept.

        weights, velocity = await minimize_further(f, model, weights, velocity, batches, optimizer)

    The first memory is `optimizer.start(algebra.parameters(weights))`; of SGD with momentum these
    are zeros in the shapes of the weights.
    """
    body = Descent(objective, model, _known(optimizer), project, mechanism, prepare)
    carry: tuple[T, M] = (start, memory)
    reached: tuple[T, M] = await Loop(body, carry, given, batches)
    return reached


def _known(optimizer: Optimizer) -> Optimizer:
    """The optimiser itself, if it is one of ours."""
    if not hasattr(optimizer, "start"):
        raise BadValue(
            f"minimize takes an optimiser that is a value, such as SGD(0.1) or Adam(1e-3) of "
            f"fedstill, not a {type(optimizer).__module__}.{type(optimizer).__name__}"
        )
    return optimizer
