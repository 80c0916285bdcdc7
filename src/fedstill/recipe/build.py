"""From a checked recipe to the objects of a run; every refusal names the recipe's key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedstill.core import precision, ranges
from fedstill.core.data import Data
from fedstill.core.errors import BadValue, DataError, RecipeError, unknown
from fedstill.core.method import Method, Place
from fedstill.core.model import Model
from fedstill.core.records import NodeId
from fedstill.data import Collection, Unlabelled, load, public_images
from fedstill.engines.engine import Engine, Everybody
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.play.streams import Streams
from fedstill.engines.ranks.protocol import LEADER, Begin, Ready, Transport, say_to_all
from fedstill.engines.ranks.spread import Spread, Worker, serve
from fedstill.federation.cache import FolderCache
from fedstill.federation.experiment import Experiment, speaks_to_peers
from fedstill.federation.population import Population
from fedstill.federation.run import run
from fedstill.federation.sampling import Everyone, Sample, Sampler
from fedstill.federation.topology import TOPOLOGIES, Graph, Topology
from fedstill.logbook.environment import environment
from fedstill.logbook.writer import MemoryLog
from fedstill.methods.virtual import Own, Virtual
from fedstill.models import MODELS
from fedstill.recipe.fields import as_hinted
from fedstill.recipe.tables import (
    BASE_FIELDS,
    EngineTable,
    FederationTable,
    PublicTable,
    Recipe,
    Table,
)
from fedstill.recipe.toml import toml_text

# Multiplications and additions for one example:
LIGHT = 1e6  # below which threads do not pay
SLIGHT = 2e5  # below which networks of matrices are sooner stacked than trained one by one


class Built:
    """Everything a run needs, made from a recipe; over several ranks, on each of them."""

    def __init__(self, recipe: Recipe, line: Transport | None = None):
        self.recipe = recipe
        self.transport = line
        if line is not None and line.rank == LEADER:
            say_to_all(line, Begin(toml_text(recipe.as_tables())))
        self.device = chosen_device(recipe.run.device, None if line is None else line.local_rank)
        if line is not None and self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # what names no device lands on this one too
        torch.backends.cudnn.deterministic = True  # two runs with one seed are equal on a GPU too
        precision.use(recipe.engine.precision)
        self.collection = load_data(recipe)
        self.public = load_public(recipe, self.collection)
        self.models, self.server_model = made_models(recipe, self.collection)
        self.networks = {self.server_model, *self.models.values()}
        torch.set_num_threads(recipe.run.threads or chosen_threads(self.device, self.networks))
        population = Population(
            self.collection, self.models, self.server_model, device=self.device, public=self.public
        )
        names = list(population.clients)
        self.cache = FolderCache(recipe.run.cache_dir)
        self.notes = [*self.collection.notes, *public_notes(recipe, self.public)]
        if recipe.engine.precision == "half":
            self.notes += half_notes(self.device, self.networks)
        self.real = population
        self.graph = made_graph(recipe, names)
        if recipe.data.virtual is not None and not recipe.method.distils:
            population = population.learning_from(self.virtual_sets())
        sampler = made_sampler(recipe.federation, len(names))
        self.experiment = Experiment(
            recipe.method,
            population,
            self.graph,
            sampler,
            rounds=recipe.run.rounds,
            seed=recipe.run.seed,
            evaluate_every=recipe.run.evaluate_every,
            scores=chosen_scores(recipe, len(names)),
            bad_messages=recipe.federation.bad_messages,
            metrics=recipe.run.metrics,
        )
        self.own_engine = self._own_engine(
            recipe.method, population, memory_limit=recipe.engine.memory_limit
        )
        self.engine = self._spread(self.own_engine)
        self.engine_note = f"{self.engine.name}, {why_engine(recipe.engine, self.device)}"
        if isinstance(self.engine, Spread):
            self.engine_note += f", over {self.engine.transport.size} ranks"
            self.engine.check_ready(self.standing())

    def _spread(self, own: InProcess) -> Engine:
        """The engine over all ranks where this one leads, else the rank's own."""
        leads = self.transport is not None and self.transport.rank == LEADER
        return Spread(own, self.transport) if leads and self.transport else own

    def _own_engine(
        self, method: Method, people: Everybody, memory_limit: int | None = None
    ) -> InProcess:
        recipe = self.recipe
        options: Table = {
            "seed": recipe.run.seed,
            "device": self.device,
            "cache": self.cache,
            "record": recipe.engine.record,
            "compile": recipe.engine.compile,
            "graph": self.graph.neighbours,
            "memory_limit": memory_limit,
        }
        name = engine_name(recipe.engine, self.device, self.networks)
        if name == "in_process":
            return InProcess(method, people, **options)
        if name == "lanes":
            return Streams(method, people, lanes=recipe.engine.lanes, **options)
        return Batched(method, people, stack_at_most=recipe.engine.stack_at_most, **options)

    def virtual_sets(self) -> dict[NodeId, Data]:
        """What the clients distil from their data, as `data.virtual` says."""
        virtual = Virtual(**(self.recipe.data.virtual or {}))
        own = self._own_engine(virtual, self.real)
        engine = self._spread(own)
        if self.transport is not None and self.transport.rank != LEADER:
            serve(Worker(own), self.transport)
        else:
            warm_up = Experiment(
                virtual, self.real, self.graph, Everyone(), rounds=0, seed=self.recipe.run.seed
            )  # fmt: skip
            run(warm_up, engine, MemoryLog())
        found = f"{self.cache.made} sets made, {self.cache.found} found in {self.cache.folder}"
        if self.transport is not None:
            found += f" by rank {self.transport.rank}"
        self.notes.append(f"trained on virtual data, {virtual.per_class} images per class: {found}")
        made = {node: state for node, state in engine.states.items() if isinstance(state, Own)}
        if isinstance(engine, Spread):
            engine.over()
        return {node: Data.of(*state.as_set().flat()) for node, state in made.items()}

    def over(self) -> None:
        """The run has ended well: other ranks may go."""
        if isinstance(self.engine, Spread):
            self.engine.over()

    def standing(self) -> Ready:
        """What all ranks must share."""
        facts = environment()
        return Ready(self.digest(), f"fedstill {facts['fedstill']}, torch {facts['torch']}")

    def digest(self) -> str:
        """What a checkpoint must share with a run that goes on from it."""
        tables = {**decisive(self.recipe), "content": self.collection.digest()}
        if self.public is not None:
            tables["public content"] = self.public.digest()
        text = json.dumps(tables, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


def decisive(recipe: Recipe) -> Table:
    """The values that decide the numbers of every round.

    A run that goes on may get more rounds, another name or device; these it must keep.
    """
    tables = recipe.as_tables()
    kept: Table = {k: tables[k] for k in ("data", "models", "federation", "method") if k in tables}
    kept["data"] = {k: v for k, v in kept["data"].items() if k != "data_dir"}
    if "public" in kept["data"]:
        public = {k: v for k, v in kept["data"]["public"].items() if k != "data_dir"}
        kept["data"]["public"] = public
    kept["method"] = {k: v for k, v in kept["method"].items() if k != "label"}
    kept["run"] = {"seed": recipe.run.seed}
    return kept


def differences(before: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> list[str]:
    """A line for every value that two tables do not share."""
    lines: list[str] = []
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += differences(old, new, f"{where}{key}.")
        elif old != new:
            words = ["unset" if value is None else repr(value) for value in (old, new)]
            lines.append(f"{where}{key} was {words[0]}, not {words[1]}")
    return lines


def load_data(recipe: Recipe) -> Collection:
    """The recipe's data; a fault names the table."""
    data = recipe.data
    try:
        return load(
            data.name,
            data_dir=data.data_dir,
            size=data.size,
            channels=data.channels,
            partition=data.partition,
            seed=data_seed(recipe),
            hold_out=data.hold_out,
            **data.options,
        )
    except DataError as error:
        raise DataError(f"data: {error}") from error


def data_seed(recipe: Recipe) -> int:
    """The seed of everything drawn from data sets: the table's own, or the run's."""
    return recipe.run.seed if recipe.data.seed is None else recipe.data.seed


def load_public(recipe: Recipe, collection: Collection) -> Unlabelled | None:
    """The recipe's public images in the clients' shape, or None; a fault names the table."""
    if recipe.data.public is None:
        return None
    table = PublicTable(**recipe.data.public)
    try:
        return public_images(
            table.name,
            collection.shape,
            count=table.count,
            seed=data_seed(recipe),
            data_dir=table.data_dir or recipe.data.data_dir,
            **table.options,
        )
    except DataError as error:
        raise DataError(f"data.public: {error}") from error


def public_notes(recipe: Recipe, public: Unlabelled | None) -> list[str]:
    """What a reader must know of the public images."""
    if public is None:
        return []
    same = f"public: {public.name} is also what the clients hold, so images may be their own"
    return [*public.notes, *([same] if public.name == recipe.data.name else [])]


def made_models(recipe: Recipe, collection: Collection) -> tuple[dict[NodeId, Model], Model]:
    """Everybody's network: by client name, else in turn from `cycle`, else the common one."""
    tables, shape = recipe.models, tuple(collection.shape)
    common = {k: v for k, v in tables.items() if k not in ("cycle", "clients")}
    cycle, by_name = tables.get("cycle", []), tables.get("clients", {})
    names = [site.name for site in collection.sites]
    strangers = [name for name in by_name if name not in names]
    if strangers:
        raise RecipeError(["models.clients: " + unknown("client", n, names) for n in strangers])
    made: dict[str, Model] = {}  # clients with equal tables share one description
    models = {}
    for i, name in enumerate(names):
        turn = cycle[i % len(cycle)] if cycle else {}
        table = joined_tables(common, turn, by_name.get(name, {}))
        key = repr(table)
        if key not in made:
            made[key] = network(table, shape, collection.classes)
        models[name] = made[key]
    server = network(common, shape, collection.classes)
    if recipe.method.scored is Place.SERVER and any(m != server for m in made.values()):
        raise RecipeError(
            f"models: {recipe.method_name} averages one network, but the clients' networks differ; "
            "leave out models.cycle and models.clients, or use a method for mixed networks"
        )
    return models, server


def joined_tables(*tables: Table) -> Table:
    """Tables of networks, later ones first; options of a network of another name are left out."""
    made: Table = {}
    for table in tables:
        other = table.get("name", made.get("name")) != made.get("name")
        made = {**({} if other else made), **table}
    return made


def network(table: Table, shape: tuple[int, ...], classes: int) -> Model:
    """One network for images of a shape and a number of classes."""
    name = table.get("name", "convnet")
    kind = MODELS[name]
    named = ranges.hints(kind)
    strange = sorted(set(table) - {"name"} - set(named))
    if strange:
        raise RecipeError([f"models: a {name} has no key {key!r}" for key in strange])
    options = {k: as_hinted(v, named[k]) for k, v in table.items() if k != "name"}
    model = kind(shape, classes, **options)
    model.initial()  # refuses images it cannot take
    return model


def named_networks(models: Mapping[NodeId, Model]) -> dict[NodeId, str]:
    """Each client's network by name, with the options in which networks of that name differ."""
    names = {kind: name for name, kind in MODELS.items()}
    distinct: list[Model] = []
    distinct += (model for model in models.values() if model not in distinct)
    made = {}
    for node, model in models.items():
        alike = [other for other in distinct if type(other) is type(model)]
        options = (f.name for f in fields(model) if f.init and f.name not in BASE_FIELDS)
        differ = [
            f"{option} {_in_words(getattr(model, option))}"
            for option in options
            if any(getattr(other, option) != getattr(model, option) for other in alike)
        ]
        made[node] = ", ".join([names[type(model)], *differ])
    return made


def _in_words(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def made_topology(recipe: Recipe) -> Topology:
    """Who hears whom; `auto` is a star, or everybody for a method of peers."""
    table, peers = recipe.federation, speaks_to_peers(recipe.method)
    name = table.topology
    if name == "auto":
        name = "complete" if peers else "star"
    if name == "star" and peers:
        raise RecipeError(
            f'federation.topology = "star": {recipe.method_name} speaks from client to client; '
            f"use one of {', '.join(sorted(set(TOPOLOGIES) - {'star'}))}"
        )
    kind = TOPOLOGIES[name]
    known = {f.name for f in fields(kind)} if is_dataclass(kind) else set()
    options = {
        key: getattr(table, key)
        for key in ("neighbours", "degree", "probability")
        if getattr(table, key) is not None
    }
    extra = sorted(set(options) - known)
    if extra:
        raise RecipeError([f"federation.{key}: a {name} topology has no such key" for key in extra])
    return kind(**options)


def made_graph(recipe: Recipe, names: Sequence[NodeId]) -> Graph:
    """Who hears whom among these clients; a fault names the table."""
    try:
        return made_topology(recipe).graph(names, recipe.run.seed)
    except RecipeError:
        raise
    except BadValue as error:
        raise RecipeError([f"federation: {line}" for line in error.faults]) from error


def made_sampler(table: FederationTable, clients: int) -> Sampler:
    """Who takes part; refuses to ask for more clients than there are."""
    if table.sample is None and table.share is None:
        return Everyone()
    if table.sample is not None and table.sample > clients:
        raise RecipeError(
            f"federation.sample = {table.sample}, but there are {clients} clients; "
            f"ask for at most {clients}"
        )
    return Sample(count=table.sample, share=table.share)


def chosen_scores(recipe: Recipe, clients: int) -> Literal["cross", "own"]:
    """Every model on every test set up to thirty clients; beyond that each on its own."""
    if recipe.run.scores != "auto":
        return recipe.run.scores
    return "cross" if clients <= 30 else "own"


def chosen_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device of a name; the ranks of one machine sit at its GPUs in turn."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RecipeError(f"run.device = {name!r}: use auto, cpu, cuda or cuda:0") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RecipeError(f"run.device = {name!r}, but no CUDA device is here; use auto or cpu")
    if name == "cuda" and local_rank is not None:
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return device


def half_notes(device: torch.device, networks: Iterable[Model]) -> list[str]:
    """What is not computed in half precision though it was asked for."""
    if device.type != "cuda":
        return ["half precision is for a GPU; on a CPU all is single precision"]
    names = sorted({model.title for model in networks if not model.takes_half})
    return [f"{name}: not in half precision here, but as with tf32" for name in names]


def chosen_threads(device: torch.device, networks: Iterable[Model]) -> int:
    """One on a CPU where every network is light, else torch's own number.

    The threads of an operation wait for each other at its end. Operations of a light network end
    sooner than that pays, and where other programs hold a core, a step takes a hundred times as
    long. The choice rests on the networks alone, so that a recipe gives the same numbers again.
    """
    light = device.type == "cpu" and all(work(network) < LIGHT for network in networks)
    return 1 if light else torch.get_num_threads()


@torch.no_grad()
def work(network: Model) -> float:
    """Multiplications and additions of a network for one example."""
    weights = {name: torch.zeros(law.shape) for name, law in network.initial().items()}
    with FlopCounterMode(display=False) as counter:
        network(weights, torch.zeros(2, *network.shape))  # one alone has no batch statistics
    return int(counter.get_total_flops()) / 2


def engine_name(table: EngineTable, device: torch.device, networks: Iterable[Model]) -> str:
    """The engine's name; `auto` takes what was fastest in docs/benchmarks.md."""
    if table.name != "auto":
        return table.name
    if device.type == "cuda":
        return "lanes"
    return "batched" if all(slight(network) for network in networks) else "in_process"


def slight(network: Model) -> bool:
    """Whether a step of this network on a CPU is mostly the calls of its operations."""
    matrices = all(len(law.shape) <= 2 for law in network.initial().values())
    return matrices and work(network) < SLIGHT


def why_engine(table: EngineTable, device: torch.device) -> str:
    if table.name != "auto":
        return "as the recipe says"
    return f"chosen for device {device.type} and these networks"
