"""Losses as kernels on a GPU against the same losses in double precision on the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedstill.core import gpu
from fedstill.core.precision import using
from fedstill.core.seeds import generator
from fedstill.parts import losses
from fedstill.parts.losses import hinton, supervised_contrastive, task_loss

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Loss = Callable[[Tensor], Tensor]


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(5, "rows", *shape), dtype=torch.float64)


def labels(count: int, classes: int = 4) -> Tensor:
    return torch.randint(classes, (count,), generator=generator(6, "labels", count))


def said(loss: Loss, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three times the loss, its gradient, and the gradient of that gradient's square."""
    x = x.clone().requires_grad_()
    value = 3 * loss(x)
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    (plain,) = torch.autograd.grad(3 * loss(x), x)
    assert torch.allclose(plain, first, rtol=1e-4, atol=1e-6)
    return value.detach(), plain, second


def agree(on_host: Loss, on_gpu: Loss, x: Tensor) -> None:
    for one, other in zip(said(on_host, x), said(on_gpu, x.float().cuda()), strict=True):
        assert torch.allclose(one, other.double().cpu(), rtol=2e-4, atol=2e-5)


@needs_a_gpu
@pytest.mark.parametrize("count", [2, 7, 64, 128, 129])  # of the last kind there is no kernel
@pytest.mark.parametrize("width", [5, 1500])
def test_a_contrast_is_what_it_is_on_the_host(count: int, width: int) -> None:
    own = labels(count)
    agree(
        lambda x: supervised_contrastive(x, own, temperature=0.3),
        lambda x: supervised_contrastive(x, own.cuda(), temperature=0.3),
        noise(count, width),
    )


@needs_a_gpu
def test_rows_without_a_partner_and_rows_of_zeros_leave_finite_numbers() -> None:
    x = noise(5, 6).float().cuda()
    x[1] = 0
    x.requires_grad_()
    loss = supervised_contrastive(x, torch.arange(5).cuda())
    (grad,) = torch.autograd.grad(loss, x)
    assert loss == 0
    assert (grad == 0).all()


@needs_a_gpu
@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("reduction", ["rows", "elements"])
@pytest.mark.parametrize("shape", [(5, 10), (33, 7), (600, 20)])  # for the last there is no kernel
def test_distillation_is_what_it_is_on_the_host(
    shape: tuple[int, int], reduction: str, weighed: bool
) -> None:
    rows, classes = shape
    teacher, right = noise(rows, classes).flip(1), labels(rows, classes)
    weight = noise(rows).abs() if weighed else None

    def loss(x: Tensor) -> Tensor:
        heard = None if weight is None else weight.to(x)
        return hinton(
            x, teacher.to(x), right.to(x.device), temperature=3.0, soft_share=0.7, weight=heard,
            reduction=reduction,  # type: ignore[arg-type]
        )  # fmt: skip

    agree(loss, loss, noise(rows, classes))


@needs_a_gpu
def test_kernels_make_these_losses_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, made = losses.gpu.kernels(losses.KERNELS), []
    for name in ("contrasted", "distilled"):
        plain = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *given, plain=plain, name=name: made.append(name) or plain(*given)
        )
    x, own = noise(6, 4).float().cuda(), labels(6).cuda()
    supervised_contrastive(x, own)
    hinton(x, x, own, temperature=1.0, soft_share=0.5)
    assert made == ["contrasted", "distilled"]


@needs_a_gpu
@pytest.mark.parametrize("shape", [(4, 32, 10), (3, 7, 13), (2, 600, 20)])  # the last has no kernel
def test_the_cross_entropy_of_a_stack_is_what_it_is_on_the_host(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    members, rows, classes = shape
    x = noise(members, rows, classes)
    right = labels(members * rows, classes).reshape(members, rows)
    right[0, :2] = -100  # as in the framework, such rows do not count
    used: list[int] = []
    kernels = gpu.kernels(losses.KERNELS)
    counted = kernels._crossed_each
    monkeypatch.setattr(
        kernels, "_crossed_each", lambda *each: (used.append(len(each[0])), counted(*each))[1]
    )

    def loss(x: Tensor, right: Tensor) -> Tensor:
        return 3 * task_loss(2 * x, right)

    def both(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.vmap(torch.func.grad_and_value(loss))(*inputs)

    with using("half"):
        found = both(x.float().cuda(), right.cuda())
    assert used == ([members] if rows < 600 else [])
    for one, other in zip(both(x, right), found, strict=True):
        assert torch.allclose(one, other.double().cpu(), rtol=1e-5, atol=1e-6)


@needs_a_gpu
def test_only_half_precision_has_the_cross_entropy_of_stacks_as_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu.kernels(losses.KERNELS), "_crossed_each", None)
    x, right = noise(2, 3, 4).float().cuda(), labels(6).reshape(2, 3).cuda()
    plain = torch.func.vmap(torch.func.grad(task_loss))(x, right)
    each = [torch.func.grad(task_loss)(one, own) for one, own in zip(x, right, strict=True)]
    assert torch.allclose(plain, torch.stack(each), atol=1e-6)
