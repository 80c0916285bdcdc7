"""Augmentation: each operation by its written definition, and what batching may not change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from fedstill.core import trees
from fedstill.core.errors import BadValue
from fedstill.core.seeds import generator
from fedstill.parts import augment
from fedstill.parts.augment import DEFAULT, OPERATIONS, Draws, Mode

SIZE = (12, 16)
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def images(groups: int = 3, count: int = 2, channels: int = 3, name: int = 0) -> Tensor:
    return torch.randn(groups, count, channels, *SIZE, generator=generator(3, name))


def drawn(strategy: str, name: int = 0, *, mode: Mode = "single", **options: int | bool) -> Draws:
    rng = generator(4, name)
    return augment.draw(rng, strategy, groups=3, image=SIZE, mode=mode, **options)  # type: ignore[arg-type]


def many(strategy: str, image: tuple[int, int] = SIZE) -> Draws:
    return augment.draw(generator(5), strategy, groups=4000, image=image)


def sampled(image: Tensor, matrix: list[list[float]]) -> Tensor:
    """One image [channel, height, width] through the framework's affine sampling."""
    grid = F.affine_grid(torch.tensor([matrix]), [1, *image.shape], align_corners=False)
    out = F.grid_sample(image[None], grid, padding_mode="zeros", align_corners=False)
    return out[0]


def by_definition(image: Tensor, operation: str, numbers: list[float]) -> Tensor:
    """One image after one operation, written as plainly as BB-3 says it."""
    height, width = image.shape[1:]
    if operation == "color":
        brightness, saturation, contrast = numbers
        image = image + brightness
        grey = image.mean(0, keepdim=True)
        image = (image - grey) * saturation + grey
        return (image - image.mean()) * contrast + image.mean()
    if operation == "crop":
        out = torch.zeros_like(image)
        for row in range(height):
            for column in range(width):
                source = row + int(numbers[0]), column + int(numbers[1])
                if 0 <= source[0] < height and 0 <= source[1] < width:
                    out[:, row, column] = image[:, source[0], source[1]]
        return out
    if operation == "cutout":
        top, bottom, left, right = map(int, numbers)
        out = image.clone()
        out[:, top:bottom, left:right] = 0
        return out
    if operation == "flip":
        return image.flip(2) if numbers[0] == -1 else image
    if operation == "scale":
        return sampled(image, [[numbers[1], 0, 0], [0, numbers[0], 0]])
    cosine, sine, ratio = math.cos(numbers[0]), math.sin(numbers[0]), height / width
    return sampled(image, [[cosine, -sine * ratio, 0], [sine / ratio, cosine, 0]])


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_an_operation_does_what_its_definition_says(operation: str, channels: int) -> None:
    x = images(channels=channels)
    for name in range(4):
        draws = drawn(operation, name)
        out = augment.apply(x, draws)
        exact = operation in ("crop", "cutout", "flip")
        for group in range(3):
            numbers = getattr(draws, operation)[group].tolist()
            for image in range(2):
                expected = by_definition(x[group, image], operation, numbers)
                if exact:
                    assert torch.equal(out[group, image], expected)
                else:
                    torch.testing.assert_close(out[group, image], expected, atol=2e-5, rtol=1e-4)


def test_multi_applies_all_operations_in_the_listed_order() -> None:
    x = images()
    for name in range(4):
        draws = drawn("rotate_scale_flip_cutout_crop_color", name, mode="multi")
        assert (draws.operation == -1).all()
        for group in range(3):
            expected = x[group, 1]
            for operation in OPERATIONS:
                numbers = getattr(draws, operation)[group].tolist()
                expected = by_definition(expected, operation, numbers)
            out = augment.apply(x, draws)[group, 1]
            torch.testing.assert_close(out, expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("strategy", ["", "none"])
@pytest.mark.parametrize("mode", ["single", "multi"])
def test_no_strategy_changes_no_bit(strategy: str, mode: Mode) -> None:
    x = images()
    assert torch.equal(augment.apply(x, drawn(strategy, mode=mode)), x)
    assert torch.equal(augment.apply(x, drawn(strategy, mode=mode), only=strategy), x)


def test_a_group_is_changed_alike_in_the_real_and_in_the_synthetic_call() -> None:
    x, other = images(), images(count=5, name=1)
    other[:, 3] = x[:, 0]
    for mode in ("single", "multi"):
        draws = drawn(DEFAULT, mode=mode, op_per_group=True)
        first, second = augment.apply(x, draws)[:, 0], augment.apply(other, draws)[:, 3]
        torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-6)


def test_images_of_a_classifier_have_parameters_of_their_own() -> None:
    x = images(count=4)
    x[:] = x[:1, :1]
    draws = drawn("scale", per_image=4)
    assert draws.scale.shape == (3, 4, 2)
    out = augment.apply(x, draws).flatten(0, 1)
    for image in range(12):
        numbers = draws.scale.flatten(0, 1)[image].tolist()
        expected = by_definition(x[0, 0], "scale", numbers)
        torch.testing.assert_close(out[image], expected, atol=2e-5, rtol=1e-4)
    assert len({tuple(row) for row in draws.scale.flatten(0, 1).tolist()}) == 12


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_hint_changes_no_bit(operation: str) -> None:
    x = images()
    for name in range(3):
        draws = drawn(operation, name)
        hinted = augment.apply(x, draws, only=operation)
        assert torch.equal(hinted, augment.apply(x, draws))
        assert torch.equal(hinted, augment.apply(x, draws, only=DEFAULT))


@pytest.mark.parametrize("mode", ["single", "multi"])
@pytest.mark.parametrize("per_image", [None, 2])
def test_clients_batched_together_equal_clients_one_by_one(
    mode: Mode, per_image: int | None
) -> None:
    draws = [drawn(DEFAULT, name, mode=mode, per_image=per_image) for name in range(9)]  # type: ignore[arg-type]
    if mode == "single":
        assert len({int(draw.operation[0]) for draw in draws}) > 3
    x = torch.stack([images(name=name) for name in range(9)])
    target = images(name=20)

    def loss(x: Tensor, draws: Draws) -> Tensor:
        return (augment.apply(x, draws) - target).square().sum()

    values = vmap(augment.apply)(x, trees.stack(draws))
    slopes = vmap(grad(loss))(x, trees.stack(draws))
    for client in range(9):
        alone = augment.apply(x[client], draws[client])
        torch.testing.assert_close(values[client], alone, atol=1e-5, rtol=1e-5)
        slope = grad(loss)(x[client], draws[client])
        torch.testing.assert_close(slopes[client], slope, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_gradient_agrees_with_finite_differences(operation: str) -> None:
    x = images(count=1)[:, :, :, :6, :7].double().requires_grad_()
    draws = augment.draw(generator(6), operation, groups=3, image=(6, 7))
    assert torch.autograd.gradcheck(lambda x: augment.apply(x, draws), (x,), fast_mode=True)


def test_the_dtype_of_the_images_is_kept() -> None:
    draws = drawn(DEFAULT, mode="multi")
    for dtype in (torch.bfloat16, torch.float64):
        out = augment.apply(images().to(dtype), draws)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), augment.apply(images(), draws), atol=0.1, rtol=0.05)


def test_color_is_drawn_by_its_laws() -> None:
    brightness, saturation, contrast = many("color").color.unbind(-1)
    for value, low, high in ((brightness, -0.5, 0.5), (saturation, 0, 2), (contrast, 0.5, 1.5)):
        assert_uniform(value, low, high)


def test_scale_and_rotation_are_drawn_by_their_laws() -> None:
    for axis in range(2):
        assert_uniform(many("scale").scale[:, axis], 1 / 1.2, 1.2)
    assert_uniform(many("rotate").rotate, -math.pi / 12, math.pi / 12)
    assert set(many("flip").flip.flatten().tolist()) == {-1.0, 1.0}
    assert abs(many("flip").flip.mean()) < 4 / math.sqrt(4000)


def assert_uniform(value: Tensor, low: float, high: float) -> None:
    assert low <= value.min() < low + 0.01 * (high - low)
    assert high - 0.01 * (high - low) < value.max() <= high
    error = (high - low) / math.sqrt(12 * value.numel())
    assert abs(value.mean() - (low + high) / 2) < 4 * error


@pytest.mark.parametrize(("size", "reach"), [(32, 4), (28, 4), (12, 2), (11, 1)])
def test_crop_moves_by_whole_pixels_up_to_an_eighth_of_the_side(size: int, reach: int) -> None:
    crop = many("crop", (size, size)).crop
    assert set(crop.flatten().tolist()) == set(range(-reach, reach + 1))
    counts = (crop[:, 0] + reach).long().bincount()
    assert counts.min() > 0.7 * 4000 / (2 * reach + 1)


@pytest.mark.parametrize(("size", "side", "centres"), [(32, 16, 33), (28, 14, 29), (30, 15, 30)])
def test_cutout_has_half_the_side_and_its_centre_anywhere(
    size: int, side: int, centres: int
) -> None:
    top, bottom, left, right = many("cutout", (size, size)).cutout.unbind(-1)
    expected = {
        (max(centre - side // 2, 0), min(centre - side // 2 + side, size))
        for centre in range(centres)
    }
    assert set(zip(top.tolist(), bottom.tolist(), strict=True)) == expected
    assert set(zip(left.tolist(), right.tolist(), strict=True)) == expected
    assert (bottom - top).max() == side


def test_each_operation_is_equally_likely_and_shared_by_the_groups_of_a_call() -> None:
    draws = augment.draw(generator(8), DEFAULT, groups=3, image=SIZE, calls=3000)
    assert draws.color.shape == (3000, 3, 3)
    assert (draws.operation == draws.operation[:, :1]).all()
    counts = draws.operation[:, 0].bincount(minlength=6)
    assert counts.min() > 400
    assert counts.max() < 600


def test_an_operation_for_each_group_is_drawn_when_asked() -> None:
    draws = augment.draw(generator(8), "flip_rotate", groups=50, image=SIZE, op_per_group=True)
    assert set(draws.operation.tolist()) == {3, 5}
    assert (draws.rotate[draws.operation == 3] == 0).all()
    assert (draws.rotate[draws.operation == 5] != 0).all()
    x = images()[:1].expand(50, -1, -1, -1, -1)
    out = augment.apply(x, draws)
    for group in range(50):
        operation = OPERATIONS[int(draws.operation[group])]
        expected = by_definition(x[group, 0], operation, getattr(draws, operation)[group].tolist())
        torch.testing.assert_close(out[group, 0], expected, atol=2e-5, rtol=1e-4)


def test_many_calls_drawn_at_once_come_apart_into_draws() -> None:
    draws = augment.draw(generator(8), DEFAULT, groups=3, image=SIZE, calls=4, per_image=2)
    for row in trees.unstack(draws, 4):
        assert augment.apply(images(), row).shape == images().shape


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.integers(0, 1000),
    st.sets(st.sampled_from(OPERATIONS), min_size=1),
    st.integers(2, 9),
    st.integers(2, 9),
)
def test_equal_draws_give_equal_images_of_any_size(
    seed: int, names: set[str], height: int, width: int
) -> None:
    strategy = "_".join(sorted(names))
    x = torch.randn(2, 2, 1, height, width, generator=generator(seed))
    first, second = (
        augment.draw(generator(seed), strategy, groups=2, image=(height, width)) for _ in range(2)
    )
    out = augment.apply(x, first)
    assert out.isfinite().all()
    assert torch.equal(out, augment.apply(x, second, only=strategy))


def test_an_unknown_operation_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(BadValue, match="unknown augmentation 'rotat'; did you mean 'rotate'"):
        drawn("color_rotat")
    with pytest.raises(BadValue, match="twice"):
        drawn("flip_flip")
    with pytest.raises(BadValue, match="did you mean 'multi'"):
        drawn("flip", mode="mult")  # type: ignore[arg-type]


def test_draws_for_other_images_are_refused() -> None:
    with pytest.raises(BadValue, match=r"drawn for \(3,\)"):
        augment.apply(images(groups=2), drawn("flip"))
    with pytest.raises(BadValue, match=r"drawn for \(3, 4\)"):
        augment.apply(images(), drawn("flip", per_image=4))


@pytest.fixture
def both_ways(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], tuple[Any, Any]]:
    """What a call gives with kernels, and with the operations."""

    def run(call: Callable[[], Any]) -> tuple[Any, Any]:
        fused = call()
        with monkeypatch.context() as patch:
            patch.setattr("fedstill.core.gpu.kernels", lambda *_: None)
            return fused, call()

    return run


def on_gpu(
    shape: tuple[int, int, int], strategy: str, mode: Mode, per_image: int | None
) -> tuple[Tensor, Draws]:
    """Three groups of two images and what is drawn for them."""
    draws = augment.draw(
        generator(7), strategy, groups=3, image=shape[1:], mode=mode, per_image=per_image
    )
    x = torch.randn(3, 2, *shape, generator=generator(3)).cuda().requires_grad_()
    return x, trees.to(draws, "cuda")


@needs_a_gpu
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 16, 20), (4, 64, 64), (2, 5, 3)])
@pytest.mark.parametrize("per_image", [None, 2])
@pytest.mark.parametrize("strategy", [*OPERATIONS, DEFAULT, "color_cutout", "crop_rotate"])
def test_kernels_give_what_the_operations_give(
    shape: tuple[int, int, int], per_image: int | None, strategy: str, both_ways: Any
) -> None:
    pytest.importorskip("triton")
    x, draws = on_gpu(shape, strategy, "multi", per_image)
    told = torch.randn(x.shape, generator=generator(8)).cuda()

    def outputs() -> list[Tensor]:
        out = augment.apply(x, draws, only=strategy)
        with torch.no_grad():
            still = augment.apply(x, draws, only=strategy)
        (slope,) = torch.autograd.grad(out, x, told)
        (first,) = torch.autograd.grad(
            augment.apply(x, draws, only=strategy).pow(3).sum(), x, create_graph=True
        )
        (second,) = torch.autograd.grad((first * told).sum(), x)
        return [out, still, slope, second]

    fused, plain = both_ways(outputs)
    for one, other in zip(fused, plain, strict=True):
        if strategy in ("crop", "cutout", "flip") and one is not fused[3]:
            assert torch.equal(one, other)
        torch.testing.assert_close(
            one, other, atol=2e-5 * float(other.detach().abs().max()), rtol=1e-5
        )
    assert torch.equal(fused[0], fused[1])
    assert all(torch.equal(one, other) for one, other in zip(fused, outputs(), strict=True))


@needs_a_gpu
@pytest.mark.parametrize("only", [*OPERATIONS, DEFAULT])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 16, 20)])
def test_kernels_change_no_bit_of_what_was_not_drawn(
    shape: tuple[int, int, int], only: str
) -> None:
    x, draws = on_gpu(shape, "none", "single", None)
    told = torch.randn(x.shape, generator=generator(8)).cuda()
    out = augment.apply(x, draws, only=only)
    assert torch.equal(out, x)
    assert torch.equal(torch.autograd.grad(out, x, told)[0], told)


@needs_a_gpu
@pytest.mark.parametrize("strategy", [*OPERATIONS, DEFAULT])
def test_the_gradient_of_a_kernel_is_its_transpose(strategy: str) -> None:
    x, draws = on_gpu((3, 32, 32), strategy, "multi", 2)
    draws.color[..., 0] = 0
    told = torch.randn(x.shape, generator=generator(8)).cuda()
    out = augment.apply(x, draws, only=strategy)
    (slope,) = torch.autograd.grad(out, x, told)
    there, back = (out.double() * told).sum(), (x.double() * slope).sum()
    assert (there - back).abs() < 1e-6 * out.norm() * told.norm()


@needs_a_gpu
def test_kernels_take_images_and_slopes_that_lie_in_any_order(both_ways: Any) -> None:
    _, draws = on_gpu((3, 12, 16), DEFAULT, "multi", None)
    x = torch.randn(3, 2, 16, 12, 3, generator=generator(3)).cuda().transpose(2, 4)
    x.requires_grad_()

    def slope() -> Tensor:
        return torch.autograd.grad(augment.apply(x, draws).sum(), x)[0]

    torch.testing.assert_close(*both_ways(slope), atol=2e-5, rtol=1e-5)


def unsuitable(device: str) -> dict[str, Callable[[], Tensor]]:
    """Calls that no kernel is made for."""
    x, draws = images().to(device), trees.to(drawn(DEFAULT, mode="multi"), device)
    double = Draws(draws.operation, *(part.double() for part in draws[1:]))
    moving = draws._replace(rotate=draws.rotate.clone().requires_grad_())
    wide = augment.draw(generator(4), DEFAULT, groups=3, image=(64, 65), mode="multi")
    both = trees.stack([draws, draws])
    return {
        "double": lambda: augment.apply(x.double(), double),
        "half": lambda: augment.apply(x.half(), draws),
        "draws with a gradient": lambda: augment.apply(x, moving),
        "vmap": lambda: vmap(augment.apply)(torch.stack([x, x]), both)[0],
        "grad": lambda: grad(lambda x: augment.apply(x, draws).square().sum())(x),
        "channels": lambda: augment.apply(x.repeat(1, 1, 2, 1, 1), draws),
        "pixels": lambda: augment.apply(x.new_ones(3, 1, 3, 64, 65), trees.to(wide, device)),
        "no images": lambda: augment.apply(x[:, :0], draws),
    }


@pytest.mark.parametrize("kind", unsuitable("cpu"))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_a_gpu)])
def test_what_kernels_cannot_take_goes_by_the_operations(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = unsuitable("cpu")[kind]()
    if device == "cpu":
        monkeypatch.setattr("fedstill.core.gpu.kernels", _no_kernels)
    else:
        pytest.importorskip("triton")
        monkeypatch.setattr("fedstill.kernels.augment.apply", _no_kernels)
    out = unsuitable(device)[kind]()
    torch.testing.assert_close(out.cpu(), expected, atol=1e-2, rtol=1e-2)


def _no_kernels(*arguments: object) -> None:
    raise AssertionError("kernels were asked for")
