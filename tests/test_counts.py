"""Counts that the README and the results page repeat are those of the ledger and the tables."""

from __future__ import annotations

import re
from pathlib import Path

from fedstill.methods import METHODS

ROOT = Path(__file__).parents[1]


def text_of(page: str) -> str:
    """A page without its line breaks, which may fall anywhere."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def numbers(pattern: str, page: str) -> list[int]:
    """The numbers of the one sentence of a page that has this form."""
    found = [*re.finditer(pattern, text_of(page))]
    assert len(found) == 1, f"{page} has {len(found)} sentences like {pattern!r}; expected one"
    return [int(number) for number in found[0].groups()]


def test_the_readme_counts_compared_numbers_as_the_ledger_does() -> None:
    ledger = numbers(
        r"Of (\d+) that can be compared (\d+) are within two points or the paper's spread, "
        r"for (\d+) of the others a measurement found the cause or ruled causes out \(\d+ %\), "
        r"and (\d+) are open",
        "docs/ledger.md",
    )
    compared, within, explained, still_open = ledger
    assert compared == within + explained + still_open
    readme = numbers(
        r"Of (\d+) published numbers that can be compared, (\d+) are within two points or the "
        r"paper's spread; for (\d+) of the others a measurement found the cause or ruled causes "
        r"out, and (\d+) are open",
        "README.md",
    )
    assert readme == ledger


def test_the_readme_counts_confirmed_claims_as_the_ledger_does() -> None:
    claims = numbers(
        r"Claims: (\d+) confirmed, (\d+) smaller, (\d+) smaller or none, (\d+) refuted, "
        r"(\d+) undecided, (\d+) not measured",
        "docs/ledger.md",
    )
    readme = numbers(
        r"Of (\d+) claims that a method is better, (\d+) are confirmed at their printed size or a "
        r"larger one and (\d+) at a smaller one",
        "README.md",
    )
    assert readme == [sum(claims), *claims[:2]]


def test_the_readme_counts_the_methods_and_has_a_row_for_each() -> None:
    assert numbers(r"fedstill runs (\d+) methods", "README.md") == [len(METHODS)]
    rows = re.findall(
        r"^\| \[(\w+)\]\(docs/methods/\w+\.md\) \|", (ROOT / "README.md").read_text("utf-8"), re.M
    )
    assert sorted(rows) == sorted(METHODS)
