"""The accuracy matrix: each client's model on each client's test set, as table and heat map."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstill.core.errors import BadValue
from fedstill.report import grids
from fedstill.report.groups import CLIENT_SCORES, Group, Reported, Statistic
from fedstill.report.layout import NOTHING, Fitting, Layout, markdown, with_network
from fedstill.report.tables import (
    COLUMNS_FOR_TARGETS,
    SCORES_EXPLAINED,
    SHORT_NAMES,
    Comparison,
    extremes,
    percent,
    printed_percent,
)

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Crossed:
    """The matrix of one setting, the mean over its seeds, and what is said about each model."""

    title: str
    seeds: tuple[str, ...]
    networks: Mapping[str, str]
    values: Mapping[str, Mapping[str, Statistic]]  # by whose model, then by whose test set
    scores: Mapping[str, Mapping[str, Statistic]]  # by score, then by whose model
    means: Mapping[str, Statistic]  # of each score over models
    reported: Reported | None

    @property
    def targets(self) -> list[str]:
        """Every test set; a model's own has the place of its row."""
        found = dict.fromkeys(name for row in self.values.values() for name in row)
        own = [name for name in self.values if name in found]
        return [*own, *(name for name in found if name not in own)]

    def as_dict(self) -> dict[str, Any]:
        """All numbers, unrounded; accuracies are fractions."""
        nested = {
            part: {
                outer: {inner: asdict(value) for inner, value in row.items()}
                for outer, row in getattr(self, part).items()
            }
            for part in ("values", "scores")
        }
        return {
            "name": self.title,
            "seeds": list(self.seeds),
            "networks": dict(self.networks),
            "test_sets": self.targets,
            **nested,
            "means": {name: asdict(value) for name, value in self.means.items()},
            "reported": None if self.reported is None else asdict(self.reported),
        }

    def as_markdown(self) -> str:
        """A heading, a table and its footnotes."""
        return "\n\n".join(markdown(self.title, self.layout())) + "\n"

    def as_rich(self) -> RenderableType:
        """The same for a terminal."""
        from rich.console import Group as Together
        from rich.text import Text

        layout = self.layout()
        notes = [Text(line, "dim") for line in layout.footnotes]
        return Together(Fitting(self.title, layout), *notes)

    def layout(self) -> Layout:
        """A row for each model; the scores of each, and beside them what a paper prints."""
        targets, scores = self.targets, [name for name in CLIENT_SCORES if name in self.scores]
        few = len(targets) <= COLUMNS_FOR_TARGETS
        printed = {} if self.reported is None else self.reported.by_client
        head = ["model of", *(targets if few else ["lowest", "highest"])]
        for score in scores:
            short = SHORT_NAMES[score]
            head += [short, f"{short} reported"] if score in printed else [short]
        body = []
        for model, row in self.values.items():
            cells = [_mean(row.get(name)) for name in targets] if few else extremes(row)
            for score in scores:
                cells.append(percent(self.scores[score].get(model)))
                cells += [printed_percent(printed[score].get(model))] if score in printed else []
            body.append([with_network(model, self.networks.get(model, "")), *cells])
        body.append(["mean", *self._means(targets if few else [], scores, printed)])
        return Layout(head, body, self._footnotes())

    def _means(
        self, targets: Sequence[str], scores: Sequence[str], printed: Mapping[str, Any]
    ) -> list[str]:
        columns = [[row.get(name) for row in self.values.values()] for name in targets]
        cells = [_mean(*column) for column in columns] or ["", ""]
        for score in scores:
            cells.append(percent(self.means.get(score)))
            average = None if self.reported is None else self.reported.scores.get(score)
            cells += [printed_percent(average)] if score in printed else []
        return cells

    def _footnotes(self) -> list[str]:
        several = len(self.seeds) > 1
        line = f"{SCORES_EXPLAINED}; seed{'s' if several else ''} {', '.join(self.seeds)}"
        if several:
            line += ": means, a score with its sample standard deviation"
        lines = [line]
        if self.reported is not None and self.reported.by_client:
            lines.append(f"reported: {self.reported.source or 'the recipe gives no source'}")
        return lines


def crossed(comparison: Comparison) -> list[Crossed]:
    """The matrix of every setting in which clients' models were scored."""
    found = [
        _crossed(group, section.title)
        for section in comparison.sections
        for group in section.groups
        if group.matrix
    ]
    if not found:
        names = ", ".join(group.name for group in comparison.groups)
        raise BadValue(
            f"no client's model was scored in these runs ({names}) on others' test sets, so there "
            "is no matrix; fedstill compare has the other scores"
        )
    return found


def draw(found: Sequence[Crossed], path: Path | str) -> list[Path]:
    """A heat map for each matrix; where there are several, each file has its setting's name."""
    path = Path(path)
    drawn = []
    for number, each in enumerate(found, start=1):
        word = re.sub(r"[^A-Za-z0-9._-]+", "-", each.title.split(" on ")[0]).strip("-")
        place = path if len(found) == 1 else path.with_stem(f"{path.stem}-{number}-{word}")
        drawn.append(_draw(each, place))
    return drawn


def _draw(each: Crossed, path: Path) -> Path:
    targets, nothing = each.targets, Statistic(float("nan"), None, 0)
    values = [[row.get(name, nothing).mean for name in targets] for row in each.values.values()]
    seeds = f"mean over {len(each.seeds)} seeds" if len(each.seeds) > 1 else "one seed"
    return grids.accuracy_matrix(
        np.array(values),
        list(each.values),
        path,
        targets=targets,
        networks=each.networks,
        detail=f"{each.title}; {seeds}",
    )


def _crossed(group: Group, data: str) -> Crossed:
    return Crossed(
        f"{group.name} on {data}",
        group.seeds,
        group.networks,
        group.matrix,
        group.by_client,
        {name: group.scores[name] for name in CLIENT_SCORES if name in group.scores},
        group.reported,
    )


def _mean(*values: Statistic | None) -> str:
    """The mean of what is known, in percent."""
    known = [value.mean for value in values if value is not None]
    return f"{100 * sum(known) / len(known):.2f}" if known else NOTHING
