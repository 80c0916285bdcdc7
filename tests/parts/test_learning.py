"""Batches of a node's own examples: a second training in a step sees them in another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import worlds
from fedstill.core import Data, Node, trees
from fedstill.core.data import Pool
from fedstill.core.release import Spending, Terms
from fedstill.methods import fedavg, local
from fedstill.models import ConvNet
from fedstill.parts.learning import Training, training


def by_part(client: Node[Any]) -> Training:
    return training(client, client.model, {}, 8, views="crop_flip")


def by_fedavg(client: Node[Any]) -> Training:
    return fedavg.FedAvg(batch_size=8, views="crop_flip").training(client, client.model, {})


def by_local(client: Node[Any]) -> Training:
    return local.Local(batch_size=8).training(client, client.model, {})


def client() -> Node[Any]:
    return worlds.engine_for(local.Local(), worlds.pictures()).node("c1", 1, "learn")


def labels(made: Training) -> list[int]:
    return [int(label) for batch in made.batches for label in batch.y]


@pytest.mark.parametrize("train", [by_part, by_fedavg, by_local])
def test_a_second_training_in_a_step_has_an_order_of_its_own(train: Any) -> None:
    node = client()
    first, second, third = train(node), train(node), train(node.remembering(None))
    orders = [tuple(labels(made)) for made in (first, second, third)]
    assert len({*orders}) == 3 and len({tuple(sorted(order)) for order in orders}) == 1
    again = client()
    assert labels(train(again)) == labels(first) and labels(train(again)) == labels(second)
    assert torch.equal(next(iter(train(client()).batches)).x, next(iter(first.batches)).x)


def test_which_examples_a_round_uses_is_told_of_the_first_training() -> None:
    method, node = fedavg.FedAvg(batch_size=8), client()
    before = method.plan(node).order
    made = by_fedavg(node)
    by_fedavg(node)
    assert torch.equal(method.plan(node).order, before)
    assert labels(made) == node.data.take(before).y.tolist()


def test_images_of_a_second_training_are_moved_otherwise() -> None:
    node = client()
    whole = [training(node, node.model, {}, 27, views="crop_flip") for _ in range(2)]
    first, second = (made.batches[0].x.sum((1, 2, 3)).sort().values for made in whole)
    assert not torch.allclose(first, second)


def sealed(data: Data, *, counts_sigma: float | None = None, key: bytes | None = None) -> Node[Any]:
    """A node with private images of 8x8 pixels."""
    model = ConvNet((1, 8, 8), 3, depth=1, width=2)
    node: Node[Any] = Node("c1", 1, None, model=model, data=data, key=key)
    row = Spending(1, "learn", "c1", "DP-SGD", 1.0, 1.0, 1)
    node.seal(Terms(1.0, 1.0, 1, 1.0, counts_sigma), lambda round, step, use, earlier: row)
    return node


def marked(count: int) -> Data:
    """Images of one number each, by which they can be told apart."""
    x = torch.arange(1.0, count + 1).reshape(-1, 1, 1, 1).expand(count, 1, 8, 8)
    return Data.of(x.contiguous(), torch.arange(count) % 3)


def privately(node: Node[Any], **options: Any) -> Training:
    return training(node, node.model, node.model.init(0), 20, steps=40, **options)


def test_in_a_private_sample_every_example_that_was_drawn_counts_once_and_no_other() -> None:
    made, drawn = privately(sealed(marked(50))), torch.zeros(40, 50)
    for step, sample in enumerate(made.batches):
        counted = sample.share > 0
        which = sample.examples.x[counted][:, 0, 0, 0].long() - 1
        assert len(set(which.tolist())) == len(which)
        assert len(sample.share[counted].unique()) == 1
        assert sample.examples.y[counted].tolist() == (which % 3).tolist()
        drawn[step, which] = 1
    # Each of 50 takes part with a chance of 20 / 50, whoever else does.
    assert float(drawn.mean()) == pytest.approx(0.4, abs=4 * (0.24 / 2000) ** 0.5)
    assert float(drawn.sum(1).var()) == pytest.approx(50 * 0.24, rel=0.8)
    assert drawn.sum(0).min() > 0 and drawn.sum(1).unique().numel() > 3


def test_private_samples_made_together_are_those_made_one_by_one() -> None:
    made = privately(sealed(marked(50))).batches
    together = made.ahead(3, 4)
    assert together is not None
    for at in range(4):
        alone = trees.tensors(made[3 + at])
        for one, other in zip(alone, trees.tensors(together), strict=True):
            assert torch.equal(one, other[at])


@pytest.mark.parametrize(("kind", "border"), [("crop_flip", 0.0), ("black_crop_flip", -1.0)])
@pytest.mark.parametrize("key", [None, b"k" * 32], ids=["simulated", "of a site"])
def test_images_of_private_samples_are_moved_and_all_else_stays(
    key: bytes | None, kind: str, border: float
) -> None:
    marks = (5 * torch.arange(1, 51).reshape(-1, 1, 1, 1)).expand(50, 1, 8, 8).to(torch.uint8)
    half = torch.full((1, 1, 1), 0.5)  # mean and deviation: black is -1
    data = Pool(marks.contiguous(), torch.arange(50) % 3, half, half).all()
    plain, views = (privately(sealed(data, key=key), views=each).batches for each in ("none", kind))
    assert views.ahead(0, 2) is None
    for step in (0, 1):
        still, sample = plain[step], views[step]
        assert torch.equal(sample.share, still.share)
        assert torch.equal(sample.examples.y, still.examples.y)
        assert all(torch.equal(sample.noise[name], still.noise[name]) for name in still.noise)
        outside = sample.examples.x == border
        assert torch.equal(sample.examples.x[~outside], still.examples.x[~outside])
        covered = (~outside).float().mean((1, 2, 3))
        assert covered.min() >= (7 / 8) ** 2 and covered.unique().numel() > 2
    first, second = ((views[step].examples.x == border).flatten(1).sum(1) for step in (0, 1))
    assert not torch.equal(first, second)


def test_a_client_without_records_trains_on_noise_alone_where_labels_are_private() -> None:
    made = privately(sealed(Data(), counts_sigma=50.0))
    sample = made.batches[0]
    assert sample.examples.x.shape[1:] == (1, 8, 8) and sample.examples.y.dtype == torch.long
    assert len(sample.share) == len(sample.examples.y) and not sample.share.any()
    assert all(noise.any() for noise in sample.noise.values())
