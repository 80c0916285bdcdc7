"""Balls: the radius is exact where it binds, and nothing moves where it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedstill.core import Node, algebra, trees
from fedstill.core.records import Weights
from fedstill.core.seeds import generator
from fedstill.models.convnet import ConvNet
from fedstill.parts import balls


def distance(left: Weights, right: Weights) -> float:
    steps = algebra.sub(algebra.parameters(left), algebra.parameters(right))
    return float(torch.cat([step.double().flatten() for step in steps.values()]).norm())


def large() -> Weights:
    return ConvNet((3, 32, 32), 10, norm="batch").init(0)


def directions(count: int, like: Weights, seed: int = 0) -> Tensor:
    numbers = sum(tensor.numel() for tensor in algebra.parameters(like).values())
    return torch.randn(count, numbers, generator=generator(seed))


def small() -> Weights:
    return {"a.weight": torch.tensor([3.0, 0.0]), "a.running_mean": torch.tensor([7.0])}


def node(model: ConvNet) -> Node[None]:
    return Node("c0", 1, None, model=model, step="synthesize")


def test_a_draw_for_many_parameters_lies_on_the_sphere() -> None:
    centre = large()
    for radius in (0.5, 5.0, 10.0):
        for moved in balls.on_sphere(centre, directions(2, centre), radius):
            assert moved.keys() == centre.keys()
            assert distance(moved, centre) == pytest.approx(radius, rel=1e-4)


def test_one_norm_is_taken_over_all_parameters_together() -> None:
    centre = large()
    delta = directions(1, centre)
    (moved,) = balls.on_sphere(centre, delta, 5.0)
    steps = algebra.sub(algebra.parameters(moved), algebra.parameters(centre))
    ratio = torch.cat([step.flatten() for step in steps.values()]) / delta[0]
    assert ratio.numel() == 320_010
    for part in (ratio[:1000], ratio[-10:]):  # of the first convolution, and of the head
        assert part.mean() == pytest.approx(5.0 / 320_010**0.5, rel=0.01)


def test_a_draw_shorter_than_the_radius_is_taken_as_it_is() -> None:
    delta = torch.tensor([[0.6, 0.8], [6.0, 8.0]])
    moved, far = balls.on_sphere(small(), delta, 2.0)
    assert torch.equal(moved["a.weight"], torch.tensor([3.6, 0.8]))
    assert far["a.weight"].tolist() == pytest.approx([4.2, 1.6])


def test_statistics_are_neither_measured_nor_moved() -> None:
    (moved,) = balls.on_sphere(small(), torch.tensor([[0.6, 0.8]]), 2.0)
    assert moved["a.running_mean"].item() == 7
    weights = {"a.weight": torch.tensor([3.0, 1.0]), "a.running_mean": torch.tensor([1000.0])}
    assert torch.equal(balls.projected(weights, small(), 2.0)["a.weight"], weights["a.weight"])
    assert balls.projected(weights, small(), 2.0)["a.running_mean"].item() == 1000


@pytest.mark.parametrize("pool", [1, 8])
def test_the_network_of_a_step_does_not_depend_on_what_was_asked_before(
    pool: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstill.parts.random_networks.size", lambda numbers, device: pool)
    model = ConvNet((1, 8, 8), 2, width=4)
    centre = model.init(0)
    one, other = (balls.networks(node(model), centre, 2.0) for _ in range(2))
    drawn = [one(step) for step in range(20)]
    assert all(distance(network, centre) == pytest.approx(2.0, rel=1e-4) for network in drawn)
    for step in (19, 3, 4, 11, 11):
        assert all(torch.equal(drawn[step][name], other(step)[name]) for name in centre)
    heads = {tuple(network["head.bias"].tolist()) for network in drawn}
    assert len(heads) == 20


def test_directions_are_standard_normal() -> None:
    model = ConvNet((3, 32, 32), 10)
    centre = {name: torch.zeros_like(tensor) for name, tensor in model.init(0).items()}
    moved = balls.networks(node(model), centre, 1e9)(5)  # a ball that nothing leaves
    entries = torch.cat([tensor.flatten() for tensor in moved.values()])
    assert entries.numel() == 320_010
    assert abs(entries.mean()) < 4 / 320_010**0.5
    assert abs(entries.var() - 1) < 4 * (2 / 320_010) ** 0.5


def test_projection_is_onto_the_nearest_point_of_the_ball() -> None:
    weights = small() | {"a.weight": torch.tensor([6.0, 4.0])}  # (3, 4) away: a distance of 5
    assert balls.projected(weights, small(), 1.0)["a.weight"].tolist() == pytest.approx([3.6, 0.8])
    assert torch.equal(balls.projected(weights, small(), 5.0)["a.weight"], weights["a.weight"])
    assert torch.equal(balls.projected(weights, small(), 0.0)["a.weight"], small()["a.weight"])


def test_projecting_twice_is_projecting_once() -> None:
    centre = large()
    (far,) = balls.on_sphere(centre, directions(1, centre, 2), 20.0)
    once = balls.projected(far, centre, 5.0)
    assert distance(once, centre) == pytest.approx(5.0, rel=1e-4)
    twice = balls.projected(once, centre, 5.0)
    assert distance(once, twice) < 1e-4


def test_at_the_centre_there_is_no_division_by_zero() -> None:
    def moved(weights: Weights) -> Tensor:
        return balls.projected(weights, small(), 2.0)["a.weight"].sum()

    assert torch.equal(balls.projected(small(), small(), 2.0)["a.weight"], small()["a.weight"])
    assert grad(moved)(small())["a.weight"].tolist() == [1, 1]
    still = torch.zeros(1, 2)
    slope = grad(lambda d: balls.on_sphere(small(), d, 2.0)[0]["a.weight"].sum())(still)
    assert slope.tolist() == [[1, 1]]


def test_clients_batched_together_equal_clients_one_by_one() -> None:
    model = ConvNet((1, 8, 8), 2, width=4)
    centres = [model.init(seed) for seed in range(3)]
    far = [
        algebra.add(centre, model.init(9 + seed), 10.0 ** (seed - 1))
        for seed, centre in enumerate(centres)
    ]
    radius = torch.tensor([0.1, 3.0, 5.0])
    inside = vmap(balls.projected)(trees.stack(far), trees.stack(centres), radius)
    for client in range(3):
        projection = balls.projected(far[client], centres[client], radius[client])
        assert distance(projection, centres[client]) <= float(radius[client]) * 1.001
        for name in projection:
            torch.testing.assert_close(inside[name][client], projection[name])


def test_what_was_received_is_not_written_into() -> None:
    centre, weights = small(), small() | {"a.weight": torch.tensor([6.0, 4.0])}
    balls.projected(weights, centre, 1.0)
    assert weights["a.weight"].tolist() == [6, 4]
    assert centre["a.weight"].tolist() == [3, 0]
