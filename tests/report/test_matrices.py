"""The accuracy matrix as numbers, table and heat map, redone by hand."""

import json

import numpy as np
import pytest

from fedstill.core.errors import BadValue
from fedstill.logbook import FolderLog, Number, read_rows, summarise, write_summary
from fedstill.report import comparison, grids, matrices
from fedstill.report.groups import reported_of

MATRIX = {"a": {"a": 0.9, "b": 0.5}, "b": {"a": 0.3, "b": 0.7}}
NETWORKS = {"a": "convnet", "b": "alexnet"}


def made(folder, seed=0, *, scores=MATRIX, more="", networks=NETWORKS, shift=0.0):
    """A finished run of one round in which clients' models were scored."""
    with FolderLog(folder) as log:
        for node, row in scores.items():
            for target, value in row.items():
                log.write(Number(1, "evaluate", node, "accuracy", target, value + shift))
    (folder / "recipe.toml").write_text(
        f'[run]\nseed = {seed}\n[method]\nname = "local"\n[data]\nname = "digits"\n{more}'
    )
    facts = {"networks": networks} if networks else {}
    write_summary(folder, summarise(read_rows(folder), seconds=2.0, data_digest="d1", **facts))
    return folder


def test_each_model_has_its_global_inter_and_local_accuracy_under_their_names(tmp_path):
    (group,) = comparison([made(tmp_path / "0")]).groups
    means = {score: {n: v.mean for n, v in each.items()} for score, each in group.by_client.items()}
    assert means["averaged_global_accuracy"] == pytest.approx({"a": 0.7, "b": 0.5})
    assert means["inter_accuracy"] == {"a": 0.5, "b": 0.3}
    assert means["averaged_local_accuracy"] == {"a": 0.9, "b": 0.7}


def test_the_table_has_a_row_for_each_model_and_the_mean_below(tmp_path):
    (found,) = matrices.crossed(comparison([made(tmp_path / "0")]))
    lines = found.as_markdown().splitlines()
    assert lines[2] == "| model of | a | b | global | inter | local |"
    assert lines[4] == "| a (convnet) | 90.00 | 50.00 | 70.00 | 50.00 | 90.00 |"
    assert lines[5] == "| b (alexnet) | 30.00 | 70.00 | 50.00 | 30.00 | 70.00 |"
    assert lines[6] == "| mean | 60.00 | 60.00 | 60.00 | 40.00 | 80.00 |"


def test_reported_scores_by_client_stand_beside_ours(tmp_path):
    more = (
        '[reported]\ninter_accuracy = 45.5\nsource = "Table 2"\n'
        "[reported.inter_accuracy_by_client]\na = 51.25\n"
    )
    found = comparison([made(tmp_path / "0", more=more)])
    (matrix,) = matrices.crossed(found)
    lines = matrix.as_markdown().splitlines()
    assert lines[2] == "| model of | a | b | global | inter | inter reported | local |"
    assert lines[4] == "| a (convnet) | 90.00 | 50.00 | 70.00 | 50.00 | 51.25 | 90.00 |"
    assert lines[5].split(" | ")[5] == "-"
    assert lines[6].split(" | ")[5] == "45.50"
    by_client = found.as_markdown(by_client=True).splitlines()
    assert "| method: score | a (convnet) | b (alexnet) | mean |" in by_client
    assert "| local: inter | 50.00 | 30.00 | 40.00 |" in by_client
    assert "| ↳ reported [1] | 51.25 | - | 45.50 |" in by_client
    assert "local: inter" not in found.as_markdown()


def test_reported_fractions_are_taken_as_they_are():
    table = {"unit": "fraction", "local_accuracy_by_client": {"a": 0.5}}
    assert reported_of({"reported": table}).by_client == {"averaged_local_accuracy": {"a": 0.5}}


def test_the_matrix_is_the_mean_over_seeds_and_json_holds_its_spread(tmp_path):
    folders = [made(tmp_path / "0", 0), made(tmp_path / "1", 1, shift=0.1)]
    (found,) = matrices.crossed(comparison(folders))
    cell = found.as_dict()["values"]["a"]["b"]
    assert cell == pytest.approx({"mean": 0.55, "spread": 0.1 / 2**0.5, "n": 2})
    assert json.loads(json.dumps(found.as_dict()))["test_sets"] == ["a", "b"]
    assert found.as_markdown().splitlines()[4].startswith("| a (convnet) | 95.00 | 55.00 | 75.00 ±")


def test_many_clients_are_shown_by_their_extremes(tmp_path):
    names = [f"c{number:02}" for number in range(57)]
    scores = {i: {j: 0.5 if i == j else 0.1 for j in names} for i in names}
    made(tmp_path / "0", scores=scores, networks={})
    found = comparison([tmp_path / "0"])
    (matrix,) = matrices.crossed(found)
    lines = matrix.as_markdown().splitlines()
    assert lines[2] == "| model of | lowest | highest | global | inter | local |"
    assert lines[4] == "| c00 | 10.00 (c01) | 50.00 (c00) | 10.70 | 10.00 | 50.00 |"
    assert len(lines[4]) < 100
    assert "| method: score | lowest | highest | mean |" in found.as_markdown(by_client=True)


def test_models_scored_on_their_own_data_only_have_a_diagonal(tmp_path):
    made(tmp_path / "0", scores={"a": {"a": 0.9}, "b": {"b": 0.7}})
    (found,) = matrices.crossed(comparison([tmp_path / "0"]))
    lines = found.as_markdown().splitlines()
    assert lines[2] == "| model of | a | b | local |"
    assert lines[4] == "| a (convnet) | 90.00 | - | 90.00 |"


def test_a_common_model_has_no_matrix(tmp_path):
    made(tmp_path / "0", scores={"server": {"a": 0.5, "b": 0.7}})
    with pytest.raises(BadValue, match=r"no client's model was scored in these runs \(local\)"):
        matrices.crossed(comparison([tmp_path / "0"]))


@pytest.mark.parametrize("clients", [5, 57])
def test_a_heat_map_has_numbers_for_few_and_only_colours_for_many(tmp_path, monkeypatch, clients):
    pytest.importorskip("matplotlib")
    written = []
    monkeypatch.setattr(grids.canvas, "write_numbers", lambda *_: written.append(True))
    names = [f"client-{number:02}" for number in range(clients)]
    networks = {name: "convnet" for name in names}
    path = tmp_path / "m.png"
    grids.accuracy_matrix(np.eye(clients), names, path, networks=networks, detail="local")
    assert path.exists() and bool(written) == (clients <= grids.NUMBERS_UP_TO)


def test_several_settings_are_drawn_to_a_file_each(tmp_path):
    pytest.importorskip("matplotlib")
    folders = [made(tmp_path / "0"), made(tmp_path / "1", more="[models]\nwidth = 2\n")]
    drawn = matrices.draw(matrices.crossed(comparison(folders)), tmp_path / "m.png")
    assert len({*drawn}) == 2 and all(path.exists() for path in drawn)
    (single,) = matrices.draw(matrices.crossed(comparison(folders[:1])), tmp_path / "one.png")
    assert single == tmp_path / "one.png"
