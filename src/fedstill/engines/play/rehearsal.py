"""The engine that plays every step and skips every loop: exact messages, no training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from fedstill.core.data import Data
from fedstill.core.loop import Loop
from fedstill.core.model import Model
from fedstill.core.node import Node
from fedstill.core.records import NodeId, Weights
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.spending import Purse
from fedstill.federation.population import Party, Population


class Rehearsal(InProcess):
    """A loop's result has the shape of its start, so messages have their true sizes.

    A step may look at its network outside of loops too; networks then answer at once, in the true
    shapes, with made-up numbers.
    """

    name = "rehearsal"

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.population: Population = _Quick(self.population)

    def _purse(self) -> Purse | None:
        """Everything is granted, and what was asked is kept."""
        privacy = self.experiment.privacy
        if privacy is None:
            return None
        return Purse(privacy, self.states, self._step_names(), unlimited=True)

    def _run(self, loop: Loop[Any], node: Node[Any]) -> Any:
        return loop.carry


class _Quick(Population):
    """The same parties, whose networks are quick."""

    def __init__(self, true: Population):
        self.true = true

    @property
    def clients(self) -> Sequence[NodeId]:
        return self.true.clients

    @cached_property
    def models(self) -> Mapping[NodeId, Model]:
        true = self.true.models
        distinct = {id(model): model for model in true.values()}  # many may share one
        made = {key: quick(model) for key, model in distinct.items()}
        return {node: made[id(model)] for node, model in true.items()}

    @property
    def public(self) -> Data:
        return self.true.public

    @property
    def common_test(self) -> Data | None:
        return self.true.common_test

    def party(self, node: NodeId) -> Party:
        party = self.true.party(node)
        return replace(party, model=quick(party.model))

    def on(self, device: torch.device | str) -> Population:
        return _Quick(self.true.on(device))


def quick(model: Model) -> Model:
    """The same network, whose blocks answer at once: outputs of the true shapes, made-up numbers.

    A number depends on its example and on all weights, so gradients have their shapes too.
    """
    kind: Any = type(model)
    return _quick_kind(kind)(**{f.name: getattr(model, f.name) for f in fields(model) if f.init})


@cache
def _quick_kind(kind: Any) -> type[Model]:
    """One for each kind of networks, so that equal networks stay equal."""

    def stages(self: Model, weights: Weights, x: Tensor) -> list[Tensor]:
        with torch.no_grad():  # one example tells the shapes
            true = kind.stages(self.evaluating if self.training else self, weights, x[:1])
        level = x.flatten(1).mean(1) + sum(w.float().mean() for w in weights.values())
        return [level.view(-1, *[1] * (o.dim() - 1)).expand(-1, *o.shape[1:]) for o in true]

    as_usual = ("coarse_stages", "features", "coarse_features", "both", "logits", "__call__")
    return type(kind.__name__, (kind,), {
        "stages": stages, **{name: getattr(Model, name) for name in as_usual}
    })  # fmt: skip
