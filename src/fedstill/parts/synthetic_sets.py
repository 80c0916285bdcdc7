"""Synthetic sets and how they start.

A synthetic set is [class, image, ...] over the classes its maker holds, with a share for every
image: 1/n for the n images of a class, 0 for an empty place. Sums over images are weighted by
shares, so a class with fewer images than its neighbours needs no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core import Batch, Data, Exact, Node
from fedstill.core.content import MOST, Axes
from fedstill.core.errors import SealedData

Standing = Annotated[Exact, Axes("image", low=0, high=MOST)]
"""[image], how many examples each image of a set stands for."""


class SyntheticSet(NamedTuple):
    """Synthetic images of some classes, and how much each counts in sums over its class."""

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
    where = torch.tensor(list(classes), dtype=torch.long, device=node.device)
    return SyntheticSet(images, share, where)


def from_common_noise(node: Node[Any], classes: Sequence[int], per_class: int) -> SyntheticSet:
    """Standard normal pixels, the same for all nodes: place m of class c starts alike everywhere.

    Sets that grow from one noise still correspond place by place, and can be averaged so.
    """
    shape = (node.model.classes, per_class, *node.model.shape)
    everything = torch.randn(shape, generator=node.rng("start", shared=True))
    where = torch.tensor(list(classes), dtype=torch.long)
    share = torch.full((len(where), per_class), 1 / per_class, device=node.device)
    return SyntheticSet(everything[where].to(node.device), share, where.to(node.device))


def from_real(node: Node[Any], classes: Sequence[int], per_class: int) -> SyntheticSet:
    """Random examples of each class, none twice; fewer where a class has fewer."""
    check_open(node, "real")
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


def from_statistics(node: Node[Any], classes: Sequence[int], per_class: int) -> SyntheticSet:
    """Normal pixels with the mean and deviation of each class and channel (FedLGD)."""
    check_open(node, "statistics")
    start = from_noise(node, classes, per_class)
    mean, std = class_statistics(node.data, classes, node.model.classes)
    return start._replace(images=scaled(start.images, mean, std))


def from_released_statistics(
    node: Node[Any], classes: Sequence[int], per_class: int
) -> SyntheticSet:
    """Normal pixels with the statistics of FedLGD's released code."""
    check_open(node, "released_statistics")
    start = from_noise(node, classes, per_class)
    mean, std = released_statistics(node.data, classes, node.model.classes)
    return start._replace(images=scaled(start.images, mean, std))


def check_open(node: Node[Any], start: str) -> None:
    """Refuse a start that shows private examples, or exact statistics of them."""
    if node.privacy is not None:
        raise SealedData(
            f'start = "{start}" shows private examples as they are; with [privacy] begin with '
            'start = "noise"'
        )


def scaled(noise: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """[class, image, channel, ...] with a mean and deviation of each class and channel."""
    wide = (len(mean), 1, -1, *[1] * (noise.dim() - 3))
    return noise * std.reshape(wide) + mean.reshape(wide)


def class_statistics(data: Data, classes: Sequence[int], known: int) -> tuple[Tensor, Tensor]:
    """[class, channel], mean and deviation of all pixels of a class, normalised."""
    means, stds = [], []
    for c, rows in enumerate(data.by_class(known)):
        if c in classes:
            pixels = data.take(rows.to(data.device)).x.transpose(0, 1).flatten(1)
            means.append(pixels.mean(1))
            stds.append(pixels.std(1, unbiased=False))
    return torch.stack(means), torch.stack(stds)


def released_statistics(data: Data, classes: Sequence[int], known: int) -> tuple[Tensor, Tensor]:
    """[class, channel], sums over a class divided by the number of all images, not of the class.

    With share p of all images the mean is p · mean, the variance p · (mean of squares) minus the
    square of that: nearer to the data's mean, and with less spread, than the class is.
    """
    mean, std = class_statistics(data, classes, known)
    counts = data.counts(known)
    share = (counts[list(classes)] / counts.sum()).to(mean).unsqueeze(1)
    lower = share * mean
    squares = share * (std.square() + mean.square())
    return lower, (squares - lower.square()).clamp(min=0).sqrt()


def statistics(
    data: Data, classes: Sequence[int], known: int, start: Start
) -> tuple[Tensor, Tensor]:
    """[class, channel], mean and deviation as a set that starts in this way would have them."""
    found = released_statistics if start == "released_statistics" else class_statistics
    return found(data, classes, known)


def mean_over_holders(
    rows: Sequence[Tensor],
    classes: Sequence[Tensor],
    nobody: Tensor,
    counts: Sequence[Tensor] | None = None,
) -> Tensor:
    """[class, ...], the mean of the rows that were sent for a class; `nobody`'s where none was.

    With counts each row weighs as many as the examples behind it.
    """
    whose = F.one_hot(torch.cat(list(classes)), len(nobody)).to(nobody)  # [row, class]
    if counts is not None:
        whose = whose * torch.cat(list(counts)).unsqueeze(1)
    count = whose.sum(0).unsqueeze(1)
    mean = whose.T @ torch.cat(list(rows)) / count.clamp(min=1)
    return torch.where(count > 0, mean, nobody)


Start = Literal["statistics", "released_statistics", "noise", "common_noise", "real"]


STARTS: dict[str, Callable[[Node[Any], Sequence[int], int], SyntheticSet]] = {
    "statistics": from_statistics,
    "released_statistics": from_released_statistics,
    "noise": from_noise,
    "common_noise": from_common_noise,
    "real": from_real,
}


def averaged_statistics(noise: Tensor, sent: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Noise [class, image, ...] scaled by means and deviations over the holders of each class.

    Each holder sent its means and deviations [held, channel] and the classes [held]. A class that
    nobody holds keeps standard noise: without deviation its images would be equal.
    """
    zeros, classes = noise.new_zeros(noise.shape[0], noise.shape[2]), [c for _, _, c in sent]
    mean = mean_over_holders([mean for mean, _, _ in sent], classes, zeros)
    std = mean_over_holders([std for _, std, _ in sent], classes, zeros + 1)
    return scaled(noise, mean, std)


def sorted_by_class(images: Tensor, classes: int) -> Batch:
    """Equally many images of every class, one class after the other, with their labels."""
    labels = torch.arange(classes, device=images.device)
    return Batch(images, labels.repeat_interleave(len(images) // classes))


def held_classes(node: Node[Any], least: int = 1) -> list[int]:
    """The classes of which a node has at least so many examples."""
    counts = node.data.counts(node.model.classes).tolist()
    return [c for c, count in enumerate(counts) if count >= least]
