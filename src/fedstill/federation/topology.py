"""Who hears whom; no payloads.

A topology decides between which clients messages pass. The server, where a method has one, hears
every client and is heard by every client that is awake, whatever the topology.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Generator, Tensor

from fedstill.core import ranges
from fedstill.core.errors import BadValue, unknown
from fedstill.core.node import SERVER
from fedstill.core.ranges import Count, Range
from fedstill.core.records import NodeId
from fedstill.core.seeds import generator

Edges = Mapping[NodeId, tuple[NodeId, ...]]
Pair = tuple[int, int]  # two clients by their places in the sorted list, the smaller first

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
        made = torch.zeros(len(place), len(place))
        for member, others in self.neighbours.items():
            for other in others:
                made[place[member], place[other]] = 1.0
        return made


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
        return _circle(list(range(clients)), self.neighbours)


@dataclass(frozen=True)
class RandomRegular(Topology):
    """A random connected graph in which every client has the same number of neighbours."""

    degree: Count = 4

    def pairs(self, clients: int, seed: int) -> Iterable[Pair]:
        self._check(clients)
        for attempt in range(DRAWS):
            rng = generator(seed, "topology", attempt)
            made = _random_regular(clients, self.degree, rng)
            if _connected(clients, made):
                return made
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
        for attempt in range(DRAWS):
            rng = generator(seed, "topology", attempt)
            made: list[Pair] = []
            for one in range(clients - 1):
                drawn = torch.rand(clients - one - 1, generator=rng, dtype=torch.float64)
                joined = torch.nonzero(drawn < self.probability).flatten() + one + 1
                made += ((one, other) for other in joined.tolist())
            if _connected(clients, made):
                return made
        enough = min(1.0, 2 * math.log(clients) / clients)
        raise BadValue(
            f"ErdosRenyi: probability = {self.probability} left some of {clients} clients apart in "
            f"each of {DRAWS} draws; take about {enough:.2g} or more"
        )


TOPOLOGIES: dict[str, type[Topology]] = {
    "star": Star,
    "complete": Complete,
    "ring": Ring,
    "random_regular": RandomRegular,
    "erdos_renyi": ErdosRenyi,
}


def _sorted(members: Sequence[NodeId]) -> list[NodeId]:
    names = sorted(members)
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise BadValue(f"clients must have different names; more than one is {', '.join(twice)}")
    if SERVER in names:
        raise BadValue(f"no client may be named {SERVER!r}: that is the server's name")
    return names


def _pair(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)


def _circle(order: Sequence[int], reach: int) -> list[Pair]:
    """Everyone joined to the next `reach` in a circle."""
    count = len(order)
    made = {
        _pair(order[i], order[(i + step) % count])
        for i in range(count)
        for step in range(1, reach + 1)
    }
    return sorted(made)


def _random_regular(clients: int, degree: int, rng: Generator) -> list[Pair]:
    """A random graph of one degree, by switching the ends of random pairs of edges.

    Pairing loose ends until no edge is double takes exponentially long in the squared degree;
    switching starts from a graph of the right degree and keeps it.
    """
    if degree == 2:  # connected with degree two is one circle, so draw its order
        return _circle(torch.randperm(clients, generator=rng).tolist(), 1)
    edges = _circle(range(clients), degree // 2)
    if degree % 2:  # then the number of clients is even
        edges += [(i, i + clients // 2) for i in range(clients // 2)]
    present = set(edges)
    switches = 20 * len(edges)  # far past the point at which degrees up to the hundreds look mixed
    chosen = torch.randint(len(edges), (switches, 2), generator=rng).tolist()
    crossed = torch.randint(2, (switches,), generator=rng).tolist()
    for (first, second), cross in zip(chosen, crossed, strict=True):
        (a, b), (c, d) = edges[first], edges[second]
        if cross:
            c, d = d, c
        new = _pair(a, c), _pair(b, d)
        if a == c or b == d or new[0] in present or new[1] in present or new[0] == new[1]:
            continue
        present -= {edges[first], edges[second]}
        present |= set(new)
        edges[first], edges[second] = new
    return sorted(edges)


def _connected(clients: int, pairs: Iterable[Pair]) -> bool:
    near: list[list[int]] = [[] for _ in range(clients)]
    for one, other in pairs:
        near[one].append(other)
        near[other].append(one)
    reached, frontier = {0}, [0]
    while frontier and clients:
        new = {other for one in frontier for other in near[one]} - reached
        reached |= new
        frontier = list(new)
    return len(reached) >= clients
