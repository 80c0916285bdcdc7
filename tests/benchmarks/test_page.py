"""The page of benchmarks: what is filled in, what is kept, and when a time does not count."""

from __future__ import annotations

import json
import re

import pytest

import page


def system(name, accuracies, seconds=(9.0, 1.0, 3.0), skipped=None):
    runs = [
        {"seed": seed, "seconds": list(seconds), "start_up": 2.0, "accuracy": accuracy,
         "peak_bytes": None, "versions": {"torch": "2.13"}}
        for seed, accuracy in enumerate(accuracies)
    ]  # fmt: skip
    return {"system": name, "title": f"the {name}", "runs": runs, "skipped": skipped}


def table(*systems, parts=1, load=0.1):
    machine = {"cpu": "a CPU", "gpu": None, "cpus": 2, "threads": 1, "python": "3.11",
               "load": [load, 0.0, 0.0]}  # fmt: skip
    row = {"label": "some work", "unit": "a round", "parts": parts, "systems": list(systems)}
    return {"table": "small", "when": "2026-01-01", "small": False, "seeds": 3, "baseline": "plain",
            "device": "cpu", "machine": machine, "rows": [row]}  # fmt: skip


PLAIN = system("plain", [0.90, 0.91, 0.92])


def test_only_what_stands_between_the_marks_changes():
    before = "# Title\nby hand\n<!-- made: small -->\nold\n<!-- end: small -->\n## Also by hand\n"
    after = page.filled(before, "small", "new")
    assert after == before.replace("old", "new")
    assert page.filled(after, "small", "new") == after


def test_sentences_are_wrapped_and_tables_are_not():
    words, row = "some words " * 20, "| " + "a cell " * 30 + "|"
    lines = page.wrapped(f"{words}\n\n{row}").splitlines()
    assert max(map(len, lines[:-2])) <= page.WIDTH and lines[-2:] == ["", row]
    assert " ".join(lines[:-2]) == words.strip()


@pytest.mark.parametrize("text", ["", "<!-- end: small --><!-- made: small -->"])
def test_a_page_without_the_marks_is_refused(text):
    with pytest.raises(SystemExit, match="made: small"):
        page.filled(text, "small", "new")


def test_the_page_of_the_project_has_all_marks():
    text = page.PAGE.read_text(encoding="utf-8")
    for name in (*page.TABLES, "bench", "profile", "population", "peers", "two_cores"):
        assert "a table put here" in page.filled(text, name, "a table put here")


def test_times_are_medians_without_the_first_round():
    made = page.side_by_side(table(PLAIN, parts=10))
    assert "| the plain | 200 | 100 – 300 | 1.00 × | 9 | 2 | 91.00 ± 1.00 | yes |" in made


def test_a_time_of_another_accuracy_does_not_count():
    quick = system("quick", [0.70, 0.71, 0.72], seconds=(1.0, 0.5))
    made = page.side_by_side(table(PLAIN, quick))
    assert "| the quick | ~~500~~ |" in made and "| no |" in made
    # the deviation is 0.01, so means of three may differ by 2 x 0.01 x sqrt(2/3), 1.63 points
    near, far = system("near", [0.88, 0.89, 0.915]), system("far", [0.87, 0.88, 0.89])
    noise = page.seed_noise([system("x", [0.0, 0.01, 0.02])])
    assert noise == pytest.approx(0.01)
    assert page.agreement(near, PLAIN, noise) == "yes"
    assert page.agreement(far, PLAIN, noise) == "no"


def test_a_row_may_have_a_baseline_of_its_own():
    found = table(PLAIN, system("theirs", [0.91, 0.91, 0.91], seconds=(9.0, 4.0)))
    found["rows"][0]["baseline"] = "theirs"
    assert "| the plain | 2000 | 1000 – 3000 | 0.50 × |" in page.side_by_side(found)


def test_a_processors_ratio_stands_beside_both_times():
    row = {"what": "a step", "engine": "auto", "ours_ms": 3.0, "plain_ms": 4.0, "ratio": 0.75}
    at = {"cpu": "a CPU", "torch": "2.13"}
    found = {"when": "2026-01-01", "machine": at, "repeat": 5, "rows": [row]}
    assert "| a step | `auto` | 3 | 4 | 0.75 |" in page.two_cores(found)


def test_one_seed_is_not_judged():
    made = page.side_by_side(table(system("plain", [0.9]), system("other", [0.1])))
    assert made.count("not judged, one seed") == 2


def test_what_was_skipped_and_a_busy_machine_are_said():
    absent = system("flower", [], skipped="not installed here")
    made = page.side_by_side(table(PLAIN, absent, load=3.0))
    assert "| the flower | not measured: not installed here |" in made
    assert "**The machine was busy** (load 3.0, 0.0, 0.0" in made
    assert page.side_by_side(None) == "Not measured yet."


def test_own_numbers_stand_beside_one_client_after_another(tmp_path):
    assert page.own_numbers(tmp_path) == "Not measured yet."
    case = {"clients": 4, "peak_bytes": 2_000_000, "first_seconds": 1.5, "failed": None}
    found = {
        "benchmark": "local-step", "what": "a step", "machine": table()["machine"] | {"torch": "2"},
        "settings": {"width": 8, "batch": 3, "per_class": 0, "size": "small"},
        "cases": [
            case | {"title": name, "milliseconds": {"median": m, "lowest": m, "highest": m}}
            for name, m in (("in_process", 8.0), ("batched", 2.0))
        ],
    }  # fmt: skip
    (tmp_path / "local-step.json").write_text(json.dumps(found))
    made = page.own_numbers(tmp_path)
    assert "| batched | 4 | 2 | 2 – 2 | 4.0 × | 1.5 | 2 |" in made


def test_seeds_beside_other_work_count_for_accuracy_alone():
    few = system("ours", [0.80, 0.80])
    assert "~~" in page.side_by_side(table(PLAIN, few))
    made = page.side_by_side(table(PLAIN, {**few, "more_seeds": [0.95, 0.96, 0.97, 0.96]}))
    assert "~~" not in made and "90.67 ± 8.29, 6 seeds" in made
    assert page.milliseconds({"parts": 1}, few) == [1000.0, 3000.0] * 2


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("matching", "the same, beside three others"),
        ("local-step", "a local step, 50 clients"),
        ("small-step", "a small step"),
        ("average", "a round of 50 clients"),
        ("lessons", "a round of DFRD's server"),
        ("conv4-step", "a local step of ten clients, batch 64, against clients in turn: conv4"),
        ("sets", "a round of FedDualMatch"),
    ],
)
def test_later_figures_of_older_tables_include_those_of_the_targets(name, work):
    (told,) = re.findall(
        rf"^\| `{name}` \| [\d.]+ \| ([^|]+) \| \[targets\]", page.PAGE.read_text("utf-8"), re.M
    )
    lowest, highest = float(told.split(" to ")[0]), float(told.split(" to ")[-1])
    rows = json.loads((page.RESULTS / "aims.json").read_text("utf-8"))["rows"]
    times = [row["milliseconds"]["median"] for row in rows if row["work"].startswith(work)]
    least = min(times)
    assert lowest * 0.99 <= least <= highest * 1.01, (told, least)
