"""A GPU kernel that adds up many tensors, each times its share, in the order given; with Triton.

As separate operations a mean of many clients' weights is two launches for each client and tensor,
which take the host longer than the GPU. Here it is one for each tensor. A product is rounded
before it is added, so the numbers are those of the separate operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedstill.core.gpu import plain_on_gpu, sent

NUMBERS = 1024  # of a program


def takes(rows: Sequence[Tensor]) -> bool:
    """Whether tensors can be added up here: alike, without gaps, in single precision on a GPU.

    The sum has no gradient.
    """
    first, asked = rows[0], torch.is_grad_enabled()
    return plain_on_gpu(*rows) and all(
        row.shape == first.shape and row.device == first.device and row.is_contiguous()
        and not (asked and row.requires_grad) for row in rows
    )  # fmt: skip


def weighted(columns: Sequence[Sequence[Tensor]], shares: Sequence[float]) -> list[Tensor]:
    """For each column of tensors the sum of tensors times shares, from first to last."""
    device = columns[0][0].device
    factors = sent(torch.tensor(shares, dtype=torch.float32), device)
    places = sent(torch.tensor([[row.data_ptr() for row in rows] for rows in columns]), device)
    made = [torch.empty_like(rows[0]) for rows in columns]
    with torch.cuda.device_of(places):  # type: ignore[no-untyped-call]
        for at, total in zip(places, made, strict=True):
            if total.numel():
                _add_up[(triton.cdiv(total.numel(), NUMBERS),)](
                    at, factors, total, len(shares), total.numel(), NUMBERS,
                    enable_fp_fusion=False,
                )  # fmt: skip
    return made


@triton.jit(do_not_specialize=["count"])
def _add_up(places, factors, total, count, numbers, NUMBERS: tl.constexpr):
    """Some numbers of the sum; `places` are where the tensors lie."""
    number = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    here = number < numbers
    found = tl.zeros([NUMBERS], tl.float32)
    for at in range(count):
        row = tl.load(places + at).to(tl.pointer_type(tl.float32))
        term = tl.load(row + number, mask=here, other=0.0) * tl.load(factors + at)
        found = tl.where(at == 0, term, found + term)
    tl.store(total + number, found, mask=here)
