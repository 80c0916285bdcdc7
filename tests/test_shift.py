"""Distances between clients' data and the map of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fedstill import recipe as config
from fedstill.commands import shift
from fedstill.commands.cli import app
from fedstill.recipe.toml import toml_text

TABLES = {
    "data": {"name": "digits5", "virtual": {"per_class": 2, "warm_up_steps": 2, "real_batch": 8}},
    "models": {"name": "convnet", "width": 4},
    "method": {"name": "fedavg"},
}


def test_the_wasserstein_distance_of_a_moved_cloud_is_the_way_it_moved() -> None:
    cloud = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    moved = cloud[torch.randperm(20, generator=torch.Generator().manual_seed(1))] + torch.tensor(
        [3.0, 0.0, 4.0]
    )
    assert shift.wasserstein(cloud, moved) == pytest.approx(5.0, abs=1e-6)
    assert shift.wasserstein(cloud, cloud.flip(0)) == pytest.approx(0.0, abs=1e-6)


def test_every_pair_of_clients_has_both_distances_before_and_after(tmp_path: Path) -> None:
    tables = {**TABLES, "run": {"cache_dir": str(tmp_path)}}
    (recipe,) = config.checked(tables)
    real, distilled = shift.measured(recipe, most=12)
    rows = shift.pairs(real, distilled)
    assert len(rows) == 5 * 4 // 2
    assert all(len(cloud.labels) == 12 for cloud in (*real, *distilled))
    assert set(rows[0]) == {
        "clients", "mmd real", "wasserstein real", "mmd distilled", "wasserstein distilled",
    }  # fmt: skip
    by_name = {row["clients"]: row for row in rows}
    assert by_name["plain - inverted"]["mmd real"] > by_name["plain - cluttered"]["mmd real"]
    places = shift.tsne_map(real, 0)
    assert places.shape == (5 * 12, 2)
    assert np.array_equal(places, shift.tsne_map(real, 0))


def test_without_virtual_data_the_examples_alone_are_measured(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(toml_text({**TABLES, "data": {"name": "digits5"}}))
    drawn = [tmp_path / "map.png", tmp_path / "levels.png"]
    words = ["shift", str(recipe), "--most", "8", "--picture", str(drawn[0]), "--format", "json",
             "--histogram", str(drawn[1]), "--into", str(tmp_path / "runs")]  # fmt: skip
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert len(rows) == 10 and set(rows[0]) == {"clients", "mmd real", "wasserstein real"}
    written = json.loads((tmp_path / "runs" / "shift.json").read_text())
    assert [each["title"] for each in written["maps"]] == ["Clients' examples"]
    assert all(path.stat().st_size for path in drawn)


def test_people_see_as_many_digits_in_each_row() -> None:
    rows = [{"clients": "a - b", "mmd real": 0.09, "wasserstein real": 2.0}]
    assert shift.for_people(rows) == [
        {"clients": "a - b", "mmd real": "0.0900", "wasserstein real": "2.000"}
    ]


def test_the_command_prints_numbers_and_draws_the_map(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(toml_text({**TABLES, "run": {"cache_dir": str(tmp_path / "cache")}}))
    picture = tmp_path / "map.png"
    words = ["shift", str(recipe), "--most", "8", "--picture", str(picture), "--format", "json",
             "--into", str(tmp_path / "runs")]  # fmt: skip
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)) == 10
    with Image.open(picture) as drawn:
        assert drawn.size[0] > 800
    written = json.loads((tmp_path / "runs" / "shift.json").read_text())
    assert written["pairs"] == json.loads(result.stdout)
    assert [len(each["points"]) for each in written["maps"]] == [5 * 8, 5 * 8]


def test_brightness_is_counted_before_normalisation_and_by_channel() -> None:
    from fedstill.core.data import Pool

    bytes = torch.tensor([0, 0, 255, 255], dtype=torch.uint8).reshape(1, 1, 2, 2).repeat(3, 2, 1, 1)
    bytes[:, 1] = 128  # the second channel is half bright everywhere
    data = Pool(
        bytes, torch.zeros(3, dtype=torch.int64), torch.tensor(0.3), torch.tensor(0.1)
    ).all()
    shares = shift.levels(data.take(torch.arange(3)).x, data)
    assert shares.shape == (2, shift.LEVELS)
    assert shares[0, [0, -1]].tolist() == [0.5, 0.5]
    assert shares[1, shift.LEVELS // 2].item() == 1.0


def test_a_run_shows_the_clients_as_its_trained_network_sees_them(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    tables = {**TABLES, "run": {"cache_dir": str(tmp_path / "cache"), "rounds": 1}}
    recipe.write_text(toml_text(tables))
    folder, drawn = tmp_path / "runs", tmp_path / "levels.png"
    command = CliRunner()
    begun = command.invoke(app, ["run", str(recipe), "--out", str(folder)])
    assert begun.exit_code == 0, begun.output
    words = ["shift", str(recipe), "--most", "8", "--format", "json"]
    before = command.invoke(app, words)
    (run,) = folder.glob("**/summary.json")
    after = command.invoke(app, [*words, "--run", str(run.parent), "--histogram", str(drawn)])
    assert after.exit_code == 0, after.output
    assert json.loads(after.stdout) != json.loads(before.stdout)
    with Image.open(drawn) as picture:
        assert picture.size[1] > 5 * 150  # a row for each of five clients
    other = command.invoke(app, [*words, "models.width=5", "--run", str(run.parent)])
    assert other.exit_code != 0
    assert "holds no weights for" in str(other.exception)
