"""What an audit found, and how it is written: audit.json, audit.csv, curves.png."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from fedstill.audit.statistics import Curve
from fedstill.core.files import write_whole

VERSION = 1  # of the layout of audit.json, which docs/audits.md describes
Kind = Literal["mechanism", "canaries", "membership"]


@dataclass(frozen=True)
class Finding:
    """One attack on one thing."""

    subject: str  # what is audited: a method's label, or a mechanism
    view: str  # what the attack looks at
    attack: str
    client: str = ""  # whose records
    control: bool = False  # something that must be caught
    records: int = 0  # guessed about, in all
    auc: float | None = None
    true_at_0_1_percent: float | None = None  # true positive rate at this false positive rate
    true_at_1_percent: float | None = None
    balanced_accuracy: float | None = None
    guesses: int | None = None
    right: int | None = None
    epsilon_at_least: float | None = None
    epsilon_ledger: float | None = None  # None: nothing is promised
    mu_at_least: float | None = None
    mu_ledger: float | None = None
    fit: float | None = None  # share of records inside whose label gets more than half
    test: float | None = None  # the same of test examples
    caught: bool | None = None  # of a control
    curve: Sequence[tuple[float, float]] = ()  # false and true positive rates

    def with_curve(self, curve: Curve) -> Finding:
        """The same with all that a curve says."""
        return replace(
            self,
            records=curve.inside + curve.outside,
            auc=curve.auc,
            true_at_0_1_percent=curve.true_at(0.001),
            true_at_1_percent=curve.true_at(0.01),
            balanced_accuracy=curve.balanced,
            curve=curve.thinned(),
        )

    @property
    def refutes(self) -> bool:
        """Whether it shows that more leaks than the ledger says."""
        promised = [
            (self.epsilon_at_least, self.epsilon_ledger),
            (self.mu_at_least, self.mu_ledger),
        ]
        return any(
            shown is not None and said is not None and shown > said for shown, said in promised
        )


COLUMNS = [f.name for f in fields(Finding) if f.name != "curve"]


@dataclass(frozen=True)
class Result:
    """All findings of an audit."""

    kind: Kind
    findings: Sequence[Finding]
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def missed(self) -> list[str]:
        """Controls of which no attack caught anything: such an audit says nothing."""
        controls: dict[str, bool] = {}
        for finding in self.findings:
            if finding.control and finding.caught is not None:
                known = controls.get(finding.subject, False)
                controls[finding.subject] = known or finding.caught
        return [subject for subject, caught in controls.items() if not caught]

    @property
    def refuted(self) -> list[Finding]:
        """What is not as private as its ledger says; controls are made to be that."""
        return [found for found in self.findings if found.refutes and not found.control]

    def as_dict(self) -> dict[str, Any]:
        """The layout of audit.json."""
        return {
            "audit": self.kind,
            "version": VERSION,
            "settings": dict(self.settings),
            "controls_caught": not self.missed,
            "ledger_refuted": bool(self.refuted),
            "findings": [asdict(found) for found in self.findings],
            "notes": list(self.notes),
        }

    def write(self, folder: Path) -> list[Path]:
        """JSON and CSV, each there whole or not at all; the last one is audit.json."""
        folder.mkdir(parents=True, exist_ok=True)
        table = io.StringIO()
        rows = csv.writer(table, lineterminator="\n")
        rows.writerow(COLUMNS)
        for found in self.findings:
            values = (getattr(found, name) for name in COLUMNS)
            rows.writerow(["" if value is None else value for value in values])
        write_whole(folder / "audit.csv", table.getvalue())
        write_whole(folder / "audit.json", json.dumps(self.as_dict(), indent=1) + "\n")
        return [folder / "audit.json", folder / "audit.csv"]
