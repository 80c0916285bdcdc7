"""Other people's arrays as inputs and labels: every form that is understood, and why not others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError
from fedstill.data.images import Inputs, finite

Channels = Literal["first", "last"]
USUAL_CHANNELS = (1, 3)  # grey, colour
NUMBERS = (int, float, np.number, np.bool_)
Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Given:
    """Examples as a person handed them over: arrays in any form, labels as numbers or texts."""

    x: Array
    y: Array
    class_names: tuple[str, ...] | None = None  # where the source knows what its numbers mean
    channels: Channels | None = None  # where the source knows


def as_array(name: str, value: Any) -> Array:
    """A NumPy array of a tensor, a list, a table or an array."""
    if isinstance(value, np.ndarray):
        found = value
    elif is_tensor(value):
        found = of_tensor(value)
    elif isinstance(value, (list, tuple)):
        found = stacked(name, value)
    else:
        found = np.asarray(value)
    return _of_objects(name, found) if found.dtype == object else found


def _of_objects(name: str, found: Array) -> Array:
    """Texts, or numbers of several types as the columns of a table have them, in one type."""
    items = [math.nan if _is_nothing(item) else item for item in found.flat]
    if items and all(isinstance(item, str) for item in items):
        return found.astype(str)
    without = [place for place, item in enumerate(found.flat) if _is_nothing(item)]
    if without and found.ndim == 1:
        raise DataError(
            f"{name} has no value for {len(without)} of {len(found)} examples, the first at "
            f"{without[0]}; leave them out, or give them one"
        )
    if items and all(isinstance(item, NUMBERS) for item in items):
        return np.array(items).reshape(found.shape)
    raise DataError(
        f"{name} holds Python objects, not numbers; make one array of numbers of it, e.g. "
        "with np.stack, and turn columns of words into numbers"
    )


def _is_nothing(item: Any) -> bool:
    """Whether this stands where a value is missing: None, NaN, or what pandas has for it."""
    if isinstance(item, float):
        return math.isnan(item)
    return item is None or type(item).__name__ in ("NAType", "NaTType")


def is_tensor(value: Any) -> bool:
    """Whether this is a tensor of torch, which is not imported here."""
    return all(hasattr(value, word) for word in ("detach", "cpu", "numpy", "float"))


def of_tensor(value: Any) -> Array:
    """A tensor's numbers; types that NumPy lacks become single precision."""
    on_host = value.detach().cpu()
    try:
        found: Array = on_host.numpy()
    except TypeError:
        found = on_host.float().numpy()
    return found


def stacked(name: str, items: Sequence[Any]) -> Array:
    """A list of numbers, texts, arrays or tensors as one array."""
    if not items:
        raise DataError(f"{name} is empty; at least one example is needed")
    arrays = [of_tensor(item) if is_tensor(item) else np.asarray(item) for item in items]
    first = arrays[0].shape
    for place, array in enumerate(arrays):
        if array.shape != first:
            raise DataError(
                f"{name} must have examples of one shape, but number 0 has {list(first)} and "
                f"number {place} has {list(array.shape)}; bring them to one size first"
            )
    kinds = [array.dtype.kind for array in arrays]
    places = {kind in "US": place for place, kind in enumerate(kinds) if kind != "O"}
    if len(places) > 1:
        text, number = (items[places[is_text]] for is_text in (True, False))
        raise DataError(
            f"{name} must hold texts alone or numbers alone, but holds {text!r} and {number!r}; "
            "write all in one way, and leave out examples without a value"
        )
    return np.stack(arrays)


def as_inputs(name: str, x: Array, channels: Channels | None) -> tuple[Inputs, tuple[str, ...]]:
    """Images or vectors as they are stored, and notes on what was guessed."""
    if channels not in (None, "first", "last"):
        raise DataError(f"channels must be 'first', 'last' or left out, but is {channels!r}")
    if x.dtype.kind not in "buif":
        advice = "; of files, read the numbers first" if x.dtype.kind in "US" else ""
        raise DataError(f"{name} must hold numbers, but holds {x.dtype}{advice}")
    if not x.size:
        raise DataError(f"{name} is empty, {list(x.shape)}; at least one example is needed")
    if x.ndim == 2:
        return _ready(finite(name, x)), ()
    if x.ndim == 3:
        note = f"inputs of {list(x.shape[1:])} were read as grey images, [height, width]"
        return _ready(_pixels(name, x)[:, None]), (note,)
    if x.ndim == 4:
        place = channels or _guessed(name, x)
        images = _pixels(name, x)
        images = images if place == "first" else images.transpose(0, 3, 1, 2)
        note = f"inputs of {list(x.shape[1:])} were read with the channels {place}"
        return _ready(images), () if channels else (note,)
    raise DataError(
        f"{name} must be vectors [example, feature], grey images [example, height, width] or "
        f"images with channels, but has {x.ndim} axes, {list(x.shape)}"
    )


def _pixels(name: str, x: Array) -> Inputs:
    """Images as bytes, or as single precision."""
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind == "f":
        return finite(name, x)
    advice = (
        "divide by its largest value and use np.float32"
        if x.dtype.itemsize > 1 and x.max(initial=0) > 255
        else "use astype(np.uint8) for 0..255, or astype(np.float32)"
    )
    raise DataError(f"{name} must be images as bytes (uint8) or floats, but is {x.dtype}; {advice}")


def _guessed(name: str, x: Array) -> Channels:
    first, last = x.shape[1] in USUAL_CHANNELS, x.shape[3] in USUAL_CHANNELS
    if first == last:
        raise DataError(
            f"{name} {list(x.shape)}: channels may be the second axis or the last; "
            "say channels='first' or channels='last'"
        )
    return "first" if first else "last"


def _ready(inputs: Inputs) -> Inputs:
    """In one piece, and in memory that torch may share."""
    found: Inputs = np.require(inputs, requirements=["C", "W"])
    return found


def as_labels(name: str, y: Array, count: int) -> Array:
    """One label for each of `count` examples: whole numbers from 0 as int64, or texts."""
    if y.ndim == 2:
        advice = "y.ravel()" if y.shape[1] == 1 else "y.argmax(1), if there is a column per class"
        raise DataError(
            f"{name} must be one label for each example, [example], but is {list(y.shape)}; "
            f"use {advice}"
        )
    if y.ndim != 1:
        raise DataError(f"{name} must be one label for each example, but is {list(y.shape)}")
    if len(y) != count:
        raise DataError(f"{name} has {len(y)} labels for {count} examples; give one for each")
    if y.dtype.kind in "US":
        return y.astype(str)
    if y.dtype.kind == "f":
        whole = bool((np.isfinite(y) & (y == np.floor(y))).all())
        advice = "use y.astype(int)" if whole else "classes are counted from 0, or named by texts"
        raise DataError(f"{name} must be whole numbers or texts, but is {y.dtype}; {advice}")
    if y.dtype.kind not in "bui":
        raise DataError(f"{name} must be whole numbers or texts, but is {y.dtype}")
    if y.min() < 0:
        raise DataError(
            f"{name} counts classes from 0, but {y.min()} is among its labels; number the classes "
            "from 0, or give their names as texts"
        )
    if y.max() >= max(1000, count):
        raise DataError(
            f"{name} reaches {y.max()} with {count} examples; number the classes from 0, "
            "or give their names as texts"
        )
    return y.astype(np.int64)


def common_classes(
    parts: Sequence[Array], known: Sequence[str | int] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The class names that all these labels use, and notes; texts are sorted, numbers counted."""
    words = [part.dtype.kind == "U" for part in parts]
    if any(words) and not all(words):
        raise DataError("labels must be numbers for all or texts for all, but are of both kinds")
    if known is not None:
        names = tuple(map(str, known))
        if len(set(names)) < len(names) or not names:
            raise DataError(f"class_names must name each class once, but are {list(names)}")
        return names, ()
    if all(words):
        return tuple(sorted({str(word) for part in parts for word in np.unique(part)})), ()
    classes = max(int(part.max()) for part in parts) + 1
    unused = np.setdiff1d(np.arange(classes), np.concatenate([np.unique(p) for p in parts]))
    notes = (f"no example has label {', '.join(map(str, unused))}",) if len(unused) else ()
    return tuple(map(str, range(classes))), notes


def numbered(name: str, labels: Array, names: Sequence[str]) -> NDArray[np.int64]:
    """Labels as numbers of these class names."""
    if labels.dtype.kind != "U":
        if labels.max() >= len(names):
            raise DataError(
                f"{name}: labels must lie in 0..{len(names) - 1} for {len(names)} class names, "
                f"but {labels.max()} is among them"
            )
        return labels.astype(np.int64, copy=False)
    found, places = np.unique(labels, return_inverse=True)
    strange = [str(word) for word in found if word not in names]
    if strange:
        raise DataError(
            f"{name} has classes that are not among class_names: {', '.join(strange)}; "
            f"known: {', '.join(names)}"
        )
    numbers = np.array([list(names).index(word) for word in found], np.int64)
    return numbers[places]
