"""VHL: FedAvg beside virtual images that everybody makes alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import Batch, Weights
from fedstill.core.errors import BadValue
from fedstill.core.node import SERVER
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.vhl import VHL, Mixed, Virtual
from fedstill.parts.learning import Training
from fedstill.parts.losses import supervised_contrastive
from worlds import CLASSES, engine_for, pictures, played

COMMON: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 7, "momentum": 0.9}
SMALL: dict[str, Any] = {**COMMON, "per_class": 3, "virtual_batch": 5, "generator_width": 4}


def weights_of(engine: Any) -> Weights:
    weights: Weights = engine.states[SERVER].weights
    return weights


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_without_its_terms_vhl_is_fedavg(norm: str) -> None:
    # Bit for bit: the same draws for the same purposes, and no virtual image seen.
    world = pictures(norm=norm)
    plain, _ = played(FedAvg(**COMMON), world, rounds=3)
    free, _ = played(VHL(**SMALL, alpha=0, weight=0, labels="same"), world, rounds=3)
    for name, reached in weights_of(plain).items():
        assert torch.equal(reached, weights_of(free)[name])


def test_with_vanishing_terms_vhl_nears_fedavg() -> None:
    world = pictures()
    plain, _ = played(FedAvg(**COMMON), world, rounds=2)
    near, _ = played(VHL(**SMALL, alpha=1e-9, weight=1e-9, labels="same"), world, rounds=2)
    for name, reached in weights_of(plain).items():
        assert torch.allclose(reached, weights_of(near)[name], atol=1e-5)


def test_extra_labels_without_terms_start_as_fedavg_and_double_the_head() -> None:
    world = pictures()
    start = engine_for(FedAvg(), world).node(SERVER, 0, "look").state.weights
    doubled = engine_for(VHL(), world).node(SERVER, 0, "look").state.weights
    assert doubled["head.weight"].shape[0] == 2 * start["head.weight"].shape[0]
    for name, tensor in start.items():
        if not name.startswith("head"):
            assert torch.equal(tensor, doubled[name])


def test_predictions_are_over_the_real_classes() -> None:
    engine, _ = played(VHL(**SMALL), pictures(), rounds=1)
    node = engine.node(SERVER, 1, "look")
    x = torch.zeros(5, 1, 8, 8)
    found = VHL(**SMALL).predict(node, x)
    assert found.shape == (5, CLASSES)
    assert torch.equal(found, VHL().network(node.model)(weights_of(engine), x)[:, :CLASSES])


@pytest.mark.parametrize("labels", ["extra", "same"])
@pytest.mark.parametrize("aligning", [1.0, 0.0])
def test_the_objective_is_the_sum_of_its_four_terms(labels: Any, aligning: float) -> None:
    method = VHL(alpha=0.5, weight=2.0, virtual_contrast=0.1, temperature=0.3, labels=labels)
    model = method.network(pictures().server_model)
    weights = model.init(0)
    x, y = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    v, c = torch.randn(6, 1, 8, 8), torch.tensor([2, 1, 0, 0, 1, 2])
    batch = Mixed(Batch(x, y), Batch(v, c), torch.tensor(aligning))
    features, logits = model.both(weights, x)
    theirs, outputs = model.both(weights, v)
    first = supervised_contrastive(
        torch.cat([features, theirs]), torch.cat([y, c]), temperature=0.3
    )
    second = supervised_contrastive(theirs, c, temperature=0.3)
    shift = CLASSES if labels == "extra" else 0
    expected = cross_entropy(logits, y) + 0.5 * cross_entropy(outputs, c + shift)
    expected = expected + 2 * aligning * (first + 0.1 * second)
    found = method.aligned(model, weights, batch)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_virtual_features_stand_still_in_the_first_contrastive_term() -> None:
    # Real images apart from virtual ones: with alpha and the second term at zero, no slope may
    # come through the virtual images.
    method = VHL(alpha=0.0, weight=1.0, virtual_contrast=0.0, labels="same")
    model = pictures().server_model
    weights = model.init(0)
    real = Batch(torch.randn(3, 1, 8, 8), torch.tensor([0, 1, 2]))

    def loss(images: Tensor) -> Tensor:
        virtual = Batch(images, torch.tensor([0, 1, 2, 0]))
        return method.aligned(model, weights, Mixed(real, virtual, torch.tensor(1.0)))

    grad = torch.func.grad(loss)(torch.randn(4, 1, 8, 8))
    assert torch.equal(grad, torch.zeros_like(grad))


def test_alignment_counts_in_the_first_local_epochs_only() -> None:
    method, world = VHL(**{**SMALL, "epochs": 3}, aligned_epochs=2), pictures()
    engine, _ = played(method, world, rounds=0)
    client = engine.node("c0", 1, "update")
    real = client.data.batches(7, client.rng("order"), epochs=3)  # 20 examples: 3 batches
    on = [float(each.aligning) for each in method.mixed(client, Training(real, None)).batches]
    assert on == [1.0] * 6 + [0.0] * 3


def test_a_batch_holds_virtual_images_with_their_classes_and_none_twice() -> None:
    method, world = VHL(**{**SMALL, "virtual_batch": 100}), pictures()
    engine, _ = played(method, world, rounds=0)
    client = engine.node("c0", 1, "update")
    images = method.made(client, client.state.seed)
    real = Training(client.data.batches(7, client.rng("order")), None)
    for each in method.mixed(client, real).batches:
        assert len(each.virtual.y) == 3 * CLASSES  # the whole set: a batch can be no larger
        for image, label in zip(*each.virtual, strict=True):
            places = [(c, i) for c in range(CLASSES) for i in range(3)
                      if torch.equal(images[c, i], image)]  # fmt: skip
            assert [c for c, _ in places] == [int(label)]


@pytest.mark.parametrize("generator", ["style", "conv_decoder"])
def test_all_clients_have_the_same_virtual_set_however_it_is_shared(generator: Any) -> None:
    seeded, _ = played(VHL(**SMALL, generator=generator), pictures(), rounds=1)
    sent, _ = played(VHL(**SMALL, generator=generator, sharing="images"), pictures(), rounds=1)
    seeds = {seeded.states[c].seed for c in ("c0", "c1", "c2")}
    assert len(seeds) == 1
    images = sent.states["c0"].images
    method = VHL(**SMALL, generator=generator)
    for c in ("c0", "c1", "c2"):
        assert torch.equal(sent.states[c].images, images)
        assert torch.equal(method.made(seeded.node(c, 1, "look"), *seeds), images)
    for name, reached in weights_of(seeded).items():
        assert torch.equal(reached, weights_of(sent)[name])


def test_images_of_a_class_differ_more_with_a_larger_deviation() -> None:
    spreads = []
    for deviation in (0.01, 1.0):
        method = VHL(**SMALL, generator="conv_decoder", sharing="images", deviation=deviation)
        engine, _ = played(method, pictures(), rounds=0)
        spreads.append(engine.states["c0"].images.std(1).mean().item())  # over images of a class
    assert spreads[0] < spreads[1] / 2


def test_another_seed_of_the_run_makes_another_virtual_set() -> None:
    one, _ = played(VHL(**SMALL, sharing="images"), pictures(), rounds=0, seed=1)
    other, _ = played(VHL(**SMALL, sharing="images"), pictures(), rounds=0, seed=2)
    assert not torch.allclose(one.states["c0"].images, other.states["c0"].images, atol=0.1)


@pytest.mark.parametrize(("sharing", "floats"), [("seed", 1), ("images", CLASSES * 3 * 64)])
def test_the_set_travels_once_as_one_number_or_as_images(sharing: Any, floats: int) -> None:
    _, log = played(VHL(**SMALL, sharing=sharing), pictures(), rounds=2)
    assert sum(row.floats for row in log.messages if row.step == "announce") == floats
    model = VHL().network(pictures().server_model)
    size = sum(model.floats().values())
    for step, expected in (("broadcast", 2 * size), ("update", 2 * 3 * (size + 1))):
        assert sum(row.floats for row in log.messages if row.step == step) == expected


def test_the_seed_message_counts_one() -> None:
    assert sum(Virtual(12, torch.empty(0)).floats().values()) == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"alpha": -1}, "alpha = -1: must be at least 0"),
        ({"temperature": 0.0}, "temperature = 0.0: must be above 0"),
        ({"per_class": 0}, "per_class = 0: must be at least 1"),
        ({"labels": "own"}, "labels = 'own'"),
        ({"generator": "gan"}, "generator = 'gan'"),
        ({"sharing": "none"}, "sharing = 'none'"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(BadValue, match=said):
        VHL(**values)
