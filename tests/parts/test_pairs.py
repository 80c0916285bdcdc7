"""Two networks in one loop come to where each would come alone."""

from __future__ import annotations

import pytest
import torch
from tests.models.own_nets import BatchNet
from torch import Tensor

from fedstill.core import SGD, Batch, Model, Weights, minimize
from fedstill.core.errors import BadValue
from fedstill.core.node import Node
from fedstill.core.release import Spending, Terms
from fedstill.models import ConvNet, Module
from fedstill.parts.learning import training
from fedstill.parts.losses import task_loss
from fedstill.parts.pairs import Pair
from fedstill.testing import worlds

WIDE = ConvNet((1, 8, 8), 3, depth=2, width=4, norm="batch")
SMALL = ConvNet((1, 8, 8), 3, depth=1, width=2, norm="batch")
DATA = worlds.pictures().party("c1").data


def alone(model: Model, weights: Weights, batch: Batch) -> Tensor:
    return task_loss(model(weights, batch.x), batch.y)


def side(model: Pair, weights: Weights, batch: Batch) -> Tensor:
    both = model(weights, batch.x)
    return task_loss(both.first, batch.y) + task_loss(both.second, batch.y)


def batches(epochs: int = 2) -> list[Batch]:
    return list(DATA.batches(9, torch.Generator().manual_seed(0), epochs=epochs))


def test_networks_that_do_not_touch_are_trained_as_if_alone_statistics_included() -> None:
    pair, start = Pair(WIDE, SMALL), (WIDE.init(0), SMALL.init(1))
    optimizer = SGD(0.1, momentum=0.5)
    steps = minimize(side, pair, pair.joined(*start), batches(), optimizer)
    reached = pair.apart(worlds.finished(steps))
    for model, own, weights in zip((WIDE, SMALL), start, reached, strict=True):
        other = worlds.finished(minimize(alone, model, own, batches(), optimizer))
        assert list(weights) == list(other)
        assert all(torch.equal(weights[name], other[name]) for name in other)
        assert not torch.equal(weights["norm0.running_mean"], own["norm0.running_mean"])


def test_weights_are_joined_and_taken_apart() -> None:
    pair = Pair(WIDE, SMALL)
    first, second = pair.apart(pair.init(3))
    assert list(pair.init(3)) == list(pair.initial())
    assert all(torch.equal(first[name], tensor) for name, tensor in WIDE.init(3).items())
    assert all(torch.equal(second[name], tensor) for name, tensor in SMALL.init(3).items())
    assert [len(pair.apart(each)[1]) for each in pair.samples(torch.Generator(), 2)] == [8, 8]


def test_outside_of_training_nothing_is_noted() -> None:
    pair, x = Pair(WIDE, SMALL), DATA.all().x
    weights = pair.init(0)
    said = pair.evaluating(weights, x)
    assert torch.equal(said.second, SMALL(SMALL.init(0), x))


def test_twins_with_dropout_do_not_drop_the_same_units() -> None:
    net = Module((1, 8, 8), 3, BatchNet)
    pair, x = Pair(net, net), DATA.all().x
    weights = pair.joined(net.init(0), net.init(0))
    assert pair.draws and not Pair(WIDE, SMALL).draws
    said = pair.drawing(torch.tensor([1, 2])).train({})(weights, x)
    assert not torch.allclose(said.first, said.second)


def test_what_holds_for_either_holds_for_the_pair() -> None:
    plain = ConvNet((1, 8, 8), 3, depth=1, width=2)
    assert Pair(plain, SMALL).couples and not Pair(plain, plain).couples
    assert Pair(plain, plain) == Pair(plain, plain) and hash(Pair(plain, plain))
    assert Pair(plain, plain).twice and Pair(plain, plain).by_example
    assert Pair(plain, plain).title == "convnet and convnet"


def test_private_records_are_not_mixed_by_a_norm_of_either() -> None:
    node: Node[None] = Node("c1", 1, None, model=WIDE, data=DATA)
    terms = Terms(clip=1.0, gradient_clip=1.0, releases=1, sigma=1.0, counts_sigma=None)
    node.seal(terms, lambda round, step, use, earlier: Spending(1, "", "", "", 1.0, 1.0, 1))
    plain = ConvNet((1, 8, 8), 3, depth=1, width=2)
    with pytest.raises(BadValue, match="convnet and convnet normalises by the whole batch"):
        training(node, Pair(plain, SMALL), Pair(plain, SMALL).init(0), 5)
    pair = Pair(plain, plain)
    found = training(node, pair, pair.init(0), 5)
    steps = minimize(
        side, pair, pair.init(0), found.batches, SGD(0.1), mechanism=found.mechanism
    )  # fmt: skip
    moved = worlds.finished(steps)
    assert not torch.equal(moved["second.head.bias"], pair.init(0)["second.head.bias"])
