"""What a method's code keeps outside of memories is seen, wherever it lies."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from fedstill.methods.fedavg import FedAvg
from fedstill.testing.outside import changed, held_outside

COUNT = 0
NESTED: dict[str, list[int]] = {"a": [1]}
TENSOR = torch.zeros(2)


class Thing:
    """Something that can hold something."""

    def __init__(self) -> None:
        self.held: list[int] = []


THING = Thing()


def around(seen: list[int]) -> Any:
    """A function that sees a variable of another."""
    return lambda: seen


class Keeper(FedAvg):
    """Has places to keep things in."""

    table: ClassVar[dict[str, int]] = {}
    sees = around([])

    def default(self, kept: list[int] = []) -> list[int]:  # noqa: B006
        return kept


def count() -> None:
    global COUNT
    COUNT += 1


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (count, "COUNT of tests.testing.test_outside"),
        (lambda: NESTED["a"].append(2), "NESTED of tests.testing.test_outside"),
        (lambda: TENSOR.add_(1), "TENSOR of tests.testing.test_outside"),
        (lambda: THING.held.append(1), "THING of tests.testing.test_outside"),
        (lambda: Keeper.table.update(a=1), "Keeper.table"),
        (lambda: Keeper().default().append(1), "a default of Keeper.default"),
        (lambda: Keeper.sees().append(1), "seen, which Keeper.sees sees"),
        (lambda: setattr(Keeper.default, "calls", 1), "Keeper.default.calls"),
    ],
)
def test_a_change_outside_of_memories_is_named(change: Any, name: str) -> None:
    before = held_outside(Keeper())
    assert changed(before, held_outside(Keeper())) == []
    change()
    assert changed(before, held_outside(Keeper())) == [name]
