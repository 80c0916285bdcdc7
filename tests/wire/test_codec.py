"""Records survive the wire unchanged; whatever else arrives is refused before memory is taken."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from types import ModuleType
from typing import Annotated, Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedstill.core import trees
from fedstill.core.errors import WireError
from fedstill.core.records import Message, Positional, Record, State, Weights
from fedstill.wire import codec

DTYPES = list(codec.DTYPES.values())
few = settings(max_examples=60, derandomize=True, deadline=None, database=None)


class Pair(Record):
    image: Tensor
    label: int


class Everything(Message):
    weights: Weights
    labels: Positional
    teacher: Weights | None
    examples: int
    radius: float
    ready: bool
    name: str
    limit: Annotated[float, "above 0"] | None
    pair: Pair
    pairs: tuple[Pair, ...]
    stages: tuple[Tensor, ...]
    ends: tuple[int, float]
    counts: dict[str, int]
    holders: dict[str, dict[str, Tensor]]
    maybe: Tensor | None = None


class Up(Message):
    weights: Weights
    examples: int


class Empty(State):
    pass


class Counted(Message):
    """Holds a message whose kind a method says."""

    base: Message
    counts: Tensor


class Both(Message):
    base: Message
    weights: Tensor


class Kept(State):
    base: State
    number: int


class Chain(State):
    number: int
    rest: Chain | None = None


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Arbitrary bits of a dtype, NaNs among them."""
    rng = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=rng) < 0.5
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), generator=rng, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right) or isinstance(left, Tensor)
    if isinstance(left, Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert bits(left) == bits(right)
    elif isinstance(left, Record):
        for name in vars(left):
            assert_same(getattr(left, name), getattr(right, name))
    elif isinstance(left, dict):
        assert list(left) == list(right)  # the order of sums depends on it
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert repr(left) == repr(right)  # tells 0.0 from -0.0, and nan is nan


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
any_tensor = st.builds(tensor_of, st.sampled_from(DTYPES), shapes, st.integers(0, 99))
keys = st.text(alphabet="abé_-%/ 0", max_size=6)
weights = st.dictionaries(keys, any_tensor, max_size=4)
pairs = st.builds(Pair, any_tensor, st.integers(-(2**63), 2**64 - 1))
everything = st.builds(
    Everything,
    weights=weights,
    labels=any_tensor,
    teacher=st.none() | weights,
    examples=st.integers(-(2**63), 2**63 - 1),
    radius=st.floats() | st.integers(-5, 5),
    ready=st.booleans(),
    name=st.text(st.characters(codec=None), max_size=8),
    limit=st.none() | st.floats(),
    pair=pairs,
    pairs=st.lists(pairs, max_size=3).map(tuple),
    stages=st.lists(any_tensor, max_size=3).map(tuple),
    ends=st.tuples(st.integers(-9, 9), st.floats()),
    counts=st.dictionaries(keys, st.integers(0, 9), max_size=3),
    holders=st.dictionaries(keys, weights, max_size=3),
    maybe=st.none() | any_tensor,
)


@few
@given(everything)
def test_a_record_survives_the_wire_bit_for_bit(record: Everything) -> None:
    data = codec.encode(record)
    assert_same(codec.decode(data, Everything), record)
    assert codec.encode(codec.decode(data, Everything)) == data


@few
@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), any_tensor, max_size=4))
def test_other_programs_can_read_the_file(held: Weights) -> None:
    from safetensors.torch import load

    came = load(codec.encode(Up(held, 3)))
    assert {name: bits(t) for name, t in came.items()} == {
        f"weights.{name}": bits(t) for name, t in held.items()
    }


def test_plain_fields_stand_as_json_in_the_metadata() -> None:
    metadata = header_of(codec.encode(Up({"a": torch.ones(2)}, 7)))["__metadata__"]
    assert list(metadata) == ["fedstill"]
    assert json.loads(metadata["fedstill"]) == {
        "format": 2,
        "record": "Up",
        "fields": {"weights": {"a": "tensor"}, "examples": 7},
    }


SAME_EVERYWHERE = """
import hashlib, torch
from fedstill.core.records import Message, Weights
from fedstill.wire import codec

class Up(Message):
    weights: Weights
    names: dict[str, int]

held = {name: torch.arange(4.0) for name in ("b", "a", "ü")}
data = codec.encode(Up(held, {name: len(name) for name in ("one", "three", "two")}))
print(hashlib.sha256(data).hexdigest())
"""


def test_equal_records_give_equal_bytes_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    here, module = io.StringIO(), ModuleType("same_everywhere")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with redirect_stdout(here):
        exec(SAME_EVERYWHERE, module.__dict__)
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    there = subprocess.run(
        [sys.executable, "-c", SAME_EVERYWHERE],
        capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONHASHSEED": other, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert len(here.getvalue().strip()) == 64 and there.stdout == here.getvalue()


def test_a_record_of_the_first_format_is_still_read() -> None:
    metadata = {
        "fedstill": "1",
        "record": "Up",
        "fields": '{"weights":{"a":"tensor"},"examples":7}',
    }
    header = {"__metadata__": metadata, "weights.a": entry("F32", [2], [0, 8])}
    came = codec.decode(file_of(header, struct.pack("<2f", 1.5, -2.0)), Up)
    assert (came.examples, came.weights["a"].tolist()) == (7, [1.5, -2.0])


@few
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_with_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        codec.decode(data, Up)


@few
@given(st.data())
def test_a_flipped_byte_is_refused_or_read_as_another_record(data: st.DataObject) -> None:
    good = bytearray(codec.encode(Up({"w": torch.ones(2), "on": torch.tensor([True])}, 3)))
    good[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(WireError):
        assert isinstance(codec.decode(good, Up), Up)


@pytest.mark.parametrize("dtype", DTYPES, ids=list(codec.DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)], ids=str)
def test_every_dtype_and_shape_is_exact(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    record = Pair(tensor_of(dtype, shape, 1), 0)
    assert_same(codec.decode(codec.encode(record), Pair), record)


def test_views_and_parameters_are_sent_as_what_they_show() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    views = (base.T, base[:, ::2], base[1:], base.expand(2, 3, 4), torch.nn.Parameter(base))

    class Views(Message):
        items: tuple[Tensor, ...]

    came = codec.decode(codec.encode(Views(views)), Views).items
    for one, other in zip(came, views, strict=True):
        assert torch.equal(one, other)
        assert not one.requires_grad


def test_what_was_received_owns_its_memory() -> None:
    data = codec.encode(Up({"a": torch.zeros(2), "b": torch.zeros(2)}, 1))
    held = codec.decode(data, Up).weights
    held["a"].add_(1)
    assert held["b"].tolist() == [0, 0]
    assert codec.decode(data, Up).weights["a"].tolist() == [0, 0]


def test_an_empty_record_survives() -> None:
    assert isinstance(codec.decode(codec.encode(Empty()), Empty), Empty)


def test_a_memoryview_is_read_like_bytes() -> None:
    data = b"__" + codec.encode(Up({}, 4))
    assert codec.decode(memoryview(data)[2:], Up).examples == 4


# What must not be read


def header_of(data: bytes) -> dict[str, Any]:
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header


def file_of(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def up(fields: Any = None, record: str = "Up", version: Any = 2, **entries: Any) -> Any:
    """The header of an Up whose fields and tensors can be anything."""
    fields = {"weights": {"a": "tensor"}, "examples": 7} if fields is None else fields
    text = fields if isinstance(fields, str) else json.dumps(fields)
    about = f'{{"format": {json.dumps(version)}, "record": {json.dumps(record)}, "fields": {text}}}'
    named = {f"weights.{name}": entry for name, entry in entries.items()}
    return {"__metadata__": {"fedstill": about}, **named}


def first_up(fields: Any = None, record: str = "Up", version: Any = "1", **entries: Any) -> Any:
    """The same in the first format, which had three keys in the metadata."""
    fields = {"weights": {"a": "tensor"}, "examples": 7} if fields is None else fields
    text = fields if isinstance(fields, str) else json.dumps(fields)
    metadata = {"fedstill": version, "record": record, "fields": text}
    named = {f"weights.{name}": entry for name, entry in entries.items()}
    return {"__metadata__": metadata, **named}


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


TWO = {"weights": {"a": "tensor", "b": "tensor"}, "examples": 7}
NUMBERS = {"weights": {}, "examples": 7}
NESTED = '{"weights": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}"
GOOD = file_of(up(a=entry()), bytes(8))


def hostile(up: Callable[..., Any]) -> dict[str, tuple[bytes, str]]:
    """Files that must not be read, made from headers of one format, and what is said of each."""
    good = file_of(up(a=entry()), bytes(8))
    double = json.dumps(up(a=entry()))[:-1] + ', "weights.a": ' + json.dumps(entry()) + "}"
    return {
        "nothing": (b"", "at least 8 bytes"),
        "truncated length": (good[:5], "at least 8 bytes"),
        "truncated header": (good[:40], "expected a header of"),
        "truncated tensors": (good[:-1], "Up: expected 8 bytes behind the header, came 7"),
        "trailing bytes": (good + b"x", "expected 8 bytes behind the header, came 9"),
        "giant header length": (struct.pack("<Q", 2**64 - 1) + good[8:], "the limit is 16777216"),
        "header longer than file": (struct.pack("<Q", 10_000) + good[8:], "header of 10000 bytes"),
        "not UTF-8": (file_of(b'{"\xff": 1}'), "expected JSON in the header"),
        "not JSON": (file_of(b"{weights}"), "expected JSON in the header"),
        "NaN as JSON": (file_of(b'{"a": NaN}'), "NaN is not JSON"),
        "a list as header": (file_of([1, 2]), "expected a table of tensors"),
        "a number of many digits": (file_of(b"9" * 5000), "expected JSON in the header"),
        "deep header": (file_of(b"[" * 100_000), "nested too deeply"),
        "deep fields": (file_of(up(NESTED)), "nested too deeply"),
        "duplicate names": (file_of(double.encode(), bytes(8)), "'weights.a' stands twice"),
        "duplicate fields": (
            file_of(up('{"weights": {}, "examples": 1, "examples": 2}')),
            "'examples' stands twice",
        ),
        "no metadata": (file_of({"weights.a": entry()}, bytes(8)), "expected metadata"),
        "metadata of another kind": (file_of({"__metadata__": 3}), "expected metadata"),
        "another version": (
            file_of(up(NUMBERS, version="9")),
            "wire format '9'.*reads formats 1 and 2",
        ),
        "another record": (
            file_of(up(NUMBERS, record="Down")),
            "expected a record Up, came 'Down'",
        ),
        "fields not JSON": (file_of(up("{")), "expected JSON in the fields"),
        "fields a list": (file_of(up([])), r"Up: expected Up, came \[\]"),
        "unknown field": (
            file_of(up({**NUMBERS, "secret": 1})),
            "Up.secret: expected only weights, examples",
        ),
        "missing field": (file_of(up({"weights": {}})), "Up.examples: expected int, came nothing"),
        "a float for an int": (
            file_of(up({"weights": {}, "examples": 1.5})),
            "Up.examples: expected int, came 1.5",
        ),
        "a text for an int": (
            file_of(up({"weights": {}, "examples": "7"})),
            "Up.examples: expected int, came '7'",
        ),
        "a bool for an int": (
            file_of(up({"weights": {}, "examples": True})),
            "Up.examples: expected int, came True",
        ),
        "nothing for an int": (
            file_of(up({"weights": {}, "examples": None})),
            "Up.examples: expected int, came None",
        ),
        "a giant int": (
            file_of(up({"weights": {}, "examples": 2**64})),
            "Up.examples: expected int",
        ),
        "a tensor for an int": (
            file_of({**up({"weights": {}, "examples": "tensor"}), "examples": entry()}, bytes(8)),
            "Up.examples: expected int, came a tensor",
        ),
        "a number for a tensor": (
            file_of(up({"weights": {"a": 3}, "examples": 7})),
            "Up.weights.a: expected a tensor, came 3",
        ),
        "a list for weights": (
            file_of(up({"weights": [], "examples": 7})),
            r"Up.weights: expected Weights, came \[\]",
        ),
        "a tensor that is not there": (file_of(up()), "Up.weights.a: expected a tensor, came none"),
        "a tensor besides": (
            file_of(up(NUMBERS, a=entry()), bytes(8)),
            "Up.weights.a: expected only the fields weights",
        ),
        "unknown dtype": (
            file_of(up(a=entry("F7")), bytes(8)),
            "Up.weights.a: expected a dtype among F64, .* 'F7'",
        ),
        "dtype a list": (file_of(up(a=entry(["F32"])), bytes(8)), "expected a dtype among"),
        "entry a number": (file_of(up(a=3), bytes(8)), "expected dtype, shape and data_offsets"),
        "entry with more keys": (
            file_of(up(a={**entry(), "code": 1}), bytes(8)),
            "expected dtype, shape and data_offsets",
        ),
        "wrong size": (
            file_of(up(a=entry("F64")), bytes(8)),
            "Up.weights.a: expected 16 bytes, came offsets 0 to 8",
        ),
        "negative axis": (file_of(up(a=entry(shape=[-2])), bytes(8)), r"expected a shape .*\[-2\]"),
        "two negative axes": (file_of(up(a=entry(shape=[-1, -2])), bytes(8)), "expected a shape"),
        "a float axis": (file_of(up(a=entry(shape=[2.0])), bytes(8)), "expected a shape"),
        "a bool axis": (file_of(up(a=entry("F64", [True])), bytes(8)), "expected a shape"),
        "too many axes": (
            file_of(up(a=entry(shape=[1] * 8 + [2])), bytes(8)),
            "a shape of at most 8 axes",
        ),
        "a huge axis beside an empty one": (
            file_of(up(a=entry(shape=[0, 2**62, 2**62], offsets=[0, 0]))),
            "a shape within",
        ),
        "a terabyte": (
            file_of(up(a=entry(shape=[2**38], offsets=[0, 2**40])), bytes(8)),
            "a shape within",
        ),
        "a gigabyte": (
            file_of(up(a=entry(shape=[2**28], offsets=[0, 2**30])), bytes(8)),
            "expected 1073741824 bytes behind the header, came 8",
        ),
        "one offset": (
            file_of(up(a=entry(offsets=[8])), bytes(8)),
            r"Up.weights.a: expected two data_offsets, came \[8\]",
        ),
        "negative offsets": (
            file_of(up(a=entry(offsets=[-8, 0])), bytes(8)),
            r"Up.weights.a: expected two data_offsets, came \[-8, 0\]",
        ),
        "reversed offsets": (
            file_of(up(a=entry(offsets=[8, 0])), bytes(8)),
            "Up.weights.a: expected a tensor at offset 0, came one at 8",
        ),
        "outside": (
            file_of(up(a=entry(offsets=[8, 16])), bytes(8)),
            "Up.weights.a: expected a tensor at offset 0, came one at 8",
        ),
        "a hole": (
            file_of(up(TWO, a=entry(), b=entry(offsets=[12, 20])), bytes(20)),
            "Up.weights.b: expected a tensor at offset 8, came one at 12",
        ),
        "overlap": (
            file_of(up(TWO, a=entry(), b=entry(offsets=[4, 12])), bytes(12)),
            "Up.weights.b: expected a tensor at offset 8, came one at 4",
        ),
        "the same bytes twice": (
            file_of(up(TWO, a=entry(), b=entry()), bytes(8)),
            "Up.weights.b: expected a tensor at offset 8, came one at 0",
        ),
        "a byte that is no bool": (
            file_of(up(a=entry("BOOL", [2], [0, 2])), b"\x01\x02"),
            "bytes 0 and 1 for BOOL",
        ),
    }


HOSTILE = {"first": hostile(first_up), "present": hostile(up)}


def test_the_file_that_the_hostile_ones_are_made_from_is_good() -> None:
    came = codec.decode(GOOD, Up)
    assert (came.examples, came.weights["a"].tolist()) == (7, [0, 0])


@pytest.mark.parametrize("form", HOSTILE)
@pytest.mark.parametrize("name", HOSTILE["present"])
def test_hostile_bytes_are_refused_with_a_reason(name: str, form: str) -> None:
    data, reason = HOSTILE[form][name]
    with pytest.raises(WireError, match=reason):
        codec.decode(data, Up)


shift = st.sampled_from([0, 0, 0, 0, -1, 1, 4])


@settings(few, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("ab"), shift, shift), max_size=3), shift)
def test_tensors_are_read_where_the_safetensors_library_would_read_them(
    told: list[tuple[str, int, int]], more: int
) -> None:
    """Tensors of eight bytes or none with offsets that may be wrong, and a payload that may be
    too long or short: refused by both, or both find the same numbers."""
    sizes = {"a": ("F32", [2], 8), "b": ("U8", [3, 0], 0)}
    entries, end = {}, 0
    for name, (which, early, late) in zip("xyz", told, strict=False):
        code, shape, size = sizes[which]
        begin, end = end, end + size
        entries[name] = entry(code, shape, [begin + early, end + late])
    fields = {"weights": dict.fromkeys(entries, "tensor"), "examples": 7}
    data = file_of(up(fields, **entries), bytes(range(max(end + more, 0))))
    try:
        theirs = dict(safetensors.deserialize(data))
    except safetensors.SafetensorError:
        with pytest.raises(WireError):
            codec.decode(memoryview(data), Up)
    else:
        ours = codec.decode(memoryview(data), Up).weights
        assert {f"weights.{name}": bits(tensor) for name, tensor in ours.items()} == {
            name: list(item["data"]) for name, item in theirs.items()
        }


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ("3", "Up: expected a table in the metadata, came 3"),
        ('{"record": "Up", "fields": {}}', "Up: expected metadata"),
        (
            '{"format": 2, "record": "Up", "fields": {"weights": 3, "examples": 7}}',
            "Up.weights: expected Weights, came 3",
        ),
    ],
)
def test_metadata_that_does_not_hold_the_record_is_refused(about: str, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        codec.decode(file_of({"__metadata__": {"fedstill": about}}), Up)


def test_a_declared_terabyte_takes_neither_memory_nor_time() -> None:
    data = file_of(up(a=entry(shape=[2**38], offsets=[0, 2**40])), bytes(8))
    roomy = codec.Limits(bytes=2**50)
    tracemalloc.start()
    started = time.perf_counter()
    with pytest.raises(WireError, match="expected 1099511627776 bytes behind the header, came 8"):
        codec.decode(data, Up, limits=roomy)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
    assert time.perf_counter() - started < 1.0


def test_two_places_cannot_name_one_tensor() -> None:
    class Held(Message):
        holders: dict[str, dict[str, Tensor]]

    fields = {"holders": {"a": {"b.c": "tensor"}, "a.b": {"c": "tensor"}}}
    header = up(fields, record="Held")
    header["holders.a.b.c"] = entry()
    with pytest.raises(WireError, match="used twice"):
        codec.decode(file_of(header, bytes(8)), Held)
    one = torch.ones(1)
    with pytest.raises(WireError, match=r"two tensors are called 'holders.a.b.c'"):
        codec.encode(Held({"a": {"b.c": one}, "a.b": {"c": one}}))


def test_a_record_within_itself_is_bounded() -> None:
    chain = Chain(0)
    for number in range(1, 20):
        chain = Chain(number, chain)
    assert_same(codec.decode(codec.encode(chain), Chain), chain)
    for number in range(40):
        chain = Chain(number, chain)
    with pytest.raises(WireError, match="at most 32 levels of nesting"):
        codec.encode(chain)


def test_every_limit_is_kept() -> None:
    data = codec.encode(Up({"a": torch.zeros(2, 3), "b": torch.zeros(1)}, 1))
    for limits, reason in [
        (codec.Limits(bytes=len(data) - 1), "bytes came, the limit is"),
        (codec.Limits(tensors=1), "2 tensors came, the limit is 1"),
        (codec.Limits(dims=1), "at most 1 axes"),
        (codec.Limits(header=10), "the limit is 10"),
    ]:
        with pytest.raises(WireError, match=reason):
            codec.decode(data, Up, limits=limits)
    exact = codec.Limits(bytes=len(data), tensors=2, dims=2)
    assert codec.decode(data, Up, limits=exact).examples == 1


@pytest.mark.parametrize(
    "record, reason",
    [
        (Up({"a": 3.0}, 1), "Up.weights.a: expected a tensor, came 3.0"),  # type: ignore[dict-item]
        (Up({}, torch.ones(1)), r"Up.examples: expected int, came a tensor float32 \[1\]"),  # type: ignore[arg-type]
        (Up({}, True), "Up.examples: expected int, came True"),
        (Up({}, 2**64), "Up.examples: expected int"),
        (Up({1: torch.ones(1)}, 1), "Up.weights: expected Weights"),  # type: ignore[dict-item]
        (Up([], 1), "Up.weights: expected Weights"),  # type: ignore[arg-type]
        (Up({"a": torch.ones(1) * 1j}, 1), "Up.weights.a: expected a dense tensor"),
        (Up({"a": torch.eye(2).to_sparse()}, 1), "Up.weights.a: expected a dense tensor"),
        (Up({"\ud800": torch.ones(1)}, 1), "not valid text"),
    ],
)
def test_a_record_that_breaks_its_hints_is_not_sent(record: Up, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        codec.encode(record)


class Several(Message):
    pair: Pair
    pairs: tuple[Pair, ...]
    only: tuple[int]


PAIR = Pair(torch.zeros(2), 1)


def test_a_tuple_of_one_item_is_not_one_of_many() -> None:
    several = Several(PAIR, (), (3,))
    assert_same(codec.decode(codec.encode(several), Several), several)
    with pytest.raises(WireError, match=r"Several.only: expected tuple\[int\], came 2 items"):
        codec.encode(Several(PAIR, (), (3, 4)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ((None, (), (1,)), "Several.pair: expected Pair, came None"),
        ((Up({}, 1), (), (1,)), "Several.pair: expected Pair, came Up"),
        ((PAIR, [PAIR], (1,)), r"Several.pairs: expected tuple\[Pair, ...\], came \[Pair"),
        ((PAIR, (None,), (1,)), "Several.pairs.0: expected Pair, came None"),
        ((PAIR, (), (None,)), "Several.only.0: expected int, came None"),
    ],
)
def test_nothing_and_things_of_another_kind_are_not_sent_in_place_of_a_record(
    values: Any, reason: str
) -> None:
    with pytest.raises(WireError, match=reason):
        codec.encode(Several(*values))


@pytest.mark.parametrize("came", [3, "tensor", {"0": 1}, None])
def test_what_came_in_place_of_a_tuple_is_refused(came: Any) -> None:
    with pytest.raises(WireError, match=r"Several.only: expected tuple\[int\], came "):
        codec._Reader("Several", {}, []).value(tuple[int], came, "only", 1)


def counted() -> Counted:
    up = Up({"head.weight": torch.arange(6.0).reshape(2, 3)}, 7)
    return Counted(up, torch.tensor([3, 4]))


def test_a_field_of_any_kind_is_read_as_one_of_the_kinds_that_are_said() -> None:
    data = codec.encode(counted())
    again = codec.decode(data, Counted, held=[Empty, Pair, Up])
    assert_same(again, counted())
    assert codec.encode(again) == data
    kept = Kept(Kept(Empty(), 1), 2)
    assert_same(codec.decode(codec.encode(kept), Kept, held=[Empty, Kept]), kept)


class Stranger(Message):
    weights: Weights
    examples: int


@pytest.mark.parametrize(
    ("record", "kind", "held", "reason"),
    [
        (counted(), Counted, [], "Counted.base: expected one of no kinds at all, came 'Up'"),
        (counted(), Counted, [Stranger], "Counted.base: expected one of Stranger, came 'Up'"),
        (
            Counted(Stranger({}, 1), torch.zeros(1)), Counted, [Up],
            "Counted.base: expected one of Up, came 'Stranger'",
        ),
        # Up is no memory, so it cannot stand for one, even where a method holds it elsewhere.
        (Kept(Empty(), 1), Kept, [Up], "Kept.base: expected one of no kinds at all, came 'Empty'"),
    ],
)  # fmt: skip
def test_no_other_kind_is_accepted(record: Any, kind: Any, held: Any, reason: str) -> None:
    with pytest.raises(WireError) as error:
        codec.decode(codec.encode(record), kind, held=held)
    assert str(error.value) == reason


@pytest.mark.parametrize(
    "inside",
    [
        "tensor", None, {}, {"kind": "Up"}, {"kind": ["Up"], "fields": {}},
        {"kind": "Up", "fields": {}}, {"kind": "Up", "fields": 3},
        {"kind": "Message", "fields": {}}, {"kind": "Empty", "fields": {}},
        {"kind": "Up", "fields": {"weights": {}, "examples": 1}, "more": 1},
    ],
)  # fmt: skip
def test_what_stands_in_a_field_of_any_kind_is_checked_like_a_record(inside: Any) -> None:
    reader = codec._Reader("Counted", {}, [Up])
    with pytest.raises(WireError, match=r"Counted\.base"):
        reader.value(Message, inside, "base", 1)


def test_a_field_of_any_kind_cannot_hold_something_of_no_kind() -> None:
    for value in (Message(), 3, Empty()):
        with pytest.raises(WireError, match=r"Counted\.base: expected a kind of Message"):
            codec.encode(Counted(value, torch.zeros(1)))  # type: ignore[arg-type]


def test_a_field_of_any_kind_is_described_by_the_fields_of_what_it_may_hold() -> None:
    assert codec.describe(Counted) == {"base": "Message", "counts": "Tensor"}
    assert codec.describe(Counted, [Up, Empty]) == {
        "weights": "Weights", "examples": "int", "counts": "Tensor",
    }  # fmt: skip
    assert list(codec.describe(Counted, [Up])) == list(counted().floats())
    # A field that both have is told with the name of the one that holds it.
    assert codec.describe(Both, [Up]) == {
        "base.weights": "Weights", "examples": "int", "weights": "Tensor",
    }  # fmt: skip
    both = Both(counted().base, torch.zeros(1))
    assert list(codec.describe(Both, [Up])) == list(both.floats())


def test_a_hint_the_wire_does_not_know_is_named() -> None:
    class Odd(Message):
        things: list[int]

    class Numbered(Message):
        things: dict[int, int]

    with pytest.raises(WireError, match=r"Odd.things is hinted list\[int\].*sent or saved; use"):
        codec.encode(Odd([1]))
    with pytest.raises(
        WireError, match=r"Numbered.things is hinted dict\[int, int\], which cannot"
    ):
        codec.encode(Numbered({1: 1}))


def test_a_tuple_of_fixed_length_keeps_its_length() -> None:
    class Ends(Message):
        ends: tuple[int, int]

    with pytest.raises(WireError, match=r"Ends.ends: expected tuple\[int, int\], came 3 items"):
        codec.encode(Ends((1, 2, 3)))  # type: ignore[arg-type]


def test_fields_are_described_in_words() -> None:
    described = codec.describe(Everything)
    assert described["weights"] == "Weights"
    assert described["teacher"] == "Weights | None"
    assert described["labels"] == "Tensor (positional)"
    assert described["pairs"] == "tuple[Pair, ...]"
    assert described["holders"] == "dict[str, Weights]"
    assert described["ends"] == "tuple[int, float]"
    assert list(described) == list(Everything.__dataclass_fields__)


def test_a_saved_record_is_loaded_unchanged(tmp_path: Any) -> None:
    record = Up({"a": torch.rand(3, generator=torch.Generator().manual_seed(0))}, 3)
    codec.save(record, tmp_path / "up.safetensors")
    assert_same(codec.load(tmp_path / "up.safetensors", Up), record)
    assert [path.name for path in tmp_path.iterdir()] == ["up.safetensors"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Any, monkeypatch: Any) -> None:
    path = tmp_path / "up.safetensors"
    codec.save(Up({}, 1), path)

    def broken(*_: Any) -> None:
        raise OSError("disk full")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(f"os.{name}", broken)
            with pytest.raises(OSError, match="disk full"):
                codec.save(Up({}, 2), path)
        assert codec.load(path, Up).examples == 1
        assert [file.name for file in tmp_path.iterdir()] == ["up.safetensors"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Any) -> None:
    (tmp_path / "bad").write_bytes(GOOD[:-1])
    with pytest.raises(WireError, match=r"bad: Up: expected 8 bytes behind the header, came 7"):
        codec.load(tmp_path / "bad", Up)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_record_on_a_device_is_sent_from_the_host_and_read_where_asked() -> None:
    record = Up({"a": torch.arange(3.0)}, 1)
    data = codec.encode(trees.to(record, "cuda"))
    assert data == codec.encode(record)
    assert codec.decode(data, Up, device="cuda").weights["a"].is_cuda


class Table(Record):
    """Numbers by two names."""

    numbers: dict[str, dict[str, float]]


def test_a_key_that_would_be_repeated_in_thousands_of_names_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one key of megabytes and a million below it, a terabyte of names was made."""
    long = Table({"k" * 4097: {"a": 1.0}})
    said = r"Table\.numbers: expected keys of at most 4096 characters, came one of 4097"
    with pytest.raises(WireError, match=said):
        codec.encode(long)
    with monkeypatch.context() as patched:
        patched.setattr(codec, "_LONGEST", 10**6)
        data = codec.encode(long)
    with pytest.raises(WireError, match=said):
        codec.decode(data, Table)
    table = Table({"k" * 4096: {"a": 1.0}})
    assert codec.decode(codec.encode(table), Table).numbers == table.numbers
