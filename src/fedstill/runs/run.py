"""Run: what a run left, to be asked; runs compared and drawn together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedstill.core.errors import BadValue, RunFolderError, unknown
from fedstill.core.method import Method, Place
from fedstill.core.model import Model
from fedstill.core.node import SERVER
from fedstill.core.precision import other_defaults
from fedstill.core.records import NodeId, State, Weights
from fedstill.engines.engine import Engine
from fedstill.engines.execution import Execution
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.experiment import Experiment
from fedstill.federation.run import Watch
from fedstill.logbook import reader
from fedstill.logbook.environment import environment
from fedstill.logbook.events import Traffic
from fedstill.models.plain import as_module, fits
from fedstill.recipe.build import experiment_of
from fedstill.recipe.tables import TrackTable
from fedstill.runs import export as exports
from fedstill.runs import notebook
from fedstill.runs.digest import of_experiment
from fedstill.runs.pictures import Gallery, figures, pictures_of
from fedstill.runs.recipes import recipe_of
from fedstill.runs.session import Keeping, Pictures, run_experiment
from fedstill.runs.track import TRACKERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedstill.report.tables import Comparison

Against = Literal["round", "bytes"]


@dataclass(frozen=True, eq=False)
class Trained:
    """A network with the weights that a run gave it; called with inputs it returns logits.

    Inputs are normalised as a client normalises its own: `population.party(name).test` gives such.
    """

    network: Model
    weights: Weights | None  # None where what the party remembers is not one set of weights
    state: State | None
    _predict: Any = field(repr=False)

    @torch.no_grad()
    def __call__(self, x: Tensor | NDArray[Any]) -> Tensor:
        """[example, class], logits in evaluation mode."""
        inputs = torch.as_tensor(x)
        if not inputs.is_floating_point():
            raise BadValue(
                f"inputs must be floats as a client normalises its own, but are {inputs.dtype}; "
                "population.party(name).test.all().x holds such"
            )
        if inputs.shape[1:] != torch.Size(self.network.shape):
            wanted = ", ".join(map(str, ("example", *self.network.shape)))
            one = "; for one example x[None]" if inputs.shape == self.network.shape else ""
            raise BadValue(f"inputs must be [{wanted}], but are {list(inputs.shape)}{one}")
        logits: Tensor = self._predict(inputs.float())
        return logits

    def module(self) -> nn.Module:
        """An ordinary `torch.nn.Module` in evaluation mode; of your own module, your own class."""
        if self.weights is None or not fits(self.network, self.weights):
            raise RunFolderError(
                f"the method trains its own variant of {self.network.title}; call the model "
                "itself, or take its weights"
            )
        return as_module(self.network, self.weights)

    def state_dict(self) -> dict[str, Tensor]:
        """The weights as `load_state_dict` of the ordinary module takes them."""
        return self.module().state_dict()


def _check_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that no number has; accuracy is known where nothing was evaluated too."""
    from fedstill.report.groups import ACCURACY, unknown_number

    names = {*known}
    if name not in {ACCURACY, *names}:
        raise BadValue(unknown_number(kind, name, names))


def _keeps_a_model(method: Method, node: NodeId, state: State | None) -> bool:
    """Whether a node is scored by what it remembers, or remembers weights besides."""
    is_scored = (method.scored is Place.SERVER) == (node == SERVER)
    return state is not None and (is_scored or getattr(state, "weights", None) is not None)


def _no_model(experiment: Experiment, engine: Engine, node: NodeId) -> str:
    """That a node keeps no model, and who does."""
    known = (SERVER, *experiment.population.clients)
    who = [one for one in known if _keeps_a_model(experiment.method, one, engine.memory(one))]
    told = f"{node} keeps no model after this run"
    if not who:
        return f"{told}, nor does anybody else"
    others = ", ".join(who[:5]) + (", …" if who[5:] else "")
    return f"{told}; ask for that of {others}: run.model({who[0]!r})"


@dataclass(frozen=True, eq=False)
class Run(reader.Run):
    """A run that has ended, in a folder or in memory alone.

        run = fedstill.run(experiment)
        run.summary["average_accuracy"]
        run.accuracy_by_round()          # {1: 0.31, 2: 0.45, …}
        run.plot("accuracy.png")
        run.model()(images)              # logits of the server's model

    `metrics`, `messages` and `notes` are the rows of its tables, in the order of writing.
    """

    experiment: Experiment | None = None
    engine: Engine | None = None  # that played, where what it remembers is not in the folder
    gallery: Gallery | None = None  # images that were sent in the last round, likewise

    @property
    def traffic(self) -> Sequence[Traffic]:
        """A row for every field of every message: floats and bytes as said, and hearers."""
        return self.messages

    @property
    def pictures(self) -> Sequence[Path] | Sequence[Figure]:
        """The pictures that were drawn into the folder; of a run in memory, the figures."""
        if self.folder is not None:
            return pictures_of(self.folder)
        if self.engine is None or self.gallery is None:
            return []
        return figures(self.engine, self, self.gallery)

    def series(
        self, name: str, node: str | None = None, target: str | None = None, step: str | None = None
    ) -> dict[int, float]:
        """The value of each round; the mean over the rows of a round where several remain.

        A name that no row has is refused, for the run has ended and will not have it later.
        """
        _check_known("series", name, (row.name for row in self.metrics))
        return super().series(name, node, target, step)

    def metric_by_round(self, name: str, node: str | None = None) -> dict[int, float]:
        """The unweighted mean over test sets; a name that was not measured is refused."""
        _check_known("metric", name, self.metric_names())
        return super().metric_by_round(name, node)

    def plot(self, path: Path | str | None = None, *, by: Against = "round") -> Figure | Path:
        """Accuracy by round, or by bytes sent: a figure, or where it was written to."""
        return plot([self], path, by=by)

    def model(self, node: NodeId = SERVER) -> Trained:
        """The network of the server, or of a client by name, as it was after the last round."""
        experiment = self._experiment()
        known = (SERVER, *experiment.population.clients)
        if node not in known:
            raise RunFolderError(unknown("party", str(node), known))
        engine = self._engine(experiment)
        state = engine.memory(node)
        if not _keeps_a_model(experiment.method, node, state):
            raise RunFolderError(_no_model(experiment, engine, node))
        party = engine.node(node, experiment.rounds, "predict")
        if node == SERVER:  # as where it is scored
            party.state = experiment.method.scored_state(party)

        def predict(x: Tensor) -> Tensor:
            return experiment.method.predict(party, x.to(party.device))

        return Trained(party.model, getattr(state, "weights", None), state, predict)

    def export(self, out: Path | str, node: NodeId | None = None) -> list[Path]:
        """Write the server's model, or a client's by name, for plain PyTorch: the files written.

        Weights as safetensors, a description beside them and, where there is some, code.
        """
        if self.folder is not None and self.experiment is None:
            return exports.write(exports.of_folder(self.folder, node), Path(out))
        experiment = self._experiment()
        engine = self._engine(experiment)
        states = {name: engine.memory(name) for name in (SERVER, *experiment.population.clients)}
        found = exports.of_states(experiment, states, node)
        return exports.write(found.with_scores(self.metrics), Path(out))

    def _experiment(self) -> Experiment:
        if self.experiment is not None:
            return self.experiment
        assert self.folder is not None
        if not (self.folder / "recipe.toml").exists():
            raise RunFolderError(
                f"{self.folder} was begun from Python, so its networks are not known; give the "
                "experiment too: fedstill.read(folder, experiment=…)"
            )
        return experiment_of(recipe_of(self.folder))

    def _engine(self, experiment: Experiment) -> Engine:
        """The engine that played, or one on the host with the memories of the last checkpoint."""
        if self.engine is not None:
            return self.engine
        assert self.folder is not None
        if not self.folder.exists():
            raise RunFolderError(f"there is no run folder {self.folder}, seen from {Path.cwd()}")
        engine = InProcess(experiment, Execution(device="cpu"))
        if engine.load(self.folder / "checkpoints", digest=None) is None:
            raise RunFolderError(f"{self.folder} holds no checkpoint, so there is no model in it")
        return engine

    def __repr__(self) -> str:
        """In one line: the rows of a long run would fill many screens."""
        facts = {name: self.summary.get(name) for name in ("label", "data", "seed", "rounds")}
        said = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
        return f"<Run {said}, {'in memory' if self.folder is None else f'in {self.folder}'}>"

    def _repr_html_(self) -> str:
        """For a notebook: what was run, what came out, what was sent."""
        names = ("label", "data", "seed", "rounds", "engine", "device")
        rows = {name: self.summary.get(name) for name in names}
        for name in ("average_accuracy", "averaged_global_accuracy", "averaged_local_accuracy"):
            value = self.summary.get(name)
            if value is not None:
                rows[name.replace("_", " ")] = f"{100 * value:.2f} %"
        rows["bytes sent"] = f"{sum(row.bytes for row in self.messages):,}"
        rows["folder"] = "in memory" if self.folder is None else str(self.folder)
        cells = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
            for name, value in rows.items()
            if value is not None
        )
        return f"<table>{cells}</table>"


def _tracked(names: Sequence[str], folder: Path | str | None) -> TrackTable | None:
    """Who is told the numbers of a run besides its folder."""
    to = (names,) if isinstance(names, str) else tuple(names)
    strange = [f"track: {unknown('tracker', str(n), TRACKERS)}" for n in to if n not in TRACKERS]
    if strange:
        raise BadValue(strange)
    if to and folder is None:
        raise RunFolderError("track: what a tracker is told lies in the run's folder; give one")
    return TrackTable(to) if to else None


def run(
    experiment: Experiment,
    *,
    execution: Execution | None = None,
    folder: Path | str | None = None,
    watch: Watch | None = None,
    resume: bool = False,
    label: str | None = None,
    pictures: Pictures = True,
    checkpoint_every: int = 1,
    keep_checkpoints: int = 2,
    track: Sequence[str] = (),
) -> Run:
    """Play an experiment and return what came of it.

        run = fedstill.run(Experiment(FedAvg(), Population(data, Net), rounds=20))
        run = fedstill.run(experiment, execution=Execution(device="cpu"), folder="runs/mine")
        run = fedstill.run(experiment, folder="runs/mine", resume=True)

    Without a folder everything stays in memory. In a folder the run writes its tables, checkpoints
    and pictures as it goes; with `resume` it goes on from the last checkpoint there, exactly as if
    it had not stopped, or begins where there is none. An experiment with other values than the one
    in the folder is refused; rounds may be more. `watch` is called after every round with a
    `Progress`, and a notebook shows a bar where none is given; `label` names the run in
    comparisons. `track=["tensorboard"]` tells the numbers of a run in a folder to TensorBoard too,
    and so with `wandb` and `mlflow`.
    """
    chosen = Execution() if execution is None else execution
    _check(experiment, chosen)
    if watch is not None and not callable(watch):
        raise BadValue(f"watch = {watch!r}: must be a function of a Progress, such as print")
    keeping = Keeping(checkpoint_every, keep_checkpoints, pictures)
    if resume and folder is None:
        raise RunFolderError("resume: a run goes on from its folder; give the one it was begun in")
    session, rows = run_experiment(
        experiment,
        chosen,
        of_experiment(experiment, label),
        folder=None if folder is None else Path(folder),
        resume=resume,
        keeping=keeping,
        watch=watch or notebook.bar(label or type(experiment.method).__name__),
        track=_tracked(track, folder),
    )
    if folder is not None:
        return read(folder, experiment=experiment)
    return Run(
        rows.metrics, rows.messages, rows.notes, None, reader.Summary(session.summary(rows)),
        json.loads(session.about.text), environment(), experiment, session.engine,
        session.gallery,
    )  # fmt: skip


def _check(experiment: Experiment, execution: Execution) -> None:
    """Refuse what cannot be played before anything is written."""
    if not isinstance(experiment, Experiment):
        kind = type(experiment).__name__
        raise BadValue(f"run plays an Experiment(method, population, rounds=…), not a {kind}")
    if not isinstance(execution, Execution):
        raise BadValue(f"execution must be an Execution, not {execution!r}; write Execution(…)")
    if wrong := other_defaults():
        raise BadValue(wrong)
    if experiment.rounds == 0 and experiment.method.each_round():
        raise BadValue("rounds = 0: must be at least 1")


def read(folder: Path | str, *, experiment: Experiment | None = None) -> Run:
    """A finished run from its folder.

    `fedstill.read("runs/demo/feddm").summary`. The experiment is needed only for the models of a
    run that was begun from Python.
    """
    found = reader.read_run(folder)
    return Run(
        found.metrics, found.messages, found.notes, found.folder, found.summary, found.recipe,
        found.environment, experiment,
    )  # fmt: skip


def compare(runs: Iterable[reader.Run | Path | str], metric: str = "accuracy") -> Comparison:
    """Runs, or their folders, or folders of runs, in one table: mean and spread over seeds.

    `fedstill.compare([fedavg, feddm])` is a table in a notebook; `.as_markdown()` is a text.
    """
    from fedstill.report import tables

    if not isinstance(metric, str):
        raise BadValue("several runs are compared as a list: fedstill.compare([first, second])")
    return tables.compare(_read(runs), metric)


def plot(
    runs: Iterable[reader.Run | Path | str],
    path: Path | str | None = None,
    *,
    by: Against = "round",
) -> Figure | Path:
    """Accuracy of runs, or of their folders, by round or by bytes sent; seeds are one curve.

    Without a path the figure itself, which a notebook shows.
    """
    from fedstill.report import canvas, plots

    if isinstance(path, reader.Run):
        raise BadValue("several runs are drawn as a list: fedstill.plot([first, second], path)")
    found = _read(runs)
    drawn = {"round": plots.by_round, "bytes": plots.by_bytes}
    if by not in drawn:
        raise RunFolderError("by: " + unknown("axis", by, drawn))
    figure = drawn[by](found)
    return figure if path is None else canvas.save(figure, path)


def _read(runs: Iterable[reader.Run | Path | str]) -> list[reader.Run]:
    """Runs as they are, and all runs that lie in a folder."""
    given = [runs] if isinstance(runs, (reader.Run, Path, str)) else runs
    found: list[reader.Run] = []
    for run in given:
        if isinstance(run, reader.Run):
            found.append(run)
        else:
            found += map(reader.read_run, reader.runs_below(Path(run)) or [Path(run)])
    return found
