"""Own, cross and global scores; no training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fedstill.core.data import Batch, Data
from fedstill.core.method import Method, Place
from fedstill.core.node import SERVER, Node
from fedstill.core.records import NodeId
from fedstill.engines.engine import Engine
from fedstill.federation.experiment import Experiment
from fedstill.logbook.events import Number

CHUNK = 1024
EVERYONE = "everyone"  # stands for all clients where a score is theirs alike


def evaluate(experiment: Experiment, engine: Engine, round: int) -> Iterator[Number]:
    """Accuracy and loss of each scored model on the clients' test sets.

    A server's model is tested on every client's set; a client's model on every client's set
    (`cross`) or only on its own. Clients that share the very same test set share its scores, and
    small sets go through a model together; without `cross`, a server's score on the one set of all
    clients is also written once.
    """
    scored = holders(experiment.method, engine, experiment.population.clients)
    for holder, found in engine.look(scored, round, "evaluate", partial(scores, experiment)):
        for target, (accuracy, loss) in found.items():
            yield Number(round, "evaluate", holder, "accuracy", target, accuracy)
            yield Number(round, "evaluate", holder, "loss", target, loss)


def scores(experiment: Experiment, node: Node[Any]) -> dict[NodeId, tuple[float, float]]:
    """Accuracy and loss of one model by the test set it is scored on."""
    tests = {target: test for target, test in _tests(experiment, node.id) if len(test)}
    different = {id(test): test for test in tests.values()}
    found = score(experiment.method, node, list(different.values()))
    known = dict(zip(different, found, strict=True))
    return {target: known[id(test)] for target, test in tests.items()}


def holders(method: Method, engine: Engine, clients: Sequence[NodeId]) -> Sequence[NodeId]:
    """Whose models are scored: the server's, or those of the clients that have acted, or both."""
    acted = engine.states
    if method.scored is Place.CLIENTS:
        return [c for c in clients if c in acted]
    if not method.scores_own:
        return [SERVER]
    return [SERVER, *(c for c in clients if not acted.is_blank(c))]


def _tests(experiment: Experiment, holder: NodeId) -> Iterator[tuple[NodeId, Data]]:
    """The test sets for somebody's model, each with the name of its client."""
    people, own_only = experiment.population, experiment.scores == "own"
    if holder == SERVER:
        common = people.common_test if own_only else None
        if common is not None:
            yield EVERYONE, common
            return
    elif own_only or experiment.method.scores_own:
        yield holder, people.party(holder).test
        return
    for target in people.clients:
        yield target, people.party(target).test


@torch.no_grad()
def score(method: Method, node: Node[object], tests: Sequence[Data]) -> list[tuple[float, float]]:
    """Share of right answers and mean cross-entropy on each set; the host waits once for all."""
    if not tests:
        return []
    found = []
    for x, y in _chunks(tests, apart=not node.model.by_example):
        logits = method.predict(node, x)
        right, loss = logits.argmax(1) == y, F.cross_entropy(logits, y, reduction="none")
        found.append(torch.stack([right.double(), loss.double()]))
    sets = torch.split(torch.cat(found, 1), [len(test) for test in tests], 1)
    return [(accuracy, loss) for accuracy, loss in torch.stack([s.mean(1) for s in sets]).tolist()]


def _chunks(tests: Sequence[Data], apart: bool) -> Iterator[Batch]:
    """Every example in order, some at a time; small sets together, unless they stay apart."""
    held: list[Batch] = []
    room = CHUNK
    for test in tests:
        for piece in test.chunks(CHUNK):
            if held and (apart or len(piece.y) > room):
                yield _joined(held)
                held, room = [], CHUNK
            held.append(piece)
            room -= len(piece.y)
    yield _joined(held)


def _joined(pieces: Sequence[Batch]) -> Batch:
    if len(pieces) == 1:
        return pieces[0]
    x, y = (torch.cat(column) for column in zip(*pieces, strict=True))
    return Batch(x, y)
