"""Losses of few rows, each as one kernel, and what they say to features and logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core import gpu
from fedstill.core.seeds import generator
from fedstill.parts import losses
from fedstill.parts.losses import hinton, supervised_contrastive
from interpreted import guarded, needs_triton, noise, untouched

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")]
LEFT_OUT = -100
Loss = Callable[[Tensor], Tensor]
# Numbers are off by less than a hundred roundings of 2**-24, times a temperature's inverse.
NEAR = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of single precision are handed to kernels on any machine."""
    monkeypatch.setattr(
        gpu, "plain_on_gpu", lambda *given: all(one.dtype == torch.float32 for one in given)
    )


def classes_of(rows: int, classes: int = 3) -> Tensor:
    return guarded(torch.randint(classes, (rows,), generator=generator(6, "labels", rows)))


def said(loss: Loss, x: Tensor) -> list[Tensor]:
    """Three times the loss, its gradient, and the gradient of that gradient's square."""
    value = 3 * loss(x)
    (plain,) = torch.autograd.grad(value, x)
    (first,) = torch.autograd.grad(3 * loss(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return [value.detach(), plain, first.detach(), second]


def made_by(loss: Tensor) -> str:
    """The class of the kernels that made a loss."""
    return type(loss.grad_fn).__name__


def check_agree(loss: Loss, x: Tensor) -> None:
    """In single precision, by kernels, as in double precision, by torch's operations."""
    exact = said(loss, x.double().detach().requires_grad_())
    for one, other in zip(exact, said(loss, x.requires_grad_()), strict=True):
        assert torch.allclose(one, other.double(), **NEAR)


@pytest.mark.parametrize(("rows", "width"), [(2, 1), (7, 5), (16, 1030), (128, 3)])
def test_a_contrast_is_that_of_the_operations(rows: int, width: int) -> None:
    x, labels = noise(rows, width), classes_of(rows)
    own = x.detach().clone()
    check_agree(lambda x: supervised_contrastive(x, labels, temperature=0.3), x)
    found = supervised_contrastive(x.detach().requires_grad_(), labels)
    assert made_by(found) == "_ContrastedBackward"
    assert torch.equal(x, own) and untouched(x.detach(), labels)


def test_more_rows_than_a_contrast_holds_are_left_to_the_operations() -> None:
    x, labels = noise(129, 2).requires_grad_(), classes_of(129)
    assert made_by(supervised_contrastive(x, labels)) != "_ContrastedBackward"


def test_rows_without_a_partner_and_rows_of_zeros_say_nothing() -> None:
    x = noise(5, 6)
    x[1] = 0
    loss = supervised_contrastive(x.requires_grad_(), torch.arange(5, device=x.device))
    (slope,) = torch.autograd.grad(loss, x)
    assert loss == 0 and (slope == 0).all()


@pytest.mark.parametrize("length", [1e-13, 1e-11])  # the divisor of a row is fixed below 1e-12
def test_a_row_of_almost_no_length_is_divided_as_the_operations_do(length: float) -> None:
    x, labels = noise(4, 6), torch.tensor([0, 0, 1, 1]).to(noise(1).device)
    x[1] *= length / x[1].norm()
    exact, single = x.double().requires_grad_(), x.requires_grad_()
    slopes = [
        torch.autograd.grad(supervised_contrastive(one, labels, temperature=0.5), one)[0]
        for one in (exact, single)
    ]
    assert torch.allclose(slopes[0], slopes[1].double(), rtol=1e-4, atol=1e-6)


def test_a_contrast_with_what_is_no_number_is_none() -> None:
    x, labels = noise(4, 3), torch.tensor([0, 0, 1, 2]).to(noise(1).device)
    x[3, 1] = float("nan")
    loss = supervised_contrastive(x.requires_grad_(), labels)
    assert loss.isnan() and torch.autograd.grad(loss, x)[0].isnan().any()


def apart(x: Tensor) -> Tensor:
    """The same numbers with others between them."""
    wide = torch.full((*x.shape, 2), 119).to(x)
    wide[..., 0] = x
    return wide[..., 0]


def test_a_contrast_takes_features_and_labels_that_lie_in_any_order() -> None:
    x, labels = noise(5, 7).T, classes_of(7)
    check_agree(lambda x: supervised_contrastive(x, apart(labels), temperature=0.3), x)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize(("rows", "classes"), [(5, 10), (1, 2), (33, 7), (3, 1), (8, 1024)])
def test_distillation_is_that_of_the_operations(rows: int, classes: int, weighed: bool) -> None:
    x, teacher, labels = (
        noise(rows, classes),
        noise(rows, classes, of="t"),
        classes_of(rows, classes),
    )
    weight = noise(rows, of="weight").abs_() if weighed else None

    def loss(x: Tensor) -> Tensor:
        heard = None if weight is None else weight.to(x.dtype)
        return hinton(
            x, teacher.to(x.dtype), labels, temperature=3.0, soft_share=0.7, weight=heard,
            reduction="elements" if weighed else "rows",
        )  # fmt: skip

    check_agree(loss, x)
    assert made_by(loss(x)) == "_DistilledBackward"
    assert untouched(x.detach(), teacher, labels, teacher if weight is None else weight)


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8])  # the kinds that the framework takes
def test_distillation_takes_tensors_that_lie_in_any_order(kind: torch.dtype) -> None:
    x, teacher, labels = noise(4, 6).T, noise(4, 6, of="teacher").T, classes_of(6, 4).to(kind)
    weight = noise(6, of="weight").abs()

    def loss(x: Tensor) -> Tensor:
        heard = apart(weight.to(x.dtype))
        return hinton(
            x, teacher.to(x.dtype), apart(labels), temperature=2.0, soft_share=0.4, weight=heard
        )

    check_agree(loss, x)


def test_rows_that_are_left_out_hear_of_the_teacher_alone() -> None:
    x, teacher, labels = noise(5, 4), noise(5, 4, of="teacher"), classes_of(5, 4)
    labels[1] = labels[4] = LEFT_OUT

    def loss(x: Tensor) -> Tensor:
        return hinton(x, teacher.to(x.dtype), labels, temperature=2.0, soft_share=0.4)

    check_agree(loss, x)


def test_the_weights_of_rows_are_told_their_gradient() -> None:
    """No kernel has one, so the operations are left to make it."""
    x, weight, labels = noise(3, 4), noise(3, of="weight").requires_grad_(), classes_of(3, 4)
    loss = hinton(x, x.flip(0), labels, temperature=1.0, soft_share=0.5, weight=weight)
    assert (torch.autograd.grad(loss, weight)[0] != 0).all()


def test_no_rows_and_too_many_numbers_are_left_to_the_operations() -> None:
    for shape in ((0, 3), (2, 4097), (1, 10_000), (1, 21_841)):
        x, labels = noise(*shape).requires_grad_(), classes_of(shape[0])
        loss = hinton(x, x, labels, temperature=1.0, soft_share=0.5)
        assert made_by(loss) != "_DistilledBackward"
        assert loss.isnan() == (shape[0] == 0)


def test_a_program_holds_at_most_twice_the_entries_that_it_is_handed() -> None:
    """So much was compiled (`real_sizes.py`); more might not fit."""
    most = gpu.kernels(losses.KERNELS).ENTRIES
    sizes = ((rows, classes) for rows in range(1, most + 1) for classes in (most // rows,))
    held = max(_rounded(rows) * _rounded(classes) for rows, classes in sizes)
    assert held == _rounded(65) * _rounded(126) == 2 * most


def _rounded(number: int) -> int:
    return 1 << (number - 1).bit_length()


def test_the_mean_over_no_rows_is_left_to_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = gpu.kernels(losses.KERNELS)
    monkeypatch.setattr(losses, "_kernels_of_stacks", lambda *given: kernels)
    assert losses.task_loss(noise(0, 3), classes_of(0)).isnan()
    found = losses.task_loss(noise(2, 3).requires_grad_(), classes_of(2))
    assert made_by(found) == "_CrossedBackward"


def test_distilled_logits_that_are_no_numbers_make_a_loss_that_is_none() -> None:
    x, labels = noise(3, 4), classes_of(3, 4)
    x[1, 2] = float("nan")
    loss = hinton(x.requires_grad_(), noise(3, 4), labels, temperature=1.0, soft_share=0.5)
    (slope,) = torch.autograd.grad(loss, x)
    assert loss.isnan() and slope[1].isnan().all() and not slope[[0, 2]].isnan().any()


def told(loss: Any, x: Tensor, labels: Tensor, **dims: Any) -> tuple[Tensor, Tensor]:
    """What a stack's losses say to its logits, and the losses."""

    def louder(x: Tensor, labels: Tensor) -> Tensor:
        return 3 * loss(2 * x, labels)

    found: tuple[Tensor, Tensor] = torch.func.vmap(torch.func.grad_and_value(louder), **dims)(
        x, labels
    )
    return found


def check_same(x: Tensor, labels: Tensor, **dims: Any) -> None:
    found = told(gpu.kernels(losses.KERNELS).crossed, x, labels, **dims)
    for one, other in zip(told(F.cross_entropy, x.double(), labels, **dims), found, strict=True):
        assert torch.allclose(one, other.double(), **NEAR, equal_nan=True)


@pytest.mark.parametrize("shape", [(4, 32, 10), (3, 7, 13), (1, 1, 1), (2, 1, 5), (2, 5, 1)])
def test_the_cross_entropy_of_a_stack_is_the_frameworks(shape: tuple[int, int, int]) -> None:
    members, rows, classes = shape
    x, labels = noise(*shape), classes_of(members * rows, classes).view(members, rows)
    check_same(x, labels)
    assert untouched(x, labels)


def test_rows_that_are_left_out_do_not_count() -> None:
    x, labels = noise(3, 5, 4), classes_of(15, 4).view(3, 5)
    labels[0, :2] = LEFT_OUT
    labels[1] = LEFT_OUT  # a mean of no rows is no number; what it says is nothing, as ever
    slopes, means = told(gpu.kernels(losses.KERNELS).crossed, x, labels)
    assert means.isnan().tolist() == [False, True, False]
    assert (slopes[0, :2] == 0).all() and (slopes[1] == 0).all()
    check_same(x, labels)


def test_members_of_a_stack_share_logits_or_labels() -> None:
    x, labels = noise(3, 5, 4), classes_of(15, 4).view(3, 5)
    check_same(x, labels[0], in_dims=(0, None))
    check_same(x[0], labels, in_dims=(None, 0))
    check_same(x.transpose(0, 1), labels.T, in_dims=(1, 1))
    check_same(x.transpose(1, 2).contiguous().transpose(1, 2), apart(labels))


def test_logits_that_are_no_numbers_spoil_their_member_alone() -> None:
    x, labels = noise(3, 5, 4), classes_of(15, 4).view(3, 5)
    x[0, 1, 2], x[1, 0] = float("nan"), float("-inf")
    x[2, 1, 0] = float("-inf")  # no class for this row
    labels[2, 1] = 1
    check_same(x, labels)


def test_one_network_has_the_loss_without_a_stack() -> None:
    x, labels = noise(6, 5), classes_of(6, 5)
    labels[2] = LEFT_OUT
    exact, single = x.double().requires_grad_(), x.requires_grad_()
    wanted, found = (
        F.cross_entropy(exact, labels), gpu.kernels(losses.KERNELS).crossed(single, labels)
    )  # fmt: skip
    assert torch.allclose(wanted, found.double(), **NEAR)
    slopes = [torch.autograd.grad(loss, one)[0] for loss, one in ((wanted, exact), (found, single))]
    assert torch.allclose(slopes[0], slopes[1].double(), **NEAR)
