"""One record moves what is released by at most the clip, whatever is in it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv2d, cross_entropy

from fedstill.core import Batch, Data, Lazy, Node
from fedstill.core.convolutions import by_example
from fedstill.core.errors import BadValue
from fedstill.core.release import (
    BITS,
    ClippedGradient,
    Sampled,
    Spending,
    Terms,
    class_sums,
    clipped,
    grid_of,
    noised,
)
from fedstill.core.secret import Secret
from fedstill.engines.engine import autograd_gradient
from fedstill.models import ConvNet
from fedstill.models.mlp import MLP
from fedstill.parts.distribution_matching import Iteration, Matching
from fedstill.parts.learning import private_training
from fedstill.parts.published import ClippedClasses, ClippedGroups, Noised, published
from fedstill.parts.released import Releasing
from fedstill.parts.synthetic_sets import from_noise
from worlds import finished

numbers = st.floats(-1e6, 1e6, width=32) | st.sampled_from(
    [0.0, math.inf, -math.inf, math.nan, 1e30, -1e30, 3e38]
)
seeds = st.integers(0, 2**31 - 1)
FINE = torch.tensor(2.0**-40, dtype=torch.float64)  # a grid that rounds nothing that is seen


def rows(seed: int, count: int, width: int, scale: float) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * scale


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seeds, st.integers(1, 20), st.integers(1, 30), st.floats(1e-3, 1e4), st.floats(1e-2, 1e2),
       st.data())  # fmt: skip
def test_without_one_record_all_class_sums_together_move_by_at_most_the_clip(
    seed: int, count: int, width: int, scale: float, clip: float, data: st.DataObject
) -> None:
    x, place = rows(seed, count, width, scale), torch.arange(count) % 3
    odd = data.draw(st.lists(numbers, min_size=width, max_size=width))
    x[data.draw(st.integers(0, count - 1))] = torch.tensor(odd)
    rest = torch.arange(count) != data.draw(st.integers(0, count - 1))
    grid = grid_of(clip, clip)
    moved = class_sums(x, place, 3, clip, grid) - class_sums(x[rest], place[rest], 3, clip, grid)
    assert torch.isfinite(moved).all() and torch.equal(moved, moved.round())
    assert moved.norm() <= clip / grid
    moved = moved * grid
    assert (moved.abs().sum(1) > 1e-9 * clip).sum() <= 1  # one class alone


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seeds, st.integers(2, 12), st.floats(1e-2, 1e2))
def test_another_record_moves_sums_by_twice_the_clip_and_with_another_label_by_less(
    seed: int, count: int, clip: float
) -> None:
    x, place = rows(seed, count, 8, 10.0), torch.arange(count) % 3
    other, elsewhere = x.clone(), place.clone()
    other[0], elsewhere[0] = -x[0] * 7, (place[0] + 1) % 3
    grid = clip * 2.0**-40
    before = class_sums(x, place, 3, clip, grid)
    moved = (before - class_sums(other, elsewhere, 3, clip, grid)).norm() * grid
    assert moved <= math.sqrt(2) * clip * (1 + 1e-9)  # two blocks at right angles
    assert (before - class_sums(other, place, 3, clip, grid)).norm() * grid <= 2 * clip * (1 + 1e-9)


def sealed(model: ConvNet, data: Data, terms: Terms) -> Node[None]:
    node: Node[None] = Node("c0", 1, None, model=model, data=data)
    row = Spending(1, "", "c0", "class sums", terms.sigma, 1.0, 1)
    node.seal(terms, lambda round, step, use, earlier: row)
    return node


class One:
    """Noise of exactly one deviation everywhere, and some steps of the grid more."""

    def __init__(self, more: int = 0):
        self.more = more

    def whole(self, into: Tensor, bits: int) -> Tensor:
        return torch.full_like(into, 2**bits + self.more, dtype=torch.long)


@pytest.mark.parametrize("outputs", ["stages", "stages and logits", "both", "features"])
@pytest.mark.parametrize("deep_first", [False, True])
def test_blocks_that_are_clipped_by_themselves_cost_one_release_together(
    outputs: Any, deep_first: bool
) -> None:
    model = ConvNet((1, 8, 8), 3, depth=2, width=4)  # stages of 4x4x4 = 64 and 4x2x2 = 16 numbers
    data = Data.of(torch.zeros(6, 1, 8, 8), torch.arange(6) % 3)
    node = sealed(model, data, Terms(0.5, 1.0, 6, 1.5, None))
    matching = Matching(12, outputs=outputs, deep_first=deep_first)
    start = from_noise(node, [0, 1], 2)
    releasing = Releasing(matching, node, start, lambda _: model.init(0), None)
    sizes, clips = releasing.blocks
    assert (sizes, clips) == {
        "stages": ((64, 16), (1.0, 0.5)),  # lengths grow with the root of the number
        "stages and logits": ((64, 19), (1.0, 0.5)),
        "both": ((19,), (0.5,)),
        "features": ((16,), (0.5,)),
    }[outputs]
    releasing.sums = torch.zeros(6, 2, sum(sizes), dtype=torch.float64)
    releasing.secret = One()  # type: ignore[assignment]
    for release, noise in enumerate(releasing.noisy):
        assert torch.equal(noise[0], noise[1])
        counted = releasing.wide(release).bool()
        assert torch.equal(noise[0] > 0, counted), "what is not released has no noise either"
        parts = zip(torch.split(noise[0], sizes), torch.split(counted, sizes), clips, strict=True)
        told = [(float(part[on][0]), clip) for part, on, clip in parts if on.any()]
        # A record moves each block by its clip at most: in units of the noise, 1/1.5 in all.
        assert sum((clip / deviation) ** 2 for deviation, clip in told) == pytest.approx(1 / 1.5**2)


def test_noise_of_sums_is_added_to_its_last_bit() -> None:
    """Were it rounded, the last bits of what is released would be those of the sums."""
    model = ConvNet((1, 8, 8), 3, depth=2, width=4)
    data = Data.of(torch.zeros(6, 1, 8, 8), torch.arange(6) % 3)
    node = sealed(model, data, Terms(0.5, 1.0, 2, 1.5, None))
    releasing = Releasing(
        Matching(4), node, from_noise(node, [0, 1], 2), lambda _: model.init(0), None
    )
    for more in (1, 2, 3):
        releasing.sums = torch.full((2, 2, sum(releasing.sizes)), 4.0, dtype=torch.float64)
        releasing.secret = One(more)  # type: ignore[assignment]
        assert set((releasing.noisy / releasing.grids).flatten().tolist()) == {2**BITS + more + 4}
        del releasing.noisy


@pytest.mark.parametrize("outputs", ["both", "stages"])
def test_without_noise_or_clip_sets_are_matched_to_the_means_of_the_records(outputs: Any) -> None:
    model = ConvNet((1, 8, 8), 3, depth=2, width=4)
    x, y = (
        rows(0, 11, 64, 1.0).reshape(11, 1, 8, 8),
        torch.tensor([0, 2, 0, 0, 2, 1, 0, 2, 2, 0, 2]),
    )
    node = sealed(model, Data.of(x, y), Terms(1e6, 1.0, 2, 0.0, None))
    networks = [model.init(seed) for seed in (3, 4)]
    matching = Matching(4, outputs=outputs, augmentation="none")
    releasing = Releasing(matching, node, from_noise(node, [0, 2], 3), networks.__getitem__, None)
    finished(releasing.summed())
    # What records are compared with before they are clipped: the means of the set so far.
    made = model.features(networks[1], releasing.start.images.flatten(0, 1)).reshape(2, 3, -1)
    at = slice(-made.shape[-1], None) if outputs == "stages" else slice(made.shape[-1])
    assert torch.allclose(releasing.centre(1)[:, at], made.mean(1), atol=1e-6)
    for update in range(4):
        network, found = networks[update % 2], releasing.aim(update)
        stages = [stage.flatten(1) for stage in model.stages(network, x)]
        seen = stages if outputs == "stages" else [stages[-1], model(network, x)]
        for target, out in zip(found.targets, seen, strict=True):
            means = torch.stack([out[y == c].mean(0) for c in (0, 2)])
            assert torch.allclose(target, means, atol=1e-5)


def test_from_the_deep_end_every_step_uses_a_release_of_its_part() -> None:
    model = ConvNet((1, 8, 8), 3, depth=2, width=4)  # two stages
    data = Data.of(torch.zeros(6, 1, 8, 8), torch.arange(6) % 3)
    node = sealed(model, data, Terms(1.0, 1.0, 5, 0.0, None))
    networks = [model.init(seed) for seed in range(5)]
    matching = Matching(12, outputs="stages", deep_first=True, augmentation="none")
    releasing = Releasing(matching, node, from_noise(node, [0, 1], 2), networks.__getitem__, None)
    finished(releasing.summed())
    used = []
    for update in range(12):
        aim = releasing.aim(update)
        assert aim.emphasis.tolist() == matching.emphasis(update, 2)
        used += [place for place, network in enumerate(networks) if aim.network is network]
    # Of five releases three see the last stage alone, two both; each part has six steps.
    assert used == [0, 1, 2] * 2 + [3, 4] * 3


@pytest.mark.parametrize(
    ("norm", "releases", "said"),
    [
        ("static", 2, "answers by the whole batch, so records mix before they are clipped"),
        ("instance", 1, "privacy.releases = 1, but 2 outputs are matched one after the other"),
        ("instance", 9, "privacy.releases = 9, but there are 8 steps that could use them"),
    ],
)
def test_sums_that_would_not_be_private_or_not_be_used_are_refused(
    norm: Any, releases: int, said: str
) -> None:
    model = ConvNet((1, 8, 8), 3, depth=2, width=4, norm=norm)  # two stages
    data = Data.of(torch.zeros(6, 1, 8, 8), torch.arange(6) % 3)
    node = sealed(model, data, Terms(1.0, 1.0, releases, 1.0, None))
    matching = Matching(8, outputs="stages", deep_first=True)
    with pytest.raises(BadValue, match=said):
        Releasing(matching, node, from_noise(node, [0, 1], 2), lambda _: model.init(0), None)


def test_in_a_sweep_all_updates_of_a_step_use_one_release_from_the_deep_end_on() -> None:
    model = ConvNet((1, 8, 8), 3, depth=2, width=4)  # two stages
    data = Data.of(torch.zeros(6, 1, 8, 8), torch.arange(6) % 3)
    node = sealed(model, data, Terms(1.0, 1.0, 3, 0.0, None))
    networks = [model.init(seed) for seed in range(3)]
    matching = Matching(4, outputs="stages", deep_first=True, sweep=True, augmentation="none")
    releasing = Releasing(matching, node, from_noise(node, [0, 1], 2), networks.__getitem__, None)
    finished(releasing.summed())
    aims = [releasing.aim(update) for update in range(matching.updates(model))]
    assert [aim.emphasis.tolist() for aim in aims] == [[0, 1], [1, 1]] * 4
    used = [place for aim in aims for place, one in enumerate(networks) if aim.network is one]
    assert used == [0, 0, 1, 1, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("grouped", "deviation"), [(False, 3 * 0.5 / 40), (True, 3 * 0.5 * 5 / 40)]
)
def test_the_papers_add_noise_over_what_they_clip_of_a_batch(
    grouped: bool, deviation: float
) -> None:
    """Of a batch of 40: records, or groups of as many as a class has images, here five."""
    model = ConvNet((1, 8, 8), 3, depth=2, width=4)
    terms = Terms(0.5, 1.0, 1, 3.0, None, paper=True, grouped=grouped)
    node = sealed(model, Data.of(torch.zeros(6, 1, 8, 8), torch.arange(6) % 3), terms)
    steps: Lazy[Any] = Lazy(2, lambda step: step)
    made, mechanism = published(node, steps, torch.zeros(3, 5, 1, 8, 8), 40)
    assert mechanism == (ClippedGroups(0.5, 5) if grouped else ClippedClasses(0.5))
    first, second = made[0], made[1]
    assert (first.step, second.step) == (0, 1)
    assert not torch.equal(first.noise, second.noise)
    assert float(first.noise.std()) == pytest.approx(deviation, rel=0.1)
    assert abs(float(first.noise.mean())) < deviation / 5


def test_a_short_row_stays_as_it_is_and_a_long_one_keeps_its_direction() -> None:
    x = torch.tensor([[0.6, 0.8], [30.0, 40.0], [math.nan, 1.0], [math.inf, 0.0], [3e30, 4e30]])
    kept = clipped(x, 5.0)
    want = torch.tensor([[0.6, 0.8], [3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0]])
    torch.testing.assert_close(kept, want.double(), rtol=1e-6, atol=1e-12)


def test_a_record_without_a_place_counts_nowhere() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    sums = class_sums(x, torch.tensor([1, -1]), 2, 9.0, 0.5)
    assert sums.tolist() == [[0.0, 0.0], [1.0, 0.0]]  # rounded towards zero


def linear(batch: Batch) -> Any:
    def scored(value: Any) -> tuple[Tensor, Any]:
        return cross_entropy(batch.x @ value["a"].T + value["b"], batch.y), {}

    return scored


def step(x: Tensor, y: Tensor, share: Tensor, clip: float, chunk: int = 4) -> Tensor:
    """The gradient without noise, as one vector."""
    rng = torch.Generator().manual_seed(1)
    value = {"a": torch.randn(3, 4, generator=rng), "b": torch.randn(3, generator=rng)}
    nothing = {name: torch.zeros_like(tensor) for name, tensor in value.items()}
    mechanism = ClippedGradient(clip, chunk)
    sampled = Sampled(Batch(x, y), share, nothing, FINE)
    grad, loss, notes = mechanism.gradient(linear, value, sampled, autograd_gradient)
    assert float(loss) == 0 and notes == {}
    return torch.cat([grad[name].flatten() for name in value]).double()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seeds, st.floats(1e-3, 10), st.floats(1e-2, 1e4),
       st.lists(numbers, min_size=4, max_size=4))  # fmt: skip
def test_one_example_moves_a_private_gradient_by_at_most_the_clip(
    seed: int, clip: float, scale: float, odd: list[float]
) -> None:
    x, y = rows(seed, 6, 4, scale), torch.arange(6) % 3
    x[seed % 5] = torch.tensor(odd)
    out = torch.ones(6)
    out[seed % 6] = 0
    moved = step(x, y, torch.ones(6), clip) - step(x, y, out, clip)
    assert torch.isfinite(moved).all()
    assert moved.norm() <= clip * (1 + 1e-5)  # in the weights' single precision


def convolved(batch: Batch) -> Any:
    def scored(value: Any) -> tuple[Tensor, Any]:
        maps = conv2d(batch.x.view(-1, 1, 2, 2), value["a"], value["b"], padding=1)
        return cross_entropy(maps.relu().flatten(1)[:, :3], batch.y), {}

    return scored


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seeds, st.floats(1e-3, 10), st.lists(numbers, min_size=4, max_size=4))
def test_one_image_moves_the_gradient_of_a_convolution_by_at_most_the_clip(
    seed: int, clip: float, odd: list[float]
) -> None:
    x, y = rows(seed, 6, 4, 1.0), torch.arange(6) % 3
    x[seed % 5] = torch.tensor(odd)
    value = {"a": rows(1, 2, 9, 1.0).view(2, 1, 3, 3), "b": torch.zeros(2)}
    nothing = {name: torch.zeros_like(tensor) for name, tensor in value.items()}
    out = torch.ones(6)
    out[seed % 6] = 0
    found = []
    with by_example():  # as on a GPU: products of matrices
        for share in (torch.ones(6), out):
            sampled = Sampled(Batch(x, y), share, nothing, FINE)
            grad, _, _ = ClippedGradient(clip, 4).gradient(
                convolved, value, sampled, autograd_gradient
            )
            found.append(torch.cat([grad["a"].flatten(), grad["b"]]).double())
    moved = found[0] - found[1]
    assert torch.isfinite(moved).all()
    assert moved.norm() <= clip * (1 + 1e-5)


def test_an_empty_place_and_a_missing_example_are_the_same_for_a_private_gradient() -> None:
    x, y, share = rows(0, 8, 4, 1.0), torch.arange(8) % 3, torch.full((8,), 0.125)
    rest = torch.arange(8) != 3
    empty = torch.where(rest, share, 0.0)
    torch.testing.assert_close(step(x, y, empty, 0.3), step(x[rest], y[rest], share[rest], 0.3))


def test_how_many_gradients_are_made_at_a_time_does_not_matter() -> None:
    x, y, share = rows(0, 7, 4, 1.0), torch.arange(7) % 3, torch.full((7,), 1 / 7)
    torch.testing.assert_close(step(x, y, share, 0.3, chunk=2), step(x, y, share, 0.3, chunk=64))


def paper_gradient(records: Tensor, clip: float) -> Tensor:
    """FedDM, algorithm 2: an embedding that is the identity, one synthetic image at zero."""
    gradient = -2 * records.mean(0)
    return gradient / max(1.0, float(gradient.norm()) / clip)


def paper_sensitivity(count: int = 256, width: int = 50, clip: float = 5.0) -> float:
    x = rows(0, count, width, 0.01) + torch.eye(width)[0] * 5
    far = torch.eye(width)[:1] * -1e4
    return float((paper_gradient(torch.cat([x, far]), clip) - paper_gradient(x, clip)).norm())


def test_the_papers_clip_of_a_batch_gradient_lets_one_record_turn_it_round() -> None:
    # The noise has deviation sigma * clip / 256; the record moves the gradient by twice the clip.
    assert paper_sensitivity() == pytest.approx(10.0, rel=1e-3)


@pytest.mark.xfail(strict=True, reason="the papers' mechanism is not private")
def test_the_papers_mechanism_obeys_the_bound_that_its_noise_supposes() -> None:
    assert paper_sensitivity(256, clip=5.0) <= 5.0 / 256 * (1 + 1e-4)


def grouped(records: list[list[float]], size: int, clip: float) -> list[float]:
    """DeSA's code on one class: an embedding that is the identity, one synthetic image at zero."""
    real = torch.tensor([records])
    share = torch.full(real.shape[:2], 1 / len(records))

    def loss_on(step: Any) -> Any:
        mean = (step.real * step.share.unsqueeze(2)).sum(1)
        return lambda image: ((image - mean).square().sum(), {})

    step = Iteration(real, share, {}, torch.ones(1), None, "none")  # type: ignore[arg-type]
    image = torch.zeros(1, 2)
    batch = Noised(step, torch.zeros_like(image))
    found, _, _ = ClippedGroups(clip, size).gradient(loss_on, image, batch, autograd_gradient)
    return [round(number, 6) for number in found.flatten().tolist()]


def test_desas_code_clips_groups_of_records_and_takes_their_mean() -> None:
    # Means of the groups (3, 4) and (0, 0.05): gradients (-6, -8), cut to length 5, and (0, -0.1).
    found = grouped([[3, 4], [3, 4], [0, 0], [0, 0.1]], 2, 5.0)
    assert found == [-3 / 2, round((-4 - 0.1) / 2, 6)]


def test_one_record_more_moves_others_into_other_groups_of_desas_code() -> None:
    # Groups (2, -2), (4, -4), (6, -6), (8, -8) say nothing. With one record before them they are
    # (0, 2), (-2, 4), (-4, 6), (-6, 8), (-8): means of 1 four times and of -8, gradients cut to
    # length 1. So the sum of the five, where the noise supposes 1, has moved by 4 - 1 = 3.
    records = [[sign * number, 0.0] for number in (2.0, 4.0, 6.0, 8.0) for sign in (1, -1)]
    assert grouped(records, 2, 1.0) == [0.0, 0.0]
    assert grouped([[0.0, 0.0], *records], 2, 1.0) == [-3 / 5, 0.0]


def whole_multiples(released: Tensor, grid: float) -> bool:
    """Whether numbers of at most some million steps of the grid are whole multiples of it."""
    steps = released.double() / grid
    near = steps[steps.abs() < 2**21]
    assert len(near) > 50
    return bool((near - near.round()).abs().max() < 0.1)


@pytest.mark.parametrize("there", [0.0, 1.0])
def test_the_last_bits_of_a_private_gradient_do_not_tell_whether_a_record_is_in_it(
    there: float,
) -> None:
    """Sums of floating-point numbers near 0 have bits that depend on what was added."""
    data = Data.of(torch.full((1, 1), there), torch.zeros(1, dtype=torch.long))
    model = MLP((1,), 2, hidden=(4000,))
    node: Node[None] = Node("c0", 1, None, model=model, data=data, key=b"k" * 32)
    row = Spending(1, "", "c0", "DP-SGD", 1.0, 1.0, 1)
    node.seal(Terms(1.0, 1.0, 1, 1.0, None), lambda round, step, use, earlier: row)
    weights = model.init(0)
    (sample,), mechanism = private_training(node, model, weights, 1, steps=1)
    assert mechanism is not None

    def loss_on(batch: Batch) -> Any:
        return lambda value: (cross_entropy(model(value, batch.x), batch.y), {})

    gradient, _, _ = mechanism.gradient(loss_on, weights, sample, autograd_gradient)
    every = torch.cat([gradient[name].flatten() for name in sample.noise])
    assert float(every.std()) == pytest.approx(1, rel=0.05)
    assert whole_multiples(every, float(sample.grid))


@pytest.mark.parametrize("there", [0.0, 1.0])
def test_the_last_bits_of_private_sums_do_not_tell_whether_a_record_is_in_them(
    there: float,
) -> None:
    rows = torch.full((1, 20_000), there)
    sums = class_sums(rows, torch.zeros(1, dtype=torch.long), 1, 9.0, grid_of(9.0, 9.0))
    noise = Secret(b"k" * 32).whole(torch.empty(sums.shape), BITS)
    assert whole_multiples(noised(sums, noise, grid_of(9.0, 9.0)), grid_of(9.0, 9.0))


def sample_of(sigma: float) -> Sampled:
    """Of a small network, with a clip of 0.5 and 10 of 20 examples expected."""
    model = MLP((4,), 3, hidden=(50,))
    data = Data.of(torch.zeros(20, 4), torch.arange(20) % 3)
    node: Node[None] = Node("c0", 1, None, model=model, data=data)
    row = Spending(1, "", "c0", "DP-SGD", sigma, 0.5, 1)
    node.seal(Terms(1.0, 0.5, 1, sigma, None), lambda round, step, use, earlier: row)
    sample: Sampled = private_training(node, model, model.init(0), 10, steps=1).batches[0]
    return sample


def test_an_example_weighs_less_by_what_rounding_adds() -> None:
    """Both gradients are rounded, each number by half a step: together a step's root of them."""
    sample = sample_of(2.0)
    numbers = sum(steps.numel() for steps in sample.noise.values())
    share, grid = float(sample.share.double().max()), float(sample.grid)
    assert grid == pytest.approx(2.0 * 0.5 / 10 * 2.0**-BITS)
    assert share * 0.5 + grid * math.sqrt(numbers) == pytest.approx(0.5 / 10, rel=1e-7)
    assert share < 1 / 10


def test_an_example_weighs_nothing_where_rounding_alone_is_all_that_it_may_move() -> None:
    assert float(sample_of(2.0**23).share.abs().max()) == 0  # 403 numbers: root 20.07
    assert float(sample_of(2.0**21).share.max()) > 0
