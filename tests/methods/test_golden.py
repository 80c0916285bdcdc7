"""Golden numbers: a few scalars after three rounds, one file for each method.

A change of numbers is a change of these files, reviewed on its own. To renew them all, or some:

    python tests/methods/test_golden.py --write "why they changed" [method ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.core.records import State
from fedstill.methods import METHODS

FOLDER = Path(__file__).parent / "golden"
NEW: dict[str, Any] = {
    "seed": 7, "rounds": 3, "world": "pictures", "preset": "small", "values": {},
}  # fmt: skip
"""What a new file is made with; an existing one says itself what it was made with."""


def golden(name: str) -> dict[str, Any]:
    file = FOLDER / f"{name}.json"
    if not file.exists():
        pytest.fail(
            f"no golden numbers for {name}; once it is finished: "
            f'python tests/methods/{Path(__file__).name} --write "first version" {name}'
        )
    read: dict[str, Any] = json.loads(file.read_text())
    return read


def measured(name: str, made_with: dict[str, Any]) -> dict[str, float]:
    """Scores after the last round, and the sum and squared norm of every memory."""
    import worlds

    kind, rounds = METHODS[name], made_with["rounds"]
    method = kind(**{**kind.presets.get(made_with.get("preset", ""), {}), **made_with["values"]})
    world = worlds.vectors() if made_with["world"] == "vectors" else worlds.pictures()
    engine, log = worlds.played(method, world, rounds, seed=made_with["seed"])
    numbers = {}
    for score in ("accuracy", "loss"):
        last = [
            row.value
            for row in log.metrics
            if (row.round, row.step, row.name) == (rounds, "evaluate", score)
        ]
        numbers[score] = sum(last) / len(last)
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
    assert measured(name, kept) == pytest.approx(kept["numbers"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.json")))
def test_every_file_says_when_and_why_it_was_written(name: str) -> None:
    kept = golden(name)
    assert date.fromisoformat(kept["date"])
    assert kept["reason"]


def test_no_file_is_left_over_from_a_method_that_is_gone() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} <= set(METHODS)


def test_a_new_file_is_made_with_the_small_preset_and_an_old_one_with_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = golden("local")
    monkeypatch.setitem(globals(), "FOLDER", tmp_path)
    write("local", "first version")
    assert golden("local")["preset"] == "small"
    (tmp_path / "local.json").write_text(json.dumps(kept))
    write("local", "again")
    again = golden("local")
    assert again["values"] == kept["values"] and "preset" not in again
    assert again["numbers"] == pytest.approx(kept["numbers"], rel=1e-4, abs=1e-5)


def test_another_seed_gives_other_numbers() -> None:
    kept = golden("fedavg")
    found = measured("fedavg", {**kept, "seed": kept["seed"] + 1})
    assert found != pytest.approx(kept["numbers"], rel=1e-4, abs=1e-5)


def write(name: str, reason: str) -> None:
    """Renew a file with what it was made with, or begin one with the method's small preset."""
    file = FOLDER / f"{name}.json"
    kept = json.loads(file.read_text()) if file.exists() else NEW
    made_with = {key: kept[key] for key in NEW if key in kept}
    made = {
        "date": date.today().isoformat(),
        "reason": reason,
        **made_with,
        "numbers": measured(name, made_with),
    }
    FOLDER.mkdir(exist_ok=True)
    file.write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Renew the golden numbers.")
    parser.add_argument("--write", metavar="REASON", required=True)
    parser.add_argument("methods", nargs="*", default=sorted(METHODS))
    asked = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    for each in asked.methods:
        write(each, asked.write)
