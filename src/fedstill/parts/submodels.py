"""Sub-models: parts of a network cut out by width, and put back over those who hold them.

A part is named by its units: for each stream of the network the places that are kept, sorted, so
that a part with all units is the network itself. Sums over units do not depend on their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from fedstill.core.errors import BadValue
from fedstill.core.model import Model
from fedstill.core.node import Node
from fedstill.core.records import NodeId, Weights
from fedstill.models import MODELS
from fedstill.models.scalable import CLASSES, Scalable

Units = Mapping[str, Tensor]  # by stream, [unit], sorted; a stream left out is whole

__all__ = [
    "CLASSES",
    "Scalable",
    "SubModel",
    "Units",
    "budget_faults",
    "cover",
    "extract",
    "first_units",
    "halved_rates",
    "held_mask",
    "random_units",
    "rolling_units",
    "unfit",
]


class SubModel(NamedTuple):
    """What somebody holds of a network, and how much it counts."""

    weights: Weights
    units: Units
    share: float


def halved_rates(count: int, *, rho: int, sigma: int) -> list[float]:
    """(1/2)^min(σ, ⌊ρ·i/N⌋) for i = 1 to N: the budgets of DFRD."""
    return [0.5 ** min(sigma, rho * i // count) for i in range(1, count + 1)]


def budget_faults(budgets: Sequence[Any]) -> list[str]:
    """What is wrong with the shares of the units that clients are given, as a line or none."""
    wrong = [
        rate
        for rate in budgets
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate <= 1
    ]
    return [f"budgets = {list(budgets)}: each must be in (0, 1]"] if wrong else []


def held_mask(client: Node[Any]) -> Tensor:
    """[class], one for each class that the client has examples of."""
    return (client.data.counts(client.model.classes) > 0).float().to(client.device)


def first_units(model: Scalable) -> dict[str, Tensor]:
    """Of each stream the first units, as many as a narrowed network keeps."""
    return {name: torch.arange(model.units(width)) for name, width in model.streams().items()}


def rolling_units(model: Scalable, turn: int) -> dict[str, Tensor]:
    """A window that starts one unit further at every turn, around each stream's own width."""
    kept = first_units(model)
    return {
        name: ((kept[name] + turn) % width).sort().values for name, width in model.streams().items()
    }


def random_units(model: Scalable, rng: Generator) -> dict[str, Tensor]:
    """Of each stream a random subset, one draw for all layers that write or read it."""
    return {
        name: torch.randperm(width, generator=rng)[: model.units(width)].sort().values
        for name, width in model.streams().items()
    }


def extract(model: Scalable, weights: Weights, units: Units) -> Weights:
    """The part of a network's weights that belongs to some units."""
    made: Weights = {}
    for name in model.initial():
        tensor = weights[name]
        for axis, index in enumerate(_places(model, name, tensor, units)):
            if index is not None:
                tensor = tensor.index_select(axis, index)
        made[name] = tensor
    return made


def cover(model: Scalable, weights: Weights, parts: Sequence[SubModel]) -> Weights:
    """For each entry the weighted mean over the parts that hold it; others keep their value."""
    made: Weights = {}
    for name in model.initial():
        before = weights[name]
        places = [_mesh(_places(model, name, before, part.units)) for part in parts]
        total = torch.zeros(before.shape, dtype=torch.float64, device=before.device)
        for place, part in zip(places, parts, strict=True):
            total[place] += part.share
        mean = torch.zeros_like(before)
        for place, part in zip(places, parts, strict=True):
            # Shares are normalised in double precision, as in a mean of whole networks.
            share = (part.share / total[place]).nan_to_num().to(before.dtype)
            mean[place] += part.weights[name] * share
        made[name] = torch.where(total > 0, mean, before)
    return made


def unfit(server: Model, models: Mapping[NodeId, Model], rates: Sequence[float]) -> list[str]:
    """Why clients cannot have these shares of the server's network; a line each."""
    if not isinstance(server, Scalable):
        known = ", ".join(name for name, kind in MODELS.items() if issubclass(kind, Scalable))
        return [f"{server.title} cannot be narrowed; use one of {known}"]
    if len(rates) != len(models):
        order = ", ".join(models)
        return [f"budgets are {len(rates)} for {len(models)} clients; give one for each of {order}"]
    lines = []
    for (client, model), rate in zip(models.items(), rates, strict=True):
        if model != server:
            lines.append(f"{client} has another network than the server; leave its own out")
            continue
        try:
            server.narrowed(rate)
        except BadValue as error:
            lines += [f"{client}: {line}" for line in error.faults]
    return lines


def _places(model: Scalable, name: str, tensor: Tensor, units: Units) -> list[Tensor | None]:
    """For each axis of a whole tensor the entries of the units; None for all of them.

    A unit of a map that was flattened has several entries in a row.
    """
    streams, widths = model.wiring()[name.rpartition(".")[0]], model.streams()
    found: list[Tensor | None] = []
    for length, stream in zip(tensor.shape, streams, strict=False):
        index = units.get(stream)
        if index is None:
            found.append(None)
            continue
        each = length // widths.get(stream, length)
        entries = index[:, None] * each + torch.arange(each)
        found.append(entries.flatten().to(tensor.device))
    return found


def _mesh(places: Sequence[Tensor | None]) -> tuple[Tensor | slice, ...]:
    """An index of all combinations of the entries along each axis."""
    chosen = [index for index in places if index is not None]
    crossed = iter(torch.meshgrid(*chosen, indexing="ij") if chosen else ())
    return tuple(slice(None) if index is None else next(crossed) for index in places)
