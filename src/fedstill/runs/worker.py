"""A process that plays cells of a grid beside others: jobs come in by line, progress goes out.

`python -m fedstill.runs.worker 3` takes a third of the memory. A job is a line of JSON with a
recipe's text and a folder; the answers are lines with the progress of rounds, and one at the end.
The number of threads is that of a run alone, so that the numbers are those of a run alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from fedstill.core import pulse
from fedstill.core.errors import FedstillError
from fedstill.engines.allocator import shared_by
from fedstill.federation.run import Progress
from fedstill.recipe.check import checked
from fedstill.recipe.toml import toml_text
from fedstill.runs import folder as folders
from fedstill.runs import grid

DONE, FAILED, OCCUPIED, PROGRESS, PULSE = "done", "failed", "occupied", "progress", "pulse"
BEATS_APART = 1.0  # seconds


def job(cell: grid.Cell, overrides: tuple[str, ...] = ()) -> str:
    """A cell as a line for a worker."""
    table = {
        "recipe": toml_text(cell.recipe.as_tables()),
        "folder": str(cell.folder),
        "overrides": list(overrides),
    }
    return json.dumps(table)


def serve(jobs: TextIO, answers: TextIO, sharers: int) -> None:
    """Play one cell after another until there are no more."""
    with sharing(sharers):
        for line in jobs:
            answer = _played(json.loads(line), answers)
            _say(answers, answer)


@contextmanager
def sharing(processes: int) -> Iterator[None]:
    """A part of the memory of the host and of every GPU."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.set_per_process_memory_fraction(1 / processes, device)
    with shared_by(processes):
        yield


def _played(told: Mapping[str, Any], answers: TextIO) -> dict[str, Any]:
    latest = time.monotonic()

    def watch(progress: Progress) -> None:
        _say(answers, {"kind": PROGRESS, **asdict(progress)})

    def listen(beat: pulse.Pulse) -> None:
        nonlocal latest
        if time.monotonic() - latest >= BEATS_APART:
            latest = time.monotonic()
            _say(answers, {"kind": PULSE, **beat._asdict()})

    try:
        (recipe,) = checked(tomllib.loads(told["recipe"]))
        cell = grid.Cell(recipe, Path(told["folder"]), {})
        with pulse.heard_by(listen):
            grid.play(cell, watch, None, told["overrides"])
    except folders.Occupied as error:
        return {"kind": OCCUPIED, "text": str(error)}
    except FedstillError as error:
        return {"kind": FAILED, "text": str(error)}
    return {"kind": DONE}


def _say(answers: TextIO, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
        serve(sys.stdin, answers, int(sys.argv[1]))
