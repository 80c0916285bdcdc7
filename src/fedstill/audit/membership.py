"""Membership inference: whether a run tells if a record was in somebody's training data.

Beside the likelihood-ratio attack stand two plain ones: a threshold on what the run says of a
record, and the same with test examples as the records outside, in the way of DeSA's figure 4 (its
paper names the attack, publishes no code, and tells training from testing data).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.audit import lira
from fedstill.audit.result import Finding, Result
from fedstill.audit.shadows import (
    Floats,
    Inside,
    Said,
    Shadowing,
    check_clients,
    shadowed,
)
from fedstill.audit.statistics import CONFIDENCE, curve, one_run
from fedstill.audit.views import TRAINED
from fedstill.core import ranges
from fedstill.core.errors import BadValue, RunFolderError
from fedstill.core.files import write_whole
from fedstill.core.ranges import Count, Share, Whole
from fedstill.core.records import NodeId
from fedstill.engines.execution import Execution
from fedstill.federation.experiment import Experiment
from fedstill.methods.feddm import FedDM
from fedstill.methods.local import Local
from fedstill.methods.virtual import Virtual

PLAN = "audit-plan.json"
LOCAL_CONTROL = "control: local training"
REAL_CONTROL = "control: raw upload"
ONLINE, OFFLINE, PLAIN = "LiRA online", "LiRA offline", "plain threshold"
AGAINST_TESTS = "training against test"


@dataclass(frozen=True)
class Guessing:
    """How many guesses a lower bound of epsilon rests on, fixed before any score is seen."""

    share_in: Share = 0.05  # of the records of the run that is the target
    share_out: Share = 0.0
    delta: Share = 1e-5

    def __post_init__(self) -> None:
        wrong = ranges.faults(self)
        if not wrong and not 0 < self.share_in + self.share_out <= 1:
            wrong = ["share_in and share_out: their sum must be above 0 and at most 1"]
        if wrong:
            raise BadValue(wrong)

    def numbers(self, records: int) -> tuple[int, int]:
        """Guesses "in" and "out" among so many records."""
        least = min(20, records // 4)  # fewer prove nothing at all
        guessed_in = round(self.share_in * records)
        guessed_out = round(self.share_out * records)
        return (max(guessed_in, least) if self.share_in else 0), (
            max(guessed_out, least) if self.share_out else 0
        )


@dataclass(frozen=True)
class Controls:
    """What must be caught, or the audit says nothing."""

    local_epochs: Whole = 40  # of training on the records alone; 0: none
    images: Whole = 10  # of each class that are sent as they are; 0: none
    lr: float = 0.01
    momentum: float = 0.9
    batch_size: Count = 32


@dataclass(frozen=True, eq=False)
class Subject:
    """An experiment that is audited, or a control."""

    label: str
    experiment: Experiment
    control: bool = False
    epsilon: float | None = None  # what its ledger promises
    virtual: Virtual | None = None  # with what clients distil their records before they learn

    def caught(self, found: Finding) -> bool | None:
        return None if not self.control else bool(found.epsilon_at_least)


@dataclass(frozen=True)
class Only:
    """These clients alone take part."""

    clients: tuple[NodeId, ...]

    def awake(self, round: int, members: Sequence[NodeId], seed: int) -> list[NodeId]:
        return sorted(self.clients)


def controls(
    experiment: Experiment, asked: Controls, clients: Sequence[NodeId]
) -> tuple[list[Subject], list[str]]:
    """Local training to the end, and a raw upload, on the same data; and what is left out."""
    only, made, notes = Only(tuple(clients)), [], []
    population = experiment.population
    if asked.local_epochs:
        alone = Local(
            lr=asked.lr, momentum=asked.momentum, epochs=asked.local_epochs,
            batch_size=asked.batch_size,
        )  # fmt: skip
        local = Experiment(alone, population, rounds=1, sampling=only)
        made.append(Subject(LOCAL_CONTROL, local, control=True))
    if asked.images:
        sends = FedDM(
            upload="real", per_class=asked.images, server_epochs=1, server_augmentation="none",
            augmentation="none",
        )  # fmt: skip
        try:
            real = Experiment(sends, population, rounds=1, sampling=only)
            made.append(Subject(REAL_CONTROL, real, control=True))
        except BadValue as error:
            notes.append(f"no control with a raw upload: {error}")
    return made, notes


Watch = Callable[[str, float], None]  # told the subject and which share of it is done


def membership(
    subjects: Sequence[Subject],
    execution: Execution,
    asked: Shadowing,
    folder: Path,
    *,
    guessing: Guessing | None = None,
    digests: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    watch: Watch = lambda label, share: None,
) -> Result:
    """Attack every subject with shadows; what is found is also written into the folder.

    A folder in which the same audit was stopped is gone on with. `digests` say what each subject
    is, so that another one is refused there.
    """
    guessing = guessing or Guessing()
    settings = {**asdict(asked), **asdict(guessing), "confidence": CONFIDENCE}
    labels = [subject.label for subject in subjects]
    for subject in subjects:  # what can be refused is refused before the folder is taken
        check_clients(subject.experiment.population, asked.clients)
    begin(folder, {"settings": settings, "subjects": labels, "digests": dict(digests or {})})
    findings: list[Finding] = []
    for place, subject in enumerate(subjects):
        kept = folder / "shadows" / f"{place:02d}"

        def told(share: float, label: str = subject.label) -> None:
            watch(label, share)

        told(0.0)
        said = shadowed(subject.experiment, execution, asked, kept, told, subject.virtual)
        findings += found_in(subject, said, guessing)
    result = Result("membership", findings, settings, [*notes, *remarks(asked)])
    result.write(folder)
    return result


def begin(folder: Path, plan: Mapping[str, Any]) -> None:
    """Take a folder, or go on in it where the very same audit was begun."""
    path, text = folder / PLAN, json.dumps(plan, indent=1, default=list) + "\n"
    if not path.exists():
        if folder.exists() and any(folder.iterdir()):
            raise RunFolderError(
                f"{folder} is not empty and holds no audit; give another folder by --out"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    elif path.read_text(encoding="utf-8") != text:
        before = json.loads(path.read_text(encoding="utf-8"))
        differing = [name for name, value in json.loads(text).items() if before.get(name) != value]
        raise RunFolderError(
            f"{folder} holds an audit with other {', '.join(differing)}; give another folder by "
            "--out, or the values it was begun with"
        )


def found_in(subject: Subject, said: Said, guessing: Guessing) -> Iterator[Finding]:
    """Every attack on everything that was seen of a subject."""
    for (client, view), statistic in said.records.items():
        inside, tests = said.inside[client], said.tests[client, view]
        base = Finding(
            subject.label, view, "", client, subject.control, epsilon_ledger=subject.epsilon
        )
        if tests.size and view != TRAINED:
            base = replace(
                base, fit=float((statistic[inside] > 0).mean()), test=float((tests > 0).mean())
            )
        for attack, scores in attacks(statistic, inside).items():
            found = replace(base, attack=attack).with_curve(curve(scores, inside))
            bound = bounded(scores, inside, guessing)
            found = replace(found, **bound)
            yield replace(found, caught=subject.caught(found))
        if tests.size:
            members = np.r_[statistic[inside], tests.ravel()]
            which = np.arange(members.size) < int(inside.sum())
            found = replace(base, attack=AGAINST_TESTS).with_curve(curve(members, which))
            yield replace(found, caught=None)


def attacks(statistic: Floats, inside: Inside) -> dict[str, Floats]:
    """[run, record], the scores of each attack that guesses about the pool."""
    return {
        ONLINE: lira.online(statistic, inside),
        OFFLINE: lira.offline(statistic, inside),
        PLAIN: statistic,
    }


def bounded(scores: Floats, inside: Inside, guessing: Guessing) -> dict[str, Any]:
    """What guesses about the first run alone prove; the others are what the attacker knows.

    Coins of one run are independent, so the bound of a single run holds for it. Of several it
    would have to pay for the choice among them.
    """
    guessed_in, guessed_out = guessing.numbers(inside.shape[1])
    found = one_run(
        scores[0], inside[0], guessed_in=guessed_in, guessed_out=guessed_out, delta=guessing.delta
    )
    return {
        "guesses": found.guesses, "right": found.right, "epsilon_at_least": found.epsilon
    }  # fmt: skip


def remarks(asked: Shadowing) -> list[str]:
    """What a reader must know of how the figures were made."""
    pooled = asked.shadows < lira.ENOUGH
    return [
        "each of the shadows is once the target and the others are its shadows; curves are of all "
        "targets together",
        "epsilon_at_least rests on the guesses about the first shadow alone",
        *(
            [
                f"fewer than {lira.ENOUGH} shadows: one variance for all records, which makes the "
                "attack weaker than it could be"
            ]
            if pooled
            else []
        ),
    ]
