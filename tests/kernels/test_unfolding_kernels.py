"""Gradients of a kernel's gradients, as the operations that stand for it have them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedstill.core.unfolding import differentiable_gradients
from interpreted import noise


def bent(one: Tensor, other: Tensor) -> Tensor:
    return one.pow(3) * other.sin()


def test_one_tensor_in_two_places_hears_of_each_alone() -> None:
    x, told = noise(5).double().requires_grad_(), noise(5, of="told").double()
    first, second = differentiable_gradients(bent, (x, x), told)
    assert first is not None and second is not None
    assert torch.allclose(first, told * 3 * x.square() * x.sin())
    assert torch.allclose(second, told * x.pow(3) * x.cos())


def test_what_is_told_is_differentiated_too() -> None:
    x, told = noise(5).double().requires_grad_(), noise(5, of="told").double().requires_grad_()
    fixed = noise(5, of="fixed").double()
    found, nothing = differentiable_gradients(bent, (x, fixed), told)
    assert found is not None and nothing is None
    (to_told, to_x) = torch.autograd.grad(found.sum(), [told, x])
    assert torch.allclose(to_told, 3 * x.square() * fixed.sin())
    assert torch.allclose(to_x, told * 6 * x * fixed.sin())


@pytest.mark.parametrize("place", [0, 1])
def test_inputs_that_were_made_of_others_stand_for_themselves(place: int) -> None:
    x, told = noise(5).double().requires_grad_(), noise(5, of="told").double()
    made = [x.exp(), x.exp().cos()]  # the second was made as the first was
    found = differentiable_gradients(bent, made, told)[place]
    alone = [one.detach().requires_grad_() for one in made]
    wanted = torch.autograd.grad(bent(alone[0], alone[1]), alone[place], told)[0]
    assert found is not None and torch.allclose(found, wanted)
