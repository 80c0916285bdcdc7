"""Nested tensors: map, flatten, stack, unstack; no arithmetic.

A tree is a tensor, `None`, a plain number or string, or a dict, list, tuple, named tuple or
record of trees. Only tensors are leaves to be mapped; the rest is structure and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")

SMALL = 2**14  # entries of a tensor that is sooner copied than given an operation of its own


def map_tensors(function: Callable[..., Any], tree: T, *others: T) -> T:
    """The same tree with `function` applied to each tensor (and its counterparts in `others`)."""
    made: Any
    if isinstance(tree, Tensor):
        made = function(tree, *others)
        return made  # type: ignore[no-any-return]
    if isinstance(tree, dict):
        twins: Sequence[Any] = others
        made = {
            key: map_tensors(function, item, *[twin[key] for twin in twins])
            for key, item in tree.items()
        }
        return made  # type: ignore[no-any-return]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        made_fields = [map_tensors(function, *parts) for parts in zip(tree, *others, strict=True)]
        return cast(T, type(tree)(*made_fields))
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(function, *parts) for parts in zip(tree, *others, strict=True)]
        return cast(T, type(tree)(items))
    if is_dataclass(tree) and not isinstance(tree, type):
        changes = {
            field.name: map_tensors(
                function, getattr(tree, field.name), *(getattr(o, field.name) for o in others)
            )
            for field in fields(tree)
            if field.init
        }
        return cast(T, replace(tree, **changes))
    return tree


def named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Each tensor with its dotted name, in a fixed order."""

    def under(name: Any) -> str:
        return f"{prefix}.{name}" if prefix else str(name)

    if isinstance(tree, Tensor):
        yield prefix, tree
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from named_tensors(item, under(key))
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for name in tree._fields:
            yield from named_tensors(getattr(tree, name), under(name))
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            yield from named_tensors(item, under(index))
    elif is_dataclass(tree) and not isinstance(tree, type):
        for name in field_names(type(tree)):
            yield from named_tensors(getattr(tree, name), under(name))


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in the order of `named_tensors`."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, dict):
        for item in tree.values():
            if isinstance(item, Tensor):
                found.append(item)
            else:
                _collect(item, found)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _collect(item, found)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for name in field_names(type(tree)):
            _collect(getattr(tree, name), found)


def field_names(kind: Any) -> tuple[str, ...]:
    """The names of a record's fields, in order; asked for once, since that takes a while."""
    return _names(kind)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def columns(trees: Sequence[Any]) -> list[tuple[Tensor, ...]]:
    """For each tensor of the first tree, itself and its counterparts in the others."""
    found: list[tuple[Tensor, ...]] = []
    _note_columns(trees, found)
    return found


def _note_columns(trees: Sequence[Any], found: list[tuple[Tensor, ...]]) -> None:
    """Many trees may hold the very same branch, such as common weights: one is looked into."""
    first = trees[0]
    if isinstance(first, Tensor):
        found.append(tuple(trees))
    elif all(tree is first for tree in trees):
        found += [(tensor,) * len(trees) for tensor in tensors(first)]
    elif isinstance(first, dict):
        for key in first:
            _note_columns([tree[key] for tree in trees], found)
    elif isinstance(first, (list, tuple)):
        for parts in zip(*trees, strict=True):
            _note_columns(parts, found)
    elif is_dataclass(first) and not isinstance(first, type):
        for name in field_names(type(first)):
            _note_columns([getattr(tree, name) for tree in trees], found)


def with_tensors(tree: T, values: Sequence[Tensor]) -> T:
    """The same tree holding other tensors, given in the order of `tensors`."""
    return cast(T, _filled(tree, iter(values)))


def _filled(tree: Any, supply: Iterator[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return next(supply)
    if isinstance(tree, dict):
        return {
            key: next(supply) if isinstance(item, Tensor) else _filled(item, supply)
            for key, item in tree.items()
        }
    if type(tree) in (list, tuple):
        return type(tree)([_filled(item, supply) for item in tree])
    return map_tensors(lambda _: next(supply), tree)


def shape(tree: Any, known: dict[int, Any] | None = None) -> Any:
    """What two trees must share to be stacked: names, shapes, dtypes and plain values.

    Many trees that hold the very same dicts, such as common weights, may be given one table in
    which what is `known` of a dict is kept; it serves as long as those dicts live.
    """
    if isinstance(tree, Tensor):
        return ("tensor", tuple(tree.shape), tree.dtype, tree.device)
    if isinstance(tree, dict):
        if known is not None and id(tree) in known:
            return known[id(tree)]
        found = ("dict", tuple((key, shape(item, known)) for key, item in tree.items()))
        if known is not None:
            known[id(tree)] = found
        return found
    if isinstance(tree, (list, tuple)):
        return (type(tree), tuple(shape(item, known) for item in tree))
    if is_dataclass(tree) and not isinstance(tree, type):
        parts = tuple((name, shape(getattr(tree, name), known)) for name in field_names(type(tree)))
        return (type(tree), parts)
    return tree


def same(left: Any, right: Any) -> bool:
    """Whether two trees are one object, or dicts, lists or tuples that hold the same objects."""
    if left is right:
        return True
    if type(left) is not type(right) or not isinstance(left, (dict, list, tuple)):
        return False
    if len(left) != len(right):
        return False
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True)
        return all(a == b and same(one, two) for (a, one), (b, two) in pairs)
    return all(same(one, two) for one, two in zip(left, right, strict=True))


def stack(trees: Sequence[T]) -> T:
    """One tree whose tensors have a new first axis, a row for each given tree."""
    return map_tensors(lambda *rows: torch.stack(rows), trees[0], *trees[1:])


def unstack(tree: T, count: int) -> list[T]:
    """The rows of a stacked tree."""
    return [map_tensors(lambda tensor, i=i: tensor[i], tree) for i in range(count)]


def to(tree: T, device: torch.device | str) -> T:
    """The same tree on a device."""
    return map_tensors(lambda tensor: tensor.to(device), tree)


def detach(tree: T) -> T:
    """The same tree cut off from any graph."""
    return map_tensors(lambda tensor: tensor.detach(), tree)
