"""Unbalanced classes: weights in the local loss, and batches in which classes are alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import worlds
from fedstill.core import SERVER, Data
from fedstill.core.errors import BadValue, RecipeError
from fedstill.core.seeds import generator
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.methods import FCCL, METHODS, Centralised, DeSA, FedAvg, Local
from fedstill.methods.scaffold import Scaffold
from fedstill.parts.anchors import Sets
from fedstill.parts.class_balance import weights_of
from fedstill.parts.losses import task_loss
from fedstill.privacy.privacy import Privacy
from fedstill.recipe.build import experiment_of
from fedstill.recipe.check import checked
from small_recipes import tables

FAMILY = [name for name, kind in METHODS.items() if hasattr(kind, "class_weights")]


def labelled(*labels: int) -> Data:
    return Data.of(torch.randn(len(labels), 2, generator=generator(0)), torch.tensor(labels))


def labelled_vectors(*labels: int) -> Data:
    return Data.of(torch.zeros(len(labels), 4), torch.tensor(labels))


def test_balanced_weights_let_every_class_held_count_alike() -> None:
    """Four examples, three of class 0 and one of class 2: 4 / (2 · 3) and 4 / (2 · 1)."""
    found = weights_of("balanced", labelled(0, 0, 0, 2), 3)["class_weights"]
    assert found[0] == pytest.approx(4 / 6) and found[2] == 2.0
    assert found[1] == 2.0, "a class that is not held has the weight of one example"
    assert weights_of("none", labelled(0), 3) == {}
    assert weights_of((1.0, 2.0), labelled(0), 2)["class_weights"].tolist() == [1.0, 2.0]


def test_a_loss_is_multiplied_by_the_weight_of_its_class() -> None:
    logits, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    each = [cross_entropy(logits[i : i + 1], labels[i : i + 1]) for i in (0, 1)]
    weighed = task_loss(logits, labels, torch.tensor([3.0, 0.5]))
    assert weighed == pytest.approx(float(3 * each[0] + 0.5 * each[1]) / 2)
    assert torch.equal(task_loss(logits, labels), cross_entropy(logits, labels))


def test_balanced_batches_draw_classes_alike_in_batches_of_the_same_sizes() -> None:
    data = labelled(*[0] * 90, *[1] * 9, 3)
    plan = data.balanced_batches(32, generator(0), epochs=30)
    assert plan.sizes == data.batches(32, generator(0), epochs=30).sizes
    counts = torch.bincount(data.labels[plan.order], minlength=4).double()
    assert counts[2] == 0 and int(counts.sum()) == 3000
    assert all(abs(float(count) - 1000) < 5 * (3000 * 2 / 9) ** 0.5 for count in counts[[0, 1, 3]])
    assert len(plan.order.unique()) == 100, "every example has its turn"
    assert len(labelled().balanced_batches(4, generator(0))) == 0


def test_equal_weights_are_no_weights() -> None:
    """Up to the rounding of a mean taken in another order."""
    world = worlds.vectors()
    plain, _ = worlds.played(FedAvg(), world, 2)
    equal, _ = worlds.played(FedAvg(class_weights=(1.0, 1.0, 1.0)), world, 2)
    for a, b in zip(*(e.memory(SERVER).weights.values() for e in (plain, equal)), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("engine", [InProcess, Batched])
def test_a_class_of_weight_zero_is_not_learnt(engine: Any) -> None:
    """With class 2 alone counting, nearly everything is taken for class 2."""
    method = FedAvg(lr=0.5, batch_size=8, class_weights=(0.0, 0.0, 1.0))
    played, _ = worlds.played(method, worlds.vectors(), 3, engine)
    node = played.node(SERVER, 3, "predict")
    answers = method.predict(node, worlds.around("any", 50, (4,))).argmax(1)
    assert int((answers == 2).sum()) >= 45


@pytest.mark.parametrize("name", FAMILY)
def test_every_method_of_the_family_weighs_and_draws(name: str) -> None:
    """Its numbers change with either, and engines agree."""
    kind = METHODS[name]
    options = {**kind.presets["small"], "class_weights": "balanced", "sampling": "balanced"}
    world = worlds.pictures((20, 27))
    losses = []
    for values, engine in (
        (kind.presets["small"], InProcess), (options, InProcess), (options, Batched)
    ):  # fmt: skip
        _, log = worlds.played(kind(**values), world, 1, engine)
        losses.append([row.value for row in log.metrics if row.name == "loss" and row.round])
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[2], abs=1e-4)


def test_desa_weighs_by_own_examples_and_anchors_together() -> None:
    """Three of class 0 and one of 2, and two anchors of each: n = 10, of classes 5, 2 and 3."""
    world = worlds.vectors((4,))
    method = DeSA(per_class=2, class_weights="balanced")
    engine = worlds.engine_for(method, world)
    client = engine.node("c0", 1, "learn")
    client.data = labelled_vectors(0, 0, 0, 2)
    known = Sets.of("c0", torch.zeros(3, 2, 4), torch.arange(3))
    client.state = method.client_state(client).knowing(known)
    found = method.weighing(client)["class_weights"]
    assert found.tolist() == pytest.approx([10 / (3 * 5), 10 / (3 * 2), 10 / (3 * 3)])


@pytest.mark.parametrize("correction", ["gradient", "step"])
def test_scaffold_weighs_in_both_forms(correction: str) -> None:
    world, losses = worlds.pictures((20, 27)), []
    for weights in ("none", "balanced"):
        method = Scaffold(correction=correction, class_weights=weights)
        _, log = worlds.played(method, world, 1)
        losses.append([row.value for row in log.metrics if row.name == "loss" and row.round])
    assert losses[0] and losses[0] != losses[1]


def test_the_family_is_who_trains_on_labelled_records_alone() -> None:
    assert set(FAMILY) == {
        "local", "centralised", "fedavg", "fedprox", "fednova", "scaffold", "vhl", "fedgen", "moon",
        "fedproto", "fedhe", "dynafed", "feddf", "heterofl", "feddropout", "fedrolex",
        "desa", "fccl",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((1.0, 2.0), "class_weights has 2 numbers for 3 classes"),
        ((1.0, -2.0, 1.0), "class_weights has -2.0; none is below 0"),
        ((1.0, float("nan"), 1.0), "class_weights = nan: must be a finite number"),
        ((0.0, 0.0, 0.0), "class_weights are all 0"),
        ((1.0, "two", 1.0), "class_weights = 'two': must be a number"),
    ],
)
@pytest.mark.parametrize("kind", [FedAvg, Local, Centralised])
def test_weights_that_do_not_fit_are_refused(kind: Any, given: Any, said: str) -> None:
    with pytest.raises(BadValue) as refused:
        worlds.experiment(kind(class_weights=given), worlds.vectors())
    assert said in str(refused.value)


def test_a_recipe_gives_a_word_or_a_list(tmp_path: Path) -> None:
    (recipe,) = checked(
        tables(tmp_path, method={"class_weights": [1, 2.5, 1], "sampling": "balanced"})
    )
    assert recipe.method.class_weights == (1, 2.5, 1)
    (again,) = checked(recipe.as_tables())
    assert again.method == recipe.method
    (word,) = checked(tables(tmp_path, method={"class_weights": "balanced"}))
    assert word.method.class_weights == "balanced"
    with pytest.raises(RecipeError, match=r"method.class_weights = 'even': unknown choice"):
        checked(tables(tmp_path, method={"class_weights": "even"}))
    (short,) = checked(tables(tmp_path, method={"class_weights": [1, 2]}))
    with pytest.raises(RecipeError, match=r"class_weights has 2 numbers for 3 classes"):
        experiment_of(short)
    with pytest.raises(RecipeError, match=r"method.class_weights: unknown key"):
        checked(tables(tmp_path, method={"name": "feddm", "class_weights": "balanced"}))


def test_private_records_are_weighed_by_counts_as_they_are_told() -> None:
    """Counts that are private cost a release of their own, which the ledger has."""
    world = worlds.vectors()
    privacy = Privacy(epsilon=8.0, labels="private")
    _, log = worlds.played(FedAvg(class_weights="balanced"), world, 1, privacy=privacy)
    assert {row.mechanism for row in log.privacy} == {"DP-SGD", "class counts"}


@pytest.mark.parametrize("kind", [FedAvg, Local, DeSA, FCCL])
def test_balanced_draws_of_private_records_are_refused(kind: Any) -> None:
    with pytest.raises(BadValue, match=r"DP-SGD accounts for draws that are alike for all"):
        worlds.played(kind(sampling="balanced"), worlds.vectors(), 1, privacy=Privacy(epsilon=8.0))
