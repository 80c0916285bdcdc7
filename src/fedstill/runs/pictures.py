"""The pictures of a run: what is drawn, from what; how it looks is the report's business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.core.method import Place
from fedstill.core.node import SERVER
from fedstill.core.records import Message, NodeId, State
from fedstill.data import Collection
from fedstill.engines.engine import Engine
from fedstill.logbook.reader import Run
from fedstill.runs.digest import named_networks
from fedstill.runs.folder import safe

MOST_GALLERIES = 10  # clients whose synthetic images are drawn
IMAGINED = 10  # images of each class that a server's generator makes
STAGES = 10  # rounds after which they are drawn, at most
Labelled = tuple[Tensor, Tensor]  # images and labels


@dataclass
class Gallery:
    """A channel that looks at the images passing in the last round, and changes nothing."""

    last: int
    seen: dict[NodeId, Labelled] = field(default_factory=dict)

    def carry(self, message: Message, sender: NodeId, round: int, step: str) -> Message:
        images, labels = getattr(message, "images", None), getattr(message, "labels", None)
        if round == self.last and images is not None and labels is not None:
            self.seen[sender] = (images.detach().cpu(), labels.detach().cpu())
        return message


def drawable(engine: Engine) -> Collection | None:
    """The data by whose classes is drawn; None where there are none, or matplotlib is missing."""
    return engine.population.data if find_spec("matplotlib") is not None else None


def draw(engine: Engine, rows: Run, target: Path) -> list[Path]:
    """Curves, partition and matrix of a finished run; nothing where matplotlib is missing."""
    data = drawable(engine)
    if data is None:
        return []
    from fedstill.report import grids, plots

    sites, classes = data.sites, data.class_names
    counts = [site.counts(len(classes)).tolist() for site in sites]
    names = [site.name for site in sites]
    drawn = [
        plots.accuracy_by_round([rows], target / "accuracy-by-round.png"),
        plots.accuracy_by_bytes([rows], target / "accuracy-by-bytes.png"),
        grids.partition(counts, names, target / "partition.png", classes=classes),
    ]
    if engine.experiment.method.scored is Place.CLIENTS and rows.summary.get("accuracy_matrix"):
        matrix, path = rows.matrix(), target / "accuracy-matrix.png"
        networks = named_networks(engine.population.models)
        drawn.append(
            grids.accuracy_matrix(
                matrix.values, matrix.nodes, path, targets=matrix.targets, networks=networks
            )
        )
    return drawn


def draw_sets(engine: Engine, target: Path, gallery: Gallery) -> list[Path]:
    """The synthetic sets of the last round, sent, kept or made by the server.

    A client's own set stands beside the global one.

    Drawn before the last checkpoint, which lacks what was sent.
    """
    data = drawable(engine)
    if data is None:
        return []
    from fedstill.report import grids

    drawn, classes = [], data.class_names
    for site in data.sites[:MOST_GALLERIES]:
        parts = kept_sets(engine.states.get(site.name), len(classes))
        if site.name in gallery.seen:
            parts = {"sent": gallery.seen[site.name], **parts}
        if parts:
            path = target / f"synthetic-{safe(site.name)}.png"
            shown = side_by_side([grid(*part, len(classes)) for part in parts.values()])
            drawn.append(grids.image_grid(shown, classes, path, mean=site.mean, std=site.std))
    return [*drawn, *draw_imagined(engine, target / "synthetic-server.png")]


def draw_on_the_way(engine: Engine, target: Path, round: int) -> list[Path]:
    """What the server's generator makes before the end, at most ten times, spread evenly."""
    rounds = engine.experiment.rounds
    if round in (0, rounds) or round % -(-rounds // STAGES):
        return []
    return draw_imagined(engine, target / f"synthetic-server-round-{round:03d}.png")


def draw_imagined(engine: Engine, path: Path) -> list[Path]:
    """Images of each class by the server's generator, always from the same noise."""
    data = drawable(engine)
    if data is None:
        return []
    server = engine.node(SERVER, engine.experiment.rounds, "pictures")
    made = engine.experiment.method.imagined(server, IMAGINED)
    if made is None:
        return []
    from fedstill.report import grids

    images, labels = (part.detach().cpu() for part in made)
    classes = data.class_names
    # In a range of their own, so each image fills that of the picture.
    return [grids.image_grid(grid(images, labels, len(classes)), classes, path)]


def kept_sets(state: State | None, classes: int) -> Mapping[str, Labelled]:
    """The synthetic sets that a client remembers: its own, and the global one it leans on."""
    found: dict[str, Labelled] = {}
    images, which = getattr(state, "images", None), getattr(state, "classes", None)
    share, anchors = getattr(state, "share", None), getattr(state, "anchors", None)
    if images is not None and which is not None and share is not None:
        real = (share > 0).cpu()
        labels = which.cpu().unsqueeze(1).expand(real.shape)
        found["own"] = (images.detach().cpu()[real], labels[real])
    if anchors is not None and len(anchors):
        each = len(anchors) // classes
        found["global"] = (anchors.detach().cpu(), torch.arange(classes).repeat_interleave(each))
    sets = getattr(state, "sets", {})
    if which is not None and len(sets) == 1:  # the one that all peers share
        ((name, made),) = sets.items()
        labels = which[name].cpu().repeat_interleave(made.shape[1])
        found["global"] = (made.detach().cpu().flatten(0, 1), labels)
    return found


def grid(images: Tensor, labels: Tensor, classes: int) -> NDArray[np.float32]:
    """[class, image, channel, height, width]; a place without an image is NaN."""
    rows = [images[labels == c].float() for c in range(classes)]
    made = torch.full((classes, max(map(len, rows)), *images.shape[1:]), float("nan"))
    for c, found in enumerate(rows):
        made[c, : len(found)] = found
    return made.numpy()


def side_by_side(grids: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Several grids of the same classes with an empty column between them."""
    gap = np.full_like(grids[0][:, :1], np.nan)
    parts = [part for grid in grids for part in (gap, grid)]
    return np.concatenate(parts[1:], axis=1)


def pictures_of(folder: Path) -> list[Path]:
    """Every picture in or below a folder."""
    return sorted(folder.rglob("*.png"))
