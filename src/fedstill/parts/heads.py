"""Layers between the features and the head of any network; no architecture of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch.nn.functional as F
from torch import Generator, Tensor

from fedstill.core.model import Initials, Model, linear_initial
from fedstill.core.records import Weights
from fedstill.core.seeds import generator


@dataclass(frozen=True)
class Projected(Model):
    """A network whose features pass through linear layers, with ReLU between them.

    What comes out of the last layer are the features; a head of its own makes logits of them.
    The layers before start from the very weights that they have without the projection.
    """

    base: Model
    widths: tuple[int, ...]
    pool: int = 0  # features first become so many means of neighbours; 0: they stay

    def initial(self) -> Initials:
        gone = self.base.head_names
        initial = {n: law for n, law in self.base.initial().items() if n not in gone}
        inputs = self.pool or self.base.feature_width
        for layer, outputs in enumerate(self.widths):
            initial |= linear_initial(f"projection{layer}", inputs, outputs)
            inputs = outputs
        return initial | linear_initial(self._head, inputs, self.classes)

    def init(self, seed: int) -> Weights:
        rng, initial = generator(seed), self.initial()
        own = self.base.init(seed) if _of_its_own(initial) else {}
        return {
            name: own[name] if law.kind == "own" else law.sample(rng).to(self.device)
            for name, law in initial.items()
        }

    def samples(self, rng: Generator, count: int) -> list[Weights]:
        initial = self.initial()
        drawn = {n: law.sample(rng, (count,)) for n, law in initial.items() if law.kind != "own"}
        own = self.base.samples(rng, count) if _of_its_own(initial) else [{}] * count
        return [
            {name: drawn[name][i] if name in drawn else own[i][name] for name in initial}
            for i in range(count)
        ]

    @property
    def _head(self) -> str:
        """The head's layer: it stands where the head of the network without projection stood."""
        return self.base.head_names[0].rpartition(".")[0] or "head"

    @property
    def head_names(self) -> tuple[str, str | None]:
        return f"{self._head}.weight", f"{self._head}.bias"

    @property
    def norm_names(self) -> tuple[str, ...]:
        return self.base.norm_names

    @property
    def by_example(self) -> bool:
        return self.base.by_example

    @property
    def twice(self) -> bool:
        return self.base.twice

    @property
    def smooth(self) -> bool:
        return self.base.smooth

    @property
    def tokens(self) -> bool:
        return self.base.tokens

    @property
    def stackable(self) -> bool:
        return self.base.stackable

    @property
    def stackable_at_rest(self) -> bool:
        return self.base.stackable_at_rest

    @property
    def draws(self) -> bool:
        return self.base.draws

    def drawing(self, seed: Tensor) -> Self:
        return replace(self, base=self.base.drawing(seed))

    def stages(self, weights: Weights, x: Tensor) -> list[Tensor]:
        maps = replace(self.base, training=self.training, notes=self.notes).stages(weights, x)
        x = maps[-1].flatten(1)
        if self.pool:
            x = F.adaptive_avg_pool1d(x.unsqueeze(1), self.pool).squeeze(1)
        for layer in range(len(self.widths)):
            x = F.relu(x) if layer else x
            name = f"projection{layer}"
            x = F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
        return [*maps, x]


def pooled(model: Model, width: int) -> Projected:
    """The network with its features averaged to a width before its head; nothing is learnt."""
    return replace(projected(model), pool=width)


def projected(model: Model, *widths: int) -> Projected:
    """The network with a linear layer of each width before its head."""
    return Projected(model.shape, model.classes, model.evaluating, widths,
                     training=model.training, device=model.device, notes=model.notes)  # fmt: skip


def _of_its_own(initial: Initials) -> bool:
    """Whether some tensors start as their network itself draws them."""
    return any(law.kind == "own" for law in initial.values())


def common_width(models: Iterable[Model], otherwise: int) -> int:
    """The width of everybody's features, or another one where they differ."""
    distinct = {id(model): model for model in models}  # thousands of clients may share a few
    widths = {model.feature_width for model in set(distinct.values())}
    return widths.pop() if len(widths) == 1 else otherwise


Joining = Literal["linear", "pooled"]  # how features of other widths come to a common one


def with_features(model: Model, width: int, joining: Joining = "linear") -> Model:
    """The network itself where its features have this width, else brought to it."""
    if model.feature_width == width:
        return model
    return projected(model, width) if joining == "linear" else pooled(model, width)
