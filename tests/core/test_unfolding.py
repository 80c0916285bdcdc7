"""Gradients of gradients through a kernel whose inputs were made of one another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedstill.core.seeds import generator
from fedstill.core.unfolding import differentiable_gradients


def plain(maps: Tensor, scale: Tensor, added: Tensor | None) -> Tensor:
    made = maps.square() * scale
    return made if added is None else made + added.pow(3)


class Kernel(torch.autograd.Function):
    """The same, as a kernel is entered: with a gradient that is made by hand."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, scale: Tensor, added: Tensor | None) -> Tensor:
        ctx.save_for_backward(maps, scale, added)
        return plain(maps, scale, added)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(differentiable_gradients(plain, ctx.saved_tensors, grad))


def bent(residual: Any, x: Tensor, weight: Tensor, scale: Tensor, *, adds: bool) -> Tensor:
    """The slope, by x, of the squared length of the gradient by the weight."""
    arm = x * weight
    made = residual(torch.tanh(arm * weight), scale, arm if adds else None)  # made of one another
    (slope,) = torch.autograd.grad(made.sum(), weight, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), x)[0]


def test_the_arms_of_a_residual_block_are_not_counted_twice() -> None:
    def drawn() -> Tensor:
        return torch.randn(5, generator=rng, dtype=torch.float64).requires_grad_()

    rng = generator(0, "arms")
    x, weight, scale = drawn(), drawn(), drawn()
    for adds in (True, False):
        found = bent(Kernel.apply, x, weight, scale, adds=adds)
        assert torch.allclose(found, bent(plain, x, weight, scale, adds=adds), rtol=1e-12)


def test_what_wants_no_gradient_gets_none() -> None:
    maps, scale = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    found = differentiable_gradients(plain, (maps, scale, None), torch.ones(2))
    assert found[1] is None and found[2] is None
    assert found[0] is not None and found[0].tolist() == [6.0, 6.0]  # 2 * maps * scale
