"""Engine, Outcome and the gradient operators; no scheduling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fedstill.core import algebra, trees
from fedstill.core.method import Method, Step
from fedstill.core.node import Addressed, Inbox, Node
from fedstill.core.records import Direction, Message, NodeId, State
from fedstill.engines.memories import Memories
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Population

Scores = Mapping[str, Mapping[str, float]]  # by whose test set it is, metrics by name
Question = Callable[[Node[Any]], Scores]


@dataclass(frozen=True)
class Outcome:
    """What a step left behind on one node; its message is in the form in which it travels."""

    message: Message | Addressed[Any] | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    spent: Sequence[Any] = ()
    rejected: Mapping[NodeId, str] = field(default_factory=dict)  # senders it went on without
    absent: str | None = None  # why the node did not act
    bad: Sequence[str] | None = None  # tensors of the message with NaN or infinity, if looked at
    lost: bool = False  # whether a channel lost a message


class Engine(Protocol):
    """Carries out one step of an experiment on many nodes.

    In `notes` it says what it had to do otherwise than asked; who plays it takes them away.
    """

    name: str
    notes: list[str]

    @property
    def experiment(self) -> Experiment: ...

    @property
    def population(self) -> Population:
        """The experiment's, where this engine computes."""

    def play(
        self,
        step: Step,
        round: int,
        inboxes: Mapping[NodeId, Inbox[Any]],
        toward: Direction | None = None,
    ) -> dict[NodeId, Outcome]:
        """One step on every node that has an inbox; `toward` is where its messages travel."""

    def node(self, id: NodeId, round: int, step: str) -> Node[Any]: ...

    def look(
        self, ids: Sequence[NodeId], round: int, step: str, question: Question
    ) -> Iterator[tuple[NodeId, Scores]]: ...

    @property
    def states(self) -> Memories: ...

    def restore(self, states: Mapping[NodeId, State | None]) -> None: ...


Absences = Callable[[Method, str, int, NodeId], str | None]


def autograd_gradient(
    function: Callable[[Any], tuple[Tensor, Any]], value: Any
) -> tuple[Any, Tensor, Any]:
    """Gradient by ordinary autograd; second derivatives inside `function` are its own affair."""
    leaves = [tensor.detach().requires_grad_() for tensor in trees.tensors(value)]
    with torch.enable_grad():
        loss, notes = function(trees.with_tensors(value, leaves))
        if not loss.requires_grad:  # it depends on no leaf; torch.func gives zeros here
            return algebra.zeros(value), loss, trees.detach(notes)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return trees.with_tensors(value, grads), loss.detach(), trees.detach(notes)


def functional_gradient(
    function: Callable[[Any], tuple[Tensor, Any]], value: Any
) -> tuple[Any, Tensor, Any]:
    """Gradient by `torch.func`, which may stand under a vmap."""

    def of_leaves(leaves: list[Tensor]) -> tuple[Tensor, tuple[Tensor, Any]]:
        loss, notes = function(trees.with_tensors(value, leaves))
        return loss, (loss, notes)

    grads, (loss, notes) = torch.func.grad(of_leaves, has_aux=True)(trees.tensors(value))
    return trees.with_tensors(value, grads), loss, notes
