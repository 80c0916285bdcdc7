"""Pictures and rows of audits, from the plain values of audit.json; no attack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.report import canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST = 1e-4  # where logarithmic axes begin
MOST = 14  # curves in one picture
FIRST = ("LiRA online", "Gaussian test")  # attacks that are drawn where there are several
SHORT = {"LiRA offline": "offline", "plain threshold": "plain", "training against test": "test"}
Finding = Mapping[str, Any]


def rows(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """A row for each thing that was seen: its first attack, and the others' areas beside it."""
    several = len({found["client"] for found in findings}) > 1
    others = list(dict.fromkeys(
        found["attack"] for group in grouped(findings) for found in group[1:]
    ))  # fmt: skip
    made = []
    for first, *rest in grouped(findings):
        areas = {found["attack"]: found["auc"] for found in rest}
        row: dict[str, Any] = {"audited": first["subject"]}
        if several:
            row["records of"] = first["client"]
        row |= {
            "seen": first["view"],
            "AUC": _number(first["auc"], "{:.3f}"),
            **{SHORT.get(name, name): _number(areas.get(name), "{:.3f}") for name in others},
            "TPR 0.1%": _percent(first["true_at_0_1_percent"]),
            "TPR 1%": _percent(first["true_at_1_percent"]),
            "eps ≥": _number(first["epsilon_at_least"], "{:.2f}"),
            "ledger": _number(first["epsilon_ledger"], "{:g}") or "–",
        }
        made.append(row)
    return made


def grouped(findings: Sequence[Finding]) -> list[list[Finding]]:
    """The attacks on each thing that was seen, that of `FIRST` before the others."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for found in findings:
        key = (found["subject"], found["client"], found["view"])
        groups.setdefault(key, []).append(found)
    return [sorted(group, key=lambda found: found["attack"] not in FIRST)
            for group in groups.values()]  # fmt: skip


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}"


def draw_curves(findings: Sequence[Finding], path: Path | str) -> Path:
    """True against false positive rates on logarithmic axes, beside the diagonal of guessing."""
    return canvas.save(curves(findings), path)


def curves(findings: Sequence[Finding]) -> Figure:
    """The figure of `draw_curves`: of each thing seen, one attack."""
    figure = canvas.figure(7.4, 4.6)
    axes = figure.add_subplot()
    axes.plot([LEAST, 1], [LEAST, 1], color=canvas.GREY, linewidth=1, label="guessing")
    shown = [group[0] for group in grouped([one for one in findings if one["curve"]])]
    for number, found in enumerate(shown[:MOST]):
        colour, dashes, _ = canvas.look(number)
        points = [(max(x, LEAST), max(y, LEAST)) for x, y in found["curve"]]
        axes.plot(*zip(*points, strict=True), dashes, color=colour, linewidth=1.5,
                  drawstyle="steps-post", label=_label(found, shown))  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(LEAST, 1)
    axes.set_ylim(LEAST, 1.05)
    axes.set_xlabel("false positive rate", fontsize=9.5)
    axes.set_ylabel("true positive rate", fontsize=9.5)
    canvas.plain(axes)
    more = f"; {len(shown) - MOST} more are in audit.csv" if len(shown) > MOST else ""
    canvas.title(axes, "What an attack tells", f"a curve on the diagonal: it tells nothing{more}")
    canvas.legend_beside(axes)
    return figure


def _label(found: Finding, among: Sequence[Finding]) -> str:
    several = len({other["client"] for other in among}) > 1
    whose = f", {found['client']}" if several and found["client"] else ""
    return f"{found['subject']}{whose}: {found['view']}"
