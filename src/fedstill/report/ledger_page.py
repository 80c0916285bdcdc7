"""A ledger laid out: a table of cells for each paper, and one of claims."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import get_args

from fedstill.report.layout import Layout, markdown
from fedstill.report.ledger import Judged, Judgement, Ledger, Row, Verdict

WIDTH = 110  # columns of a page
HEAD = ["table", "column", "method", "of", "printed", "ours", "seeds", "difference", "verdict"]
CLAIMS = ["claim", "printed", "ours, by seed", "mean, 95 % interval", "judgement"]
WORDS: dict[Verdict, str] = {
    "within": "within",
    "found": "cause found",
    "excluded": "causes excluded",
    "open": "open",
    "other data": "other data",
}


PURPOSE = "Numbers that papers print, in per cent, beside those of our runs of their recipes."
MEANING = (
    "*Within*: two points or the paper's spread. Where a number is further away, it is said "
    "whether the cause was *found*, possible causes were *excluded*, or the matter is *open*. "
    "*Other data*: what was scored is not what the paper scored, so nothing follows.",
    "A claim is judged by the differences of runs with equal seeds: *confirmed* or *refuted* where "
    "the 95 % interval of their mean (Student's) lies on one side of zero, else *undecided*; "
    "*smaller* where it lies above zero and wholly below the printed gain, *smaller or none* where "
    "it holds zero and lies wholly below the printed gain; with one seed always undecided. Runs "
    "that were cut long before the paper's last round count for claims alone, and what was changed "
    "is said beside them: what they say, they say of the rounds that were played.",
    "Made by `fedstill ledger --write docs/ledger.md` from `docs/ledger`: printed numbers in "
    "`papers`, summaries of runs in `runs`. `fedstill ledger --missing 3` prints the commands that "
    "would give every cell and claim three seeds.",
)


def layouts(ledger: Ledger) -> list[tuple[str, Layout]]:
    """The measured cells of each paper, then all claims; each with its title."""
    papers = list(dict.fromkeys(row.cell.paper for row in ledger.rows))
    found = [(paper, _cells([r for r in ledger.rows if r.cell.paper == paper])) for paper in papers]
    return [*found, ("Claims", _claims(ledger.claims))] if ledger.claims else found


def counted(ledger: Ledger) -> list[str]:
    """What the ledger comes to, in sentences."""
    counts = ledger.counts()
    judged = len(ledger.rows) - counts["other data"]
    near, explained = counts["within"], counts["found"] + counts["excluded"]
    methods = {row.cell.label for row in ledger.rows}
    data = sorted({row.cell.data for row in ledger.rows})
    share = f" ({100 * (near + explained) / judged:.0f} %)" if judged else ""
    claims = [each.judgement for each in ledger.claims]
    said = [
        f"{len(ledger.cells)} printed cells are entered; {len(ledger.rows)} of them were measured, "
        f"with {len(methods)} methods on {', '.join(data) or 'no data'}.",
        f"Of {judged} that can be compared {near} are within two points or the paper's spread, "
        f"{explained} are explained by a measurement{share}, {counts['open']} are open. "
        f"{counts['other data']} stand beside a number of other data.",
    ]
    if claims:
        each = ", ".join(f"{claims.count(kind)} {kind}" for kind in get_args(Judgement))
        said.append(f"Claims: {each}.")
    return said


def page(ledger: Ledger) -> str:
    """The whole ledger as Markdown."""
    said = [fill(f"- {line}", WIDTH, subsequent_indent="  ") for line in counted(ledger)]
    meaning = [fill(words, WIDTH) for words in MEANING]
    parts = ["# Ledger", fill(PURPOSE, WIDTH), "\n".join(said), *meaning]
    for name, layout in layouts(ledger):
        parts += markdown(name, layout)
    return "\n\n".join(parts).replace("\n### ", "\n## ") + "\n"


def _cells(rows: Sequence[Row]) -> Layout:
    remarks: list[str] = []
    body = []
    for row in rows:
        cell = row.cell
        body.append(
            [
                cell.table,
                cell.column,
                cell.label,
                _of(row),
                spoken(cell.value, cell.spread),
                spoken(row.ours.mean, row.ours.spread),
                " ".join(map(str, row.seeds)),
                f"{row.difference:+.2f}",
                _remarked(WORDS[row.verdict], (row.why, _changed(row.changes)), remarks),
            ]
        )
    return Layout(HEAD, body, _numbered(remarks), numbers=(4, 5, 7))


def _claims(claims: Sequence[Judged]) -> Layout:
    remarks: list[str] = []
    body = [
        [
            f"{each.claim.paper}: {each.claim.says}",
            "" if each.claim.by is None else f"{each.claim.by:+.2f}",
            ", ".join(f"{x:+.2f}" for x in each.differences.values()),
            "" if each.mean is None else _with_interval(each.mean, each.half),
            _remarked(each.judgement, (_changed(each.changes),), remarks),
        ]
        for each in claims
    ]
    return Layout(CLAIMS, body, _numbered(remarks), numbers=(1, 2, 3))


def _changed(changes: Sequence[str]) -> str:
    return f"with {', '.join(changes)}" if changes else ""


def _remarked(said: str, more: Sequence[str], remarks: list[str]) -> str:
    """What is said with the numbers of its remarks, which are added to the list."""
    for remark in filter(None, more):
        if remark not in remarks:
            remarks.append(remark)
        said += f" [{remarks.index(remark) + 1}]"
    return said


def _numbered(remarks: Sequence[str]) -> list[str]:
    return [f"[{number}] {remark}" for number, remark in enumerate(remarks, 1)]


def _with_interval(mean: float, half: float | None) -> str:
    return f"{mean:+.2f}" + ("" if half is None else f", {mean - half:+.2f} to {mean + half:+.2f}")


def _of(row: Row) -> str:
    """Whose number it is: a client's or a test set's, or which average."""
    if row.cell.target is not None:
        return row.cell.target
    return row.cell.score.replace("_accuracy", "").replace("_", " ")


def spoken(mean: float, spread: float | None) -> str:
    """`91.04 ± 0.80`, or the mean alone."""
    return f"{mean:.2f}" if spread is None else f"{mean:.2f} ± {spread:.2f}"
