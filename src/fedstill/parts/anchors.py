"""Anchors: sets of several makers made one, and batches drawn from them beside other data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple, TypeVar

import torch
from torch import Generator, Tensor

from fedstill.core import algebra
from fedstill.core.data import Batch, Data, Lazy, Plan
from fedstill.core.records import Pictured, Weights

B = TypeVar("B")


class Sets(NamedTuple):
    """Synthetic sets, each under the name of the client who made it."""

    images: dict[str, Tensor]  # [class, image, ...], of the classes the maker holds
    classes: dict[str, Tensor]  # [class], which class a row is

    @classmethod
    def of(cls, maker: str, images: Tensor, classes: Tensor) -> Sets:
        """The set of a single maker."""
        return cls({maker: images}, {maker: classes})

    def made_by(self, maker: str) -> Sets:
        """The set of that maker alone; nothing where there is none of it."""
        here = [maker] if maker in self.images else []
        return Sets({m: self.images[m] for m in here}, {m: self.classes[m] for m in here})

    def joined(self, heard: Iterable[Sets]) -> Sets:
        """With the sets heard of other makers, all in the order of the makers' names."""
        images, classes = dict(self.images), dict(self.classes)
        for sets in heard:
            for maker in sets.images:
                images.setdefault(maker, sets.images[maker])
                classes.setdefault(maker, sets.classes[maker])
        return Sets(dict(sorted(images.items())), dict(sorted(classes.items())))

    def beyond(self, known: Sets) -> Sets:
        """Those whose makers are not among the known."""
        new = [maker for maker in self.images if maker not in known.images]
        return Sets(
            {maker: self.images[maker] for maker in new},
            {maker: self.classes[maker] for maker in new},
        )

    def wrong(self, makers: Sequence[str], *, none: bool) -> str | None:
        """Why sets cannot have been sent by one who has those of these makers; or `none` at all."""
        strange = [name for name in self.images if name not in makers]
        if strange:
            return f"sent anchors of {strange[0]!r}, whose set it does not have to send"
        if self.images.keys() != self.classes.keys():
            return "sent anchors of other makers than classes"
        return None if self.images or none else "sent no anchors"

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Sets:
        """The same makers and classes, each set of images changed by a function."""
        changed = {maker: change(images) for maker, images in self.images.items()}
        return Sets(changed, self.classes)

    def sums(self, known: int) -> Weights:
        """All sets laid out over all classes and added up; see `spread` and `over_holders`."""
        laid = (spread(self.images[maker], self.classes[maker], known) for maker in self.images)
        return reduce(algebra.add, laid)

    def labelled(self) -> dict[str, Data]:
        """Each set as examples with labels, class after class."""
        found = {}
        for maker, images in self.images.items():
            labels = self.classes[maker].repeat_interleave(images.shape[1])
            found[maker] = Data.of(images.flatten(0, 1), labels)
        return found

    def pictured(self) -> Pictured | None:
        """All images with their labels, one maker's after the other; None where there are none."""
        each = [data.all() for data in self.labelled().values()]
        return (torch.cat([x for x, _ in each]), torch.cat([y for _, y in each])) if each else None

    def pictures_at(self, node: str) -> Mapping[str, Pictured]:
        """The one set that all share, if these are one; of several the node's own."""
        shared = len(self.images) == 1
        pictured = (self if shared else self.made_by(node)).pictured()
        return {"global" if shared else "own": pictured} if pictured else {}

    def together(self, shape: tuple[int, ...], device: torch.device | str) -> Data:
        """All sets with their labels as one, one maker's after the other; there may be none."""
        each = [data.all() for data in self.labelled().values()]
        none = torch.empty(0, *shape, device=device)
        images, labels = [one.x for one in each], [one.y for one in each]
        return Data.of(torch.cat([none, *images]), torch.cat([none.new_empty(0).long(), *labels]))


def spread(images: Tensor, classes: Tensor, known: int) -> Weights:
    """A set laid out over all classes, zero where it has none, and which classes it has.

    Sums or means of these over makers, mixed in whatever way, give the mean over holders.
    """
    wide = images.new_zeros(known, *images.shape[1:])  # [class, image, ...]
    return {
        "images": wide.index_copy(0, classes, images),
        "held": images.new_zeros(known).index_fill(0, classes, 1.0),  # [class]
    }


def over_holders(sums: Weights, least: float) -> tuple[Tensor, Tensor]:
    """The mean over the holders of each class; classes held less than `least` are left out."""
    classes = torch.nonzero(sums["held"] > least).flatten()
    held = sums["held"][classes].reshape(-1, *[1] * (sums["images"].dim() - 1))
    return sums["images"][classes] / held, classes


def stream(count: int, size: int, steps: int, rng: Generator) -> Tensor:
    """[step, place], batches cut from one fresh order of `count` things after another."""
    orders = -(-steps * size // count) if count else 0
    cut = [torch.randperm(count, generator=rng) for _ in range(orders)]
    return torch.cat([torch.zeros(0, dtype=torch.long), *cut])[: steps * size].reshape(steps, size)


def beside(plan: Plan, make: Callable[[Batch, int | slice], B]) -> Lazy[B]:
    """The batches of a plan, each made into all that a step sees.

    `make` is given a batch and its step, to find there what else was drawn for it, in tensors of
    [step, ...]; or the stacked batches of some steps and those steps as a slice.
    """

    def many(step: int, count: int) -> B | None:
        batches = plan.ahead(step, count)
        return None if batches is None else make(batches, slice(step, step + count))

    return Lazy(len(plan), lambda step: make(plan[step], step), many)
