"""What may leave private records: sums of clipped rows with noise. No accounting, no data.

Two mechanisms stand on the one sentence that a record moves a sum of clipped rows by at most the
clip: sums over classes of what a network makes of records, and the gradient of a step over a
Poisson sample. Both take their noise as an argument, drawn beforehand.

What is released is a whole multiple of a grid, and so is the noise: the last bits of a sum of
floating-point numbers would tell what was added to the noise (Mironov, CCS 2012).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedstill.core import asides, gpu, precision, trees
from fedstill.core.asides import Taken
from fedstill.core.convolutions import by_example
from fedstill.core.mechanism import Gradient, LossOn, Scored, per_example
from fedstill.core.records import NodeId, Weights

SUMS = "class sums"  # the mechanism that looks at all records of a class
BITS = 26  # of noise: its deviation is 2**BITS steps of the grid
SHORTER = 1 - 2.0**-30  # more than rounding adds to the length of a row


class Use(NamedTuple):
    """What a step wants to do with private records: so many releases of one kind.

    `sigma` is the deviation of the noise in units of the sensitivity; None leaves it to the run,
    which finds it so that all that is planned together costs the budget.
    """

    mechanism: str
    releases: int = 1
    rate: float = 1.0  # the chance with which each record takes part in a release
    sigma: float | None = None


@dataclass(frozen=True)
class Spending:
    """A use that was granted: a row of the ledger."""

    round: int
    step: str
    node: NodeId
    mechanism: str
    sigma: float
    rate: float
    releases: int


@dataclass(frozen=True)
class Terms:
    """What privacy asks of a node: how rows are clipped, how often, with how much noise."""

    clip: float  # of what a network makes of a record
    gradient_clip: float  # of a record's gradient
    releases: int  # networks of a round under which records are looked at
    sigma: float  # noise multiplier of this node, for all uses that name none
    counts_sigma: float | None  # noise of class counts; None where labels are public
    paper: bool = False  # the papers' mechanism instead, which promises nothing
    grouped: bool = False  # and that in the form of DeSA's code: records are clipped in groups


class Grant(Protocol):
    """Asks the ledger for a use by a node, and refuses what would pass the budget."""

    def __call__(self, round: int, step: str, use: Use, earlier: Sequence[Spending]) -> Spending:
        """The row of the ledger; `earlier` are those of this very step."""


def clipped(rows: Tensor, clip: float | Tensor) -> Tensor:
    """[record, number], each row shortened to length `clip`; one that is not finite is zero.

    Lengths are taken in double precision, so that no finite row is too long to be measured.
    """
    wide = rows.double()
    wide = torch.where(torch.isfinite(wide).all(1, keepdim=True), wide, 0.0)
    length = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    factor: Tensor = clip / length.clamp(min=clip)
    return wide * factor


def grid_of(deviation: float, clip: float) -> float:
    """The step of the grid for noise of a deviation; audits ask for none, of deviation 0."""
    return (deviation or clip * 2.0**-14) * 2.0**-BITS


def noised(steps: Tensor, noise: Tensor, grid: float | Tensor) -> Tensor:
    """What is released of a sum and its noise, both whole numbers of steps of the grid.

    Whole numbers are added exactly in double precision; all that follows is post-processing.
    """
    return (steps.double() + noise) * grid


def class_sums(
    rows: Tensor, place: Tensor, places: int, clip: float | Tensor, grid: float | Tensor
) -> Tensor:
    """[place, number], the sums of clipped rows by their places, in whole steps of the grid.

    A record stands in one place, so without it all sums together move by at most `clip`: rows are
    rounded towards zero, which makes none longer, and sums of whole numbers have no rounding and no
    order. A place of -1 counts nowhere.
    """
    where = place.unsqueeze(0) == torch.arange(places, device=place.device).unsqueeze(1)
    return where.double() @ (clipped(rows, clip) * (SHORTER / grid)).trunc()


class Sampled(NamedTuple):
    """A Poisson sample in fixed places, and the noise of its step.

    The numbers of the mechanism lie here, so that clients with other noise and other rates do the
    same arithmetic and can be stacked.
    """

    examples: Any  # a tree of [place, ...]; where no example was drawn, any
    share: Tensor  # [place], one over the expected number where an example was drawn, else 0
    noise: Weights  # of the shape of what is optimised, in whole steps of the grid
    grid: Tensor  # scalar, such that the noise has the deviation sigma · clip / expected number
    beside: Any = ()  # what a step sees besides, which holds no record


@dataclass(frozen=True)
class ClippedGradient:
    """DP-SGD: each example's gradient clipped, summed and noised. Abadi et al., CCS 2016.

    Batches are `Sampled`. Gradients of `chunk` examples are made at a time. A gradient that is
    not finite counts as zero. No loss is told: it would be exact. `joined(examples, beside)` makes
    the batch that the objective sees; without it, that is the examples.
    """

    clip: float
    chunk: int = 64
    joined: Callable[[Any, Any], Any] | None = None

    def gradient(
        self, loss_on: LossOn, value: Any, batch: Sampled, gradient: Gradient
    ) -> tuple[Any, Tensor, Any]:
        """The noisy mean of clipped gradients; zero in place of a loss; no statistics."""
        noise = trees.tensors(batch.noise)
        total = [torch.zeros_like(one, dtype=batch.share.dtype) for one in noise]

        def loss_of(examples: Any) -> Scored:
            joined = self.joined
            return loss_on(examples if joined is None else joined(examples, batch.beside))

        size, weights = batch.share.shape[0], trees.tensors(value)
        with precision.of_examples():
            for begin in range(0, size, self.chunk):
                end = min(size, begin + self.chunk)
                examples = trees.map_tensors(lambda t, b=begin, e=end: t[b:e], batch.examples)
                products = by_example() if batch.share.is_cuda else nullcontext()
                with products, asides.kept(weights) as lying:
                    grads, _ = per_example(loss_of, value, examples)
                told = zip(trees.tensors(grads), lying, strict=True)
                share = batch.share[begin:end]
                sums = clipped_sums([asides.taken(*one) for one in told], self.clip, share)
                total = [before + more for before, more in zip(total, sums, strict=True)]
        released = [
            noised((sums.double() / batch.grid).round(), own, batch.grid).to(sums)
            for sums, own in zip(total, noise, strict=True)
        ]
        return trees.with_tensors(value, released), batch.share.new_zeros(()), {}


def clipped_sums(leaves: Sequence[Taken], clip: float, share: Tensor) -> list[Tensor]:
    """Of each leaf, the sum over examples; each example's gradient is clipped, times its share.

    A gradient is the leaves together.
    """
    every = [leaf.gradient for leaf in leaves]
    rows = {at: as_it_lies(leaf) for at, leaf in enumerate(every) if isinstance(leaf, Tensor)}
    unknown = [row for at, row in rows.items() if leaves[at].squares is None]
    known = [leaf.squares for leaf in leaves if leaf.squares is not None]
    factors = (share * shortening(unknown, clip, known)).to(share)
    sums = dict(zip(rows, weighted_sums([*rows.values()], factors), strict=True))
    return [
        turned_back(sums[at], leaf) if isinstance(leaf, Tensor) else leaf.weighted_sum(factors)
        for at, leaf in enumerate(every)
    ]


def as_it_lies(leaf: Tensor) -> Tensor:
    """[example, number], a gradient's numbers in the order of memory, so that none is moved."""
    return leaf.permute(0, *_by_stride(leaf)).flatten(1)


def turned_back(row: Tensor, leaf: Tensor) -> Tensor:
    """A row of `as_it_lies`, or a sum of them, in the order of the leaf's axes."""
    axes = _by_stride(leaf)
    back = [axes.index(axis) for axis in range(1, leaf.dim())]
    return row.view([leaf.shape[axis] for axis in axes]).permute(back)


def _by_stride(leaf: Tensor) -> list[int]:
    """All axes but the first, as they lie in memory; in their order where that does not matter."""
    axes = [*range(1, leaf.dim())]
    free = leaf.dtype == torch.float16 or gpu.plain_on_gpu(leaf)  # in half only what lies aside
    return sorted(axes, key=leaf.stride, reverse=True) if free else axes


def weighted_sums(leaves: list[Tensor], factors: Tensor) -> list[Tensor]:
    """Of each leaf [example, number], the sum over examples, each times its factor.

    An example whose factor is 0 leaves no trace, also where its numbers are not finite.
    """
    kernels = _kernels(factors, *(leaf for leaf in leaves if leaf.dtype != torch.float16))
    if kernels is None or not leaves:
        counts = (factors != 0).unsqueeze(1)
        return [factors @ torch.where(counts, leaf.to(factors), 0.0) for leaf in leaves]
    sums = [kernels.weighted_sum(rows, factors) for rows in _few(leaves)]
    sizes = [leaf.shape[1] for leaf in leaves if _small(leaf)]
    small, large = iter(torch.split_with_sizes(sums[0], sizes)), iter(sums[1:])
    return [next(small if _small(leaf) else large) for leaf in leaves]


def shortening(gradients: list[Tensor], clip: float, known: Sequence[Tensor] = ()) -> Tensor:
    """[example], by what each gradient is multiplied to be no longer than `clip`; 0 if not finite.

    A gradient is the leaves [example, number] together; of more leaves the sums of squares are
    `known`.
    """
    kernels = _kernels(*gradients)
    parts = [*known]
    if kernels is None:
        lengths = (torch.linalg.vector_norm(leaf, dim=1, dtype=torch.float64) for leaf in gradients)
        parts += [length.square() for length in lengths]
    elif gradients:
        parts += [kernels.squares(rows) for rows in _few(gradients)]
    squares = torch.stack(parts).sum(0)
    fine = torch.isfinite(squares)
    length = torch.where(fine, squares, 1.0).sqrt()
    return torch.where(fine, clip / length.clamp(min=clip), 0.0)


SMALL = 4096  # numbers; leaves of fewer are looked at together


def _small(leaf: Tensor) -> bool:
    return leaf.shape[1] <= SMALL


def _few(leaves: list[Tensor]) -> list[Tensor]:
    """The same numbers in fewer leaves: all small ones as the first, then the large ones."""
    small = [leaf for leaf in leaves if _small(leaf)]
    first = torch.cat(small, 1) if small else leaves[0][:, :0]
    return [first, *(leaf for leaf in leaves if not _small(leaf))]


def _kernels(*tensors: Tensor) -> Any:
    """Kernels for gradients of single examples, where these may be handed to them."""
    return gpu.kernels("kernels.example_blocks", *tensors) if gpu.plain_on_gpu(*tensors) else None
