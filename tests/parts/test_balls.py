"""Balls: the radius is exact where it binds, and nothing moves where it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedstill.core import algebra, trees
from fedstill.core.records import Weights
from fedstill.core.seeds import generator
from fedstill.models.convnet import ConvNet
from fedstill.parts import balls


def distance(left: Weights, right: Weights) -> float:
    steps = algebra.sub(algebra.parameters(left), algebra.parameters(right))
    return float(torch.cat([step.double().flatten() for step in steps.values()]).norm())


def large() -> Weights:
    return ConvNet((3, 32, 32), 10, norm="batch").init(0)


def small() -> Weights:
    return {"a.weight": torch.tensor([3.0, 0.0]), "a.running_mean": torch.tensor([7.0])}


def test_a_draw_for_many_parameters_lies_on_the_sphere() -> None:
    centre = large()
    for radius in (0.5, 5.0, 10.0):
        moved = balls.on_sphere(centre, balls.direction(generator(0), centre), radius)
        assert distance(moved, centre) == pytest.approx(radius, rel=1e-4)


def test_one_norm_is_taken_over_all_parameters_together() -> None:
    centre = large()
    delta = balls.direction(generator(0), centre)
    moved = balls.on_sphere(centre, delta, 5.0)
    for name in ("conv0.weight", "head.bias"):
        step = moved[name] - centre[name]
        ratio = step / delta[name]
        assert ratio.mean() == pytest.approx(5.0 / 320_010**0.5, rel=0.01)


def test_a_draw_shorter_than_the_radius_is_taken_as_it_is() -> None:
    delta = {"a.weight": torch.tensor([0.6, 0.8])}
    moved = balls.on_sphere(small(), delta, 2.0)
    assert torch.equal(moved["a.weight"], torch.tensor([3.6, 0.8]))
    assert balls.on_sphere(small(), delta, 0.5)["a.weight"].tolist() == pytest.approx([3.3, 0.4])


def test_statistics_are_neither_measured_nor_moved() -> None:
    far = {"a.weight": torch.tensor([0.6, 0.8]), "a.running_mean": torch.tensor([1000.0])}
    assert balls.on_sphere(small(), far, 2.0)["a.running_mean"].item() == 7
    assert torch.equal(balls.on_sphere(small(), far, 2.0)["a.weight"], torch.tensor([3.6, 0.8]))
    weights = {"a.weight": torch.tensor([3.0, 1.0]), "a.running_mean": torch.tensor([1000.0])}
    assert torch.equal(balls.projected(weights, small(), 2.0)["a.weight"], weights["a.weight"])
    assert balls.projected(weights, small(), 2.0)["a.running_mean"].item() == 1000


def test_a_direction_is_standard_normal_for_every_trainable_parameter() -> None:
    centre = large()
    delta = balls.direction(generator(1), centre)
    assert delta.keys() == algebra.parameters(centre).keys()
    entries = torch.cat([tensor.flatten() for tensor in delta.values()])
    assert entries.numel() == 320_010
    assert abs(entries.mean()) < 4 / 320_010**0.5
    assert abs(entries.var() - 1) < 4 * (2 / 320_010) ** 0.5
    assert torch.equal(balls.direction(generator(1), centre)["head.bias"], delta["head.bias"])


def test_projection_is_onto_the_nearest_point_of_the_ball() -> None:
    weights = small() | {"a.weight": torch.tensor([6.0, 4.0])}  # (3, 4) away: a distance of 5
    assert balls.projected(weights, small(), 1.0)["a.weight"].tolist() == pytest.approx([3.6, 0.8])
    assert torch.equal(balls.projected(weights, small(), 5.0)["a.weight"], weights["a.weight"])
    assert torch.equal(balls.projected(weights, small(), 0.0)["a.weight"], small()["a.weight"])


def test_projecting_twice_is_projecting_once() -> None:
    centre = large()
    far = balls.on_sphere(centre, balls.direction(generator(2), centre), 20.0)
    once = balls.projected(far, centre, 5.0)
    assert distance(once, centre) == pytest.approx(5.0, rel=1e-4)
    twice = balls.projected(once, centre, 5.0)
    assert distance(once, twice) < 1e-4


def test_at_the_centre_there_is_no_division_by_zero() -> None:
    def moved(weights: Weights) -> Tensor:
        return balls.projected(weights, small(), 2.0)["a.weight"].sum()

    assert torch.equal(balls.projected(small(), small(), 2.0)["a.weight"], small()["a.weight"])
    assert grad(moved)(small())["a.weight"].tolist() == [1, 1]
    still = {"a.weight": torch.zeros(2)}
    slope = grad(lambda d: balls.on_sphere(small(), d, 2.0)["a.weight"].sum())(still)
    assert slope["a.weight"].tolist() == [1, 1]


def test_clients_batched_together_equal_clients_one_by_one() -> None:
    model = ConvNet((1, 8, 8), 2, width=4)
    centres = [model.init(seed) for seed in range(3)]
    deltas = [
        algebra.scale(balls.direction(generator(seed), centres[seed]), 10.0 ** (seed - 2))
        for seed in range(3)
    ]
    radius = torch.tensor([0.1, 3.0, 5.0])
    spheres = vmap(balls.on_sphere)(trees.stack(centres), trees.stack(deltas), radius)
    inside = vmap(lambda w, c: balls.projected(w, c, 1.0))(spheres, trees.stack(centres))
    for client in range(3):
        sphere = balls.on_sphere(centres[client], deltas[client], radius[client])
        projection = balls.projected(sphere, centres[client], 1.0)
        for name in sphere:
            torch.testing.assert_close(spheres[name][client], sphere[name])
            torch.testing.assert_close(inside[name][client], projection[name])


def test_what_was_received_is_not_written_into() -> None:
    centre, weights = small(), small() | {"a.weight": torch.tensor([6.0, 4.0])}
    balls.projected(weights, centre, 1.0)
    assert weights["a.weight"].tolist() == [6, 4]
    assert centre["a.weight"].tolist() == [3, 0]
