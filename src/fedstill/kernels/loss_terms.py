"""GPU kernels of losses of few rows, with their gradients; only where Triton is.

As separate operations such a loss is some thirty launches there and as many back, each for a few
thousand numbers: they take longer to start than to run. Here the loss and what it says to its
inputs are made at once, in single precision, sums in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedstill.core.unfolding import differentiable_gradients
from fedstill.kernels.stacked_blocks import stacked

ROWS = 128  # of a contrast: more would not fit into one program
# Of logits: the same. Rows and classes are rounded up to powers of two, so a program holds up to
# twice as many. Then 64 KiB are shared, which every GPU from 8.0 on has, and of each thread up to
# 3 KB spill from registers to memory: in one launch that stands for thirty.
ENTRIES = 2**13
TINY = tl.constexpr(1e-12)  # the least length by which a row is divided
COLUMNS = 1024  # of a row of features at a time
LEFT_OUT = tl.constexpr(-100)  # a label of rows that do not count, as in the framework

Unfolded = Callable[[Tensor], Tensor]


def contrasted(features: Tensor, labels: Tensor, temperature: float, unfolded: Unfolded) -> Tensor:
    """The supervised contrastive loss of [row, feature]; `unfolded` is it by torch's operations."""
    given = features.contiguous(), labels.contiguous()
    return _Contrasted.apply(*given, temperature, unfolded)  # type: ignore[no-untyped-call,no-any-return]


def distilled(
    student: Tensor, teacher: Tensor, labels: Tensor, weight: Tensor | None,
    shares: tuple[float, float, float], unfolded: Unfolded,
) -> Tensor:  # fmt: skip
    """mean over rows of weight · (hard · CE(labels) + soft · KL(teacher / T ‖ student / T)).

    `shares` are hard, soft and T; `unfolded` is the same by torch's operations.
    """
    given = [one.contiguous() for one in (student, teacher, labels.long())]
    weight = None if weight is None else weight.contiguous()
    return _Distilled.apply(*given, weight, shares, unfolded)  # type: ignore[no-untyped-call,no-any-return]


def crossed(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of [row, class], for a stack: one `vmap`, in it a first gradient."""
    return _Crossed.apply(logits, labels)[0]  # type: ignore[no-untyped-call,no-any-return]


class _Contrasted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features: Tensor, labels: Tensor, temperature: float, unfolded: Unfolded
    ) -> Tensor:
        rows = len(labels)
        unit, lengths = torch.empty_like(features), features.new_empty(rows)
        loss, slopes = features.new_empty(()), features.new_empty(rows, rows)
        with torch.cuda.device_of(features):  # type: ignore[no-untyped-call]
            _unit[(rows,)](features, unit, lengths, features.shape[1], COLUMNS)
            size = int(triton.next_power_of_2(rows))
            _contrast[(1,)](
                unit @ unit.T, labels, loss, slopes, rows, temperature, size,
                num_warps=16 if size == ROWS else 8,
            )  # fmt: skip
        ctx.unfolded = unfolded
        ctx.save_for_backward(features, unit, lengths, slopes)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        features, unit, lengths, slopes = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable_gradients(ctx.unfolded, (features,), grad)[0], None, None, None
        told = torch.empty_like(features)
        # A product of matrices must not be the first that a thread of autograd asks of a GPU.
        heard = (slopes * grad) @ unit
        with torch.cuda.device_of(features):  # type: ignore[no-untyped-call]
            _unit_slopes[(len(told),)](heard, unit, lengths, told, features.shape[1], COLUMNS)
        return told, None, None, None


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, labels: Tensor, weight: Tensor | None,
        shares: tuple[float, float, float], unfolded: Unfolded,
    ) -> Tensor:  # fmt: skip
        rows, classes = student.shape
        loss, slopes = student.new_empty(()), torch.empty_like(student)
        sizes = [int(triton.next_power_of_2(number)) for number in (rows, classes)]
        with torch.cuda.device_of(student):  # type: ignore[no-untyped-call]
            _distil[(1,)](
                student, teacher, labels, labels if weight is None else weight, loss, slopes, rows,
                classes, *shares, weight is not None, *sizes, num_warps=4,
            )  # fmt: skip
        ctx.unfolded = unfolded
        ctx.save_for_backward(student, slopes)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        student, slopes = ctx.saved_tensors
        if torch.is_grad_enabled():
            (told,) = differentiable_gradients(ctx.unfolded, (student,), grad)
        else:
            told = slopes * grad
        return told, None, None, None, None, None


class _Crossed(torch.autograd.Function):
    """What the loss says to the logits leaves beside it, since only that can be kept."""

    @staticmethod
    def forward(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, slopes = _crossed_each(logits[None], labels[None])
        return loss[0], slopes[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * grad, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _crossed_each(*stacked(info, in_dims, inputs)), 0


def _crossed_each(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """[member], the losses of [member, row, class], and what they say to the logits."""
    logits, (members, rows, classes) = logits.contiguous(), logits.shape
    losses, slopes = logits.new_empty(members), torch.empty_like(logits)
    sizes = [int(triton.next_power_of_2(number)) for number in (rows, classes)]
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _cross[(members,)](
            logits, labels.contiguous(), losses, slopes, rows, classes, *sizes, num_warps=4
        )
    return losses, slopes


@triton.jit
def _cross(
    logits, labels, losses, slopes, rows, classes, ROWS: tl.constexpr, CLASSES: tl.constexpr
):
    """The loss of all rows of one member, and what it says to its logits."""
    member = tl.program_id(0)
    row, label = tl.arange(0, ROWS)[:, None], tl.arange(0, CLASSES)[None, :]
    there = (row < rows) & (label < classes)
    where = member * rows * classes + row * classes + label
    own = tl.load(logits + where, mask=there, other=-float("inf"))
    own = tl.where(row < rows, own, 0.0)  # rows that there are not, of plain numbers
    truth = tl.load(labels + member * rows + row, mask=row < rows, other=LEFT_OUT)
    right, heard = truth == label, (truth != LEFT_OUT).to(tl.float32)
    count = tl.sum(tl.sum(heard, 1), 0)
    log_p = _log_shares(own)
    crossed = -tl.sum(tl.where(right & there, log_p, 0.0), 1)
    tl.store(losses + member, tl.sum(crossed, 0) / count)
    said = heard * (tl.exp(log_p) - right.to(tl.float32)) / tl.maximum(count, 1.0)
    tl.store(slopes + where, said, mask=there)


@triton.jit
def _unit(rows, unit, lengths, columns, COLUMNS: tl.constexpr):
    """One row over its length."""
    row, place = tl.program_id(0), tl.arange(0, COLUMNS)
    first = row.to(tl.int64) * columns
    squares = tl.zeros([COLUMNS], tl.float32)
    for begin in range(0, columns, COLUMNS):
        value = tl.load(rows + first + begin + place, mask=begin + place < columns, other=0.0)
        squares += value * value
    length = tl.sqrt(tl.sum(squares, 0))
    tl.store(lengths + row, length)
    for begin in range(0, columns, COLUMNS):
        here = begin + place < columns
        value = tl.load(rows + first + begin + place, mask=here, other=0.0)
        tl.store(unit + first + begin + place, value / tl.maximum(length, TINY), mask=here)


@triton.jit
def _unit_slopes(told, unit, lengths, found, columns, COLUMNS: tl.constexpr):
    """What is told to a row over its length, told to the row: nothing along its direction."""
    row, place = tl.program_id(0), tl.arange(0, COLUMNS)
    first = row.to(tl.int64) * columns
    along = tl.zeros([COLUMNS], tl.float32)
    for begin in range(0, columns, COLUMNS):
        here = begin + place < columns
        own = tl.load(unit + first + begin + place, mask=here, other=0.0)
        along += own * tl.load(told + first + begin + place, mask=here, other=0.0)
    length = tl.load(lengths + row)
    share = tl.where(length >= TINY, tl.sum(along, 0), 0.0)  # a shorter row has a fixed divisor
    length = tl.maximum(length, TINY)
    for begin in range(0, columns, COLUMNS):
        here = begin + place < columns
        own = tl.load(unit + first + begin + place, mask=here, other=0.0)
        value = tl.load(told + first + begin + place, mask=here, other=0.0)
        tl.store(found + first + begin + place, (value - share * own) / length, mask=here)


@triton.jit
def _contrast(products, labels, loss, slopes, rows, temperature, ROWS: tl.constexpr):
    """The loss of all rows, and what it says to the products of each two of them, both ways."""
    row, other = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    there = (row < rows) & (other < rows)
    apart = there & (row != other)
    alike = tl.load(products + row * rows + other, mask=there, other=0.0) / temperature
    own = tl.load(labels + row, mask=row < rows, other=-1)
    theirs = tl.load(labels + other, mask=other < rows, other=-2)
    partner = (apart & (own == theirs)).to(tl.float32)
    count = tl.sum(partner, 1)[:, None]
    most = tl.max(tl.where(apart, alike, -float("inf")), 1)[:, None]
    most = tl.where(row < rows, most, 0.0)
    weight = tl.where(apart, tl.exp(alike - most), 0.0)
    total = tl.where(row < rows, tl.sum(weight, 1)[:, None], 1.0)
    log_share = alike - (most + tl.log(total))
    each = tl.sum(tl.where(partner > 0, -log_share, 0.0), 1)[:, None] / tl.maximum(count, 1.0)
    tl.store(loss, tl.sum(tl.sum(tl.where(row < rows, each, 0.0), 1), 0) / rows)
    said = (count * (weight / total) - partner) / (tl.maximum(count, 1.0) * temperature * rows)
    said = tl.where(apart, said, 0.0)
    tl.store(slopes + row * rows + other, said + tl.trans(said), mask=there)


@triton.jit
def _distil(
    student, teacher, labels, weight, loss, slopes, rows, classes, hard, soft, temperature,
    WEIGHED: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """The loss of all rows, and what it says to the student's logits."""
    row, label = tl.arange(0, ROWS)[:, None], tl.arange(0, CLASSES)[None, :]
    there = (row < rows) & (label < classes)
    own = tl.load(student + row * classes + label, mask=there, other=-float("inf"))
    theirs = tl.load(teacher + row * classes + label, mask=there, other=-float("inf"))
    own = tl.where(row < rows, own, 0.0)  # rows that there are not, of plain numbers
    theirs = tl.where(row < rows, theirs, 0.0)
    truth = tl.load(labels + row, mask=row < rows, other=LEFT_OUT)
    right, learned = truth == label, (truth != LEFT_OUT).to(tl.float32)
    log_p = _log_shares(own)
    crossed = -tl.sum(tl.where(right & there, log_p, 0.0), 1)[:, None]
    log_q, log_t = _log_shares(own / temperature), _log_shares(theirs / temperature)
    share = tl.exp(log_t)
    apart = tl.sum(tl.where(there, share * (log_t - log_q), 0.0), 1)[:, None]
    heard = tl.where(row < rows, 1.0, 0.0)
    if WEIGHED:
        heard = tl.load(weight + row, mask=row < rows, other=0.0)
    tl.store(loss, tl.sum(tl.sum(heard * (hard * crossed + soft * apart), 1), 0) / rows)
    said = hard * learned * (tl.exp(log_p) - right.to(tl.float32))
    said += soft / temperature * (tl.exp(log_q) - share)
    tl.store(slopes + row * classes + label, heard * said / rows, mask=there)


@triton.jit
def _log_shares(logits):
    """The logarithm of softmax along rows."""
    logits = logits - tl.max(logits, 1)[:, None]
    return logits - tl.log(tl.sum(tl.exp(logits), 1))[:, None]
