"""Lessons: latents by frequencies, views and targets by hand, networks equal by value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstill.core.loop import Descent
from fedstill.core.model import Model
from fedstill.core.node import Node
from fedstill.core.optim import Adam
from fedstill.core.records import Weights
from fedstill.core.seeds import generator
from fedstill.models import ConvNet
from fedstill.parts import augment
from fedstill.parts.image_generators import Deconvolution
from fedstill.parts.lessons import (
    MOVES,
    Latent,
    Lesson,
    Losses,
    Networks,
    Teaching,
    Turns,
    View,
    latents,
)
from fedstill.parts.teachers import Ensemble

MODEL = ConvNet((1, 8, 8), 3, depth=1, width=2, norm="batch")
MAKER = Deconvolution((1, 8, 8), 3, latent=4, width=4)
WEIGHTS = [MODEL.init(place) for place in range(2)]
STUDENT, IMAGINED = MODEL.init(2), MAKER.init(3)
SHARES = torch.tensor([[1.0, 0.0, 0.25], [0.0, 1.0, 0.75]])
FREQUENCIES = torch.tensor([0.5, 0.0, 0.5])


@dataclass(frozen=True)
class Plain:
    """A loss and a target that are easily done by hand."""

    uses_statistics: ClassVar[bool] = False

    factor: float = 1.0

    def generator_loss(self, view: View) -> Tensor:
        return self.factor * view.images.square().mean()

    def target(self, said: Tensor, shares: Tensor) -> Tensor:
        return torch.einsum("ibc,ib->bc", said, shares)

    def lesson_loss(self, model: Model, weights: Weights, lessons: Sequence[Lesson]) -> Tensor:
        return sum((model(weights, each.images) - each.target).square().mean() for each in lessons)


class Watching(Plain):
    """The same, asking for statistics."""

    uses_statistics: ClassVar[bool] = True


def teaching(tuner: Plain) -> Teaching:
    ensemble = Ensemble.of([MODEL, MODEL])
    networks = Networks(tuner, MAKER, MODEL, ensemble)
    return Teaching(Turns(1, 1, 1, 6), networks, ensemble.stacked(WEIGHTS), SHARES, FREQUENCIES)


def batch() -> Latent:
    return latents(MAKER, FREQUENCIES, generator(0, "batch"), steps=1, size=6)[0]


def seen(tuner: Plain, batch: Latent) -> View:
    ours = teaching(tuner)
    return ours.networks.view(MAKER, IMAGINED, batch, **ours.given(student=STUDENT))


def test_labels_are_drawn_by_their_frequencies_and_every_step_has_its_own() -> None:
    draws = latents(MAKER, FREQUENCIES, generator(0), steps=3, size=50)
    labels = torch.stack([draw.labels for draw in draws])
    assert labels.shape == (3, 50) and set(labels.flatten().tolist()) == {0, 2}
    assert [draw.noise.shape for draw in draws] == [(50, 4)] * 3
    assert not torch.equal(draws[0].noise, draws[1].noise)
    assert not torch.equal(draws[0].labels, draws[1].labels)


def test_a_view_is_what_everybody_says_of_the_images() -> None:
    here = batch()
    view = seen(Plain(), here)
    images = MAKER(IMAGINED, here.noise, here.labels)
    assert torch.equal(view.images, images)
    for place, weights in enumerate(WEIGHTS):
        assert torch.allclose(view.said[place], MODEL.evaluating(weights, images), atol=1e-6)
    assert torch.allclose(view.student, MODEL.evaluating(STUDENT, images), atol=1e-6)
    assert torch.equal(view.shares, SHARES[:, here.labels])


def test_networks_see_moved_images_where_moves_were_drawn() -> None:
    moves = augment.draw(
        generator(0, "view"), MOVES, groups=1, image=(8, 8), mode="multi", per_image=6
    )
    here = batch()._replace(moves=moves)
    view = seen(Plain(), here)
    moved = augment.apply_each(view.images, moves, only=MOVES)
    assert not torch.equal(moved, view.images)
    assert torch.allclose(view.student, MODEL.evaluating(STUDENT, moved), atol=1e-6)


def test_gaps_are_looked_at_only_where_they_are_asked_for() -> None:
    assert seen(Plain(), batch()).gaps is None
    gaps = seen(Watching(), batch()).gaps
    assert gaps is not None and gaps.shape == (2,)


def test_a_lesson_weighs_logits_by_label_and_has_no_gradient() -> None:
    here = batch()
    moving = {name: tensor.clone().requires_grad_() for name, tensor in IMAGINED.items()}
    lesson = teaching(Plain()).lesson(moving, here)
    assert not lesson.images.requires_grad and not lesson.target.requires_grad
    assert torch.equal(lesson.images, MAKER.evaluating(IMAGINED, here.noise, here.labels))
    for image, label in enumerate(here.labels.tolist()):
        by_hand = sum(
            SHARES[place, label] * MODEL.evaluating(weights, lesson.images)[image]
            for place, weights in enumerate(WEIGHTS)
        )
        assert torch.allclose(lesson.target[image], torch.as_tensor(by_hand), atol=1e-6)


def test_batch_norms_of_a_generator_rest_while_the_student_learns() -> None:
    maker = Deconvolution((1, 16, 16), 3, latent=4, width=4)  # with a norm between two layers
    model = ConvNet((1, 16, 16), 3, depth=1, width=2)
    networks = Networks(Plain(), maker, model, Ensemble.of([model]))
    weights = {**maker.init(0), "norm1.running_var": torch.tensor([4.0, 0.25])}
    latent = latents(maker, FREQUENCIES, generator(0, "batch"), steps=1, size=6)[0]
    rested = maker.evaluating(weights, latent.noise, latent.labels)
    assert not torch.allclose(rested, maker.train()(weights, latent.noise, latent.labels))
    assert torch.equal(networks.images_of(weights, latent), rested)
    stack = Ensemble.of([model]).stacked([model.init(1)])
    lesson = networks.lesson_of(weights, latent, stack, SHARES[:1])
    assert torch.equal(lesson.images, rested)


def test_losses_are_means_over_the_loops_of_a_step() -> None:
    node: Node[None] = Node("server", 1, None, model=MODEL)
    losses = Losses(node)
    losses.keep("distil_loss")  # a rehearsal has no loss
    for value in (1.0, 2.0, 6.0):
        node.log(loss=value)
        losses.keep("distil_loss")
    losses.write()
    assert float(node.numbers["distil_loss"]) == 3.0


def test_the_generators_loss_is_the_same_objective_for_equal_methods_of_equal_networks() -> None:
    def inventing(factor: float) -> Descent:
        return Descent(teaching(Plain(factor)).networks.invention, MAKER, Adam(0.1))

    assert inventing(1.0) == inventing(1.0)
    assert hash(inventing(1.0)) == hash(inventing(1.0))
    assert inventing(1.0) != inventing(2.0)
