"""Views: moved and mirrored images, in every averaging method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedstill.core.data import Data, Pool
from fedstill.core.errors import BadValue
from fedstill.core.seeds import generator
from fedstill.engines.play.batched import Batched
from fedstill.methods.fedavg import FedAvg
from fedstill.parts.learning import training
from fedstill.parts.views import Moves, drawn_moves, ground_of, moved, viewed
from worlds import engine_for, pictures, played, vectors


def moves(*each: tuple[int, int, bool]) -> Moves:
    down, right, mirrored = zip(*each, strict=True)
    return Moves(torch.tensor(down), torch.tensor(right), torch.tensor(mirrored))


ROW = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])  # one image, one channel, one row


@pytest.mark.parametrize(
    ("right", "mirrored", "zero", "reflected"),
    [
        (0, False, [1, 2, 3, 4], [1, 2, 3, 4]),
        (1, False, [2, 3, 4, 0], [2, 3, 4, 3]),
        (-2, False, [0, 0, 1, 2], [3, 2, 1, 2]),
        (0, True, [4, 3, 2, 1], [4, 3, 2, 1]),
        (1, True, [0, 4, 3, 2], [3, 4, 3, 2]),  # cut out first, then mirrored
    ],
)
def test_a_row_of_pixels_by_hand(
    right: int, mirrored: bool, zero: list[float], reflected: list[float]
) -> None:
    one = moves((0, right, mirrored))
    assert moved(ROW, one, "crop_flip").flatten().tolist() == zero
    assert moved(ROW, one, "reflect_crop_flip").flatten().tolist() == reflected


@pytest.mark.parametrize(
    ("views", "mode"), [("crop_flip", "constant"), ("reflect_crop_flip", "reflect")]
)
def test_a_view_is_a_cut_out_of_the_padded_image(views: Any, mode: str) -> None:
    x = torch.randn(40, 3, 16, 16, generator=generator(0, "views"))
    drawn = drawn_moves(generator(1, "moves"), 40, 16, 16)
    padded = F.pad(x, (2, 2, 2, 2), mode=mode)
    found = moved(x, drawn, views)
    for i, (down, right, mirrored) in enumerate(zip(*drawn, strict=True)):
        cut = padded[i, :, 2 + down : 18 + down, 2 + right : 18 + right]
        assert torch.equal(found[i], cut.flip(-1) if mirrored else cut)


def bytes_of(seed: int, mean: float, std: float) -> Pool:
    stored = torch.randint(0, 256, (7, 1, 12, 12), generator=generator(seed, "bytes"))
    shape = (1, 1, 1)
    return Pool(
        stored.to(torch.uint8), torch.arange(7) % 3, torch.full(shape, mean), torch.full(shape, std)
    )


@pytest.mark.parametrize("pools", [1, 2])
def test_black_is_what_padded_pixels_are_normalised_to(pools: int) -> None:
    parts = [bytes_of(0, 0.5, 0.5), bytes_of(1, 0.3, 0.2)][:pools]
    data = sum((pool.all() for pool in parts), Data())
    rows = torch.randperm(len(data), generator=generator(2, "order"))
    drawn = drawn_moves(generator(1, "moves"), len(rows), 12, 12)
    black = ground_of("black_crop_flip", data, rows)(slice(None), rows.shape)
    found = moved(data.take(rows).x, drawn, "black_crop_flip", black)
    for place, row in enumerate(rows.tolist()):
        pool = parts[row // 7]
        padded = F.pad(pool.stored[row % 7], (2, 2, 2, 2))  # while it is bytes
        down, right, mirrored = (int(each[place]) for each in drawn)
        cut = padded[:, 2 + down : 14 + down, 2 + right : 14 + right]
        assert torch.equal(found[place], pool.normalised(cut.flip(-1) if mirrored else cut))


def test_every_move_of_up_to_an_eighth_of_the_side_is_as_likely() -> None:
    drawn = drawn_moves(generator(0, "moves"), 45_000, 32, 32)
    for shifts in (drawn.down, drawn.right):
        assert torch.bincount(shifts + 4).tolist() == pytest.approx([5000] * 9, rel=0.06)
    assert float(drawn.mirrored.float().mean()) == pytest.approx(0.5, abs=0.01)


def test_images_are_moved_by_as_many_pixels_as_asked_for() -> None:
    drawn = drawn_moves(generator(0, "moves"), 9_000, 64, 64, shift=4)
    for shifts in (drawn.down, drawn.right):
        assert sorted({*shifts.tolist()}) == [*range(-4, 5)]
    client = engine_for(FedAvg(), pictures()).node("c1", 1, "update")  # whose images have 8 pixels
    values: dict[str, Any] = {"views": "black_crop_flip", "batch_size": 27}
    usual, same, far = (
        FedAvg(**values, **more).batches(client)[0].x for more in ({}, {"shift": 1}, {"shift": 3})
    )
    assert torch.equal(usual, same) and not torch.equal(usual, far)
    part = training(client, client.model, {}, 27, views="black_crop_flip", shift=3)
    assert torch.equal(part.batches[0].x, far)


def test_a_shift_that_moves_nothing_or_everything_is_refused() -> None:
    with pytest.raises(BadValue, match="shift = 4: nothing is moved without views; choose views"):
        FedAvg(shift=4)
    with pytest.raises(BadValue, match="shift = 8 moves images of 8 pixels out of sight; use at"):
        played(FedAvg(views="crop_flip", shift=8), pictures(), 1)
    played(FedAvg(views="crop_flip", shift=7, batch_size=32), pictures(), 1)


@pytest.mark.parametrize("views", ["crop_flip", "black_crop_flip"])
@pytest.mark.parametrize("parts", [1, 2])
def test_batches_made_together_are_those_made_one_by_one(views: Any, parts: int) -> None:
    world = pictures()
    client = engine_for(FedAvg(), world).node("c1", 1, "update")
    own = client.data.all()
    colder = Pool(own.x, own.y, torch.full((1, 1, 1), 0.5), torch.ones(1, 1, 1)).all()
    data = client.data if parts == 1 else client.data.subset(torch.arange(9)) + colder
    plan = data.batches(9, client.rng("order"), epochs=2)
    seen = viewed(plan, views, client)
    together = seen.ahead(1, 3)
    assert together is not None and len(seen) == len(plan)
    for place in range(3):
        assert torch.equal(together.x[place], seen[1 + place].x)
        assert torch.equal(together.y[place], plan[1 + place].y)
    assert not torch.equal(seen[0].x, plan[0].x)


def test_views_change_training_and_engines_agree_on_them() -> None:
    world = pictures(norm="none")
    values: dict[str, Any] = {"lr": 0.1, "batch_size": 8, "epochs": 2}
    plain, _ = played(FedAvg(**values), world, 2)
    seen, _ = played(FedAvg(**values, views="crop_flip"), world, 2)
    stacked, _ = played(FedAvg(**values, views="crop_flip"), world, 2, engine=Batched)
    for name, weights in seen.states["server"].weights.items():
        assert torch.allclose(weights, stacked.states["server"].weights[name], atol=1e-4)
    before, after = (e.states["server"].weights["head.weight"] for e in (plain, seen))
    assert not torch.allclose(before, after, atol=1e-3)


def test_examples_that_are_no_images_have_no_views() -> None:
    with pytest.raises(BadValue, match="not examples of shape \\(4,\\)"):
        played(FedAvg(views="crop_flip"), vectors(), 1)
