"""Whose models are scored on whose test sets, and by what; no training, no transport.

A model of the server goes to where the tests are as what `Method.scored_state` says, and nothing
else of the server's memory: `predict` is given that, in every engine. A client's model is scored
where the client is. That it is scored on others' tests too (crosswise) is a simulator's extra.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedstill.core.data import Data
from fedstill.core.errors import FedstillError, StepError
from fedstill.core.method import Method, Place
from fedstill.core.node import SERVER, Node
from fedstill.core.records import NodeId
from fedstill.engines.memories import Memories
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Population
from fedstill.metrics import Metric, chosen, measured

EVALUATION = "evaluate"  # the step that a node seems to be in while its model is scored
EVERYONE = "everyone"  # stands for all clients where a score is theirs alike

Scores = Mapping[NodeId, Mapping[str, float]]  # by whose test set it is, metrics by name


def holders(method: Method, acted: Memories, clients: Sequence[NodeId]) -> Sequence[NodeId]:
    """Whose models are scored: the server's, or those of the clients that have acted, or both."""
    if method.scored is Place.CLIENTS:
        return [c for c in clients if c in acted]
    if not method.scores_own:
        return [SERVER]
    return [SERVER, *(c for c in clients if not acted.is_blank(c))]


def tests_for(
    experiment: Experiment, population: Population, holder: NodeId
) -> Iterator[tuple[NodeId, Data]]:
    """The test sets for somebody's model, each with the name of its client."""
    own_only = not experiment.scores_crosswise
    if holder == SERVER:
        common = population.common_test if own_only else None
        if common is not None:
            yield EVERYONE, common
            return
    elif own_only or experiment.method.scores_own:
        yield holder, population.party(holder).test
        return
    for target in population.clients:
        yield target, population.party(target).test


def scores(
    experiment: Experiment, node: Node[Any], tests: Mapping[NodeId, Data]
) -> dict[NodeId, dict[str, float]]:
    """Metrics of a node's model on some test sets; one that several share is passed once.

    Who has no test examples is passed over.
    """
    held = {target: test for target, test in tests.items() if len(test)}
    different = {id(test): test for test in held.values()}
    found = score(experiment.method, node, list(different.values()), chosen(experiment.metrics))
    known = dict(zip(different, found, strict=True))
    return {target: known[id(test)] for target, test in held.items()}


def score(
    method: Method, node: Node[Any], tests: Sequence[Data], metrics: Mapping[str, Metric]
) -> list[dict[str, float]]:
    """The metrics of a node's model on each test set."""

    def predicted(x: Tensor) -> Tensor:
        try:
            logits = method.predict(node, x)
            _check(logits, len(x))
            return logits
        except (FedstillError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            title = type(method).__name__
            raise StepError(title, "predict", node.id, node.round, error) from error

    return measured(predicted, tests, metrics, apart=not node.model.by_example)


def _check(logits: Any, examples: int) -> None:
    if isinstance(logits, Tensor) and logits.dim() == 2 and len(logits) == examples:
        return
    came = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    raise ValueError(f"it gave {came} for {examples} examples; logits are [example, class]")
