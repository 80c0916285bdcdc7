"""The demonstration, at its small size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedstill.commands import demonstration, grids
from fedstill.commands.cli import app
from fedstill.logbook import FolderLog, Number, Traffic, read_rows, summarise, write_summary
from fedstill.logbook.reader import read_run
from fedstill.report.curves import within
from small_recipes import fedstill


def test_the_demo_plays_both_parts_says_why_averaging_cannot_run_and_writes_a_report(
    tmp_path: Path,
) -> None:
    result = CliRunner().invoke(app, ["demo", "--quick", "--quiet", "--out", str(tmp_path / "d")])
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    for method in ("local", "fedproto", "desa", "fedavg", "scaffold", "feddm"):
        assert f" {method} " in said
    assert "fedavg cannot take part: models: FedAvg averages one network" in said
    assert "rounds for" in said
    page = (tmp_path / "d" / "report.html").read_text(encoding="utf-8")
    assert "Demonstration" in page and '"desa"' in page


@pytest.mark.parametrize(("cores", "at_once"), [(1, 1), (2, 2), (64, 3)])
def test_runs_are_played_side_by_side_the_longest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, at_once: int
) -> None:
    seen: list[tuple[list[str], int]] = []
    begun: list[Any] = []
    planned = demonstration._planned

    @contextmanager
    def workers(count: int) -> Iterator[str]:
        begun.append(count)
        yield "the processes"

    def after(*given: Any, **options: Any) -> Any:
        begun.append("planned")
        return planned(*given, **options)

    def watched(cells: Any, going: grids.Going) -> grids.Tally:
        seen.append(([cell.recipe.label for cell in cells], going.parallel))
        begun.append(going.workers)
        return grids.Tally(6, failed=[(cells[0], "it broke")])

    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setattr(grids, "workers", workers)
    monkeypatch.setattr(demonstration, "_planned", after)
    monkeypatch.setattr(grids, "play_all", watched)
    said = fedstill("demo", "--out", tmp_path / "d")
    assert seen == [(["feddm", "desa", "fedproto", "local", "scaffold", "fedavg"], at_once)]
    assert said.code != 0 and "1 of 6 runs failed" in said.err
    assert f"6 runs, {at_once} at a time" in said.err
    beside = [at_once, "planned", "the processes"]  # begun before it is known what they play
    assert begun == (beside if at_once > 1 else ["planned", None])


def test_a_demo_that_was_stopped_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(grids, "_one_by_one", stopped)
    said = fedstill("demo", "--out", tmp_path / "d")
    assert said.code == 130 and "stopped; begin again with `fedstill demo`" in said.err


def test_a_budget_buys_the_rounds_that_it_pays_for(tmp_path: Path) -> None:
    with FolderLog(tmp_path) as log:
        for round in (1, 2, 3):
            log.write(Traffic(round, "update", "a", "up", "weights", 25, 100, 1))
            log.write(Number(round, "evaluate", "server", "accuracy", "a", round / 10))
    (tmp_path / "recipe.toml").write_text('[method]\nname = "fedavg"\n')
    write_summary(tmp_path, summarise(read_rows(tmp_path)))
    run = read_run(tmp_path)
    assert within(run, 250) == (2, pytest.approx(0.2))
    assert within(run, 300) == (3, pytest.approx(0.3))
    assert within(run, 99) is None
