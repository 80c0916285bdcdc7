"""What holds for every method, run from METHODS; no method is named here.

`python tests/contract/test_contract.py` prints the table of methods and checks.
"""

from __future__ import annotations

from functools import cache

import pytest

from fedstill.methods import METHODS
from fedstill.testing import CHECKS, check
from fedstill.testing.contract import Case, case_of, small


@cache
def case(name: str) -> Case:
    """A method in its federation; the runs that several promises look at are played once."""
    return case_of(small(METHODS[name]))


@pytest.mark.parametrize("promise", CHECKS)  # all promises of a method, then those of the next
@pytest.mark.parametrize("name", METHODS)
def test_every_method_keeps_the_contract(name: str, promise: str) -> None:
    CHECKS[promise](case(name))


def test_every_preset_makes_a_method() -> None:
    for kind in METHODS.values():
        for values in kind.presets.values():
            assert kind(**values) is not None


def table() -> str:
    """Methods by checks, as they come out."""
    lines = ["| method | " + " | ".join(CHECKS) + " |", "|---|" + "---|" * len(CHECKS)]
    for name, kind in METHODS.items():
        problems = check(kind, raising=False).problems.values()
        cells = ("kept" if problem is None else f"BROKEN {problem}" for problem in problems)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
