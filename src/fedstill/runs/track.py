"""Trackers: what the logbook is told goes to TensorBoard, Weights & Biases or MLflow as well.

[track]
to = ["tensorboard"]

Everything lies in the run's folder, below `track/`, unless a recipe asks for a server. Trackers see
the logbook's events alone; methods know nothing of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fedstill.core.errors import FedstillError, told
from fedstill.logbook.events import Event, Note, Number, Traffic
from fedstill.logbook.rows import EVALUATION, known, mean
from fedstill.logbook.writer import Logbook
from fedstill.recipe.tables import TrackTable

FOLDER = "track"
LAST_OF_A_ROUND = "round"  # the step under which a round's seconds are written, after all else


class Tracker(Protocol):
    """Takes the numbers of a round and the notes of a run."""

    def numbers(self, round: int, values: Mapping[str, float]) -> None:
        """All numbers of one round, by name."""

    def note(self, round: int, kind: str, text: str) -> None:
        """A sentence about the run."""

    def end(self, finished: bool) -> None:
        """Nothing more comes, because the run has finished or because it was stopped."""


class Round:
    """The events of a round as few numbers: means over those who log, sums of what was sent."""

    def __init__(self) -> None:
        self.logged: dict[str, list[float]] = {}
        self.sent: dict[str, float] = {}

    def add(self, event: Number | Traffic) -> None:
        """Take one event."""
        if isinstance(event, Traffic):
            name = f"bytes/{event.direction}"
            self.sent[name] = self.sent.get(name, 0.0) + event.bytes
            return
        self.logged.setdefault(f"{event.step}/{event.name}", []).append(event.value)
        if event.step == EVALUATION and event.target:
            place = f"{event.name} by test set/{event.target}"
            self.logged.setdefault(place, []).append(event.value)

    def values(self) -> dict[str, float]:
        """A number for each name; what is undefined everywhere is left out."""
        means = {name: known(values) for name, values in self.logged.items()}
        return {name: mean(values) for name, values in means.items() if values} | self.sent


class TrackedLog:
    """A logbook that tells trackers what it is told, a round at a time.

    A tracker that fails is told no more, which a note says; the run goes on.
    """

    def __init__(self, log: Logbook, trackers: Mapping[str, Tracker]):
        self.log, self.trackers = log, dict(trackers)
        self.rounds: dict[int, Round] = {}
        self.latest = 0

    def write(self, event: Event) -> None:
        """Keep one event, and pass the round on when it is complete."""
        self.log.write(event)
        self.latest = event.round
        if isinstance(event, Note):
            self._tell(lambda tracker: tracker.note(event.round, event.kind, event.text))
        if not isinstance(event, (Number, Traffic)):
            return
        self.rounds.setdefault(event.round, Round()).add(event)
        if isinstance(event, Number) and event.step == LAST_OF_A_ROUND:
            self.pass_on()

    def pass_on(self) -> None:
        """Hand over all that has gathered."""
        for round, gathered in sorted(self.rounds.items()):
            self._tell_numbers(round, gathered.values())
        self.rounds = {}

    def end(self, finished: bool) -> None:
        """Say that nothing more comes."""
        self._tell(lambda tracker: tracker.end(finished))

    def _tell_numbers(self, round: int, values: Mapping[str, float]) -> None:
        self._tell(lambda tracker: tracker.numbers(round, values))

    def _tell(self, say: Callable[[Tracker], None]) -> None:
        failed: dict[str, str] = {}
        for name, tracker in self.trackers.items():
            try:
                say(tracker)
            except Exception as error:
                failed[name] = _cause(error)
        self.trackers = {n: tracker for n, tracker in self.trackers.items() if n not in failed}
        for name, cause in failed.items():
            text = f"the tracker {name} failed and is told no more: {cause}"
            self.write(Note(self.latest, "warning", "", text))


class TensorBoard:
    """Scalars and notes as TensorBoard reads them, in a folder."""

    def __init__(self, place: Path, about: Mapping[str, Any], table: TrackTable, after: int | None):
        board = _library("torch.utils.tensorboard", "tensorboard")
        self.writer = board.SummaryWriter(
            str(place / "tensorboard"), purge_step=None if after is None else after + 1
        )

    def numbers(self, round: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, round)
        self.writer.flush()

    def note(self, round: int, kind: str, text: str) -> None:
        self.writer.add_text(f"notes/{kind}", text, round)

    def end(self, finished: bool) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; offline unless the recipe says `online`."""

    def __init__(self, place: Path, about: Mapping[str, Any], table: TrackTable, after: int | None):
        wandb = _library("wandb", "wandb")
        place.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=table.project,
            name=_name(about),
            dir=str(place),
            mode="online" if table.online else "offline",
            config=dict(about),
            id=_identity(place),
            resume="allow" if table.online else None,
        )

    def numbers(self, round: int, values: Mapping[str, float]) -> None:
        self.run.log({"round": round, **values}, step=round)

    def note(self, round: int, kind: str, text: str) -> None:
        self.run.summary[f"note of round {round}: {kind}"] = text

    def end(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


class MLflow:
    """A run of MLflow in a store of the run's folder, or at the address that the recipe gives."""

    def __init__(self, place: Path, about: Mapping[str, Any], table: TrackTable, after: int | None):
        tracking = _library("mlflow.tracking", "mlflow")
        place.mkdir(parents=True, exist_ok=True)
        store = table.uri or f"sqlite:///{(place / 'mlflow.db').absolute()}"
        self.client = tracking.MlflowClient(store)
        found = self.client.get_experiment_by_name(table.project)
        made = found.experiment_id if found else self.client.create_experiment(table.project)
        earlier = self.client.search_runs([made], f"tags.folder = '{_identity(place)}'")
        if earlier:
            self.run = earlier[0].info.run_id
            self.client.update_run(self.run, "RUNNING")
        else:
            tags = {"folder": _identity(place), "mlflow.runName": _name(about)}
            self.run = self.client.create_run(made, tags=tags).info.run_id
            for key, value in _flat(about).items():
                self.client.log_param(self.run, key, value)

    def numbers(self, round: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.client.log_metric(self.run, _plain(name), value, step=round)

    def note(self, round: int, kind: str, text: str) -> None:
        self.client.set_tag(self.run, _plain(f"note/{round}/{kind}"), text[:5000])

    def end(self, finished: bool) -> None:
        self.client.set_terminated(self.run, "FINISHED" if finished else "FAILED")


TRACKERS: dict[str, Any] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def trackers_of(
    table: TrackTable, folder: Path, about: Mapping[str, Any], after: int | None
) -> dict[str, Tracker]:
    """The trackers that a recipe names, for a run that goes on after a round or begins."""
    trackers: dict[str, Tracker] = {}
    for name in table.to:
        try:
            trackers[name] = TRACKERS[name](folder / FOLDER, about, table, after)
        except Exception as error:
            raise FedstillError(
                f"the tracker {name} that [track] names could not begin: {_cause(error)}; mend "
                f"that, or leave {name} out of track.to"
            ) from error
    return trackers


def check_libraries(table: TrackTable | None) -> None:
    """Refuse a tracker that is not installed, before a run begins."""
    libraries = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
    for name in () if table is None else table.to:
        _library(libraries[name], name)


def _library(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise FedstillError(
            f"[track] names {extra}, which is not installed: pip install 'fedstill[{extra}]'"
        ) from error


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {told(str(error))}"


def _name(about: Mapping[str, Any]) -> str:
    method, run = about.get("method", {}), about.get("run", {})
    return f"{method.get('label', method.get('name', 'run'))} seed {run.get('seed', 0)}"


def _identity(place: Path) -> str:
    """The same name for the same folder, in the letters that trackers take."""
    return re.sub(r"[^A-Za-z0-9-]", "-", str(place.parent.absolute()).strip("/"))[-60:]


def _plain(name: str) -> str:
    """A name in the letters that MLflow takes."""
    return re.sub(r"[^A-Za-z0-9_\-. /]", "_", name)


def _flat(table: Mapping[str, Any], above: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{above}{key}.")
        else:
            flat[_plain(f"{above}{key}")] = str(value)[:500]
    return flat
