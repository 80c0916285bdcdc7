"""What a recipe describes as it is seen from one place: all but others' data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.channels import CHANNEL_NAMES
from fedstill.core import source
from fedstill.core.data import Data
from fedstill.core.errors import RecipeError, RunFolderError
from fedstill.core.files import write_lasting
from fedstill.core.model import Model
from fedstill.core.names import Names, installed_alone
from fedstill.core.node import SERVER
from fedstill.core.records import NodeId, Record
from fedstill.core.release import Spending
from fedstill.data import Collection, Unlabelled
from fedstill.data.catalogue import SET_NAMES
from fedstill.engines.execution import Execution
from fedstill.engines.ranks.letters import spent_of
from fedstill.engines.ranks.protocol import Spent
from fedstill.federation.budget import calibrated, planned
from fedstill.federation.cache import FolderCache
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Party, Population, public_on
from fedstill.federation.private import computed_normalisation
from fedstill.logbook.reader import read_rows
from fedstill.methods import METHOD_NAMES
from fedstill.methods.virtual import Virtual
from fedstill.metrics.named import METRIC_NAMES
from fedstill.models import MODEL_NAMES
from fedstill.privacy.privacy import Plan, Privacy
from fedstill.recipe.build import execution_of, experiment_of, load_data, load_public
from fedstill.recipe.check import faults_of
from fedstill.recipe.tables import Recipe, Table
from fedstill.runs.digest import decisive
from fedstill.runs.recipes import recipe_of
from fedstill.runs.virtual import virtual_sets
from fedstill.sites.away import Away
from fedstill.sites.peers import Peers
from fedstill.sites.people import OnePlace
from fedstill.sites.release_log import on_disk
from fedstill.sites.words import MOST_KEPT, Hello
from fedstill.wire import codec

CACHE = "cache"  # of virtual data, below a party's folder
OWN = "own"  # the data set of which every client brings a part


class VirtualSet(Record):
    """What a private site has distilled from its data, and what that spent; made once."""

    inputs: Tensor
    labels: Tensor
    spent: tuple[Spent, ...]


@dataclass(frozen=True, eq=False)
class Place:
    """A recipe's objects at one party; `collection` are its own data, None at a coordinator."""

    recipe: Recipe
    me: NodeId
    experiment: Experiment
    execution: Execution
    cache: FolderCache
    agreed: str
    collection: Collection | None
    key: bytes | None = field(default=None, repr=False)  # of this party's noise
    privacy: Privacy | None = None  # what is promised, also where virtual data have spent it all
    spent: Sequence[Spending] = ()  # on virtual data, by this party

    @property
    def notes(self) -> Sequence[str]:
        """What a reader of the run must know."""
        virtual = distilled_first(self.recipe)
        if virtual is None:
            return ()
        images = f"{virtual.per_class} images per class"
        return (f"trained on virtual data, {images}, which each site distils for itself",)

    def standing(self, run: str) -> Hello:
        """What this party has agreed on, and what it runs."""
        code = ", ".join([source.own_version(), *versions_beside(self.recipe)])
        return Hello(run, self.me, self.agreed, code, codec.VERSION, torch.__version__)


def faults(recipe: Recipe) -> list[str]:
    """Why a recipe cannot be played between parties that keep their data; a line each."""
    data, lines = recipe.data, []
    if data.name != OWN or not isinstance(data.options.get("clients"), Mapping):
        return [
            f"data.name = {data.name!r}: every site brings its own data, so write data.name = "
            '"own" and a table data.options.clients with the names of the sites'
        ]
    if not data.options["clients"]:
        lines.append("data.options.clients names no site; write NAME = PATH for each")
    if data.partition is not None:
        lines.append("data.partition: data that stay at their sites cannot be split; leave it out")
    wanted = {
        "data.size": data.size,
        "data.channels": data.channels,
        "data.options.class_names": data.options.get("class_names"),
    }
    lines += [
        f"{key} is missing; nobody sees all data, so the recipe must say it"
        for key, value in wanted.items()
        if not value
    ]
    options = {"mean", "std"} <= data.options.keys()
    if recipe.privacy is not None and data.mean is None and not options:
        lines.append(
            "data.mean and data.std are missing: sites would be normalised by the exact mean and "
            "deviation of their records, which every image shows; with [privacy] give constants, "
            "e.g. data.mean = [0.5] and data.std = [0.5]"
        )
    if recipe.federation.clock is not None:
        lines.append("federation.clock: sites take the time that they take; leave it out")
    if recipe.run.scores == "cross":
        lines.append('run.scores = "cross": nobody has another\'s tests; use "own" or "auto"')
    if recipe.run.keep_checkpoints > MOST_KEPT:
        lines.append(
            f"run.keep_checkpoints = {recipe.run.keep_checkpoints}: sites keep the memories of "
            f"{MOST_KEPT} checkpoints at most"
        )
    with installed_alone():
        lines += faults_of(recipe.as_tables())
    return lines


def check(recipe: Recipe) -> None:
    """Refuse a recipe that cannot be played between parties that keep their data."""
    if lines := faults(recipe):
        raise RecipeError(lines)


def check_private(recipe: Recipe, public: Unlabelled | None) -> None:
    """Refuse a method that cannot be private at any site: it is rehearsed with blank examples."""
    if recipe.privacy is None:
        return
    models, server = networks(recipe)
    me, own = next(iter(models.items()))
    blank = Data.of(torch.zeros(own.classes, *own.shape), torch.arange(own.classes))
    here = {me: Party(blank, blank, own)}
    seen = OnePlace(models, server, parties=here, public=public_on(public, "cpu"))
    execution = execution_of(replace(recipe, run=replace(recipe.run, device="cpu")))
    experiment = experiment_of(recipe, seen)
    if (virtual := distilled_first(recipe)) is not None:
        experiment = replace(experiment, method=virtual, rounds=0)
    with execution.applied({server, *models.values()}):
        planned(experiment, execution)


def distilled_first(recipe: Recipe) -> Virtual | None:
    """How sites distil their data before the run, unless the method itself does so."""
    return None if recipe.method.distils else recipe.data.virtual


def names_of(recipe: Recipe) -> list[NodeId]:
    """The sites, in the order of the recipe."""
    return list(recipe.data.options["clients"])


def without_paths(recipe: Recipe) -> Recipe:
    """The same recipe with names where paths stood: those are each site's own business."""
    options = {**recipe.data.options, "clients": {name: name for name in names_of(recipe)}}
    return replace(recipe, data=replace(recipe.data, data_dir=None, options=options))


def agreed_tables(recipe: Recipe) -> Table:
    """All that the parties of a run must agree on; paths and content are each one's own."""
    tables = decisive(without_paths(recipe))
    run = recipe.run
    tables["run"] = {
        **tables["run"],
        "rounds": run.rounds,
        "evaluate_every": run.evaluate_every,
        "metrics": list(run.metrics),
    }
    return tables


def agreed_digest(recipe: Recipe, public: Unlabelled | None = None) -> str:
    """The number of a recipe: equal where all that must be agreed on is equal."""
    tables = agreed_tables(recipe)
    if public is not None:
        tables["public content"] = public.digest()
    text = json.dumps(tables, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def versions_beside(recipe: Recipe) -> list[str]:
    """Version and code of each package whose plug-ins a recipe names."""
    tables = recipe.as_tables()
    named: list[tuple[Names[Any], Iterable[str]]] = [
        (METHOD_NAMES, _names_in(tables["method"])),
        (MODEL_NAMES, _names_in(tables.get("models"))),
        (CHANNEL_NAMES, _names_in(tables.get("federation"))),
        (SET_NAMES, _names_in(tables["data"])),
        (METRIC_NAMES, recipe.run.metrics),
    ]
    used = [kind.plug_in(name) for kind, names in named for name in names]
    return sorted({source.version_of(plug_in) for plug_in in used if plug_in is not None})


def _names_in(table: object) -> Iterator[str]:
    """Every name that is given in a table, and in those inside it."""
    if isinstance(table, Mapping):
        name = table.get("name")
        if isinstance(name, str):
            yield name
        for inner in table.values():
            yield from _names_in(inner)
    elif isinstance(table, list | tuple):
        for inner in table:
            yield from _names_in(inner)


def spoken(digest: str) -> str:
    """A recipe's number as people tell it each other: f25f-9aaa-584c-9f44."""
    return "-".join(digest[i : i + 4] for i in range(0, 16, 4))


def networks(recipe: Recipe) -> tuple[dict[NodeId, Model], Model]:
    """Everybody's network, and the server's."""
    channels, size = recipe.data.channels or 1, recipe.data.size or 1
    shape, classes = (channels, size, size), len(recipe.data.options["class_names"])
    models = recipe.models.models(names_of(recipe), shape, classes)
    return models, recipe.models.common.model(shape, classes)


def way_on(folder: Path) -> str | None:
    """How a run goes on whose data are at their parties; None of any other."""
    if not all((folder / name).exists() for name in ("recipe.toml", "notes.csv")):
        return None
    notes = read_rows(folder).notes
    chosen = {note.text.partition(",")[0] for note in notes if note.kind == "engine"}
    if not {Away.name, Peers.name} & chosen:
        return None
    start = "deploy start" if Away.name in chosen else "peer start"
    return f"it goes on as it was begun, e.g. by `fedstill {start}`"


def networks_in(folder: Path) -> dict[NodeId, Model] | None:
    """The networks of a run folder whose data are at their parties; None of any other."""
    way = way_on(folder)
    if way is None:
        return None
    if not (folder / "summary.json").exists():
        raise RunFolderError(f"{folder} has not ended; {way}")
    models, server = networks(recipe_of(folder))
    return {SERVER: server, **models}


def own_data(recipe: Recipe, me: NodeId, path: str) -> Collection:
    """The data of one site, in the classes and the shape that the recipe says."""
    options = {**recipe.data.options, "clients": {me: path}}
    return load_data(replace(recipe, data=replace(recipe.data, options=options)))


def public_data(recipe: Recipe, data_dir: str | None) -> Unlabelled | None:
    """What everybody holds, loaded here from one's own folder."""
    if recipe.data.public is None:
        return None
    public = replace(recipe.data.public, data_dir=data_dir or recipe.data.public.data_dir)
    channels, size = recipe.data.channels or 1, recipe.data.size or 1
    there = replace(recipe, data=replace(recipe.data, public=public))
    return load_public(there, (channels, size, size))


@contextmanager
def placed(
    recipe: Recipe,
    me: NodeId,
    folder: Path,
    *,
    path: str | None = None,
    data_dir: str | None = None,
    device: str | None = None,
    key: bytes | None = None,
    kept: Path | None = None,
) -> Iterator[Place]:
    """What a recipe describes, at one party, while the process is set as it needs it.

    A private party distils virtual data once, into the file `kept`; without one it only finds out
    whether it could.
    """
    check(recipe)
    public = public_data(recipe, data_dir)
    digest = agreed_digest(recipe, public)
    if device is not None:
        recipe = replace(recipe, run=replace(recipe.run, device=device))
    execution = execution_of(recipe)
    models, server = networks(recipe)
    cache = FolderCache(folder / CACHE)
    collection = own_data(recipe, me, path) if path is not None else None
    own = collection if recipe.privacy is not None else None
    if own is not None and (wrong := [*computed_normalisation(own)]):
        raise RecipeError(wrong)
    with execution.applied({server, *models.values()}):
        here: dict[NodeId, Party] = {}
        spent: Sequence[Spending] = ()
        if collection is not None:
            alone = Population(collection, models[me], public=public)
            here[me], spent = _party(recipe, alone, me, execution, cache, key, kept)
        seen = OnePlace(models, server, parties=here, public=public_on(public, "cpu"))
        experiment, privacy = experiment_of(recipe, seen), recipe.privacy
        if distilled_first(recipe) is not None:  # what follows costs no privacy
            experiment = replace(experiment, privacy=None)
        experiment = calibrated(experiment, execution, key)
        if privacy is not None:
            privacy = _of_own_keys(experiment.privacy or privacy)
        if experiment.privacy is not None:
            experiment = replace(experiment, privacy=privacy)
        yield Place(
            recipe, me, experiment, execution, cache, digest, collection, key, privacy, spent
        )


def _of_own_keys(privacy: Privacy) -> Privacy:
    """What is promised where each party's noise is of its own key; a coordinator makes none."""
    return replace(privacy, plan=replace(privacy.plan or Plan({}, {}), secret=True))


def _party(
    recipe: Recipe, alone: Population, me: NodeId, execution: Execution, cache: FolderCache,
    key: bytes | None, kept: Path | None,
) -> tuple[Party, Sequence[Spending]]:  # fmt: skip
    """A site's data and tests; with virtual data the set that it distils for itself first, and
    what that spends.
    """
    party, virtual = alone.party(me), distilled_first(recipe)
    if virtual is None:
        return party, ()
    only = Experiment(virtual, alone, rounds=0, seed=recipe.run.seed, privacy=recipe.privacy)
    if recipe.privacy is None:
        made, _ = virtual_sets(only, virtual, execution, cache)
        return Party(made[me], party.test, party.model), ()
    if kept is None:
        calibrated(only, execution, key)
        return party, ()
    if not kept.exists():
        made, spent = virtual_sets(only, virtual, execution, cache, key=key)
        batch = made[me].all()
        whole = VirtualSet(batch.x.cpu(), batch.y.cpu(), spent_of(spent))
        with on_disk():
            write_lasting(kept, codec.encode(whole))
    own = codec.load(kept, VirtualSet)
    rows = [Spending(0, "warm_up", me, *astuple(row)) for row in own.spent]
    return Party(Data.of(own.inputs, own.labels), party.test, party.model), rows
