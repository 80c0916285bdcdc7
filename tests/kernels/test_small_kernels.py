"""Kernels of one idea each: gathering, sums in order, means of classes, pools of maps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fedstill.core import algebra, gpu
from fedstill.core.data import Pool
from interpreted import DEVICE, guarded, needs_triton, noise, untouched
from strict_interpreter import by_address

pytestmark = needs_triton


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 5, 7)])  # more than a program's pixels, fewer
@pytest.mark.parametrize("rows", [[4, 0, 4], [], [[1, 2], [3, 0]]], ids=["some", "none", "sets"])
def test_examples_are_fetched_and_normalised_as_the_host_does(
    shape: tuple[int, ...], rows: list[int]
) -> None:
    stored = guarded(torch.arange(5 * shape[0] * shape[1] * shape[2]).view(5, *shape).byte())
    mean, std = noise(shape[0], of="mean"), guarded(torch.linspace(0.1, 2, shape[0]))
    which = torch.tensor(rows, dtype=torch.int64, device=stored.device)
    found = gpu.kernels("kernels.gather").taken(stored, guarded(which), mean, std)
    rows_of, by = stored.cpu()[which.cpu()], (mean.cpu().view(-1, 1, 1), std.cpu().view(-1, 1, 1))
    wanted = (rows_of / 255 - by[0]) / by[1]  # torch's own division on a GPU rounds otherwise
    assert torch.equal(found.cpu(), wanted) and found.shape == (*which.shape, *shape)
    assert untouched(stored, mean, std)


@pytest.mark.parametrize("wide", ["mean", "std"])
def test_examples_are_normalised_by_doubles_as_the_host_does(
    wide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = torch.arange(2 * 3 * 5 * 4).view(2, 3, 5, 4).byte()
    parts = {"mean": torch.full((3, 1, 1), 0.4), "std": torch.full((3, 1, 1), 0.3)}
    pool = Pool(stored, torch.arange(2), **(parts | {wide: parts[wide].double()}))
    wanted = pool.inputs(torch.tensor([1, 0]))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert torch.equal(pool.inputs(torch.tensor([1, 0])), wanted)


def test_rows_may_be_counted_in_32_bits_where_examples_are_more(tmp_path: Path) -> None:
    count, size = 2**17 + 1, 2**14
    stored = torch.from_file(str(tmp_path / "stored"), True, count * size, dtype=torch.uint8)
    stored = stored.view(count, 1, 128, 128).to(DEVICE)
    stored[-1] = 255
    rows = torch.tensor([count - 1], dtype=torch.int32, device=DEVICE)
    mean, std = torch.zeros(1, device=DEVICE), torch.ones(1, device=DEVICE)
    assert (gpu.kernels("kernels.gather").taken(stored, rows, mean, std) == 1).all()


@pytest.mark.parametrize("sizes", [[(3, 4), (1030,)], [(0,), (1,), ()]])
def test_tensors_are_added_up_as_single_operations_do(sizes: list[tuple[int, ...]]) -> None:
    shares = [0.1, 0.7, 0.2]
    columns = [[noise(*size, of=f"row {row}") for row in range(3)] for size in sizes]
    with by_address(*(row for rows in columns for row in rows)):
        found = gpu.kernels("kernels.ordered_sums").weighted(columns, shares)
    for rows, total in zip(columns, found, strict=True):
        one, *others = (row * torch.tensor(share) for row, share in zip(rows, shares, strict=True))
        for other in others:
            one = one + other
        assert torch.equal(total, one)
        assert untouched(*rows)


def test_a_mean_of_what_has_a_gradient_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    trees = [{"weight": noise(3, of=f"tree {number}")} for number in range(algebra.MANY)]
    rows = [tree["weight"] for tree in trees]
    with by_address(*rows):
        plain = algebra.mean(trees)["weight"]
        free = rows[1].requires_grad_()
        with torch.no_grad():
            assert torch.equal(algebra.mean(trees)["weight"], plain)
    found = algebra.mean(trees)["weight"]
    assert torch.equal(found, plain)
    (told,) = torch.autograd.grad(found.sum(), free)
    assert torch.equal(told, torch.full_like(told, 1 / algebra.MANY))


@pytest.mark.parametrize(("images", "features"), [(33, 65), (1, 1), (32, 64), (7, 200)])
def test_means_of_classes_are_weighted_sums_with_their_gradient(images: int, features: int) -> None:
    outputs, share = noise(3, images, features).requires_grad_(), noise(3, images, of="share")
    found = gpu.kernels("kernels.class_means").class_means(outputs, share)
    wanted = (outputs.double() * share.double().unsqueeze(2)).sum(1)
    assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)
    told = noise(3, features, of="told")
    (slope,) = torch.autograd.grad(found, outputs, told)
    assert torch.equal(slope, told.unsqueeze(1) * share.unsqueeze(2))


@pytest.mark.parametrize("size", [(2, 3, 8, 10), (1, 1, 2, 2), (3, 1, 7, 5), (1, 2, 33, 64)])
def test_the_largest_of_four_and_its_gradient_are_the_frameworks(size: tuple[int, ...]) -> None:
    pools = gpu.kernels("kernels.map_pools")
    maps, told = noise(*size), noise(*size[:2], size[2] // 2, size[3] // 2, of="told")
    made, which = pools.pooled(maps)
    free = maps.clone().requires_grad_()
    wanted = F.max_pool2d(free, 2)
    assert torch.equal(made, wanted)
    (slope,) = torch.autograd.grad(wanted, free, told)
    assert torch.equal(pools.spread(told, which, size[2:]), slope)
    assert untouched(maps, told)


def test_of_equal_numbers_the_first_is_the_largest_and_what_is_no_number_comes_through() -> None:
    pools = gpu.kernels("kernels.map_pools")
    maps = guarded(torch.tensor([[1.0, 1.0, 0.0, float("nan")], [1.0, 1.0, 5.0, 0.0]])[None, None])
    made, which = pools.pooled(maps)
    assert which.flatten().tolist() == [0, 1]
    assert made[..., 0].item() == 1 and made[..., 1].isnan().all()
