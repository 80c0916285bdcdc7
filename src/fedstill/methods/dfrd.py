"""DFRD: a server's model is taught by the clients' networks on images of a robust generator.

Luo, Wang, Fu, Li, Lan, Gao. DFRD: Data-Free Robustness Distillation for Heterogeneous Federated
Learning. NeurIPS 2023. Equations 2 to 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import Inbox, Lazy, Model, Node, Weights, algebra
from fedstill.core.ranges import Fraction, NonNegative, Share
from fedstill.methods.generator_tuner import GeneratorTuner
from fedstill.parts.image_generators import Deconvolution, Merge
from fedstill.parts.label_distribution import dynamic_shares, label_distribution
from fedstill.parts.lessons import Drawn, Lesson, Teaching, View
from fedstill.parts.losses import Selection, diversity, row_divergences, transferability


@dataclass(frozen=True)
class DFRD(GeneratorTuner):
    """The generator's loss is fidelity + β_tran · transferability + β_div · diversity.

    The student learns from the generator and from a copy, its exponential moving average over
    rounds. Clients' logits and labels are weighed by the labels used in the round.
    """

    distil_momentum: Fraction = 0.9
    transferability_weight: NonNegative = 1.0  # β_tran
    diversity_weight: NonNegative = 1.0  # β_div
    average_decay: Share = 0.5  # λ
    average_weight: NonNegative = 0.5  # α
    merge: Merge = "mul"
    selection: Selection = "wrong_student"
    detached: bool = False  # transferability as in later code by the first author
    reuse_draws: bool = False  # one draw of noise and labels for all steps of a turn

    @property
    def remembered(self) -> Mapping[str, Any]:
        return {"image_generator": Weights, "average_generator": Weights}

    def beginning(self, server: Node[Any]) -> dict[str, Any]:
        generator = super().beginning(server)["image_generator"]
        return {"image_generator": generator, "average_generator": generator}

    async def taught(
        self, server: Node[Any], inbox: Inbox[Any], weights: Weights, own: dict[str, Any]
    ) -> tuple[Weights, dict[str, Any]]:
        """Turns of generator and student; then the average follows (eq. 6), statistics too."""
        weights, own = await super().taught(server, inbox, weights, own)
        average = algebra.moving_average(
            own["average_generator"], own["image_generator"], self.average_decay
        )
        return weights, {**own, "average_generator": average}

    def generator_terms(self, view: View) -> dict[str, Tensor]:
        """Equations 2 to 4."""
        ensemble = view.ensemble
        return {
            "fidelity": cross_entropy(ensemble, view.labels),
            "transferability": transferability(
                view.student, ensemble, view.labels, selection=self.selection,
                temperature=self.temperature, detached=self.detached,
            ),
            "diversity": diversity(view.inputs, view.images, apart_by="square"),
        }  # fmt: skip

    def generator_loss(self, view: View) -> Tensor:
        """Equation 5."""
        terms = self.generator_terms(view)
        moved = self.transferability_weight * terms["transferability"]
        return terms["fidelity"] + moved + self.diversity_weight * terms["diversity"]

    def lesson_loss(self, model: Model, weights: Weights, batch: Sequence[Lesson]) -> Tensor:
        """Equation 7, in the usual direction of distillation: KL(ensemble ‖ student) at T."""
        losses = [
            row_divergences(
                model(weights, lesson.images), lesson.target, temperature=self.temperature
            ).mean()
            for lesson in batch
        ]
        return losses[0] + self.average_weight * sum(losses[1:])

    def lessons(
        self, server: Node[Any], rng: torch.Generator, teaching: Teaching, own: dict[str, Any],
        draws: Sequence[Drawn],
    ) -> Lazy[tuple[Lesson, ...]]:  # fmt: skip
        """Images of the generator, and of the average with noise and labels of their own."""
        now = super().lessons(server, rng, teaching, own, draws)
        if not self.average_weight:
            return now
        maker = self.generator(server.model)
        others = self.drawn(server, rng, teaching.law, len(draws))

        def make(step: int) -> tuple[Lesson, ...]:
            return (*now[step], teaching.lesson(maker, own["average_generator"], others[step]))

        return Lazy(len(draws), make)

    def drawn(
        self, server: Node[Any], rng: torch.Generator, law: Tensor, steps: int
    ) -> list[Drawn]:
        """Noise and labels of so many steps: a draw for each, or one for all."""
        if self.reuse_draws:
            return super().drawn(server, rng, law, 1) * steps
        return super().drawn(server, rng, law, steps)

    def weighed(self, counts: Tensor | None, clients: int, classes: int) -> tuple[Tensor, Tensor]:
        """Dynamic weighting and label sampling, from the labels used in this round."""
        assert counts is not None
        return dynamic_shares(counts), label_distribution(counts)

    def generator(self, model: Model) -> Deconvolution:
        return self.made(Deconvolution, model, merge=self.merge)
