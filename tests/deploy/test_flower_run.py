"""Flower itself: SuperLink, filter, three SuperNodes with TLS and keys, as processes; minutes long.

Skipped where Flower or nginx is not installed: `pip install 'fedstill[flower]'`.
"""

from __future__ import annotations

import csv
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs fedstill[flower]")
if shutil.which("nginx") is None:
    pytest.skip("needs nginx", allow_module_level=True)

from demo_sites import compared
from flower_trial import FlowerConsortium, private_data, wait

pytestmark = pytest.mark.slow


@contextmanager
def consortium(
    folder: Path, method: str, rounds: int, gone: float = 90
) -> Iterator[FlowerConsortium]:
    """Everything but the run; beside it the same run in one process."""
    data = private_data(folder / "data")
    made = FlowerConsortium(folder, data, method, rounds=rounds, gone=gone)
    try:
        made.alone(folder / "alone")
        made.started()
        yield made
    finally:
        made.close()


def answers(made: FlowerConsortium, name: str) -> list[str]:
    path = made.place(name) / "run" / "answers.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [f"{row['round']} {row['asked']}" for row in csv.DictReader(file)]


@pytest.mark.parametrize("method", ["fedavg", "feddm"])
def test_three_nodes_behind_the_filter_give_the_tables_of_one_process(
    tmp_path: Path, method: str
) -> None:
    with consortium(tmp_path, method, 2) as made:
        made.submit()
        made.finished()
        assert compared(made, tmp_path / "alone").endswith("rows equal")


def test_a_strangers_code_is_refused_by_the_filter_and_runs_without_it(tmp_path: Path) -> None:
    with consortium(tmp_path, "fedavg", 1) as made:
        refused, found = made.stranger(made.outer)
        assert refused.returncode != 0
        assert not found.exists()
        # The control: at the SuperLink itself the same command is taken, from anybody.
        accepted, found = made.stranger(made.inner)
        assert accepted.returncode == 0, accepted.stdout + accepted.stderr
        wait(lambda: found.exists() and len(found.read_text().splitlines()) == 3, "code", 600)
        lines = found.read_text().splitlines()
        assert all("code of a stranger ran as user" in line for line in lines)
        if made.as_nobody:
            # The SuperNode's user cannot read the data, so its code cannot either.
            assert lines == ["code of a stranger ran as user 65534: PermissionError"] * 3


def test_a_killed_node_comes_back_and_the_tables_are_those_of_an_unbroken_run(
    tmp_path: Path,
) -> None:
    with consortium(tmp_path, "scaffold", 2, gone=300) as made:
        name = next(iter(made.data))
        made.submit()
        wait(lambda: "1 update" in answers(made, name), "the first act", 900)
        made.processes.end(f"node-{name}")
        until = time.monotonic() + 900
        # The SuperLink lets a node in again when the old one's sign of life has run out.
        while time.monotonic() < until and not (made.run_folder() / "summary.json").exists():
            if not made.alive(f"node-{name}"):
                made.start_node(name)
            time.sleep(2)
        made.finished()
        assert compared(made, tmp_path / "alone").endswith("rows equal")


def test_a_killed_superlink_starts_again_and_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    with consortium(tmp_path, "scaffold", 2, gone=300) as made:
        name = next(iter(made.data))
        made.submit()
        wait(lambda: "2 update" in answers(made, name), "the second round", 900)
        made.processes.end("superlink")  # and the ServerApp, which it had started
        assert not (made.run_folder() / "summary.json").exists()
        made.start_link()
        made.said(made.flower / "register.sh")
        for site in made.data:
            made.processes.end(f"node-{site}")
            made.start_node(site)
        made.submit()
        made.finished()
        assert compared(made, tmp_path / "alone").endswith("rows equal")
