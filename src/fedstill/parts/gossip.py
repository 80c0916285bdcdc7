"""Gossip: means that peers reach by speaking to neighbours only; the arithmetic, no messages.

Plain gossip takes x ← W x with W = I - L / λ_max, L the graph's Laplacian: symmetric, rows sum to
one, eigenvalues from 0 to 1. FastMix (Ye, Luo, Zhou, Zhang. Multi-consensus Decentralized
Accelerated Gradient Descent. 2020) adds momentum: x_{k+1} = (1 + η) W x_k - η x_{k-1}. The mean of
all peers stays what it was in both; what is left of the differences shrinks with each step by λ₂,
the second eigenvalue of W, or with momentum by about 1 - √(1 - λ₂).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.core.errors import BadValue
from fedstill.core.records import NodeId

T = TypeVar("T")
Graph = Mapping[NodeId, Sequence[NodeId]]  # for every peer its neighbours
Edge = tuple[NodeId, NodeId]


class Mixing(NamedTuple):
    """What a peer must know of its graph; the same numbers for all who are joined."""

    edge: float  # the weight of each neighbour, 1 / λ_max(L); the rest is the peer's own
    second: float  # λ₂, the second largest eigenvalue of W

    @property
    def momentum(self) -> float:
        """η of FastMix."""
        root = math.sqrt(1 - self.second**2)
        return (1 - root) / (1 + root)


def mixing(graph: Graph, peer: NodeId) -> Mixing:
    """The weights for a peer and all whom it can reach."""
    if peer not in graph:
        raise BadValue(f"gossip: {peer} is not in the graph of {', '.join(graph) or 'nobody'}")
    members, frontier = {peer}, [peer]
    for member in frontier:  # grows while it is read
        new = [other for other in graph[member] if other not in members]
        members.update(new)
        frontier += new
    return _mixing(frozenset((one, other) for one in members for other in graph[one]))


def in_circles(graph: Graph) -> bool:
    """Whether all peers stand in circles, in which all hear one another and nobody else.

    Then each of them knows after one exchange what its whole circle holds.
    """
    seen: set[NodeId] = set()
    for peer in graph:
        circle = {peer, *graph[peer]}
        if peer not in seen and any({other, *graph[other]} != circle for other in circle):
            return False
        seen |= circle
    return True


@lru_cache(maxsize=64)
def _mixing(edges: frozenset[Edge]) -> Mixing:
    """From the eigenvalues of the Laplacian of a connected graph."""
    if not edges:  # a peer alone keeps what it has
        return Mixing(0.0, 0.0)
    place = {name: i for i, name in enumerate(sorted({one for one, _ in edges}))}
    joined = torch.zeros(len(place), len(place), dtype=torch.float64)
    for one, other in edges:
        joined[place[one], place[other]] = 1.0
    values = torch.linalg.eigvalsh(joined.sum(1).diag() - joined).tolist()
    return Mixing(1 / values[-1], min(max(1 - values[1] / values[-1], 0.0), 1.0))


def plain(own: T, heard: Sequence[T], weights: Mixing) -> T:
    """One step of plain gossip; the weight of a neighbour not heard goes to the peer's own value.

    Where two neighbours miss each other alike, the mean of all is kept even then.
    """

    def mixed(mine: Tensor, *theirs: Tensor) -> Tensor:
        out = mine
        for other in theirs:
            out = out + weights.edge * (other - mine)
        return out

    return trees.map_tensors(mixed, own, *heard)


def fast(own: T, earlier: T, heard: Sequence[T], weights: Mixing) -> T:
    """One step of FastMix; `earlier` is the own value a step ago, at first the own value itself."""
    momentum = weights.momentum
    return trees.map_tensors(
        lambda new, old: (1 + momentum) * new - momentum * old, plain(own, heard, weights), earlier
    )
