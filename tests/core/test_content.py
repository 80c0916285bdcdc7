"""What may stand in a message: axes, types, ranges, and the sentences that say what is wrong."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from fedstill.core import Change, Message, Positional, Weights
from fedstill.core.algebra import not_finite, not_finite_each
from fedstill.core.content import (
    LARGEST,
    MOST,
    Amount,
    Axes,
    Inputs,
    Kind,
    Labels,
    Layout,
    layout,
    misfit,
    presence,
    refusal,
    trainable,
    wrong,
)
from fedstill.models import MLP, ConvNet

KNOWN = {"class": 3, "input": (2, 4), "few": range(1, 3)}


class Pictures(Message):
    """Images with labels, and how many examples stand behind them."""

    images: Inputs
    labels: Labels
    examples: Amount
    held: Annotated[Positional, Axes("held", below="class", rising=True)] | None = None


def pictures(**changes: Any) -> Pictures:
    """Four images of shape [2, 4] and their labels, with changes."""
    made = Pictures(torch.zeros(4, 2, 4), torch.tensor([0, 1, 2, 2]), 4)
    return made.replace(**changes)


def no_layout(field: str) -> Layout:
    raise AssertionError(field)


def said(message: Message, **more: Any) -> str | None:
    return wrong(message, {**KNOWN, **more}, no_layout)


def test_what_its_hints_allow_is_right() -> None:
    assert said(pictures()) is None
    assert said(pictures(held=torch.tensor([0, 2]))) is None
    assert said(pictures(examples=0)) is None and said(pictures(examples=MOST)) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"labels": torch.tensor([0, 1])}, "sent labels of shape [2]; expected [image = 4]"),
        ({"labels": torch.zeros(4)}, "sent labels of float32; expected int64"),
        (
            {"held": torch.zeros(0, dtype=torch.long)},
            "sent held of shape [0]; expected [held] with an entry or more; Axes(…, empty=True)",
        ),
        ({"labels": torch.tensor([0, 1, 2, 3])}, "sent labels with values from 0 to 3; expected"),
        ({"labels": torch.tensor([-1, 1, 2, 0])}, "sent labels with values from -1 to 2;"),
        ({"images": torch.zeros(4, 2, 3)}, "sent images of shape [4, 2, 3]; expected [image"),
        ({"images": torch.zeros(4, 2)}, "sent images of shape [4, 2]; expected [image"),
        ({"images": torch.zeros(4, 2, 4, 1)}, "sent images of shape [4, 2, 4, 1]; expected [image"),
        ({"images": torch.zeros(0, 2, 4)}, "sent images of shape [0, 2, 4]; expected [image"),
        ({"images": torch.zeros(4, 2, 4).double()}, "sent images of float64; expected float32"),
        ({"images": torch.full((4, 2, 4), 2e6)}, "sent images with values from 2e+06 to 2e+06"),
        ({"images": None}, "sent no images"),
        ({"images": "none"}, "sent something else than its hint says in images"),
        ({"examples": 10**18}, "sent examples = 1000000000000000000: must be in [0, 1.09951e+12]"),
        ({"examples": -300}, "sent examples = -300: must be in [0"),
        ({"examples": 2.5}, "sent examples = 2.5: must be a whole number"),
        ({"held": torch.tensor([1, 1])}, "sent held, from one to the next, with values from 0"),
        ({"held": torch.tensor([2, 0])}, "sent held, from one to the next, with values from -2"),
    ],
)  # fmt: skip
def test_what_its_hints_forbid_is_said(changes: dict[str, Any], why: str) -> None:
    found = said(pictures(**changes))
    assert found is not None and found.startswith(why), found


def test_a_word_may_have_one_of_several_lengths() -> None:
    assert said(pictures(), image=range(1, 5)) is None
    found = said(pictures(), image=range(1, 4))
    assert found == "sent images of shape [4, 2, 4]; expected [image from 1 to 3, input = [2, 4]]"


class ByMaker(Message):
    """Sets by their makers; each has a length of its own."""

    sets: dict[str, Annotated[Tensor, Axes("row", "few", empty=True)]]
    classes: dict[str, Annotated[Positional, Axes("row", below="class")]]


def test_under_each_name_a_word_has_its_own_length() -> None:
    sets = {"a": torch.zeros(2, 1), "b": torch.zeros(3, 1)}
    classes = {"a": torch.tensor([0, 1]), "b": torch.tensor([0, 1, 2])}
    assert said(ByMaker(sets, classes)) is None
    turned = {"a": classes["b"], "b": classes["a"]}
    assert said(ByMaker(sets, turned)) == "sent classes.a of shape [3]; expected [row = 2]"
    wide = {**sets, "b": torch.zeros(3, 3)}
    assert "expected [row = 3, few from 1 to 2]" in (said(ByMaker(wide, classes)) or "")


class Networked(Message):
    """Weights, and a change of those that are trained."""

    weights: Weights
    change: Change


def test_weights_must_be_those_of_the_network_in_names_shapes_and_types() -> None:
    net = ConvNet((1, 8, 8), 3, depth=1, width=2, norm="batch")
    wanted = layout(net)
    assert wanted["head.bias"] == Kind((3,), torch.float32)
    good = Networked(net.init(0), {n: t for n, t in net.init(0).items() if n in trainable(wanted)})
    assert wrong(good, {}, lambda field: wanted) is None
    assert any("running_var" in name for name in wanted)
    found = wrong(good.replace(change=good.weights), {}, lambda field: wanted)
    assert found is not None and "running_mean is not known" in found
    double = {**good.weights, "head.bias": good.weights["head.bias"].double()}
    assert misfit(wanted, double) == (
        "sent another network than it was given: head.bias is float64 and not float32"
    )


def test_weights_of_another_network_are_named() -> None:
    wanted = layout(MLP((4,), 3, hidden=(4,)))
    weights = MLP((4,), 3, hidden=(4,)).init(0)
    assert misfit(wanted, weights) is None
    del weights["head.bias"]
    weights["layer0.weight"] = torch.zeros(3, 4)
    weights["more"] = torch.zeros(1)
    assert misfit(wanted, weights) == (
        "sent another network than it was given: layer0.weight is (3, 4) and not (4, 4), "
        "head.bias is missing, more is not known"
    )


def test_optional_fields_are_there_as_the_method_asks() -> None:
    assert presence(pictures(), Pictures, held=False) is None
    assert presence(pictures(), Pictures, held=True) == "sent no held, which this method needs"
    given = pictures(held=torch.tensor([0]))
    assert presence(given, Pictures, held=False) == "sent held, which this method does not ask for"
    assert presence(given, ByMaker, held=False) is None  # of another kind, which has no such field


def test_numbers_beyond_the_largest_are_found_beside_those_that_are_not_finite() -> None:
    many = torch.full((100, 100), LARGEST)  # its norm is a hundred times as much
    tree = {"many": many, "more": torch.tensor([1.0, -2 * LARGEST]), "whole": torch.tensor([2**50])}
    assert not_finite(tree) == [] and not_finite(tree, LARGEST) == ["more"]
    assert not_finite_each([{"a": many}, tree], LARGEST) == [[], ["more"]]


class Careless:
    """A method that fails while it looks."""

    def wrong(self, node: Any, sender: str, message: Message) -> str | None:
        return {}["nothing"]


def test_a_method_that_fails_while_it_looks_refuses() -> None:
    assert refusal(Careless(), None, "a", pictures()) == (
        "sent Pictures that cannot be checked: KeyError: 'nothing'"
    )
    immense = pictures(images=torch.full((4, 2, 4), 1e30))
    assert refusal(Careless(), None, "a", immense) == (
        "sent Pictures with values beyond 1.1e+12 in images"
    )
