"""Works of a step as branches of a recording."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from fedstill.core.branches import branching, in_branches
from fedstill.core.seeds import generator

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_outside_of_a_recording_works_are_done_in_turn() -> None:
    done: list[int] = []

    def work(number: int) -> int:
        done.append(number)
        return number**2

    assert in_branches([partial(work, number) for number in (3, 1, 2)]) == [9, 1, 4]
    assert done == [3, 1, 2]
    assert in_branches([]) == []


def test_streams_are_not_asked_for_where_there_is_a_single_work() -> None:
    def none_there() -> list[object]:
        raise AssertionError("no stream is needed")

    with branching(none_there):
        assert in_branches([lambda: "alone"]) == ["alone"]


@NEEDS_GPU
def test_branches_of_a_recording_give_the_very_same_as_works_in_turn() -> None:
    from fedstill.engines.loops.graphs import CudaGraphs

    rng = generator(0, "branches")
    layers = [torch.randn(64, 64, generator=rng).cuda() for _ in range(5)]
    x = torch.randn(32, 64, generator=rng).cuda()

    def recorded(branches: int) -> list[Tensor]:
        value, grad = torch.zeros((), device="cuda"), torch.zeros_like(x)

        def step() -> None:
            seen = x.clone().requires_grad_()
            said = in_branches([partial(torch.matmul, seen.tanh(), layer) for layer in layers])
            loss = torch.stack(said).square().mean()
            grad.copy_(torch.autograd.grad(loss, seen)[0])
            value.copy_(loss.detach())

        replay = CudaGraphs(torch.device("cuda"), branches)(step)
        value.zero_(), grad.zero_()
        replay()
        torch.cuda.synchronize()
        return [value, grad]

    in_turn = recorded(0)
    assert float(in_turn[0]) > 0
    for branches in (1, 3, 7):
        for one, other in zip(in_turn, recorded(branches), strict=True):
            assert torch.equal(one, other)
