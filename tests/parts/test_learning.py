"""Batches of a node's own examples: a second training in a step sees them in another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import worlds
from fedstill.core import Node
from fedstill.methods import fedavg, local
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
