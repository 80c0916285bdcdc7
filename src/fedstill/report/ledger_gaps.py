"""What a ledger lacks: the runs that would give every printed cell and claim enough seeds."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.report.ledger import Cell, Entry, Ledger

Pair = tuple[str, str]  # recipe and label


@dataclass(frozen=True)
class Gap:
    """Methods of one recipe that were not run with some seeds, and what these runs would decide."""

    recipe: str
    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    data: tuple[str, ...]
    cells: int
    claims: int

    def command(self, recipes: Path) -> str:
        """The command that makes the runs, as a shell takes it."""
        only = [word for label in self.labels for word in ("--only", label)]
        path = (recipes / f"{self.recipe}.toml").as_posix()
        return shlex.join(["fedstill", "run", path, *only, "--seeds", *map(str, self.seeds)])

    def purpose(self) -> str:
        """What the runs are for, in words."""
        counted = [
            f"{count} {noun}{'' if count == 1 else 's'}"
            for count, noun in ((self.claims, "claim"), (self.cells, "cell"))
            if count
        ]
        return f"{' and '.join(counted)}, {', '.join(self.data)}"

    def as_dict(self, recipes: Path) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "labels": list(self.labels),
            "seeds": list(self.seeds),
            "data": list(self.data),
            "cells": self.cells,
            "claims": self.claims,
            "command": self.command(recipes),
        }


def gaps(ledger: Ledger, seeds: int) -> list[Gap]:
    """Runs that are missing until each cell and claim has the first `seeds` seeds.

    Only runs as the recipe has them count. Those that a claim waits for come first, then those of
    a cell that has some seeds, then those of cells that nobody has measured.
    """
    played = _played(ledger.entries)
    lacking = {
        pair: tuple(seed for seed in range(seeds) if seed not in played.get(pair, ()))
        for pair in _wanted(ledger, played)
    }
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (recipe, label), missing in lacking.items():
        if missing:
            groups.setdefault((recipe, missing), []).append(label)
    found = [_gap(ledger, played, *group, labels) for group, labels in groups.items()]
    return sorted(found, key=lambda gap: (not gap.claims, len(gap.seeds) == seeds))


def _gap(
    ledger: Ledger,
    played: Mapping[Pair, set[int]],
    recipe: str,
    seeds: tuple[int, ...],
    labels: Sequence[str],
) -> Gap:
    pairs = {(recipe, label) for label in labels}
    cells = [cell for cell in ledger.cells if _nearest(cell, played) in pairs]
    claims = [each.claim for each in ledger.claims]
    waiting = sum(claim.better in pairs or claim.worse in pairs for claim in claims)
    data = tuple(dict.fromkeys(cell.data for cell in cells))
    return Gap(recipe, tuple(labels), seeds, data or ("no printed cell",), len(cells), waiting)


def _played(entries: Sequence[Entry]) -> dict[Pair, set[int]]:
    """The seeds that were run as the recipe has it."""
    played: dict[Pair, set[int]] = {}
    for entry in entries:
        if not entry.changes and not entry.claims_only:
            played.setdefault((entry.recipe, entry.label), set()).add(entry.seed)
    return played


def _wanted(ledger: Ledger, played: Mapping[Pair, set[int]]) -> Iterator[Pair]:
    for judged in ledger.claims:
        yield judged.claim.better
        yield judged.claim.worse
    for cell in ledger.cells:
        yield _nearest(cell, played)


def _nearest(cell: Cell, played: Mapping[Pair, set[int]]) -> Pair:
    """Of the recipes that reproduce a cell the one with most seeds; else the first."""
    pairs = [(recipe, cell.label) for recipe in cell.recipes]
    return max(pairs, key=lambda pair: len(played.get(pair, ())))
