"""Pictures are written, with a size one can look at."""

import sys

import numpy as np
import pytest

from fedstill.core.errors import BadValue, RunFolderError
from fedstill.logbook import (
    FolderLog,
    Number,
    Traffic,
    read_rows,
    read_run,
    summarise,
    write_summary,
)
from fedstill.report import compare, plots

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")


def made(folder, method, seed, *, sends=True, more=""):
    with FolderLog(folder) as log:
        for round in range(1, 4):
            for target in ("a", "b"):
                value = 0.2 * round + 0.01 * seed
                log.write(Number(round, "evaluate", "server", "accuracy", target, value))
            if sends:
                log.write(Traffic(round, "update", "a", "up", "weights", 100, 400, 1))
    (folder / "recipe.toml").write_text(
        f'[run]\nseed = {seed}\n[method]\nname = "{method}"\n[data]\nname = "d"\n{more}'
    )
    write_summary(folder, summarise(read_rows(folder)))
    return read_run(folder)


@pytest.fixture
def runs(tmp_path):
    more = '[reported]\naverage = 50.0\nsource = "Table 1"\n'
    return [
        made(tmp_path / "r0", "fedavg", 0, more=more),
        made(tmp_path / "r1", "fedavg", 1, more=more),
        made(tmp_path / "r2", "local", 0, sends=False),
    ]


def size_of(path):
    with Image.open(path) as picture:
        assert len(set(picture.convert("L").resize((64, 64)).tobytes())) > 3, "an empty picture"
        return picture.size


def test_curves_by_round_and_by_bytes_are_drawn(runs, tmp_path):
    for draw in (plots.accuracy_by_round, plots.accuracy_by_bytes):
        assert size_of(draw(runs, tmp_path / "pictures" / "curve.png")) == (1050, 630)
    assert size_of(plots.accuracy_by_floats(runs, tmp_path / "floats.png")) == (1740, 660)


@pytest.mark.parametrize("count, size", [(1, (870, 465)), (3, (2130, 465)), (5, (2130, 930))])
def test_logged_numbers_have_a_panel_each(tmp_path, count, size):
    names = [f"term_{number}" for number in range(count)]
    made(tmp_path / "run", "dfrd", 0)
    with FolderLog(tmp_path / "run") as log:
        for round in range(1, 40):
            for name in names:
                log.write(Number(round, "aggregate", "server", name, "", 1 / round))
    found = [read_run(tmp_path / "run"), made(tmp_path / "other", "fedavg", 0)]
    assert size_of(plots.logged_by_round(found, names, tmp_path / "logged.png")) == size


def test_bars_grow_with_the_number_of_methods(runs, tmp_path):
    few = size_of(plots.comparison_bars(compare(runs[:2]), tmp_path / "few.png"))
    more = size_of(plots.comparison_bars(compare(runs), tmp_path / "more.png"))
    assert few[0] == more[0] and few[1] < more[1] < 1500


@pytest.mark.parametrize("clients, classes", [(1, 2), (5, 10), (100, 10), (5, 100)])
def test_a_partition_is_drawn_for_few_and_many(tmp_path, clients, classes):
    counts = np.arange(clients * classes).reshape(clients, classes) % 97
    names = [f"client-{number}" for number in range(clients)]
    width, height = size_of(plots.partition(counts, names, tmp_path / "p.png"))
    assert 500 < width < 3000 and 200 < height < 2000


def test_of_thousands_of_clients_the_first_are_drawn(tmp_path):
    names = [f"client-{number}" for number in range(5000)]
    width, height = size_of(plots.partition(np.ones((5000, 3)), names, tmp_path / "p.png"))
    assert width < 3000 and height < 2000


@pytest.mark.parametrize("clients", [2, 5, 30])
def test_an_accuracy_matrix_may_have_holes(tmp_path, clients):
    matrix = np.linspace(0, 1, clients * clients).reshape(clients, clients)
    matrix[0, -1] = np.nan
    names = [f"client-{number}" for number in range(clients)]
    width, height = size_of(plots.accuracy_matrix(matrix, names, tmp_path / "m.png"))
    assert 600 < width < 2500 and 300 < height < 2500


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_drawn_from_floats_or_bytes_and_may_be_absent(tmp_path, channels):
    floats = np.random.default_rng(0).normal(size=(3, 4, channels, 8, 8))
    floats[1, 2:] = np.nan
    labels = ["zero", "one", "two"]
    path = plots.image_grid(floats, labels, tmp_path / "f.png")
    assert size_of(path)[0] > 400
    bytes_ = np.arange(3 * 4 * channels * 64, dtype=np.uint8).reshape(3, 4, channels, 8, 8)
    assert size_of(plots.image_grid(bytes_, labels, tmp_path / "u.png"))[0] > 400


def test_mean_and_std_undo_the_normalisation():
    from fedstill.report.grids import visible

    pixels = np.full((1, 1, 3, 2, 2), 2.0)
    shown = visible(pixels, mean=(0.1, 0.2, 0.3), std=(0.1, 0.2, 0.5))
    np.testing.assert_allclose(shown[0, 0, 0, 0], [2 * 0.1 + 0.1, 2 * 0.2 + 0.2, 1.0])


def test_shapes_that_do_not_fit_are_refused_with_both_numbers(tmp_path):
    with pytest.raises(BadValue, match=r"\[2, 3\] does not fit 3 names of rows"):
        plots.partition(np.ones((2, 3)), ["a", "b", "c"], tmp_path / "x.png")
    with pytest.raises(BadValue, match="channel"):
        plots.image_grid(np.ones((2, 3, 8, 8)), ["a", "b"], tmp_path / "x.png")
    with pytest.raises(BadValue, match="2 rows of images, but 1 labels"):
        plots.image_grid(np.ones((2, 3, 1, 8, 8)), ["a"], tmp_path / "x.png")


def test_a_run_without_scores_has_nothing_to_draw(tmp_path):
    with FolderLog(tmp_path / "r"):
        pass
    run = read_run(tmp_path / "r", unfinished=True)
    with pytest.raises(BadValue, match="nothing to draw"):
        plots.accuracy_by_round([run], tmp_path / "x.png")


def test_a_picture_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"file.*x\.png"):
        plots.accuracy_matrix([[0.5]], ["a"], tmp_path / "file" / "x.png")


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'fedstill\[report\]'"):
        plots.accuracy_matrix([[0.5]], ["a"], tmp_path / "x.png")
