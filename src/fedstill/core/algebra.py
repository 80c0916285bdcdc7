"""Arithmetic on weights and other trees; no model knowledge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedstill.core import gpu, trees
from fedstill.core.records import Weights, is_buffer
from fedstill.core.torch_internals import absolute_sum_each, fills_its_memory, flattened, whole_of

T = TypeVar("T")

MANY = 8  # tensors to add up, each with a launch or two of its own


def mean(items: Sequence[T], weights: Sequence[float] | None = None) -> T:
    """The weighted mean, tensor by tensor; integer tensors are taken from the first item.

    Shares are normalised in double precision and applied in the order given.
    """
    shares = [1.0] * len(items) if weights is None else [float(w) for w in weights]
    total = sum(shares)
    if not items or total <= 0:
        raise ValueError(f"a mean needs items and a positive total weight, got {shares}")
    shares = [share / total for share in shares]
    columns = trees.columns(items)
    means = [rows[0] for rows in columns]
    floating = [at for at, rows in enumerate(columns) if rows[0].is_floating_point()]
    if (kernels := _sums([columns[place] for place in floating])) is not None:
        made = kernels.weighted([columns[place] for place in floating], shares)
        for place, total in zip(floating, made, strict=True):
            means[place] = total
        return trees.with_tensors(items[0], means)
    for places in _groups(columns):
        alike = [columns[place] for place in places]
        if len(alike) == 1:
            means[places[0]] = _weighted(alike[0], shares)
            continue
        laid = (flattened(rows) for rows in zip(*alike, strict=True))
        pieces = torch.split(_weighted(laid, shares), [rows[0].numel() for rows in alike])
        for place, piece, rows in zip(places, pieces, alike, strict=True):
            means[place] = piece.reshape(rows[0].shape).clone()
    return trees.with_tensors(items[0], means)


def _sums(columns: Sequence[Sequence[Tensor]]) -> Any:
    """Kernels that add up many tensors in few launches; None where these are not for them."""
    if not columns or len(columns[0]) < MANY or not columns[0][0].is_cuda:
        return None
    kernels = gpu.kernels("kernels.ordered_sums", columns[0][0])
    return kernels if kernels is not None and all(map(kernels.takes, columns)) else None


def _groups(columns: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """The places of floating tensors: small ones of a kind together, any other alone."""
    groups: dict[Any, list[int]] = {}
    for place, rows in enumerate(columns):
        first = rows[0]
        if first.is_floating_point():
            key = (first.dtype, first.device) if _small_and_alike(rows) else place
            groups.setdefault(key, []).append(place)
    return list(groups.values())


def _small_and_alike(rows: Sequence[Tensor]) -> bool:
    first = rows[0]
    if first.numel() > trees.SMALL or not first.is_contiguous():
        return False
    return all(row.shape == first.shape and row.dtype == first.dtype for row in rows)


def _weighted(rows: Iterable[Tensor], shares: Sequence[float]) -> Tensor:
    """The sum of rows times shares, from first to last."""
    terms = (row * share for row, share in zip(rows, shares, strict=True))
    total = next(terms)
    for term in terms:
        # Not `add_` with an alpha, which would round a product and a sum once instead of twice.
        fits = total.dtype == term.dtype and total.shape == term.shape
        total = total.add_(term) if fits else total + term
    return total


def add(left: T, right: T, scale: float = 1.0) -> T:
    """left + scale · right; integer tensors keep their left value."""
    return trees.map_tensors(
        lambda a, b: a + scale * b if a.is_floating_point() else a, left, right
    )


def sub(left: T, right: T) -> T:
    """left - right; integer tensors keep their left value."""
    return trees.map_tensors(lambda a, b: a - b if a.is_floating_point() else a, left, right)


def scale(tree: T, factor: float | Tensor) -> T:
    """factor · tree; integer tensors stay."""
    return trees.map_tensors(lambda a: a * factor if a.is_floating_point() else a, tree)


def moving_average(average: T, latest: T, keep: float) -> T:
    """keep · average + (1 - keep) · latest; integer tensors are the latest."""
    return trees.map_tensors(
        lambda a, b: keep * a + (1 - keep) * b if b.is_floating_point() else b, average, latest
    )


def zeros(tree: T) -> T:
    """Zeros of the same shapes."""
    return trees.map_tensors(torch.zeros_like, tree)


def dot(left: T, right: T) -> Tensor:
    """The inner product over all floating entries."""
    pairs = zip(trees.tensors(left), trees.tensors(right), strict=True)
    terms = [(a * b).sum() for a, b in pairs if a.is_floating_point()]
    return torch.stack(terms).sum()


def square(tree: T) -> Tensor:
    """The squared norm over all floating entries."""
    terms = [a.square().sum() for a in trees.tensors(tree) if a.is_floating_point()]
    return torch.stack(terms).sum()


def parameters(weights: Weights) -> Weights:
    """The trainable part of a state dict."""
    return {name: tensor for name, tensor in weights.items() if not is_buffer(name)}


def not_finite(tree: Any, most: float = math.inf) -> list[str]:
    """Names of the tensors that hold NaN, infinity or a number beyond `most`.

    One look at a device for all that lie there. No entry is larger than the norm of all, so a
    norm within the limit clears a tensor in one quick pass. Another norm may have overflowed, or
    be that of many entries: then every entry is looked at.
    """
    return _not_finite(tree, _floating(tree), most)


def _not_finite(tree: Any, floating: list[Tensor], most: float) -> list[str]:
    apart: dict[torch.device, list[Tensor]] = {}
    for tensor in floating:
        apart.setdefault(tensor.device, []).append(tensor)
    cleared = all(_norms_are_within(tensors, most) for tensors in apart.values())
    return [] if cleared else _strange(tree, most)


def _norms_are_within(tensors: Sequence[Tensor], most: float) -> bool:
    """Whether tensors of one device have finite norms up to `most`, the small ones together."""
    small = [tensor for tensor in tensors if tensor.numel() <= trees.SMALL]
    pieces = [tensor for tensor in tensors if tensor.numel() > trees.SMALL]
    with torch.no_grad():
        pieces += [flattened(small)] if small else []
        norms = torch.stack([torch.linalg.vector_norm(piece) for piece in pieces]).tolist()
    return all(math.isfinite(norm) and norm <= most for norm in norms)


def not_finite_each(many: Sequence[Any], most: float = math.inf) -> list[list[str]]:
    """As `not_finite` for each of several trees; on a GPU with one look at the device for all.

    What a stack of loops leaves are rows of few tensors: where those are fine, so is every row.
    """
    floating = [_floating(tree) for tree in many]
    everything = [tensor for tensors in floating for tensor in tensors]
    wholes = _wholes(everything)
    if wholes and not _not_finite(wholes, wholes, most):
        return [[] for _ in many]
    if len(many) < 2 or not all(tensor.is_cuda for tensor in everything):
        return [_not_finite(tree, each, most) for tree, each in zip(many, floating, strict=True)]
    if not everything:
        return [[] for _ in many]
    with torch.no_grad():
        sums = absolute_sum_each(everything)
        alike = len({tensor.dtype for tensor in sums}) == 1
        sizes = torch.stack(sums if alike else [tensor.float() for tensor in sums]).float()
        sizes = sizes.isfinite() & (sizes <= most)
    fine = iter(sizes.tolist())
    cleared = [all([next(fine) for _ in tensors]) for tensors in floating]
    return [
        [] if clear else _strange(tree, most) for clear, tree in zip(cleared, many, strict=True)
    ]


def _wholes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of which all these are pieces; none where looking at them is more work.

    One that fills its memory holds every number that any of its views may show.
    """
    wholes: dict[int, Tensor] = {}
    for tensor in tensors:
        whole = whole_of(tensor)
        if whole.dtype != tensor.dtype:
            return []
        wholes[id(whole)] = whole
    found = list(wholes.values())
    entries = sum(map(Tensor.numel, tensors))
    much = 2 * len(found) > len(tensors) or sum(map(Tensor.numel, found)) > entries
    return [] if much or not all(map(fills_its_memory, found)) else found


def _floating(tree: Any) -> list[Tensor]:
    return [tensor for tensor in trees.tensors(tree) if tensor.is_floating_point()]


def _strange(tree: Any, most: float) -> list[str]:
    """The names of tensors that hold NaN, infinity or a number beyond `most`, entry by entry."""
    names = [name for name, t in trees.named_tensors(tree) if t.is_floating_point()]
    fine = [
        bool((torch.isfinite(tensor) & (tensor.abs() <= most)).all()) for tensor in _floating(tree)
    ]
    return [name for name, good in zip(names, fine, strict=True) if not good]
