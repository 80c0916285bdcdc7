"""Parts of a network: which units, cut out, and put back over those who hold them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedstill.core import Weights
from fedstill.core.seeds import generator
from fedstill.models import MLP, ConvNet, PreResNet18, ResNet18
from fedstill.models.scalable import Scalable
from fedstill.parts.submodels import (
    CLASSES,
    SubModel,
    Units,
    cover,
    extract,
    first_units,
    halved_rates,
    random_units,
    rolling_units,
    unfit,
)

NETS = [
    MLP((4,), 3, hidden=(8, 5)),
    ConvNet((1, 8, 8), 3, depth=2, width=6),
    PreResNet18((1, 8, 8), 3, widths=(4, 6, 8, 10)),
]


def all_rules(small: Scalable) -> list[Units]:
    return [first_units(small), rolling_units(small, 3), random_units(small, generator(2))]


def moved(weights: Weights, by: float) -> Weights:
    return {name: tensor + by for name, tensor in weights.items()}


def same(left: Weights, right: Weights) -> bool:
    return (
        all(torch.equal(left[name], right[name]) for name in left) and left.keys() == right.keys()
    )


@pytest.mark.parametrize("model", NETS, ids=repr)
def test_cut_out_and_put_back_is_the_identity_on_what_is_covered(model: Scalable) -> None:
    whole = model.init(0)
    for rate in (1, 0.5, 0.2):
        for units in all_rules(model.narrowed(rate)):
            part = moved(extract(model, whole, units), 1.0)
            back = cover(model, whole, [SubModel(part, units, 3.0)])
            assert same(extract(model, back, units), part)


@pytest.mark.parametrize("model", NETS, ids=repr)
def test_entries_that_nobody_holds_stay(model: Scalable) -> None:
    whole = model.init(0)
    for units in all_rules(model.narrowed(0.5)):
        part = extract(model, whole, units)
        ones = {name: torch.ones_like(tensor) for name, tensor in part.items()}
        zeros = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        held = cover(model, zeros, [SubModel(ones, units, 1.0)])
        back = cover(model, whole, [SubModel(moved(part, 1.0), units, 1.0)])
        for name, tensor in whole.items():
            assert int(held[name].sum()) == part[name].numel()
            assert torch.equal(back[name][held[name] == 0], tensor[held[name] == 0]), name
    assert same(cover(model, whole, []), whole)


@pytest.mark.parametrize("model", NETS, ids=repr)
def test_a_part_with_all_units_is_the_network(model: Scalable) -> None:
    whole = model.init(0)
    for units in all_rules(model.narrowed(1.0)):
        assert same(extract(model, whole, units), whole)


def test_the_mean_over_holders_by_hand() -> None:
    model = MLP((1,), 2, hidden=(3,))
    before = {name: torch.full_like(tensor, 9.0) for name, tensor in model.init(0).items()}

    def part(kept: list[int], value: float, share: float) -> SubModel:
        units = {"layer0": torch.tensor(kept)}
        sized = extract(model, before, units)
        return SubModel({n: torch.full_like(t, value) for n, t in sized.items()}, units, share)

    after = cover(model, before, [part([0, 1], 1.0, 3.0), part([0], 5.0, 1.0)])
    # Unit 0: (3·1 + 1·5) / 4; unit 1: its only holder's; unit 2: nobody's.
    assert after["layer0.weight"].flatten().tolist() == [2.0, 1.0, 9.0]
    assert after["layer0.bias"].tolist() == [2.0, 1.0, 9.0]
    assert after["head.weight"].tolist() == [[2.0, 1.0, 9.0]] * 2
    assert after["head.bias"].tolist() == [2.0, 2.0]


def test_a_holder_that_counts_nothing_changes_nothing() -> None:
    model = MLP((1,), 2, hidden=(3,))
    whole, units = model.init(0), first_units(model.narrowed(0.3))
    part = moved(extract(model, whole, units), 1.0)
    assert same(cover(model, whole, [SubModel(part, units, 0.0)]), whole)


def test_a_unit_of_a_flattened_map_has_all_its_pixels() -> None:
    model = ConvNet((1, 8, 8), 2, depth=1, width=3)
    weights = model.init(0)
    weights["head.weight"] = torch.arange(2 * 48.0).reshape(2, 48)
    part = extract(model, weights, {"block0": torch.tensor([0, 2])})
    row = [*range(16), *range(32, 48)]
    assert part["head.weight"].tolist() == [row, [48 + entry for entry in row]]


def test_rows_of_some_classes_can_be_cut_from_a_part() -> None:
    model = ConvNet((1, 8, 8), 3, depth=1, width=4)
    part = extract(model, model.init(0), first_units(model.narrowed(0.5)))
    rows = extract(model, part, {CLASSES: torch.tensor([0, 2])})
    assert torch.equal(rows["head.weight"], part["head.weight"][[0, 2]])
    assert torch.equal(rows["head.bias"], part["head.bias"][[0, 2]])
    assert torch.equal(rows["conv0.weight"], part["conv0.weight"])


def test_a_rolling_window_visits_every_unit_equally_often() -> None:
    model = MLP((4,), 3, hidden=(8, 5))
    small = model.narrowed(0.4)
    for stream, width in model.streams().items():
        visits = torch.zeros(width)
        for turn in range(7, 7 + width):
            visits[rolling_units(small, turn)[stream]] += 1
        assert visits.tolist() == [small.units(width)] * width


def test_a_rolling_window_moves_on_by_one_around_each_layer() -> None:
    small = MLP((4,), 3, hidden=(5, 3)).narrowed(0.6)
    starts = [{k: set(v.tolist()) for k, v in rolling_units(small, t).items()} for t in range(5)]
    assert [s["layer0"] for s in starts] == [{0, 1, 2}, {1, 2, 3}, {2, 3, 4}, {3, 4, 0}, {4, 0, 1}]
    assert [s["layer1"] for s in starts] == [{0, 1}, {1, 2}, {2, 0}, {0, 1}, {1, 2}]


def test_smaller_windows_lie_in_larger_ones() -> None:
    model = NETS[2]
    for turn in range(12):
        large, small = (rolling_units(model.narrowed(rate), turn) for rate in (0.5, 0.25))
        assert all(set(small[s].tolist()) <= set(large[s].tolist()) for s in small)


def test_random_units_are_one_subset_for_each_stream_and_differ_between_streams() -> None:
    small = PreResNet18((1, 8, 8), 3, widths=(64, 64, 64, 64)).narrowed(0.5)
    units = random_units(small, generator(0))
    assert set(units) == set(small.streams())
    assert all(len(set(kept.tolist())) == 32 for kept in units.values())
    assert len({tuple(kept.tolist()) for kept in units.values()}) == len(units)
    again = random_units(small, generator(0))
    assert all(torch.equal(units[s], again[s]) for s in units)


def test_random_units_take_every_unit_equally_often() -> None:
    small = MLP((4,), 3, hidden=(10,)).narrowed(0.3)
    rng, visits = generator(4), torch.zeros(10)
    for _ in range(1000):
        visits[random_units(small, rng)["layer0"]] += 1
    spread = (1000 * 0.3 * 0.7) ** 0.5
    assert ((visits - 300).abs() < 4 * spread).all()


@pytest.mark.parametrize(
    ("rho", "exponents"),
    [
        (0, [0] * 10),
        (5, [0, 1, 1, 2, 2, 3, 3, 4, 4, 4]),
        (10, [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]),
        (40, [4] * 10),
    ],
)
def test_budgets_of_ten_clients_are_those_of_the_paper(rho: int, exponents: list[int]) -> None:
    assert halved_rates(10, rho=rho, sigma=4) == [0.5**k for k in exponents]


def test_networks_and_budgets_that_do_not_fit_are_named() -> None:
    net, other = MLP((4,), 3, hidden=(4,)), MLP((4,), 3, hidden=(5,))
    assert unfit(net, {"a": net, "b": net}, [1, 0.5]) == []
    resnet = ResNet18((3, 32, 32), 10)
    said = unfit(resnet, {"a": resnet}, [1])
    assert said == ["resnet18 cannot be narrowed; use one of conv4, convnet, mlp, preresnet18"]
    assert unfit(net, {"a": net, "b": net}, [1]) == [
        "budgets are 1 for 2 clients; give one for each of a, b"
    ]
    assert unfit(net, {"a": net, "b": other}, [1, 1]) == [
        "b has another network than the server; leave its own out"
    ]
    grouped = ConvNet((1, 8, 8), 3, width=8, norm="group")
    said = unfit(grouped, {"a": grouped, "b": grouped}, [1, 0.25])
    assert len(said) == 1 and said[0].startswith("b: convnet: norm = 'group' has four groups")


def test_covering_works_where_the_weights_are(device: str = "cpu") -> None:
    model = NETS[1]
    whole = {name: tensor.to(device) for name, tensor in model.init(0).items()}
    units = random_units(model.narrowed(0.5), generator(1))
    back: dict[str, Tensor] = cover(
        model, whole, [SubModel(extract(model, whole, units), units, 1.0)]
    )
    assert same(back, whole)
