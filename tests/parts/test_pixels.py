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


@pytest.mark.parametrize("data", [Data(), Data.of(torch.zeros(2, 1, 2, 2), LABELS)])
def test_examples_whose_pixels_are_not_known_are_refused(data: Data) -> None:
    with pytest.raises(BadValue, match="mean and deviation"):
        pixels.to_pixels(data, torch.zeros(1))
