"""docs/benchmarks.md: what a round sends, as formulas, against a rehearsal of every method."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedstill.commands.show import Stage, shown
from fedstill.methods import METHODS
from fedstill.models import ConvNet

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "benchmarks.md"
NETWORK = ConvNet((1, 8, 8), 5, width=4, depth=1)
STAGE = Stage(NETWORK, held=3, per_class=4, public=14)


@cache
def formulas() -> dict[str, tuple[str, str, str]]:
    """By method: floats up, down and to peers."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- costs -->")
    table, _, _ = rest.partition("<!-- end: costs -->")
    found: dict[str, tuple[str, str, str]] = {}
    for line in table.splitlines():
        names, *costs = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`(\w+)`", names):
            up, down, peers = costs[:3]
            found[name] = (up, down, peers)
    return found


def letters(name: str, told: dict[str, Any]) -> dict[str, int]:
    """What stands for what, from the network, the method's values and its memories."""
    method = METHODS[name](**METHODS[name].presets.get("small", {}))
    server = (told["memories"]["server"] or {"fields": {}})["fields"]
    sent = {each["step"]: each["fields"] for each in told["messages"]}
    return {
        "P": sum(NETWORK.floats().values()),
        "F": NETWORK.feature_width,
        "C": NETWORK.classes,
        "H": STAGE.held,
        "D": 64,
        "U": STAGE.public,
        "m": getattr(method, "global_per_class", 0) or getattr(method, "per_class", 0),
        "G": server.get("generator", {"floats": 0})["floats"],
        "Q": server.get("weights", {"floats": 0})["floats"],
        "R": sent.get("update", {}).get("weights", {"floats": 0})["floats"],
        "S": sent.get("broadcast", {}).get("weights", {"floats": 0})["floats"],
    }


def value(formula: str, letters: dict[str, int]) -> int:
    """A sum of products, such as `H·m·D + 1`."""
    total = 0
    for product in formula.strip("`").split("+"):
        term = 1
        for factor in product.strip().split("·"):
            power = re.fullmatch(r"(\w+)²", factor)
            number = power.group(1) if power else factor
            one = letters[number] if number in letters else int(number)
            term *= one**2 if power else one
        total += term
    return total


def test_formulas_are_read_as_they_are_written() -> None:
    assert value("2·P + C² + 1", {"P": 10, "C": 3}) == 30


@pytest.mark.parametrize("name", list(METHODS))
def test_the_formula_of_a_round_is_what_a_rehearsal_sends(name: str) -> None:
    kind = METHODS[name]
    told = shown(kind(**kind.presets.get("small", {})), name, STAGE)
    known = letters(name, told)
    said = [value(formula, known) for formula in formulas()[name]]
    assert said == [told["floats_per_round"][way] for way in ("up", "down", "peer")]
