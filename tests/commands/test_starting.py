"""fedstill init: recipes from options, from questions, and those that come with us."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedstill import recipe as config
from fedstill.commands import starting
from small_recipes import fedstill, write_client

ROOT = Path(__file__).parents[2]


def test_a_recipe_from_options_is_checked_and_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = fedstill(
        "init",
        "--method",
        "fedavg",
        "--clients",
        3,
        "--alpha",
        0.5,
        "--rounds",
        2,
        "--model",
        "mlp",
    )
    assert said.code == 0 and "next: fedstill run recipe.toml --quick" in said.out, said.err
    tables = tomllib.loads((tmp_path / "recipe.toml").read_text())
    assert tables["data"]["partition"] == {"kind": "dirichlet", "clients": 3, "alpha": 0.5}
    done = fedstill("run", "recipe.toml", "--quick", "--quiet")
    assert done.code == 0, done.err
    assert (tmp_path / "runs" / "first-quick" / "summary.json").exists()


def test_without_options_or_a_terminal_there_are_two_methods_on_embedded_data(tmp_path):
    assert fedstill("init", tmp_path / "mine.toml").code == 0
    recipes = config.checked(config.read_recipe(tmp_path / "mine.toml"))
    assert [recipe.label for recipe in recipes] == ["fedavg", "feddm"]
    assert recipes[0].run.name == "mine" and recipes[0].data.name == "digits5"
    text = (tmp_path / "mine.toml").read_text()
    assert max(map(len, text.splitlines())) <= 80
    assert '\n\n[[method]]\nname = "feddm"\n# by default: per_class = 10,' in text
    assert "#   fedstill compare runs/mine             what came of it\n" in text


def test_a_folder_of_ones_own_becomes_the_clients_that_lie_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_client(Path("east.npz").absolute(), 0)
    for number, name in enumerate(("north", "south/train", "south/test")):
        for kind in ("0", "1", "2"):
            place = Path("photos", name, kind)
            place.mkdir(parents=True)
            for image in range(5):
                pixels = np.full((8 + number, 8), 80 * int(kind) + image, np.uint8)
                Image.fromarray(pixels).save(place / f"{image}.png")
    Path("east.npz").rename("photos/east.npz")
    Path("photos/notes").mkdir()
    said = fedstill("init", "--data", "photos", "--method", "fedavg", "--rounds", 1)
    assert said.code == 0 and "found in photos: east, north, south\n" in said.out, said.err
    data = tomllib.loads(Path("recipe.toml").read_text())["data"]
    assert (data["name"], data["data_dir"], data["size"]) == ("own", "photos", 32)
    assert data["options"]["clients"] == {"east": "east.npz", "north": "north", "south": "south"}
    done = fedstill("run", "recipe.toml", "--quick", "--quiet", "models.width=4", "data.channels=3")
    assert done.code == 0, done.err


def test_one_client_is_said_to_be_split_by_an_option_and_vectors_get_a_network_for_them(tmp_path):
    rows = np.eye(12, 4, dtype=np.float32)
    np.savez(tmp_path / "ward.npz", train_features=rows, train_labels=np.arange(12) % 2)
    said = fedstill("init", tmp_path / "one.toml", "--data", tmp_path / "ward.npz")
    assert said.code == 0 and "ward alone; --clients splits what it holds" in said.out
    said = fedstill("init", tmp_path / "two.toml", "--data", tmp_path / "ward.npz", "--clients", 2)
    assert said.code == 0 and "alone" not in said.out
    tables = tomllib.loads((tmp_path / "two.toml").read_text())
    assert tables["models"]["name"] == "mlp" and tables["data"]["partition"]["clients"] == 2


def test_a_recipe_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "recipe.toml").write_text("mine")
    said = fedstill("init", tmp_path / "recipe.toml")
    assert said.code == 2 and "is there already" in said.err
    assert (tmp_path / "recipe.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--method", "fedavgg"), "did you mean 'fedavg'"),
        (("--data", "digit5"), "did you mean 'digits5'"),
        (("--data", ""), "unknown data set ''"),
        (("--data", "photo"), "usps; nor is there a folder of that name"),
        (("--data", "own"), "name the folder instead, e.g. --data photos"),
        (("--data", str(ROOT / "constraints")), "there is no client at"),
        (("--alpha", 0.5), "say how many with --clients"),
        (("--from", "feddm/cifar10-dir10-05"), "did you mean 'feddm/cifar10-dir10-0.5'"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(tmp_path, options, says):
    said = fedstill("init", tmp_path / "recipe.toml", *options)
    assert said.code == 2 and says in said.err
    assert not (tmp_path / "recipe.toml").exists()


def test_questions_give_the_same_values_as_options(monkeypatch):
    answers = iter(["fedavg, desa", "digits5", 4, 0.1, 7])
    monkeypatch.setattr(starting.typer, "prompt", lambda *_, **__: next(answers))
    assert starting.asked() == {
        "method": ["fedavg", "desa"], "data": "digits5", "clients": 4, "alpha": 0.1,
        "model": None, "rounds": 7,
    }  # fmt: skip


def test_every_recipe_of_the_repository_can_be_started_from(tmp_path):
    names = set(starting.recipe_names())
    there = {str(p.relative_to(ROOT / "recipes").with_suffix(""))
             for p in (ROOT / "recipes").rglob("*.toml")}  # fmt: skip
    assert there <= names
    name = "feddm/cifar10-dir10-0.5"
    assert fedstill("init", tmp_path / "mine.toml", "--from", name).code == 0
    assert (tmp_path / "mine.toml").read_text() == (ROOT / "recipes" / f"{name}.toml").read_text()


def test_verbose_shows_notes_and_where_a_refusal_came_from(tmp_path):
    said = fedstill("--verbose", "run", tmp_path / "none.toml")
    assert said.code == 2 and "Traceback" in said.err and "no recipe at" in said.err
    assert "Traceback" not in fedstill("run", tmp_path / "none.toml").err
    fedstill("init", tmp_path / "r.toml", "--method", "fedavg", "--model", "mlp")
    out = ("--quick", "--out", tmp_path / "run")
    assert "note: engine: " in fedstill("--verbose", "run", tmp_path / "r.toml", *out).err


def test_a_quiet_command_prints_no_result(tmp_path):
    fedstill("init", tmp_path / "r.toml", "--method", "fedavg", "--model", "mlp")
    said = fedstill("--quiet", "run", tmp_path / "r.toml", "--quick", "--out", tmp_path / "run")
    assert (said.code, said.out, said.err) == (0, "", "")


def test_shells_can_complete_commands():
    assert "--show-completion" in fedstill("--help").out


def test_the_package_takes_any_newer_torch_and_the_tests_a_cpu_build():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>=2.9" in project["dependencies"]
    assert "torch>=2.9,<2.14" in (ROOT / "constraints" / "cpu.txt").read_text()
    assert "constraints/cpu.txt" in (ROOT / "Makefile").read_text()
