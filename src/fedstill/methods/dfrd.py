"""DFRD: the server distils clients' networks on images of a robust generator, without data.

Luo, Wang, Fu, Li, Lan, Gao. DFRD: Data-Free Robustness Distillation for Heterogeneous Federated
Learning. NeurIPS 2023. Equations 2 to 7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import Inbox, Model, Node, NodeId, Weights, algebra, at_server
from fedstill.core.branches import in_branches
from fedstill.core.ranges import NonNegative, Positive, Share
from fedstill.core.records import Pictured
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.finetune import SMALL, FineTuner
from fedstill.methods.held_base import Counted, Tuned, by_label_counts, first_memory
from fedstill.parts.image_generators import Deconvolution, Merge
from fedstill.parts.label_distribution import alike
from fedstill.parts.lessons import Lesson, View, in_turns
from fedstill.parts.losses import Selection, diversity, row_divergences, transferability

SHOWN = 10  # images of each class by the average generator, in pictures


class Memory(Tuned):
    """What the server remembers: the base's memory, the generator, its average over rounds."""

    image_generator: Weights
    average_generator: Weights | None  # none before the generator was trained


@dataclass(frozen=True)
class DFRD(FineTuner):
    """The generator's loss is fidelity + β_tran · transferability + β_div · diversity.

    The student learns from the generator and from a copy, its exponential moving average over
    rounds. Clients' logits and labels are weighed by the labels used in the round.
    """

    presets: ClassVar = {
        # Of the authors' code: its defaults, on FedAvg; on parts what was taught is sent on.
        "released": {
            "base": FedAvg(round_steps=20, batch_size=64), "distil_steps": 1, "detached": True,
            "embedding_weight": 1.0, "fresh_optimizers": True,
            "counts": "held", "feedback": False,
        },
        "released_on_parts": {
            "distil_steps": 1, "detached": True, "embedding_weight": 1.0,
            "fresh_optimizers": True, "counts": "held",
        },
        # Of nine trials on held-out data, on FedRolex (docs/methods/dfrd.md).
        "best": {"generator_lr": 0.002, "distil_lr": 0.3, "distil_momentum": 0.9},
        "small": SMALL,
    }  # fmt: skip

    # β_tran
    transferability_weight: NonNegative = 1.0
    diversity_weight: NonNegative = 1.0  # β_div
    average_decay: Share = 0.5  # λ, decay of the generator's moving average
    average_weight: NonNegative = 0.5  # α, weight of the average generator's images in distillation
    merge: Merge = "mul"
    selection: Selection = "wrong_student"
    detached: bool = False  # transferability as in the released code
    embedding_weight: NonNegative = 0.0  # β_ey, weight of the penalty on long label embeddings
    embedding_reach: Positive = 1.0  # γ, largest norm of label embeddings, in √latent
    counts: Literal["used", "held", "alike"] = "used"  # to draw labels and weight clients

    def server_state(self, server: Node[Any]) -> Memory:
        generator = self.generator(server.model).init(server.draw("images"))
        return Memory(first_memory(self.base, server), None, generator, None)

    @at_server
    async def aggregate(self, server: Node[Memory], inbox: Inbox[Counted]) -> None:
        """Aggregate as the base method does, then teach the result by the clients' networks."""
        heard = await self.aggregated(server, inbox)
        if not heard or not self.iterations:
            return
        first, average = server.state.image_generator, server.state.average_generator
        teaching = self.teaching(
            server, heard, *self.weighing(heard, server.model.classes),
            resting=() if average is None or not self.average_weight else (average,),
        )  # fmt: skip
        generator, weights = await in_turns(server, teaching)
        before = first if average is None else average
        average = algebra.moving_average(before, generator, self.average_decay)  # eq. 6
        server.state = server.state.taught(
            weights,
            feedback=self.feedback,
            image_generator=generator,
            average_generator=average,
        )

    @torch.no_grad()
    def pictures(self, node: Node[Any]) -> Mapping[str, Pictured]:
        """Images of the average generator where it teaches, of the same noise as `imagined`."""
        average = node.state.average_generator if isinstance(node.state, Memory) else None
        if average is None or not self.average_weight:
            return {}
        maker, rng = self.generator(node.model), node.rng("pictures")
        return {"average": maker.imagined(average, rng, SHOWN, node.device)}

    def weighing(self, heard: Mapping[NodeId, Counted], classes: int) -> tuple[Tensor, Tensor]:
        """Clients' shares [client, class] and frequencies of labels [class]."""
        return alike(len(heard), classes) if self.counts == "alike" else by_label_counts(heard)

    def counted(self, client: Node[Any]) -> Tensor:
        if self.counts == "held":
            return client.data.counts(client.model.classes)
        return super().counted(client)

    def total(self, up: Any) -> int | None:
        return getattr(up, "examples", None) if self.counts == "held" else super().total(up)

    def generator_terms(self, view: View) -> dict[str, Tensor]:
        """The terms of the generator's loss: equations 2 to 4, and a bound of label embeddings."""
        ensemble = view.ensemble
        terms = {
            "fidelity": cross_entropy(ensemble, view.labels),
            "transferability": transferability(
                view.student, ensemble, view.labels, selection=self.selection,
                temperature=self.temperature, detached=self.detached,
            ),
            "diversity": diversity(view.inputs, view.images, apart_by="square"),
        }  # fmt: skip
        if self.embedding_weight and view.embedded is not None:
            bound = self.embedding_reach * math.sqrt(self.latent)
            lengths = torch.linalg.vector_norm(view.embedded, dim=1)
            terms["embedding"] = (lengths - bound).clamp(min=0).mean()
        return terms

    def generator_loss(self, view: View) -> Tensor:
        """The generator's loss, equation 5."""
        terms = self.generator_terms(view)
        moved = self.transferability_weight * terms["transferability"]
        loss = terms["fidelity"] + moved + self.diversity_weight * terms["diversity"]
        if "embedding" in terms:
            loss = loss + self.embedding_weight * terms["embedding"]
        return loss

    def lesson_loss(self, model: Model, weights: Weights, lessons: Sequence[Lesson]) -> Tensor:
        """Equation 7, in the usual direction of distillation: KL(ensemble ‖ student) at T."""
        # Gradients of branches meet in these, where the branches began.
        own = {name: tensor.view_as(tensor) for name, tensor in weights.items()}

        def loss(lesson: Lesson) -> Tensor:
            said = model(own, lesson.images)
            return row_divergences(said, lesson.target, temperature=self.temperature).mean()

        losses = in_branches([partial(loss, lesson) for lesson in lessons])
        return losses[0] + self.average_weight * sum(losses[1:])

    def generator(self, model: Model) -> Deconvolution:
        return self.made(Deconvolution, model, merge=self.merge)
