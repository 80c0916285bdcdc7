"""The pictures of a run: what is drawn, from what; how it looks is the report's business."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.core.method import Place
from fedstill.core.node import SERVER
from fedstill.core.records import Message, NodeId, Pictured
from fedstill.data import Collection as Data
from fedstill.data import Site
from fedstill.engines.engine import Engine
from fedstill.logbook.reader import Run
from fedstill.runs.digest import named_networks
from fedstill.runs.folder import safe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_GALLERIES = 10  # clients whose synthetic images are drawn
IMAGINED = 10  # images of each class that a server's generator makes
STAGES = 10  # rounds after which they are drawn, at most


@dataclass
class Gallery:
    """Looks at the images that arrive in the last round, and of some senders in earlier stages."""

    last: int
    on_the_way: Collection[NodeId] = ()
    seen: dict[NodeId, Pictured] = field(default_factory=dict)  # of the latest round looked at
    round: int = 0

    def __call__(self, message: Message, sender: NodeId, round: int) -> None:
        passing = sender in self.on_the_way and is_stage(round, self.last)
        shown = message.pictures() if round == self.last or passing else None
        if shown is None:
            return
        if round != self.round:
            self.seen, self.round = {}, round
        self.seen[sender] = on_host(shown)

    def of(self, round: int) -> dict[NodeId, Pictured]:
        """What arrived in a round."""
        return self.seen if round == self.round else {}


def is_stage(round: int, rounds: int) -> bool:
    """Whether images are shown after a round: at most ten times, spread evenly, and at the end."""
    return round == rounds or (round > 0 and round % -(-rounds // STAGES) == 0)


def drawable(engine: Engine) -> Data | None:
    """The data by whose classes is drawn; None where there are none, or matplotlib is missing."""
    return engine.population.data if find_spec("matplotlib") is not None else None


def showing_images(engine: Engine) -> Data | None:
    """The same, where inputs are images that can be seen: grey or in colour."""
    return seen_as_images(drawable(engine))


def seen_as_images(data: Data | None) -> Data | None:
    """The data where its inputs are images that can be seen."""
    return data if data is not None and len(data.shape) == 3 and data.shape[0] in (1, 3) else None


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
    """The synthetic sets of the last round, sent, kept or made by the server, as methods say.

    A node's sets stand side by side. Drawn before the last checkpoint, which lacks what was sent.
    """
    data = showing_images(engine)
    if data is None:
        return []
    from fedstill.report import grids

    drawn, classes = [], data.class_names
    for site in data.sites[:MOST_GALLERIES]:
        sets = client_sets(engine, site.name, gallery)
        if sets:
            path = target / f"synthetic-{safe(site.name)}.png"
            shown = side_by_side([grid(*one, len(classes)) for one in sets])
            mean, std = black_and_white(site)
            drawn.append(grids.image_grid(shown, classes, path, mean=mean, std=std))
    return [*drawn, *draw_server(engine, target / "synthetic-server.png")]


def figures(engine: Engine, rows: Run, gallery: Gallery) -> list[Figure]:
    """All pictures of a finished run as figures; nothing is written."""
    if drawable(engine) is None:
        return []
    from fedstill.report import canvas

    with canvas.kept() as found:
        draw(engine, rows, Path())
        draw_sets(engine, Path(), gallery)
    return found


def draw_on_the_way(engine: Engine, target: Path, round: int) -> list[Path]:
    """What the server holds or makes before the end, at most ten times, spread evenly."""
    rounds = engine.experiment.rounds
    if round == rounds or not is_stage(round, rounds):
        return []
    return draw_server(engine, target / f"synthetic-server-round-{round:03d}.png")


def draw_server(engine: Engine, path: Path) -> list[Path]:
    """Sets that the server holds, and images of each class that it makes, from the same noise."""
    data = showing_images(engine)
    if data is None:
        return []
    sets = held_sets(engine, SERVER)
    if not sets:
        return []
    from fedstill.report import grids

    # In a range of their own, so each image fills that of the picture.
    shown = side_by_side([grid(*one, data.classes) for one in sets])
    return [grids.image_grid(shown, data.class_names, path)]


def keep_sets(engine: Engine, target: Path, round: int, gallery: Gallery) -> list[Path]:
    """The same sets as bytes, for reports: at the end, and what passed by or the server has before.

    Needs no matplotlib. A client is asked for what it holds at the end alone.
    """
    data, rounds = seen_as_images(engine.population.data), engine.experiment.rounds
    if data is None or not is_stage(round, rounds):
        return []
    from fedstill.report import grids, image_sets

    stacks = {}
    for site in data.sites[:MOST_GALLERIES]:
        passed = gallery.of(round)
        sets = [passed[site.name]] if site.name in passed else []
        if round == rounds:
            sets = client_sets(engine, site.name, gallery)
        if sets:
            shown = side_by_side([grid(*one, data.classes) for one in sets])
            stacks[site.name] = grids.visible(shown, *black_and_white(site))
    if made := held_sets(engine, SERVER):
        shown = side_by_side([grid(*one, data.classes) for one in made])
        stacks[SERVER] = grids.visible(shown, None, None)
    return [image_sets.write(target, round, image_sets.kept(stacks))] if stacks else []


def client_sets(engine: Engine, name: NodeId, gallery: Gallery) -> list[Pictured]:
    """What a client sent in the last round, and what it holds."""
    sent = gallery.of(engine.experiment.rounds)
    sets = [sent[name]] if name in sent else []
    return sets + (held_sets(engine, name) if engine.memory(name) is not None else [])


def black_and_white(site: Site) -> tuple[Sequence[float] | None, Sequence[float] | None]:
    """The mean and deviation of a site's pixels.

    Of floats nobody knows where black and white are: each image then fills the range.
    """
    pixels = site.pool.inputs.dtype == np.uint8
    return (site.mean, site.std) if pixels else (None, None)


def held_sets(engine: Engine, node: NodeId) -> list[Pictured]:
    """The sets of images that a node has, and that the server can make, as the method says."""
    method, rounds = engine.experiment.method, engine.experiment.rounds
    seen = engine.node(node, rounds, "pictures")
    made = method.imagined(seen, IMAGINED) if node == SERVER else None
    sets = [*method.pictures(seen).values(), *([] if made is None else [made])]
    return [on_host(one) for one in sets if len(one[0])]


def on_host(pictured: Pictured) -> Pictured:
    """Images and labels apart from any device and gradient."""
    images, labels = (part.detach().cpu() for part in pictured)
    return images, labels


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
