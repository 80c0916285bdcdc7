"""Loops: minimize describes what an engine runs; the numbers are those of the recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import (
    SGD,
    Adam,
    Batch,
    Loop,
    Model,
    Weights,
    minimize,
    minimize_further,
    side_by_side,
)
from fedstill.core.errors import BadValue
from fedstill.core.loop import Descent, Several, overwriting
from fedstill.core.mechanism import Gradient
from fedstill.core.optim import Optimizer, scheduled
from fedstill.engines.engine import autograd_gradient, functional_gradient
from fedstill.models import MLP, ConvNet
from worlds import finished

MODEL = MLP((1,), 2, hidden=())


def parabola(model: Model, value: Tensor, batch: Tensor) -> Tensor:
    """½ (value - batch)²"""
    return (value - batch).square().sum() / 2


def test_minimising_a_parabola_halves_the_distance_at_every_step() -> None:
    batches = [torch.tensor(8.0)] * 3
    reached = finished(minimize(parabola, MODEL, torch.tensor(0.0), batches, SGD(0.5)))
    assert float(reached) == 8 - 8 / 2**3


def test_momentum_is_carried_from_step_to_step() -> None:
    batches = [torch.tensor(0.0)] * 2
    reached = finished(minimize(parabola, MODEL, torch.tensor(1.0), batches, SGD(0.1, 0.5)))
    first = 1 - 0.1 * 1
    assert float(reached) == pytest.approx(first - 0.1 * (0.5 * 1 + first))


@pytest.mark.parametrize("optimizer", [SGD(0.1, 0.5), Adam(0.1)])
def test_a_loop_that_goes_on_with_an_optimisers_memory_is_one_with_the_loop_before(
    optimizer: SGD | Adam,
) -> None:
    value = torch.tensor(1.0)
    batches = [torch.tensor(number) for number in (0.0, 3.0, -1.0, 2.0, 5.0)]
    memory = optimizer.start(value)
    for part in (batches[:2], [], batches[2:]):
        value, memory = finished(minimize_further(parabola, MODEL, value, memory, part, optimizer))
    whole = finished(minimize(parabola, MODEL, torch.tensor(1.0), batches, optimizer))
    assert torch.equal(value, whole)
    alone = finished(minimize(parabola, MODEL, torch.tensor(1.0), batches[:2], optimizer))
    anew = finished(minimize(parabola, MODEL, alone, batches[2:], optimizer))
    assert not torch.equal(anew, whole)


def test_without_batches_the_start_is_the_result() -> None:
    start = torch.tensor(3.0)
    assert finished(minimize(parabola, MODEL, start, [], SGD(0.5))) is start


def test_the_start_is_not_written_into() -> None:
    start = {"w": torch.tensor(3.0)}

    def objective(model: Model, value: Weights, batch: Tensor) -> Tensor:
        return value["w"] * batch

    reached = finished(minimize(objective, MODEL, start, [torch.tensor(1.0)], SGD(0.5)))
    assert (float(start["w"]), float(reached["w"])) == (3.0, 2.5)


def test_what_is_given_reaches_the_objective_by_name() -> None:
    def objective(model: Model, value: Tensor, batch: Tensor, grad: float, shift: Tensor) -> Tensor:
        return value * (grad + shift + batch)

    steps = minimize(
        objective, MODEL, torch.tensor(0.0), [torch.tensor(1.0)], SGD(1.0),
        grad=10.0, shift=torch.tensor(100.0),
    )  # fmt: skip
    assert float(finished(steps)) == -(10 + 100 + 1)


def test_the_projection_is_applied_after_every_step() -> None:
    def capped(value: Tensor, limit: float) -> Tensor:
        return value.clamp(max=limit)

    def objective(model: Model, value: Tensor, batch: Tensor, limit: float) -> Tensor:
        return -batch * value

    # 0 + 3 is capped to 2, then 2 - 1 = 1; capped once at the end it would be 3 - 1 = 2.
    batches = [torch.tensor(3.0), torch.tensor(-1.0)]
    steps = minimize(
        objective, MODEL, torch.tensor(0.0), batches, SGD(1.0), project=capped, limit=2.0
    )
    assert float(finished(steps)) == 1


def test_any_dict_of_tensors_can_be_optimised_and_keeps_its_order() -> None:
    def objective(model: Model, value: dict[str, Tensor], batch: Tensor) -> Tensor:
        return 2 * value["b"].sum() + 3 * value["a"].sum()

    start = {"b": torch.zeros(2), "a": torch.zeros(1)}
    reached = finished(minimize(objective, MODEL, start, [torch.tensor(0.0)], SGD(1.0)))
    assert list(reached) == ["b", "a"]
    assert (reached["b"].tolist(), reached["a"].tolist()) == ([-2, -2], [-3])


def picture_loss(model: Model, weights: Weights, batch: Batch) -> Tensor:
    return cross_entropy(model(weights, batch.x), batch.y)


def test_statistics_are_carried_and_not_optimised() -> None:
    model = ConvNet((1, 4, 4), 2, depth=1, width=2, norm="batch")
    start = model.init(0)
    x = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    batch = Batch(x, torch.tensor([0, 1] * 3))
    optimizer = SGD(0.1, momentum=0.9, weight_decay=0.5)
    steps = minimize(picture_loss, model, start, [batch], optimizer)
    reached = finished(steps)
    seen = torch.nn.functional.conv2d(x, start["conv0.weight"], start["conv0.bias"], padding=1)
    mean, var = seen.mean((0, 2, 3)), seen.var((0, 2, 3))
    assert torch.allclose(reached["norm0.running_mean"], 0.9 * 0 + 0.1 * mean)
    assert torch.allclose(reached["norm0.running_var"], 0.9 * 1 + 0.1 * var)
    assert list(reached) == list(start)
    assert not torch.equal(reached["norm0.weight"], start["norm0.weight"])


def test_statistics_that_nothing_renews_stay_as_they_are() -> None:
    def still(model: Model, weights: Weights, batch: Batch) -> Tensor:
        return picture_loss(model.evaluating, weights, batch)

    model = ConvNet((1, 4, 4), 2, depth=1, width=2, norm="batch")
    start = {**model.init(0), "norm0.num_batches_tracked": torch.tensor(5)}
    batch = Batch(torch.ones(2, 1, 4, 4), torch.tensor([0, 1]))
    optimizer = SGD(0.1, weight_decay=0.5)
    reached = finished(minimize(still, model, start, [batch] * 2, optimizer))
    for name in ("norm0.running_mean", "norm0.running_var", "norm0.num_batches_tracked"):
        assert torch.equal(reached[name], start[name])
    assert not torch.equal(reached["norm0.weight"], start["norm0.weight"])


def test_statistics_that_are_not_among_what_is_trained_are_refused_and_not_lost() -> None:
    def of_head(model: Model, head: Weights, batch: Batch, body: Weights) -> Tensor:
        return picture_loss(model, {**body, **head}, batch)

    model = ConvNet((1, 4, 4), 2, depth=1, width=2, norm="batch")
    body = model.init(0)
    head = {name: body[name] for name in model.head_names if name}
    batch = Batch(torch.ones(2, 1, 4, 4), torch.tensor([0, 1]))
    says = "of_head gave a batch to a norm layer whose statistics, norm0.running_mean, are not in"
    with pytest.raises(BadValue, match=says):
        finished(minimize(of_head, model, head, [batch], SGD(0.1), body=body))


def test_the_model_is_in_training_mode_inside_a_loop_only() -> None:
    modes = []

    def objective(model: Model, value: Tensor, batch: Tensor) -> Tensor:
        modes.append((model.training, model.evaluating.training))
        return value.sum()

    finished(minimize(objective, MODEL, torch.tensor(0.0), [torch.tensor(0.0)], SGD(1.0)))
    assert modes == [(True, False)]
    assert not MODEL.training


@dataclass(frozen=True)
class Owner:
    rate: float

    def objective(self, model: Model, value: Tensor, batch: Tensor) -> Tensor:
        return self.rate * value.sum()


def test_loops_of_equal_owners_do_the_same() -> None:
    def described(rate: float, model: Model = MODEL, lr: float = 0.1) -> Descent:
        return Descent(Owner(rate).objective, model, SGD(lr))

    same: Sequence[Descent] = [described(1.0), described(1.0)]
    assert same[0] == same[1] and hash(same[0]) == hash(same[1])
    wider = MLP((2,), 2, hidden=())
    others = [described(2.0), described(1.0, wider), described(1.0, lr=0.2)]
    assert all(same[0] != other for other in others)
    assert same[0] != Descent(Owner(1.0).objective, MODEL, SGD(0.1), project=abs)


async def doubled(start: float, times: int) -> float:
    """A number doubled in so many loops of one step."""
    value = torch.tensor(start)
    for _ in range(times):
        value = await Loop(lambda carry, *_: (2 * carry, carry), value, {}, [()])
    return float(value)


def test_works_side_by_side_return_in_their_order_however_many_loops_each_has() -> None:
    works = [doubled(1.0, 3), doubled(5.0, 0), doubled(1.0, 1)]
    assert finished(side_by_side(works)) == [8.0, 5.0, 2.0]


def test_works_side_by_side_wait_together() -> None:
    steps = side_by_side([doubled(1.0, 2), doubled(3.0, 1)])
    first = steps.send(None)
    assert isinstance(first, Several) and [float(loop.carry) for loop in first.loops] == [1.0, 3.0]
    second = steps.send([torch.tensor(2.0), torch.tensor(6.0)])
    assert [float(loop.carry) for loop in second.loops] == [2.0]
    with pytest.raises(StopIteration) as end:
        steps.send([torch.tensor(4.0)])
    assert end.value.value == [4.0, 6.0]


def test_nothing_side_by_side_is_nothing() -> None:
    assert finished(side_by_side([])) == []


def detached(model: Model, value: Tensor, batch: Tensor) -> Tensor:
    return parabola(model, value.detach(), batch)


def unreduced(model: Model, value: Tensor, batch: Tensor) -> Tensor:
    return (value - batch).square()


def in_numbers(model: Model, value: Tensor, batch: Tensor) -> Any:
    return 0.5


@pytest.mark.parametrize("gradient", [autograd_gradient, functional_gradient])
def test_a_loss_that_depends_on_nothing_trained_is_warned_of_and_moves_nothing(
    gradient: Gradient,
) -> None:
    step, start = Descent(detached, MODEL, SGD(0.5)), torch.tensor(2.0)
    with pytest.warns(UserWarning, match=r"^detached gave a loss that does not depend on what"):
        (reached, _), loss = step((start, SGD(0.5).start(start)), {}, torch.tensor(8.0), gradient)
    assert float(reached) == 2 and float(loss) == (8 - 2) ** 2 / 2


@pytest.mark.parametrize("gradient", [autograd_gradient, functional_gradient])
@pytest.mark.parametrize(
    ("objective", "said"),
    [
        (unreduced, r"^unreduced gave a tensor of shape \[3\]; a loss is one number"),
        (in_numbers, "^in_numbers gave a float; a loss is a tensor of one number$"),
    ],
)
def test_what_is_no_loss_is_refused_with_the_name_of_the_objective(
    objective: Any, said: str, gradient: Gradient
) -> None:
    step, start = Descent(objective, MODEL, SGD(0.5)), torch.zeros(3)
    with pytest.raises(BadValue, match=said):
        step((start, SGD(0.5).start(start)), {}, torch.ones(3), gradient)


@pytest.mark.parametrize(
    ("optimizer", "over"), [(SGD(0.5), True), (scheduled(SGD(0.5), 4, "cosine"), False)]
)
def test_only_a_plain_step_is_written_over_its_carry(optimizer: Optimizer, over: bool) -> None:
    """A falling rate goes part of the way between where a step came from and where it came to."""
    body = Descent(parabola, MODEL, optimizer)
    carry = (torch.tensor(0.0), optimizer.start(torch.tensor(0.0)))
    (plain, _), loss = body(carry, {}, torch.tensor(8.0), functional_gradient)
    assert float(carry[0]) == 0 and float(loss) == 32
    with overwriting(body):
        (moved, _), loss = body(carry, {}, torch.tensor(8.0), functional_gradient)
    assert float(moved) == float(plain) == 4 and float(loss) == 32
    assert float(carry[0]) == (4 if over else 0)


def test_a_loss_that_is_a_weight_is_told_as_it_was_before_the_step() -> None:
    def weight_itself(model: Model, value: Tensor, batch: Tensor) -> Tensor:
        return value

    body = Descent(weight_itself, MODEL, SGD(0.5))
    with overwriting(body):
        carry = (torch.tensor(3.0), ())
        (moved, _), loss = body(carry, {}, torch.tensor(0.0), functional_gradient)
    assert (float(loss), float(moved)) == (3.0, 2.5)


def test_a_step_within_a_step_keeps_where_it_began() -> None:
    """The outer step pulls its value to where an inner step comes from a common start."""
    inner = Descent(parabola, MODEL, SGD(0.5))

    def pulled(model: Model, value: Tensor, batch: Tensor, start: Tensor) -> Tensor:
        (reached, _), _ = inner((start, ()), {}, batch, functional_gradient)
        return (value - reached).square() / 2

    body, start = Descent(pulled, MODEL, SGD(1.0)), torch.tensor(2.0)
    with overwriting(body):
        (moved, _), _ = body(
            (torch.tensor(0.0), ()), {"start": start}, torch.tensor(8.0), functional_gradient
        )
    assert (float(moved), float(start)) == (5.0, 2.0)  # half of the way from 2 to 8


@dataclass(frozen=True)
class Blended:
    """Half of the way that another body goes: where a step came from is read after it."""

    inner: Descent

    def __call__(
        self, carry: tuple[Tensor, Any], given: Any, batch: Tensor, gradient: Gradient
    ) -> tuple[tuple[Tensor, Any], Tensor]:
        (reached, memory), loss = self.inner(carry, given, batch, gradient)
        return ((carry[0] + reached) / 2, memory), loss


def test_a_body_around_another_reads_where_the_step_came_from() -> None:
    body = Blended(Descent(parabola, MODEL, SGD(0.5)))
    with overwriting(body):
        (moved, _), _ = body((torch.tensor(0.0), ()), {}, torch.tensor(8.0), functional_gradient)
    assert float(moved) == 2.0  # half of 4


@pytest.mark.parametrize("gradient", [autograd_gradient, functional_gradient])
def test_a_weight_that_is_noted_is_noted_as_it_was_before_the_step(gradient: Gradient) -> None:
    def noting(model: Model, value: Weights, batch: Tensor) -> Tensor:
        assert model.notes is not None
        model.notes["running_mean"] = value["w"].detach()
        return value["w"] * batch

    body = Descent(noting, MODEL, SGD(0.5))
    start = {"w": torch.tensor(3.0), "running_mean": torch.tensor(0.0)}
    with overwriting(body):
        (moved, _), _ = body((start, ()), {}, torch.tensor(1.0), gradient)
    assert (float(moved["w"]), float(moved["running_mean"])) == (2.5, 3.0)
