"""A narrow layer before the head."""

from __future__ import annotations

import torch

from fedstill.core.records import Weights
from fedstill.models import ConvNet
from fedstill.parts.necks import feature_width, necked

BODY = ConvNet((1, 8, 8), 3, depth=2, width=4, norm="batch")


def test_the_neck_is_a_linear_layer_between_features_and_head() -> None:
    model = necked(BODY, 5)
    weights, x = model.init(0), torch.randn(6, 1, 8, 8)
    wide = BODY.features(weights, x)
    narrow = wide @ weights["neck.weight"].T + weights["neck.bias"]
    assert torch.allclose(model.features(weights, x), narrow, atol=1e-6)
    expected = narrow @ weights["head.weight"].T + weights["head.bias"]
    assert torch.allclose(model(weights, x), expected, atol=1e-6)


def test_widths_and_floats() -> None:
    assert feature_width(BODY) == 16 and feature_width(necked(BODY, 5)) == 5
    plain, narrow = BODY.floats(), necked(BODY, 5).floats()
    head, neck = 16 * 3 + 3, 16 * 5 + 5 + 5 * 3 + 3
    assert narrow["parameters"] == plain["parameters"] - head + neck
    assert narrow["buffers"] == plain["buffers"]


def test_no_width_leaves_the_model_as_it_is() -> None:
    assert necked(BODY, 0) is BODY


def test_the_body_learns_its_statistics_under_the_neck() -> None:
    notes: Weights = {}
    model = necked(BODY, 5).learning(notes)
    model(model.init(0), torch.randn(6, 1, 8, 8))
    assert {name for name in model.laws() if "running" in name} == notes.keys()


def test_blocks_start_as_without_a_neck() -> None:
    plain, narrow = BODY.init(3), necked(BODY, 5).init(3)
    for name, tensor in plain.items():
        if not name.startswith("head."):
            assert torch.equal(tensor, narrow[name])
