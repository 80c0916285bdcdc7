"""What is counted as arithmetic is what the layers of a network multiply and add."""

from __future__ import annotations

import pytest

import flops
from fedstill.models import ConvNet


def test_a_convnet_multiplies_and_adds_what_its_layers_say() -> None:
    """Three convolutions of nine taps over 8x8, 4x4 and 2x2 places, and a linear layer."""
    forward, both = flops.passes(ConvNet((3, 8, 8), 10, width=16))
    multiplied = 64 * 16 * 3 * 9 + 16 * 16 * 16 * 9 + 4 * 16 * 16 * 9 + 16 * 10
    assert forward == 2 * multiplied
    assert both == pytest.approx(3 * forward - 2 * 64 * 16 * 3 * 9)  # no gradient for the image
