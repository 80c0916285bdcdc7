"""DFRD: a server's model is taught by the clients' networks on images of a robust generator.

Luo, Wang, Fu, Li, Lan, Gao. DFRD: Data-Free Robustness Distillation for Heterogeneous Federated
Learning. NeurIPS 2023. Equations 2 to 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import Inbox, Lazy, Model, Node, Weights, algebra, at_server
from fedstill.core.ranges import Fraction, NonNegative, Share
from fedstill.methods.finetune import SMALL, Counted, FineTuner, Tuned, by_label_counts
from fedstill.parts.image_generators import Deconvolution, Merge
from fedstill.parts.lessons import Latent, Lesson, View
from fedstill.parts.losses import Selection, diversity, row_divergences, transferability


class Memory(Tuned):
    """What the server remembers: the base's memory, the generator, its average over rounds."""

    image_generator: Weights
    average_generator: Weights


@dataclass(frozen=True)
class DFRD(FineTuner):
    """The generator's loss is fidelity + β_tran · transferability + β_div · diversity.

    The student learns from the generator and from a copy, its exponential moving average over
    rounds. Clients' logits and labels are weighed by the labels used in the round.
    """

    presets: ClassVar = {"small": SMALL}

    distil_momentum: Fraction = 0.9
    transferability_weight: NonNegative = 1.0  # β_tran
    diversity_weight: NonNegative = 1.0  # β_div
    average_decay: Share = 0.5  # λ
    average_weight: NonNegative = 0.5  # α
    merge: Merge = "mul"
    selection: Selection = "wrong_student"
    detached: bool = False  # transferability as in later code by the first author
    reuse_draws: bool = False  # one draw of noise and labels for all steps of a turn

    def server_state(self, server: Node[Any]) -> Memory:
        generator = self.generator(server.model).init(server.draw("images"))
        return Memory(self.held(server), generator, generator)

    @at_server
    async def aggregate(self, server: Node[Memory], inbox: Inbox[Counted]) -> None:
        """Aggregate as the base method does, then teach the result by the clients' networks."""
        heard = await self.aggregated(server, inbox)
        if not heard or not self.iterations:
            return
        maker, average = self.generator(server.model), server.state.average_generator
        teaching = self.teaching(server, heard, *by_label_counts(heard))

        def lessons(
            generator: Weights, some: Sequence[Latent], rng: torch.Generator
        ) -> Lazy[tuple[Lesson, ...]]:
            """Images of the generator, and of the average with noise and labels of their own."""
            pairs = [(generator, some)]
            if self.average_weight:
                others = self.latents(server, rng, teaching.frequencies, len(some))
                pairs.append((average, others))
            return Lazy(
                len(some),
                lambda step: tuple(teaching.lesson(maker, w, each[step]) for w, each in pairs),
            )

        generator, weights = await self.in_turns(server, teaching, lessons)
        average = algebra.moving_average(average, generator, self.average_decay)  # eq. 6
        server.state = server.state.taught(
            weights, image_generator=generator, average_generator=average
        )

    def generator_terms(self, view: View) -> dict[str, Tensor]:
        """The three terms of the generator's loss, equations 2 to 4."""
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
        """The generator's loss, equation 5."""
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

    def latents(
        self, server: Node[Any], rng: torch.Generator, frequencies: Tensor, steps: int
    ) -> list[Latent]:
        """Noise and labels of so many steps: a draw for each, or one for all."""
        if self.reuse_draws:
            return super().latents(server, rng, frequencies, 1) * steps
        return super().latents(server, rng, frequencies, steps)

    def generator(self, model: Model) -> Deconvolution:
        return self.made(Deconvolution, model, merge=self.merge)
