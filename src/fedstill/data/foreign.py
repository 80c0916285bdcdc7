"""Data sets of torch and of Hugging Face, by what they can do; neither library is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstill.core.errors import DataError
from fedstill.data.arrays import Array, Channels, Given, as_array, is_tensor, of_tensor, stacked

INPUT_COLUMNS = ("image", "img", "pixel_values", "x", "features", "embedding", "embeddings")
LABEL_COLUMNS = ("label", "labels", "y", "target", "fine_label")


@dataclass(frozen=True)
class Columns:
    """Which columns of a table hold the inputs and the labels; None: found."""

    image: str | None = None
    label: str | None = None


def given(name: str, source: Any, columns: Columns) -> Given:
    """Examples from a pair of arrays or from a data set."""
    if isinstance(source, Given):
        return source
    if isinstance(source, tuple):
        if len(source) != 2:
            raise DataError(f"{name} must be a pair (x, y), but has {len(source)} parts")
        x, y = source
        return Given(as_array(f"{name}: x", x), as_array(f"{name}: y", y))
    if hasattr(source, "column_names") and hasattr(source, "features"):
        return from_table(name, source, columns)
    if hasattr(source, "columns") and any(hasattr(source, w) for w in ("to_numpy", "to_pandas")):
        raise DataError(
            f"{name} is a table of type {type(source).__name__}; give its columns of inputs and "
            "that of labels as a pair, such as (table[['age', 'dose']], table['label'])"
        )
    if isinstance(source, (np.ndarray, list, Mapping)) or is_tensor(source):
        raise DataError(f"{name} has inputs but no labels; give a pair (x, y), or a data set")
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return from_items(name, source, columns)
    held = hasattr(source, "dataset")  # as a DataLoader has it
    remedy = f"give {'its data set, .dataset' if held else 'all its examples as two arrays'}"
    raise DataError(
        f"{name} must be a pair (x, y) of arrays, or a data set with a length and numbered items, "
        f"but is of type {type(source).__name__}; {remedy}"
    )


def inputs_of(name: str, source: Any, columns: Columns) -> tuple[Array, Channels | None]:
    """The inputs of arrays or of a data set, and where their channels are if they tell."""
    if isinstance(source, Mapping):
        raise DataError(
            f"{name} must be an array or a data set, but holds {', '.join(map(str, source))}; "
            "give one of them"
        )
    if hasattr(source, "column_names") and hasattr(source, "features"):
        column = _column(name, "image", columns.image, _kinds(source), "Image", INPUT_COLUMNS)
        return pictures(f"{name}: {column}", list(source[column]))
    arrays = isinstance(source, (list, tuple)) or is_tensor(source) or hasattr(source, "__array__")
    if arrays or not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        return as_array(name, source), None
    items = [source[place] for place in range(len(source))]
    return pictures(name, [_input(name, item, columns) for item in items])


def from_table(name: str, table: Any, columns: Columns) -> Given:
    """A data set of Hugging Face: one column of inputs, one of labels."""
    kinds = _kinds(table)
    inputs = _column(name, "image", columns.image, kinds, "Image", INPUT_COLUMNS)
    labels = _column(name, "label", columns.label, kinds, "ClassLabel", LABEL_COLUMNS)
    x, place = pictures(f"{name}: {inputs}", list(table[inputs]))
    y = as_array(f"{name}: {labels}", list(table[labels]))
    names = getattr(table.features[labels], "names", None)
    return Given(x, y, tuple(map(str, names)) if names else None, place)


def _kinds(table: Any) -> dict[str, str]:
    """What each column of a data set of Hugging Face holds, in its words."""
    return {column: type(table.features[column]).__name__ for column in table.column_names}


def _column(
    name: str,
    option: str,
    wanted: str | None,
    kinds: Mapping[str, str],
    kind: str,
    usual: Sequence[str],
) -> str:
    """The column that is asked for, or the only one of a kind, or the first of a usual name."""
    if wanted is not None:
        if wanted not in kinds:
            raise DataError(f"{name} has no column {wanted!r}; it has {', '.join(kinds)}")
        return wanted
    of_kind = [column for column in kinds if kinds[column] == kind]
    known = [column for column in usual if column in kinds]
    if len(of_kind) == 1:
        return of_kind[0]
    if len(of_kind) > 1 or not known:
        raise DataError(
            f"{name}: which column is meant by {option} is not clear; "
            f"say {option}=… with one of {', '.join(kinds)}"
        )
    return known[0]


def from_items(name: str, items: Any, columns: Columns) -> Given:
    """A map-style data set of torch, whose items are pairs (x, y) or tables."""
    tensors = getattr(items, "tensors", None)  # of a TensorDataset: at once
    if _reads_plainly(items) and isinstance(tensors, tuple) and len(tensors) == 2:
        return Given(of_tensor(tensors[0]), of_tensor(tensors[1]))
    if not len(items):
        raise DataError(f"{name} is empty; at least one example is needed")
    pairs = [_pair(name, i, items[i], columns) for i in range(len(items))]
    x, place = pictures(f"{name}: x", [pair[0] for pair in pairs])
    y = stacked(f"{name}: y", [pair[1] for pair in pairs])
    names = getattr(items, "classes", None)
    known = names if isinstance(names, (list, tuple)) and y.dtype.kind in "ui" else None
    return Given(x, y, tuple(map(str, known)) if known else None, place)


def _reads_plainly(items: Any) -> bool:
    """Whether these are a TensorDataset of torch whose items nobody changes as they are read."""
    read = getattr(type(items), "__getitem__", None)
    named = f"{getattr(read, '__module__', '')}.{getattr(read, '__qualname__', '')}"
    return named == "torch.utils.data.dataset.TensorDataset.__getitem__"


def _pair(name: str, place: int, item: Any, columns: Columns) -> tuple[Any, Any]:
    if isinstance(item, Mapping):
        kinds = dict.fromkeys(item, "")
        inputs = _column(name, "image", columns.image, kinds, "Image", INPUT_COLUMNS)
        labels = _column(name, "label", columns.label, kinds, "ClassLabel", LABEL_COLUMNS)
        return item[inputs], item[labels]
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item[0], item[1]
    raise DataError(
        f"{name} must have items (x, y), but item {place} is a {type(item).__name__}"
        + (f" of {len(item)}" if isinstance(item, (tuple, list)) else "")
    )


def _input(name: str, item: Any, columns: Columns) -> Any:
    """The input of an item, which may have a label beside it."""
    if isinstance(item, Mapping):
        kinds = dict.fromkeys(item, "")
        return item[_column(name, "image", columns.image, kinds, "Image", INPUT_COLUMNS)]
    return item[0] if isinstance(item, tuple) else item


def pictures(name: str, items: Sequence[Any]) -> tuple[Array, Channels | None]:
    """Items as one array, and where its channels are if the items tell: pictures and tensors."""
    if items and all(_is_picture(item) for item in items):
        colour = any(item.mode not in GREY for item in items)
        read = [_pixels(name, item, colour) for item in items]
        if any(item.mode in DEEP for item in items):  # all in 0..1
            read = [x / np.float32(255) if x.dtype == np.uint8 else x for x in read]
        return stacked(name, read), "first"
    found = as_array(name, list(items))
    return found, "first" if items and is_tensor(items[0]) and found.ndim == 4 else None


DEEP = ("I;16", "I", "F")
GREY = ("1", "L", *DEEP)


def _is_picture(item: Any) -> bool:
    return all(hasattr(item, word) for word in ("convert", "mode", "getbands"))


def _pixels(name: str, picture: Any, colour: bool) -> Array:
    """A picture of Pillow as [channel, height, width]; those deeper than bytes in 0..1."""
    if picture.mode in DEEP:
        if colour:
            raise DataError(f"{name} has colour pictures and grey ones of 16 bits; convert them")
        deep = np.asarray(picture, np.float32)[None]
        return deep if picture.mode == "F" else deep / np.float32(65535)
    found = np.asarray(picture.convert("RGB" if colour else "L"), np.uint8)
    return found.transpose(2, 0, 1) if colour else found[None]
