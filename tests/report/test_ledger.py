"""A ledger sets what papers print beside what was measured, and says what follows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedstill.core.errors import FedstillError
from fedstill.report import ledger_page
from fedstill.report.ledger import (
    Claim,
    Entry,
    Ledger,
    Row,
    entries_text,
    judged_of,
    ledger_of,
)
from fedstill.report.ledger_gaps import gaps

PAPER = """
paper = "Paper"
title = "Somebody, 2020"

[[table]]
name = "table 1"
column = "digits"
data = "digits5"
recipes = ["a/digits", "b/digits"]
score = "average_accuracy"
[table.cells]
fedavg = [90.0, 0.5]
fedprox = 80
"far+away" = [50.0, 6.0]

[[table]]
name = "table 2"
column = "domains"
data = "digits5"
recipes = ["a/digits"]
score = "accuracy_by_client"
[table.cells]
fedavg = {plain = 91.0, font = [60.0]}

[[reading]]
label = "fedprox"
state = "found"
why = "another rate"

[[reading]]
target = "font"
state = "other data"
why = "another font"

[[claim]]
says = "FedAvg is above FedProx"
recipe = "a/digits"
better = "fedavg"
worse = "fedprox"
score = "average_accuracy"
by = 10.0
"""


def run(label: str, seed: int, score: float, **more: object) -> Entry:
    return Entry("a/digits", label, seed, {"average_accuracy": score, **more})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "paper.toml").write_text(PAPER)
    return tmp_path


def row(ledger: Ledger, label: str, target: str | None = None) -> Row:
    (found,) = [r for r in ledger.rows if (r.cell.label, r.cell.target) == (label, target)]
    return found


def test_a_cell_has_the_mean_and_spread_of_its_runs_and_their_difference(folder: Path) -> None:
    found = row(ledger_of(folder, [run("fedavg", 0, 0.90), run("fedavg", 1, 0.92)]), "fedavg")
    assert found.ours.mean == pytest.approx(91.0)
    assert found.ours.spread == pytest.approx(2**0.5)
    assert found.difference == pytest.approx(1.0)
    assert (found.seeds, found.verdict) == ((0, 1), "within")


@pytest.mark.parametrize(("score", "verdict"), [(0.5601, "open"), (0.5599, "within")])
def test_a_spread_above_two_points_is_the_measure(folder: Path, score: float, verdict: str) -> None:
    assert row(ledger_of(folder, [run("far+away", 0, score)]), "far+away").verdict == verdict


@pytest.mark.parametrize(("score", "verdict"), [(0.8201, "found"), (0.8199, "within")])
def test_without_a_spread_two_points_are(folder: Path, score: float, verdict: str) -> None:
    """And what is known of a difference is said where there is one."""
    found = row(ledger_of(folder, [run("fedprox", 0, score)]), "fedprox")
    assert found.verdict == verdict
    assert found.why == ("another rate" if verdict == "found" else "")


def test_a_cell_by_client_takes_the_score_of_that_client(folder: Path) -> None:
    by_client = {"plain": 0.9, "font": 0.6}
    ledger = ledger_of(folder, [run("fedavg", 0, 0.9, accuracy_by_client=by_client)])
    assert row(ledger, "fedavg", "plain").difference == pytest.approx(-1.0)
    assert row(ledger, "fedavg", "font").verdict == "other data"  # however near it is


def test_a_cell_that_was_not_measured_has_no_row(folder: Path) -> None:
    ledger = ledger_of(folder)
    assert (len(ledger.cells), ledger.rows) == (5, ())
    assert ledger.claims[0].judgement == "not measured"


def test_a_run_for_claims_alone_stands_beside_no_printed_number(folder: Path) -> None:
    """And it is read back as what it was kept as."""
    short = ("run.rounds=2",)
    kept = [
        Entry("a/digits", label, seed, {"average_accuracy": score}, short, claims_only=True)
        for label, seed, score in (
            ("fedavg", 0, 0.62), ("fedavg", 1, 0.64), ("fedprox", 0, 0.60), ("fedprox", 1, 0.61),
        )
    ]  # fmt: skip
    (folder / "runs").mkdir()
    (folder / "runs" / "a-digits.json").write_text(entries_text(kept))
    ledger = ledger_of(folder)
    assert ledger.rows == ()
    judged = ledger.claims[0]
    assert (judged.mean, judged.changes) == (pytest.approx(2.5), short)  # of 2 and 3 points
    assert judged.judgement == "smaller or none"  # 2.5 ± 12.7 · 0.5, where 10 are printed


def test_runs_as_the_recipe_has_them_come_before_changed_ones(folder: Path) -> None:
    changed = Entry("a/digits", "fedavg", 1, {"average_accuracy": 0.5}, ("method.lr=1.0",))
    found = row(ledger_of(folder, [changed, run("fedavg", 0, 0.9)]), "fedavg")
    assert (found.ours.mean, found.changes) == (pytest.approx(90.0), ())
    alone = row(ledger_of(folder, [changed]), "fedavg")
    assert (alone.ours.mean, alone.changes) == (50.0, ("method.lr=1.0",))


def test_a_seed_of_two_recipes_of_one_cell_counts_once(folder: Path) -> None:
    other = Entry("b/digits", "fedavg", 0, {"average_accuracy": 0.5})
    found = row(ledger_of(folder, [other, run("fedavg", 0, 0.9)]), "fedavg")
    assert (found.ours.mean, found.seeds) == (pytest.approx(90.0), (0,))


def test_runs_that_are_kept_are_read_and_new_ones_replace_them(folder: Path) -> None:
    (folder / "runs").mkdir()
    kept = entries_text([run("fedavg", 0, 0.8), run("fedavg", 1, 0.9)])
    (folder / "runs" / "a.json").write_text(kept)
    assert row(ledger_of(folder), "fedavg").ours.mean == pytest.approx(85.0)
    assert row(ledger_of(folder, [run("fedavg", 0, 0.9)]), "fedavg").ours.mean == pytest.approx(90)


CLAIM = Claim("Paper", "A is above B", ("a/digits", "a"), ("a/digits", "b"), "average_accuracy", 1)


def pairs(differences: Sequence[float]) -> list[Entry]:
    better = [run("a", seed, 0.5 + x / 100) for seed, x in enumerate(differences)]
    return [*better, *(run("b", seed, 0.5) for seed in range(len(differences)))]


@pytest.mark.parametrize(
    ("differences", "judgement"),
    [
        ([5, 6, 7], "confirmed"),  # 6 ± 4.303 · 1 / √3 = 6 ± 2.48
        ([1, 2, 3], "undecided"),  # 2 ± 2.48
        ([0.4, 0.5, 0.6], "smaller"),  # 0.5 ± 0.25: above zero, and all below the printed 1
        ([0.3, 0.4, -0.1], "smaller or none"),  # 0.2 ± 0.66: around zero, and all below 1
        ([-5, -6, -7], "refuted"),
        ([50], "undecided"),  # one seed tells nothing about seeds
    ],
)
def test_a_claim_is_judged_by_the_interval_of_paired_differences(
    differences: list[float], judgement: str
) -> None:
    assert judged_of(CLAIM, pairs(differences)).judgement == judgement


def test_only_seeds_that_both_methods_have_are_paired() -> None:
    judged = judged_of(CLAIM, [run("a", 0, 0.6), run("a", 1, 0.9), run("b", 0, 0.5)])
    assert judged.differences == {0: pytest.approx(10.0)}


def changed(label: str, seed: int, score: float, *changes: str) -> Entry:
    return Entry("a/digits", label, seed, {"average_accuracy": score}, changes)


def test_of_runs_that_were_cut_the_longest_judge_a_claim() -> None:
    runs = [
        Entry(
            "a/digits", label, 0, {"average_accuracy": score, "rounds": rounds},
            (f"run.rounds={rounds}",),
        )
        for label, rounds, score in (("a", 12, 0.5), ("b", 12, 0.5), ("a", 20, 0.7), ("b", 20, 0.6))
    ]  # fmt: skip
    judged = judged_of(CLAIM, runs)
    assert judged.changes == ("run.rounds=20",)
    assert judged.differences == {0: pytest.approx(10.0)}


def test_a_claim_is_judged_by_runs_on_equal_data_for_as_many_rounds() -> None:
    runs = [
        changed("a", 0, 0.9),
        changed("a", 0, 0.7, "run.rounds=5"),
        changed("b", 0, 0.6, "method.mu=1.0", "run.rounds=5"),
    ]
    judged = judged_of(CLAIM, runs)
    assert judged.differences == {0: pytest.approx(10.0)}  # 70 - 60, and not 90 - 60
    assert judged.changes == ("run.rounds=5", "method.mu=1.0")


def test_runs_of_other_length_are_never_compared() -> None:
    runs = [changed("a", 0, 0.9), changed("b", 0, 0.6, "run.rounds=5")]
    assert judged_of(CLAIM, runs).judgement == "not measured"


def test_of_runs_that_are_alike_those_with_most_seeds_in_common_judge_a_claim() -> None:
    runs = [changed("a", 0, 0.9), changed("b", 0, 0.5)]
    runs += [changed("a", seed, 0.8, "run.rounds=5") for seed in (0, 1)]
    runs += [changed("b", seed, 0.6, "run.rounds=5") for seed in (0, 1)]
    assert judged_of(CLAIM, runs).differences == pytest.approx({0: 20.0, 1: 20.0})


def test_the_other_method_of_a_claim_may_have_another_score() -> None:
    claim = Claim(
        "Paper", "says", ("a/digits", "a"), ("a/digits", "b"), "averaged_local_accuracy",
        None, "average_accuracy",
    )  # fmt: skip
    runs = [
        Entry("a/digits", "a", 0, {"averaged_local_accuracy": 0.8, "average_accuracy": 0.2}),
        run("b", 0, 0.7),
    ]
    assert judged_of(claim, runs).differences == {0: pytest.approx(10.0)}


@pytest.mark.parametrize("seeds", [2, 11, 40])
def test_the_interval_is_students_for_any_number_of_seeds(seeds: int) -> None:
    differences = [float(seed % 3) for seed in range(seeds)]
    judged = judged_of(CLAIM, pairs(differences))
    low, high = stats.t.interval(0.95, seeds - 1, np.mean(differences), stats.sem(differences))
    assert judged.mean is not None and judged.half is not None
    assert judged.mean - judged.half == pytest.approx(low, abs=1e-6)
    assert judged.mean + judged.half == pytest.approx(high, abs=1e-6)


def test_a_state_that_nobody_knows_is_refused_with_those_that_are(folder: Path) -> None:
    path = folder / "papers" / "paper.toml"
    path.write_text(PAPER.replace('"found"', '"solved"'))
    with pytest.raises(FedstillError, match=r"paper.toml .* known: found, excluded, open"):
        ledger_of(folder)


def test_a_folder_without_papers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedstillError, match="is not a ledger"):
        ledger_of(tmp_path)


def test_the_page_counts_cells_and_numbers_remarks(folder: Path) -> None:
    ledger = ledger_of(folder, [run("fedavg", 0, 0.9), run("fedprox", 0, 0.9)])
    page = ledger_page.page(ledger)
    assert "5 printed cells are entered; 2 of them were measured" in page
    said = "1 are within two points or the paper's spread, for 1 of the others a measurement"
    assert said in " ".join(page.split())
    assert "| 80.00 | 90.00 | 0 | +10.00 | cause found [1] |" in page
    assert "- [1] another rate" in page
    assert "| +10.00 | +0.00 | +0.00 | undecided |" in page
    assert json.loads(json.dumps(ledger.as_dict()))["verdicts"] == {"within": 1, "found": 1}


def test_what_is_missing_is_what_was_not_run_as_the_recipe_has_it(folder: Path) -> None:
    cut = Entry("a/digits", "fedprox", 1, {"average_accuracy": 0.8}, ("run.rounds=1",))
    short = Entry("a/digits", "fedprox", 2, {"average_accuracy": 0.8}, claims_only=True)
    ledger = ledger_of(folder, [run("fedavg", 0, 0.9), run("fedavg", 1, 0.9), cut, short])
    found = gaps(ledger, 3)
    # FedAvg and FedProx stand in the claim; nobody has measured the third method.
    assert [(gap.labels, gap.seeds, gap.cells, gap.claims) for gap in found] == [
        (("fedavg",), (2,), 3, 1),
        (("fedprox", "far+away"), (0, 1, 2), 2, 1),
    ]
    assert {gap.recipe for gap in found} == {"a/digits"}
    assert gaps(ledger, 2)[0].labels == ("fedprox", "far+away")
    assert found[1].command(Path("recipes")) == (
        "fedstill run recipes/a/digits.toml --only fedprox --only far+away --seeds 0 1 2"
    )
    assert found[1].purpose() == "1 claim and 2 cells, digits5"


def test_a_method_that_only_a_claim_names_is_missing_too(folder: Path) -> None:
    claim = PAPER[PAPER.index("[[claim]]") :].replace('worse = "fedprox"', 'worse = "alone"')
    (folder / "papers" / "paper.toml").write_text(PAPER + claim)
    measured = [run(label, 0, 0.9) for label in ("fedavg", "fedprox", "far+away")]
    (gap,) = gaps(ledger_of(folder, measured), 1)
    assert (gap.labels, gap.seeds, gap.cells, gap.claims) == (("alone",), (0,), 0, 1)
    assert gap.purpose() == "1 claim, no printed cell"


def test_of_two_recipes_of_a_cell_the_one_with_more_seeds_is_completed(folder: Path) -> None:
    other = Entry("b/digits", "far+away", 0, {"average_accuracy": 0.5})
    found = gaps(ledger_of(folder, [other]), 2)
    assert [(gap.recipe, gap.labels, gap.seeds) for gap in found] == [
        ("a/digits", ("fedavg", "fedprox"), (0, 1)),
        ("b/digits", ("far+away",), (1,)),
    ]
