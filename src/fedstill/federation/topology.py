"""Who hears whom; no payloads.

A topology decides between which clients messages pass. The server, where a method has one, hears
every client and is heard by every client that is awake, whatever the topology.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated

import torch
from torch import Tensor

from fedstill.core import ranges
from fedstill.core.errors import BadValue, unknown
from fedstill.core.node import SERVER
from fedstill.core.ranges import Count, Range
from fedstill.core.records import NodeId
from fedstill.core.seeds import draw, generator
from fedstill.federation import graphs
from fedstill.federation.graphs import Pair

Edges = Mapping[NodeId, tuple[NodeId, ...]]

DRAWS = 100  # how often a random graph is drawn anew because it is not connected


@dataclass(frozen=True, eq=False)
class Graph:
    """The clients of a federation and the neighbours of each, both in the order of names."""

    members: tuple[NodeId, ...]
    neighbours: Edges

    def hearers(self, speaker: NodeId, awake: Iterable[NodeId]) -> list[NodeId]:
        """Who hears a speaker: the server before all, then the clients that are awake."""
        present = set(awake)
        if speaker == SERVER:
            return [member for member in self.members if member in present]
        if speaker not in self.neighbours:
            raise BadValue(unknown("client", speaker, self.members))
        if isinstance(self.neighbours, _Everyone):  # as many as are awake, not as exist
            others = (other for other in present if other in self.neighbours and other != speaker)
            return [SERVER, *sorted(others)]
        return [SERVER, *(other for other in self.neighbours[speaker] if other in present)]

    def matrix(self) -> Tensor:
        """[client, client], one where two clients hear each other, in the order of `members`."""
        place = {member: i for i, member in enumerate(self.members)}
        matrix = torch.zeros(len(place), len(place))
        for member, others in self.neighbours.items():
            for other in others:
                matrix[place[member], place[other]] = 1.0
        return matrix

    @property
    def is_partial(self) -> bool:
        """Whether some clients hear each other, and not simply everyone everyone."""
        everyone = isinstance(self.neighbours, _Everyone)
        return not everyone and any(self.neighbours.values())

    def pairs(self) -> Iterator[tuple[NodeId, NodeId]]:
        """Every two clients that hear each other, once, in the order of names."""
        for member in self.members:
            yield from ((member, other) for other in self.neighbours[member] if member < other)


class _Everyone(Mapping[NodeId, tuple[NodeId, ...]]):
    """Every client with all the others as neighbours; who they are is made when asked for."""

    def __init__(self, names: Sequence[NodeId]):
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: NodeId) -> tuple[NodeId, ...]:
        if name not in self._names:
            raise KeyError(name)
        return tuple(other for other in self._names if other != name)

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


@dataclass(frozen=True)
class Topology:
    """A rule by which clients are joined."""

    def __post_init__(self) -> None:
        wrong = ranges.faults(self)
        if wrong:
            raise BadValue([f"{type(self).__name__}: {line}" for line in wrong])

    def edges(self, members: Sequence[NodeId], seed: int) -> Edges:
        """For every client its neighbours, sorted; a function of the names and the seed only."""
        names = _sorted(members)
        near: dict[NodeId, set[NodeId]] = {name: set() for name in names}
        for one, other in self.pairs(len(names), seed):
            near[names[one]].add(names[other])
            near[names[other]].add(names[one])
        return {name: tuple(sorted(others)) for name, others in near.items()}

    def graph(self, members: Sequence[NodeId], seed: int) -> Graph:
        """The graph of these clients."""
        edges = self.edges(members, seed)
        return Graph(tuple(edges), edges)

    def pairs(self, clients: int, seed: int) -> Iterable[Pair]:
        """The joined clients, by their places in the sorted list of names."""
        raise TypeError(f"{type(self).__name__} must define pairs()")


@dataclass(frozen=True)
class Star(Topology):
    """Clients hear the server only."""

    def pairs(self, clients: int, seed: int) -> Iterable[Pair]:
        return ()


@dataclass(frozen=True)
class Complete(Topology):
    """Every client hears every other."""

    def edges(self, members: Sequence[NodeId], seed: int) -> Edges:
        return _Everyone(_sorted(members))

    def pairs(self, clients: int, seed: int) -> Iterable[Pair]:
        return ((one, other) for one in range(clients) for other in range(one + 1, clients))


@dataclass(frozen=True)
class Ring(Topology):
    """Clients in a circle, in the order of their names, each hears its nearest on either side."""

    neighbours: Count = 1  # on each side

    def pairs(self, clients: int, seed: int) -> Iterable[Pair]:
        if clients > 1 and self.neighbours > clients // 2:
            raise BadValue(
                f"Ring: neighbours = {self.neighbours} on each side, but a circle of {clients} "
                f"clients has {clients // 2}; take fewer, or Complete"
            )
        if clients < 2:
            return ()
        return graphs.circle(range(clients), self.neighbours)


@dataclass(frozen=True)
class RandomRegular(Topology):
    """A random connected graph in which every client has the same number of neighbours."""

    degree: Count = 4

    def pairs(self, clients: int, seed: int) -> Iterable[Pair]:
        self._check(clients)
        pairs = _drawn_until_connected(
            clients, lambda n: graphs.random_regular(clients, self.degree, _rng(seed, n))
        )
        if pairs is not None:
            return pairs
        raise BadValue(
            f"RandomRegular: no connected graph of {clients} clients with degree = {self.degree} "
            f"in {DRAWS} draws; take a larger degree"
        )

    def _check(self, clients: int) -> None:
        degree = self.degree
        if degree >= clients:
            raise BadValue(
                f"RandomRegular: degree = {degree} needs more than {degree} clients, there are "
                f"{clients}; take a smaller degree"
            )
        if degree * clients % 2:
            raise BadValue(
                f"RandomRegular: degree = {degree} times {clients} clients is odd, and every edge "
                "has two ends; change one of them by one"
            )
        if degree == 1 and clients > 2:
            raise BadValue(
                f"RandomRegular: degree = 1 joins {clients} clients in separate pairs; "
                "take at least 2"
            )


@dataclass(frozen=True)
class ErdosRenyi(Topology):
    """Each two clients are joined with the same probability; drawn anew until connected."""

    probability: Annotated[float, Range(0, 1, open_low=True)] = 0.5

    def pairs(self, clients: int, seed: int) -> Iterable[Pair]:
        pairs = _drawn_until_connected(
            clients, lambda n: graphs.erdos_renyi(clients, self.probability, _rng(seed, n))
        )
        if pairs is not None:
            return pairs
        enough = min(1.0, 2 * math.log(clients) / clients)
        raise BadValue(
            f"ErdosRenyi: probability = {self.probability} left some of {clients} clients apart in "
            f"each of {DRAWS} draws; take about {enough:.2g} or more"
        )


@dataclass(frozen=True)
class SmallWorld(Topology):
    """A ring in which each edge is moved, with a probability, to a random other client.

    Watts and Strogatz. Collective dynamics of small-world networks. Nature 1998.
    """

    neighbours: Count = 2  # on each side, before edges are moved
    probability: Annotated[float, Range(0, 1, open_low=True)] = 0.2

    def pairs(self, clients: int, seed: int) -> Iterable[Pair]:
        if 2 * self.neighbours >= clients > 1:
            raise BadValue(
                f"SmallWorld: neighbours = {self.neighbours} on each side needs more than "
                f"{2 * self.neighbours} clients, there are {clients}; take fewer, or Complete"
            )
        if clients < 2:
            return ()
        reach, chance = self.neighbours, self.probability
        pairs = _drawn_until_connected(
            clients,
            lambda n: graphs.small_world(clients, reach, chance, draw(seed, "topology", n)),
        )
        if pairs is not None:
            return pairs
        raise BadValue(
            f"SmallWorld: neighbours = {reach} left some of {clients} clients apart in each of "
            f"{DRAWS} draws; take more neighbours, or a lower probability"
        )


@dataclass(frozen=True)
class Grid(Topology):
    """Clients in rows, in the order of their names, each hears those beside, above and below."""

    rows: Count | None = None  # as nearly square as the number of clients allows

    def pairs(self, clients: int, seed: int) -> Iterable[Pair]:
        rows = _rows(type(self).__name__, clients, self.rows)
        return graphs.lattice(rows, clients // rows, wrapped=False) if clients else ()


@dataclass(frozen=True)
class Torus(Topology):
    """A grid whose opposite edges are joined, so that every client has four neighbours."""

    rows: Count | None = None  # as nearly square as the number of clients allows

    def pairs(self, clients: int, seed: int) -> Iterable[Pair]:
        rows = _rows(type(self).__name__, clients, self.rows)
        return graphs.lattice(rows, clients // rows, wrapped=True) if clients else ()


@dataclass(frozen=True)
class Exponential(Topology):
    """In a circle each client hears those 1, 2, 4, 8, … places away, on both sides.

    Ying et al. Exponential Graph is Provably Efficient for Decentralized Deep Training. NeurIPS
    2021. There messages go one way; here whoever hears somebody is heard too.
    """

    def pairs(self, clients: int, seed: int) -> Iterable[Pair]:
        steps = [2**power for power in range(max(clients - 1, 0).bit_length())]
        return graphs.circulant(range(clients), steps)


TOPOLOGIES: dict[str, type[Topology]] = {
    "star": Star,
    "complete": Complete,
    "ring": Ring,
    "random_regular": RandomRegular,
    "erdos_renyi": ErdosRenyi,
    "small_world": SmallWorld,
    "grid": Grid,
    "torus": Torus,
    "exponential": Exponential,
}
# The keys of a recipe's federation table that belong to one topology or another.
TOPOLOGY_KEYS = tuple(dict.fromkeys(f.name for kind in TOPOLOGIES.values() for f in fields(kind)))


def _rng(seed: int, attempt: int) -> torch.Generator:
    return generator(seed, "topology", attempt)


def _drawn_until_connected(clients: int, drawn: Callable[[int], list[Pair]]) -> list[Pair] | None:
    """The first of some draws that leaves nobody apart; None where there is none."""
    for attempt in range(DRAWS):
        pairs = drawn(attempt)
        if graphs.connected(clients, pairs):
            return pairs
    return None


def _rows(topology: str, clients: int, rows: int | None) -> int:
    """How many equal rows the clients stand in."""
    if rows is None:
        rows = next((n for n in range(math.isqrt(clients), 0, -1) if clients % n == 0), 1)
        if rows == 1 and clients > 3:
            raise BadValue(
                f"{topology}: {clients} clients cannot stand in equal rows; take another number "
                "of clients, or rows = 1 for a single row"
            )
    if clients % rows:
        raise BadValue(
            f"{topology}: rows = {rows} does not divide {clients} clients; take a divisor"
        )
    return rows


def _sorted(members: Sequence[NodeId]) -> list[NodeId]:
    names = sorted(members)
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise BadValue(f"clients must have different names; more than one is {', '.join(twice)}")
    if SERVER in names:
        raise BadValue(f"no client may be named {SERVER!r}: that is the server's name")
    return names
