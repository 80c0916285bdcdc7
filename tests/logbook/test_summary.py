"""The numbers of a summary, redone by hand."""

import json
import math

import numpy as np
import pytest

from fedstill.logbook import MemoryLog, Note, Number, Traffic, summarise

CLIENTS = ("a", "b", "c")
MATRIX = [  # row: whose model; column: whose test set
    [0.9, 0.6, 0.3],
    [0.5, 0.8, 0.2],
    [0.1, 0.4, 0.7],
]


def score(log, round, node, scores):
    for target, value in scores.items():
        log.write(Number(round, "evaluate", node, "accuracy", target, value))


def client_log(matrix=MATRIX, round=1):
    log = MemoryLog()
    for node, row in zip(CLIENTS, matrix, strict=True):
        score(log, round, node, dict(zip(CLIENTS, row, strict=True)))
    return log


def server_log():
    log = MemoryLog()
    score(log, 1, "server", {"a": 0.2, "b": 0.4})
    score(log, 2, "server", {"a": 0.8, "b": 0.6})
    score(log, 3, "server", {"a": 0.9, "b": 0.3})
    return log


def test_client_models_have_three_averages():
    summary = summarise(client_log().rows())
    assert summary["averaged_global_accuracy"] == pytest.approx((1.8 + 1.5 + 1.2) / 9)
    assert summary["inter_accuracy"] == pytest.approx((0.9 / 2 + 0.7 / 2 + 0.5 / 2) / 3)
    assert summary["averaged_local_accuracy"] == pytest.approx((0.9 + 0.8 + 0.7) / 3)
    assert summary["averaged_global_accuracy_by_client"] == pytest.approx(
        {"a": 1.8 / 3, "b": 1.5 / 3, "c": 1.2 / 3}
    )
    assert summary["inter_accuracy_by_client"]["b"] == pytest.approx((0.5 + 0.2) / 2)
    assert summary["local_accuracy_by_client"] == {"a": 0.9, "b": 0.8, "c": 0.7}
    assert summary["accuracy_matrix"]["values"] == MATRIX
    assert "average_accuracy" not in summary


def test_local_accuracy_by_examples_weighs_clients_and_has_a_best_round():
    log = client_log()
    for node, value in (("a", 0.3), ("b", 0.8), ("c", 0.7)):
        score(log, 2, node, {node: value})
    summary = summarise(log.rows(), examples={"a": 6, "b": 1, "c": 1})
    assert summary["local_accuracy_by_examples"] == pytest.approx((6 * 0.3 + 0.8 + 0.7) / 8)
    assert summary["best_local_accuracy_by_examples"] == pytest.approx((6 * 0.9 + 0.8 + 0.7) / 8)
    assert summary["best_local_accuracy_by_examples_round"] == 1
    assert "local_accuracy_by_examples" not in summarise(log.rows())
    assert "local_accuracy_by_examples" not in summarise(server_log().rows(), examples={"a": 1})


def test_the_matrix_has_own_test_sets_on_its_diagonal_whatever_the_order_of_writing():
    log = MemoryLog()
    for node in reversed(CLIENTS):
        row = MATRIX[CLIENTS.index(node)]
        score(log, 1, node, dict(zip(CLIENTS, row, strict=True)))
    found = log.rows().matrix()
    assert found.nodes == found.targets == CLIENTS
    np.testing.assert_array_equal(found.values, MATRIX)


def test_a_server_model_has_a_last_and_a_best_round():
    summary = summarise(server_log().rows(), seconds=2.5)
    assert summary["average_accuracy"] == pytest.approx((0.9 + 0.3) / 2)
    assert summary["accuracy_by_client"] == {"a": 0.9, "b": 0.3}
    assert summary["best_average_accuracy"] == pytest.approx((0.8 + 0.6) / 2)
    assert summary["best_average_accuracy_round"] == 2
    assert "chosen on test data" in summary["best_average_accuracy_note"]
    assert (summary["status"], summary["rounds"], summary["seconds"]) == ("finished", 3, 2.5)
    assert "averaged_global_accuracy" not in summary


def test_of_equal_rounds_the_earliest_is_the_best():
    log = MemoryLog()
    for round in (1, 2, 3):
        score(log, round, "server", {"a": 0.5})
    assert summarise(log.rows())["best_average_accuracy_round"] == 1


def test_clients_scored_on_their_own_data_only_have_a_local_average_only():
    log = MemoryLog()
    score(log, 1, "a", {"a": 0.5})
    score(log, 1, "b", {"b": 0.7})
    summary = summarise(log.rows())
    assert summary["averaged_local_accuracy"] == pytest.approx(0.6)
    assert summary["averaged_global_accuracy"] is None
    assert summary["inter_accuracy"] is None
    assert summary["accuracy_matrix"]["values"] == [[0.5, None], [None, 0.7]]
    json.dumps(summary, allow_nan=False)


def test_thousands_scored_at_home_are_summed_up_without_a_matrix_of_all_pairs():
    log = MemoryLog()
    for number in range(3000):
        score(log, 1, f"c{number}", {f"c{number}": 0.25})
    summary = summarise(log.rows())
    assert "accuracy_matrix" not in summary
    assert summary["averaged_local_accuracy"] == 0.25
    assert summary["local_accuracy_by_client"] == {f"c{n}": 0.25 for n in range(3000)}
    assert set(summary["inter_accuracy_by_client"].values()) == {None}
    score(log, 1, "c0", {"c1": 0.5})
    log.metrics[:] = [row for row in log.metrics if row.node in {f"c{n}" for n in range(31)}]
    assert len(summarise(log.rows())["accuracy_matrix"]["values"]) == 31


def test_one_client_alone_has_no_inter_accuracy():
    log = MemoryLog()
    score(log, 1, "a", {"a": 0.5})
    summary = summarise(log.rows())
    assert summary["inter_accuracy"] is None
    assert summary["averaged_global_accuracy"] == 0.5


def test_traffic_is_counted_as_said_and_as_heard():
    log = MemoryLog()
    log.write(Traffic(0, "introduce", "a", "up", "label_counts", 10, 40, 1))
    for round in (1, 2):
        log.write(Traffic(round, "broadcast", "server", "down", "weights", 100, 400, 3))
        log.write(Traffic(round, "update", "a", "up", "weights", 100, 400, 1))
        log.write(Traffic(round, "update", "b", "up", "examples", 1, 8, 1))
        log.write(Traffic(round, "speak", "b", "peer", "logits", 20, 80, 2))
    summary = summarise(log.rows())
    assert summary["traffic"]["down"] == {
        "said": {"floats": 2 * 100, "bytes": 2 * 400},
        "heard": {"floats": 2 * 3 * 100, "bytes": 2 * 3 * 400},
    }
    assert summary["traffic"]["up"]["said"] == {"floats": 10 + 2 * 101, "bytes": 40 + 2 * 408}
    assert summary["traffic"]["peer"]["heard"]["bytes"] == 2 * 2 * 80
    assert summary["floats_per_round"] == {"up": 101, "down": 100, "peer": 20}
    rows = log.rows()
    assert rows.traffic_by_round() == {0: 10, 1: 221, 2: 221}
    assert rows.traffic_by_round("bytes", "heard", "down", cumulative=True) == {
        0: 0,
        1: 1200,
        2: 2400,
    }


def test_a_method_without_rounds_has_no_floats_per_round():
    log = MemoryLog()
    log.write(Traffic(0, "train", "a", "up", "weights", 100, 400, 1))
    assert summarise(log.rows())["floats_per_round"]["up"] is None


def test_seconds_of_several_sittings_add_up():
    log = MemoryLog()
    for round in (1, 2):
        log.write(Number(round, "time", "", "seconds", "", 1.5))
    assert summarise(log.rows())["seconds"] == 3.0


def test_facts_are_kept_beside_the_numbers():
    assert summarise(server_log().rows(), data_digest="abc")["data_digest"] == "abc"


def test_series_are_chosen_by_name_node_and_target():
    log = server_log()
    log.write(Number(1, "update", "a", "loss", "", 2.0))
    log.write(Number(1, "update", "b", "loss", "", 4.0))
    log.write(Note(1, "warning", "", "not a number"))
    rows = log.rows()
    assert rows.series("accuracy", "server", "b") == {1: 0.4, 2: 0.6, 3: 0.3}
    assert rows.series("loss") == {1: (2.0 + 4.0) / 2}
    assert rows.series("loss", step="evaluate") == {}


def test_the_curve_is_the_servers_where_it_is_scored_and_the_clients_mean_otherwise():
    both = server_log()
    score(both, 3, "a", {"a": 0.0})
    assert both.rows().accuracy_by_round() == pytest.approx({1: 0.3, 2: 0.7, 3: 0.6})
    assert both.rows().accuracy_by_round("a") == {3: 0.0}
    assert client_log().rows().accuracy_by_round() == pytest.approx({1: 4.5 / 9})


def test_every_other_metric_has_the_same_averages_under_its_name():
    log = server_log()
    for round, values in {1: (0.5, math.nan), 2: (0.9, 0.7), 3: (math.nan, math.nan)}.items():
        for target, value in zip("ab", values, strict=True):
            log.write(Number(round, "evaluate", "server", "auroc", target, value))
            log.write(Number(round, "evaluate", "server", "loss", target, round))
    summary = summarise(log.rows())
    assert summary["average_accuracy"] == pytest.approx(0.6)
    auroc = summary["metrics"]["auroc"]
    assert (auroc["evaluated_round"], auroc["average"]) == (3, None)
    assert auroc["by_client"] == {"a": None, "b": None}
    assert (auroc["best_average"], auroc["best_average_round"]) == (pytest.approx(0.8), 2)
    assert summary["metrics"]["loss"]["best_average_round"] == 1  # the lowest one
    assert log.rows().metric_by_round("auroc") == {1: 0.5, 2: pytest.approx(0.8)}
    json.dumps(summary, allow_nan=False)


def test_clients_models_have_their_three_averages_of_any_metric_without_what_is_undefined():
    log = client_log()
    values = [[0.9, math.nan, 0.3], [0.5, 0.8, 0.2], [math.nan, math.nan, math.nan]]
    for node, row in zip(CLIENTS, values, strict=True):
        for target, value in zip(CLIENTS, row, strict=True):
            log.write(Number(1, "evaluate", node, "macro_f1", target, value))
    found = summarise(log.rows())["metrics"]["macro_f1"]
    assert found["averaged_global_by_client"] == {"a": pytest.approx(0.6), "b": 0.5, "c": None}
    assert found["averaged_global"] == pytest.approx((0.6 + 0.5) / 2)
    assert found["inter"] == pytest.approx((0.3 + 0.35) / 2)
    assert found["local_by_client"] == {"a": 0.9, "b": 0.8, "c": None}
    assert found["matrix"]["values"][0] == [0.9, None, 0.3]


def test_parts_of_a_metric_go_the_way_it_goes():
    log = server_log()
    for round, value in {1: 0.3, 2: 0.1}.items():
        log.write(Number(round, "evaluate", "server", "errors.far", "a", value))
    for name in ("errors", "errors.far"):
        found = summarise(log.rows(), lower_is_better=[name])["metrics"]["errors.far"]
        assert found["best_average_round"] == 2
    found = summarise(log.rows(), lower_is_better=["error"])["metrics"]["errors.far"]
    assert found["best_average_round"] == 1


def test_simulated_seconds_are_those_at_the_end_of_the_last_round():
    assert "simulated_seconds" not in summarise(server_log().rows())
    log = server_log()
    for round, step, name, value in (
        (1, "round", "clock", 10.0), (2, "round", "clock", 25.0), (2, "round", "loss", 7.0),
        (2, "update", "clock", 99.0),
    ):  # fmt: skip
        log.write(Number(round, step, "server", name, None, value))
    assert summarise(log.rows())["simulated_seconds"] == 25.0


def test_scores_on_held_out_examples_say_so_wherever_a_round_was_chosen_by_them():
    log = server_log()
    log.write(Number(1, "evaluate", "server", "loss", "a", 0.5))
    plain, held = (summarise(log.rows(), held_out=number) for number in (0, 12))
    assert "held_out" not in plain and "scored_on" not in plain
    assert held["held_out"] == 12 and held["scored_on"].startswith("training examples held out")
    for part in (lambda summary: summary, lambda summary: summary["metrics"]["loss"]):
        notes = [
            {key: value for key, value in part(summary).items() if key.endswith("_note")}
            for summary in (plain, held)
        ]
        assert len(notes[0]) == 1 and notes[0].keys() == notes[1].keys()
        assert all(note.startswith("chosen on test data") for note in notes[0].values())
        assert all(note.startswith("chosen on held-out") for note in notes[1].values())


def test_counts_have_no_mean_and_accuracy_stands_at_the_top_alone():
    log = server_log()
    for name in ("confusion.0.1", "recall.0"):
        log.write(Number(1, "evaluate", "server", name, "a", 3.0))
    assert list(summarise(log.rows())["metrics"]) == ["recall.0"]
    assert list(summarise(log.rows(), counts=["recall"])["metrics"]) == ["confusion.0.1"]


def test_clients_models_have_a_best_round_of_any_metric():
    log = client_log()
    better = [[value + 0.05 for value in row] for row in MATRIX]
    worse = [[value - 0.05 for value in row] for row in MATRIX]
    for round, matrix in ((2, better), (3, worse)):
        for node, row in zip(CLIENTS, matrix, strict=True):
            score(log, round, node, dict(zip(CLIENTS, row, strict=True)))
    for round, value in ((1, 3.0), (2, 1.0), (3, 9.0)):
        log.write(Number(round, "evaluate", "a", "loss", "a", value))
    summary = summarise(log.rows())
    assert summary["best_averaged_global_accuracy"] == pytest.approx(0.5 + 0.05)
    assert summary["best_averaged_global_accuracy_round"] == 2
    assert summary["averaged_global_accuracy"] == pytest.approx(0.5 - 0.05)
    loss = summary["metrics"]["loss"]
    assert (loss["best_averaged_global"], loss["best_averaged_global_round"]) == (1.0, 2)
