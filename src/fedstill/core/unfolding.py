"""Gradients of gradients through kernels: what a kernel does, once more by torch's operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def differentiable_gradients(
    unfolded: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor
) -> list[Tensor | None]:
    """What `grad` of unfolded(*inputs) is for each input, so that it can be differentiated again.

    Inputs stand for themselves alone: where one was made of another, as the two arms of a residual
    block are, the way from one to the other belongs to what came before and is not walked here.
    None for inputs that are None or want no gradient.
    """
    own = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
    asked = [tensor for tensor in own if tensor is not None and tensor.requires_grad]
    found = iter(torch.autograd.grad(unfolded(*own), asked, grad, create_graph=True))
    return [None if t is None or not t.requires_grad else next(found) for t in own]
