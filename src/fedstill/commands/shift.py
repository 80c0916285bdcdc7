"""How different clients' data are, before and after distillation: two distances and a map.

FedLGD (Huang et al., TMLR 2024) quotes MMD and Wasserstein distances between clients, shows t-SNE
maps of their features before and after training, and how often each brightness occurs. Features are
those of the recipe's network at its common start, or as a run left it at its server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.core.data import Batch, Data
from fedstill.core.errors import BadValue, RunFolderError
from fedstill.core.model import Model
from fedstill.core.node import SERVER
from fedstill.core.records import NodeId, Weights
from fedstill.core.seeds import draw, generator
from fedstill.federation.cache import FolderCache
from fedstill.logbook.writer import write_json
from fedstill.models.plain import fits
from fedstill.parts.losses import mmd
from fedstill.recipe.build import execution_of, experiment_of
from fedstill.recipe.tables import Recipe
from fedstill.runs.run import read
from fedstill.runs.virtual import virtual_sets


@dataclass(frozen=True, eq=False)
class Cloud:
    """Some examples of one client as a network sees them."""

    client: NodeId
    features: Tensor  # [example, feature]
    labels: Tensor  # [example]
    levels: Tensor  # [channel, level], how often each brightness occurs, in shares


LEVELS = 32  # of brightness, from black to full
DIGITS = {"mmd": 4, "wasserstein": 3}  # behind the point


def clouds(
    data: Mapping[NodeId, Data],
    model: Model,
    weights: Weights,
    most: int,
    seed: int,
    normalised: Mapping[NodeId, Data] | None = None,
) -> list[Cloud]:
    """Features of equally many examples of each client, at most `most`.

    Examples are normalised as `normalised` says, where it is not known by the data themselves.
    """
    if len(data) < 2:
        raise BadValue(f"shift compares clients, of which there is one: {', '.join(data)}")
    size = min(most, *(len(own) for own in data.values()))
    found = []
    for name, own in data.items():
        rows = torch.randperm(len(own), generator=generator(seed, "shift", name))[:size]
        batch: Batch = own.take(rows.to(own.device))
        features = model.features(weights, batch.x).detach().cpu()
        shares = levels(batch.x, (normalised or data)[name])
        found.append(Cloud(name, features, batch.y.cpu(), shares))
    return found


def levels(x: Tensor, normalised: Data) -> Tensor:
    """[channel, level]: how often each brightness occurs in examples, before normalisation."""
    pool = normalised.parts[0].pool
    raw = x if pool.mean is None or pool.std is None else x * pool.std + pool.mean
    raw = raw if raw.ndim == 4 else raw.flatten(1).unsqueeze(1)
    channels = raw.detach().float().cpu().clamp(0, 1).transpose(0, 1).flatten(1)
    counts = torch.stack([torch.histc(each, LEVELS, 0, 1) for each in channels])
    return counts / channels.shape[1]


def wasserstein(left: Tensor, right: Tensor) -> float:
    """The 2-Wasserstein distance of two equally large clouds, by the cheapest assignment."""
    from scipy.optimize import linear_sum_assignment

    costs = torch.cdist(left.double(), right.double()).square().numpy()
    rows, columns = linear_sum_assignment(costs)
    return float(np.sqrt(costs[rows, columns].mean()))


def pairs(before: Sequence[Cloud], after: Sequence[Cloud]) -> list[dict[str, Any]]:
    """For every two clients both distances, of the data and of the distilled sets if there are."""
    distilled = {cloud.client: cloud for cloud in after}
    rows = []
    for one, other in combinations(before, 2):
        row: dict[str, Any] = {"clients": f"{one.client} - {other.client}"}
        both = {"real": (one, other)}
        if distilled:
            both["distilled"] = (distilled[one.client], distilled[other.client])
        for name, (a, b) in both.items():
            row[f"mmd {name}"] = round(float(mmd(a.features, b.features)), DIGITS["mmd"])
            distance = wasserstein(a.features, b.features)
            row[f"wasserstein {name}"] = round(distance, DIGITS["wasserstein"])
        rows.append(row)
    return rows


def for_people(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same, all numbers of a column with as many digits behind the point."""
    return [
        {
            name: value if isinstance(value, str) else f"{value:.{DIGITS[name.split()[0]]}f}"
            for name, value in row.items()
        }
        for row in rows
    ]


def tsne_map(found: Sequence[Cloud], seed: int) -> NDArray[np.float64]:
    """[example, 2], all clouds behind each other on one map."""
    from sklearn.manifold import TSNE

    everything = torch.cat([cloud.features for cloud in found]).double().numpy()
    perplexity = min(30.0, max(2.0, len(everything) / 10))
    made = TSNE(init="pca", perplexity=perplexity, random_state=seed % 2**32)
    return np.asarray(made.fit_transform(everything), dtype=np.float64)


def measured(
    recipe: Recipe, most: int = 100, run: Path | None = None
) -> tuple[list[Cloud], list[Cloud]]:
    """The clients' examples and their distilled sets as the network sees them at its common start.

    Without `data.virtual` nothing is distilled. With the folder of a run: as its server's network
    sees them after the last round.
    """
    execution, experiment = execution_of(recipe), experiment_of(recipe)
    virtual, cache = recipe.data.virtual, FolderCache(recipe.run.cache_dir)
    seed = recipe.run.seed
    with execution.applied(experiment.networks):
        population = experiment.population.on(execution.torch_device)
        model = population.party(SERVER).model.on(execution.torch_device)
        if run is None:
            weights = model.init(draw(seed, "shift network"))
        else:
            weights = trained(run, model, execution.torch_device)
        real = {name: population.party(name).data for name in population.clients}
        before = clouds(real, model, weights, most, seed)
        if virtual is None:
            return before, []
        distilled, _ = virtual_sets(experiment, virtual, execution, cache)
        return before, clouds(distilled, model, weights, most, seed, real)


def trained(folder: Path, model: Model, device: torch.device) -> Weights:
    """The weights of a run's server, for a network that must be the run's."""
    found = read(folder).model(SERVER)
    if found.weights is None or not fits(model, found.weights):
        raise RunFolderError(
            f"the server of {folder} holds no weights for {model.title}, the network of this "
            "recipe; expected a run of the same recipe, by a method with one common network"
        )
    return {name: value.to(device) for name, value in found.weights.items()}


def maps(
    real: Sequence[Cloud], distilled: Sequence[Cloud], seed: int
) -> list[tuple[str, NDArray[np.float64], list[NodeId], list[int]]]:
    """For the examples and for the distilled sets: a title, places, whose they are, and classes."""
    return [
        (
            title,
            tsne_map(found, seed),
            [cloud.client for cloud in found for _ in cloud.labels],
            [int(label) for cloud in found for label in cloud.labels],
        )
        for title, found in (("Clients' examples", real), ("Distilled sets", distilled))
        if found
    ]


def draw_map(real: Sequence[Cloud], distilled: Sequence[Cloud], seed: int, path: Path) -> Path:
    """t-SNE maps side by side: the examples, and the distilled sets if there are any."""
    from fedstill.report.maps import Panel, side_by_side

    return side_by_side([Panel(*each) for each in maps(real, distilled, seed)], path)


def draw_levels(real: Sequence[Cloud], distilled: Sequence[Cloud], path: Path) -> Path:
    """How often each brightness occurs: a row for each client, its examples and its own set."""
    from fedstill.report.maps import brightness

    both = {cloud.client: [cloud.levels.numpy()] for cloud in real}
    for cloud in distilled:
        both[cloud.client].append(cloud.levels.numpy())
    return brightness(both, path)


def write(real: Sequence[Cloud], distilled: Sequence[Cloud], seed: int, folder: Path) -> Path:
    """The distances and both maps as shift.json."""
    drawn = [
        {
            "title": title,
            "points": [
                [round(float(x), 3), round(float(y), 3), client, label]
                for (x, y), client, label in zip(places, clients, classes, strict=True)
            ],
        }
        for title, places, clients, classes in maps(real, distilled, seed)
    ]
    path = folder / "shift.json"
    write_json(path, {"pairs": pairs(real, distilled), "maps": drawn})
    return path
