"""A workload and what every system shares: settings, examples, networks, a clock.

Needs torch and numpy alone, since other systems run in environments of their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PIECES = 10  # tensors of the network that only travels


@dataclass(frozen=True)
class Work:
    """Federated averaging of one network, or distribution matching; equal for all systems."""

    network: str  # logistic, two-conv, none (only travels), convnet, conv4
    clients: int
    awake: int  # clients of a round
    rounds: int
    batch: int = 10
    lr: float = 0.1
    epochs: int = 1  # 0: a client sends back what it got
    seed: int = 0
    device: str = "cpu"
    data: str | None = None  # an .npz file written by side_by_side.export
    floats: int = 0  # of the network that only travels
    launched: float = 0.0  # time.time() when the process was started
    # distribution matching
    per_class: int = 0
    width: int = 128
    pixel_lr: float = 1.0
    pixel_momentum: float = 0.5
    # how fedstill loads the same data
    data_name: str = ""
    data_dir: str | None = None
    engine: str = "in_process"
    precision: str = "tf32"
    # how much of a GPU a client of a system with processes takes
    gpu_share: float = 0.1
    # another system's own code: the method, and the folder of the repository's copy
    method: str = "fedavg"
    size: int | None = None  # of images, where it is not the data set's
    most: int = 0  # examples of a client; 0: all
    alpha: float = 0.5  # of the Dirichlet split beside it; 0: even
    code: str | None = None
    mended: bool = False  # with the fault that its module tells of taken out


@dataclass(frozen=True, eq=False)
class Examples:
    """Normalised examples and who holds which."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    rows: list[Tensor]  # of each client

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        rows = self.rows[client]
        return self.train_x[rows], self.train_y[rows]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.train_x.shape[1:])

    @property
    def classes(self) -> int:
        return int(self.train_y.max()) + 1


def write_split(path: Path, sites: Sequence[Any]) -> None:
    """The arrays of fedstill's sites, which all hold parts of one pool, for `load`."""
    first = sites[0]
    assert all((site.mean, site.std) == (first.mean, first.std) for site in sites)
    np.savez(
        path, train_x=first.pool.inputs, train_y=first.pool.labels,
        test_x=first.test.inputs, test_y=first.test.labels,
        rows=np.concatenate([site.rows for site in sites]),
        counts=np.array([len(site.rows) for site in sites]),
        mean=np.array(first.mean), std=np.array(first.std),
    )  # fmt: skip


@cache
def load(path: str, device: str = "cpu") -> Examples:
    """The examples of a file, made once in each process."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    mean, std = (arrays[name].float().reshape(1, -1, 1, 1) for name in ("mean", "std"))

    def ready(images: Tensor) -> Tensor:
        return ((images.float() / 255 - mean) / std).to(device)

    rows = torch.split(arrays["rows"].to(device), arrays["counts"].tolist())
    return Examples(
        ready(arrays["train_x"]), arrays["train_y"].to(device),
        ready(arrays["test_x"]), arrays["test_y"].to(device), list(rows),
    )  # fmt: skip


class Travelling(nn.Module):
    """Weights without a purpose."""

    def __init__(self, floats: int):
        super().__init__()
        sizes = [floats // PIECES] * PIECES
        self.pieces = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)


def convnet(shape: tuple[int, ...], classes: int, width: int, depth: int = 3) -> nn.Sequential:
    """The network of the distillation papers, as modules."""
    layers: list[nn.Module] = []
    channels, side = shape[0], shape[1]
    for _ in range(depth):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(width, width)]
        layers += [nn.ReLU(), nn.AvgPool2d(2)]
        channels, side = width, side // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * side * side, classes))


def network(work: Work) -> nn.Module:
    """The workload's network with fresh weights, by the framework's default laws."""
    if work.network == "none":
        return Travelling(work.floats)
    examples = load(work.data or "", work.device)
    shape, classes = examples.shape, examples.classes
    if work.network == "logistic":
        made: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))
    elif work.network == "two-conv":
        side = (shape[1] - 4) // 2
        made = nn.Sequential(
            nn.Conv2d(shape[0], 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * side * side, 128), nn.ReLU(),
            nn.Linear(128, classes),
        )  # fmt: skip
    else:
        made = convnet(shape, classes, work.width)
    return made.to(work.device)


@torch.no_grad()
def accuracy(model: nn.Module, work: Work) -> float | None:
    """The share of right answers on the test set."""
    if work.data is None:
        return None
    examples = load(work.data, work.device)
    right = sum(
        int((model(x).argmax(1) == y).sum())
        for x, y in zip(examples.test_x.split(1000), examples.test_y.split(1000), strict=True)
    )
    return right / len(examples.test_y)


def trained_accuracy(images: Tensor, labels: Tensor, work: Work, epochs: int) -> float:
    """What a fresh network learns from synthetic images; the same for every system."""
    torch.manual_seed(work.seed)
    model = network(work)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=5e-4)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels), device=labels.device).split(256):
            loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = accuracy(model, work)
    assert found is not None
    return found


class Rounds:
    """The seconds of each round; `ready` is how long it took from the launch to the first."""

    def __init__(self, work: Work):
        self.work = work
        self.seconds: list[float] = []
        self.ready: float | None = None
        self.began = 0.0
        self.peak: int | None = None  # memory taken on the GPU, before anything is scored

    def begin(self) -> None:
        self._wait()
        if self.ready is None:
            self.ready = time.time() - self.work.launched
        self.began = time.perf_counter()

    def end(self) -> None:
        self._wait()
        self.seconds.append(round(time.perf_counter() - self.began, 7))
        if self.work.device.startswith("cuda"):
            self.peak = torch.cuda.max_memory_allocated()

    def _wait(self) -> None:
        if self.work.device.startswith("cuda"):
            torch.cuda.synchronize()

    def result(self, reached: float | None) -> dict[str, object]:
        return {
            "seconds": self.seconds,
            "start_up": self.ready,
            "accuracy": reached,
            "peak_bytes": self.peak,
        }
