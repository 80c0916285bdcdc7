"""For all tests: nobody waits for the disk, and no child process compiles the library anew.

Kernels for a GPU are run by Triton's interpreter where no GPU is, which must be asked for before
anything imports Triton.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # of child processes: dozens import fedstill
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Files are written as ever. What must be forced to the disk is tested by counting calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield
