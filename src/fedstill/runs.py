"""Run folders: begin, resume and finish a run so that nothing written is ever lost."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.config import Built, Recipe, checked, read_recipe, toml_text
from fedstill.core import trees
from fedstill.core.errors import RunFolderError
from fedstill.core.method import Method, Place
from fedstill.core.node import SERVER
from fedstill.core.records import Message, NodeId, State
from fedstill.data import Collection, counts_table
from fedstill.federation import checkpoint
from fedstill.federation.run import Progress, Watch, run
from fedstill.logbook.environment import environment
from fedstill.logbook.events import Note
from fedstill.logbook.reader import read_run
from fedstill.logbook.summary import summarise, write_summary
from fedstill.logbook.writer import FolderLog, write_json

FOLDER_VERSION = 1
MOST_GALLERIES = 10  # clients whose synthetic images are drawn


def begin(recipe: Recipe, folder: Path, watch: Watch = lambda progress: None) -> Path:
    """Run a recipe in a new folder and return it."""
    if (folder / "recipe.toml").exists():
        raise RunFolderError(
            f"{folder} already holds a run; go on with `fedstill resume {folder}`, "
            "or give another folder with --out"
        )
    built = Built(recipe)  # everything that can be refused is refused before anything is written
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"folder_version": FOLDER_VERSION, **environment()}
        write_json(folder / "environment.json", facts)
        _write_partition(built.collection, folder / "partition.csv")
        _write_whole(folder / "recipe.toml", toml_text(recipe.as_tables()))
    return _play(built, folder, watch, None)


def resume(
    folder: Path, overrides: Sequence[str] = (), watch: Watch = lambda progress: None
) -> Path:
    """Go on from the newest checkpoint of a folder; the result is that of an unbroken run."""
    path = recipe_of(folder)
    _check_version(folder)
    (recipe,) = checked(read_recipe(path, overrides))
    built = Built(recipe)
    saved = checkpoint.read_latest(
        folder / "checkpoints", state_kinds(recipe.method), digest=built.digest()
    )
    if overrides:
        with _writing(folder):
            _write_whole(folder / "recipe.toml", toml_text(recipe.as_tables()))
    return _play(built, folder, watch, saved)


def _play(built: Built, folder: Path, watch: Watch, saved: checkpoint.Saved | None) -> Path:
    recipe, engine = built.recipe, built.engine
    digest = built.digest()
    gallery = Gallery(last=recipe.run.rounds)
    experiment = replace(built.experiment, channels=[gallery])
    with FolderLog(folder) as log:
        log.rewind(-1 if saved is None else saved.round)
        said = 0
        if saved is None:
            log.write(Note(0, "engine", "", built.engine_note))
            for text in built.collection.notes:
                log.write(Note(0, "data", "", text))
        else:
            log.write(Note(saved.round, "resumed", "", f"from the end of round {saved.round}"))
            for text in saved.notes:
                log.write(Note(saved.round, "warning", "", text))
            engine.restore(_on_device(saved.states, built.device))
            said = int(saved.extra.get("said", 0))

        traffic = {"said": said}

        def save(round: int) -> None:
            due = round % recipe.run.checkpoint_every == 0 or round == recipe.run.rounds
            if due:
                log.flush()
                checkpoint.write(
                    folder / "checkpoints", round, engine.states, digest=digest,
                    keep=recipe.run.keep_checkpoints, extra=dict(traffic),
                )  # fmt: skip

        def watched(progress: Progress) -> None:
            traffic["said"] = progress.bytes
            watch(progress)

        done = None if saved is None else saved.round
        run(experiment, engine, log, done=done, said=said, save=save, watch=watched)
    _finish(built, folder, gallery)
    return folder


def _finish(built: Built, folder: Path, gallery: Gallery) -> None:
    rows = read_run(folder, unfinished=True)
    recipe = built.recipe
    summary = summarise(
        rows,
        rounds=recipe.run.rounds,
        method=recipe.method_name,
        label=recipe.label,
        seed=recipe.run.seed,
        data=recipe.data.name,
        data_digest=content_digest(built.collection),
        engine=built.engine.name,
        device=str(built.device),
    )
    draw_pictures(built, folder, gallery)
    write_summary(folder, summary)


@dataclass
class Gallery:
    """A channel that looks at the images passing in the last round, and changes nothing."""

    last: int
    seen: dict[NodeId, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def carry(self, message: Message, sender: NodeId, round: int, step: str) -> Message:
        images, labels = getattr(message, "images", None), getattr(message, "labels", None)
        if round == self.last and images is not None and labels is not None:
            self.seen[sender] = (images.detach().cpu(), labels.detach().cpu())
        return message


def draw_pictures(built: Built, folder: Path, gallery: Gallery) -> list[Path]:
    """The pictures of a run; none where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return []
    from fedstill.report import grids, plots

    target = folder / "pictures"
    target.mkdir(exist_ok=True)
    rows = read_run(folder, unfinished=True)
    names = [site.name for site in built.collection.sites]
    counts = [site.counts(built.collection.classes).tolist() for site in built.collection.sites]
    drawn = [
        plots.accuracy_by_round([rows], target / "accuracy-by-round.png"),
        plots.accuracy_by_bytes([rows], target / "accuracy-by-bytes.png"),
        grids.partition(
            counts, names, target / "partition.png", classes=built.collection.class_names
        ),
    ]
    if built.recipe.method.scored is Place.CLIENTS:
        matrix, path = rows.matrix(), target / "accuracy-matrix.png"
        drawn.append(
            grids.accuracy_matrix(matrix.values, matrix.nodes, path, targets=matrix.targets)
        )
    for site in built.collection.sites[:MOST_GALLERIES]:
        if site.name in gallery.seen:
            by_class = grid(*gallery.seen[site.name], built.collection.classes)
            path = target / f"synthetic-{_safe(site.name)}.png"
            labels = built.collection.class_names
            drawn.append(grids.image_grid(by_class, labels, path, mean=site.mean, std=site.std))
    return drawn


def grid(images: torch.Tensor, labels: torch.Tensor, classes: int) -> NDArray[np.float32]:
    """[class, image, channel, height, width]; a place without an image is NaN."""
    rows = [images[labels == c].float() for c in range(classes)]
    made = torch.full((classes, max(map(len, rows)), *images.shape[1:]), float("nan"))
    for c, found in enumerate(rows):
        made[c, : len(found)] = found
    return made.numpy()


def state_kinds(method: Method) -> Callable[[NodeId], type[State] | None]:
    """Which memory a node has, as the method's hints say."""
    server = typing.get_type_hints(type(method).server_state).get("return")
    client = typing.get_type_hints(type(method).client_state).get("return")

    def kind(node: NodeId) -> type[State] | None:
        hint = server if node == SERVER else client
        options = typing.get_args(hint) or (hint,)
        found = [o for o in options if isinstance(o, type) and issubclass(o, State)]
        return found[0] if found and found[0] is not State else None

    return kind


def content_digest(collection: Collection) -> str:
    """What the data are, however they are split."""
    seen = {id(e): e for site in collection.sites for e in (site.pool, site.test)}
    digests = sorted(examples.digest() for examples in seen.values())
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _on_device(
    states: dict[NodeId, State | None], device: torch.device
) -> dict[NodeId, State | None]:
    return {node: trees.to(state, device) for node, state in states.items()}


def _check_version(folder: Path) -> None:
    try:
        found = json.loads((folder / "environment.json").read_text()).get("folder_version")
    except (OSError, ValueError):
        found = None
    if found != FOLDER_VERSION:
        raise RunFolderError(
            f"{folder} was written in run-folder version {found}, this fedstill reads version "
            f"{FOLDER_VERSION}; its tables stay readable as CSV, but to go on with the run use the "
            "fedstill version named in its environment.json"
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


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def seeded(recipe: Recipe, seed: int) -> Recipe:
    """The same recipe with another seed."""
    return replace(recipe, run=replace(recipe.run, seed=seed))


def folders_for(
    recipes: Sequence[Recipe], seeds: Sequence[int], out: Path
) -> list[tuple[Recipe, Path]]:
    """A folder for each method and seed: `out` itself for a single run, else one below it."""
    pairs = [(seeded(recipe, seed), recipe, seed) for recipe in recipes for seed in seeds]
    made = []
    for seeded_recipe, recipe, seed in pairs:
        folder = out
        if len(recipes) > 1:
            folder = folder / _safe(recipe.label)
        if len(seeds) > 1:
            folder = folder / f"seed-{seed}"
        made.append((seeded_recipe, folder))
    return made


def recipe_of(folder: Path) -> Path:
    """The recipe of a run folder; refuses a folder that holds no run."""
    if not (folder / "recipe.toml").exists():
        raise RunFolderError(f"{folder} holds no run: there is no recipe.toml in it")
    return folder / "recipe.toml"


def fresh_folder(wanted: Path) -> Path:
    """The folder, or the next free one beside it."""
    number, folder = 1, wanted
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def pictures_of(folder: Path) -> list[Path]:
    """Every picture in or below a folder."""
    return sorted(folder.rglob("*.png"))
