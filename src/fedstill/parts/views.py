"""Views of training images: moved by some pixels and mirrored, anew at every step.

What image classifiers are commonly trained with. Nothing is differentiated through a view, so a
batch holds the images as they are seen.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor

from fedstill.core import Batch, Data, Lazy, Model, Node
from fedstill.core.data import Batches, Plan, Pool
from fedstill.core.errors import BadValue

Views = Literal["none", "crop_flip", "black_crop_flip", "reflect_crop_flip"]
"""How images are seen in training.

`crop_flip` moves each image by up to an eighth of its side (4 pixels of 32), or by up to `shift`
pixels, down or up and to the left or right, and mirrors every second one; what comes into sight is
zero, the mean of the data.
`black_crop_flip` fills it with black, what a pixel of zero is normalised to, as torchvision does
where images are padded before they are normalised. `reflect_crop_flip` fills it with the image
reflected at its edge, as NIID-Bench does.
"""

REACH = 0.125  # of the side
Ground = Callable[[slice, torch.Size], Tensor | None]  # images of what is around; none: zero


class Moves(NamedTuple):
    """How each of some images is seen."""

    down: Tensor  # [image], whole pixels
    right: Tensor  # [image]
    mirrored: Tensor  # [image], true or false


def idle_shift(views: Views, shift: int | None) -> list[str]:
    """Why a number of pixels moves nothing, as lines for `Method.faults`."""
    if shift is None or views != "none":
        return []
    return [f"shift = {shift}: nothing is moved without views; choose views, or leave it out"]


def unfit_views(views: Views, model: Model, shift: int | None = None) -> list[str]:
    """Why what a model sees cannot be seen so, as lines for `Method.unfit`."""
    if views == "none":
        return []
    if len(model.shape) != 3:
        return [
            f"views = {views!r} moves images of channels, height and width, not examples of shape "
            f'{tuple(model.shape)}; use views = "none"'
        ]
    side = min(model.shape[1:])
    if shift is not None and shift >= side:
        return [
            f"shift = {shift} moves images of {side} pixels out of sight; use at most {side - 1}"
        ]
    return []


def viewed(
    plan: Plan, views: Views, node: Node[Any], purpose: str = "views", shift: int | None = None
) -> Batches[Batch]:
    """The plan's batches as they are seen; the plan itself where they are seen as they are."""
    if views == "none":
        return plan
    if wrong := unfit_views(views, node.model, shift):
        raise BadValue(wrong)
    starts = list(accumulate(plan.sizes, initial=0))
    height, width = node.model.shape[1:]
    drawn = drawn_moves(node.rng(purpose), starts[-1], height, width, shift)
    moves = Moves(*(each.to(node.device) for each in drawn))
    ground = ground_of(views, plan.data, plan.order)

    def make(step: int) -> Batch:
        x, y = plan[step]
        here = slice(starts[step], starts[step + 1])
        return Batch(
            moved(x, Moves(*(each[here] for each in moves)), views, ground(here, y.shape)), y
        )

    def many(step: int, count: int) -> Batch | None:
        batches = plan.ahead(step, count)
        if batches is None:
            return None
        here = slice(starts[step], starts[step + len(batches.y)])
        laid = Moves(*(each[here].reshape(batches.y.shape) for each in moves))
        seen = moved(batches.x, laid, views, ground(here, batches.y.shape))
        return Batch(seen, batches.y)

    return Lazy(len(plan), make, many)


def drawn_moves(
    rng: Generator, images: int, height: int, width: int, shift: int | None = None
) -> Moves:
    """Moves of so many images, every one as likely as any other; by `shift` pixels at most."""
    reach = [int(REACH * side + 0.5) if shift is None else shift for side in (height, width)]
    down, right = (torch.randint(-far, far + 1, (images,), generator=rng) for far in reach)
    return Moves(down, right, torch.rand(images, generator=rng) < 0.5)


def ground_of(views: Views, data: Data, rows: Tensor) -> Ground:
    """What lies around the examples at `rows`, of which a slice is asked for in a shape.

    Parts of the data may be normalised each in its own way.
    """
    if views != "black_crop_flip" or not data.parts:
        return lambda here, shape: None
    black = torch.stack([black_of(part.pool) for part in data.parts])
    if len(black) == 1:
        return lambda here, shape: black[0]
    ends = torch.tensor(list(accumulate(len(part.rows) for part in data.parts)))
    part = torch.bucketize(rows.cpu(), ends, right=True).to(black.device)
    return lambda here, shape: black[part[here].reshape(shape)]


def black_of(pool: Pool) -> Tensor:
    """[channel, height, width], an image of zeros as it is normalised."""
    zeros = torch.zeros((1, *pool.stored.shape[1:]), dtype=pool.stored.dtype)
    return pool.normalised(zeros.to(pool.stored.device))[0]


def moved(x: Tensor, moves: Moves, views: Views, ground: Tensor | None = None) -> Tensor:
    """Images [..., channel, height, width] cut out where the moves say, then mirrored.

    What comes into sight is zero, or `ground`, which has the shape of an image.
    """
    height, width = x.shape[-2:]
    row = torch.arange(height, device=x.device) + moves.down.unsqueeze(-1)  # [..., height]
    column = torch.arange(width, device=x.device).expand(*moves.right.shape, width)
    column = torch.where(moves.mirrored.unsqueeze(-1), width - 1 - column, column)
    column = column + moves.right.unsqueeze(-1)
    inside = ((row >= 0) & (row < height))[..., :, None] & ((column >= 0) & (column < width))[
        ..., None, :
    ]
    row, column = reflected(row, height), reflected(column, width)
    shape = x.shape
    seen = x.gather(-2, row[..., None, :, None].expand(shape))
    seen = seen.gather(-1, column[..., None, None, :].expand(shape))
    if views == "reflect_crop_flip":
        return seen
    inside = inside.unsqueeze(-3)
    return seen * inside if ground is None else torch.where(inside, seen, ground)


def reflected(place: Tensor, size: int) -> Tensor:
    """Places beyond the first or the last one as far within; the edge itself counts once."""
    last = size - 1
    return (last - (last - place.abs()).abs()).clamp(min=0)
