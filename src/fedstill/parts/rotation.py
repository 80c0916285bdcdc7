"""Images turned about their centre, with a gradient that is the same in every run."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rotated(x: Tensor, angle: Tensor) -> Tensor:
    """Each pixel fetched from its place turned about the centre; bilinear, zero outside."""
    angle = angle.to(x).reshape(-1, 1, 1)  # [set, 1, 1]
    turned = _Turn.apply(x, angle)  # type: ignore[no-untyped-call]
    # An angle of zero would cost a rounding error; the image itself is exact.
    return torch.where(angle[..., None, None] == 0, x, turned)


class _Turn(torch.autograd.Function):
    """Rotation as a linear map whose gradient is gathered, not scattered.

    The gradient of the framework's sampler adds up in an order that changes from run to run on a
    GPU. Here every pixel of the gradient collects what was fetched from it, in a fixed order.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, angle: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        rows, columns = _turned_places(height, width, angle)
        grid = torch.stack([columns * (2 / width), rows * (2 / height)], -1)
        grid = grid.unsqueeze(1).expand(*x.shape[:2], height, width, 2).flatten(0, 1)
        turned = F.grid_sample(
            x.flatten(0, 1), grid, mode="bilinear", padding_mode="zeros", align_corners=False
        )
        return turned.reshape(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _TurnBack.apply(gradient, *ctx.saved_tensors), None  # type: ignore[no-untyped-call]


class _TurnBack(torch.autograd.Function):
    """The transpose of the rotation: each pixel sums over those that were fetched from it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, angle: Tensor) -> Tensor:
        height, width = g.shape[-2:]
        cosine, sine = angle.cos(), angle.sin()
        rows, columns = _turned_places(height, width, -angle)
        first_row = torch.floor(rows + (height - 1) / 2) - 1
        first_column = torch.floor(columns + (width - 1) / 2) - 1
        own_row = _centred(height, g).reshape(-1, 1)
        own_column = _centred(width, g)
        total = torch.zeros_like(g)
        # A pixel is fetched from by pixels nearer than the square root of two to its own turned
        # place: four rows by four columns hold them all.
        for down in range(4):
            for right in range(4):
                row, column = first_row + down, first_column + right
                inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
                across, along = column - (width - 1) / 2, row - (height - 1) / 2
                off_column = cosine * across - sine * along - own_column
                off_row = sine * across + cosine * along - own_row
                share = (1 - off_column.abs()).clamp(min=0) * (1 - off_row.abs()).clamp(min=0)
                place = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
                where = place.long().reshape(-1, 1, 1, height * width)
                fetched = g.flatten(-2).gather(-1, where.expand(*g.shape[:3], -1))
                total = total + (share * inside)[:, None, None] * fetched.reshape(g.shape)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Turn.apply(gradient, *ctx.saved_tensors), None  # type: ignore[no-untyped-call]


def _turned_places(height: int, width: int, angle: Tensor) -> tuple[Tensor, Tensor]:
    """[set, height, width], rows and columns from the centre that pixels are fetched from."""
    down, right = _centred(height, angle).unsqueeze(1), _centred(width, angle)
    cosine, sine = angle.cos(), angle.sin()
    return sine * right + cosine * down, cosine * right - sine * down


def _centred(size: int, like: Tensor) -> Tensor:
    return torch.arange(size, device=like.device, dtype=like.dtype) - (size - 1) / 2
