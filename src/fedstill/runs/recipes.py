"""Runs of recipes: begun in a folder, resumed from one, or played for the leader of ranks."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fedstill.core.errors import FedstillError, RunFolderError
from fedstill.core.release import Spending
from fedstill.engines import checkpoint
from fedstill.engines.execution import Execution, engine_of
from fedstill.engines.ranks.follower import Follower
from fedstill.engines.ranks.protocol import (
    LEADER,
    Begin,
    Disconnected,
    GivenUp,
    Transport,
    say_to_all,
)
from fedstill.federation.budget import calibrated
from fedstill.federation.cache import FolderCache
from fedstill.federation.experiment import Experiment
from fedstill.federation.run import Watch
from fedstill.recipe.build import execution_of, experiment_of
from fedstill.recipe.check import checked
from fedstill.recipe.read import read_recipe
from fedstill.recipe.tables import Recipe
from fedstill.recipe.toml import toml_text
from fedstill.runs import folder as folders
from fedstill.runs.digest import decisive, decisive_in, digest, of_recipe
from fedstill.runs.folder import check_free, fresh_folder
from fedstill.runs.session import Keeping, Session, check_same, standing
from fedstill.runs.virtual import distilled

__all__ = ["begin", "check_free", "fresh_folder", "prepared", "recipe_of", "resume"]


@dataclass(frozen=True, eq=False)
class Prepared:
    """A recipe's objects on one rank, its virtual data made."""

    experiment: Experiment
    execution: Execution
    cache: FolderCache
    notes: Sequence[str]
    spent: Sequence[Spending] = ()  # on virtual data


@contextmanager
def prepared(recipe: Recipe, line: Transport | None = None) -> Iterator[Prepared]:
    """What a recipe describes, while the switches of the process are as it needs them."""
    with ExitStack() as during:
        if line is not None and line.rank == LEADER:
            during.enter_context(_announced(recipe, line))
        execution = execution_of(recipe)
        if line is not None:
            execution = execution.at(line.local_rank)
        experiment = experiment_of(recipe)
        cache = FolderCache(recipe.run.cache_dir)
        notes: list[str] = []
        spent: Sequence[Spending] = ()
        during.enter_context(execution.applied(experiment.networks))
        if recipe.data.virtual is not None and not recipe.method.distils:
            virtual = recipe.data.virtual
            experiment, note, spent = distilled(experiment, virtual, execution, cache, line)
            notes.append(note)
        yield Prepared(calibrated(experiment, execution), execution, cache, notes, spent)


@contextmanager
def _announced(recipe: Recipe, line: Transport) -> Iterator[None]:
    """Let the other ranks take part in a run; one that fails they are told to give up."""
    say_to_all(line, Begin(toml_text(recipe.as_tables())))
    try:
        yield
    except FedstillError:
        with suppress(Disconnected):
            say_to_all(line, GivenUp())
        raise


@contextmanager
def session(
    recipe: Recipe, folder: Path, watch: Watch | None, line: Transport | None
) -> Iterator[Session]:
    """The run of a recipe, ready to be begun or resumed."""
    with prepared(recipe, line) as ready:
        yield Session(
            ready.experiment,
            ready.execution,
            of_recipe(recipe),
            folder=folder,
            keeping=Keeping(
                recipe.run.checkpoint_every, recipe.run.keep_checkpoints, recipe.run.pictures
            ),
            watch=watch,
            cache=ready.cache,
            notes=ready.notes,
            transport=line,
            track=recipe.track,
            privacy=recipe.privacy,
            spent=ready.spent,
        )


@contextmanager
def worker(recipe: Recipe, line: Transport) -> Iterator[Follower]:
    """What plays the run of a recipe for the leader of several ranks."""
    with prepared(recipe, line) as ready:
        experiment = ready.experiment
        engine = engine_of(experiment, ready.execution, cache=ready.cache)
        own = digest(decisive(recipe), experiment.population)
        yield Follower(engine, standing(own))


def begin(
    recipe: Recipe,
    folder: Path,
    watch: Watch | None = None,
    line: Transport | None = None,
) -> Path:
    """Run a recipe in a new folder and return it; with a line, over several ranks."""
    with folders.alone(folder):
        begin_held(recipe, folder, watch, line)
    return folder


def begin_held(
    recipe: Recipe, folder: Path, watch: Watch | None = None, line: Transport | None = None
) -> None:
    """The same in a folder that this process holds."""
    check_free(folder)
    with session(recipe, folder, watch, line) as made:
        made.begin()


def resume(
    folder: Path,
    overrides: Sequence[str] = (),
    watch: Watch | None = None,
    line: Transport | None = None,
) -> Path:
    """Go on from the newest checkpoint of a folder; the result is that of an unbroken run."""
    recipe_of(folder, overrides)
    with folders.alone(folder):
        resume_held(folder, overrides, watch, line)
    return folder


def resume_held(
    folder: Path,
    overrides: Sequence[str] = (),
    watch: Watch | None = None,
    line: Transport | None = None,
) -> None:
    """The same in a folder that this process holds."""
    recipe = recipe_of(folder, overrides)
    if checkpoint.latest(folder / "checkpoints") is not None:
        check_same(folder, decisive(recipe_of(folder)), decisive(recipe))
    with session(recipe, folder, watch, line) as made:
        written = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
        made.resume(changed=bool(overrides), written=decisive_in(written))


def recipe_of(folder: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a run folder; refuses a folder that holds no run, or one we cannot read."""
    path = folder / "recipe.toml"
    if not path.exists():
        if folders.description_in(folder) is not None:
            raise RunFolderError(
                f"{folder} holds a run that was begun from Python, without a recipe; go on there, "
                "with fedstill.run(experiment, folder=…, resume=True)"
            )
        below = sorted(found.parent for found in folder.glob("*/**/recipe.toml"))
        hint = f"; resume one of {', '.join(map(str, below[:5]))}" if below else ""
        raise RunFolderError(f"{folder} holds no run: there is no recipe.toml in it{hint}")
    folders.check_version(folder)
    recipes = checked(read_recipe(path, overrides))
    if len(recipes) != 1:
        raise RunFolderError(f"{path} has {len(recipes)} methods, a run has one")
    return recipes[0]


def seeded(recipe: Recipe, seed: int) -> Recipe:
    """The same recipe with another seed."""
    return replace(recipe, run=replace(recipe.run, seed=seed))
