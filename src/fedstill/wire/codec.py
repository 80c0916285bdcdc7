"""Records to bytes and back, checked against their type hints; no pickle.

A record is a safetensors file, so other programs can read it: every tensor under its dotted name,
and everything else (numbers, texts, and how dicts, tuples and records are nested) as JSON under
one key of the file's metadata. One key, because the order of several is not fixed, and equal
records shall be equal bytes.

Files are written and read here, in less time than by the safetensors library, which reads `bytes`
alone, hands out no metadata of bytes in memory, and lets pass what is refused here: names that
stand twice, too many tensors or axes, sizes that nothing can have, and fields that do not fit the
record's hints. `tests/wire` has the library read what is written, and judge what is refused.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor

from fedstill.core import trees
from fedstill.core.errors import WireError
from fedstill.core.files import write_whole
from fedstill.core.records import OPEN_KINDS, POSITIONAL, Record, Weights, record_hints

R = TypeVar("R", bound=Record)

VERSION = 2
FIRST_VERSION = "1"  # had three keys in the metadata; is still read
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}

_METADATA = "__metadata__"
_TENSOR = "tensor"  # stands in the JSON where the record has a tensor
_KIND, _FIELDS = "kind", "fields"  # of a record whose kind its hint leaves open
_ALIGNMENT = 8  # of the first tensor, in bytes from the start of the file
_DEPTH = 32  # how far records, dicts and tuples may be nested
_LONGEST = 4096  # characters of a dict's key; it stands in the names of all that is below it
_INTEGERS = range(-(2**63), 2**64)


@dataclass(frozen=True)
class Limits:
    """What a decoder accepts: bytes in all, tensors, axes of a tensor, bytes of the header."""

    bytes: int = 2 << 30
    tensors: int = 100_000
    dims: int = 8
    header: int = 16 << 20


STRANGERS = Limits()  # what may come from another machine
OWN = Limits(bytes=1 << 42, tensors=1_000_000, header=100_000_000)  # what this machine has written
# A header of more bytes is refused by the safetensors library.


class Entry(NamedTuple):
    """A tensor as the header declares it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # in bytes, from the end of the header
    end: int


def encode(record: Record) -> bytes:
    """The record as a safetensors file; equal records give equal bytes."""
    writer = _Writer(type(record).__name__)
    plain = writer.plain(type(record), record, "", 0)
    about = _json({"format": VERSION, "record": writer.root, "fields": plain})
    entries: dict[str, Any] = {_METADATA: {"fedstill": about}}
    payload: list[Any] = []
    end = 0
    # Widest numbers first, as the format's own writer does: every tensor is aligned to its type.
    for name, tensor in sorted(writer.tensors.items(), key=lambda item: -item[1].element_size()):
        begin, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        entries[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": shape,
            "data_offsets": [begin, end],
        }
        payload.append(tensor.reshape(-1).view(torch.uint8).numpy())
    try:
        header = _json(entries, ascii_only=False).encode()
    except UnicodeEncodeError as error:
        raise WireError(f"{writer.root}: the name of a tensor is not valid text: {error}") from None
    header += b" " * (-len(header) % _ALIGNMENT)
    if len(header) > OWN.header:
        raise WireError(
            f"{writer.root}: names and plain values take {len(header)} bytes, more than the "
            f"{OWN.header} that can be read back; put large values into tensors"
        )
    return b"".join([len(header).to_bytes(8, "little"), header, *payload])


def decode(
    data: bytes | bytearray | memoryview,
    kind: type[R],
    *,
    limits: Limits = STRANGERS,
    device: torch.device | str = "cpu",
    held: Sequence[type[Record]] = (),
) -> R:
    """The record that `encode` wrote, or a WireError that says what does not fit.

    All of it is checked before memory is taken for the first tensor. A field hinted `Message` or
    `State` must be one of the kinds `held`, which the method says (`Method.holds`).
    """
    view = memoryview(data).cast("B")
    plain, entries, payload = _opened(view, kind.__name__, limits)
    reader = _Reader(kind.__name__, entries, held)
    skeleton: R = reader.value(kind, plain, "", 0)
    reader.finish(_hints(kind))
    _check_layout(kind.__name__, entries, len(payload))
    ordered = [
        _tensor(kind.__name__, name, entries[name], payload).to(device)
        for name, _ in trees.named_tensors(skeleton)
    ]
    return trees.with_tensors(skeleton, ordered)


def tensors(data: bytes) -> Weights:
    """Every tensor of a file by its dotted name, whatever record it holds."""
    return dict(load_tensors(data))


def describe(kind: type[Record], held: Sequence[type[Record]] = ()) -> dict[str, str]:
    """Field by field what a record holds, in words for people; as `floats` and `bytes` name them.

    Where a field may be one of the kinds `held`, their fields stand in its place.
    """
    hints, described = _hints(kind), {}
    for name, hint in hints.items():
        choices = [choice for choice in held if hint in OPEN_KINDS and issubclass(choice, hint)]
        for choice in choices:
            for inner, text in describe(choice, held).items():
                described[f"{name}.{inner}" if inner in hints else inner] = text
        if not choices:
            described[name] = _text(hint)
    return described


def save(record: Record, path: Path | str) -> None:
    """Write a record to a file: afterwards it is there whole, or as it was before."""
    write_whole(path, encode(record), by_several=True)


def load(
    path: Path | str,
    kind: type[R],
    *,
    limits: Limits = OWN,
    device: torch.device | str = "cpu",
    held: Sequence[type[Record]] = (),
) -> R:
    """The record that `save` wrote."""
    try:
        return decode(Path(path).read_bytes(), kind, limits=limits, device=device, held=held)
    except WireError as error:
        raise WireError(f"{path}: {error}") from error


class _Writer:
    """Collects a record's tensors, on the host, and gives the rest as JSON."""

    def __init__(self, root: str):
        self.root = root
        self.tensors: dict[str, Tensor] = {}

    def plain(self, hint: Any, value: Any, name: str, depth: int) -> Any:
        """What stands in the JSON for a value of a hinted type."""
        hint, optional = _bare(hint)
        if value is None and optional:
            return None
        _check_depth(self.root, name, depth)
        if hint is Tensor:
            return self._tensor(value, name)
        if hint in _SCALARS:
            if not _fits(value, hint):
                _refuse(self.root, name, _text(hint), _shown(value))
            return str(value) if isinstance(value, float) and not math.isfinite(value) else value
        if hint in OPEN_KINDS:
            if not isinstance(value, hint) or type(value) in OPEN_KINDS:
                _refuse(self.root, name, f"a kind of {_text(hint)}", _shown(value))
            inside = self.plain(type(value), value, name, depth + 1)
            return {_KIND: type(value).__name__, _FIELDS: inside}
        if _is_record(hint):
            if type(value) is not hint:
                _refuse(self.root, name, _text(hint), _shown(value))
            return {
                field: self.plain(inner, getattr(value, field), _under(name, field), depth + 1)
                for field, inner in _hints(hint).items()
            }
        if _is_dict(hint):
            if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
                _refuse(self.root, name, _text(hint), _shown(value))
            _check_keys(self.root, name, value)
            inner = get_args(hint)[1]
            return {k: self.plain(inner, v, _under(name, k), depth + 1) for k, v in value.items()}
        if get_origin(hint) is tuple:
            if not isinstance(value, tuple):
                _refuse(self.root, name, _text(hint), _shown(value))
            hints = _item_hints(self.root, name, hint, len(value))
            return [
                self.plain(inner, item, _under(name, i), depth + 1)
                for i, (inner, item) in enumerate(zip(hints, value, strict=True))
            ]
        raise _unsupported(self.root, name, hint)

    def _tensor(self, value: Any, name: str) -> str:
        if not isinstance(value, Tensor):
            _refuse(self.root, name, "a tensor", _shown(value))
        if value.layout is not torch.strided or value.dtype not in _CODES:
            _refuse(self.root, name, f"a dense tensor, one of {', '.join(DTYPES)}", _shown(value))
        if name in self.tensors:
            raise WireError(
                f"{self.root}: two tensors are called {name!r}, because a key contains a dot; "
                "rename the key"
            )
        self.tensors[name] = value.detach().cpu().resolve_neg().contiguous()
        return _TENSOR


class _Reader:
    """Builds a record from its JSON; its tensors have shapes and types, but no memory yet."""

    def __init__(self, root: str, entries: dict[str, Entry], held: Sequence[type[Record]]):
        self.root = root
        self.entries = entries
        self.held = held
        self.unread = dict.fromkeys(entries)

    def value(self, hint: Any, given: Any, name: str, depth: int) -> Any:
        """A value of a hinted type from what stands for it in the JSON."""
        hint, optional = _bare(hint)
        if given is None and optional:
            return None
        _check_depth(self.root, name, depth)
        if hint is Tensor:
            return self._tensor(given, name)
        if hint in _SCALARS:
            return self._scalar(hint, given, name)
        if hint in OPEN_KINDS:
            return self._one_of(hint, given, name, depth)
        if _is_record(hint):
            return self._record(hint, given, name, depth)
        if _is_dict(hint):
            if not isinstance(given, dict):
                _refuse(self.root, name, _text(hint), _shown(given))
            _check_keys(self.root, name, given)
            inner = get_args(hint)[1]
            return {k: self.value(inner, v, _under(name, k), depth + 1) for k, v in given.items()}
        if get_origin(hint) is tuple:
            if not isinstance(given, list):
                _refuse(self.root, name, _text(hint), _shown(given))
            hints = _item_hints(self.root, name, hint, len(given))
            return tuple(
                self.value(inner, item, _under(name, i), depth + 1)
                for i, (inner, item) in enumerate(zip(hints, given, strict=True))
            )
        raise _unsupported(self.root, name, hint)

    def finish(self, known: Iterable[str]) -> None:
        """Every tensor that came has found its place."""
        if self.unread:
            name = next(iter(self.unread))
            _refuse(self.root, name, f"only the fields {', '.join(known)}", "a tensor besides")

    def _tensor(self, given: Any, name: str) -> Tensor:
        if given != _TENSOR:
            _refuse(self.root, name, "a tensor", _shown(given))
        if name not in self.unread:
            _refuse(self.root, name, "a tensor", "none, or one that is used twice")
        del self.unread[name]
        entry = self.entries[name]
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    def _scalar(self, hint: type, given: Any, name: str) -> Any:
        if hint is float and given in ("inf", "-inf", "nan"):
            return float(given)
        if not _fits(given, hint):
            came = f"a tensor {name!r}" if name in self.entries else _shown(given)
            _refuse(self.root, name, _text(hint), came)
        return given

    def _one_of(self, hint: type[Record], given: Any, name: str, depth: int) -> Record:
        """A record of one of the kinds that may stand here, which says itself which it is."""
        known = {kind.__name__: kind for kind in self.held if issubclass(kind, hint)}
        wanted = f"one of {', '.join(known) or 'no kinds at all'}"
        if not isinstance(given, dict) or set(given) != {_KIND, _FIELDS}:
            _refuse(self.root, name, wanted, _shown(given))
        if not isinstance(given[_KIND], str) or given[_KIND] not in known:
            _refuse(self.root, name, wanted, _shown(given[_KIND]))
        return self._record(known[given[_KIND]], given[_FIELDS], name, depth + 1)

    def _record(self, kind: type[Record], given: Any, name: str, depth: int) -> Record:
        if not isinstance(given, dict):
            _refuse(self.root, name, _text(kind), _shown(given))
        hints = _hints(kind)
        for field in given:
            if field not in hints:
                _refuse(self.root, _under(name, field), f"only {', '.join(hints)}", "that field")
        for field, inner in hints.items():
            if field not in given:
                _refuse(self.root, _under(name, field), _text(inner), "nothing")
        values = {
            field: self.value(inner, given[field], _under(name, field), depth + 1)
            for field, inner in hints.items()
        }
        try:
            return kind(**values)
        except (TypeError, ValueError) as error:
            raise WireError(f"{self.root}: {kind.__name__} refuses its values: {error}") from error


def _opened(
    view: memoryview, root: str, limits: Limits
) -> tuple[Any, dict[str, Entry], memoryview]:
    """The JSON of the fields, the table of tensors (checked but for where these lie), the rest."""
    if len(view) > limits.bytes:
        raise WireError(f"{root}: {len(view)} bytes came, the limit is {limits.bytes} in all")
    if len(view) < 8:
        raise WireError(f"{root}: expected at least 8 bytes, came {len(view)}")
    length = int.from_bytes(view[:8], "little")
    if length > limits.header:
        raise WireError(f"{root}: a header of {length} bytes, the limit is {limits.header}")
    if length > len(view) - 8:
        raise WireError(f"{root}: expected a header of {length} bytes, came {len(view) - 8}")
    table = _parsed(bytes(view[8 : 8 + length]), root, "header")
    if not isinstance(table, dict):
        raise WireError(f"{root}: expected a table of tensors in the header, came {_shown(table)}")
    plain = _plain(table.pop(_METADATA, None), root)
    if len(table) > limits.tensors:
        raise WireError(f"{root}: {len(table)} tensors came, the limit is {limits.tensors}")
    entries = {name: _entry(root, name, item, limits) for name, item in table.items()}
    return plain, entries, view[8 + length :]


def _plain(metadata: Any, root: str) -> Any:
    """The fields that the metadata holds, if they are of this format and of this record."""
    expected = {"format", "record", "fields"}
    if isinstance(metadata, dict) and set(metadata) == {"fedstill", "record", "fields"}:
        about = {"format": metadata["fedstill"], **metadata}
        known = about["format"] == FIRST_VERSION
    else:
        about = _about(metadata, root)
        known = set(about) == expected and about["format"] == VERSION
    if "format" in about and not known:
        raise WireError(
            f"{root}: written in wire format {_shown(about['format'])}, this program reads formats "
            f"{FIRST_VERSION} and {VERSION}; use the same fedstill on both sides"
        )
    if not known:
        raise WireError(f"{root}: expected metadata {sorted(expected)}, came {_shown(metadata)}")
    if about["record"] != root:
        raise WireError(f"expected a record {root}, came {_shown(about['record'])}")
    if about["format"] == VERSION:
        return about["fields"]
    return _parsed_text(about["fields"], root, "fields")


def _about(metadata: Any, root: str) -> dict[str, Any]:
    """What the single key of the metadata holds."""
    if not isinstance(metadata, dict) or set(metadata) != {"fedstill"}:
        raise WireError(f"{root}: expected metadata 'fedstill', came {_shown(metadata)}")
    about = _parsed_text(metadata["fedstill"], root, "fields")
    if not isinstance(about, dict):
        raise WireError(f"{root}: expected a table in the metadata, came {_shown(about)}")
    return about


def _parsed_text(text: Any, root: str, part: str) -> Any:
    if not isinstance(text, str):
        raise WireError(f"{root}: expected {part} as JSON, came {_shown(text)}")
    return _parsed(text.encode("utf-8", "surrogatepass"), root, part)


def _parsed(text: bytes, root: str, part: str) -> Any:
    """Strict JSON: UTF-8, no name twice, no NaN, no nesting without end."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for name, value in pairs:
            if name in table:
                raise ValueError(f"the name {_shown(name)} stands twice")
            table[name] = value
        return table

    def constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is not JSON")

    try:
        return json.loads(text.decode(), object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise WireError(f"{root}: the {part} are nested too deeply") from None
    except ValueError as error:
        raise WireError(f"{root}: expected JSON in the {part}: {error}") from error


def _entry(root: str, name: str, item: Any, limits: Limits) -> Entry:
    """One line of the header: a known dtype, a shape within the limits, and two offsets."""
    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        _refuse(root, name, "dtype, shape and data_offsets", _shown(item))
    code, shape = item["dtype"], item["shape"]
    if not isinstance(code, str) or code not in DTYPES:
        _refuse(root, name, f"a dtype among {', '.join(DTYPES)}", _shown(code))
    if not _sizes(shape) or len(shape) > limits.dims:
        _refuse(root, name, f"a shape of at most {limits.dims} axes", _shown(shape))
    # An axis of no length must not hide others that no tensor can have.
    if math.prod(max(size, 1) for size in shape) > limits.bytes:
        _refuse(root, name, f"a shape within {limits.bytes} bytes", _shown(shape))
    offsets = item["data_offsets"]
    if not _sizes(offsets) or len(offsets) != 2:
        _refuse(root, name, "two data_offsets", _shown(offsets))
    return Entry(DTYPES[code], tuple(shape), *offsets)


def _check_layout(root: str, entries: dict[str, Entry], payload: int) -> None:
    """The tensors lie one behind the other, each as long as it says, and fill the payload."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            _refuse(root, name, f"a tensor at offset {end}", f"one at {entry.begin}")
        end = entry.end
        size = math.prod(entry.shape) * entry.dtype.itemsize
        if end - entry.begin != size:
            _refuse(root, name, f"{size} bytes", f"offsets {entry.begin} to {end}")
    if end != payload:
        raise WireError(f"{root}: expected {end} bytes behind the header, came {payload}")


def _tensor(root: str, name: str, entry: Entry, payload: memoryview) -> Tensor:
    """A tensor in memory of its own."""
    if entry.begin == entry.end:
        return torch.empty(entry.shape, dtype=entry.dtype)
    raw = bytearray(payload[entry.begin : entry.end])
    if entry.dtype is torch.bool and torch.frombuffer(raw, dtype=torch.uint8).max() > 1:
        _refuse(root, name, "bytes 0 and 1 for BOOL", "another byte")
    return torch.frombuffer(raw, dtype=entry.dtype).reshape(entry.shape)


_SCALARS = (int, float, bool, str)


def _hints(kind: Any) -> dict[str, Any]:
    """Field by field the hint of a record."""
    hints = record_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _bare(hint: Any) -> tuple[Any, bool]:
    """A hint without its marks and without `| None`, and whether it had the latter."""
    if get_origin(hint) is Annotated:
        return _bare(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        options = [option for option in get_args(hint) if option is not NoneType]
        if len(options) == 1:
            return _bare(options[0])[0], True
    return hint, False


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Record)


def _is_dict(hint: Any) -> bool:
    return get_origin(hint) is dict and get_args(hint)[0] is str


def _item_hints(root: str, name: str, hint: Any, count: int) -> list[Any]:
    args = get_args(hint)
    if len(args) == 2 and args[1] is Ellipsis:
        return [args[0]] * count
    if len(args) != count:
        _refuse(root, name, _text(hint), f"{count} items")
    return list(args)


def _fits(value: Any, hint: type) -> bool:
    """Whether a plain value may stand where `hint` does; a whole number may stand for a float."""
    if hint is bool or hint is str:
        return isinstance(value, hint)
    if isinstance(value, int):
        return not isinstance(value, bool) and value in _INTEGERS
    return hint is float and isinstance(value, float)


def _sizes(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(type(item) is int and 0 <= item < 2**63 for item in value)


def _text(hint: Any) -> str:
    """A hint as a reader would write it."""
    if hint == dict[str, Tensor]:
        return "Weights"
    if get_origin(hint) is Annotated:
        base, *marks = get_args(hint)
        return _text(base) + (" (positional)" if POSITIONAL in marks else "")
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(_text(option) for option in get_args(hint))
    if hint is Ellipsis:
        return "..."
    if hint is NoneType:
        return "None"
    if get_args(hint):
        inner = ", ".join(_text(part) for part in get_args(hint))
        return f"{_text(get_origin(hint))}[{inner}]"
    return getattr(hint, "__name__", str(hint))


def _shown(value: Any) -> str:
    """What came, in few words."""
    if isinstance(value, Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    text = reprlib.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _under(name: str, part: object) -> str:
    return f"{name}.{part}" if name else str(part)


def _check_depth(root: str, name: str, depth: int) -> None:
    if depth > _DEPTH:
        _refuse(root, name, f"at most {_DEPTH} levels of nesting", "more")


def _check_keys(root: str, name: str, keys: Iterable[str]) -> None:
    for key in keys:
        if len(key) > _LONGEST:
            came = f"one of {len(key)}, {_shown(key)}"
            _refuse(root, name, f"keys of at most {_LONGEST} characters", came)


def _refuse(root: str, name: str, expected: str, came: str) -> NoReturn:
    name = name if len(name) <= 120 else name[:117] + "..."
    raise WireError(f"{_under(root, name) if name else root}: expected {expected}, came {came}")


def _unsupported(root: str, name: str, hint: Any) -> WireError:
    return WireError(
        f"{root}.{name} is hinted {_text(hint)}, which cannot be sent or saved; use Tensor, "
        "Weights, int, float, bool, str, a record, a tuple[...] or a dict[str, ...] of these, or "
        "one of them | None"
    )


def _json(value: Any, *, ascii_only: bool = True) -> str:
    return json.dumps(value, ensure_ascii=ascii_only, allow_nan=False, separators=(",", ":"))
