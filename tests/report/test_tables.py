"""Comparisons over seeds, redone by hand."""

import io
import json
import math
from itertools import product

import pytest
from rich.console import Console

from fedstill.core.errors import BadValue, RunFolderError
from fedstill.logbook import FolderLog, Number, Traffic, read_rows, summarise, write_summary
from fedstill.logbook.reader import Run, Summary
from fedstill.report import comparison
from fedstill.report.amounts import human_bytes, human_floats
from fedstill.report.groups import by_test_set, scores_of
from fedstill.report.tables import compare


def made(
    folder, seed, scores, *, more="", method="fedavg", lr=0.1, digest="d1", node="server", losses=()
):
    """A finished run of one round, with given accuracies by test set."""
    with FolderLog(folder) as log:
        for target, value in dict(losses).items():
            log.write(Number(1, "evaluate", node or target, "loss", target, value))
        for target, value in scores.items():
            log.write(Number(1, "evaluate", node or target, "accuracy", target, value))
        log.write(Traffic(1, "update", "a", "up", "weights", 1000, 4000, 1))
        log.write(Traffic(1, "broadcast", "server", "down", "weights", 1000, 4000, 2))
    (folder / "recipe.toml").write_text(
        f'[run]\nseed = {seed}\nrounds = 1\n[method]\nname = "{method}"\nlr = {lr}\n'
        f'[data]\nname = "digits"\n{more}'
    )
    write_summary(folder, summarise(read_rows(folder), seconds=2.0, data_digest=digest))
    return folder


def test_mean_and_spread_over_seeds_are_those_of_the_sample(tmp_path):
    averages = [0.5, 0.6, 0.8]
    folders = [
        made(tmp_path / str(seed), seed, {"a": value + 0.1, "b": value - 0.1})
        for seed, value in enumerate(averages)
    ]
    (group,) = comparison(folders).groups
    found = group.scores["average_accuracy"]
    mean = (0.5 + 0.6 + 0.8) / 3
    spread = math.sqrt(sum((value - mean) ** 2 for value in averages) / (3 - 1))
    assert (found.mean, found.spread, found.n) == (
        pytest.approx(mean),
        pytest.approx(spread),
        3,
    )
    assert group.targets["a"].mean == pytest.approx(mean + 0.1)
    assert group.seeds == ("0", "1", "2")
    assert group.floats_per_round["up"].mean == 1000
    assert group.bytes_said["down"].mean == 4000


def kept(seed, score, name="fedavg", data=(), **values):
    """A run in memory."""
    summary = Summary(status="finished", rounds=1, average_accuracy=score, seed=seed,
                      label=name, data_digest="x")  # fmt: skip
    recipe = {"method": {"name": name, "label": name, **values},
              "data": {"name": "digits5", **dict(data)},
              "run": {"seed": seed, "rounds": 1}}  # fmt: skip
    return Run((), (), (), None, summary, recipe, {})


def test_of_many_settings_that_differ_in_many_values_each_has_a_row():
    values = product((1, 2), (1, 2), (1, 2), (1, 2), (1, 2, 3))
    runs = [kept(0, 0.5, **dict(zip("abcde", each, strict=True))) for each in values]
    assert len({group.name for group in compare(runs).groups}) == len(runs) == 48


def test_runs_of_several_splits_are_paired_split_by_split():
    places = list(product((0, 1), (0, 1, 2)))
    one = [kept(seed, 0.5 + 0.1 * split, data={"seed": split}) for seed, split in places]
    other = [kept(seed, 0.4 + 0.1 * split**2, "fedprox", {"seed": split}) for seed, split in places]
    table = compare([*one, *other], against="fedavg")
    (_, second) = table.as_dict()["sections"][0]["groups"]
    assert second["paired"]["n"] == 6
    assert second["paired"]["difference"] == pytest.approx(17 / 30 - 0.6)
    assert [*table.groups[0].by_seed["average_accuracy"]][:3] == [
        "0",
        "0, data.seed 1",
        "0, data.seed 2",
    ]


def test_test_sets_of_another_metric_have_columns_where_clients_keep_models():
    matrix = {"models": ["a", "b"], "test_sets": ["a", "b"], "values": [[1.0, 3.0], [2.0, 5.0]]}
    summary = {"metrics": {"loss": {"matrix": matrix}}}
    assert by_test_set(scores_of(summary, "loss")) == {"a": 1.5, "b": 4.0}


def test_one_seed_has_no_spread(tmp_path):
    found = comparison([made(tmp_path / "0", 0, {"a": 0.25})])
    assert found.groups[0].scores["average_accuracy"].spread is None
    assert "±" not in found.as_markdown().split("\n\n")[1]
    assert "25.00" in found.as_markdown()


def test_runs_on_other_data_stand_in_another_table_and_it_is_said(tmp_path):
    folders = [
        made(tmp_path / "0", 0, {"a": 0.5}, digest="d1"),
        made(tmp_path / "1", 1, {"a": 0.7}, digest="d2"),
    ]
    found = comparison(folders)
    assert [section.digest for section in found.sections] == ["d1", "d2"]
    assert all(group.scores["average_accuracy"].n == 1 for group in found.groups)
    assert "do not share their data" in found.notes[0]
    assert "digests of it differ" in found.notes[1]
    assert "digests of it differ" in found.as_markdown()


def test_runs_with_other_values_are_kept_apart_and_named_by_them(tmp_path):
    folders = [
        made(tmp_path / "0", 0, {"a": 0.5}, lr=0.1),
        made(tmp_path / "1", 1, {"a": 0.7}, lr=0.5),
    ]
    names = [group.name for group in comparison(folders).groups]
    assert names == ["fedavg (lr=0.1)", "fedavg (lr=0.5)"]
    folders.append(made(tmp_path / "2", 0, {"a": 0.5}, lr=1.0))
    assert comparison(folders).groups[2].name == "fedavg (lr=1)"


def test_runs_with_other_channels_are_named_by_the_names_of_these(tmp_path):
    def channel(name, share):
        return f'[[federation.channel]]\nname = "{name}"\nshare = {share}\n'

    two, mine = channel("top_k", 0.1) + channel("half", 1), channel("/home/me/signs.py:Signs", 1)
    folders = [
        made(tmp_path / str(number), 0, {"a": 0.5}, more=more)
        for number, more in enumerate([two, mine, ""])
    ]
    names = [group.name for group in comparison(folders).groups]
    assert names == [
        "fedavg (federation.channel=top_k + half)",
        "fedavg (federation.channel=Signs)",
        "fedavg (federation.channel=absent)",
    ]
    other = made(tmp_path / "other", 0, {"a": 0.5}, more=two.replace("0.1", "0.2"))
    names = [group.name for group in comparison([folders[0], other]).groups]
    assert names == [f"fedavg (federation.channel.0.share={share})" for share in (0.1, 0.2)]


@pytest.mark.parametrize(
    "label, name", [("wide", "fedavg wide"), ("fedavg-wide", "fedavg-wide"), ("fedavg", "fedavg")]
)
def test_a_label_is_part_of_the_name(tmp_path, label, name):
    folder = made(tmp_path / "0", 0, {"a": 0.5})
    recipe = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(recipe.replace("lr", f'label = "{label}"\nlr'))
    assert comparison([folder]).groups[0].name == name


@pytest.mark.parametrize(
    "label, name", [("Pulled", "Pulled"), ("strong", "Pulled strong"), ("Pulled-2", "Pulled-2")]
)
def test_a_method_of_ones_own_is_named_without_its_file(tmp_path, label, name):
    folder = made(tmp_path / "0", 0, {"a": 0.5})
    recipe = (folder / "recipe.toml").read_text()
    mine = f'"/home/me/mine.py:Pulled"\nlabel = "{label}"'
    (folder / "recipe.toml").write_text(recipe.replace('"fedavg"', mine))
    assert comparison([folder]).groups[0].name == name


def test_settings_that_differ_in_many_values_keep_their_own_rows(tmp_path):
    folders = []
    for number in range(3):
        same = "a = 1\nb = 1\nc = 1\n" if number else "a = 2\nb = 2\nc = 2\n"
        more = f"[models]\n{same}z = {number}\n"
        folders.append(made(tmp_path / str(number), 0, {"a": 0.5}, more=more))
    names = [group.name for group in comparison(folders).groups]
    assert len(set(names)) == 3


def test_a_seed_given_twice_counts_once(tmp_path):
    folders = [made(tmp_path / name, 0, {"a": 0.5}) for name in ("first", "second")]
    found = comparison(folders)
    assert found.groups[0].scores["average_accuracy"].n == 1
    assert "second" in found.notes[0] and "left out" in found.notes[0]


def test_engine_and_place_of_data_do_not_make_another_setting(tmp_path):
    folders = [
        made(tmp_path / "0", 0, {"a": 0.5}, more='folder = "x"\n[engine]\nname = "batched"\n'),
        made(tmp_path / "1", 1, {"a": 0.5}, more='folder = "y"\n[engine]\nname = "in_process"\n'),
    ]
    assert len(comparison(folders).groups) == 1


def test_reported_numbers_stand_under_ours_with_their_source(tmp_path):
    more = '[reported]\naverage = 61.5\na = 70.25\nsource = "Table 1"\n'
    found = comparison([made(tmp_path / "0", 0, {"a": 0.7, "b": 0.5}, more=more)])
    lines = found.as_markdown().splitlines()
    assert lines[2].startswith("| method | a | b | average |")
    assert lines[4].startswith("| fedavg | 70.00 | 50.00 | 60.00 | 4 kB | 4 kB | 2.0 |")
    assert lines[5].startswith("| ↳ reported [1] | 70.25 | - | 61.50 |")
    assert "[1] Table 1" in found.as_markdown()


def test_the_best_round_stands_beside_the_last_where_a_paper_reports_it(tmp_path):
    reported = '[reported]\nbest_average_accuracy = 70.5\nsource = "table 1"\n'
    made(tmp_path / "0", 0, {"a": 0.5}, more=reported)
    with FolderLog(tmp_path / "0") as log:
        log.write(Number(2, "evaluate", "server", "accuracy", "a", 0.4))
    write_summary(tmp_path / "0", summarise(read_rows(tmp_path / "0"), data_digest="d1"))
    page = comparison([tmp_path / "0"]).as_markdown()
    assert "| average | best round |" in page
    assert "| 40.00 | 40.00 | 50.00 |" in page  # the test set, the last round, the best
    assert "| - | - | 70.50 |" in page
    assert "best round: chosen on test data" in page


def test_clients_models_scored_beside_the_servers_have_a_column_of_their_own(tmp_path):
    made(tmp_path / "0", 0, {"a": 0.5, "b": 0.5}, method="heterofl")
    with FolderLog(tmp_path / "0") as log:
        log.write(Number(1, "evaluate", "a", "accuracy", "a", 0.2))
        log.write(Number(1, "evaluate", "b", "accuracy", "b", 0.4))
    write_summary(tmp_path / "0", summarise(read_rows(tmp_path / "0"), data_digest="d1"))
    plain = made(tmp_path / "1", 0, {"a": 0.6, "b": 0.6})
    page = comparison([tmp_path / "0", plain]).as_markdown()
    assert "| average | local |" in page
    assert "| 50.00 | 30.00 |" in page
    assert "| 60.00 | - |" in page


def test_client_models_show_three_names(tmp_path):
    folder = made(tmp_path / "0", 0, {})
    with FolderLog(folder) as log:
        for node, target, value in (
            ("a", "a", 0.9),
            ("a", "b", 0.5),
            ("b", "a", 0.3),
            ("b", "b", 0.7),
        ):
            log.write(Number(1, "evaluate", node, "accuracy", target, value))
    write_summary(folder, summarise(read_rows(folder), seconds=2.0))
    lines = comparison([folder]).as_markdown().splitlines()
    assert "| a | b | global | inter | local |" in lines[2]
    # columns (0.9 + 0.3) / 2, (0.5 + 0.7) / 2; all four / 4; (0.5 + 0.3) / 2; (0.9 + 0.7) / 2
    assert "| 60.00 | 60.00 | 60.00 | 40.00 | 80.00 |" in lines[4]


def test_a_common_model_has_one_value_for_the_three_scores(tmp_path):
    local = made(tmp_path / "local", 0, {"a": 0.7, "b": 0.5}, node="")
    common = made(tmp_path / "common", 0, {"a": 0.8, "b": 0.4}, more="[models]\nwidth = 2\n")
    text = comparison([local, common]).as_markdown()
    assert "| 80.00 | 40.00 | 60.00 |" in text
    assert "one common model" in text


def test_clients_scored_on_their_own_data_only_show_that(tmp_path):
    found = comparison([made(tmp_path / "0", 0, {"a": 0.7, "b": 0.5}, node="")])
    assert found.groups[0].targets["a"].mean == 0.7
    assert "| a | b | local |" in found.as_markdown()
    assert "keep their own models, each is scored on its own test set alone" in found.as_markdown()
    assert "global" not in found.as_markdown()


def test_clients_that_share_a_test_set_have_one_column(tmp_path):
    text = comparison([made(tmp_path / "0", 0, {"a": 0.5, "b": 0.5, "c": 0.5})]).as_markdown()
    assert "| method | average |" in text
    assert "all clients share one test set" in text


def test_equal_accuracies_on_test_sets_of_their_own_are_not_taken_for_one(tmp_path):
    scores, losses = {"a": 1.0, "b": 1.0}, {"a": 0.01, "b": 0.02}
    text = comparison([made(tmp_path / "0", 0, scores, losses=losses)]).as_markdown()
    assert "| a | b |" in text and "share one test set" not in text
    text = comparison([made(tmp_path / "1", 0, scores, losses={"a": 0.1, "b": 0.1})]).as_markdown()
    assert "all clients share one test set" in text


def test_many_clients_are_shown_by_their_extremes(tmp_path):
    scores = {f"client-{number}": number / 100 for number in range(30)}
    text = comparison([made(tmp_path / "0", 0, scores)]).as_markdown()
    assert "0.00 (client-0)" in text and "29.00 (client-29)" in text
    assert len(text.splitlines()[2]) < 200


def test_json_holds_every_number_unrounded(tmp_path):
    found = json.loads(json.dumps(comparison([made(tmp_path / "0", 0, {"a": 1 / 3})]).as_dict()))
    group = found["sections"][0]["groups"][0]
    assert group["targets"]["a"] == {"mean": 1 / 3, "spread": None, "n": 1}
    assert group["recipe"]["method"] == {"name": "fedavg", "lr": 0.1}


@pytest.mark.parametrize("width", [60, 80, 250])
def test_a_terminal_of_any_width_shows_every_number_whole(tmp_path, width):
    scores = {"mnist": 0.9123, "svhn": 0.7123, "usps": 0.8123, "synthetic": 0.6123}
    folders = [made(tmp_path / str(seed), seed, scores) for seed in (0, 1)]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(comparison(folders).as_rich())
    text = console.export_text()
    for cell in ("91.23 ± 0.00", "61.23 ± 0.00", "76.23 ± 0.00", "4 kB"):
        assert cell in text
    assert "…" not in text


def test_nothing_to_compare_is_an_error():
    with pytest.raises(RunFolderError, match="nothing to compare"):
        comparison([])


def test_amounts_have_three_digits_and_a_unit():
    assert human_bytes(12_345_678) == "12.3 MB"
    assert human_bytes(999) == "999 B"
    assert human_bytes(999_999) == "1 MB"
    assert human_floats(320_000) == "320 k"
    assert human_floats(1_870_000) == "1.87 M"
    assert human_floats(0) == "0"


@pytest.mark.parametrize(
    ("seeds", "says"),
    [
        (1, "accuracies in percent, only seed 0"),
        (3, "accuracies in percent, mean ± sample standard deviation over seeds 0, 1, 2"),
        (6, "accuracies in percent, mean ± sample standard deviation over 6 seeds"),
    ],
)
def test_a_table_says_of_which_seeds_it_is(tmp_path, seeds, says):
    folders = [made(tmp_path / str(seed), seed, {"a": 0.5}) for seed in range(seeds)]
    assert says in comparison(folders).as_markdown()


def with_areas(folder, seed, areas, **more):
    """A run that also has an area and a loss on each test set."""
    made(folder, seed, {name: 0.4 + 0.2 * i for i, name in enumerate(areas)}, **more)
    with FolderLog(folder) as log:
        for target, value in areas.items():
            node = more.get("node", "server") or target
            log.write(Number(1, "evaluate", node, "auroc", target, value))
            log.write(Number(1, "evaluate", node, "loss", target, 2.0))
    write_summary(folder, summarise(read_rows(folder), seconds=2.0, data_digest="d1"))
    return folder


def test_a_further_metric_has_a_column_and_by_name_a_table_of_its_own(tmp_path):
    folders = [
        with_areas(tmp_path / "0", 0, {"a": 0.75, "b": 0.5}),
        with_areas(tmp_path / "1", 1, {"a": 0.85, "b": 0.5}),
    ]
    plain = comparison(folders).as_markdown()
    head, _, row = plain.splitlines()[2:5]
    assert [cell.strip() for cell in head.split("|")[2:6]] == ["a", "b", "average", "auroc"]
    assert "50.00 ± 0.00" in row and "0.6500 ± 0.0354" in row and "loss" not in head
    found = comparison(folders, "auroc")
    assert found.groups[0].targets["a"].mean == pytest.approx(0.8)
    assert found.as_dict()["metric"] == "auroc"
    text = found.as_markdown()
    assert "auroc, mean ± sample standard deviation over seeds 0, 1" in text
    assert "0.8000 ± 0.0707" in text and "percent" not in text
    assert comparison(folders, "loss").groups[0].scores["average_accuracy"].mean == 2


def test_a_further_metric_of_clients_models_is_shown_by_client(tmp_path):
    folder = with_areas(tmp_path / "0", 0, {"a": 0.75, "b": 0.5}, node=None, method="local")
    found = comparison([folder], "auroc")
    assert found.groups[0].by_client["averaged_local_accuracy"]["a"].mean == 0.75
    assert "local: on its own" in found.as_markdown(by_client=True)


@pytest.mark.parametrize(("classes", "head"), [(12, "recall.11"), (13, "highest recall")])
def test_of_recall_by_many_classes_the_lowest_and_the_highest_are_shown(tmp_path, classes, head):
    folder = made(tmp_path / "0", 0, {"a": 0.5})
    with FolderLog(folder) as log:
        for label in range(classes):
            log.write(Number(1, "evaluate", "server", f"recall.{label}", "a", 1 / (1 + label)))
    write_summary(folder, summarise(read_rows(folder)))
    text = comparison([folder]).as_markdown()
    assert f"| {head} | bytes up |" in text and "…" not in text
    shown = "| 0.0769 (12) | 1.0000 (0) |" in text and "highest, and in brackets which" in text
    assert shown == (classes == 13)
    assert len(comparison([folder]).as_dict()["sections"][0]["groups"][0]["others"]) == classes


def test_a_metric_that_no_run_has_is_refused_by_name(tmp_path):
    folder = with_areas(tmp_path / "0", 0, {"a": 0.75})
    with pytest.raises(BadValue, match=r"metric 'aurocc'; did you mean 'auroc'.*run.metrics named"):
        comparison([folder], "aurocc")
