"""Golden numbers: a few scalars after three rounds, one file for each method.

A change of numbers is a change of these files, reviewed on its own. To renew them all, or some:

    python tests/methods/test_golden.py --write "why they changed" [method ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.core.method import Method
from fedstill.core.records import State
from fedstill.methods import METHODS

FOLDER = Path(__file__).parent / "golden"
ROUNDS, SEED = 3, 7

# What a new file is made with; an existing file says itself what it was made with.
SMALL: dict[str, Any] = {
    "lr": 0.1, "batch_size": 8, "momentum": 0.5, "per_class": 3, "steps": 5, "real_batch": 8,
    "server_epochs": 4, "server_batch": 8,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "scaffold": {"momentum": 0.0},
    "dynafed": {"path_rounds": 2, "expert_steps": 1},
    "desa": {"synthesis_width": 4, "reg_weight": 0.1},
    "feddf": {"distil_batch": 10, "distil_lr": 0.01},
    "fccl": {"lr": 0.01, "public_batch": 10},
    "heterofl": {"rho": 3, "masked": True},  # budgets 1, 1/2, 1/4, 1/8
    "feddropout": {"rho": 3},
    "fedrolex": {"rho": 3},
    "dfrd": {"iterations": 2, "generator_batch": 8, "generator_width": 8},
    "dense": {"iterations": 2, "generator_batch": 8, "generator_width": 8},
    "fedftg": {"iterations": 2, "generator_batch": 8, "generator_width": 8},
}


def golden(name: str) -> dict[str, Any]:
    file = FOLDER / f"{name}.json"
    if not file.exists():
        pytest.fail(
            f"no golden numbers for {name}; once it is finished: "
            f'python tests/methods/{Path(__file__).name} --write "first version" {name}'
        )
    read: dict[str, Any] = json.loads(file.read_text())
    return read


def measured(name: str, values: dict[str, Any], seed: int, rounds: int, world: str) -> Any:
    """Scores after the last round, and the sum and squared norm of every memory."""
    import worlds

    made = worlds.vectors() if world == "vectors" else worlds.pictures()
    engine, log = worlds.played(METHODS[name](**values), made, rounds, seed=seed)
    numbers = {}
    for kind in ("accuracy", "loss"):
        last = [
            row.value
            for row in log.metrics
            if (row.round, row.step, row.name) == (rounds, "evaluate", kind)
        ]
        numbers[kind] = sum(last) / len(last)
    for node, state in sorted(engine.states.items()):
        if isinstance(state, State):
            floating = [t.double() for t in state.tensors().values() if t.is_floating_point()]
            entries = torch.cat([tensor.flatten() for tensor in floating])
            numbers[f"sum of {node}"] = float(entries.sum())
            numbers[f"squared norm of {node}"] = float(entries.square().sum())
    return {key: float(f"{value:.6g}") for key, value in numbers.items()}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_three_rounds_give_the_numbers_that_were_written_down(name: str) -> None:
    kept = golden(name)
    found = measured(name, kept["values"], kept["seed"], kept["rounds"], kept["world"])
    assert found == pytest.approx(kept["numbers"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.json")))
def test_every_file_says_when_and_why_it_was_written(name: str) -> None:
    kept = golden(name)
    assert date.fromisoformat(kept["date"])
    assert kept["reason"]


def test_no_file_is_left_over_from_a_method_that_is_gone() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} <= set(METHODS)


def test_another_seed_gives_other_numbers() -> None:
    kept = golden("fedavg")
    found = measured("fedavg", kept["values"], kept["seed"] + 1, kept["rounds"], kept["world"])
    assert found != pytest.approx(kept["numbers"], rel=1e-4, abs=1e-5)


def chosen(name: str, kind: type[Method]) -> tuple[dict[str, Any], str]:
    """Small values for the fields a method has, and the world it is played in."""
    known = {field.name for field in fields(kind)}
    long = ("steps", "epochs")
    small = {f.name: 5 for f in fields(kind) if f.name.endswith(long) and f.default > 5}
    small |= {key: value for key, value in SMALL.items() if key in known}
    pictures = "per_class" in known or "generator_width" in known
    return {**small, **OWN.get(name, {})}, "pictures" if pictures else "vectors"


def write(name: str, reason: str) -> None:
    values, world = chosen(name, METHODS[name])
    made = {
        "date": date.today().isoformat(),
        "reason": reason,
        "seed": SEED,
        "rounds": ROUNDS,
        "world": world,
        "values": values,
        "numbers": measured(name, values, SEED, ROUNDS, world),
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Renew the golden numbers.")
    parser.add_argument("--write", metavar="REASON", required=True)
    parser.add_argument("methods", nargs="*", default=sorted(METHODS))
    asked = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    for each in asked.methods:
        write(each, asked.write)
