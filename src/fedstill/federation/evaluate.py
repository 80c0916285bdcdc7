"""Scores of an engine as numbers of the logbook; who is scored where is the engine's affair."""

from __future__ import annotations

from collections.abc import Iterator

from fedstill.engines.engine import Engine
from fedstill.engines.scoring import EVALUATION
from fedstill.logbook.events import Number


def evaluate(engine: Engine, round: int) -> Iterator[Number]:
    """Every metric of each scored model on the clients' test sets.

    A server's model is tested on every client's set; a client's model on every client's set
    (`cross`) or only on its own. Clients that share the very same test set share its scores;
    without `cross`, a server's score on the one set of all clients is also written once.
    """
    for holder, by_target in engine.score(round):
        for target, values in by_target.items():
            for name, value in values.items():
                yield Number(round, EVALUATION, holder, name, target, value)
