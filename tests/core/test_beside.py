"""Work of the host beside other work: the same results, and faults that are not lost."""

from __future__ import annotations

import threading

import pytest
import torch

from fedstill.core.beside import begun
from fedstill.core.seeds import generator


def drawn(purpose: str) -> torch.Tensor:
    return torch.randn(1000, generator=generator(0, purpose))


def test_draws_beside_each_other_are_those_in_turn() -> None:
    beside = begun(lambda: drawn("one"), "cuda")  # the name of a device, which need not be there
    other = drawn("other")
    assert torch.equal(beside(), drawn("one")) and torch.equal(other, drawn("other"))


def test_only_a_gpu_is_worth_a_thread() -> None:
    assert begun(threading.get_ident, "cpu")() == threading.get_ident()
    assert begun(threading.get_ident, "cuda")() != threading.get_ident()


def test_a_fault_shows_where_the_result_is_asked_for() -> None:
    failing = begun(lambda: 1 // 0, "cuda")
    with pytest.raises(ZeroDivisionError):
        failing()
