"""What does not go together with privacy, in lines that say what to do."""

from __future__ import annotations

from collections.abc import Iterator

from fedstill.core.errors import SiteError
from fedstill.core.records import NodeId
from fedstill.data.images import statistics
from fedstill.data.sites import Collection, Statistics
from fedstill.federation.population import Population
from fedstill.privacy.privacy import Privacy


def misfits(privacy: Privacy, population: Population) -> Iterator[str]:
    """A line for everything in a population that would break the promise."""
    sizes = {client: len(population.party(client).data) for client in present(population)}
    most = max(sizes, key=lambda client: sizes[client], default="")
    if most and privacy.valid and privacy.delta * sizes[most] >= 1:
        yield (
            f"privacy.delta = {privacy.delta:g}: must be below one over the records of a client, "
            f"but {most} has {sizes[most]}; such a delta allows to publish one of them"
        )
    if population.data is not None:
        yield from computed_normalisation(population.data)


def present(population: Population) -> list[NodeId]:
    """The clients whose records are here; those of others are at their own sites."""
    found = []
    for client in population.clients:
        try:
            population.party(client)
        except SiteError:
            continue
        found.append(client)
    return found


def computed_normalisation(data: Collection) -> Iterator[str]:
    """A line where clients are normalised by statistics of the very records to be kept private."""
    known: dict[int, tuple[Statistics, Statistics]] = {}
    for site in data.sites:
        if site.mean is None:
            continue
        if id(site.pool) not in known:
            known[id(site.pool)] = statistics(site.pool.inputs)
        mean, std = known[id(site.pool)]
        if mean == site.mean or std == site.std:
            yield (
                f"data: {site.name} is normalised by the exact mean and deviation of its records, "
                "which every image shows; with [privacy] give constants, in Python by "
                "normalise=(0.5, 0.5), in a recipe by data.mean = [0.5] and data.std = [0.5]"
            )
            return
