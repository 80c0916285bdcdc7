"""Distribution matching with all classes in one pass, as one would improve the script by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fedstill.parts import augment
from systems.dm_style import Task
from work import Work

VERSIONS = ("torch",)


def run(work: Work) -> dict[str, object]:
    task = Task(work)
    return task.timed(iteration(task))


def iteration(task: Task) -> Callable[[], None]:
    """One step of the images."""
    classes = range(len(task.by_class))

    def moved() -> None:
        network = task.network()
        draws, name = task.augmentation(len(task.by_class))
        real = augment.apply(torch.stack([task.real(c) for c in classes]), draws, only=name)
        synthetic = augment.apply(task.images, draws, only=name)
        with torch.no_grad():
            targets = network(real.flatten(0, 1)).reshape(*real.shape[:2], -1).mean(1)
        means = network(synthetic.flatten(0, 1)).reshape(*synthetic.shape[:2], -1).mean(1)
        task.move((targets - means).square().sum())

    return moved
