"""Pixels: there and back, and what eight bits leave."""

from __future__ import annotations

import pytest
import torch

from fedstill.core import Data, Pool
from fedstill.core.errors import BadValue
from fedstill.parts import pixels

LABELS = torch.zeros(2, dtype=torch.long)


def stored(mean: float, std: float) -> Data:
    images = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1)
    wide = (1, 1, 1)
    return Pool(images, LABELS, torch.full(wide, mean), torch.full(wide, std)).all()


def test_examples_come_back_as_the_pixels_they_were() -> None:
    data = stored(0.25, 0.5)
    assert data.all().x.flatten().tolist() == [-0.5, 1.5]
    assert pixels.to_pixels(data, data.all().x).flatten().tolist() == [0, 1]


def test_pixels_are_normalised_by_the_hearers_statistics() -> None:
    shown = pixels.to_pixels(stored(0.25, 0.5), torch.tensor([[[[1.0]]]]))  # 0.75
    assert pixels.normalised(stored(0.5, 0.125), shown).item() == 2


def test_bytes_without_statistics_lie_between_0_and_1() -> None:
    data = Pool(torch.zeros(2, 1, 1, 1, dtype=torch.uint8), LABELS).all()
    x = torch.tensor([0.3])
    assert torch.equal(pixels.to_pixels(data, x), x) and torch.equal(pixels.normalised(data, x), x)


def test_eight_bits_clip_and_round() -> None:
    found = pixels.quantised(torch.tensor([-0.2, 0.0, 0.5, 1.0, 7.0])) * 255
    assert found.tolist() == pytest.approx([0, 0, 128, 255, 255])
    levels = torch.arange(256) / 255
    assert torch.equal(pixels.quantised(levels), levels)


def test_images_shared_as_pixels_reach_a_hearer_in_its_own_normalisation() -> None:
    mine, theirs = stored(0.25, 0.5), stored(0.5, 0.125)
    images = torch.tensor([0.5, 2.5]).reshape(2, 1, 1, 1)  # the pixels 0.5 and 1.5
    shown = pixels.given_away(mine, images, "pixel", eight_bits=False)
    assert shown.flatten().tolist() == [0.5, 1.5]  # not clipped
    assert pixels.received(theirs, shown, "pixel").flatten().tolist() == [0, 8]


def test_images_shared_as_they_are_reach_a_hearer_as_they_are() -> None:
    images = torch.tensor([0.5, 2.5]).reshape(2, 1, 1, 1)
    held_normalised = Data()  # whose pixels nobody knows
    shown = pixels.given_away(held_normalised, images, "normalised", eight_bits=False)
    assert shown is images
    assert pixels.received(held_normalised, shown, "normalised") is images


def test_images_in_eight_bits_are_clipped_and_rounded_in_either_space() -> None:
    data, images = stored(0.25, 0.5), torch.tensor([0.5, 2.5]).reshape(2, 1, 1, 1)
    shown = pixels.given_away(data, images, "pixel", eight_bits=True)
    assert (shown * 255).flatten().tolist() == pytest.approx([128, 255])
    again = pixels.given_away(data, images, "normalised", eight_bits=True)
    assert torch.equal(again, pixels.normalised(data, shown))


@pytest.mark.parametrize("data", [Data(), Data.of(torch.zeros(2, 1, 2, 2), LABELS)])
def test_examples_whose_pixels_are_not_known_are_refused(data: Data) -> None:
    with pytest.raises(BadValue, match="mean and deviation"):
        pixels.to_pixels(data, torch.zeros(1))
