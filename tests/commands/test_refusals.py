"""Bad input: each gets a message that names the thing and what to do, exit code 2, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Never

import numpy as np
import pytest

from fedstill.core import Inbox, Message, Method, Node, Place, State, Step, Weights, at_clients
from fedstill.engines import checkpoint
from fedstill.methods import METHODS
from fedstill.parts import distribution_matching
from fedstill.recipe.toml import toml_text
from fedstill.runs import session
from small_recipes import (
    CLIENTS,
    CONVNET,
    FEDDM,
    contents,
    fedstill,
    images_recipe,
    tables,
    write_client,
    write_recipe,
)


def expect_refusal(*arguments: object, says: str | Sequence[str]) -> str:
    """The message of a command that must fail, after its form was checked."""
    said = fedstill(*arguments)
    assert said.code == 2
    assert said.err.startswith("fedstill: ")
    assert "Traceback" not in said.err
    assert said.out == ""
    for words in [says] if isinstance(says, str) else says:
        assert words in said.err
    return said.err


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path / "in")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "run"


NEAREST = [
    ("run.ronds=3", "run.ronds: unknown key 'ronds'; did you mean 'rounds'?"),
    ("method.batchsize=3", "method.batchsize: unknown key 'batchsize'; did you mean 'batch_size'?"),
    ("methods.lr=3", "unknown table 'methods'; did you mean 'method'?"),
    ("method.name=fedavgg", "method.name: unknown method 'fedavgg'; did you mean 'fedavg'?"),
    ("method.preset=papre", "method.preset: unknown preset 'papre'; known:"),
    ("models.name=convnte", "models.name: unknown model 'convnte'; did you mean 'convnet'?"),
    ("models.hiden=[3]", "models.hiden: unknown key 'hiden'; did you mean 'hidden'?"),
    ("data.name=digit5", "data.name: unknown data set 'digit5'; did you mean 'digits5'?"),
    ("data.name=", "data.name: unknown data set ''; known: DIGITS"),
    ("data.public.name=fashion-mnits", "data.public.name: unknown data set 'fashion-mnits'; did y"),
    ("data.public.nam=mnist", "data.public.nam: unknown key 'nam'; did you mean 'name'?"),
    ("federation.topology=rnig", "unknown topology 'rnig'; did you mean 'ring'?"),
    (
        "data.partition.kind=dirichlt",
        "unknown partition kind 'dirichlt'; did you mean 'dirichlet'?",
    ),
    ("data.options.client=3", "unknown option of own 'client'; did you mean 'clients'?"),
    (
        "data.on_broken=skip",
        "data.on_broken: this is an option of own; write it as data.options.on_broken",
    ),
    ("federation.bad_messages=stopp", "unknown choice 'stopp'; did you mean 'stop'?"),
    ("engine.name=bathced", "unknown engine 'bathced'; did you mean 'batched'?"),
    ("models.clients.easst.width=3", "models.clients.easst.width: unknown key 'width'"),
]


@pytest.mark.parametrize(("change", "says"), NEAREST)
def test_a_misspelt_name_is_refused_with_the_nearest_one(recipe, target, change, says):
    expect_refusal("run", recipe, change, "--out", target, says=says)
    assert not target.exists()


WRONG = [
    ("run.rounds=0", "run.rounds = 0: must be at least 1"),
    ("run.rounds=many", "run.rounds = 'many': must be a whole number"),
    ("run.rounds=2.5", "run.rounds = 2.5: must be a whole number"),
    ("run.seed=-1", "run.seed = -1: must be at least 0"),
    ("run.name=3", "run.name = 3: must be text"),
    ("run.pictures=1", "run.pictures = 1: must be true or false"),
    ("run.device=gpu", "run.device = 'gpu': use auto, cpu, cuda or cuda:0"),
    ("method.lr=-0.1", "method.lr = -0.1: must be above 0"),
    ("method.lr=fast", "method.lr = 'fast': must be a number"),
    ("method.lr=nan", "method.lr = nan: must be a finite number"),
    ("method.name=[1]", "method.name: unknown method '[1]'"),
    ("method.preset=[1]", "method.preset: unknown preset '[1]'"),
    ("models.name=[1]", "models.name: unknown model '[1]'"),
    ("models.cycle=3", "models.cycle must be a list of tables"),
    ("models.hidden=big", "models.hidden = 'big'"),
    ("data.partition.kind=[1]", "data.partition.kind: unknown partition kind '[1]'"),
    ("data.partition.clients=3", "data.partition.kind is missing; known: classes-per-client,"),
    ("data.public.count=5", "data.public.name is missing"),
    ("data.public={name='digits5',count=0}", "data.public.count = 0: must be at least 1"),
    ("data.public={name='digits5',options={size=8}}", "unknown option of digits5 'size'"),
    ("data.options.size=8", "data.options: unknown option of own 'size'"),
    ("method.name=feddf", "data.public is missing: feddf needs images without labels that every"),
    ("federation.sample=0", "federation.sample = 0: must be at least 1"),
    ("federation.share=0", "federation.share = 0.0: must be in (0, 1]"),
    ("federation.sample=9", "federation.sample = 9, but there are 3 clients; ask for at most 3"),
    ("federation.degree=2", "federation.degree: a star topology has no such key"),
    ("rounds=3", "override 'rounds=3': say which table, e.g. run.rounds=…"),
    ("lr=3", "override 'lr=3': say which table, e.g. method.lr=…"),
    ("compile=true", "override 'compile=true': say which table, e.g. engine.compile=…"),
    (
        "models={name='mine'}",
        "models is a table of the recipe; change one of its keys, e.g. models.name",
    ),
    ("run=3", "run is a table of the recipe; change one of its keys, e.g. run.name=…"),
    ("run.rounds", "override 'run.rounds': write it as table.key=value"),
    ("run..rounds=3", "override 'run..rounds=3': write it as table.key=value"),
    ("run.rounds.more=3", "override 'run.rounds.more=3': run.rounds.more is not a table"),
]


@pytest.mark.parametrize(("change", "says"), WRONG)
def test_a_value_of_the_wrong_kind_or_size_is_refused(recipe, target, change, says):
    expect_refusal("run", recipe, change, "--out", target, says=says)
    assert not target.exists()


def test_faults_of_all_tables_are_reported_at_once(recipe, target):
    changes = [
        "run.ronds=3",
        "method.lr=-1",
        "data.name=mnits",
        "federation.sample=x",
        "modles.a=1",
    ]
    says = ["fedstill: 5 faults", "ronds", "method.lr = -1", "'mnist'", "sample = 'x'", "'models'"]
    message = expect_refusal("run", recipe, *changes, "--out", target, says=says)
    assert message.count("\n  - ") == 5


def test_sample_and_share_are_not_given_together(recipe, target):
    changes = ("federation.sample=2", "federation.share=0.5")
    expect_refusal("run", recipe, *changes, "--out", target, says="give one of them")


def test_a_graph_that_cannot_be_is_refused_by_its_table(recipe, target):
    changes = ("federation.topology=ring", "federation.neighbours=2")
    expect_refusal(
        "run", recipe, *changes, "--out", target, says="federation: Ring: neighbours = 2"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[run\nrounds = 3", "is not a TOML file"),
        (b"[run]\nname = '\xff'", "is not a text in UTF-8"),
        (b"run = 3\n[method]\nname = 'fedavg'\n[data]\nname = 'digits5'", "run must be a table"),
        (b"about = 3\n[method]\nname = 'fedavg'\n[data]\nname = 'digits5'", "about must be a tabl"),
        (
            b"models = 3\n[method]\nname = 'fedavg'\n[data]\nname = 'digits5'",
            "models must be a tab",
        ),
        (b"", "method.name is missing; known: "),
        (b"[method]\nlr = 1", "method.name is missing"),
        (b"[method]\nname = 'fedavg'", "data.name is missing"),
    ],
)
def test_a_recipe_that_cannot_be_read_says_why(tmp_path, text, says):
    path = tmp_path / "bad.toml"
    path.write_bytes(text)
    expect_refusal("run", path, "--out", tmp_path / "run", says=says)


def test_a_recipe_that_is_not_there_or_is_a_folder(tmp_path):
    expect_refusal("run", tmp_path / "no.toml", says="no recipe at")
    expect_refusal("run", tmp_path, says=["is a folder; give the path", f"resume {tmp_path}`"])


def test_methods_with_one_label_or_one_folder_are_refused(tmp_path):
    made = tables(tmp_path)
    body = {name: table for name, table in made.items() if name != "method"}

    def write(*labels: str) -> Path:
        path = tmp_path / "several.toml"
        method = "".join(f'\n[[method]]\nname = "fedavg"\nlabel = "{label}"\n' for label in labels)
        path.write_text(toml_text(body) + method)
        return path

    out = ("--out", tmp_path / "run")
    expect_refusal("run", write("a", "b", "a"), *out, says="method.label 'a' stands twice")
    expect_refusal("run", write("a b", "a_b"), *out, says="'a b' and 'a_b' would share the folder")
    assert not (tmp_path / "run").exists()


def test_a_fault_in_one_of_several_methods_names_its_place(tmp_path):
    path = tmp_path / "several.toml"
    path.write_text('[data]\nname="digits5"\n[[method]]\nname="fedavg"\n[[method]]\nname="fedd"\n')
    expect_refusal("run", path, says="method[1].name: unknown method 'fedd'")


def test_mixed_networks_are_refused_by_a_method_with_one_server_model(recipe, target):
    expect_refusal(
        "run", recipe, 'models.cycle=[{}, {hidden=[9]}]', "--out", target,
        says="models: FedAvg averages one network, but the clients' networks differ; give",
    )  # fmt: skip
    said = fedstill("run", recipe, "models.clients.east.hidden=[9]", "method.name=local",
                    "--out", target)  # fmt: skip
    assert said.code == 0


@pytest.mark.parametrize(
    ("budgets", "network", "says"),
    [
        ([1, 0.5], {}, "HeteroFL: budgets are 2 for 3 clients; give one for each of east, north,"),
        ([1, 0, 1], {}, "method: budgets = [1, 0, 1]: each must be in (0, 1]"),
        ([1, 1, 1e-9], {}, "HeteroFL: west: convnet: rate = 1e-09 leaves block0, block1 without u"),
        ([1, 1, 1], {"name": "alexnet", "width": 4}, "HeteroFL: alexnet cannot be narrowed; use "),
        ([1, 1, 0.5], {**CONVNET, "norm": "group"}, "west: convnet: norm = 'group' has four group"),
    ],
)
def test_a_budget_that_a_network_cannot_meet_is_refused(tmp_path, target, budgets, network, says):
    made = {**tables(tmp_path), "models": network or CONVNET}
    made["method"] = {"name": "heterofl", "budgets": budgets}
    recipe = tmp_path / "budgets.toml"
    recipe.write_text(toml_text(made))
    expect_refusal("run", recipe, "--out", target, says=says)
    assert not target.exists()


def test_a_network_for_a_client_that_does_not_exist_is_refused(recipe, target):
    changes = ("models.clients.noorth.hidden=[3]", "method.name=local")
    says = "models.clients: unknown client 'noorth'; did you mean 'north'?"
    expect_refusal("run", recipe, *changes, "--out", target, says=says)


class Opinion(Message):
    """What a peer says."""

    weights: Weights


class Own(State):
    """What a peer remembers."""

    weights: Weights


@dataclass(frozen=True)
class Gossip(Method):
    """Peers take the mean of what they hear."""

    scored: ClassVar[Place] = Place.CLIENTS

    def each_round(self) -> Sequence[Step]:
        return [self.speak, self.listen]

    def client_state(self, client: Node[Any]) -> Own:
        return Own(client.model.init(client.draw("weights")))

    @at_clients
    def speak(self, client: Node[Own], inbox: Inbox[Never]) -> Opinion:
        """Say the own weights."""
        return Opinion(client.state.weights)

    @at_clients
    def listen(self, client: Node[Own], inbox: Inbox[Opinion]) -> None:
        """Take the weights of the first peer."""
        if inbox:
            client.state = Own(next(iter(inbox.values())).weights)


def test_a_method_of_peers_is_refused_on_a_star(recipe, target, monkeypatch):
    monkeypatch.setitem(METHODS, "gossip", Gossip)
    made = tables(recipe.parent)
    recipe.write_text(toml_text({**made, "method": {"name": "gossip"}}))
    says = 'federation.topology = "star": Gossip speaks from client to client; use one of complete'
    expect_refusal("run", recipe, "federation.topology=star", "--out", target, says=says)
    assert not target.exists()
    assert fedstill("run", recipe, "--out", target, "federation.topology=ring").code == 0
    assert ",speak,east,peer,weights," in (target / "messages.csv").read_text()


def test_a_data_file_that_is_missing_cut_or_wrong_is_named(recipe, target):
    east = recipe.parent / "east.npz"
    whole = east.read_bytes()
    east.unlink()
    expect_refusal(
        "run", recipe, "--out", target, says=f"data: client east: there is nothing at {east}"
    )
    for damaged in (whole[: len(whole) // 2], b"not an archive", b""):
        east.write_bytes(damaged)
        expect_refusal("run", recipe, "--out", target, says=[str(east), "not a whole .npz file"])
    np.savez(east, images=np.zeros((3, 8, 8), np.uint8))
    expect_refusal("run", recipe, "--out", target, says=[str(east), "has no array train_labels"])
    assert not target.exists()


def test_a_named_set_without_its_files_says_which_and_where(recipe, tmp_path):
    recipe.write_text('[data]\nname = "mnist"\n[method]\nname = "fedavg"\n')
    expect_refusal("run", recipe, says="mnist is read from files, but data_dir is not set")
    out = ("--data-dir", tmp_path)
    expect_refusal("run", recipe, *out, says=f"mnist needs the file {tmp_path / 'mnist.npz'}")
    expect_refusal("data", recipe, *out, says=f"mnist needs the file {tmp_path / 'mnist.npz'}")


def test_a_class_that_no_client_holds_is_named(recipe, target):
    changes = [f"data.partition.{text}" for text in
               ("kind=classes-per-client", "clients=2", "classes=1")]  # fmt: skip
    says = ["data: no client holds class", "raise clients or classes, or set allow_missing_classes"]
    expect_refusal("run", recipe, *changes, "--out", target, says=says)
    assert not target.exists()


def test_a_folder_below_a_file_cannot_be_written(recipe, tmp_path):
    before = contents(recipe.parent)
    expect_refusal("run", recipe, "--out", recipe / "run",
            says=[f"cannot write to {recipe / 'run'}: Not a directory", "--out"])  # fmt: skip
    expect_refusal("run", recipe, "--out", recipe, says=f"cannot write to {recipe}: File exists")
    assert contents(recipe.parent) == before


def test_a_disk_that_is_full_loses_nothing_that_was_written(recipe, target, monkeypatch):
    real, calls = checkpoint.write_through, []

    def full_later(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) > 4:
            raise OSError(28, "No space left on device", str(path))
        real(path, data)

    monkeypatch.setattr(checkpoint, "write_through", full_later)
    expect_refusal("run", recipe, "--out", target,
            says=["cannot write the checkpoint of round 2", "No space left on device"])  # fmt: skip
    monkeypatch.setattr(checkpoint, "write_through", real)
    assert fedstill("resume", target).code == 0
    assert "from the end of round 1" in (target / "notes.csv").read_text()


def test_a_folder_with_a_run_is_not_run_into_again(recipe, target):
    assert fedstill("run", recipe, "--out", target).code == 0
    before = contents(target)
    says = f"{target} already holds a run; continue it with `fedstill resume {target}`"
    expect_refusal("run", recipe, "--out", target, says=says)
    assert contents(target) == before


def test_no_run_starts_where_one_of_several_folders_is_taken(recipe, target):
    assert fedstill("run", recipe, "--out", target / "seed-1").code == 0
    before = contents(target)
    expect_refusal(
        "run", recipe, "--out", target, "--seeds", 0, 1, says="seed-1 already holds a run"
    )
    assert contents(target) == before


def test_a_grid_does_not_begin_where_a_run_or_another_grid_is(recipe, target):
    """Its folder would say nothing more of what was there: it could not be resumed."""
    assert fedstill("run", recipe, "--out", target / "one").code == 0
    assert fedstill("run", recipe, "--seeds", 0, 1, "--out", target / "grid").code == 0
    before = contents(target)
    given = ("run", recipe, "--seeds", 2, 3, "--out")
    says = f"{target / 'one'} holds a single run, not a grid; give another --out"
    expect_refusal(*given, target / "one", says=says)
    says = (f"{target / 'grid'} already holds a grid; continue the grid with --continue",
            "also with more seeds or values")  # fmt: skip
    expect_refusal(*given, target / "grid", says=says)
    assert contents(target) == before
    assert fedstill(*given, target / "grid", "--continue").code == 0


@pytest.mark.parametrize("label", ["..", ".", "", "  ", "two\nlines", "x" * 201])
def test_a_label_that_cannot_name_a_folder_is_refused(recipe, target, label):
    """A recipe may come from someone else: `..` would lead out of the folder of its runs."""
    change = f"method.label={json.dumps(label)}"
    expect_refusal("run", recipe, change, "--out", target, says="method.label = ")
    assert not target.exists()


@pytest.mark.parametrize("more", [(), ("--continue",), ("--seeds", 0, 1)])
def test_a_folder_whose_name_is_too_long_is_refused(recipe, tmp_path, more):
    long = tmp_path / ("x" * 300)
    expect_refusal("run", recipe, "--out", long, *more, says="File name too long; give another")


def test_a_folder_with_other_things_is_left_alone(recipe, target):
    target.mkdir()
    (target / "environment.json").write_text("{}")
    (target / "thesis.txt").write_text("years of work")
    before = contents(target)
    expect_refusal("run", recipe, "--out", target, says="holds other things (thesis.txt)")
    assert contents(target) == before


def test_a_folder_without_a_run_is_not_resumed(tmp_path, recipe):
    expect_refusal(
        "resume", tmp_path / "nothing", says="holds no run: there is no recipe.toml in it"
    )
    fedstill("run", recipe, "--out", tmp_path / "runs", "--seeds", 0, 1)
    (tmp_path / "runs" / "grid.toml").unlink()  # as of an earlier fedstill
    says = f"resume one of {tmp_path / 'runs' / 'seed-0'}, {tmp_path / 'runs' / 'seed-1'}"
    expect_refusal("resume", tmp_path / "runs", says=says)


def test_a_folder_of_another_version_is_not_touched(recipe, target):
    fedstill("run", recipe, "--out", target)
    facts = json.loads((target / "environment.json").read_text())
    newer = {**facts, "folder_version": 99, "fedstill": "7.0"}
    (target / "environment.json").write_text(json.dumps(newer))
    # A newer version may know keys that this one does not: the version is what must be named.
    with (target / "recipe.toml").open("a") as file:
        file.write("\n[future]\nkey = 1\n")
    before = contents(target)
    says = ["run folder of version 99, written by fedstill 7.0", "install fedstill 7.0"]
    expect_refusal("resume", target, says=says)
    assert contents(target) == before
    (target / "environment.json").unlink()
    expect_refusal("resume", target, says="environment.json does not say which version")


def test_a_run_does_not_go_on_with_other_values(recipe, target):
    fedstill("run", recipe, "--out", target)
    before = contents(target)
    says = [
        f"{target} cannot be resumed with other values: ",
        "method.lr was 0.05, not 0.3",
        "new folder",
    ]
    expect_refusal("resume", target, "method.lr=0.3", says=says)
    expect_refusal("resume", target, "run.seed=4", says="run.seed was 0, not 4")
    expect_refusal("resume", target, "method.name=scaffold", says="method.name was 'fedavg'")
    expect_refusal(
        "resume", target, "federation.sample=2", says="federation.sample was unset, not 2"
    )
    expect_refusal("resume", target, "run.rounds=2", says="cannot end after run.rounds = 2")
    assert contents(target) == before


def test_a_grid_that_cannot_end_sooner_stays_as_it_was(recipe, target):
    fedstill("run", recipe, "--out", target, "--seeds", "0", "1")
    before = contents(target)
    expect_refusal("resume", target, "run.rounds=1", says="cannot end after run.rounds = 1")
    assert contents(target) == before


def test_a_recipe_changed_by_hand_does_not_fit_its_checkpoint(recipe, target):
    fedstill("run", recipe, "--out", target)
    path = target / "recipe.toml"
    path.write_text(path.read_text().replace("lr = 0.05", "lr = 0.3"))
    before = contents(target)
    expect_refusal("resume", target, says="belongs to another experiment")
    path.write_text(path.read_text() + "\nxyz\n")
    before = contents(target)
    expect_refusal("resume", target, says="is not a TOML file")
    assert contents(target) == before


def test_data_that_changed_do_not_fit_the_checkpoint(recipe, target):
    fedstill("run", recipe, "--out", target)
    write_client(recipe.parent / "east.npz", 77)
    expect_refusal("resume", target, says="belongs to another experiment")


def test_a_checkpoint_cut_in_the_middle_is_passed_over(recipe, target):
    fedstill("run", recipe, "--out", target)
    newest = target / "checkpoints" / "round-00003" / "server.safetensors"
    whole = newest.read_bytes()
    newest.write_bytes(whole[: len(whole) // 2])
    assert fedstill("resume", target).code == 0
    assert newest.read_bytes() == whole
    notes = (target / "notes.csv").read_text()
    assert "server.safetensors is not what was written" in notes
    for path in (target / "checkpoints").glob("*/server.safetensors"):
        path.write_bytes(b"")
    expect_refusal("resume", target, says="every checkpoint in")


def test_a_number_that_is_no_number_stops_the_run_and_names_the_sender(recipe, target):
    says = [
        "east sent Up with NaN or infinite values in weights.",
        "(FedAvg.update, round 1)",
        "Lower the learning rate",
        'federation.bad_messages = "leave_out"',
    ]
    expect_refusal("run", recipe, "method.lr=1e30", "--out", target, says=says)
    assert (target / "recipe.toml").exists()
    expect_refusal("resume", target, says="NaN or infinite values")


def test_messages_that_are_no_numbers_can_be_left_out(recipe, target):
    change = "federation.bad_messages=leave_out"
    assert fedstill("run", recipe, "method.lr=1e30", change, "--out", target).code == 0
    notes = (target / "notes.csv").read_text()
    assert notes.count("left out,east") == 3
    assert "FedAvg.aggregate heard nobody; the rest of the round is skipped" in notes


def test_a_failing_step_names_method_step_node_and_round_without_traceback(tmp_path, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the sky fell")

    monkeypatch.setattr(distribution_matching.Matching, "matched", broken)
    recipe = images_recipe(tmp_path, FEDDM)
    says = [
        "FedDM.synthesize failed on east in round 1: RuntimeError: the sky fell",
        "for the traceback, run the same command with fedstill --verbose",
    ]
    expect_refusal("run", recipe, "--out", tmp_path / "run", says=says)
    whole = fedstill("--verbose", "run", recipe, "--out", tmp_path / "again")
    assert "in broken" in whole.err and "for the traceback" not in whole.err


def test_what_nobody_expected_keeps_its_traceback(recipe, target, monkeypatch):
    def bug(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(session, "summarise", bug)
    with pytest.raises(KeyError, match="a bug"):
        fedstill("run", recipe, "--out", target)


def test_an_unfinished_run_is_not_compared(recipe, target):
    fedstill("run", recipe, "method.lr=1e30", "--out", target)
    expect_refusal("compare", target, says=f"the run is not finished; fedstill resume {target}")
    expect_refusal("compare", target / "nothing", says="there is no run folder")
    expect_refusal("compare", recipe, says="is a file, expected the folder of a run")


@pytest.mark.parametrize("seeds", ["", "x", "1 1", "-1", "0.5"])
def test_seeds_are_whole_numbers_each_once(recipe, target, seeds):
    expect_refusal(
        "run", recipe, "--out", target, "--seeds", seeds, says="write whole numbers from 0 on"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("fedm",), "unknown method 'fedm'; did you mean 'feddm'?"),
        (("feddm", "per_clas=3"), "method.per_clas: unknown key 'per_clas'; did you mean"),
        (("feddm", "--held", "0"), "held = 0: must be in [1, 10]"),
        (("feddm", "--held", "11"), "held = 11: must be in [1, 10]"),
        (("feddm", "--shape", "three"), "shape 'three': write it as channels x height x width"),
        (("feddm", "--model", "convnt"), "unknown model 'convnt'; did you mean 'convnet'?"),
    ],
)
def test_show_refuses_what_it_does_not_know(arguments, says):
    expect_refusal("show", *arguments, says=says)


def test_a_picture_that_cannot_be_written_is_named(recipe):
    refused_picture = recipe / "picture.png"
    said = fedstill("data", recipe, "--picture", refused_picture)
    assert said.code == 2
    assert f"cannot write the picture {refused_picture}" in said.err


def test_the_real_command_says_the_same(recipe, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fedstill", "run", recipe, "run.ronds=3", "method.lr=x",
               "--out", tmp_path / "run"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[0] == "fedstill: 2 faults"
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
    assert set(CLIENTS) == {path.stem for path in recipe.parent.glob("*.npz")}
