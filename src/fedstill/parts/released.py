"""Private distribution matching: noisy class sums, released once for each of a few networks.

For each of `releases` networks and one augmentation each, every record of a class is seen whole:
its outputs, less the mean outputs of the synthetic set so far, are clipped, summed over the class
and noised. All pixel steps then run on these sums, which is post-processing: no step sees a record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedstill.core import Data, Lazy, Loop, Model, Node, Weights, trees
from fedstill.core.errors import BadValue
from fedstill.core.mechanism import Gradient
from fedstill.core.release import BITS, SUMS, Use, class_sums, grid_of, noised
from fedstill.parts import augment
from fedstill.parts.augment import Draws, augmentations, image_size
from fedstill.parts.synthetic_sets import SyntheticSet

if TYPE_CHECKING:
    from fedstill.parts.distribution_matching import Matching

NUMBERS = 2**23  # outputs that are looked at together
AT_A_TIME = {"cpu": 256, "cuda": 512}  # records of a class


class Aim(NamedTuple):
    """What images are matched to in one step: means that were seen or released, and no record."""

    targets: list[Tensor]  # of each output: [class, number]
    network: Weights
    emphasis: Tensor  # [output]
    draws: Draws
    only: str


class Chunk(NamedTuple):
    """Some records of one class, to be looked at under one of the networks."""

    x: Tensor  # [record, ...]
    place: Tensor  # [record], the row of its class; -1 where there is no record
    network: Weights
    centre: Tensor  # [number], of the class
    draws: Draws  # of the class alone
    release: Tensor  # [release], 1 at this one
    counted: Tensor  # [number], 1 where an output is released under this network
    grid: Tensor  # [number], of which a sum is a whole multiple
    only: str


@dataclass(frozen=True)
class Summing:
    """The body of a loop that adds clipped rows up by release and class. It tells no loss."""

    matching: Matching
    model: Model
    sizes: tuple[int, ...]  # numbers of each block that is clipped by itself
    clips: tuple[float, ...]
    silent: ClassVar[bool] = True

    @property
    def stackable(self) -> bool:
        """Whether several can be run as one: they take no gradient."""
        return self.model.stackable_at_rest

    def __call__(
        self, carry: Tensor, given: Any, batch: Chunk, gradient: Gradient
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            x = augment.apply(batch.x.unsqueeze(0), batch.draws, only=batch.only)
            seen = self.matching.seen(self.model, batch.network, x, coarse=True)
            rows = torch.cat([out.squeeze(0).flatten(1) for out in seen], 1)
            rows = (rows - batch.centre) * batch.counted
            blocks = torch.split_with_sizes(rows, self.sizes, 1)
            grids = torch.split_with_sizes(batch.grid, self.sizes)
            sums = [
                class_sums(block, batch.place, carry.shape[1], clip, grid)
                for block, clip, grid in zip(blocks, self.clips, grids, strict=True)
            ]
        total = carry + batch.release.double()[:, None, None] * torch.cat(sums, 1)
        return total, total.new_zeros(())


class Releasing:
    """The releases of one node in one step: their networks, augmentations, sums and aims."""

    def __init__(
        self,
        matching: Matching,
        node: Node[Any],
        start: SyntheticSet,
        network: Callable[[int], Weights],
        model: Model | None,
    ):
        terms = node.privacy
        assert terms is not None
        self.matching, self.node, self.start, self.network = matching, node, start, network
        self.model, self.terms = (model or node.model).evaluating, terms
        self.sizes = output_sizes(matching, self.model)
        self._check()
        self.drawn = augmentations(
            node.rng("operations", shared=True),
            node.rng("augmentation"),
            matching.augmentation,
            terms.releases,
            groups=len(start.classes),
            image=image_size(node.model),
            device=node.device,
        )
        self.centres: dict[int, Tensor] = {}
        self.told: dict[int, tuple[list[Tensor], Weights]] = {}

    def _check(self) -> None:
        if not self.model.by_example:
            raise BadValue(
                f"{self.model.title} answers by the whole batch, so records mix before they are "
                "clipped; use the norm instance, group or layer"
            )
        listed = self.start.classes.tolist()
        if twice := [c for c in listed if listed.count(c) > 1]:
            raise BadValue(
                f"class {twice[0]} stands in {listed.count(twice[0])} rows of the set, so a record "
                "would move the sums of all of them; give each class one row"
            )
        releases, steps = self.terms.releases, self.matching.steps
        if releases > steps:
            raise BadValue(
                f"privacy.releases = {releases}, but there are {steps} steps that could use them; "
                "ask for fewer: each costs as much as any other"
            )
        if self.in_parts and releases < len(self.sizes):
            raise BadValue(
                f"privacy.releases = {releases}, but {len(self.sizes)} outputs are matched one "
                f"after the other; ask for {len(self.sizes)} or more"
            )

    @property
    def in_parts(self) -> bool:
        """Whether the steps are divided over the outputs, the last one first."""
        return self.matching.deep_first and not self.matching.sweep

    @cached_property
    def blocks(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Sizes and clips of what is clipped by itself: every stage, or all outputs together.

        Lengths grow with the root of the number of entries; the clip is that of the last stage.
        """
        if not self.matching.outputs.startswith("stages"):
            return (sum(self.sizes),), (self.terms.clip,)
        stages, logits = list(self.sizes), self.matching.outputs == "stages and logits"
        last = stages.pop() if logits else 0
        clips = [self.terms.clip * sqrt(size / stages[-1]) for size in stages]
        stages[-1] += last
        return tuple(stages), tuple(clips)

    def counted(self, release: int) -> Tensor:
        """[output], 1 where an output is released under a network."""
        outputs = len(self.sizes)
        part = release * outputs // self.terms.releases + 1 if self.in_parts else outputs
        return torch.tensor([float(at >= outputs - part) for at in range(outputs)])

    def wide(self, release: int) -> Tensor:
        """[number], the same for each entry."""
        return self.counted(release).repeat_interleave(torch.tensor(self.sizes))

    @cached_property
    def grids(self) -> Tensor:
        """[release, 1, number], of which each sum is a whole multiple.

        Blocks that are clipped by themselves share a release, so each has the root of their number
        times the noise.
        """
        sizes, clips = self.blocks
        steps = []
        for release in range(self.terms.releases):
            blocks = torch.split_with_sizes(self.wide(release), sizes)
            deviation = self.terms.sigma * sqrt(sum(bool(block.any()) for block in blocks))
            steps.append([grid_of(deviation * clip, clip) for clip in clips])
        each = torch.tensor(steps, dtype=torch.float64, device=self.node.device)
        numbers = torch.tensor(sizes, device=self.node.device)
        return each.repeat_interleave(numbers, 1).unsqueeze(1)

    @torch.no_grad()
    def centre(self, release: int) -> Tensor:
        """[class, number], the mean outputs of the set so far, which holds nothing private."""
        if release not in self.centres:
            only, draws = self.drawn[release]
            images = augment.apply(self.start.images, draws, only=only)
            seen = self.matching.seen(self.model, self.network(release), images)
            share = self.start.share.unsqueeze(-1)
            self.centres[release] = torch.cat([(o.flatten(2) * share).sum(1) for o in seen], 1)
        return self.centres[release]

    async def summed(self) -> None:
        """Ask the ledger, look at every record under every network, and add noise."""
        node, terms, classes = self.node, self.terms, self.start.classes
        data = node.spend(Use(SUMS, terms.releases))
        self.secret = node.secret(SUMS)
        sizes, clips = self.blocks
        width, device = sum(sizes), "cuda" if node.device.type == "cuda" else "cpu"
        carry = torch.zeros(
            terms.releases, len(classes), width, dtype=torch.float64, device=node.device
        )
        batches = self.chunks(data, max(16, min(AT_A_TIME[device], NUMBERS // width)))
        body = Summing(self.matching, self.model, sizes, clips)
        self.sums = await Loop(body, carry, {}, batches)

    def chunks(self, data: Data, size: int) -> Lazy[Chunk]:
        """Every record of the classes under every network, so many at a time."""
        node, releases = self.node, self.terms.releases
        by_class = data.by_class(node.model.classes)
        cut = [
            (place, rows)
            for place, c in enumerate(self.start.classes.tolist())
            for rows in torch.split(by_class[c], size)
            if len(rows)
        ]

        def make(step: int) -> Chunk:
            release, at = divmod(step, len(cut))
            place, rows = cut[at]
            only, draws = self.drawn[release]
            padded = torch.zeros(size, dtype=torch.long)
            padded[: len(rows)] = rows
            where = torch.full((size,), -1)
            where[: len(rows)] = place
            return Chunk(
                data.take(padded.to(node.device)).x,
                where.to(node.device),
                self.network(release),
                self.centre(release)[place],
                trees.map_tensors(lambda tensor: tensor[place : place + 1], draws),
                torch.eye(releases, device=node.device)[release],
                self.wide(release).to(node.device),
                self.grids[release, 0],
                only,
            )

        return Lazy(releases * len(cut), make)

    @cached_property
    def noisy(self) -> Tensor:
        """[release, class, number], the sums with their noise: all that leaves the records."""
        noise = self.secret.whole(torch.empty(self.sums.shape, dtype=torch.float64), BITS)
        counted = torch.stack([self.wide(release) for release in range(len(noise))])
        # In double precision: in single, the last of these whole numbers' bits would be lost.
        noise = noise.double() * counted.unsqueeze(1) * float(self.terms.sigma > 0)
        return noised(self.sums, noise.to(self.sums.device), self.grids)

    @cached_property
    def emphases(self) -> Tensor:
        """[update, output], how much each matched output counts."""
        return self.matching.emphases(self.model).to(self.node.device)

    def aim(self, update: int) -> Aim:
        """What an update of matching sees; all updates of one step see the same release."""
        releases = self.terms.releases
        if not self.in_parts:
            release = update // self.matching.updates_per_step(self.model) % releases
        else:
            outputs = len(self.sizes)
            part = update * outputs // max(self.matching.steps, 1)
            own = [r for r in range(releases) if r * outputs // releases == part]
            release = own[update % len(own)]
        if release not in self.told:
            self.told[release] = self._means(release), self.network(release)
        only, draws = self.drawn[release]
        return Aim(*self.told[release], self.emphases[update], draws, only)

    def _means(self, release: int) -> list[Tensor]:
        """Of each output [class, number], what a release tells of its means."""
        node = self.node
        counts = node.data.counts(node.model.classes).to(node.device)[self.start.classes]
        means = self.noisy[release].float() / counts.clamp(min=1).unsqueeze(1)
        return list(torch.split_with_sizes(self.centre(release) + means, self.sizes, 1))


def output_sizes(matching: Matching, model: Model) -> list[int]:
    """How many numbers each matched output has; a pass without data tells."""
    with torch.device("meta"):
        weights = {n: torch.zeros(law.shape) for n, law in model.initial().items()}
        seen = matching.seen(model, weights, torch.zeros(1, 1, *model.shape))
    return [out.flatten(2).shape[-1] for out in seen]
