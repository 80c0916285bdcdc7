"""Run folders: begin, resume and finish a run so that nothing written is ever lost."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from fedstill.core.errors import RecipeError, RunFolderError
from fedstill.core.method import Method, Place, memory_of
from fedstill.core.node import SERVER
from fedstill.core.records import NodeId, State
from fedstill.data import Collection, counts_table
from fedstill.engines.ranks.protocol import Transport
from fedstill.federation import checkpoint
from fedstill.federation.run import Progress, Watch, run
from fedstill.logbook.environment import environment
from fedstill.logbook.events import Note
from fedstill.logbook.reader import read_run
from fedstill.logbook.summary import summarise, write_summary
from fedstill.logbook.writer import FolderLog, write_json
from fedstill.metrics import lowest
from fedstill.recipe.build import Built, decisive, differences, named_networks
from fedstill.recipe.check import checked
from fedstill.recipe.read import read_recipe
from fedstill.recipe.tables import Recipe
from fedstill.recipe.toml import toml_text
from fedstill.runs import pictures

try:
    import fcntl
except ImportError:  # not on this system: two processes in one folder go unnoticed
    fcntl = None  # type: ignore[assignment]

FOLDER_VERSION = 1
ASLEEP = "asleep"  # clients' memories beyond engine.memory_limit, while a run lasts
BEGINNING = ("environment.json", "partition.csv", ".environment.json.new", "recipe.toml.draft")


@contextmanager
def _threads_restored() -> Iterator[None]:
    """A run sets its number of threads; whoever called it gets theirs back."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_threads_restored()
def begin(
    recipe: Recipe,
    folder: Path,
    watch: Watch = lambda progress: None,
    line: Transport | None = None,
) -> Path:
    """Run a recipe in a new folder and return it; with a line, over several ranks."""
    check_free(folder)
    built = Built(recipe, line)  # what can be refused is refused before anything is written
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"folder_version": FOLDER_VERSION, **environment()}
        write_json(folder / "environment.json", facts)
        _write_partition(built.collection, folder / "partition.csv")
        _write_whole(folder / "recipe.toml", toml_text(recipe.as_tables()))
    with _alone(folder), built.engine.states.spilling_to(folder / ASLEEP):
        return _play(built, folder, watch, None)


@_threads_restored()
def resume(
    folder: Path,
    overrides: Sequence[str] = (),
    watch: Watch = lambda progress: None,
    line: Transport | None = None,
) -> Path:
    """Go on from the newest checkpoint of a folder; the result is that of an unbroken run."""
    recipe = recipe_of(folder, overrides)
    with _alone(folder):
        return _resumed(recipe, folder, bool(overrides), watch, line)


def _resumed(
    recipe: Recipe, folder: Path, changed: bool, watch: Watch, line: Transport | None
) -> Path:
    checkpoints = folder / "checkpoints"
    if checkpoint.latest(checkpoints) is not None:
        _check_same(folder, recipe_of(folder), recipe)
    built = Built(recipe, line)
    with built.engine.states.spilling_to(folder / ASLEEP):
        saved = checkpoint.read_latest(
            checkpoints, state_kinds(recipe.method), digest=built.digest(),
            into=built.engine.states, device=built.device, held=recipe.method.holds,
        )  # fmt: skip
        if saved is not None:
            _check_rounds(folder, recipe, saved)
        with _writing(folder):
            if changed:
                _write_whole(folder / "recipe.toml", toml_text(recipe.as_tables()))
            if saved is None or saved.round < recipe.run.rounds:  # no longer finished
                (folder / "summary.json").unlink(missing_ok=True)
        return _play(built, folder, watch, saved)


def _check_same(folder: Path, before: Recipe, now: Recipe) -> None:
    changed = differences(decisive(before), decisive(now))
    if changed:
        raise RunFolderError(
            f"{folder} cannot go on with other values: {'; '.join(changed)}. Only rounds, names, "
            "devices and what is written may change; run the new recipe in a new folder"
        )


def _check_rounds(folder: Path, recipe: Recipe, saved: checkpoint.Saved) -> None:
    wanted, ended = recipe.run.rounds, saved.extra.get("ended", False)
    if wanted < saved.round or (wanted == saved.round and not ended):
        raise RunFolderError(
            f"{folder} has played {saved.round} rounds of more already, so it cannot end after "
            f"run.rounds = {wanted}; run the recipe again in a new folder"
        )
    if wanted > saved.round and ended and recipe.method.after():
        raise RunFolderError(
            f"{folder} cannot get more rounds: {recipe.method_name} has played its steps after the "
            f"last one; run the recipe with run.rounds={wanted} in a new folder"
        )


def _play(built: Built, folder: Path, watch: Watch, saved: checkpoint.Saved | None) -> Path:
    recipe, engine = built.recipe, built.engine
    digest = built.digest()
    gallery = pictures.Gallery(last=recipe.run.rounds)
    experiment = replace(built.experiment, channels=[gallery])
    done = None if saved is None else saved.round
    traffic = {"said": 0 if saved is None else int(saved.extra.get("said", 0))}
    engine.states.changed.clear()
    base = None if saved is None else saved.path
    with FolderLog(folder) as log:
        log.rewind(-1 if done is None else done)
        for note in _first_notes(built, saved):
            log.write(note)

        def save(round: int) -> None:
            nonlocal base
            ended = round == recipe.run.rounds
            pictures.draw_on_the_way(built, folder / "pictures", round)
            if ended:
                pictures.draw_sets(built, folder / "pictures", gallery)
            if ended or round % recipe.run.checkpoint_every == 0:
                log.flush()
                base = checkpoint.write(
                    folder / "checkpoints", round, engine.states, digest=digest,
                    keep=recipe.run.keep_checkpoints, extra={**traffic, "ended": ended},
                    base=base, changed=engine.states.changed,
                )  # fmt: skip
                engine.states.changed.clear()

        def watched(progress: Progress) -> None:
            traffic["said"] = progress.bytes
            watch(progress)

        run(experiment, engine, log, done=done, said=traffic["said"], save=save, watch=watched)
    _finish(built, folder)
    built.over()
    return folder


def _first_notes(built: Built, saved: checkpoint.Saved | None) -> list[Note]:
    """What a reader must know of a run's beginning, or of where it goes on."""
    if saved is None:
        about_data = [Note(0, "data", "", text) for text in built.notes]
        return [Note(0, "engine", "", built.engine_note), *about_data]
    where = Note(saved.round, "resumed", "", f"from the end of round {saved.round}")
    return [where, *(Note(saved.round, "warning", "", text) for text in saved.notes)]


def _finish(built: Built, folder: Path) -> None:
    rows = read_run(folder, unfinished=True)
    recipe = built.recipe
    summary = summarise(
        rows,
        rounds=recipe.run.rounds,
        lower_is_better=lowest(built.experiment.metrics),
        method=recipe.method_name,
        label=recipe.label,
        seed=recipe.run.seed,
        data=recipe.data.name,
        data_digest=content_digest(built.collection),
        engine=built.engine.name,
        device=str(built.device),
        networks=named_networks(built.models),
    )
    pictures.draw(built, replace(rows, summary=summary), folder / "pictures")
    write_summary(folder, summary)


def state_kinds(method: Method) -> Callable[[NodeId], type[State] | None]:
    """Which memory a node has, as the hints of the method's steps say."""
    server, client = (memory_of(method, place) for place in (Place.SERVER, Place.CLIENTS))
    return lambda node: server if node == SERVER else client


def content_digest(collection: Collection) -> str:
    """What the data are, however they are split."""
    seen = {id(e): e for site in collection.sites for e in (site.pool, site.test)}
    digests = sorted(examples.digest() for examples in seen.values())
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _check_version(folder: Path) -> None:
    path = folder / "environment.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        found, by = facts.get("folder_version"), facts.get("fedstill")
    except (OSError, ValueError, AttributeError) as error:
        raise RunFolderError(
            f"{path} does not say which version of fedstill wrote this folder ({error}); its "
            "tables stay readable as CSV, but to go on run the recipe again in a new folder"
        ) from error
    if found != FOLDER_VERSION:
        raise RunFolderError(
            f"{folder} is a run folder of version {found}, written by fedstill {by}; this fedstill "
            f"reads version {FOLDER_VERSION}. Its tables stay readable as CSV; to go on with the "
            f"run, install fedstill {by}"
        )


def _write_partition(collection: Collection, path: Path) -> None:
    rows = counts_table(collection)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _write_whole(path: Path, text: str) -> None:
    draft = path.with_suffix(path.suffix + ".draft")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"cannot write to {folder}: {error.strerror or error}; give another folder with --out"
        ) from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a folder so that no second process writes to it; a kill lets go of it."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RunFolderError(
            f"another process is writing to {folder}; wait until it has ended"
        ) from error


def seeded(recipe: Recipe, seed: int) -> Recipe:
    """The same recipe with another seed."""
    return replace(recipe, run=replace(recipe.run, seed=seed))


def folders_for(
    recipes: Sequence[Recipe], seeds: Sequence[int], out: Path
) -> list[tuple[Recipe, Path]]:
    """A folder for each method and seed: `out` itself for a single run, else one below it."""
    made: dict[Path, Recipe] = {}
    for recipe in recipes:
        place = out / pictures.safe(recipe.label) if len(recipes) > 1 else out
        for seed in seeds:
            folder = place / f"seed-{seed}" if len(seeds) > 1 else place
            if folder in made:
                raise RecipeError(
                    f"method.label: {made[folder].label!r} and {recipe.label!r} would share the "
                    f"folder {folder}; change one of them"
                )
            made[folder] = seeded(recipe, seed)
    return [(recipe, folder) for folder, recipe in made.items()]


def check_free(folder: Path) -> None:
    """Refuse a folder that holds anything but the leftovers of a run that never began."""
    if (folder / "recipe.toml").exists():
        raise RunFolderError(
            f"{folder} already holds a run; go on with `fedstill resume {folder}`, "
            "or give another folder with --out"
        )
    with _writing(folder):
        present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    others = sorted(present - {*BEGINNING})
    if others:
        raise RunFolderError(
            f"{folder} holds other things ({', '.join(others[:3])}{', …' if others[3:] else ''}); "
            "a run needs a folder of its own, give another one with --out"
        )


def recipe_of(folder: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a run folder; refuses a folder that holds no run, or one we cannot read."""
    path = folder / "recipe.toml"
    if not path.exists():
        below = sorted(found.parent for found in folder.glob("*/**/recipe.toml"))
        hint = f"; resume one of {', '.join(map(str, below[:5]))}" if below else ""
        raise RunFolderError(f"{folder} holds no run: there is no recipe.toml in it{hint}")
    _check_version(folder)
    recipes = checked(read_recipe(path, overrides))
    if len(recipes) != 1:
        raise RunFolderError(f"{path} has {len(recipes)} methods, a run has one")
    return recipes[0]


def fresh_folder(wanted: Path) -> Path:
    """The folder, or the next free one beside it."""
    number, folder = 1, wanted
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder
