"""Three sites with a few images each, and the recipe of their run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.recipe import checked, overridden
from fedstill.recipe.tables import Recipe

NAMES = ("north", "south", "west")


def write_data(folder: Path) -> dict[str, Path]:
    """For each site a few images of three classes, which differ in brightness."""
    found = {}
    for number, name in enumerate(NAMES):
        rng = np.random.default_rng(number)

        def images(count: int, rng: Any = rng) -> tuple[Any, Any]:
            labels = np.arange(count) % 3
            noise = rng.integers(0, 60, (count, 8, 8))
            return (noise + 60 * labels[:, None, None]).astype(np.uint8), labels

        found[name] = folder / f"{name}.npz"
        parts = {"train": images(18 + 3 * number), "test": images(12)}
        arrays = {
            f"{part}_{kind}": value
            for part, both in parts.items()
            for kind, value in zip(("images", "labels"), both, strict=True)
        }
        np.savez(found[name], **arrays)
    return found


def recipe_for(data: dict[str, Path], *changes: str, method: str = "fedavg") -> Recipe:
    tables: dict[str, Any] = {
        "run": {"name": "trial", "rounds": 2, "scores": "own", "pictures": False, "device": "cpu"},
        "data": {
            "name": "own", "size": 8, "channels": 1,
            "options": {
                "clients": {name: str(path) for name, path in data.items()},
                "class_names": ["0", "1", "2"],
            },
        },
        "models": {"name": "convnet", "depth": 2, "width": 4},
        "engine": {"name": "in_process"},
        "method": {"name": method, "preset": "small"},
    }  # fmt: skip
    (recipe,) = checked(overridden(tables, changes))
    return recipe


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / name).open(newline="") as file:
        found = list(csv.DictReader(file))
    return [row for row in found if row.get("name") != "seconds"]
