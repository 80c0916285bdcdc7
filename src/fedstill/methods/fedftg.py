"""FedFTG: the server fine-tunes the mean of clients' weights on hard generated images.

Zhang, Shen, Ding, Tao, Duan. Fine-tuning Global Model via Data-Free Knowledge Distillation for
Non-IID Federated Learning. CVPR 2022. Algorithm 1, with the losses of the released code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from fedstill.core import SGD, Adam, Inbox, Model, Node, Weights, at_server
from fedstill.core.optim import Optimizer, rated
from fedstill.core.ranges import Count, NonNegative, Positive, Range, Share
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.finetune import SMALL, FineTuner
from fedstill.methods.held_base import Counted, Tuned, by_label_counts, first_memory
from fedstill.parts.generators import ImageGenerator
from fedstill.parts.image_generators import Conditioned, Deconvolution
from fedstill.parts.lessons import Latent, Lesson, View, in_turns
from fedstill.parts.losses import diversity, row_divergences, soft_cross_entropy


class Memory(Tuned):
    """What the server remembers: the base's memory, and the generator."""

    image_generator: Weights


RELEASED_BASE = FedAvg(  # of the released code
    lr=0.1, epochs=5, batch_size=50, weight_decay=1e-3, rate_decay=0.998, clip=10.0
)


@dataclass(frozen=True)
class FedFTG(FineTuner):
    """Generator: Σ_i α_{i,y} (CE of client i - distance from client i to the student) + diversity.

    Images are hard where student and clients are far apart: by the mean absolute difference of
    logits in the `released` form, by KL at a temperature in the form that DFRD `compared` with.
    """

    presets: ClassVar = {
        "paper": {
            "base": RELEASED_BASE,
            "one_by_one": True, "distil_decay": 1e-3, "reuse_draws": True,
        },
        "cifar100": {
            "base": RELEASED_BASE, "latent": 256,
            "one_by_one": True, "distil_decay": 1e-3, "reuse_draws": True,
        },
        "dfrd": {
            "form": "compared", "generator_steps": 5, "distil_steps": 2, "generator_batch": 64,
            "generator_lr": 2e-4, "generator_width": 512, "distil_lr": 0.01, "distil_decay": 1e-4,
            "rate_decay": 1.0,
        },
        "small": SMALL,
    }  # fmt: skip

    generator_steps: Count = 1
    distil_steps: Count = 5
    generator_batch: Annotated[int, Range(2)] = 50
    generator_lr: Positive = 0.01
    generator_width: Annotated[int, Range(2)] = 128
    distil_lr: Positive = 0.1
    distil_decay: NonNegative = 0.0
    rate_decay: Share = 0.998  # factor of both learning rates per round
    discrepancy_weight: NonNegative = 1.0  # weight of the disagreement between clients and server
    diversity_weight: NonNegative = 1.0
    form: Literal["released", "compared"] = "released"  # the second uses temperature
    one_by_one: bool = False  # a generator's step is one for each client, as in the released code

    def server_state(self, server: Node[Any]) -> Memory:
        generator = self.generator(server.model).init(server.draw("images"))
        return Memory(first_memory(self.base, server), None, generator)

    @at_server
    async def aggregate(self, server: Node[Memory], inbox: Inbox[Counted]) -> None:
        """Aggregate as the base method does, then teach the result by the clients' networks."""
        heard = await self.aggregated(server, inbox)
        if heard and self.iterations:
            teaching = self.teaching(server, heard, *by_label_counts(heard))
            generator, weights = await in_turns(server, teaching)
            server.state = server.state.taught(
                weights, feedback=self.feedback, image_generator=generator
            )

    def generator_terms(self, view: View) -> dict[str, Tensor]:
        """Each client's row counts by its share of the label, as the paper has it.

        The released code takes means of shares and cross-entropies apart.
        """
        labels = view.labels.expand(view.said.shape[:2])
        losses = cross_entropy(view.said.transpose(1, 2), labels, reduction="none")
        if self.form == "released":
            apart = (view.student - view.said.detach()).abs().mean(2)  # [client, image]
            spread = diversity(view.inputs, view.images, apart_by="absolute")
        else:  # KL(student ‖ client), the student held fixed; a mean over classes too
            apart = row_divergences(view.said, view.student.detach(), temperature=self.temperature)
            apart = apart / view.student.shape[1]
            spread = diversity(view.noise, view.images, apart_by="square")
        return {
            "fidelity": (view.shares * losses).sum(0).mean(),
            "transferability": -(view.shares * apart).sum(0).mean(),
            "diversity": spread,
        }

    def generator_loss(self, view: View) -> Tensor:
        """Diversity counts once for all clients: asked one by one, a share of it in each step."""
        terms = self.generator_terms(view)
        moved = self.discrepancy_weight * terms["transferability"]
        spread = terms["diversity"] / len(view.said) if self.one_by_one else terms["diversity"]
        return terms["fidelity"] + moved + self.diversity_weight * spread

    def asking(self, some: Sequence[Latent], clients: int) -> Sequence[Latent]:
        """All clients in each step, or a step for each client on the same noise and labels."""
        if not self.one_by_one:
            return some
        device = some[0].noise.device
        each = torch.eye(clients, device=device)
        return [latent._replace(asked=client) for latent in some for client in each]

    def target(self, said: Tensor, shares: Tensor) -> Tensor:
        """[image, class], Σ_i α_{i,y} · probabilities of client i."""
        heat = 1.0 if self.form == "released" else self.temperature
        return torch.einsum("ibc,ib->bc", (said / heat).softmax(2), shares)

    def lesson_loss(self, model: Model, weights: Weights, lessons: Sequence[Lesson]) -> Tensor:
        """Cross-entropy with the clients' probabilities, a mean over images and classes.

        Up to a constant it is Σ_i α_{i,y} KL(client i ‖ student) by the number of classes.
        """
        (lesson,) = lessons
        student = model(weights, lesson.images)
        if self.form == "released":
            return soft_cross_entropy(student, lesson.target)
        return -(lesson.target * log_softmax(student / self.temperature, 1)).mean()

    def generator_optimizer(self, round: int) -> Optimizer:
        rate = self.generator_lr * self.rate_decay ** (round - 1)
        return rated(Adam(rate) if self.form == "released" else Adam(rate, (0.5, 0.999)))

    def student_optimizer(self, round: int) -> Optimizer:
        rate = self.distil_lr * self.rate_decay ** (round - 1)
        return rated(SGD(rate, self.distil_momentum, self.distil_decay))

    def generator(self, model: Model) -> ImageGenerator:
        """Its own, or DFRD's with noise and what was learnt of the label side by side."""
        if self.form == "released":
            return self.made(Conditioned, model)
        return self.made(Deconvolution, model, merge="cat")
