"""What may stand in a message, said by its hints; and what is wrong with one that arrived.

A hint says the axes of a tensor in words, `Annotated[Tensor, Axes("image", "input")]`. A word that
the method knows (`Method.axes`) has that length; any other has one length throughout a message,
so that there are as many labels as images. Shapes, names and types are compared without looking at
a single entry; then all ranges are looked at together, with one look at a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import torch
from torch import Tensor

from fedstill.core import algebra, ranges
from fedstill.core.model import Network
from fedstill.core.ranges import Range
from fedstill.core.records import (
    CHANGE,
    OPEN_KINDS,
    POSITIONAL,
    WEIGHTS,
    Message,
    Record,
    Weights,
    is_buffer,
)

LARGEST = 2.0**40
"""No number in a message lies beyond it, about 1.1e12: the sum of the squares of all weights of a
network stays finite in single precision."""

LARGEST_INPUT = 2.0**20
"""No entry of an input lies beyond it: normalised inputs are of the order of one."""

MOST = 2**40
"""No party has more examples: at a million a second it would learn from them for two weeks."""

Amount = Annotated[int, Range(0, MOST)]
"""How many examples, steps and the like a party says it has."""

Seed = Annotated[int, Range(0, 2**63 - 1)]
"""What draws follow from."""

Length = int | range | tuple[int, ...]
"""Of an axis: a length, those that may be, or those of the several axes that a word stands for."""

Entries = Literal["float", "whole", "bool", "stored"]
_TYPES: dict[Entries, tuple[torch.dtype, ...]] = {
    "whole": (torch.int64,),
    "bool": (torch.bool,),
    "stored": (torch.uint8, torch.float32),
}


@dataclass(frozen=True, init=False)
class Axes:
    """Beside the hint of a tensor: its axes in words, and which numbers may stand in it.

        images: Annotated[Tensor, Axes("image", "input", high=LARGEST_INPUT)]
        labels: Annotated[Positional, Axes("image", below="class")]

    Numbers `below` a word are whole, from 0 and less than its length. `rising` numbers are sorted
    and none stands twice. An axis that the method does not know may have no entry if `empty`.
    """

    words: tuple[str, ...]
    entries: Entries
    below: str | None
    low: float
    high: float
    rising: bool
    empty: bool

    def __init__(
        self,
        *words: str,
        entries: Entries = "float",
        below: str | None = None,
        low: float | None = None,
        high: float = LARGEST,
        rising: bool = False,
        empty: bool = False,
    ):
        kind = "whole" if below else entries
        least = (0.0 if kind == "whole" else -high) if low is None else low
        values = (words, kind, below, least, high, rising, empty)
        for name, value in zip(self.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name, value)

    @property
    def types(self) -> tuple[torch.dtype, ...]:
        """Which types the numbers may have; floating ones are those that everybody computes in."""
        return _TYPES.get(self.entries) or (torch.get_default_dtype(),)


Inputs = Annotated[Tensor, Axes("image", "input", high=LARGEST_INPUT)]
"""[image, ...], examples as a network takes them."""

Labels = Annotated[Tensor, POSITIONAL, Axes("image", below="class")]
"""[image], the class of each."""


class Kind(NamedTuple):
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} {_short(self.dtype)}"


Layout = Mapping[str, Kind]
"""The tensors of a network by name."""


@lru_cache(maxsize=256)
def layout(network: Network) -> Layout:
    """Names, shapes and types of the weights of a network."""
    floating = torch.get_default_dtype()
    return {
        name: Kind(law.shape, torch.int64 if _counts(name, law.kind) else floating)
        for name, law in network.initial().items()
    }


def _counts(name: str, kind: str) -> bool:
    return kind == "count" or (kind == "own" and name.endswith("num_batches_tracked"))


def trainable(wanted: Layout) -> Layout:
    """Without statistics of norm layers."""
    return {name: kind for name, kind in wanted.items() if not is_buffer(name)}


def misfit(wanted: Layout, weights: Weights) -> str | None:
    """How weights differ in names, shapes or types from those of a layout, or None."""
    if not isinstance(weights, dict):
        return f"sent a {type(weights).__name__} in place of weights"
    if weights.keys() == wanted.keys() and all(
        _is(tensor, wanted[name]) for name, tensor in weights.items()
    ):
        return None
    strange = [
        name
        for name in {**wanted, **weights}
        if not (name in wanted and name in weights and _is(weights[name], wanted[name]))
    ]
    wrong = [_apart(name, weights.get(name), wanted.get(name)) for name in strange[:3]]
    return f"sent another network than it was given: {', '.join(wrong)}"


def _is(tensor: Any, wanted: Kind) -> bool:
    if not isinstance(tensor, Tensor):
        return False
    return tensor.shape == wanted.shape and tensor.dtype == wanted.dtype


def _apart(name: str, came: Any, wanted: Kind | None) -> str:
    if came is None:
        return f"{name} is missing"
    if wanted is None:
        return f"{name} is not known"
    if not isinstance(came, Tensor):
        return f"{name} is a {type(came).__name__}"
    if came.shape != wanted.shape:
        return f"{name} is {tuple(came.shape)} and not {wanted.shape}"
    return f"{name} is {_short(came.dtype)} and not {_short(wanted.dtype)}"


def refusal(
    method: Any, node: Any, sender: str, message: Message, *, finite: bool = False
) -> str | None:
    """Why a node refuses a message, or None: no numbers, immense ones, or what the method says.

    `finite` says that somebody has looked for NaN, infinity and immense numbers already.
    """
    kind = type(message).__name__
    bad = [] if finite else algebra.not_finite(message, LARGEST)
    if bad:
        return f"sent {kind} {strange_numbers(message, bad)}"
    try:
        said: str | None = method.wrong(node, sender, message)
    except Exception as error:  # whatever is sent, looking at it does no harm
        return f"sent {kind} that cannot be checked: {type(error).__name__}: {error}"
    return said


def early_refusal(method: Any, node: Any, sender: str, message: Message) -> str | None:
    """Why a node will refuse a message, by names, shapes and types alone; None if that is open.

    Its tensors that are still to be decoded are on the device meta: they have no numbers yet, and
    take no memory. A method that asks for such numbers is asked again when they are there.
    """
    try:
        said: str | None = method.wrong(node, sender, message)
    except Exception:
        return None
    return said


def strange_numbers(message: Record, bad: Sequence[str]) -> str:
    """What is wrong with tensors that are not finite or hold immense numbers."""
    lost = algebra.not_finite(message)
    if lost:
        return f"with NaN or infinite values in {', '.join(lost[:5])}"
    return f"with values beyond {LARGEST:.3g} in {', '.join(bad[:5])}"


def wrong(
    message: Record, lengths: Mapping[str, Length], layout_of: Callable[[str], Layout]
) -> str | None:
    """What in a message its hints forbid, or None.

    `lengths` are those of the words that are known, `layout_of` gives for the name of a field of
    weights what must stand in it.
    """
    looking = _Looking(lengths, layout_of)
    return looking.at_record(message, "") or looking.at_ranges()


def presence(message: Record, kind: type[Record], **wanted: bool) -> str | None:
    """Why optional fields of a message are there or missing otherwise than wanted, or None.

    A message of another kind has none of them.
    """
    if not isinstance(message, kind):
        return None
    for name, there in wanted.items():
        if (getattr(message, name) is not None) != there:
            return f"sent {'no ' if there else ''}{name}, which this method {_needs(there)}"
    return None


def _needs(there: bool) -> str:
    return "needs" if there else "does not ask for"


@dataclass
class _Looking:
    """What has been found while one message is looked at."""

    lengths: Mapping[str, Length]
    layout_of: Callable[[str], Layout]
    found: dict[tuple[str, str], int] = field(default_factory=dict)  # lengths of other words
    bounds: list[tuple[str, Tensor, float, float]] = field(default_factory=list)

    def at_record(self, record: Record, prefix: str) -> str | None:
        for name, hint in _hints(type(record)):
            why = self.at(hint, getattr(record, name), f"{prefix}{name}", "")
            if why:
                return why
        return None

    def at(self, hint: Any, value: Any, name: str, key: str) -> str | None:
        """Shape, type and names of one value."""
        base, marks, optional = _bare(hint)
        if value is None:
            return None if optional else f"sent no {name}"
        if WEIGHTS in marks:
            wanted = self.layout_of(name)
            return misfit(trainable(wanted) if CHANGE in marks else wanted, value)
        for mark in marks:
            if isinstance(mark, Axes):
                return self.at_tensor(mark, value, name, key)
        if base in OPEN_KINDS:  # the method that holds it looks at it
            return None
        if isinstance(base, type) and issubclass(base, Record):
            return self.at_record(value, f"{name}.") if isinstance(value, base) else _other(name)
        if get_origin(base) in (dict, tuple):
            return self.at_items(base, value, name)
        if base in (int, float, bool, str):
            why = ranges.fault(name, value, _marked(base, marks))
            return f"sent {why}" if why else None
        return None

    def at_items(self, hint: Any, value: Any, name: str) -> str | None:
        inner = get_args(hint)[-1 if get_origin(hint) is dict else 0]
        if not isinstance(value, (dict, tuple)):
            return _other(name)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            why = self.at(inner, item, f"{name}.{key}", str(key))
            if why:
                return why
        return None

    def at_tensor(self, axes: Axes, value: Any, name: str, key: str) -> str | None:
        if not isinstance(value, Tensor):
            return _other(name)
        if value.dtype not in axes.types:
            return f"sent {name} of {_short(value.dtype)}; expected {_short(axes.types[0])}"
        if not self.fits(axes, tuple(value.shape), key):
            wanted = ", ".join(self.told(word, key) for word in axes.words)
            some = 0 in value.shape and not axes.empty
            more = " with an entry or more; Axes(…, empty=True) also allows none" if some else ""
            return f"sent {name} of shape {list(value.shape)}; expected [{wanted}]{more}"
        high = axes.high
        if axes.below is not None:
            last = self.lengths.get(axes.below, self.found.get((axes.below, key), 0))
            high = (last if isinstance(last, int) else math.inf) - 1
        if (axes.low, high) != (-LARGEST, LARGEST) and value.dtype != torch.bool:
            self.bounds.append((name, value, axes.low, high))
        if axes.rising and len(value) > 1:
            self.bounds.append((f"{name}, from one to the next,", value.diff(), 1, math.inf))
        return None

    def fits(self, axes: Axes, shape: tuple[int, ...], key: str) -> bool:
        place = 0
        for word in axes.words:
            known = self.lengths.get(word)
            if isinstance(known, tuple):
                if shape[place : place + len(known)] != known:
                    return False
                place += len(known)
                continue
            if place >= len(shape) or not self.length_fits(word, known, shape[place], key, axes):
                return False
            place += 1
        return place == len(shape)

    def length_fits(
        self, word: str, known: int | range | None, length: int, key: str, axes: Axes
    ) -> bool:
        if isinstance(known, int):
            return length == known
        if known is not None and length not in known:
            return False
        if known is None and not length and not axes.empty:
            return False
        return self.found.setdefault((word, key), length) == length

    def told(self, word: str, key: str) -> str:
        """A word with the length that it has."""
        known = self.lengths.get(word, self.found.get((word, key)))
        if (word, key) in self.found or isinstance(known, int):
            return f"{word} = {self.found.get((word, key), known)}"
        if isinstance(known, range):
            return f"{word} from {known.start} to {known.stop - 1}"
        return f"{word} = {list(known)}" if known is not None else word

    def at_ranges(self) -> str | None:
        """Whether numbers lie where they may; one look at a device for all that lie there."""
        apart: dict[torch.device, list[tuple[str, Tensor, float, float]]] = {}
        for bound in self.bounds:
            if bound[1].numel() and not bound[1].is_meta:  # there, a number is still to be made
                apart.setdefault(bound[1].device, []).append(bound)
        for bounds in apart.values():
            with torch.no_grad():
                ends = [end.double() for _, t, _, _ in bounds for end in t.aminmax()]
                seen = iter(torch.stack(ends).tolist())
            for name, _, low, high in bounds:
                least, most = next(seen), next(seen)
                if not (low <= least and most <= high):
                    told = f"at least {low:g}" if math.isinf(high) else f"{low:g} to {high:g}"
                    return f"sent {name} with values from {least:g} to {most:g}; expected {told}"
        return None


def _hints(kind: type[Record]) -> tuple[tuple[str, Any], ...]:
    key: Any = kind
    return _of_kind(key)


@cache
def _of_kind(kind: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(ranges.hints(kind).items())


@lru_cache(maxsize=1024)
def _bare(hint: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """A hint without marks and without `| None`, its marks, and whether None may stand there."""
    if get_origin(hint) is Annotated:
        base, *marks = get_args(hint)
        inner, more, optional = _bare(base)
        return inner, (*more, *marks), optional
    if get_origin(hint) in (Union, UnionType):
        options = [option for option in get_args(hint) if option is not NoneType]
        if len(options) == 1:
            inner, marks_in, _ = _bare(options[0])
            return inner, marks_in, True
    return hint, (), False


@lru_cache(maxsize=1024)
def _marked(base: Any, marks: tuple[Any, ...]) -> Any:
    """A hint with its marks again."""
    return Annotated[(base, *marks)] if marks else base


def _other(name: str) -> str:
    return f"sent something else than its hint says in {name}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
