"""Distribution matching: a synthetic set whose outputs have the means of the real examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor

from fedstill.core import SGD, Data, Lazy, Model, Node, Weights, gpu, minimize, trees
from fedstill.core.beside import begun
from fedstill.core.ranges import Count, Fraction, Positive
from fedstill.parts import augment
from fedstill.parts.augment import Draws, augmentations, image_size
from fedstill.parts.published import published
from fedstill.parts.released import Aim, Releasing
from fedstill.parts.synthetic_sets import SyntheticSet

Outputs = Literal["features", "logits", "both", "stages", "stages and logits"]


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
        steps: Lazy[Iteration] | None = None,
    ) -> SyntheticSet:
        """The set after `steps` steps; `network(step)` gives the weights to match under.

        They are weights of `model`, or of the node's own network where none is named. Where the
        examples are private, the set is matched to noisy class sums (`parts.released`). `steps`
        are the iterations, where they have been drawn already.
        """
        kind, sgd, terms = model or node.model, SGD(self.lr, self.momentum), node.privacy
        if node.private:
            releasing = Releasing(self, node, start, network, model)
            await releasing.summed()
            images = await minimize(
                self.objective, kind, start.images, Lazy(self.updates(kind), releasing.aim), sgd,
                images_share=start.share,
            )  # fmt: skip
            return start._replace(images=images)
        if steps is None:
            steps = self.iterations(node, start.classes.tolist(), network, model)
        if terms is not None:
            batches, mechanism = published(node, steps, start.images, self.real_batch)
            images = await minimize(
                self.objective, kind, start.images, batches, sgd, mechanism=mechanism,
                prepare=self.aim, images_share=start.share,
            )  # fmt: skip
        else:
            images = await minimize(
                self.objective, kind, start.images, steps, sgd, prepare=self.aim,
                images_share=start.share,
            )  # fmt: skip
        return start._replace(images=images)

    def updates(self, model: Model) -> int:
        """How often the images are changed in all."""
        return self.steps * self.updates_per_step(model)

    def updates_per_step(self, model: Model) -> int:
        """How often the images are changed in a step: once, or once for each output."""
        return self.output_count(model) if self.deep_first and self.sweep else 1

    def output_count(self, model: Model) -> int:
        """How many outputs are matched."""
        few = {"features": 1, "logits": 1, "both": 2}.get(self.outputs)
        return few or stage_count(model) + (self.outputs == "stages and logits")

    def aim(self, model: Model, batch: Iteration, images_share: Tensor) -> Aim:
        """The mean outputs of the real examples, which no image changes."""
        # Statistics of a batch would count empty places; without batch norm the mode is the same.
        still = model.evaluating
        real = augment.apply(batch.real, batch.draws, only=batch.only)
        outputs = self.seen(still, batch.network, real, batch.packing, coarse=True)
        targets = class_means(outputs, batch.share)
        return Aim(targets, batch.network, batch.emphasis, batch.draws, batch.only)

    def objective(self, model: Model, images: Tensor, batch: Aim, images_share: Tensor) -> Tensor:
        """Σ over outputs and classes of ||mean real - mean synthetic||² (or its root).

        What the mean of the real examples is, was seen or, where they are private, released.
        """
        synthetic = augment.apply(images, batch.draws, only=batch.only)
        means = class_means(self.seen(model.evaluating, batch.network, synthetic), images_share)
        apart = distances(means, batch.targets, self.distance)
        return (apart * batch.emphasis.unsqueeze(1)).sum()

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

    def emphases(self, model: Model) -> Tensor:
        """[update, output], the emphasis of every update, on the host."""
        outputs = self.output_count(model)
        return torch.tensor([self.emphasis(at, outputs) for at in range(self.updates(model))])

    def iterations(
        self,
        node: Node[Any],
        classes: Sequence[int],
        network: Callable[[int], Weights],
        model: Model | None = None,
    ) -> Lazy[Iteration]:
        """The steps' real batches and augmentations, drawn at once; networks on demand."""
        data = node.records
        augmenting = begun(partial(self._augmentations, node, len(classes)), node.device)
        rows, share = real_rows(
            data, classes, self.real_batch, self.steps, node.rng("real"), node.model.classes
        )
        packing = trees.to(packed(share), node.device)
        rows, share = rows.to(node.device), share.to(node.device)
        drawn = augmenting()

        kind = model or node.model
        per_step, every = self.updates_per_step(kind), self.emphases(kind).to(node.device)

        def make(update: int) -> Iteration:
            step = update // per_step
            only, draws = drawn[step]
            real = data.inputs(rows[step], fleeting=True)
            return Iteration(real, share, network(step), every[update], draws, only, packing)

        return Lazy(self.updates(kind), make)

    def _augmentations(self, node: Node[Any], groups: int) -> list[tuple[str, Draws]]:
        return augmentations(
            node.rng("operations", shared=True),
            node.rng("augmentation"),
            self.augmentation,
            self.steps,
            groups=groups,
            image=image_size(node.model),
            device=node.device,
        )


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
        plain = gpu.plain_on_gpu(out, share)
        kernels = gpu.kernels("kernels.class_means", out) if plain else None
        if kernels is not None and out.dim() == 3 and not share.requires_grad:
            means.append(kernels.class_means(out, share))
            continue
        weights = share.reshape(share.shape + (1,) * (out.dim() - 2))
        means.append((out * weights).sum(1))
    return means


def distances(
    left: Sequence[Tensor], right: Sequence[Tensor], kind: Literal["squared", "norm"]
) -> Tensor:
    """[output, class], squared distances (or their roots) summed over features, no mean."""
    squared = torch.stack([(a - b).square().sum(1) for a, b in zip(left, right, strict=True)])
    return squared if kind == "squared" else (squared + 1e-12).sqrt()


@lru_cache(maxsize=64)
def stage_count(model: Model) -> int:
    """How many outputs `stages` has; a pass without data tells, once for each network."""
    with torch.device("meta"):  # also for what a network of one's own makes within a pass
        initial = {name: torch.zeros(law.shape) for name, law in model.initial().items()}
        return len(model.evaluating.stages(initial, torch.zeros(1, *model.shape)))


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
        held = len(own)
        count = min(size, held)
        share[at, :count] = 1 / count
        if held <= size:
            rows[:, at, :count] = own
            continue
        per_order = held // size
        orders = -(-steps // per_order)
        every = torch.empty(orders, held, dtype=torch.long)
        for order in every:
            torch.randperm(held, generator=rng, out=order)
        cut = every[:, : per_order * size].reshape(-1, size)[:steps]
        rows[:, at] = own.index_select(0, cut.flatten()).view(-1, size)
    return rows, share
