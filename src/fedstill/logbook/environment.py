"""What a run stood on: versions, code, device, threads."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np
import torch

from fedstill.core import source


def environment() -> dict[str, Any]:
    """Versions and hardware as a table for environment.json."""
    return {
        "fedstill": source.installed(source.OURS),
        "code": source.own_digest(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
        "device": _device(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()
