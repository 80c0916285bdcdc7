"""Execution: checked values, and process-wide switches that are set and given back."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fedstill.core import precision
from fedstill.core.errors import BadValue
from fedstill.core.precision import Precision
from fedstill.engines import execution
from fedstill.engines.execution import ENGINES, Execution, engine_of
from fedstill.engines.play.batched import Batched
from fedstill.methods.fedavg import FedAvg
from fedstill.models import MLP
from worlds import experiment, vectors

NET = MLP((4,), 3)


def switches() -> dict[str, Any]:
    """Everything in the process that an execution sets."""
    return {
        "deterministic": torch.backends.cudnn.deterministic,
        "convolutions": torch.backends.cudnn.allow_tf32,
        "products": torch.backends.cuda.matmul.allow_tf32,
        "half": precision.half_asked_for(),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """When the allocator is told to keep what is freed, and when no longer."""
    seen: list[str] = []
    inside = execution.memory_kept

    class Told:
        def __enter__(self) -> None:
            seen.append("kept")

        def __exit__(self, *_: object) -> None:
            seen.append("given back")

    assert callable(inside)
    monkeypatch.setattr(execution, "memory_kept", Told)
    return seen


def test_switches_are_set_inside_and_given_back(kept: list[str]) -> None:
    before = switches()
    with Execution(device="cpu", precision="half", threads=2).applied([NET]):
        assert switches() == {
            "deterministic": True, "convolutions": True, "products": True, "half": True,
            "threads": 2,
        }  # fmt: skip
        assert kept == ["kept"]
    assert switches() == before and kept == ["kept", "given back"]
    with Execution(device="cpu", precision="single", threads=1).applied([NET]):
        inside = switches()
        assert (inside["convolutions"], inside["products"], inside["half"]) == (False, False, False)
    assert switches() == before


def test_switches_are_given_back_after_an_error(kept: list[str]) -> None:
    before = switches()
    with pytest.raises(KeyError), Execution(device="cpu", precision="half", threads=2).applied([]):
        raise KeyError("inside")
    assert switches() == before and kept == ["kept", "given back"]


@pytest.mark.parametrize("asked", ["highest", "high", "medium"])
@pytest.mark.parametrize("precision", ["single", "tf32", "half"])
def test_what_a_program_asked_of_matrix_products_holds_outside_alone(
    asked: str, precision: Precision
) -> None:
    """In the last one products on a CPU would be rounded to bfloat16 too."""
    products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    try:
        torch.set_float32_matmul_precision(asked)
        outside = products.fp32_precision
        with Execution(device="cpu", precision=precision).applied([NET]):
            assert torch.get_float32_matmul_precision() == (
                "high" if precision == "half" else "highest"
            )
            assert products.fp32_precision in ("none", "ieee")
        assert torch.get_float32_matmul_precision() == asked
        assert products.fp32_precision == outside or asked == "highest"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_switches_of_single_operations_are_refused_with_what_to_call() -> None:
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = convolutions.fp32_precision
    convolutions.fp32_precision = "ieee"
    try:
        remedy = r"set_float32_matmul_precision\(\"highest\"\) and set torch.*allow_tf32 = True"
        assert re.search(remedy, *precision.other_defaults()), "before anything is written"
        with pytest.raises(BadValue, match=remedy), Execution(device="cpu").applied([NET]):
            pass
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True
        with Execution(device="cpu").applied([NET]):
            pass
    finally:
        convolutions.fp32_precision = before


def test_a_numbered_gpu_is_the_current_one_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Current:
        def __init__(self, device: Any):
            self.device = device

        def __enter__(self) -> None:
            seen.append(str(self.device))

        def __exit__(self, *_: object) -> None:
            seen.append("before")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", Current)
    with Execution(device="cuda:1", threads=1).applied([]):
        assert seen == ["cuda:1"]
    assert seen == ["cuda:1", "before"]
    with Execution(device="cuda", threads=1).applied([]):  # whichever is current
        assert len(seen) == 2


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"engine": "bathced"}, "engine: unknown engine 'bathced'; did you mean 'batched'"),
        ({"device": "gpu"}, "device = 'gpu': use auto, cpu, cuda or cuda:0"),
        ({"threads": 0}, "threads = 0: must be at least 1"),
        ({"streams": 0}, "streams = 0: must be at least 1"),
        ({"precision": "double"}, "precision = 'double': unknown choice"),
        ({"memory_limit": -1}, "memory_limit = -1: must be at least 0"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(BadValue) as refused:
        Execution(**values)
    assert said in str(refused.value)


def test_a_device_of_torch_is_taken_by_its_name() -> None:
    given: Any = torch.device("cpu")
    assert Execution(device=given) == Execution(device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_gpu_that_is_not_here_is_refused() -> None:
    with pytest.raises(BadValue, match="device = 'cuda', but there is no CUDA device"):
        Execution(device="cuda")


@pytest.mark.parametrize("name", ENGINES)
def test_engines_are_made_by_their_names_for_one_experiment(name: str) -> None:
    planned = experiment(FedAvg(), vectors(), seed=7)
    made = engine_of(planned, Execution(name, "cpu", stack_at_most=3))
    assert made.name == name and type(made) is ENGINES[name]
    assert made.experiment is planned  # no copy of its method, population, seed or graph
    assert not {"method", "seed", "graph"} & vars(made).keys()
    if isinstance(made, Batched):
        assert made.stack_at_most == 3
