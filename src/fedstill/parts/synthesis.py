"""Synthetic sets: how they start, distribution matching, training on them.

A synthetic set is [class, image, ...] over the classes its maker holds, with a share for every
image: 1/n for the n images of a class, 0 for an empty place. Sums over images are weighted by
shares, so a class with fewer images than its neighbours needs no special case.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fedstill.core import SGD, Data, Lazy, Model, Node, Record, Weights, minimize, trees
from fedstill.core.errors import BadValue
from fedstill.core.ranges import Count, Fraction, Positive
from fedstill.models.convnet import ConvNet
from fedstill.parts import augment, random_networks
from fedstill.parts.augment import Draws

Outputs = Literal["features", "logits", "both", "stages", "stages and logits"]


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
    where = torch.tensor(list(classes), dtype=torch.long, device=node.device)
    return SyntheticSet(images, share, where)


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


def from_statistics(node: Node[Any], classes: Sequence[int], per_class: int) -> SyntheticSet:
    """Normal pixels with the mean and deviation of each class and channel (FedLGD)."""
    start = from_noise(node, classes, per_class)
    mean, std = class_statistics(node.data, classes, node.model.classes)
    return start._replace(images=scaled(start.images, mean, std))


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


Start = Literal["statistics", "noise", "real"]
STARTS: dict[str, Callable[[Node[Any], Sequence[int], int], SyntheticSet]] = {
    "statistics": from_statistics,
    "noise": from_noise,
    "real": from_real,
}


def held_classes(node: Node[Any], least: int = 1) -> list[int]:
    """The classes of which a node has at least so many examples."""
    counts = node.data.counts(node.model.classes).tolist()
    return [c for c, count in enumerate(counts) if count >= least]


MatchingNetwork = Literal["own", "convnet"]


def convnet_for(model: Model, width: int = 128) -> ConvNet:
    """The ConvNet of the distillation papers for what a model sees, whatever that model is.

    Three blocks with instance norm; fewer where the images are too small to be pooled so often.
    """
    if len(model.shape) != 3:
        raise BadValue(
            f"a ConvNet sees images of channels, height and width, not {tuple(model.shape)}"
        )
    depth = min(3, max(1, min(image_size(model)).bit_length() - 1))
    return ConvNet(model.shape, model.classes, depth, width, device=model.device)


MAKING = 2  # raised when the same settings come to make other warm-up sets


class Kept(Record):
    """A warm-up set as it is kept between runs."""

    key: str
    images: Tensor
    share: Tensor
    classes: Tensor


async def warmed_up(
    node: Node[Any],
    matching: Matching,
    start: Start,
    per_class: int,
    model: Model | None = None,
) -> SyntheticSet:
    """A set matched to the node's data under fresh random networks, the same for all nodes.

    It depends on data, settings, network and seed alone; where the node has a store, it is made
    once and found again by them. The networks are of the node's own kind unless `model` is given.
    """
    kind = model or node.model
    seed = node.draw("warm-up networks", shared=True)
    key = ""
    if node.cache is not None:
        settings = [float(v) if isinstance(v, int) else v for v in astuple(matching)]  # 1 is 1.0
        draws = (seed, node.draw("warm-up"))
        made_by = (MAKING, settings, start, per_class, kind.describe(), draws)
        key = hashlib.sha256(f"{node.data.digest()} {made_by}".encode()).hexdigest()
        kept = node.cache.find(key, Kept)
        if kept is not None:
            return SyntheticSet(*trees.to((kept.images, kept.share, kept.classes), node.device))
    held = held_classes(node)
    if not held:  # nothing to distil
        return from_noise(node, held, per_class)
    first = STARTS[start](node, held, per_class)
    networks = random_networks.networks(
        seed, kind.samples, sum(kind.floats().values()), node.device
    )
    made = await matching.matched(node, first, networks, kind)
    if node.cache is not None:
        node.cache.keep(key, Kept(key, made.images, made.share, made.classes))
    return made


class Packing(NamedTuple):
    """Which places of a real batch are worth a pass through the network."""

    kept: Tensor  # [number], places counted through all classes
    number: Tensor  # [class, example], where a place's output is among those; 0 for the others


class Iteration(NamedTuple):
    """What one step of matching sees."""

    real: Tensor  # [class, example, ...]
    share: Tensor  # [class, example]
    network: Weights
    emphasis: Tensor  # [output], how much each matched output counts at this step
    draws: Draws
    only: str  # the operation of this step's augmentation
    packing: Packing | None = None  # None where few places are empty


@dataclass(frozen=True)
class Matching:
    """Distribution matching: per class, the distance between mean real and synthetic outputs.

    `stages` matches every block's output. With `deep_first` the steps are divided evenly over the
    outputs: at first the last one alone counts, then one more with each part (FedDualMatch). With
    `sweep` too, every step goes through the whole order: an update for each output, all with the
    step's network, real batch and augmentation.
    """

    steps: Count = 1000
    lr: Positive = 1.0
    momentum: Fraction = 0.5
    real_batch: Count = 256
    augmentation: str = augment.DEFAULT
    outputs: Outputs = "features"
    distance: Literal["squared", "norm"] = "squared"
    deep_first: bool = False
    sweep: bool = False

    async def matched(
        self,
        node: Node[Any],
        start: SyntheticSet,
        network: Callable[[int], Weights],
        model: Model | None = None,
    ) -> SyntheticSet:
        """The set after `steps` steps; `network(step)` gives the weights to match under.

        They are weights of `model`, or of the node's own network where none is named.
        """
        images = await minimize(
            self.objective,
            model or node.model,
            start.images,
            self.iterations(node, start, network, model),
            SGD(self.lr, self.momentum),
            images_share=start.share,
        )
        return start._replace(images=images)

    def objective(
        self, model: Model, images: Tensor, batch: Iteration, images_share: Tensor
    ) -> Tensor:
        """Σ over outputs and classes of ||mean real - mean synthetic||² (or its root)."""
        # Statistics of a batch would count empty places; without batch norm the mode is the same.
        still = model.evaluating
        real = augment.apply(batch.real, batch.draws, only=batch.only)
        synthetic = augment.apply(images, batch.draws, only=batch.only)
        with torch.no_grad():
            outputs = self.seen(still, batch.network, real, batch.packing, coarse=True)
            targets = class_means(outputs, batch.share)
        means = class_means(self.seen(still, batch.network, synthetic), images_share)
        return (distances(means, targets, self.distance) * batch.emphasis.unsqueeze(1)).sum()

    def seen(
        self, model: Model, network: Weights, images: Tensor, packing: Packing | None = None,
        *, coarse: bool = False,
    ) -> list[Tensor]:  # fmt: skip
        """[class, image, ...] of each output that is matched, from one pass over all classes."""
        x = images.flatten(0, 1)
        if packing is not None:
            x = x[packing.kept]
        if self.outputs.startswith("stages"):
            passed = (model.coarse_stages if coarse else model.stages)(network, x)
            kept = [stage.flatten(1) for stage in passed]
        else:
            kept = [(model.coarse_features if coarse else model.features)(network, x)]
        if self.outputs in ("logits", "both", "stages and logits"):
            kept = [*kept, model.head(network, kept[-1])]
        if self.outputs == "logits":
            kept = kept[1:]
        if packing is not None:
            return [out.flatten(1)[packing.number] for out in kept]
        return [out.reshape(*images.shape[:2], -1) for out in kept]

    def emphasis(self, update: int, outputs: int) -> list[float]:
        """Which outputs count: all, or from the deep end one more with each part or update."""
        part = outputs
        if self.deep_first:
            part = (update % outputs if self.sweep else update * outputs // max(self.steps, 1)) + 1
        return [1.0 if at >= outputs - part else 0.0 for at in range(outputs)]

    def iterations(
        self,
        node: Node[Any],
        start: SyntheticSet,
        network: Callable[[int], Weights],
        model: Model | None = None,
    ) -> Lazy[Iteration]:
        """The steps' real batches and augmentations, drawn at once; networks on demand."""
        classes = start.classes.tolist()
        rows, share = real_rows(
            node.data, classes, self.real_batch, self.steps, node.rng("real"), node.model.classes
        )
        packing = trees.to(packed(share), node.device)
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

        outputs = {"features": 1, "logits": 1, "both": 2}.get(self.outputs)
        if outputs is None:
            outputs = stage_count(model or node.model) + (self.outputs == "stages and logits")
        per_step = outputs if self.deep_first and self.sweep else 1
        updates = self.steps * per_step
        every = torch.tensor([self.emphasis(update, outputs) for update in range(updates)])
        every = every.to(node.device)

        def make(update: int) -> Iteration:
            step = update // per_step
            only, draws = drawn[step]
            real = node.data.take(rows[step]).x
            return Iteration(real, share, network(step), every[update], draws, only, packing)

        return Lazy(updates, make)


def packed(share: Tensor) -> Packing | None:
    """The places with a share, and so many empty ones that neighbours have equally many.

    None where that would leave out less than an eighth of all.
    """
    flat = share.flatten()
    count = int((flat > 0).sum())
    step = 1 << max(0, count.bit_length() - 4)
    count = -(-count // step) * step
    if count > len(flat) * 7 // 8:
        return None
    kept = torch.argsort((flat == 0).to(torch.int8), stable=True)[:count]
    number = torch.zeros(len(flat), dtype=torch.long)
    number[kept] = torch.arange(count)
    return Packing(kept, number.reshape(share.shape))


def class_means(outputs: Sequence[Tensor], share: Tensor) -> list[Tensor]:
    """[class, ...], the mean of each output over the images of a class."""
    means = []
    for out in outputs:
        weights = share.reshape(share.shape + (1,) * (out.dim() - 2))
        means.append((out * weights).sum(1))
    return means


def distances(
    left: Sequence[Tensor], right: Sequence[Tensor], kind: Literal["squared", "norm"]
) -> Tensor:
    """[output, class], squared distances (or their roots) summed over features, no mean."""
    squared = torch.stack([(a - b).square().sum(1) for a, b in zip(left, right, strict=True)])
    return squared if kind == "squared" else (squared + 1e-12).sqrt()


def stage_count(model: Model) -> int:
    """How many outputs `stages` has; a pass without data tells."""
    initial = {name: torch.zeros(law.shape, device="meta") for name, law in model.initial().items()}
    return len(model.evaluating.stages(initial, torch.zeros(1, *model.shape, device="meta")))


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
    mode: augment.Mode = "single",
    device: torch.device | str = "cpu",
) -> list[tuple[str, Draws]]:
    """For each call its one operation, from `choice` (in mode `multi` all), and its parameters.

    Clients that share `choice` do the same operation at the same step, each in its own way, so
    that their steps stay alike and nothing is computed for operations that were not drawn.
    """
    names = augment.operations(strategy) or ("none",)
    if mode == "multi":
        names = ("_".join(names),)
    picked = torch.randint(len(names), (calls,), generator=choice).tolist()
    drawn: dict[int, tuple[str, Draws]] = {}
    for place, name in enumerate(names):
        steps = [step for step, pick in enumerate(picked) if pick == place]
        if not steps:
            continue
        many = augment.draw(
            rng, name, groups=groups, image=image, mode=mode, per_image=per_image,
            calls=len(steps),
        )  # fmt: skip
        many = trees.to(many, device)
        for at, step in enumerate(steps):
            drawn[step] = (name, trees.map_tensors(lambda tensor, at=at: tensor[at], many))
    return [drawn[step] for step in range(calls)]


class Labelled(NamedTuple):
    """A batch of synthetic images for training a classifier."""

    x: Tensor  # [image, ...]
    y: Tensor  # [image], or [image, class] for soft labels
    weight: Tensor  # [image]
    draws: Draws
    only: str

    def augmented(self) -> Tensor:
        """The images, each changed in its own way."""
        return augment.apply(self.x.unsqueeze(0), self.draws, only=self.only).squeeze(0)


def training_batches(
    node: Node[Any],
    data: Data,
    weight: Tensor,
    size: int,
    epochs: int,
    strategy: str,
    part: int = 0,
    mode: augment.Mode = "single",
) -> Lazy[Labelled]:
    """Epochs over a synthetic set; one operation a batch (or all), each image in its own way.

    A step that trains in several parts numbers them, so that each has draws of its own.
    """
    named = f" {part}" if part else ""
    plan = data.batches(size, node.rng(f"order{named}"), epochs=epochs)
    lengths = [len(row) for row in plan.rows]
    choice, rng = node.rng(f"operations{named}"), node.rng(f"augmentation{named}")
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
                mode=mode,
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

    return Lazy(len(plan), make)


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
