"""The tables of a recipe as dataclasses, and a recipe for one method; nothing is read."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from fedstill.channels import CHANNEL_NAMES, Channel
from fedstill.core.method import Method
from fedstill.core.precision import Precision
from fedstill.core.ranges import Count, Range, Whole
from fedstill.data import Partition
from fedstill.engines.execution import AUTO, Execution
from fedstill.federation.clock import Clock
from fedstill.federation.experiment import BadMessages
from fedstill.methods import METHOD_NAMES
from fedstill.methods.virtual import Virtual
from fedstill.metrics import ALWAYS
from fedstill.privacy.privacy import Privacy
from fedstill.recipe.networks import NetworkTables

Table = dict[str, Any]
Chance = Annotated[float, Range(0, 1, open_low=True)]

FREE_TABLES = ("about", "reported")  # for people and reports; not checked
GRID = "grid"  # seeds and swept values; see recipe.grid
GRID_PARTS = ("seeds", "sweep", "select", "search", "cells")  # the last is written with a grid
TRACKERS = ("tensorboard", "wandb", "mlflow")
QUICK = "quick"  # changes for a small variant; see quickened


@dataclass(frozen=True)
class RunTable:
    """How long, with which seed, and what is kept."""

    name: str = "run"
    rounds: Count = 10
    seed: Whole = 0
    device: str = "auto"  # auto, cpu, cuda, cuda:0, …
    threads: Count | None = None
    evaluate_every: Count = 1
    scores: Literal["auto", "cross", "own"] = "auto"
    metrics: tuple[str, ...] = (
        ALWAYS  # names of fedstill.metrics; the first one is shown on the way
    )
    checkpoint_every: Count = 1
    keep_checkpoints: Count = 2
    pictures: bool | Literal["sets"] = True  # drawn; or only synthetic sets kept, for reports
    cache_dir: str = "runs/cache"  # results that several runs share, such as warm-up sets


@dataclass(frozen=True)
class PublicTable:
    """Images without labels that everybody holds, in the shape of the clients' images."""

    name: str
    data_dir: str | None = None  # that of the data when left out
    count: Count | None = None  # so many, drawn by the seed of the split
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataTable:
    """Which data and how they are split; `options` are those of the data set."""

    name: str
    data_dir: str | None = None
    size: Count | None = None
    channels: Count | None = None
    mean: tuple[float, ...] | None = None  # of everybody's pixels as numbers in 0..1, with std
    std: tuple[float, ...] | None = None  # one number, or one for each channel
    partition: Partition | None = None
    virtual: Virtual | None = None  # train on sets distilled from the data instead
    public: PublicTable | None = None  # what everybody holds besides
    seed: Whole | None = None  # of the split; the run's seed when left out
    hold_out: Chance | None = None  # of the training examples, to score on instead of the test sets
    options: dict[str, Any] = field(default_factory=dict)
    # The inner tables as the recipe has them; no key itself.
    written: Table = field(default_factory=dict, metadata={"key": False})

    def as_table(self) -> Table:
        """The table as it was read: what was left out of an inner table stays out."""
        outer = replace(self, partition=None, virtual=None, public=None, written={})
        found = values(outer) | self.written
        return {f.name: found[f.name] for f in fields(self) if f.name in found}


@dataclass(frozen=True)
class FederationTable:
    """Who hears whom, who takes part, what becomes of a broken message."""

    topology: str = "auto"
    neighbours: Count | None = None
    degree: Count | None = None
    rows: Count | None = None
    probability: Chance | None = None
    sample: Count | None = None  # clients a round
    share: Chance | None = None  # of the clients a round
    bad_messages: BadMessages = "stop"
    channel: tuple[Channel, ...] | None = None  # on the way of every message, in order
    clock: Clock | None = None  # simulated time


@dataclass(frozen=True)
class TrackTable:
    """Where the logbook's numbers go besides the run's folder; see runs.track."""

    to: tuple[str, ...]  # tensorboard, wandb, mlflow
    project: str = "fedstill"
    online: bool = False  # Weights & Biases: send it to its server
    uri: str | None = None  # MLflow: of a server or store; one in the run's folder when left out


@dataclass(frozen=True)
class EngineTable:
    """Which engine; `auto` chooses by device."""

    name: str = AUTO  # or a name in engines.execution.ENGINES
    stack_at_most: Count = Execution.stack_at_most
    streams: Count = Execution.streams  # loops that run beside each other on a GPU
    record: bool = True  # on a GPU, replay the steps of a loop from a recording
    compile: bool = False  # hand the steps of long loops to torch's compiler
    precision: Precision = "tf32"  # of a GPU
    memory_limit: Whole | None = None  # bytes of clients' memories at hand; the rest lie on disk


@dataclass(frozen=True)
class Recipe:
    """A checked recipe for one method."""

    run: RunTable
    data: DataTable
    models: NetworkTables
    federation: FederationTable
    method: Method
    method_name: str
    label: str
    engine: EngineTable
    about: Table = field(default_factory=dict)
    reported: Table = field(default_factory=dict)
    privacy: Privacy | None = None
    track: TrackTable | None = None

    def as_tables(self) -> Table:
        """Every value that makes the numbers, as tables."""
        method = {"name": self.method_name, "label": self.label, **values(self.method)}
        tables = {
            "run": values(self.run),
            "data": self.data.as_table(),
            "models": self.models.written,
            "federation": values(self.federation),
            "method": method,
            "track": {} if self.track is None else values(self.track),
            "privacy": {} if self.privacy is None else self.privacy.table(),
            "engine": values(self.engine),
            "about": self.about,
            "reported": self.reported,
        }
        return {name: table for name, table in tables.items() if table}


def method_name(method: Any) -> str:
    """The name by which a method is found: ours, a plug-in's, or where its code lies."""
    return METHOD_NAMES.name_of(type(method))


def channel_name(channel: Any) -> str:
    """The name by which a channel is found."""
    return CHANNEL_NAMES.name_of(type(channel))


def values(instance: Any) -> Table:
    """The fields of a dataclass that TOML can hold: no None, tuples as lists, methods as tables."""
    found = {f.name: getattr(instance, f.name) for f in fields(instance) if f.init}
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}
    for key, value in plain.items():
        if isinstance(value, Method):
            plain[key] = {"name": method_name(value), **values(value)}
        elif isinstance(value, Clock):
            plain[key] = value.table()
        elif isinstance(value, list) and any(isinstance(item, Channel) for item in value):
            plain[key] = [{"name": channel_name(item), **values(item)} for item in value]
    return {k: v for k, v in plain.items() if v is not None and v != {}}
