"""Tables for papers: intervals, paired tests, CSV and LaTeX, redone by hand or by scipy."""

import csv
import io
import shutil
import subprocess
import warnings

import pytest
from scipy import stats

from fedstill.core.errors import BadValue
from fedstill.logbook import FolderLog, Number, read_rows, read_run, summarise, write_summary
from fedstill.report import compare, plots, student
from fedstill.report.amounts import human_time
from fedstill.report.latex import escaped
from small_recipes import fedstill


def run(
    folder, seed, value, *, method="fedavg", label=None, more="", held_out=0, targets=("a", "b")
):
    folder.mkdir(parents=True)
    with FolderLog(folder) as log:
        for target in targets:
            log.write(Number(1, "evaluate", "server", "accuracy", target, value))
            log.write(Number(1, "evaluate", "server", "loss", target, 1 - value))
    (folder / "recipe.toml").write_text(
        f'[run]\nseed = {seed}\nrounds = 1\n[method]\nname = "{method}"\n'
        f'label = "{label or method}"\n[data]\nname = "digits"\n{more}'
    )
    facts = {"seconds": 1.0, "data_digest": "d1", "held_out": held_out}
    write_summary(folder, summarise(read_rows(folder), **facts))
    return read_run(folder)


@pytest.fixture
def runs(tmp_path):
    scores = {"fedavg": [0.50, 0.60, 0.70], "feddm": [0.56, 0.63, 0.78]}
    return [
        run(tmp_path / f"{method}-{seed}", seed, value, method=method)
        for method, values in scores.items()
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 30])
def test_students_t_is_that_of_scipy(freedom):
    assert student.quantile(0.975, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)
    for t in (0.0, 0.3, 1.0, 4.0, 25.0):
        assert student.cumulative(t, freedom) == pytest.approx(stats.t.cdf(t, freedom), abs=1e-12)


def test_the_interval_of_three_seeds_is_wider_than_their_deviation(runs):
    group = compare(runs).groups[0]
    found = group.scores["average_accuracy"]
    assert found.spread == pytest.approx(0.1)
    assert found.half_width == pytest.approx(4.302653 * 0.1 / 3**0.5)
    text = compare(runs, spread="interval").as_markdown()
    assert "60.00 ± 24.84" in text and "95 % confidence interval" in text


def test_rows_are_tested_against_another_seed_by_seed(runs):
    found = compare(runs, against="fedavg")
    test = found.as_dict()["sections"][0]["groups"][1]["paired"]
    by_hand = stats.ttest_rel([0.56, 0.63, 0.78], [0.50, 0.60, 0.70])
    assert test["difference"] == pytest.approx((0.06 + 0.03 + 0.08) / 3)
    assert test["p"] == pytest.approx(by_hand.pvalue)
    low, high = by_hand.confidence_interval()
    assert (test["low"], test["high"]) == pytest.approx((low, high))
    assert "+5.67 [-0.58, 11.92]" in found.as_markdown()
    with pytest.raises(BadValue, match="did you mean 'fedavg'"):
        compare(runs, against="fedavgg")


def test_equal_scores_are_no_difference_and_one_seed_is_no_test(runs):
    assert student.paired("x", [0.5, 0.6], [0.5, 0.6]).p == 1
    assert student.paired("x", [0.5], [0.4]) is None


def test_csv_has_every_number_unrounded(runs):
    rows = list(csv.DictReader(io.StringIO(compare(runs, against="fedavg").as_csv())))
    assert [row["method"] for row in rows] == ["fedavg", "feddm"]
    assert float(rows[0]["average"]) == pytest.approx(0.6)
    assert float(rows[0]["average high"]) == pytest.approx(0.6 + 4.302653 * 0.1 / 3**0.5)
    assert rows[0]["p"] == "" and float(rows[1]["p"]) == pytest.approx(0.0596, abs=1e-3)
    assert rows[0]["scored on"] == "test" and rows[0]["seeds"] == "0 1 2"


def test_test_sets_that_are_named_like_other_columns_of_the_csv_take_none_of_their_places(tmp_path):
    named = ("method", "seconds", "average", "x", "x low")
    found = [run(tmp_path / str(seed), seed, 0.5 + seed / 10, targets=named) for seed in (0, 1)]
    text = compare(found).as_csv()
    header = text.splitlines()[0].split(",")
    assert len(set(header)) == len(header)
    (row,) = csv.DictReader(io.StringIO(text))
    assert (row["method"], row["seeds"], row["seconds"]) == ("fedavg", "0 1", "1.0")
    for name in ("test set method", "test set seconds", "test set average", "x", "test set x low"):
        assert float(row[name]) == pytest.approx(0.55)
    assert float(row["low of test set x"]) < 0.55 < float(row["x high"])


def test_latex_has_the_best_of_a_column_in_bold_and_the_papers_row_below(tmp_path):
    reported = '[reported]\naverage = 71.5\nsource = "A & B, 2023"\n'
    runs = [
        run(tmp_path / "0", 0, 0.5, label="fed_avg 100%"),
        run(tmp_path / "1", 0, 0.7, method="feddm", more=reported),
    ]
    page = compare(runs).as_latex()
    assert r"fedavg fed\_avg 100\% & 50.00" in page
    assert r"feddm & \textbf{70.00}" in page
    assert r"\textit{reported [1]} & \textit{71.50}" in page and r"A \& B, 2023" in page
    assert page.count(r"\toprule") == page.count(r"\bottomrule") == 1
    lowest = compare(runs, "loss").as_latex()
    assert r"\textbf{0.3000}" in lowest and r"\textbf{0.5000}" not in lowest


def test_characters_that_latex_would_read_are_shown():
    assert escaped("50 % of a_b & {c} ± 1") == r"50 \% of a\_b \& \{c\} $\pm$ 1"
    assert escaped("\\^~") == r"\textbackslash{}\textasciicircum{}\textasciitilde{}"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex on this machine")
def test_a_table_and_a_figure_compile_together(tmp_path, runs):
    """A page with both columns of a paper; the figure stands in it as vectors."""
    table = compare(runs, against="fedavg").as_latex()
    figure = plots.curve_figure(runs, "round")
    figure.savefig(tmp_path / "curves.pdf")
    (tmp_path / "page.tex").write_text(
        "\\documentclass[twocolumn]{article}\\usepackage{booktabs,graphicx}\n"
        "\\pdfcompresslevel=0 \\pdfobjcompresslevel=0\n"
        f"\\begin{{document}}\n{table}\\begin{{figure}}\n"
        "\\includegraphics[width=\\columnwidth]{curves.pdf}\\caption{Accuracy by round.}\n"
        "\\end{figure}\\end{document}\n"
    )
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    written = (tmp_path / "page.pdf").read_bytes()
    assert b"/PTEX.FileName (./curves.pdf)" in written and b"/Subtype /Form" in written
    assert b"/Subtype /Image" not in written


def test_scores_on_held_out_examples_are_called_so(tmp_path):
    more = "hold_out = 0.2\n"
    runs = [run(tmp_path / str(s), s, 0.5, more=more, held_out=30) for s in (0, 1)]
    found = compare(runs)
    assert len(found.groups) == 1 and found.groups[0].seeds == ("0", "1")
    page = found.as_markdown()
    assert "held-out scores" in page and "all clients share one held-out set" in page
    assert "held-out" in runs[0].summary["best_average_accuracy_note"]
    earlier = dict(runs[0].summary)
    assert earlier.pop("held_out") == 30


def test_rows_are_named_by_what_differs(tmp_path):
    runs = [
        run(tmp_path / str(lr), 0, 0.5, more=f"[method.inner]\nlr = {lr}\n") for lr in (0.1, 0.2)
    ]
    assert [g.name for g in compare(runs).groups] == [
        "fedavg (inner.lr=0.1)",
        "fedavg (inner.lr=0.2)",
    ]


def lines(figure):
    return figure.axes[0].get_lines()


def test_a_single_round_is_one_tick_in_the_middle(runs):
    axes = plots.curve_figure(runs, "round", 1).axes[0]
    assert list(axes.get_xticks()) == [1] and axes.get_xlim() == (0.5, 1.5)
    assert axes.figure.get_size_inches().tolist() == [3.3, 2.2]


def test_where_nothing_is_sent_no_axis_of_bytes_is_invented(runs):
    axes = plots.curve_figure(runs, "bytes").axes[0]
    assert axes.get_xlabel() == "nothing is sent" and len(axes.get_xticks()) == 0


def test_curves_by_time_add_up_the_rounds(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with FolderLog(folder) as log:
        for round in (1, 2, 3):
            log.write(Number(round, "evaluate", "server", "accuracy", "a", 0.1 * round))
            log.write(Number(round, "round", "", "seconds", "", 10.0 * round))
    (folder / "recipe.toml").write_text('[method]\nname = "fedavg"\n[data]\nname = "digits"\n')
    write_summary(folder, summarise(read_rows(folder)))
    figure = plots.curve_figure([read_run(folder)], "time")
    assert list(lines(figure)[0].get_xdata()) == [10, 30, 60]
    assert figure.axes[0].get_xlabel() == "measured time"


@pytest.mark.parametrize("suffix", ["pdf", "svg"])
def test_figures_for_papers_are_drawn_from_the_command_line(runs, tmp_path, suffix):
    path = tmp_path / f"curves.{suffix}"
    folders = [run.folder for run in runs]
    said = fedstill("curves", *folders, "--by", "round", "--columns", 2, "--picture", path)
    assert said.code == 0, said.err
    written = path.read_bytes()
    assert written.startswith(b"%PDF") if suffix == "pdf" else b">feddm</text>" in written


@pytest.mark.parametrize("columns", [1, 2])
def test_a_legend_of_long_names_fits_into_the_figure_and_leaves_room_for_the_curves(
    tmp_path, columns
):
    made = [
        run(tmp_path / name, 0, 0.5, method="fedprox", label=f"fedprox {name}")
        for name in (
            f"of width {width}, rate {rate}" for width in "246" for rate in ("0.1", "0.01")
        )
    ]
    with warnings.catch_warnings(action="error"):  # a layout that was given up
        figure = plots.curve_figure(made, "round", columns)
        figure.draw_without_rendering()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 6
    assert legend.get_window_extent().width <= figure.bbox.width
    shown = figure.axes[0].get_window_extent()
    assert shown.width > 0.7 * figure.bbox.width and shown.height > 0.35 * figure.bbox.height


@pytest.mark.parametrize("high", [1.5, 2, 4, 6, 20, 5000])
def test_an_axis_of_amounts_has_at_least_two_ticks_and_few(high):
    axes = plots.canvas.figure(3.3, 2.2).add_subplot()
    axes.set_xscale("log")
    axes.set_xlim(14_000, 14_000 * high)
    plots._amount_ticks(axes, str)
    seen = [tick for tick in axes.get_xticks() if 14_000 <= tick <= 14_000 * high]
    assert 2 <= len(seen) <= 6


def test_one_test_set_for_all_has_no_dots_for_each_client(runs, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "_dots", lambda *given: drawn.append(given))
    plots.comparison_bars(compare(runs), tmp_path / "bars.png")
    assert not drawn


def test_times_are_told_in_the_largest_fitting_unit():
    told = [human_time(seconds) for seconds in (0.5, 90, 7200, 172_800)]
    assert told == ["0.5 s", "1.5 min", "2 h", "2 d"]


def test_unfinished_runs_are_left_out_with_a_note_and_a_grid_keeps_its_order(tmp_path):
    run(tmp_path / "zeta", 0, 0.5, method="fedprox")
    run(tmp_path / "alpha", 0, 0.5)
    (run(tmp_path / "broken", 1, 0.5).folder / "summary.json").unlink()
    (tmp_path / "grid.toml").write_text('[grid]\ncells = ["zeta", "alpha", "broken"]\n')
    said = fedstill("compare", tmp_path, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(said.out)))
    assert [row["method"] for row in rows] == ["fedprox", "fedavg"]
    assert "1 of 3 runs have not finished and are left out" in said.err
