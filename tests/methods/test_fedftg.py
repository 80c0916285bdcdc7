"""FedFTG: its losses by hand, its rates, and that it fine-tunes FedAvg."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedstill.core import Method
from fedstill.core.node import SERVER
from fedstill.engines.play.in_process import InProcess
from fedstill.methods.fedftg import FedFTG
from fedstill.methods.scaffold import Scaffold
from fedstill.parts.image_generators import Conditioned, Deconvolution
from fedstill.parts.lessons import Latent, Lesson, View
from fedstill.parts.losses import diversity
from methods.tuned import BASE, FAST, LITTLE, same
from worlds import pictures, played

RNG = torch.Generator().manual_seed(0)
SAID, STUDENT = torch.randn(2, 4, 3, generator=RNG), torch.randn(4, 3, generator=RNG)
LABELS = torch.tensor([0, 2, 1, 0])
SHARES = torch.tensor([[0.25, 1.0, 0.0, 0.25], [0.75, 0.0, 1.0, 0.75]])
IMAGES, NOISE = torch.randn(4, 1, 2, 2, generator=RNG), torch.randn(4, 5, generator=RNG)
MERGED = torch.cat([NOISE, torch.randn(4, 2, generator=RNG)], 1)
VIEW = View(NOISE, IMAGES, LABELS, SAID, STUDENT, SHARES, None, NOISE, None)


@pytest.mark.parametrize("base", [BASE, Scaffold(**FAST)], ids=["FedAvg", "Scaffold"])
def test_without_iterations_it_is_its_base(base: Method) -> None:
    ours, _ = played(FedFTG(base=base, iterations=0), pictures(), 3)
    theirs, _ = played(base, pictures(), 3)
    assert same(ours.states[SERVER].weights, theirs.states[SERVER].weights)


def test_every_row_counts_by_its_clients_share_of_the_label() -> None:
    terms = FedFTG().generator_terms(VIEW)
    told = apart = 0.0
    for client in range(2):
        for row in range(4):
            share = float(SHARES[client, row])
            told += share * float(cross_entropy(SAID[client, row], LABELS[row])) / 4
            apart += share * float((STUDENT[row] - SAID[client, row]).abs().mean()) / 4
    assert float(terms["fidelity"]) == pytest.approx(told)
    assert float(terms["transferability"]) == pytest.approx(-apart)
    assert torch.equal(terms["diversity"], diversity(NOISE, IMAGES))


def test_the_compared_form_takes_the_divergence_to_each_client_at_the_temperature() -> None:
    # As DFRD's code: KL(student ‖ client), a mean over images and classes, the student fixed.
    method = FedFTG(form="compared", temperature=3.0)
    by_hand = 0.0
    for client in range(2):
        p, q = (STUDENT / 3).softmax(1), (SAID[client] / 3).softmax(1)
        by_hand += float((SHARES[client] * (p * (p / q).log()).mean(1)).mean())
    assert float(method.generator_terms(VIEW)["transferability"]) == pytest.approx(-by_hand)

    def apart(student: torch.Tensor) -> torch.Tensor:
        return method.generator_terms(VIEW._replace(student=student))["transferability"]

    assert not torch.func.grad(apart)(STUDENT).any()


def test_the_compared_form_spreads_images_by_noise_alone() -> None:
    view = VIEW._replace(inputs=MERGED)
    spread = FedFTG(form="compared").generator_terms(view)["diversity"]
    assert torch.equal(spread, diversity(NOISE, IMAGES, apart_by="square"))
    assert torch.equal(
        FedFTG().generator_terms(view)["diversity"], diversity(MERGED, IMAGES, apart_by="absolute")
    )


def test_one_by_one_each_step_asks_one_client_on_the_same_draw() -> None:
    rows = [Latent(NOISE + step, LABELS) for step in range(2)]
    assert FedFTG().asking(rows, 3) is rows
    asked = FedFTG(one_by_one=True).asking(rows, 3)
    assert [latent.asked.tolist() for latent in asked if latent.asked is not None] == [
        [1, 0, 0], [0, 1, 0], [0, 0, 1],
    ] * 2  # fmt: skip
    assert [torch.equal(latent.noise, rows[i // 3].noise) for i, latent in enumerate(asked)] == [
        True
    ] * 6


def test_one_by_one_the_generator_takes_as_many_steps_as_there_are_clients() -> None:
    lengths: dict[bool, list[int]] = {False: [], True: []}

    class Spy(InProcess):
        def _run(self, loop: Any, node: Any) -> Any:
            if node.id == SERVER and "image.weight" in loop.carry[0]:
                lengths[method.one_by_one].append(len(loop.batches))
            return super()._run(loop, node)

    for one_by_one in (False, True):
        values = {**LITTLE, "generator_steps": 2, "one_by_one": one_by_one}
        method = FedFTG(**values)
        played(method, pictures(), rounds=1, engine=Spy)
    assert set(lengths[False]) == {2} and set(lengths[True]) == {2 * 3}


def test_weights_of_the_terms_are_applied_to_the_loss() -> None:
    method = FedFTG(discrepancy_weight=2.0, diversity_weight=0.5)
    terms = method.generator_terms(VIEW)
    by_hand = terms["fidelity"] + 2 * terms["transferability"] + 0.5 * terms["diversity"]
    assert torch.equal(method.generator_loss(VIEW), by_hand)


def test_one_by_one_the_steps_of_all_clients_have_the_loss_of_all_at_once_together() -> None:
    together, alone = FedFTG(diversity_weight=0.5), FedFTG(diversity_weight=0.5, one_by_one=True)
    clients = len(SAID)
    shares = [VIEW.shares * torch.eye(clients)[client].unsqueeze(1) for client in range(clients)]
    each = [alone.generator_loss(VIEW._replace(shares=own)) for own in shares]
    assert torch.allclose(torch.stack(each).sum(), together.generator_loss(VIEW))


def test_the_clients_logits_stand_still_in_the_released_discrepancy() -> None:
    def apart(said: torch.Tensor, form: Any) -> torch.Tensor:
        terms = FedFTG(form=form).generator_terms(VIEW._replace(said=said))
        return terms["transferability"]

    assert not torch.func.grad(apart)(SAID, "released").any()
    assert torch.func.grad(apart)(SAID, "compared").any()


def test_the_student_learns_the_mean_of_probabilities() -> None:
    method = FedFTG()
    target = method.target(SAID, SHARES)
    by_hand = SHARES[0].unsqueeze(1) * SAID[0].softmax(1) + SHARES[1].unsqueeze(1) * SAID[
        1
    ].softmax(1)
    assert torch.allclose(target, by_hand)

    class Fixed:
        def __call__(self, weights: object, x: torch.Tensor) -> torch.Tensor:
            return STUDENT

    lesson = Lesson(IMAGES, target)
    loss = method.lesson_loss(Fixed(), {}, (lesson,))  # type: ignore[arg-type]
    plain = -(target * STUDENT.log_softmax(1)).sum(1).mean()
    assert torch.allclose(loss, plain / 3)  # the released code divides by the classes too


def test_up_to_a_constant_the_compared_form_is_the_divergence_from_each_client() -> None:
    method = FedFTG(form="compared", temperature=2.0)

    def loss(student: torch.Tensor) -> torch.Tensor:
        return method.lesson_loss(
            lambda weights, x: student, {}, (Lesson(IMAGES, method.target(SAID, SHARES)),)  # type: ignore[arg-type]
        )  # fmt: skip

    def each(student: torch.Tensor) -> torch.Tensor:
        p, log_q = (SAID / 2).softmax(2), (student / 2).log_softmax(1)
        return (SHARES * (p * (p.log() - log_q)).mean(2)).sum(0).mean()

    assert torch.allclose(torch.func.grad(loss)(STUDENT), torch.func.grad(each)(STUDENT), atol=1e-6)


def test_both_rates_decay_each_round() -> None:
    method = FedFTG(rate_decay=0.5)
    assert method.generator_optimizer(1).rate == 0.01 and method.student_optimizer(1).rate == 0.1
    later = method.generator_optimizer(3), method.student_optimizer(3)
    assert [optimizer.rate for optimizer in later] == [0.0025, 0.025]
    assert later == (method.generator_optimizer(1), method.student_optimizer(1))  # one recording


def test_the_generator_is_its_own_or_dfrds_with_the_label_beside_the_noise() -> None:
    model = pictures().server_model
    assert isinstance(FedFTG().generator(model), Conditioned)
    compared = FedFTG(form="compared").generator(model)
    assert isinstance(compared, Deconvolution) and compared.merge == "cat"


@pytest.mark.parametrize("role", ["fine_tune", "data_free"])
@pytest.mark.parametrize("form", ["released", "compared"])
def test_the_generator_lives_on_over_rounds(role: Any, form: Any) -> None:
    method = FedFTG(**LITTLE, role=role, form=form)
    first, _ = played(method, pictures(), 1)
    second, log = played(method, pictures(), 2)
    one, two = (engine.states[SERVER].image_generator for engine in (first, second))
    assert not same(one, two)
    found = {r.name for r in log.metrics if (r.round, r.step) == (2, "aggregate")}
    terms = {"fidelity", "transferability", "diversity"}
    assert found == terms | {"loss", "generator_loss", "distil_loss"}
