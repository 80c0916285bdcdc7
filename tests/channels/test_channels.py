"""Channels: what each does to a tensor, in arithmetic; what is left alone; several in a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from fedstill.channels import (
    CHANNELS,
    Channel,
    Coded,
    Edge,
    EightBit,
    Half,
    LowRank,
    TensorChannel,
    TopK,
    received,
    sent,
)
from fedstill.channels.coded import Layer, unwrapped, wrapped
from fedstill.core import Change, Exact, Message, Positional, Record, Weights, seeds
from fedstill.core.errors import BadValue, WireError
from fedstill.wire import codec


class Down(Message):
    weights: Weights


class Up(Message):
    weights: Weights
    examples: int


class Mixed(Message):
    images: Tensor
    labels: Positional
    counts: Exact | None
    whole: Tensor
    note: str


class Inner(Record):
    counts: Exact
    rows: Tensor


class Outer(Message):
    each: tuple[Inner, ...]
    classes: dict[str, Positional]


class ByName(Message):
    each: dict[str, Inner]


class Counted(Message):
    """Holds a message of any kind."""

    base: Message
    counts: Exact


def rng(purpose: str) -> Generator:
    return seeds.generator(7, purpose)


def upward(heard: Message | None = None) -> Edge:
    return Edge("up", rng, heard)


def normal(*shape: int, name: str = "entries") -> Tensor:
    return torch.randn(*shape, generator=seeds.generator(0, name))


def carried(channel: Channel, message: Any, heard: Message | None = None) -> tuple[Any, Any]:
    """What travels, and what is read."""
    travelling, _ = sent([channel], message, upward(heard), {})
    assert travelling is not None
    return travelling, received([channel], travelling, "up", heard)


def tensor_through(channel: Channel, tensor: Tensor) -> Tensor:
    found: Tensor = carried(channel, Up({"w": tensor}, 1))[1].weights["w"]
    assert found.shape == tensor.shape and found.dtype == tensor.dtype
    return found


def test_half_keeps_eleven_binary_digits_and_takes_half_the_bytes() -> None:
    tensor = torch.cat([torch.arange(2049.0), torch.tensor([2049.0, 0.1])])
    found = tensor_through(Half(), tensor)
    assert torch.equal(found[:2049], tensor[:2049])
    assert found[2049] == 2048  # 2049 needs twelve digits
    assert found[2050] == torch.tensor(0.1, dtype=torch.float16)
    travelling, _ = carried(Half(), Up({"w": tensor}, 1))
    assert travelling.bytes() == {"weights": 2 * 2051 + 4, "examples": 8}
    assert travelling.floats() == {"weights": 2051 + 1, "examples": 1}


def test_half_divides_by_a_power_of_two_where_an_entry_is_too_large() -> None:
    tensor = torch.full((16,), 2.0**20)
    tensor[0] = 3.0
    found = tensor_through(Half(), tensor)
    # 2^20 / 65504 is a little more than 2^4, so everything is divided by 2^5.
    assert torch.equal(found, tensor)
    travelling, _ = carried(Half(), Up({"w": tensor}, 1))
    assert float(travelling.parts["weights.w"]["factor"]) == 2**5
    assert torch.equal(tensor_through(Half(), -tensor), -tensor)  # the largest may be below zero
    least = torch.full((16,), 2.0**-24)  # of float16, and not divided
    assert torch.equal(tensor_through(Half(), least), least)
    assert torch.equal(tensor_through(Half(), torch.zeros(16)), torch.zeros(16))


def test_eight_bits_are_256_equal_steps_from_the_smallest_to_the_largest() -> None:
    tensor = torch.arange(256.0) * 3 - 100
    assert torch.equal(tensor_through(EightBit(), tensor), tensor)
    between = torch.tensor([0.0] * 15 + [255.0, 17.4, 17.6])
    assert tensor_through(EightBit(), between)[-2:].tolist() == [17, 18]
    travelling, _ = carried(EightBit(), Up({"w": tensor}, 1))
    assert travelling.bytes() == {"weights": 256 + 4 + 4, "examples": 8}
    assert travelling.floats() == {"weights": 256 + 2, "examples": 1}


def test_equal_entries_survive_eight_bits() -> None:
    tensor = torch.full((4, 8), -2.5)
    assert torch.equal(tensor_through(EightBit(), tensor), tensor)
    assert torch.equal(tensor_through(EightBit(per="row"), tensor), tensor)


def test_rows_with_steps_of_their_own_do_not_disturb_each_other() -> None:
    small = torch.arange(256.0) / 1000
    tensor = torch.stack([small, 1000 * small])
    assert torch.allclose(tensor_through(EightBit(per="row"), tensor), tensor, atol=1e-5, rtol=1e-5)
    assert tensor_through(EightBit(), tensor)[0].unique().numel() == 1
    travelling, _ = carried(EightBit(per="row"), Up({"w": tensor}, 1))
    assert travelling.bytes()["weights"] == 512 + 2 * 8


def test_rows_that_would_grow_by_steps_of_their_own_travel_as_they_are() -> None:
    # Step and low of a row take 8 bytes: what two entries take, and less than three.
    message = Up({"narrow": normal(100, 2), "wide": normal(100, 3)}, 1)
    assert list(carried(EightBit(per="row"), message)[0].parts) == ["weights.wide"]
    assert list(carried(EightBit(), message)[0].parts) == ["weights.narrow", "weights.wide"]


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    tensor = torch.full((40_000,), 0.25)
    tensor[:2] = torch.tensor([0.0, 255.0])
    found = tensor_through(EightBit(stochastic=True), tensor)
    assert found.unique().tolist() == [0, 1, 255]
    assert abs(float(found[2:].mean()) - 0.25) < 5 * (0.25 * 0.75 / 40_000) ** 0.5
    again = tensor_through(EightBit(stochastic=True), tensor)
    assert torch.equal(found, again)  # the draw is the node's, of this step and round


def test_top_k_keeps_the_largest_entries_and_their_places() -> None:
    tensor = torch.zeros(5, 4)
    tensor[0, 1], tensor[4, 3], tensor[2, 2] = -7.0, 5.0, 1.0
    travelling, found = carried(TopK(share=0.1), Up({"w": tensor}, 1))
    tensor[2, 2] = 0
    assert torch.equal(found.weights["w"], tensor)
    parts = travelling.parts["weights.w"]
    assert (parts["values"].tolist(), parts["places"].tolist()) == ([-7, 5], [1, 19])
    assert travelling.bytes()["weights"] == 2 * 4 + 2 * 2  # places of sixteen bits
    assert travelling.floats()["weights"] == 2 + 2


def test_places_of_a_large_tensor_have_32_bits() -> None:
    tensor = torch.zeros(2**15 + 1)
    tensor[-1] = 1
    travelling, found = carried(TopK(share=1e-5), Up({"w": tensor}, 1))
    assert torch.equal(found.weights["w"], tensor)
    assert travelling.bytes()["weights"] == 4 + 4


def test_weights_are_coded_as_their_difference_from_what_was_heard() -> None:
    start = normal(40)
    moved = start.clone()
    moved[3] += 2
    moved[5] += 1
    travelling, found = carried(TopK(share=1 / 40), Up({"w": moved}, 1), Down({"w": start}))
    assert travelling.parts["weights.w"]["places"].tolist() == [3]
    expected = start.clone()
    expected[3] = moved[3] - start[3] + start[3]
    assert torch.equal(found.weights["w"], expected)


def test_what_top_k_leaves_out_is_added_to_the_next_difference() -> None:
    channel, memory = TopK(share=1 / 20), dict[str, Weights]()
    start = torch.zeros(20)
    change = torch.zeros(20)
    change[0], change[1] = 3.0, 2.0
    heard, arrived = Down({"w": start}), []
    for _ in range(3):
        travelling, memory = sent([channel], Up({"w": change}, 1), upward(heard), memory)
        assert travelling is not None
        found: Any = received([channel], travelling, "up", heard)
        arrived.append(found.weights["w"][:2].tolist())
    # Owed after each: (0, 2), (3, 0), (0, 2): first 3, then 2 + 2 beats 3, then 3 + 3.
    assert arrived == [[3, 0], [0, 4], [6, 0]]


def test_without_feedback_nothing_is_remembered() -> None:
    message, heard = Up({"w": normal(20)}, 1), Down({"w": torch.zeros(20)})
    assert sent([TopK(feedback=False)], message, upward(heard), {})[1] == {}
    assert set(sent([TopK()], message, upward(heard), {})[1]["0"]) == {"weights.w"}


def test_what_is_no_difference_is_not_fed_back() -> None:
    class Pictures(Message):
        images: Tensor

    assert sent([TopK()], Pictures(normal(20)), upward(Down({"w": normal(20)})), {})[1] == {}


def test_a_field_marked_as_a_change_is_fed_back_and_nothing_is_taken_from_it() -> None:
    class Moved(Message):
        weights: Change

    heard = Down({"w": torch.ones(20)})
    message = Moved({"w": torch.arange(20.0)})
    travelling, memory = sent([TopK(share=1 / 20)], message, upward(heard), {})
    assert travelling is not None
    found = received([TopK(share=1 / 20)], travelling, "up", heard)
    assert found.weights["w"].tolist() == [0] * 19 + [19]  # type: ignore[attr-defined]
    assert memory["0"]["weights.w"].tolist() == [*range(19), 0]


@pytest.mark.parametrize(("entries", "most"), [(100, 0.6), (2**15, 0.6), (2**15 + 1, 0.4)])
def test_top_k_leaves_alone_what_places_would_make_larger(entries: int, most: float) -> None:
    # A value takes 4 bytes, its place 2 or, in a tensor of more than 2^15 entries, 4.
    message = Up({"w": normal(entries)}, 1)
    assert carried(TopK(share=most), message)[0].parts
    assert not carried(TopK(share=most + 0.15), message)[0].parts


def test_matrices_of_low_rank_arrive_whole() -> None:
    tensor = normal(12, 2, name="left") @ normal(2, 20, name="right")
    found = tensor_through(LowRank(rank=2), tensor)
    assert torch.allclose(found, tensor, atol=1e-5)
    travelling, _ = carried(LowRank(rank=2), Up({"w": tensor}, 1))
    assert travelling.floats()["weights"] == 2 * (12 + 20)


def test_a_convolution_is_read_as_a_matrix_of_its_outputs() -> None:
    tensor = (normal(12, 1, name="left") @ normal(1, 27, name="right")).reshape(12, 3, 3, 3)
    assert torch.allclose(tensor_through(LowRank(rank=1), tensor), tensor, atol=1e-5)


def test_low_rank_leaves_vectors_and_small_matrices_alone() -> None:
    message = Up({"bias": normal(100), "small": normal(4, 4), "w": normal(20, 20)}, 1)
    travelling, _ = carried(LowRank(rank=2), message)
    assert list(travelling.parts) == ["weights.w"]


def test_the_best_directions_are_found() -> None:
    tensor = normal(30, 40)
    best = torch.linalg.svdvals(tensor)[3:].square().sum()  # what rank three must lose
    lost = (tensor_through(LowRank(rank=3, iterations=20), tensor) - tensor).square().sum()
    assert float(lost) == pytest.approx(float(best), rel=1e-3)


@pytest.mark.parametrize("channel", [TopK(share=0.1), LowRank(rank=1)], ids=["top_k", "low_rank"])
def test_only_changes_are_coded_and_what_coding_takes_is_sent_with_the_next(
    channel: Channel,
) -> None:
    heard = Down({"w": normal(20, 20, name="heard")})
    same = Up({"w": heard.weights["w"].clone()}, 1)
    assert torch.equal(carried(channel, same, heard)[1].weights["w"], heard.weights["w"])
    message, memory = Up({"w": normal(20, 20)}, 1), {}
    change, arrived = message.weights["w"] - heard.weights["w"], torch.zeros(20, 20)
    for times in (1, 2, 3):
        travelling, memory = sent([channel], message, upward(heard), memory)
        assert travelling is not None
        found: Any = received([channel], travelling, "up", heard)
        arrived = arrived + found.weights["w"] - heard.weights["w"]
        left_out = memory["0"]["weights.w"]
        assert torch.allclose(arrived + left_out, times * change, atol=1e-4)


def test_a_message_that_several_channels_coded_announces_the_shapes_of_what_is_read() -> None:
    message = Up({"w": normal(20, 30), "b": normal(3)}, 4)
    travelling, _ = sent([TopK(share=0.5), Half(least=1)], message, upward(), {})
    assert isinstance(travelling, Coded)
    promised: Any = travelling.announced()
    assert type(promised) is Up and promised.examples == 4
    assert {name: list(tensor.shape) for name, tensor in promised.weights.items()} == {
        "w": [20, 30], "b": [3],
    }  # fmt: skip
    assert promised.weights["w"].is_meta


def test_a_field_that_two_messages_have_is_counted_by_the_one_that_holds_it() -> None:
    class Kept(Message):
        base: Message
        weights: Weights

    message = Kept(Up({"w": normal(20)}, 4), {"w": normal(30)})
    travelling, found = carried(Half(), message)
    assert travelling.bytes() == {"base.weights": 2 * 20 + 4, "examples": 8, "weights": 2 * 30 + 4}
    assert travelling.bytes().keys() == message.bytes().keys()
    assert type(found.base) is Up


def mixed() -> Mixed:
    return Mixed(normal(20), torch.arange(20), normal(20).abs(), torch.arange(30), "a")


@pytest.mark.parametrize("name", CHANNELS)
def test_labels_counts_and_whole_numbers_are_exact(name: str) -> None:
    travelling, found = carried(CHANNELS[name](), mixed())
    for field in ("labels", "counts", "whole", "note"):
        assert torch.as_tensor(getattr(found, field) == getattr(mixed(), field)).all()
        assert travelling.bytes()[field] == mixed().bytes()[field]
        assert travelling.floats()[field] == mixed().floats()[field]


@pytest.mark.parametrize("name", CHANNELS)
def test_statistics_of_norm_layers_are_exact(name: str) -> None:
    statistics = {"norm0.running_var": normal(64).abs() * 1e-9, "norm0.running_mean": normal(64)}
    message = Up({"conv0.weight": normal(16, 16), **statistics}, 1)
    travelling, found = carried(CHANNELS[name](), message)
    assert isinstance(travelling, Coded) and list(travelling.parts) == ["weights.conv0.weight"]
    assert all(torch.equal(found.weights[k], v) for k, v in statistics.items())


def test_fields_can_be_left_alone_and_small_tensors_are() -> None:
    message = Up({"w": normal(20), "b": normal(15)}, 1)
    assert list(carried(Half(), message)[0].parts) == ["weights.w"]
    assert list(carried(Half(leave=("weights",)), message)[0].parts) == []
    assert list(carried(Half(least=15), message)[0].parts) == ["weights.w", "weights.b"]


def test_a_channel_acts_on_its_directions_only() -> None:
    message = Up({"w": normal(20)}, 1)
    for direction in ("up", "down", "peer"):
        travelling, _ = sent([Half(directions=("peer",))], message, Edge(direction, rng), {})
        assert isinstance(travelling, Coded) == (direction == "peer")


def test_channels_in_a_row_code_what_the_one_before_made() -> None:
    tensor = torch.zeros(400)
    tensor[torch.arange(0, 400, 10)] = torch.arange(1, 41.0)
    message = Up({"w": tensor, "norm.running_var": torch.ones(50)}, 3)
    row = [TopK(share=0.1), EightBit()]
    travelling, _ = sent(row, message, upward(), {})
    assert isinstance(travelling, Coded) and isinstance(travelling.rest, Coded)
    # 40 values of one byte with low and step, 40 places of two bytes, 50 statistics of four.
    assert travelling.bytes() == {"weights": (40 + 8) + 40 * 2 + 50 * 4, "examples": 8}
    assert travelling.floats() == {"weights": (40 + 2) + 40 + 50, "examples": 1}
    found: Any = received(row, travelling, "up", None)
    step = 39 / 255
    assert type(found) is Up and found.examples == 3
    assert torch.allclose(found.weights["w"], tensor, atol=step / 2 + 1e-5)
    assert torch.equal(found.weights["norm.running_var"], torch.ones(50))


def test_channels_in_a_row_have_memories_and_draws_of_their_own() -> None:
    purposes: list[str] = []

    def watched(purpose: str) -> Generator:
        purposes.append(purpose)
        return rng(purpose)

    message, heard = Up({"w": normal(400)}, 1), Down({"w": torch.zeros(400)})
    row = [TopK(), EightBit(stochastic=True)]
    _, memory = sent(row, message, Edge("up", watched, heard), {})
    assert list(memory) == ["0"]
    assert purposes == ["channel 0: weights.w", "channel 1: parts.weights.w.values"]


def test_what_travels_survives_the_wire() -> None:
    row = [TopK(share=0.2), EightBit(least=1), Half(least=1)]
    travelling, _ = sent(row, mixed(), upward(), {})
    assert travelling is not None
    innermost, layers = unwrapped(travelling)
    assert type(innermost) is Mixed and len(layers) == 3
    copied = codec.decode(codec.encode(innermost), Mixed)
    again = [codec.decode(codec.encode(layer), Layer) for layer in layers]
    back = wrapped(copied, tuple(again))
    assert back.bytes() == travelling.bytes() and back.floats() == travelling.floats()
    ours, theirs = (received(row, one, "up", None) for one in (travelling, back))
    assert codec.encode(ours) == codec.encode(theirs)


def test_a_channel_that_finds_nothing_to_code_does_not_disturb_the_others() -> None:
    message = Up({"w": torch.arange(20.0)}, 4)
    row = [TopK(share=0.05), LowRank(), Half(leave=("weights",))]
    travelling, memory = sent(row, message, upward(), {})
    assert travelling is not None and memory == {}
    assert travelling.bytes() == {"weights": 4 + 2, "examples": 8}
    found: Any = received(row, travelling, "up", None)
    assert type(found) is Up and found.weights["w"].tolist() == [0] * 19 + [19]
    travelling, _ = sent(row, Up({}, 4), upward(), {})
    assert travelling is not None and travelling.bytes() == {"weights": 0, "examples": 8}


def test_a_coded_tensor_that_the_message_lacks_is_refused() -> None:
    with pytest.raises(WireError, match="Up has no tensor 'weights"):
        Half().receive(Coded(Up({}, 1), {"weights.x": {}}), None)
    with pytest.raises(WireError, match="Up came plain where Half codes messages"):
        Half().receive(Up({}, 1), None)


@pytest.mark.parametrize("name", CHANNELS)
def test_parts_that_do_not_fit_are_refused_by_the_name_of_the_tensor(name: str) -> None:
    channel = CHANNELS[name]()
    travelling, _ = carried(channel, Up({"w": normal(20, 20)}, 1))
    parts = travelling.parts["weights.w"]
    first = next(iter(parts))
    strange: list[dict[str, Tensor]] = [{}, {**parts, first: parts[first][:3]}]
    for wrong in strange:
        with pytest.raises(WireError, match=r"weights\.w cannot be decoded to \[20, 20\]"):
            channel.receive(Coded(travelling.rest, {"weights.w": wrong}), None)


@pytest.mark.parametrize("place", [-1, 400])
def test_a_place_outside_of_the_tensor_is_refused(place: int) -> None:
    travelling, _ = carried(TopK(), Up({"w": normal(20, 20)}, 1))
    parts = dict(travelling.parts["weights.w"])
    parts["places"] = parts["places"].clone()
    parts["places"][0] = place
    with pytest.raises(WireError, match="a place is not among the 400 entries"):
        TopK().receive(Coded(travelling.rest, {"weights.w": parts}), None)


STRETCHED: dict[str, tuple[Channel, dict[str, Tensor]]] = {
    "half": (Half(), {"values": torch.zeros(9, 1), "factor": torch.zeros(9)}),
    "eight_bit": (
        EightBit(),
        {"levels": torch.zeros(9).byte(), "low": torch.zeros(9), "step": torch.zeros(9)},
    ),
    "low_rank": (LowRank(), {"left": torch.zeros(81, 1), "right": torch.zeros(1, 1)}),
    "top_k": (TopK(), {"values": torch.zeros(1), "places": torch.zeros(1).short()}),
}


@pytest.mark.parametrize(("channel", "parts"), STRETCHED.values(), ids=STRETCHED)
def test_parts_are_not_stretched_over_each_other(
    channel: Channel, parts: dict[str, Tensor]
) -> None:
    """Of 9 entries 81 were made: of a few megabytes more than any memory holds."""
    rest = Down({"a": torch.empty(0, 9, 9)})
    with pytest.raises(WireError, match=r"a cannot be decoded.*ValueError: \w+ of \[.*expected \["):
        channel.receive(Coded(rest, {"weights.a": parts}), None)


@dataclass(frozen=True, kw_only=True)
class Scaled(TensorChannel):
    """A channel of one's own that does not expect strange parts."""

    def encode(self, tensor: Tensor, rng: Generator) -> dict[str, Tensor]:
        return {"values": tensor, "times": torch.tensor(2)}

    def decode(self, parts: dict[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        return parts["values"] * (1 // int(parts["times"]))


def test_whatever_goes_wrong_with_parts_in_a_channel_of_ones_own_is_said_of_the_message() -> None:
    travelling, _ = carried(Scaled(), Up({"w": normal(20, 20)}, 1))
    parts = {**travelling.parts["weights.w"], "times": torch.tensor(0)}
    with pytest.raises(WireError, match=r"weights\.w cannot be decoded.*ZeroDivisionError"):
        Scaled().receive(Coded(travelling.rest, {"weights.w": parts}), None)


def test_how_much_a_coded_message_will_take_is_known_before() -> None:
    row = [TopK(share=0.1), EightBit(least=1)]
    travelling: Any = sent(row, Up({"w": normal(20, 20)}, 1), upward(), {})[0]
    assert travelling.decoded_bytes() == 400 * 4 + 40 * 4  # the tensor, and its 40 values


@dataclass(frozen=True)
class Lossy(Channel):
    """Loses whatever comes from clients with few examples."""

    def send(self, message: Any, edge: Edge, memory: Weights) -> tuple[Message | None, Weights]:
        return (message if message.examples > 3 else None), memory


def test_a_channel_may_lose_a_message_and_those_behind_it_keep_their_memory() -> None:
    heard = Down({"w": torch.zeros(20)})
    row = [Lossy(), TopK()]
    few, many = (Up({"w": normal(20)}, examples) for examples in (3, 4))
    _, memory = sent(row, many, upward(heard), {})
    assert list(memory) == ["1"]
    assert sent(row, few, upward(heard), memory) == (None, memory)


@dataclass(frozen=True)
class Signs(TensorChannel):
    """The sign of every entry, and their mean size."""

    def encode(self, tensor: Tensor, rng: Generator) -> dict[str, Tensor]:
        return {"signs": tensor.sign().to(torch.int8), "size": tensor.abs().mean()}

    def decode(self, parts: dict[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        return parts["signs"] * parts["size"]


def test_a_channel_of_ones_own_says_how_one_tensor_is_coded() -> None:
    tensor = torch.tensor([1.0, -3.0] * 8)
    travelling, found = carried(Signs(), Up({"w": tensor}, 1))
    assert found.weights["w"].tolist() == [2, -2] * 8
    assert travelling.bytes()["weights"] == 16 + 4


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: TopK(share=0.0), r"TopK: share = 0.0: must be in \(0, 1\]"),
        (lambda: LowRank(rank=0), "LowRank: rank = 0: must be at least 1"),
        (lambda: EightBit(per="rows"), "did you mean 'row'"),  # type: ignore[arg-type]
        (lambda: Half(directions=("upp",)), "unknown direction 'upp'; did you mean 'up'"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(made: Callable[[], Channel], text: str) -> None:
    with pytest.raises(BadValue, match=text):
        made()


def test_nothing_is_written_into_a_message() -> None:
    tensor = normal(20, 20)
    before = tensor.clone()
    for channel in (kind() for kind in CHANNELS.values()):
        carried(channel, Up({"w": tensor}, 1), Down({"w": before}))
        assert torch.equal(tensor, before)


def test_marks_inside_records_and_tables_are_seen() -> None:
    message = Outer((Inner(normal(20), normal(20)),), {"a": normal(20)})
    assert list(carried(Half(), message)[0].parts) == ["each.0.rows"]
    named = ByName({"a": Inner(normal(20), normal(20))})
    assert list(carried(Half(), named)[0].parts) == ["each.a.rows"]


def test_a_message_that_is_held_is_coded_and_counted_like_one_that_is_not() -> None:
    heard = Down({"w": torch.zeros(16)})
    up = Up({"w": torch.arange(16.0)}, 3)
    channel = TopK(share=0.25, of_change=True, feedback=True)
    edge = Edge("up", rng, heard)
    plain, _ = channel.send(up, edge, {})
    held, left_out = channel.send(Counted(up, torch.ones(2)), edge, {})
    assert plain is not None and held is not None
    assert held.floats() == {**plain.floats(), "counts": 2}
    assert held.bytes() == {**plain.bytes(), "counts": 8}
    assert list(left_out) == ["base.weights.w"]
    again = channel.receive(held, heard)
    assert isinstance(again, Counted) and isinstance(again.base, Up)
    assert again.base.weights["w"].tolist() == [0.0] * 12 + [12.0, 13.0, 14.0, 15.0]
