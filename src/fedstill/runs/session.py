"""A run while it lasts: an engine plays, and nothing that was written is ever lost."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from fedstill.core import ranges, source
from fedstill.core.errors import BadValue, RunFolderError
from fedstill.core.files import write_whole
from fedstill.core.node import Cache
from fedstill.core.ranges import Count
from fedstill.core.release import Spending
from fedstill.engines import checkpoint
from fedstill.engines.engine import Engine
from fedstill.engines.execution import Execution, engine_of
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks.leader import Leader
from fedstill.engines.ranks.protocol import LEADER, Ready, Transport
from fedstill.federation.budget import calibrated
from fedstill.federation.experiment import Experiment
from fedstill.federation.post import idle_channels
from fedstill.federation.run import Progress, Save, Watch, run
from fedstill.logbook.events import Note
from fedstill.logbook.reader import Run, read_run
from fedstill.logbook.rows import Rows
from fedstill.logbook.summary import summarise, write_summary
from fedstill.logbook.writer import FolderLog, Logbook, MemoryLog
from fedstill.metrics import counting, lowest
from fedstill.privacy.privacy import Privacy
from fedstill.privacy.summary import summary_of, words_of
from fedstill.recipe.tables import TrackTable
from fedstill.runs import folder as folders
from fedstill.runs import pictures
from fedstill.runs.digest import (
    Description,
    code_of,
    content_digest,
    decisive_of,
    differences,
    digest,
    named_networks,
)
from fedstill.runs.track import TrackedLog, check_libraries, trackers_of

ASLEEP = "asleep"  # clients' memories beyond a limit, while a run lasts


# Drawn and synthetic sets kept for reports, these alone, or nothing.
Pictures = bool | Literal["sets"]


@dataclass(frozen=True)
class Keeping:
    """What is kept of a run in its folder."""

    checkpoint_every: Count = 1  # rounds
    keep_checkpoints: Count = 2
    pictures: Pictures = True

    def __post_init__(self) -> None:
        if wrong := ranges.faults(self):
            raise BadValue(wrong)


@dataclass(frozen=True)
class Agreed:
    """For a run between parties that keep their data: its digest, and what plays with others."""

    digest: str
    engine: Callable[[InProcess], Engine]


class Session:
    """One run from its beginning or a checkpoint to its end, in a folder or in memory alone.

    Of several ranks, this is the leader's. What can be refused is refused when it is made. What
    was `spent` before it began, under a `privacy` that its experiment no longer has, is of its
    ledger.
    """

    def __init__(
        self,
        experiment: Experiment,
        execution: Execution,
        about: Description,
        *,
        folder: Path | None = None,
        keeping: Keeping | None = None,
        watch: Watch | None = None,
        cache: Cache | None = None,
        notes: Sequence[str] = (),
        transport: Transport | None = None,
        track: TrackTable | None = None,
        privacy: Privacy | None = None,
        spent: Sequence[Spending] = (),
        agreed: Agreed | None = None,
    ):
        check_libraries(track)
        self.about, self.folder, self.track = about, folder, track
        self.keeping = keeping or Keeping()
        self.watch = watch
        some = folder is not None and self.keeping.pictures
        shown = experiment.population.clients[: pictures.MOST_GALLERIES] if some else ()
        self.gallery = pictures.Gallery(last=experiment.rounds, on_the_way=shown)
        self.experiment = experiment = calibrated(experiment, execution)
        self.privacy = experiment.privacy if privacy is None else privacy
        self.spent = spent
        self.own_engine = engine_of(self.experiment, execution, cache=cache)
        self.engine = spread(self.own_engine, transport)
        self.device = self.own_engine.device
        self.code = code_of(experiment.method)
        if agreed is not None:
            self.engine, self.digest = agreed.engine(self.own_engine), agreed.digest
        else:
            self.digest = "" if folder is None else digest(about.decisive, experiment.population)
        self.notes = [*experiment.population.notes, *execution.notes(experiment.networks), *notes]
        self.engine_note = f"{self.engine.name}, {execution.why_engine()}"
        self._said = 0  # bytes
        self._clock: float | None = None  # simulated seconds
        if isinstance(self.engine, Leader):
            self.engine_note += f", over {self.engine.transport.size} ranks"
            self.engine.check_ready(standing(digest(about.decisive, experiment.population)))

    def begin(self) -> Rows:
        """Play from the beginning, in a folder where nobody else writes now."""
        folder = self.folder
        if folder is None:
            return self._play(None, None)
        data = self.experiment.population.data
        folders.begin(folder, self.about.file, self.about.text, data, self.experiment.graph)
        with self.engine.spilling_to(folder / ASLEEP):
            return self._play(folder, None)

    def resume(self, *, changed: bool, written: Mapping[str, Any] | None = None) -> Rows:
        """Go on from the newest checkpoint of the folder, where nobody else writes now.

        What the folder says of the run is written anew if it has `changed`. `written` are its
        decisive values as they stand there; an earlier fedstill may have had fewer.
        """
        folder = self.folder
        if folder is None:
            raise RunFolderError("a run goes on from its folder; give the one it was begun in")
        with self.engine.spilling_to(folder / ASLEEP):
            before = self._digest_before(folder, written)
            saved = self.engine.load(folder / "checkpoints", digest=before)
            if saved is not None:
                self._check_rounds(folder, saved)
                if before != self.digest:  # first the checkpoint: it is found by either digest
                    self._checkpoint(folder, saved.round, saved.extra)
                    changed = True
            with folders.writing(folder):
                if changed:
                    write_whole(folder / self.about.file, self.about.text)
                if saved is None or saved.round < self.experiment.rounds:  # no longer finished
                    (folder / "summary.json").unlink(missing_ok=True)
            return self._play(folder, saved)

    def _digest_before(self, folder: Path, written: Mapping[str, Any] | None) -> str:
        """This run's digest, or the one it had when an earlier fedstill began it."""
        if written is None:
            return self.digest
        older = digest(written, self.experiment.population)
        found = checkpoint.digests(folder / "checkpoints")
        return older if older in found and self.digest not in found else self.digest

    def _check_rounds(self, folder: Path, saved: checkpoint.Saved) -> None:
        wanted, ended = self.experiment.rounds, saved.extra.get("ended", False)
        check_rounds(folder, wanted, saved.round, ended=ended)
        if wanted > saved.round and ended and self.experiment.method.after():
            raise RunFolderError(
                f"{folder} cannot get more rounds: {self.about.method} has played its steps after "
                f"the last one; run the recipe with run.rounds={wanted} in a new folder"
            )

    def _play(self, folder: Path | None, saved: checkpoint.Saved | None) -> Rows:
        done = None if saved is None else saved.round
        if saved is not None:
            self._said = int(saved.extra.get("said", 0))
            self._clock = saved.extra.get("clock")
        if folder is None:
            log = MemoryLog()
            self._run(log, done, self._first_notes(saved), lambda round: None)
            rows = log.rows()
        else:
            with FolderLog(folder) as kept, self._tracked(kept, done) as log_of_all:
                kept.rewind(-1 if done is None else done)
                save = partial(self._save, folder, kept)
                self._run(log_of_all, done, self._first_notes(saved), save)
            rows = read_run(folder, unfinished=True)
            self._finish(folder, rows)
        if isinstance(self.engine, Leader):
            self.engine.over()
        return rows

    def _run(self, log: Logbook, done: int | None, notes: Sequence[Note], save: Save) -> None:
        for note in notes:
            log.write(note)
        for row in self.spent if done is None else ():
            log.write(row)
        run(
            self.engine, log, done=done, said=self._said, now=self._clock or 0.0, save=save,
            watch=self._watched, observers=[self.gallery],
        )  # fmt: skip

    @contextmanager
    def _tracked(self, log: Logbook, done: int | None) -> Iterator[Logbook]:
        """The logbook, told to trackers as well where the recipe names some."""
        if self.track is None or self.folder is None:
            yield log
            return
        made_of_objects = self.about.file.endswith(".json")
        about = (json if made_of_objects else tomllib).loads(self.about.text)
        tracked = TrackedLog(log, trackers_of(self.track, self.folder, about, done))
        try:
            yield tracked
            tracked.pass_on()
        except BaseException:
            tracked.end(finished=False)
            raise
        tracked.end(finished=True)

    def _watched(self, progress: Progress) -> None:
        self._said, self._clock = progress.bytes, progress.clock
        if self.watch is not None:
            self.watch(progress)

    def _save(self, folder: Path, log: FolderLog, round: int) -> None:
        """Pictures on the way, and a checkpoint, behind which all rows are on the disk."""
        engine, ended = self.engine, round == self.experiment.rounds
        if self.keeping.pictures:
            pictures.keep_sets(engine, folder / "pictures" / "synthetic", round, self.gallery)
        if self.keeping.pictures is True:
            pictures.draw_on_the_way(engine, folder / "pictures", round)
            if ended:
                pictures.draw_sets(engine, folder / "pictures", self.gallery)
        if ended or round % self.keeping.checkpoint_every == 0:
            log.flush()
            clock = {} if self._clock is None else {"clock": self._clock}
            code = {} if self.code is None else {"code": self.code}
            self._checkpoint(folder, round, {"said": self._said, "ended": ended, **clock, **code})

    def _checkpoint(self, folder: Path, round: int, extra: Mapping[str, Any]) -> None:
        self.engine.save(
            folder / "checkpoints", round, digest=self.digest,
            keep=self.keeping.keep_checkpoints, extra=extra,
        )  # fmt: skip

    @property
    def held_out(self) -> int:
        """Training examples on which models are scored in place of the test sets."""
        data = self.experiment.population.data
        return 0 if data is None else data.held_out

    def _first_notes(self, saved: checkpoint.Saved | None) -> list[Note]:
        """What a reader must know of a run's beginning, or of where it goes on."""
        if saved is None:
            about_data = [Note(0, "data", "", text) for text in self.notes]
            if self.privacy is not None:
                about_data += [Note(0, "privacy", "", text) for text in words_of(self.privacy)]
            idle = idle_channels(self.experiment.method, self.experiment.channels)
            about_data += [Note(0, "warning", "", text) for text in idle]
            return [Note(0, "engine", "", self.engine_note), *about_data]
        where = Note(saved.round, "resumed", "", f"from the end of round {saved.round}")
        warnings = [*saved.notes]
        if "code" in saved.extra and saved.extra["code"] != self.code:
            warnings.append(
                f"the code of {self.about.method} has changed since round {saved.round}; this run "
                "is that of neither"
            )
        return [where, *(Note(saved.round, "warning", "", text) for text in warnings)]

    def summary(self, rows: Rows) -> dict[str, Any]:
        """A run in one table."""
        population = self.experiment.population
        data = None if self.privacy is not None else population.data  # its sizes may be private
        facts: dict[str, Any] = {}
        if self.privacy is not None:
            facts["privacy"] = summary_of(self.privacy, rows.privacy)
        return summarise(
            rows,
            rounds=self.experiment.rounds,
            lower_is_better=lowest(self.experiment.metrics),
            counts=counting(self.experiment.metrics),
            method=self.about.method,
            label=self.about.label,
            seed=self.experiment.seed,
            data=self.about.data,
            data_digest=self._data_digest(),
            held_out=self.held_out,
            engine=self.engine.name,
            device=str(self.device),
            networks=named_networks(population.models),
            examples={} if data is None else {site.name: len(site) for site in data.sites},
            **facts,
        )

    def _data_digest(self) -> str | None:
        """What the data are; a digest of private records would confirm a guess of them."""
        data = self.experiment.population.data
        return None if data is None or self.privacy is not None else content_digest(data)

    def _finish(self, folder: Path, rows: Run) -> None:
        summary = self.summary(rows)
        if self.keeping.pictures is True:
            pictures.draw(self.engine, replace(rows, summary=summary), folder / "pictures")
        write_summary(folder, summary)


def run_experiment(
    experiment: Experiment,
    execution: Execution,
    about: Description,
    *,
    folder: Path | None,
    resume: bool,
    keeping: Keeping,
    watch: Watch | None,
    track: TrackTable | None = None,
) -> tuple[Session, Rows]:
    """Play an experiment made of objects, from the beginning or from a folder's checkpoint."""
    with ExitStack() as held:
        before = None
        if folder is not None:
            held.enter_context(folders.alone(folder))
        going_on = resume and folder is not None and folders.description_in(folder) is not None
        if folder is not None and not going_on:
            folders.check_free(folder)
        if going_on and folder is not None:
            before = _before(folder)
            if checkpoint.latest(folder / "checkpoints") is not None:
                check_same(folder, decisive_of(json.loads(before)), about.decisive)
        held.enter_context(execution.applied(experiment.networks))
        session = Session(
            experiment, execution, about, folder=folder, keeping=keeping, watch=watch, track=track
        )
        if before is None:
            return session, session.begin()
        return session, session.resume(changed=before != about.text)


def _before(folder: Path) -> str:
    """What a folder says of the experiment that was begun in it."""
    path = folder / "experiment.json"
    if not path.exists():
        raise RunFolderError(
            f"{folder} holds the run of a recipe; continue it with `fedstill resume {folder}`, or "
            "give another folder"
        )
    folders.check_version(folder)
    return path.read_text(encoding="utf-8")


def spread(own: InProcess, transport: Transport | None) -> Engine:
    """The engine over all ranks where this one leads, else the rank's own."""
    leads = transport is not None and transport.rank == LEADER
    return Leader(own, transport) if leads and transport else own


def standing(digest: str) -> Ready:
    """What all ranks must share."""
    return Ready(digest, f"{source.own_version()}, torch {torch.__version__}")


def check_rounds(folder: Path, wanted: int, played: int, *, ended: bool) -> None:
    """Refuse to end a run after fewer rounds than it has played."""
    if wanted < played or (wanted == played and not ended):
        raise RunFolderError(
            f"{folder} was to play more and has played {played} rounds already, so it cannot end "
            f"after run.rounds = {wanted}; run the recipe again in a new folder"
        )


def check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on in a folder with other decisive values, and say which."""
    changed = differences(before, now)
    if changed:
        private = now.get("privacy") or before.get("privacy")
        free = "names" if private else "rounds, names"
        why = (
            "; the noise of a private run was found for its rounds and its budget"
            if private
            else ""
        )
        raise RunFolderError(
            f"{folder} cannot be resumed with other values: {'; '.join(changed)}. Only {free}, "
            f"devices and what is written may change{why}; for other values use a new folder"
        )
