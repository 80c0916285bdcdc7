"""Listings: methods, show, data and compare, for people and as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from typer.main import get_command

from fedstill.commands.cli import app
from fedstill.commands.listings import (
    Form,
    markdown,
    method_rows,
    print_rows,
    refusal,
    short_citation,
)
from fedstill.core.errors import BadValue
from fedstill.engines.play.rehearsal import quick
from fedstill.methods import METHODS
from fedstill.models import MLP, ConvNet
from small_recipes import CLIENTS, fedstill, write_recipe


def shown(*arguments: object) -> Any:
    said = fedstill(*arguments, "--format", "json")
    assert said.code == 0, said.err
    return json.loads(said.out)


def test_feddm_sends_as_many_floats_as_the_paper_says():
    found = shown("show", "feddm", "--shape", "3x32x32", "--held", 9, "per_class=10")
    down, up = found["messages"]
    assert down["floats"] == 320_010  # the ConvNet
    assert up["floats"] == 9 * 10 * 3 * 32 * 32 == 276_480
    assert found["floats_per_round"] == {"up": 276_480, "down": 320_010, "peer": 0}


def test_show_lists_steps_memories_and_messages():
    found = shown("show", "feddm")
    assert [(s["at"], s["name"]) for s in found["steps"]] == [
        ("server", "broadcast"), ("clients", "synthesize"), ("server", "train"),
    ]  # fmt: skip
    assert found["memories"]["server"]["fields"]["weights"]["floats"] == 320_010
    assert found["memories"]["client"] is None
    assert found["messages"][1]["fields"]["labels"] == {
        "type": "Tensor (positional)", "floats": 0, "bytes": 90 * 8,
    }  # fmt: skip


def test_show_counts_for_the_values_asked_for():
    twenty = shown("show", "feddm", "per_class=20", "method.steps=1", "--held", 3, "--classes", 5)
    assert twenty["floats_per_round"]["up"] == 3 * 20 * 3072
    assert twenty["hyper_parameters"]["steps"] == 1
    grey = shown("show", "fedavg", "--shape", "1x28x28", "--model", "mlp")
    model = grey["example"]["model_floats"]
    assert grey["floats_per_round"] == {"up": model + 1, "down": model, "peer": 0}


def test_show_says_where_each_client_hears_a_message_of_its_own():
    drawn = shown("show", "feddropout", "budgets=[1.0, 1.0]")
    down, up = drawn["messages"]
    assert (down["different"], up["different"], drawn["example"]["clients"]) == (2, 1, 2)
    assert down["floats"] == 2 * (320_010 + 1)
    told = " ".join(fedstill("show", "feddropout").out.split())
    assert "Drawn: the sum of messages that differ, one for each of the 2 clients counted" in told
    assert "messages that differ" not in fedstill("show", "fedavg").out


def test_show_says_that_clients_own_models_are_scored_too():
    told = " ".join(fedstill("show", "fedavg", "score_own=true").out.split())
    assert "as average_accuracy, and clients' own models on their own tests, as averaged" in told


def test_show_counts_logits_for_a_stated_number_of_public_examples():
    found = shown("show", "fccl", "--public", 200, "--classes", 7, "public_batch=16")
    assert found["floats_per_round"] == {"up": 200 * 7, "down": 200 * 7, "peer": 0}
    assert (found["needs_public"], found["example"]["public"]) == (True, 200)
    assert "everybody holds 5,000 public examples" in fedstill("show", "fccl").out
    df = shown("show", "feddf")
    assert df["floats_per_round"] == {"up": 320_011, "down": 320_010, "peer": 0}
    fedavg = shown("show", "fedavg")
    assert (fedavg["needs_public"], fedavg["example"]["public"]) == (False, 0)
    assert "public examples" not in fedstill("show", "fedavg").out


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_shown_within_eighty_columns(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = shown("show", name)
    assert found["steps"] and all(step["purpose"] for step in found["steps"])
    said = fedstill("show", name).out
    table = said[said.index("\nplan") : said.index("\noptions")]
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in said
    for step in found["steps"]:
        assert f" {step['name']} " in table


def test_show_reads_well():
    said = " ".join(fedstill("show", "feddm").out.split())
    headings = ["messages", "states, kept between steps", "options", "preset=paper:"]
    facts = ["CVPR 2023", "276,480 up, 320,010 down", "a client that holds 9"]
    assert [words for words in headings + facts if words not in said] == []
    page = fedstill("show", "feddm", "--format", "markdown").out
    assert "| Down | down | weights | 320,010 |" in page


def test_show_tells_of_one_option_alone():
    (lr,) = shown("show", "fedprox", "lr", "lr=0.5")
    assert lr in shown("show", "fedprox", "lr=0.5")["options"] and lr["value"] == 0.5
    said = fedstill("show", "fedprox", "method.mu").out
    assert "mu" in said and "epochs" not in said and "plan" not in said
    strange = fedstill("show", "fedprox", "epoch")
    assert strange.code == 2 and "unknown option 'epoch'; did you mean 'epochs'?" in strange.err


def test_show_says_whose_models_are_scored_and_who_sends_examples():
    names = ("fedavg", "fedproto", "centralised")
    said = {name: " ".join(fedstill("show", name).out.split()) for name in names}
    assert " scored: the server's model, as average_accuracy " in said["fedavg"]
    assert " scored: clients' own models, as averaged_local_accuracy, " in said["fedproto"]
    assert [name for name, text in said.items() if "sends_examples: " in text] == ["centralised"]


def test_a_preset_tells_of_a_method_in_it_only_what_is_not_as_by_default():
    said = " ".join(fedstill("show", "fedftg").out.split())
    small = "preset=small: base = FedAvg(lr=0.1, batch_size=12), iterations = 2,"
    assert small in said


@pytest.mark.parametrize("name", METHODS)
def test_no_meaning_of_an_option_is_said_twice(name):
    for option in shown("show", name)["options"]:
        parts = option["meaning"].split("; ")
        assert len(parts) == len({*parts}), option


@pytest.mark.parametrize("terminal", [False, True])
def test_a_refusal_is_broken_between_words_in_a_terminal_alone(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    faults = ["a fault that goes on " + "and on " * 6 + "to /its/end", "another"]
    lines = refusal(BadValue(faults)).splitlines()
    assert lines[0] == "fedstill: 2 faults" and lines[-1] == "  - another"
    assert len(lines) == (5 if terminal else 3)
    assert (max(map(len, lines)) <= 40) == terminal
    assert " ".join(" ".join(lines[1:-1]).split()) == f"- {faults[0]}"


def test_methods_are_listed_with_paper_and_purpose():
    rows = shown("methods")
    assert [row["method"] for row in rows] == list(METHODS)
    assert all(row["purpose"] for row in rows)
    table = fedstill("methods").out
    assert "McMahan et al., AISTATS 2017" in table
    assert "Communication-Efficient" not in table
    (fedavg,) = (row for row in rows if row["method"] == "fedavg")
    assert "Communication-Efficient Learning" in fedavg["paper"]
    assert {row["method"] for row in rows if not row["paper"]} == {"local", "centralised"}
    assert fedstill("methods", "--format", "markdown").out.startswith(
        "| method | paper | purpose |"
    )


def test_every_paper_can_be_cited_in_short():
    whole = {row["method"]: row["paper"] for row in method_rows(Form.json)}
    short = {row["method"]: row["paper"] for row in method_rows(Form.table)}
    dated = [name for name in whole if re.search(r"\b20\d\d\b", whole[name])]
    assert [name for name in dated if not short[name]] == []
    assert short_citation("One, Two. A Title. ICML 2020. Algorithm 1.") == "One and Two, ICML 2020"
    assert short_citation("One, Two, Three. A Title. ICML 2020.") == "One et al., ICML 2020"
    assert short_citation("One, Two, Three. A Title. arXiv 18.1, 2018.") == "One et al., 2018"
    assert short_citation("One. A Title. ICML 2020.") == "One, ICML 2020"
    assert short_citation("No federated method: it shows what pooling gives.") == ""


@pytest.mark.parametrize("model", [ConvNet((3, 8, 8), 4, depth=2, width=6), MLP((3, 8, 8), 4)])
def test_a_rehearsed_network_answers_in_the_true_shapes(model):
    weights, x = model.init(0), torch.zeros(5, 3, 8, 8)
    answers, truth = quick(model).stages(weights, x), model.stages(weights, x)
    assert [a.shape for a in answers] == [t.shape for t in truth]
    assert quick(model)(weights, x).shape == (5, 4)
    assert quick(model).describe() == model.describe()


def test_data_sets_are_listed_with_what_is_there(tmp_path):
    rows = {row["data"]: row for row in shown("data")}
    assert rows["digits5"]["state"] == "ready"
    assert rows["mnist"]["missing"] == ["mnist.npz"]
    assert rows["torchvision:CIFAR10"]["state"] == "torchvision"
    (tmp_path / "mnist.npz").touch()
    rows = {row["data"]: row for row in shown("data", "--data-dir", tmp_path)}
    assert rows["mnist"]["state"] == "ready"
    table = fedstill("data", "--data-dir", tmp_path).out
    assert f"usps needs usps.npz in {tmp_path}" in table
    assert max(map(len, fedstill("data").out.splitlines())) <= 80
    assert "…" not in fedstill("data").out


def test_a_split_is_previewed_by_the_name_of_a_set_alone() -> None:
    sites = shown("data", "digits5")
    assert [row["total"] for row in sites] == [300] * 5
    change = ("data.partition.kind=iid", "data.partition.clients=3")
    assert [row["total"] for row in shown("data", "digits5", *change)] == [500] * 3
    said = fedstill("data", "digit5").err
    assert "no recipe at digit5; give the path" in said and "did you mean 'digits5'?" in said
    assert "no recipe at digit5.toml" in fedstill("data", "digit5.toml").err


def test_what_is_wrong_with_a_data_set_of_ones_own_is_said(tmp_path):
    (tmp_path / "mine.py").write_text("def wards(): ...\n")
    assert "mine.py: unknown name 'ward'" in fedstill("data", f"{tmp_path / 'mine.py'}:ward").err
    assert f"no file {tmp_path / 'his.py'}" in fedstill("data", f"{tmp_path / 'his.py'}:ward").err


def test_data_of_a_recipe_are_previewed_as_they_are_split(tmp_path):
    recipe = write_recipe(tmp_path)
    rows = shown("data", recipe)
    assert rows[0] == {"client": "east", "0": 8, "1": 8, "2": 8, "total": 24}
    assert [row["client"] for row in rows] == [*CLIENTS]
    changes = ("data.partition.kind=iid", "data.partition.clients=2")
    said = fedstill("data", recipe, *changes, "--picture", tmp_path / "split.png")
    assert " client-01 " in said.out and "36" in said.out
    assert "note: the data of 3 clients was merged" in said.err
    assert f"drawn: {tmp_path / 'split.png'}" in said.err
    assert (tmp_path / "split.png").read_bytes().startswith(b"\x89PNG")


def test_a_wide_table_is_printed_in_parts_and_nothing_is_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    row = {"client": "east", **{f"class {i}": 1000 + i for i in range(20)}}
    print_rows([row, {**row, "client": "west"}], Form.table)
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 60
    assert said.count("east") == said.count("west") > 1
    assert all(f"1,0{i:02d}" in said for i in range(20))


def test_markdown_escapes_what_would_end_a_cell():
    assert markdown([{"a": "x | y", "b": None}]).splitlines()[-1] == "| x \\| y |  |"
    assert markdown([{"a": "two\nlines", "b": 1}]).splitlines() == [
        "| a | b |",
        "| :-- | --: |",
        "| two lines | 1 |",
    ]


@pytest.fixture(scope="module")
def two_methods(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    recipe = write_recipe(folder / "in")
    for name in ("fedavg", "local"):
        change = f"method.name={name}"
        said = fedstill("run", recipe, change, "--out", folder / name, "--seeds", 0, 1, 2)
        assert said.code == 0
    return folder


def test_runs_are_compared_in_one_table_with_mean_and_spread(two_methods):
    found = shown("compare", two_methods / "fedavg", two_methods / "local")
    (section,) = found["sections"]
    assert {group["name"]: group["seeds"] for group in section["groups"]} == {
        "fedavg": ["0", "1", "2"], "local": ["0", "1", "2"],
    }  # fmt: skip
    scores = [
        json.loads((two_methods / "fedavg" / f"seed-{seed}" / "summary.json").read_text())
        for seed in (0, 1, 2)
    ]
    values = [score["average_accuracy"] for score in scores]
    mean = sum(values) / 3
    spread = (sum((value - mean) ** 2 for value in values) / 2) ** 0.5
    (fedavg,) = (group for group in section["groups"] if group["name"] == "fedavg")
    assert fedavg["scores"]["average_accuracy"]["mean"] == pytest.approx(mean)
    assert fedavg["scores"]["average_accuracy"]["spread"] == pytest.approx(spread)


def test_a_folder_of_runs_stands_for_the_runs_in_it(two_methods, tmp_path):
    said = fedstill("compare", two_methods, "--picture", tmp_path / "bars.png")
    assert "fedavg" in said.out and "local" in said.out and "±" in said.out
    assert f"drawn: {tmp_path / 'bars.png'}" in said.err
    assert (tmp_path / "bars.png").exists()
    assert "| fedavg |" in fedstill("compare", two_methods, "--format", "markdown").out


def test_the_matrix_of_clients_models_is_printed_and_drawn(two_methods, tmp_path):
    (found,) = shown("matrix", two_methods)  # of local alone: fedavg has one common model
    assert found["name"].startswith("local on own")
    assert found["networks"] == {"east": "mlp", "north": "mlp", "west": "mlp"}
    own = [found["values"][name][name]["mean"] for name in found["test_sets"]]
    assert found["means"]["averaged_local_accuracy"]["mean"] == pytest.approx(sum(own) / 3)
    said = fedstill("matrix", two_methods, "--picture", tmp_path / "matrix.png")
    assert "east (mlp)" in said.out and "inter" in said.out
    assert f"drawn: {tmp_path / 'matrix.png'}" in said.err
    assert (tmp_path / "matrix.png").exists()
    refused = fedstill("matrix", two_methods / "fedavg")
    assert refused.code == 2 and "there is no matrix" in refused.err


def test_the_scores_of_each_clients_model_are_printed_when_asked_for(two_methods):
    plain, more = (
        fedstill("compare", two_methods, *options, "--format", "markdown").out
        for options in ((), ("--by-client",))
    )
    assert "| local: inter |" in more and "| local: inter |" not in plain


def test_curves_are_printed_with_what_was_sent_and_drawn(two_methods, tmp_path):
    found = shown("curves", two_methods)
    fedavg = [row for row in found if row["method"] == "fedavg"]
    assert [row["round"] for row in fedavg] == [1, 2, 3]
    assert fedavg[2]["floats sent"] == 3 * fedavg[0]["floats sent"] > 0
    assert {row["floats sent"] for row in found if row["method"] == "local"} == {0}
    said = fedstill("curves", two_methods, "--picture", tmp_path / "curves.png")
    assert "floats received" in said.out.replace("\n", " ")
    assert f"drawn: {tmp_path / 'curves.png'}" in said.err
    assert (tmp_path / "curves.png").exists()


def test_every_part_of_a_divided_table_of_curves_says_of_which_round_it_is(
    two_methods, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    heads = [line.split() for line in fedstill("curves", two_methods).out.splitlines()]
    heads = [words for words in heads if words[:1] == ["method"]]
    assert len(heads) > 1 and all(words[1] == "round" for words in heads)


def test_networks_are_named_by_what_tells_them_apart(tmp_path):
    recipe = write_recipe(
        tmp_path, models={"cycle": [{"hidden": [4]}, {}]}, method={"name": "local"}
    )
    assert fedstill("run", recipe, "run.rounds=1", "--out", tmp_path / "run").code == 0
    networks = json.loads((tmp_path / "run" / "summary.json").read_text())["networks"]
    assert networks == {"east": "mlp, hidden 4", "north": "mlp, hidden 6", "west": "mlp, hidden 4"}


def test_help_does_not_wait_for_torch():
    code = "import sys; from fedstill.commands.cli import main; sys.argv[1:] = ['--help']\n" \
           "try: main()\nfinally: assert 'torch' not in sys.modules"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("run", "resume", "methods", "show", "compare", "matrix", "curves", "data", "demo"):
        assert f"\n  {name} " in done.stdout


def commands(built: Any, *words: str) -> list[tuple[str, ...]]:
    """The words that call each command of a group and of the groups in it, their own too."""
    below = getattr(built, "commands", {})
    return [words, *(found for name in below for found in commands(below[name], *words, name))]


@pytest.mark.parametrize("words", commands(get_command(app)), ids=" ".join)
def test_help_names_no_type_of_python_and_says_what_every_option_is_for(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = fedstill(*words, "--help").out
    assert not re.search(r"<[a-z]+>|<\w+ range>|list\[", said)
    assert max(map(len, said.splitlines())) <= 80
    assert not re.search(r"^  --\S+( \S+)?$(?!\n {8})", said, re.M)  # without a word about it


def test_no_option_has_its_own_name_as_a_placeholder() -> None:
    """Typer 0.27.0 does not know such an option."""
    own, groups = [], [get_command(app)]
    for group in groups:
        groups += getattr(group, "commands", {}).values()
        own += [each.opts for each in group.params if isinstance(each.metavar, str)
                and each.metavar.lower() == each.name and each.opts[0].startswith("-")]  # fmt: skip
    assert len(groups) > 20 and own == []


@pytest.mark.parametrize("group", [(), ("deploy",), ("site",), ("peer",), ("audit",)])
def test_no_line_about_a_command_is_cut(group: tuple[str, ...], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, listed = fedstill(*group, "--help").out.split("Commands:\n")
    lines = listed.split("\n\n")[0].splitlines()
    assert lines and all(line.endswith(".") and not line.endswith("...") for line in lines)


@pytest.mark.parametrize(
    "name", ["run", "resume", "methods", "show", "compare", "matrix", "curves", "data", "demo"]
)
def test_every_command_explains_itself(name):
    said = fedstill(name, "--help")
    assert said.code == 0
    assert f"Usage: fedstill {name}" in said.out


def test_a_misspelt_command_or_option_is_answered_with_the_nearest(tmp_path):
    assert "Did you mean 'run'?" in fedstill("rnu").err
    said = fedstill("run", write_recipe(tmp_path), "--seed", 3)
    assert said.code == 2 and "--seeds" in said.err
