"""Differentiable Siamese augmentation whose draws are arguments; no generator inside.

Zhao and Bilen, "Dataset Condensation with Differentiable Siamese Augmentation", ICML 2021.
Every operation has parameters that leave an image as it is. An operation that was not drawn gets
those, so `apply` is the same arithmetic for every draw, and clients are batched together whatever
they drew. Images are normalised: the zero that fills a gap is the mean of the data.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Generator, Tensor

from fedstill.core import Model, gpu
from fedstill.core.errors import BadValue, unknown
from fedstill.parts.rotation import rotated

OPERATIONS = ("color", "crop", "cutout", "flip", "scale", "rotate")  # in the order of application
DEFAULT = "_".join(OPERATIONS)
Mode = Literal["single", "multi"]

BRIGHTNESS = 1.0
SATURATION = 2.0
CONTRAST = 0.5
CROP = 0.125  # of the side
CUTOUT = 0.5  # of the side
SCALE = 1.2
ROTATE = 15.0  # degrees


class Draws(NamedTuple):
    """What one call does: parameters are [group, parameter], or [group, image, parameter].

    The values after each field's meaning leave an image unchanged.
    """

    operation: Tensor  # [group], a place in OPERATIONS; -1 where none or more than one was drawn
    color: Tensor  # brightness added, factor of saturation, factor of contrast: 0, 1, 1
    crop: Tensor  # whole pixels from which a pixel is fetched, below and to the right: 0, 0
    cutout: Tensor  # first and past-the-last row, first and past-the-last column: 0, 0, 0, 0
    flip: Tensor  # -1 swaps left and right: 1
    scale: Tensor  # factors, 2/3 or more, of the distance from the centre, down and right: 1, 1
    rotate: Tensor  # radians: 0


_UNCHANGED: dict[str, tuple[float, ...]] = {
    "color": (0, 1, 1),
    "crop": (0, 0),
    "cutout": (0, 0, 0, 0),
    "flip": (1,),
    "scale": (1, 1),
    "rotate": (0,),
}


def operations(strategy: str) -> tuple[str, ...]:
    """The operations a strategy such as `color_crop_flip` names; none for `""` and `none`."""
    if strategy in ("", "none"):
        return ()
    names = strategy.split("_")
    faults = [unknown("augmentation", name, OPERATIONS) for name in names if name not in OPERATIONS]
    if len(set(names)) < len(names):
        faults.append(f"augmentation {strategy!r} names an operation twice; name each once")
    if faults:
        raise BadValue(faults)
    return tuple(name for name in OPERATIONS if name in names)


def strategy_faults(field: str, strategy: str) -> list[str]:
    """What is wrong with an augmentation strategy, as lines for a method's faults."""
    try:
        operations(strategy)
    except BadValue as error:
        return [f"{field}: {line}" for line in error.faults]
    return []


def draw(
    rng: Generator,
    strategy: str,
    *,
    groups: int,
    image: tuple[int, int],
    mode: Mode = "single",
    per_image: int | None = None,
    op_per_group: bool = False,
    calls: int | None = None,
) -> Draws:
    """The parameters of one call for images of `image` = (height, width), on rng's device.

    A group (a class) shares its parameters: pass the same draws to the real and to the synthetic
    call. With `per_image`, every one of that many images has its own, as when a classifier is
    trained. `single` draws one operation for the call (`op_per_group`: one for each group),
    `multi` uses all of them. With `calls`, so many calls are drawn at once, along a first axis.
    """
    _check_mode(mode)
    names = operations(strategy)
    lead = (groups,) if calls is None else (calls, groups)
    shape = lead if per_image is None else (*lead, per_image)
    picked = _picked(rng, names if mode == "single" else (), lead, op_per_group)
    uniform = torch.rand((*shape, 11), generator=rng, device=rng.device)
    return _draws(picked, uniform, image, names if mode == "multi" else None)


def _check_mode(mode: str) -> None:
    if mode not in get_args(Mode):
        raise BadValue(unknown("mode of augmentation", mode, get_args(Mode)))


def _picked(
    rng: Generator, names: tuple[str, ...], lead: tuple[int, ...], op_per_group: bool
) -> Tensor:
    """One of the operations for each call, or for each group of it; -1 where there are none."""
    if not names:
        return torch.full(lead, -1, device=rng.device)
    places = torch.tensor([OPERATIONS.index(name) for name in names], device=rng.device)
    each = lead if op_per_group else (*lead[:-1], 1)
    picked = torch.randint(len(names), each, generator=rng, device=rng.device)
    return places[picked].expand(lead).clone()


def _draws(
    picked: Tensor, uniform: Tensor, image: tuple[int, int], all_of: tuple[str, ...] | None
) -> Draws:
    """Parameters of the operations picked, or of all that are named, from numbers in [0, 1)."""
    drawn = _parameters(uniform, image)
    kept = {}
    for place, name in enumerate(OPERATIONS):
        active = picked == place if all_of is None else torch.full_like(picked, name in all_of) > 0
        active = active.reshape(*picked.shape, *[1] * (drawn[name].dim() - picked.dim()))
        kept[name] = torch.where(active, drawn[name], drawn[name].new_tensor(_UNCHANGED[name]))
    return Draws(picked, **kept)


def augmentations(
    choice: Generator,
    rng: Generator,
    strategy: str,
    calls: int,
    *,
    groups: int,
    image: tuple[int, int] | None,
    per_image: int | None = None,
    mode: Mode = "single",
    device: torch.device | str = "cpu",
) -> list[tuple[str, Draws]]:
    """For each call its one operation, from `choice` (in mode `multi` all), and its parameters.

    Clients that share `choice` do the same operation at the same step, each in its own way, so
    that their steps stay alike and nothing is computed for operations that were not drawn. Where
    there is no image but a vector, nothing is changed.
    """
    _check_mode(mode)
    names = (operations(strategy) if image else ()) or ("none",)
    if mode == "multi":
        names = ("_".join(names),)
    picked = torch.randint(len(names), (calls,), generator=choice).tolist()
    if not picked:
        return []
    each = (groups,) if per_image is None else (groups, per_image)
    places, uniforms = [], []
    for place, name in enumerate(names):  # numbers in turn, what follows from them for all at once
        if count := picked.count(place):
            single = operations(name) if mode == "single" else ()
            places.append(_picked(rng, single, (count, groups), op_per_group=False))
            uniforms.append(torch.rand((count, *each, 11), generator=rng, device=rng.device))
    all_of = operations(names[0]) if mode == "multi" else None
    drawn = _draws(torch.cat(places), torch.cat(uniforms), image or (1, 1), all_of)
    rows = zip(*(part.to(device).unbind() for part in drawn), strict=True)
    by_operation = sorted(range(calls), key=picked.__getitem__)
    found = {step: Draws(*row) for step, row in zip(by_operation, rows, strict=True)}
    return [(names[pick], found[step]) for step, pick in enumerate(picked)]


def image_size(model: Model) -> tuple[int, int] | None:
    """Height and width of the images that a model sees; None where it sees vectors."""
    return (model.shape[-2], model.shape[-1]) if len(model.shape) >= 2 else None


def _parameters(uniform: Tensor, image: tuple[int, int]) -> dict[str, Tensor]:
    """The laws of the six operations, from eleven numbers in [0, 1) along the last axis."""
    color, crop, cutout, flip, scale, rotate = torch.split_with_sizes(
        uniform, (3, 2, 2, 1, 2, 1), -1
    )
    size = uniform.new_tensor(image)
    reach = torch.floor(CROP * size + 0.5)
    side = torch.floor(CUTOUT * size + 0.5)
    first = _whole(cutout, size + 1 - side % 2) - torch.floor(side / 2)
    ends = torch.stack([first.clamp(min=0), torch.minimum(first + side, size)], -1)
    return {
        "color": color * color.new_tensor([BRIGHTNESS, SATURATION, 1.0])
        + color.new_tensor([-BRIGHTNESS / 2, 0.0, CONTRAST]),
        "crop": _whole(crop, 2 * reach + 1) - reach,
        "cutout": ends.flatten(-2),
        "flip": torch.where(flip < 0.5, -1.0, 1.0),
        "scale": 1 / SCALE + scale * (SCALE - 1 / SCALE),
        "rotate": (2 * rotate - 1) * math.radians(ROTATE),
    }


def _whole(uniform: Tensor, choices: Tensor) -> Tensor:
    """Whole numbers from 0 to choices - 1; the product alone may round up to `choices`."""
    return torch.minimum(torch.floor(uniform * choices), choices - 1)


def apply(images: Tensor, draws: Draws, *, only: str | None = None) -> Tensor:
    """Images [group, image, channel, height, width], changed as drawn.

    `only` is a promise that nothing but the operations of this strategy was drawn; the others are
    then left out, which saves time and changes no value.
    """
    may = set(OPERATIONS if only is None else operations(only))
    sets, x = _by_set(images, draws)
    if may and (kernels := _kernels(x, sets)) is not None:
        changed: Tensor = kernels.apply(x, sets, may).reshape(images.shape)
        return changed
    x = x.to(torch.promote_types(images.dtype, torch.float32))
    if "color" in may:
        x = _colored(x, sets.color)
    if "cutout" in may:
        # A hole in the cropped image is the hole moved along with the crop in the image itself;
        # so the crop can wait and be one resampling with flip and scale.
        x = _cut(x, sets.cutout + sets.crop.repeat_interleave(2, -1))
    down, right = sets.crop.unbind(-1)
    vertical, horizontal = sets.scale.unbind(-1)
    if may & {"crop", "scale"}:
        rows = _resampling(x.shape[3], down, vertical).to(x)
        x = torch.einsum("sij,sncjk->sncik", rows, x)
    if may & {"crop", "scale", "flip"}:
        columns = _resampling(x.shape[4], right, horizontal * sets.flip.squeeze(-1)).to(x)
        x = torch.einsum("sij,snckj->sncki", columns, x)
    if "rotate" in may:
        x = rotated(x, sets.rotate)
    return x.to(images.dtype).reshape(images.shape)


def apply_each(images: Tensor, draws: Draws, *, only: str | None = None) -> Tensor:
    """Images [image, channel, height, width], each with draws of its own out of one group.

    The draws may be for more images than there are.
    """
    here = Draws(draws.operation, *(part[:, : len(images)] for part in draws[1:]))
    return apply(images.unsqueeze(0), here, only=only).squeeze(0)


def _by_set(images: Tensor, draws: Draws) -> tuple[Draws, Tensor]:
    """Parameters [set, parameter] and images [set, image, ...]: a set is a group or one image."""
    axes = draws.flip.dim() - 1
    if draws.flip.shape[:-1] != images.shape[:axes]:
        raise BadValue(
            f"augmentation was drawn for {tuple(draws.flip.shape[:-1])} groups (and images), but "
            f"the images are {tuple(images.shape)}; draw for [group, image] of these images"
        )
    if axes == 1:
        return draws, images
    flat = (parameters.flatten(0, 1) for parameters in draws[1:])
    return Draws(draws.operation, *flat), images.flatten(0, 1).unsqueeze(1)


def _kernels(images: Tensor, draws: Draws) -> Any:
    """Kernels that change these images in one or two launches; None where operations have to."""
    if not gpu.plain_on_gpu(images, *draws[1:]):
        return None
    if any(part.requires_grad or part.device != images.device for part in draws[1:]):
        return None
    kernels = gpu.kernels("kernels.augment", images)
    return kernels if kernels is not None and kernels.takes(images) else None


def _colored(x: Tensor, color: Tensor) -> Tensor:
    """Brightness, saturation about the pixel's mean, contrast about the image's mean."""
    brightness, saturation, contrast = color.to(x)[..., None, None, None, None].unbind(1)
    x = x + brightness
    x = x + (saturation - 1) * (x - x.mean(2, keepdim=True))
    return x + (contrast - 1) * (x - x.mean((2, 3, 4), keepdim=True))


def _cut(x: Tensor, box: Tensor) -> Tensor:
    """Zero inside the box; an empty box cuts nothing."""
    top, bottom, left, right = box.unsqueeze(-1).unbind(1)  # [set, 1]
    row = torch.arange(x.shape[-2], device=x.device)
    column = torch.arange(x.shape[-1], device=x.device)
    rows = (row >= top) & (row < bottom)
    columns = (column >= left) & (column < right)
    hole = rows[:, :, None] & columns[:, None, :]  # [set, height, width]
    return x.masked_fill(hole[:, None, None], 0.0)


def _resampling(size: int, shift: Tensor, factor: Tensor) -> Tensor:
    """Bilinear weights along one axis, [set, pixel, pixel it is fetched from].

    Shift by whole pixels with zero fill, then multiply distances from the centre by a factor. A
    pixel fetched from exactly one other has a single weight of exactly 1.
    """
    pixel = torch.arange(size, device=shift.device, dtype=shift.dtype)
    centre = (size - 1) / 2

    def weights(position: Tensor) -> Tensor:
        return (1 - (position.unsqueeze(-1) - pixel).abs()).clamp(min=0)

    moved = weights(pixel + shift.unsqueeze(-1))
    return weights(centre + factor.unsqueeze(-1) * (pixel - centre)) @ moved
