"""Accuracy by what was sent, redone by hand."""

import pytest

from fedstill.core.errors import BadValue
from fedstill.logbook import (
    FolderLog,
    Number,
    Traffic,
    read_rows,
    read_run,
    summarise,
    write_summary,
)
from fedstill.report.curves import Measure, curves, rows


def made(folder, seed, *, method="fedavg", data="d", floats=100, before=0):
    """Two rounds: each client's message is heard by one, the server's by two."""
    with FolderLog(folder) as log:
        if before:
            log.write(Traffic(0, "hand_over", "a", "up", "images", before, 4 * before, 1))
        for round in (1, 2):
            log.write(
                Number(round, "evaluate", "server", "accuracy", "a", 0.2 * round + 0.1 * seed)
            )
            log.write(Traffic(round, "update", "a", "up", "weights", floats, 4 * floats, 1))
            log.write(Traffic(round, "broadcast", "server", "down", "w", floats, 4 * floats, 2))
    (folder / "recipe.toml").write_text(
        f'[run]\nseed = {seed}\n[method]\nname = "{method}"\n[data]\nname = "{data}"\n'
    )
    write_summary(folder, summarise(read_rows(folder)))
    return read_run(folder)


def test_floats_add_up_over_rounds_once_per_sender_and_once_per_receiver(tmp_path):
    (curve,) = curves([made(tmp_path / "0", 0)])
    assert curve.sent(Measure("floats", "said")).tolist() == [200, 400]
    assert curve.sent(Measure("floats", "heard")).tolist() == [300, 600]
    assert curve.sent(Measure("bytes", "heard", "down")).tolist() == [800, 1600]


def test_what_is_sent_before_the_first_round_counts(tmp_path):
    (curve,) = curves([made(tmp_path / "0", 0, before=50)])
    assert curve.sent(Measure("floats", "said")).tolist() == [250, 450]


def test_rows_hold_means_over_seeds_as_fractions_or_in_percent(tmp_path):
    runs = [made(tmp_path / "0", 0), made(tmp_path / "1", 1, floats=101)]
    first, last = rows(runs)
    assert (first["method"], first["round"], first["seeds"]) == ("fedavg", 1, 2)
    assert first["accuracy"] == pytest.approx((0.2 + 0.3) / 2)
    assert first["spread"] == pytest.approx(0.1 / 2**0.5)
    assert (last["floats sent"], last["floats received"]) == (402, 603)
    assert (last["bytes sent"], last["bytes received"]) == (4 * 402, 4 * 603)
    assert rows(runs, percent=True)[0]["accuracy"] == "25.00"


def test_curves_on_different_data_say_on_which(tmp_path):
    runs = [made(tmp_path / "0", 0), made(tmp_path / "1", 0, data="e")]
    assert [curve.name.split(" on ")[-1] for curve in curves(runs)] == ["d", "e"]


def test_runs_that_were_never_evaluated_have_no_curve(tmp_path):
    with FolderLog(tmp_path / "r"):
        pass
    with pytest.raises(BadValue, match="nothing to draw"):
        rows([read_run(tmp_path / "r", unfinished=True)])
