"""Runs on feature vectors and on images as floats, from arrays to a folder with its pictures."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

import fedstill

LABELS = np.arange(60) % 3
LITTLE = fedstill.FedDM(per_class=2, steps=3, server_epochs=30, server_lr=0.1)


def played(data: fedstill.Collection, folder: Path) -> fedstill.Run:
    population = fedstill.Population(data, partial(fedstill.MLP, hidden=(8,)))
    experiment = fedstill.Experiment(LITTLE, population, rounds=2)
    return fedstill.run(experiment, folder=folder, execution=fedstill.Execution(device="cpu"))


def around_centres(*shape: int) -> np.ndarray:
    """Points around one centre for each class."""
    rng = np.random.Generator(np.random.PCG64(0))
    centres = 3 * rng.normal(size=(3, *shape))
    return centres[LABELS] + rng.normal(size=(60, *shape))


def drawn(folder: Path) -> set[str]:
    return {path.name for path in (folder / "pictures").glob("*.png")}


@pytest.mark.parametrize("normalise", ["auto", None])
def test_a_run_on_vectors_leaves_curves_but_no_images(
    tmp_path: Path, normalise: fedstill.data.doors.Normalise
) -> None:
    data = fedstill.split(around_centres(5), LABELS, partition=fedstill.Iid(2), normalise=normalise)
    run = played(data, tmp_path / "run")
    assert run.summary["average_accuracy"] > 0.5
    assert "accuracy-by-round.png" in drawn(tmp_path / "run")
    assert not [name for name in drawn(tmp_path / "run") if name.startswith("synthetic")]


def test_synthetic_images_of_floats_are_drawn(tmp_path: Path) -> None:
    data = fedstill.split(around_centres(1, 6, 6), LABELS, partition=fedstill.Iid(2))
    played(data, tmp_path / "run")
    assert {"synthetic-client-00.png", "synthetic-client-01.png"} <= drawn(tmp_path / "run")


def test_images_with_two_channels_are_learnt_from_and_not_drawn(tmp_path: Path) -> None:
    images = around_centres(2, 6, 6)
    data = fedstill.split(images, LABELS, partition=fedstill.Iid(2), channels="first")
    played(data, tmp_path / "run")
    assert "synthetic-client-00.png" not in drawn(tmp_path / "run")
