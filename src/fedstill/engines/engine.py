"""Engine, Outcome and the gradient operators; no scheduling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedstill.core import algebra, trees
from fedstill.core.method import Method, Step
from fedstill.core.node import Addressed, Inbox, Node
from fedstill.core.records import Direction, Message, NodeId, State
from fedstill.core.release import Spending
from fedstill.core.work import Work
from fedstill.engines.checkpoint import Saved
from fedstill.engines.scoring import Scores
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Population


@dataclass(frozen=True)
class Outcome:
    """What a step left behind on one node; its message is in the form in which it travels."""

    message: Message | Addressed[Any] | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    spent: Sequence[Spending] = ()
    rejected: Mapping[NodeId, str] = field(default_factory=dict)  # senders it went on without
    absent: str | None = None  # why the node did not act
    bad: Sequence[str] | None = None  # tensors with NaN or immense numbers, if looked at
    lost: bool = False  # whether a channel lost a message
    work: Work | None = None  # where the experiment has a clock


class Act(NamedTuple):
    """A step that is to be played: on whom, and where its messages travel."""

    step: Step
    round: int
    inboxes: Mapping[NodeId, Inbox[Any]]
    toward: Direction | None = None


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

    def score(self, round: int) -> Iterator[tuple[NodeId, Scores]]:
        """The scored models one after the other, each with its metrics by test set."""

    def save(
        self, folder: Path, round: int, *, digest: str, keep: int, extra: Mapping[str, Any]
    ) -> None:
        """Make what all nodes remember after a round durable: a checkpoint in the folder.

        Checkpoints beyond the last `keep` are deleted. Whose memory lies where is the engine's
        own affair; the checkpoint lists everybody.
        """

    def load(self, folder: Path, *, digest: str | None) -> Saved | None:
        """Go on from the newest checkpoint that is whole; None where there is none."""

    def node(self, id: NodeId, round: int, step: str) -> Node[Any]:
        """The server, or a client that this engine plays itself, as a step sees it."""

    def memory(self, node: NodeId) -> State | None:
        """What a node remembers, where this engine may know it; None where it may not."""

    def spilling_to(self, folder: Path) -> AbstractContextManager[None]:
        """For a while, put memories beyond a limit into files of this folder."""


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
    # In torch 2.9 the zeros of leaves that were not used ask for gradients themselves.
    free = [grad.detach() if grad.requires_grad else grad for grad in grads]
    return trees.with_tensors(value, free), loss.detach(), trees.detach(notes)


def functional_gradient(
    function: Callable[[Any], tuple[Tensor, Any]], value: Any
) -> tuple[Any, Tensor, Any]:
    """Gradient by `torch.func`, which may stand under a vmap."""

    def of_leaves(leaves: list[Tensor]) -> tuple[Tensor, tuple[Tensor, Any]]:
        loss, notes = function(trees.with_tensors(value, leaves))
        return loss, (loss, notes)

    grads, (loss, notes) = torch.func.grad(of_leaves, has_aux=True)(trees.tensors(value))
    return trees.with_tensors(value, grads), loss, notes
