"""Channels in a run: coded where the sender is, counted as coded, read as decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Never

import pytest
import torch

import worlds
from fedstill.channels import Channel, Coded, Edge, EightBit, Half, TensorChannel, TopK
from fedstill.core import (
    SERVER,
    Addressed,
    Inbox,
    Message,
    Method,
    Node,
    State,
    Step,
    Weights,
    at_clients,
    at_server,
)
from fedstill.core.errors import BadValue, StepError, WireError
from fedstill.engines.outbox import Kept, channels_of
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.play.rehearsal import Rehearsal
from fedstill.engines.play.streams import Streams
from fedstill.engines.ranks.letters import Letters
from fedstill.logbook.writer import MemoryLog
from fedstill.methods.fedavg import Down, FedAvg, Up
from fedstill.wire import codec

METHOD = FedAvg(batch_size=8, lr=0.1)
ENGINES = [InProcess, Batched, Streams]


def bytes_of(log: MemoryLog, direction: str, field: str = "weights") -> set[int]:
    rows = [row for row in log.messages if row.direction == direction]
    return {row.bytes for row in rows if row.field == field}


@pytest.mark.parametrize("engine", ENGINES)
def test_bytes_are_those_of_the_coded_form(engine: Any) -> None:
    # An MLP of 4 inputs, 8 hidden units and 3 classes: 32 + 8 + 24 + 3 weights; 8 and 3 go plain.
    _, plain = worlds.played(METHOD, worlds.vectors(), 1, engine)
    _, half = worlds.played(METHOD, worlds.vectors(), 1, engine, channels=[Half()])
    assert bytes_of(plain, "up") == bytes_of(plain, "down") == {4 * 67}
    assert bytes_of(half, "up") == bytes_of(half, "down") == {2 * (32 + 24) + 2 * 4 + 4 * 11}
    assert bytes_of(half, "up", "examples") == {8}
    upward = Half(directions=("up",))
    _, one_way = worlds.played(METHOD, worlds.vectors(), 1, engine, channels=[upward])
    assert (bytes_of(one_way, "up"), bytes_of(one_way, "down")) == (bytes_of(half, "up"), {4 * 67})


def test_the_outcome_holds_what_travels_and_the_server_reads_what_arrives() -> None:
    read: list[Message] = []

    def ear(message: Message, sender: str, round: int) -> None:
        read.append(message)

    engine = worlds.engine_for(METHOD, worlds.vectors(), channels=[Half(least=1)])
    outcomes = engine.play(METHOD.broadcast, 1, {SERVER: Inbox()}, "down")
    assert isinstance(outcomes[SERVER].message, Coded)
    untouched = engine.play(METHOD.broadcast, 1, {SERVER: Inbox()})
    assert not isinstance(untouched[SERVER].message, Coded)  # it goes nowhere
    engine, _ = worlds.played(
        METHOD, worlds.vectors(), 1, channels=[Half(least=1)], observers=[ear]
    )
    assert [type(message) for message in read] == [Down, *[Up] * 4]
    for message in read:
        for tensor in message.tensors().values():
            assert torch.equal(tensor, tensor.half().float())


@dataclass(frozen=True)
class Exactly(TensorChannel):
    """Codes differences and loses nothing."""

    of_change: bool = True
    feedback: bool = True
    least: int = 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_channel_that_loses_nothing_changes_nothing(engine: Any) -> None:
    plain, _ = worlds.played(METHOD, worlds.vectors(), 2, engine)
    coded, _ = worlds.played(METHOD, worlds.vectors(), 2, engine, channels=[Exactly()])
    for name, tensor in plain.states[SERVER].weights.items():
        assert torch.allclose(tensor, coded.states[SERVER].weights[name], atol=1e-6)


def test_what_was_left_out_is_remembered_by_step_and_made_good() -> None:
    world = worlds.vectors()
    engine, _ = worlds.played(METHOD, world, 2, channels=[TopK(share=0.1)])
    kept = engine.states[channels_of("c0")]
    assert isinstance(kept, Kept)
    assert list(kept.messages) == ["update"] and list(kept.messages["update"]) == ["0"]
    assert {t.numel() for t in kept.messages["update"]["0"].values()} == {32, 24}
    assert channels_of(SERVER) not in engine.states


def test_error_feedback_brings_the_weights_that_are_left_out_later() -> None:
    """With feedback a run stays nearer to the plain one than without."""

    def gap(channels: Sequence[Channel]) -> float:
        engine, _ = worlds.played(METHOD, worlds.vectors(), 12, channels=channels)
        pairs = zip(engine.states[SERVER].weights.values(), plain.values(), strict=True)
        return sum(float((a - b).square().sum()) for a, b in pairs)

    plain = worlds.played(METHOD, worlds.vectors(), 12)[0].states[SERVER].weights
    assert gap([TopK(share=0.1)]) < gap([TopK(share=0.1, feedback=False)]) / 2


class Number(Message):
    """A vector."""

    values: torch.Tensor


class Known(State):
    """What the server has collected; no network is trained."""

    values: torch.Tensor
    weights: Weights


@dataclass(frozen=True)
class Circle(Method):
    """The server speaks to itself, then to each client apart; clients answer."""

    broken: bool = False

    def each_round(self) -> Sequence[Step]:
        return [self.think, self.tell, self.answer, self.collect]

    def server_state(self, server: Node[Any]) -> Known:
        return Known(torch.zeros(20), {})

    def predict(self, node: Node[Any], x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x), worlds.CLASSES)

    @at_server
    def think(self, server: Node[Known], inbox: Inbox[Never]) -> Number:
        """Say something to itself."""
        return Number(torch.linspace(0, 1, 20))

    @at_server
    def tell(self, server: Node[Known], inbox: Inbox[Number]) -> Addressed[Number]:
        """Tell one thing to all but the first."""
        heard = inbox.only()
        common = Number(heard.values + 1)
        return Addressed({c: heard if c == "c0" else common for c in server.models})

    @at_clients
    def answer(self, client: Node[None], inbox: Inbox[Number]) -> Number:
        """Answer, one of them with NaN."""
        values = inbox.only().values
        spoiled = self.broken and client.id == "c1" and client.round == 1
        return Number(values * float("nan") if spoiled else values + torch.arange(20.0))

    @at_server
    def collect(self, server: Node[Known], inbox: Inbox[Number]) -> None:
        """Keep what was heard last."""
        server.state = Known(torch.stack([n.values for n in inbox.values()]), {})


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_server_says_to_itself_is_neither_coded_nor_counted(engine: Any) -> None:
    seen: list[str] = []

    @dataclass(frozen=True)
    class Watching(Half):
        def encode(self, tensor: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
            seen.append("coded")
            return super().encode(tensor, rng)

    _, log = worlds.played(Circle(), worlds.vectors(), 1, engine, channels=[Watching()])
    assert {row.step for row in log.messages} == {"tell", "answer"}
    assert len(seen) == 2 + 4  # the common message for three clients once
    assert {row.hearers for row in log.messages if row.step == "tell"} == {1, 3}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_message_with_nan_is_found_before_coding_and_not_remembered(engine: Any) -> None:
    playing, log = worlds.played(
        Circle(broken=True), worlds.vectors(), 1, engine,
        channels=[TopK(share=0.1)], bad_messages="leave_out",
    )  # fmt: skip
    left_out = [note for note in log.notes if note.kind == "left out"]
    assert [note.node for note in left_out] == ["c1"]
    assert "c1 sent Number with NaN or infinite values in values" in left_out[0].text
    assert {c for c in worlds.vectors().clients if channels_of(c) in playing.states} == {
        "c0", "c2", "c3"
    }  # fmt: skip


@dataclass(frozen=True)
class Lossy(Channel):
    """Loses what a client says in a round of its own."""

    directions: tuple[Any, ...] = ("up",)

    def send(self, message: Message, edge: Edge, memory: Weights) -> tuple[Any, Weights]:
        turn = memory.get("turn", torch.zeros(()))
        return (None if turn == 1 else message), {"turn": turn + 1}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_channel_may_lose_messages_and_count_them(engine: Any) -> None:
    playing, log = worlds.played(METHOD, worlds.vectors(), 3, engine, channels=[Lossy()])
    lost = [(note.round, note.node) for note in log.notes if note.kind == "lost"]
    assert lost == [(2, "c0"), (2, "c1"), (2, "c2"), (2, "c3")]
    assert {row.round for row in log.messages if row.direction == "up"} == {1, 3}
    kept = playing.states[channels_of("c0")]
    assert float(kept.messages["update"]["0"]["turn"]) == 3


def test_no_draw_of_a_channel_moves_another() -> None:
    before = torch.random.get_rng_state()
    chance = EightBit(stochastic=True, least=1)
    one, _ = worlds.played(METHOD, worlds.vectors(), 2, channels=[chance])
    two, _ = worlds.played(METHOD, worlds.vectors(), 2, channels=[chance])
    other, _ = worlds.played(METHOD, worlds.vectors(), 2, channels=[chance], seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [engine.states[SERVER].weights["head.weight"] for engine in (one, two, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_memories_of_channels_that_lie_on_disk_come_back_bit_for_bit() -> None:
    row = [TopK(share=0.1), EightBit(least=1)]
    plain, _ = worlds.played(METHOD, worlds.vectors(), 3, channels=row)
    asleep, _ = worlds.played(METHOD, worlds.vectors(), 3, channels=row, memory_limit=0)
    assert asleep.states.asleep
    assert list(plain.states) == list(asleep.states)
    for name, state in plain.states.items():
        if state is not None:
            other = asleep.states[name].tensors()
            assert all(torch.equal(t, other[k]) for k, t in state.tensors().items())


def test_a_rehearsal_codes_too() -> None:
    _, log = worlds.played(METHOD, worlds.vectors(), 1, Rehearsal, channels=[Half()])
    assert bytes_of(log, "up") == {2 * (32 + 24) + 2 * 4 + 4 * 11}


@dataclass(frozen=True)
class Broken(TensorChannel):
    """A channel with a fault."""

    def encode(self, tensor: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
        raise KeyError("no such thing")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fault_in_a_channel_names_step_node_and_round(engine: Any) -> None:
    with pytest.raises(StepError, match=r"FedAvg\.broadcast failed on server in round 1: KeyError"):
        worlds.played(METHOD, worlds.vectors(), 1, engine, channels=[Broken()])


def test_an_experiment_refuses_what_is_no_channel_and_fields_that_nobody_sends() -> None:
    with pytest.raises(BadValue, match=r"channels\[0\]: 'half' is not a Channel"):
        worlds.experiment(METHOD, worlds.vectors(), channels=["half"])
    with pytest.raises(BadValue, match=r"channels\[1\]\.leave: .*did you mean 'weights'"):
        worlds.experiment(METHOD, worlds.vectors(), channels=[Half(), Half(leave=("weight",))])


def test_channels_of_differences_are_refused_behind_others_that_leave_them_none() -> None:
    def made(*channels: Channel) -> Any:
        return worlds.experiment(METHOD, worlds.vectors(), channels=channels)

    with pytest.raises(BadValue, match=r"channels\[1\]: TopK codes differences, .* behind Half;"):
        made(Half(), TopK())
    made(TopK(), Half())
    made(Half(), TopK(of_change=False, feedback=False))
    made(Half(directions=("down",)), TopK(directions=("up",)))


def test_a_letter_that_would_take_too_much_once_decoded_is_refused() -> None:
    """A few numbers and three shapes of a gigabyte each: nothing is taken for them."""
    parts = {"values": torch.ones(2), "places": torch.arange(2)}
    empty = {name: torch.empty(0, 2**14, 2**14) for name in "abc"}
    bomb = Coded(Down(empty), {f"weights.{name}": parts for name in empty})
    _, written = Letters([Down]).enclosed({"c0": {SERVER: bomb}})
    strict = Letters([Down], limits=codec.STRANGERS)
    with pytest.raises(WireError, match=f"Down: {3 * 4 * 2**28} bytes once decoded, the limit is"):
        strict.opened(written, torch.device("cpu"))
