"""Accuracy by what was sent, redone by hand."""

from itertools import product

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
from fedstill.report.curves import Measure, curves, logged, logged_rows, rows, traces


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


def with_losses(folder, seed, values, **more):
    """A run that also logs losses: two clients train, and the server's generator has its own."""
    made(folder, seed, **more)
    with FolderLog(folder) as log:
        for round, value in enumerate(values, 1):
            log.write(Number(round, "aggregate", "server", "generator_loss", "", value))
            log.write(Number(round, "aggregate", "server", "loss", "", 7.0))
            for client in ("a", "b"):
                log.write(Number(round, "update", client, "loss", "", value + ord(client)))
            log.write(Number(round, "evaluate", "server", "loss", "a", 9.0))
    return read_run(folder)


def test_what_steps_log_is_a_curve_over_rounds_with_the_mean_over_nodes_and_seeds(tmp_path):
    runs = [with_losses(tmp_path / "0", 0, [4, 2]), with_losses(tmp_path / "1", 1, [2, -1])]
    assert logged(runs) == [
        *("generator_loss", "aggregate.loss", "update.loss", "accuracy", "evaluate.loss"),
    ]
    found = traces(runs, ["generator_loss", "update.loss"])
    (loss,), (local,) = found["generator_loss"], found["update.loss"]
    assert (loss.method, loss.seeds, loss.rounds.tolist()) == ("fedavg", 2, [1, 2])
    assert loss.values.tolist() == [3, 0.5]
    assert loss.spread.tolist() == pytest.approx([2**0.5, 4.5**0.5])
    assert local.values.tolist() == [3 + 97.5, 0.5 + 97.5]


def test_rows_of_logged_numbers_have_a_column_for_each(tmp_path):
    runs = [with_losses(tmp_path / "0", 0, [4, 1 / 3]), made(tmp_path / "1", 0, method="local")]
    first, last = logged_rows(runs, ["generator_loss", "aggregate.loss"])
    assert first == {
        "method": "fedavg", "round": 1, "seeds": 1, "generator_loss": 4.0, "aggregate.loss": 7.0
    }  # fmt: skip
    assert last["generator_loss"] == 1 / 3
    assert logged_rows(runs, ["generator_loss"], short=True)[1]["generator_loss"] == "0.3333"


def test_a_number_that_nobody_logs_is_refused_with_those_that_are(tmp_path):
    run = with_losses(tmp_path / "0", 0, [1])
    with pytest.raises(BadValue, match="unknown number 'generator_los'; did you mean 'generator_l"):
        traces([run], ["generator_los"])
    with pytest.raises(BadValue, match="unknown number 'loss'; did you mean"):
        traces([run], ["loss"])  # of which step?


def test_numbers_by_class_are_told_as_their_first_and_last(tmp_path):
    made(tmp_path / "0", 0)
    with FolderLog(tmp_path / "0") as log:
        for first, second in product(range(11), repeat=2):
            log.write(Number(1, "evaluate", "server", f"confusion.{first}.{second}", "a", 1))
    with pytest.raises(BadValue, match=r"known: accuracy, confusion\.0\.0 to confusion\.10\.10$"):
        traces([read_run(tmp_path / "0")], ["accurac"])


def test_a_metric_is_a_curve_too_and_its_name_says_so_where_a_step_logs_the_same(tmp_path):
    runs = [with_losses(tmp_path / "0", 0, [4, 2]), with_losses(tmp_path / "1", 1, [2, -1])]
    (accuracy,), (loss,) = traces(runs, ["accuracy", "evaluate.loss"]).values()
    assert accuracy.values.tolist() == pytest.approx([0.25, 0.45])
    assert loss.values.tolist() == [9, 9]
    with pytest.raises(BadValue, match="unknown number 'loss'; did you mean"):
        traces(runs, ["loss"])
    (plain,) = traces([made(tmp_path / "2", 0)], ["accuracy"])["accuracy"]
    assert plain.rounds.tolist() == [1, 2]
