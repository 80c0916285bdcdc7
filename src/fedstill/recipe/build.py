"""From a checked recipe to an experiment and its execution; refusals name the recipe's key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields

from fedstill.core.errors import BadValue, DataError, RecipeError
from fedstill.core.model import Model
from fedstill.core.records import NodeId
from fedstill.data import Collection, Unlabelled, load, public_images
from fedstill.engines.execution import Execution
from fedstill.federation.experiment import Experiment, speaks_to_peers
from fedstill.federation.population import Population
from fedstill.federation.sampling import Everyone, Sample, Sampler
from fedstill.federation.topology import TOPOLOGIES, TOPOLOGY_KEYS, Topology
from fedstill.recipe.tables import (
    FederationTable,
    Recipe,
)

# How a fault of an experiment or an execution begins, and the key of a recipe that it is about.
KEYS = {
    "sampling: count": "federation.sample",
    "topology: Star": 'federation.topology = "star"',
    "topology": "federation",
    "channels": "federation.channel",
    "clock": "federation.clock",
    "networks": "models",
    "public": "data.public",
    "device": "run.device",
    "threads": "run.threads",
}


def experiment_of(recipe: Recipe, population: Population | None = None) -> Experiment:
    """The experiment that a recipe describes; virtual data are not made, see `runs.virtual`.

    Whoever does not see everybody's data gives the population as it is seen from there.
    """
    if population is None:
        population = population_of(recipe)
    with _in_recipe_words():
        return Experiment(
            recipe.method,
            population,
            rounds=recipe.run.rounds,
            seed=recipe.run.seed,
            topology=made_topology(recipe),
            sampling=made_sampler(recipe.federation),
            evaluate_every=recipe.run.evaluate_every,
            scores=recipe.run.scores,
            bad_messages=recipe.federation.bad_messages,
            channels=recipe.federation.channel or (),
            metrics=recipe.run.metrics,
            privacy=recipe.privacy,
            clock=recipe.federation.clock,
        )


def population_of(recipe: Recipe) -> Population:
    """Everybody's data and networks."""
    collection = load_data(recipe)
    public = load_public(recipe, collection.shape)
    models, server = made_models(recipe, collection)
    with _in_recipe_words():
        return Population(collection, server, networks=models, public=public)


def execution_of(recipe: Recipe) -> Execution:
    """How a recipe wants its experiment computed."""
    engine = recipe.engine
    with _in_recipe_words():
        return Execution(
            engine=engine.name,
            device=recipe.run.device,
            precision=engine.precision,
            threads=recipe.run.threads,
            streams=engine.streams,
            stack_at_most=engine.stack_at_most,
            record=engine.record,
            compile=engine.compile,
            memory_limit=engine.memory_limit,
        )


@contextmanager
def _in_recipe_words() -> Iterator[None]:
    """Faults begin with the keys of a recipe instead of the fields of objects."""
    try:
        yield
    except RecipeError:
        raise
    except BadValue as error:
        raise RecipeError([_in_words(line) for line in error.faults]) from error


def _in_words(fault: str) -> str:
    known = (field for field in KEYS if fault.startswith((f"{field}:", f"{field} ", f"{field}[")))
    field = next(known, None)
    return fault if field is None else KEYS[field] + fault.removeprefix(field)


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
            normalise=None if data.mean is None or data.std is None else (data.mean, data.std),
            **data.options,
        )
    except DataError as error:
        raise DataError(f"data: {error}") from error


def data_seed(recipe: Recipe) -> int:
    """The seed of everything drawn from data sets: the table's own, or the run's."""
    return recipe.run.seed if recipe.data.seed is None else recipe.data.seed


def load_public(recipe: Recipe, shape: Sequence[int]) -> Unlabelled | None:
    """The recipe's public images in the clients' shape, or None; a fault names the table."""
    table = recipe.data.public
    if table is None:
        return None
    try:
        return public_images(
            table.name,
            tuple(shape),
            count=table.count,
            seed=data_seed(recipe),
            data_dir=table.data_dir or recipe.data.data_dir,
            **table.options,
        )
    except DataError as error:
        raise DataError(f"data.public: {error}") from error


def made_models(recipe: Recipe, collection: Collection) -> tuple[dict[NodeId, Model], Model]:
    """Everybody's network: by client name, else in turn from `cycle`, else the common one."""
    shape, names = tuple(collection.shape), [site.name for site in collection.sites]
    models = recipe.models.models(names, shape, collection.classes)
    return models, recipe.models.common.model(shape, collection.classes)


def made_topology(recipe: Recipe) -> Topology:
    """Who hears whom; `auto` is a star, or everybody for a method of peers."""
    table, name = recipe.federation, recipe.federation.topology
    if name == "auto":
        name = "complete" if speaks_to_peers(recipe.method) else "star"
    kind = TOPOLOGIES[name]
    given = {key: getattr(table, key) for key in TOPOLOGY_KEYS}
    options = {key: value for key, value in given.items() if value is not None}
    extra = sorted(set(options) - {f.name for f in fields(kind)})
    if extra:
        raise RecipeError([f"federation.{key}: a {name} topology has no such key" for key in extra])
    return kind(**options)


def made_sampler(table: FederationTable) -> Sampler:
    """Who takes part."""
    if table.sample is None and table.share is None:
        return Everyone()
    return Sample(count=table.sample, share=table.share)
