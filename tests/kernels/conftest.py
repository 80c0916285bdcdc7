"""Every kernel is run by the strict interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from interpreted import HAS_TRITON
from strict_interpreter import strictly


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    if not HAS_TRITON:
        yield
        return
    with strictly():
        yield


@pytest.fixture
def device_is_chosen(strict: None) -> Iterator[None]:
    """For functions that are called where the device of their tensors was chosen."""
    with torch.cuda.device_of(torch.ones(1)):  # type: ignore[no-untyped-call]
        yield
