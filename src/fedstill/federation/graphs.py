"""Graphs as pairs of places 0, 1, …; no names, no clients.

Lattices and small worlds are made by networkx, which is imported where one is asked for. The other
random graphs are drawn here, from a generator: recipes keep their graphs whatever is installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Generator

Pair = tuple[int, int]  # two places, the smaller first


def circle(order: Sequence[int], reach: int) -> list[Pair]:
    """Everyone joined to the next `reach` in a circle."""
    steps = range(1, reach + 1)
    return circulant(order, steps)


def circulant(order: Sequence[int], steps: Iterable[int]) -> list[Pair]:
    """Everyone in a circle joined to those so many steps ahead, and so to those behind."""
    count = len(order)
    pairs = {pair(order[i], order[(i + step) % count]) for step in steps for i in range(count)}
    return sorted(pairs)


def lattice(rows: int, columns: int, *, wrapped: bool) -> list[Pair]:
    """Places row by row, each joined to those beside, above and below; wrapped: without edges."""
    import networkx

    grid = networkx.grid_2d_graph(rows, columns, periodic=wrapped)
    places = (
        (row * columns + column, down * columns + right)
        for (row, column), (down, right) in grid.edges
    )
    return sorted({pair(one, other) for one, other in places if one != other})


def small_world(count: int, reach: int, probability: float, number: int) -> list[Pair]:
    """A circle in which each join is moved to a random place with a probability."""
    import networkx

    graph = networkx.watts_strogatz_graph(count, 2 * reach, probability, seed=number)
    return sorted(pair(one, other) for one, other in graph.edges)


def erdos_renyi(count: int, probability: float, rng: Generator) -> list[Pair]:
    """Each two places joined with one probability."""
    pairs: list[Pair] = []
    for one in range(count - 1):
        drawn = torch.rand(count - one - 1, generator=rng, dtype=torch.float64)
        joined = torch.nonzero(drawn < probability).flatten() + one + 1
        pairs += ((one, other) for other in joined.tolist())
    return pairs


def random_regular(count: int, degree: int, rng: Generator) -> list[Pair]:
    """A random graph of one degree, by switching the ends of random pairs of edges.

    Pairing loose ends until no edge is double takes exponentially long in the squared degree;
    switching starts from a graph of the right degree and keeps it.
    """
    if degree == 2:  # connected with degree two is one circle, so draw its order
        return circle(torch.randperm(count, generator=rng).tolist(), 1)
    edges = circle(range(count), degree // 2)
    if degree % 2:  # then the number of places is even
        edges += [(i, i + count // 2) for i in range(count // 2)]
    present = set(edges)
    switches = 20 * len(edges)  # far past the point at which degrees up to the hundreds look mixed
    chosen = torch.randint(len(edges), (switches, 2), generator=rng).tolist()
    crossed = torch.randint(2, (switches,), generator=rng).tolist()
    for (first, second), cross in zip(chosen, crossed, strict=True):
        (a, b), (c, d) = edges[first], edges[second]
        if cross:
            c, d = d, c
        new = pair(a, c), pair(b, d)
        if a == c or b == d or new[0] in present or new[1] in present or new[0] == new[1]:
            continue
        present -= {edges[first], edges[second]}
        present |= set(new)
        edges[first], edges[second] = new
    return sorted(edges)


def connected(count: int, pairs: Iterable[Pair]) -> bool:
    """Whether there is a way from everyone to everyone."""
    near: list[list[int]] = [[] for _ in range(count)]
    for one, other in pairs:  # a library's graph takes ten times the memory of these lists
        near[one].append(other)
        near[other].append(one)
    reached, frontier = {0}, [0]
    while frontier and count:
        new = {other for one in frontier for other in near[one]} - reached
        reached |= new
        frontier = list(new)
    return len(reached) >= count


def pair(one: int, other: int) -> Pair:
    """Two places, the smaller first."""
    return (one, other) if one < other else (other, one)
