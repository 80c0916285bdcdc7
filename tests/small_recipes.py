"""Recipes that run in a moment on made-up images, and the command line called from within."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from fedstill.commands.cli import main
from fedstill.engines.execution import engine_of
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.cache import FolderCache
from fedstill.federation.experiment import Experiment
from fedstill.recipe.tables import Recipe
from fedstill.recipe.toml import toml_text
from fedstill.runs.recipes import prepared

CLIENTS = ("east", "north", "west")
CLASSES = 3


def write_client(path: Path, number: int, *, train: int = 24, test: int = 12) -> Path:
    """A client's images of 8x8 pixels in three classes: one bright stripe each, in noise."""
    rng = np.random.Generator(np.random.PCG64(number))
    arrays: dict[str, Any] = {}
    for part, count in (("train", train), ("test", test)):
        labels = np.arange(count) % CLASSES
        images = rng.integers(0, 120, (count, 8, 8))
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 2] += 100
        arrays[f"{part}_images"] = images.astype(np.uint8)
        arrays[f"{part}_labels"] = labels
    np.savez(path, **arrays)
    return path


def tables(folder: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """The tables of a small recipe with three clients, whose files are written to the folder."""
    paths = {name: write_client(folder / f"{name}.npz", i) for i, name in enumerate(CLIENTS)}
    made: dict[str, Any] = {
        "run": {"name": "small", "rounds": 3, "device": "cpu", "pictures": False},
        "data": {"name": "own", "options": {"clients": {k: str(p) for k, p in paths.items()}}},
        "models": {"name": "mlp", "hidden": [6]},
        "method": {"name": "fedavg", "lr": 0.05, "batch_size": 8},
    }
    for name, table in changes.items():
        made[name] = {**made.get(name, {}), **table}
    return made


def write_recipe(folder: Path, **changes: dict[str, Any]) -> Path:
    """The same as a file; several methods are a list of tables."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "small.toml"
    path.write_text(toml_text(tables(folder, **changes)))
    return path


FEDDM = {
    "name": "feddm", "per_class": 2, "steps": 3, "server_epochs": 2, "real_batch": 8,
    "server_batch": 8, "augmentation": "none", "server_augmentation": "none",
}  # fmt: skip
CONVNET = {"name": "convnet", "width": 4, "depth": 2}


def images_recipe(folder: Path, method: dict[str, Any], **run: Any) -> Path:
    """A recipe with a small ConvNet and exactly these values of a method."""
    made = {**tables(folder), "models": CONVNET, "method": method}
    made["run"] = {**made["run"], **run}
    path = folder / "images.toml"
    path.write_text(toml_text(made))
    return path


@dataclass(frozen=True, eq=False)
class Ready:
    """A recipe's objects, its virtual data made, and an engine that has not played yet."""

    experiment: Experiment
    engine: InProcess
    cache: FolderCache
    notes: Sequence[str]


def ready(recipe: Recipe) -> Ready:
    """What a run of a recipe would begin with."""
    with prepared(recipe) as made:
        engine = engine_of(made.experiment, made.execution, cache=made.cache)
        return Ready(made.experiment, engine, made.cache, made.notes)


@dataclass(frozen=True)
class Said:
    """What a command left on the screen."""

    code: int
    out: str
    err: str


def fedstill(*arguments: object) -> Said:
    """The command line as `fedstill ARGUMENTS` would run it, in this process."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    argv = ["fedstill", *map(str, arguments)]
    with patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Said(code, out.getvalue(), err.getvalue())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with what is in it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def metrics(folder: Path) -> list[str]:
    """The rows of a run's metrics, but for the times."""
    lines = (folder / "metrics.csv").read_text().splitlines()
    return [line for line in lines if ",seconds," not in line]


def last_weights(folder: Path) -> dict[str, bytes]:
    """The files of the newest checkpoint's memories, as bytes."""
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    return {path.name: path.read_bytes() for path in sorted(newest.glob("*.safetensors"))}
