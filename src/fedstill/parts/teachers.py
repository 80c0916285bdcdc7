"""Teachers: several trained networks asked at once, by architecture; no training.

Networks of one architecture are stacked and asked in one pass. On a GPU each is asked by itself:
the library is slow at convolutions of a stack, each of which is one in groups, while one network's
maps may be in half precision. What that costs in launches is nothing where a step is recorded, and
there they are branches of the recording. Weights that a pass would begin by halving are halved once
for all passes of a round: teachers are at rest. One that knows no stacks, such as an LSTM, or none
at rest, such as a GRU, is asked by itself everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.core.branches import in_branches
from fedstill.core.gpu import plain_on_gpu
from fedstill.core.model import Model
from fedstill.core.precision import pass_will_do
from fedstill.core.records import Weights, is_buffer
from fedstill.parts.losses import statistics_gap


class Stack(NamedTuple):
    """The weights of a group."""

    plain: Weights  # [teacher, ...]
    halved: list[Weights]  # of each teacher what passes in half precision take instead


@dataclass(frozen=True)
class Ensemble:
    """The networks of some teachers, without weights: those of one kind stand in one group."""

    groups: tuple[tuple[Model, tuple[int, ...]], ...]  # a network, and the places of its teachers

    @classmethod
    def of(cls, models: Sequence[Model]) -> Ensemble:
        """Teachers in the order given."""
        found: dict[Model, tuple[int, ...]] = {}
        for place, model in enumerate(models):
            found[model] = (*found.get(model, ()), place)
        return cls(tuple(found.items()))

    def stacked(self, weights: Sequence[Weights]) -> list[Stack]:
        """The teachers' weights, for each group one stack."""
        stacks = []
        for model, places in self.groups:
            some = [weights[place] for place in places]
            stacks.append(Stack(trees.stack(some), [model.halved(one) for one in some]))
        return stacks

    def logits(self, stacks: Sequence[Stack], x: Tensor) -> Tensor:
        """[teacher, example, class] in evaluation mode."""
        return self.answers(in_branches(self.questions(stacks, x)))

    def questions(self, stacks: Sequence[Stack], x: Tensor) -> list[Callable[[], Tensor]]:
        """What asks a teacher, or a group of them, for logits [..., example, class]."""
        asked: list[Callable[[], Tensor]] = []
        for (model, _), stack in zip(self.groups, stacks, strict=True):
            network = model.evaluating
            if _one_by_one(model, x, stack):
                asked += [partial(network, one, x) for one in _apart(stack, x)]
            else:
                asked.append(partial(torch.func.vmap(network, in_dims=(0, None)), stack.plain, x))
        return asked

    def answers(self, found: Sequence[Tensor]) -> Tensor:
        """[teacher, example, class], as the teachers were given, from all that was answered."""
        each, left = [], list(found)
        for _, members in self.groups:
            alone = left[0].dim() == 2
            each.append(torch.stack(left[: len(members)]) if alone else left[0])
            left = left[len(members) if alone else 1 :]
        return self._in_order(each)

    def logits_and_gaps(self, stacks: Sequence[Stack], x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and for each teacher how far its batch norms are from what they know."""
        said, gaps = [], []
        for (model, _), stack in zip(self.groups, stacks, strict=True):

            def one(weights: Weights, model: Model = model) -> tuple[Tensor, Tensor]:
                seen: Weights = {}
                logits = model.recording(seen)(weights, x)
                return logits, statistics_gap(seen, weights)

            if _one_by_one(model, x, stack):
                found = in_branches([partial(one, weights) for weights in _apart(stack, x)])
                logits, gap = (torch.stack(parts) for parts in zip(*found, strict=True))
            else:
                logits, gap = torch.func.vmap(one)(stack.plain)
            said.append(logits)
            gaps.append(gap)
        return self._in_order(said), self._in_order(gaps)

    def _in_order(self, by_group: Sequence[Tensor]) -> Tensor:
        """[teacher, ...] as the teachers were given, from one tensor for each group."""
        if len(by_group) == 1:
            return by_group[0]
        places = [place for _, members in self.groups for place in members]
        rows = [row for tensor in by_group for row in tensor.unbind()]
        by_place = dict(zip(places, rows, strict=True))
        return torch.stack([by_place[place] for place in range(len(rows))])


def _one_by_one(model: Model, x: Tensor, stack: Stack) -> bool:
    return plain_on_gpu(x, *stack.plain.values()) or not model.stackable_at_rest


def _apart(stack: Stack, x: Tensor) -> list[Weights]:
    """The networks of a stack, one by one, as a pass over these takes them."""
    rows = zip(*(tensor.unbind() for tensor in stack.plain.values()), strict=True)
    plain = [dict(zip(stack.plain, row, strict=True)) for row in rows]
    if not pass_will_do(x):
        return plain
    return [{**one, **instead} for one, instead in zip(plain, stack.halved, strict=True)]


def has_statistics(weights: Weights) -> bool:
    """Whether a network has batch norms."""
    return any(map(is_buffer, weights))
