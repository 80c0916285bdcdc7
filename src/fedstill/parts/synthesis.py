"""Synthetic sets: how they start, distribution matching, training on them (BB-3, BB-4).

A synthetic set is [class, image, ...] over the classes its maker holds, with a share for every
image: 1/n for the n images of a class, 0 for an empty place. Sums over images are weighted by
shares, so a class with fewer images than its neighbours needs no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor

from fedstill.core import SGD, Data, Made, Model, Node, Weights, minimize, trees
from fedstill.core.errors import BadValue
from fedstill.core.ranges import Count, Fraction, Positive
from fedstill.parts import augment
from fedstill.parts.augment import Draws


class SyntheticSet(NamedTuple):
    """Images of some classes."""

    images: Tensor  # [class, image, ...]
    share: Tensor  # [class, image]
    classes: Tensor  # [class], which class a row is

    def flat(self) -> tuple[Tensor, Tensor]:
        """The images that exist, and their labels."""
        real = self.share > 0
        labels = self.classes.unsqueeze(1).expand(real.shape)
        return self.images[real], labels[real]


def from_noise(node: Node[Any], classes: Sequence[int], per_class: int) -> SyntheticSet:
    """Standard normal pixels."""
    images = node.noise("start", len(classes), per_class, *node.model.shape)
    share = torch.full((len(classes), per_class), 1 / per_class, device=node.device)
    return SyntheticSet(images, share, torch.tensor(list(classes), device=node.device))


def from_real(node: Node[Any], classes: Sequence[int], per_class: int) -> SyntheticSet:
    """Random examples of each class, none twice; fewer where a class has fewer."""
    rng, rows = node.rng("start"), node.data.by_class(node.model.classes)
    counts = [min(per_class, len(rows[c])) for c in classes]
    index = torch.zeros(len(classes), max(counts), dtype=torch.long)
    share = torch.zeros(len(classes), max(counts))
    for row, (c, count) in enumerate(zip(classes, counts, strict=True)):
        index[row, :count] = rows[c][torch.randperm(len(rows[c]), generator=rng)[:count]]
        share[row, :count] = 1 / count
    images = node.data.take(index.to(node.device)).x
    where = torch.tensor(list(classes), device=node.device)
    return SyntheticSet(images, share.to(node.device), where)


class Iteration(NamedTuple):
    """What one step of matching sees."""

    real: Tensor  # [class, example, ...]
    share: Tensor  # [class, example]
    network: Weights
    draws: Draws
    only: str  # the operation of this step's augmentation


@dataclass(frozen=True)
class Matching:
    """Distribution matching: per class, the distance between mean real and synthetic outputs."""

    steps: Count = 1000
    lr: Positive = 1.0
    momentum: Fraction = 0.5
    real_batch: Count = 256
    augmentation: str = augment.DEFAULT
    outputs: Literal["features", "logits", "both"] = "features"

    async def matched(
        self, node: Node[Any], start: SyntheticSet, network: Callable[[int], Weights]
    ) -> SyntheticSet:
        """The set after `steps` steps; `network(step)` gives the weights to match under."""
        images = await minimize(
            self.objective,
            node.model,
            start.images,
            self.iterations(node, start, network),
            SGD(self.lr, self.momentum),
            images_share=start.share,
        )
        return start._replace(images=images)

    def objective(
        self, model: Model, images: Tensor, batch: Iteration, images_share: Tensor
    ) -> Tensor:
        """Σ over classes (and outputs) of ||mean real - mean synthetic||², summed over features."""
        still = model.evaluating
        real = augment.apply(batch.real, batch.draws, only=batch.only)
        synthetic = augment.apply(images, batch.draws, only=batch.only)
        with torch.no_grad():
            targets = class_means(self.seen(still, batch.network, real), batch.share)
        means = class_means(self.seen(still, batch.network, synthetic), images_share)
        return sum_of_squares(means, targets)

    def seen(self, model: Model, network: Weights, images: Tensor) -> list[Tensor]:
        """[class, image, ...] of each output that is matched, from one pass over all classes."""
        features, logits = model.both(network, images.flatten(0, 1))
        kept = {"features": [features], "logits": [logits], "both": [features, logits]}
        return [out.reshape(*images.shape[:2], *out.shape[1:]) for out in kept[self.outputs]]

    def iterations(
        self, node: Node[Any], start: SyntheticSet, network: Callable[[int], Weights]
    ) -> Made[Iteration]:
        """The steps' real batches and augmentations, drawn at once; networks on demand."""
        classes = start.classes.tolist()
        rows, share = real_rows(
            node.data, classes, self.real_batch, self.steps, node.rng("real"), node.model.classes
        )
        rows, share = rows.to(node.device), share.to(node.device)
        drawn = augmentations(
            node.rng("operations", shared=True),
            node.rng("augmentation"),
            self.augmentation,
            self.steps,
            groups=len(classes),
            image=image_size(node.model),
            device=node.device,
        )

        def make(step: int) -> Iteration:
            only, draws = drawn[step]
            return Iteration(node.data.take(rows[step]).x, share, network(step), draws, only)

        return Made(self.steps, make)


def class_means(outputs: Sequence[Tensor], share: Tensor) -> list[Tensor]:
    """[class, ...], the mean of each output over the images of a class."""
    means = []
    for out in outputs:
        weights = share.reshape(share.shape + (1,) * (out.dim() - 2))
        means.append((out * weights).sum(1))
    return means


def sum_of_squares(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Σ of squared differences over outputs, classes and features; a scalar, no mean."""
    return torch.stack([(a - b).square().sum() for a, b in zip(left, right, strict=True)]).sum()


def real_rows(
    data: Data, classes: Sequence[int], size: int, steps: int, rng: Generator, known: int
) -> tuple[Tensor, Tensor]:
    """Indices [step, class, example] and shares [class, example] of real batches.

    No example stands twice in a batch: batches are cut from fresh orders of the class, and the
    rest of an order is dropped. A class smaller than a batch is taken whole. The places are as
    many as the largest class needs, rounded up to a power of two so that neighbours are alike.
    """
    by_class = data.by_class(known)
    largest = max(len(by_class[c]) for c in classes)
    places = size if largest >= size else min(size, 1 << (largest - 1).bit_length())
    rows = torch.zeros(steps, len(classes), places, dtype=torch.long)
    share = torch.zeros(len(classes), places)
    for at, c in enumerate(classes):
        own = by_class[c]
        count = min(size, len(own))
        share[at, :count] = 1 / count
        if len(own) <= size:
            rows[:, at, :count] = own
            continue
        per_order = len(own) // size
        orders = -(-steps // per_order)
        cut = [torch.randperm(len(own), generator=rng)[: per_order * size] for _ in range(orders)]
        rows[:, at] = own[torch.cat(cut)].reshape(-1, size)[:steps]
    return rows, share


def augmentations(
    choice: Generator,
    rng: Generator,
    strategy: str,
    calls: int,
    *,
    groups: int,
    image: tuple[int, int],
    per_image: int | None = None,
    device: torch.device | str = "cpu",
) -> list[tuple[str, Draws]]:
    """For each call its one operation, from `choice`, and its parameters, from `rng`.

    Clients that share `choice` do the same operation at the same step, each in its own way, so
    that their steps stay alike and nothing is computed for operations that were not drawn.
    """
    names = augment.operations(strategy) or ("none",)
    picked = torch.randint(len(names), (calls,), generator=choice).tolist()
    drawn: dict[int, tuple[str, Draws]] = {}
    for place, name in enumerate(names):
        steps = [step for step, pick in enumerate(picked) if pick == place]
        if not steps:
            continue
        many = augment.draw(
            rng, name, groups=groups, image=image, per_image=per_image, calls=len(steps)
        )
        many = trees.to(many, device)
        for at, step in enumerate(steps):
            drawn[step] = (name, trees.map_tensors(lambda tensor, at=at: tensor[at], many))
    return [drawn[step] for step in range(calls)]


class Labelled(NamedTuple):
    """A batch of synthetic images for training a classifier."""

    x: Tensor  # [image, ...]
    y: Tensor  # [image]
    weight: Tensor  # [image]
    draws: Draws
    only: str

    def augmented(self) -> Tensor:
        """The images, each changed in its own way."""
        return augment.apply(self.x.unsqueeze(0), self.draws, only=self.only).squeeze(0)


def training_batches(
    node: Node[Any], data: Data, weight: Tensor, size: int, epochs: int, strategy: str
) -> Made[Labelled]:
    """Epochs over a synthetic set; one operation a batch, parameters of each image's own."""
    plan = data.batches(size, node.rng("order"), epochs=epochs)
    lengths = [len(row) for row in plan.rows]
    choice, rng = node.rng("operations"), node.rng("augmentation")
    supply = {
        length: iter(
            augmentations(
                choice,
                rng,
                strategy,
                lengths.count(length),
                groups=1,
                image=image_size(node.model),
                per_image=length,
                device=node.device,
            )
        )
        for length in sorted(set(lengths))
    }
    drawn = [next(supply[length]) for length in lengths]

    def make(step: int) -> Labelled:
        only, draws = drawn[step]
        row = plan.rows[step]
        x, y = data.take(row)
        return Labelled(x, y, weight[row], draws, only)

    return Made(len(plan), make)


def image_size(model: Model) -> tuple[int, int]:
    """Height and width of a model's input; a vector counts as one row."""
    return (model.shape[-2], model.shape[-1]) if len(model.shape) >= 2 else (1, model.shape[-1])


def strategy_faults(field: str, strategy: str) -> list[str]:
    """What is wrong with an augmentation strategy, as lines for a method's faults."""
    try:
        augment.operations(strategy)
    except BadValue as error:
        return [f"{field}: {line}" for line in error.faults]
    return []
