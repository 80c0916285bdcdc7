"""Figures that the results page repeats are those of the committed runs and of the ledger."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SIGNED = r"[-+]\d+\.\d+"


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def text_of(name: str) -> str:
    """A page without its line breaks, which may fall anywhere."""
    return " ".join(page(name).split())


def summary(recipe: str, label: str, seed: int, *changes: str) -> dict[str, Any]:
    """What the committed runs say of one run."""
    runs = json.loads((ROOT / f"docs/ledger/runs/{recipe}.json").read_text(encoding="utf-8"))
    (found,) = [
        run["summary"]
        for run in runs
        if (run["label"], run["seed"], run["changes"]) == (label, seed, [*changes])
    ]
    return dict(found)


def numbers(cell: str) -> list[str]:
    return re.findall(r"\d+\.\d+", cell)


@pytest.mark.parametrize("method", ["fedavg", "fedlgd"])
def test_the_mean_of_four_domains_is_that_of_the_runs(method: str) -> None:
    four = ("MNIST", "SVHN", "USPS", "MNIST-M")
    by_seed = [
        100 * mean(found["accuracy_by_client"][domain] for domain in four)
        for found in (summary("fedlgd-digits-convnet-10", method, seed) for seed in (0, 1, 2))
    ]
    rows = [line for line in page("results.md").splitlines() if "by seed" not in line]
    title = {"fedavg": "FedAvg on virtual data", "fedlgd": "FedLGD"}[method]
    told = [
        numbers(line.strip("|").split("|")[-1]) for line in rows if line.startswith(f"| {title} |")
    ]
    assert [f"{score:.2f}" for score in by_seed] in told
    (short,) = [line for line in rows if "mean of the four real domains" in line]
    assert f"{mean(by_seed):.2f}" in numbers(short)


def test_the_gain_by_contrast_is_that_of_the_runs() -> None:
    contrast = "data: the surrogate of SynthDigits with a deviation of 0.196 within an image"
    gains = [
        100
        * (
            summary("desa-digits-mixed", "desa", seed, contrast)["averaged_global_accuracy"]
            - summary("desa-digits-mixed", "desa", seed)["averaged_global_accuracy"]
        )
        for seed in (0, 1, 2)
    ]
    told = ", ".join(f"{gain:+.2f}" for gain in gains)
    assert f"Contrast: {mean(gains):.2f} points of the mean over five (by seed {told};" in text_of(
        "results.md"
    )


def claims() -> list[tuple[list[str], list[str]]]:
    """Of each claim of the ledger with more than one seed: gains by seed, and their interval."""
    found = re.findall(
        rf"\| ((?:{SIGNED}, )+{SIGNED}) \| {SIGNED}, ({SIGNED}) to ({SIGNED}) \|", page("ledger.md")
    )
    return [(gains.split(", "), [lowest, highest]) for gains, lowest, highest in found]


def test_an_interval_beside_gains_by_seed_is_that_of_the_ledger() -> None:
    text, compared = text_of("results.md"), 0
    assert claims()
    for gains, interval in claims():
        together = r"(?:,? and |, )".join(re.escape(gain) for gain in gains)
        for place in re.finditer(together, text):
            rest = text[place.end() : place.end() + 90]
            told = re.search(rf"({SIGNED}) to ({SIGNED})", rest)
            if told:
                assert [*told.groups()] == interval, f"{gains}: {told[0]}"
                compared += 1
    assert compared >= 8
