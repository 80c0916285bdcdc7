"""The post: who hears what, what is counted, and what becomes of broken messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Never

import pytest
import torch
from torch import Tensor

from fedstill.channels import Channel, Coded, Edge, Half
from fedstill.core import (
    SERVER,
    Addressed,
    Inbox,
    Message,
    Method,
    Node,
    Positional,
    Step,
    at_clients,
    at_server,
)
from fedstill.core.algebra import not_finite
from fedstill.core.errors import BadMessage
from fedstill.core.trees import SMALL
from fedstill.engines.engine import Outcome
from fedstill.federation.post import Post
from fedstill.federation.topology import Complete, Ring, Star
from fedstill.logbook.events import Traffic
from fedstill.logbook.writer import MemoryLog
from fedstill.models import MLP

NAMES = ("a", "b", "c", "d")


class Word(Message):
    """Two floats, three labels, a number and perhaps more."""

    values: Tensor
    labels: Positional
    count: int
    more: Tensor | None = None


@dataclass(frozen=True)
class Talk(Method):
    """Every pair of places once: server, clients, clients, server, server."""

    def each_round(self) -> Sequence[Step]:
        return [self.tell, self.say, self.hear, self.collect, self.ponder]

    @at_server
    def tell(self, server: Node[Any], inbox: Inbox[Never]) -> Word:
        """Speak to all."""
        return word()

    @at_clients
    def say(self, client: Node[Any], inbox: Inbox[Word]) -> Word:
        """Speak to peers."""
        return word()

    @at_clients
    def hear(self, client: Node[Any], inbox: Inbox[Word]) -> Word:
        """Speak to the server."""
        return word()

    @at_server
    def collect(self, server: Node[Any], inbox: Inbox[Word]) -> Word:
        """Speak to itself."""
        return word()

    @at_server
    def ponder(self, server: Node[Any], inbox: Inbox[Word]) -> None:
        """Hear itself."""


METHOD = Talk()


def word(first: float = 1.0) -> Word:
    return Word(torch.tensor([first, 2.0]), torch.tensor([0, 1, 2]), 7)


@dataclass
class Posted:
    """A post with its logbook."""

    topology: Any = field(default_factory=Complete)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.log = MemoryLog()
        self.post = Post(self.topology.graph(NAMES, 0), self.log, **self.options)

    def deliver(self, step: Step, following: Step | None, said: Mapping[str, Any], awake=NAMES):
        outcomes = {name: Outcome(message) for name, message in said.items()}
        return self.post.deliver(1, step, following, outcomes, awake)


def everybody(names: Sequence[str] = NAMES) -> dict[str, Word]:
    return {name: word() for name in names}


def heard(mail: Mapping[str, Inbox[Any]]) -> dict[str, str]:
    return {hearer: "".join(inbox) for hearer, inbox in sorted(mail.items())}


def test_every_field_is_counted_in_floats_and_bytes_as_said_and_heard():
    posted = Posted()
    posted.deliver(METHOD.tell, METHOD.say, {SERVER: word()}, awake=("a", "c", "d"))
    assert posted.log.messages == [
        Traffic(1, "tell", SERVER, "down", "values", 2, 2 * 4, 3),
        Traffic(1, "tell", SERVER, "down", "labels", 0, 3 * 8, 3),  # an order would imply them
        Traffic(1, "tell", SERVER, "down", "count", 1, 8, 3),
        Traffic(1, "tell", SERVER, "down", "more", 0, 0, 3),
    ]
    assert (posted.post.floats, posted.post.bytes) == (3, 40)


def test_totals_grow_by_what_was_said_however_many_hear_it():
    posted = Posted()
    posted.deliver(METHOD.say, METHOD.hear, everybody())
    posted.deliver(METHOD.hear, METHOD.collect, everybody())
    assert (posted.post.floats, posted.post.bytes) == (8 * 3, 8 * 40)
    assert {row.hearers for row in posted.log.messages if row.step == "say"} == {3}
    assert {row.hearers for row in posted.log.messages if row.step == "hear"} == {1}


def test_the_direction_follows_from_speaker_and_hearer():
    posted = Posted()
    posted.deliver(METHOD.tell, METHOD.say, {SERVER: word()})
    posted.deliver(METHOD.say, METHOD.hear, everybody())
    posted.deliver(METHOD.hear, METHOD.collect, everybody())
    assert {(row.step, row.direction) for row in posted.log.messages} == {
        ("tell", "down"), ("say", "peer"), ("hear", "up"),
    }  # fmt: skip


def test_what_a_server_says_to_itself_is_delivered_but_does_not_travel():
    posted = Posted()
    mail = posted.deliver(METHOD.collect, METHOD.ponder, {SERVER: word()})
    assert heard(mail) == {SERVER: SERVER}
    assert posted.log.messages == [] and posted.post.bytes == 0


def test_the_server_hears_everybody_and_everybody_awake_hears_the_server():
    for topology in (Star(), Ring()):
        posted = Posted(topology)
        assert heard(posted.deliver(METHOD.hear, METHOD.collect, everybody())) == {SERVER: "abcd"}
        mail = posted.deliver(METHOD.tell, METHOD.say, {SERVER: word()}, awake=("b", "d"))
        assert heard(mail) == {"b": SERVER, "d": SERVER}


def test_peers_hear_their_neighbours_in_the_graph():
    ring = {"a": "bd", "b": "ac", "c": "bd", "d": "ac"}
    assert heard(Posted(Ring()).deliver(METHOD.say, METHOD.hear, everybody())) == ring
    complete = {"a": "bcd", "b": "acd", "c": "abd", "d": "abc"}
    assert heard(Posted().deliver(METHOD.say, METHOD.hear, everybody())) == complete
    assert heard(Posted(Star()).deliver(METHOD.say, METHOD.hear, everybody())) == {}


def test_peers_that_sleep_neither_speak_nor_hear():
    posted = Posted(Ring())
    mail = posted.deliver(METHOD.say, METHOD.hear, everybody(("a", "b")), awake=("a", "b"))
    assert heard(mail) == {"a": "b", "b": "a"}
    assert {row.hearers for row in posted.log.messages} == {1}


def test_addressed_messages_reach_their_hearer_only_and_are_counted_one_by_one():
    posted = Posted()
    letters = Addressed({name: word(float(i)) for i, name in enumerate(NAMES)})
    mail = posted.deliver(METHOD.tell, METHOD.say, {SERVER: letters}, awake=("a", "c"))
    assert {name: float(inbox.only().values[0]) for name, inbox in mail.items()} == {"a": 0, "c": 2}
    values = [row for row in posted.log.messages if row.field == "values"]
    assert [(row.floats, row.hearers) for row in values] == [(2, 1), (2, 1)]


def test_peers_address_only_those_who_can_hear_them():
    letters = Addressed({"b": word(), "c": word()})
    assert heard(Posted(Ring()).deliver(METHOD.say, METHOD.hear, {"a": letters})) == {"b": "a"}


def test_what_the_last_step_says_reaches_nobody_and_does_not_count():
    posted = Posted()
    assert posted.deliver(METHOD.hear, None, everybody()) == {}
    assert posted.log.messages == []


def test_silence_is_neither_delivered_nor_counted():
    posted = Posted()
    assert heard(posted.deliver(METHOD.hear, METHOD.collect, {"a": None, "b": word()})) == {
        SERVER: "b"
    }
    assert {row.sender for row in posted.log.messages} == {"b"}


def test_order_of_outcomes_does_not_matter():
    rows = []
    for names in (NAMES, NAMES[::-1]):
        posted = Posted()
        mail = posted.deliver(METHOD.say, METHOD.hear, everybody(names))
        rows.append((posted.log.messages, heard(mail)))
    assert rows[0] == rows[1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_message_that_is_not_finite_stops_the_run(bad):
    posted = Posted()
    with pytest.raises(BadMessage) as error:
        posted.deliver(METHOD.hear, METHOD.collect, {**everybody(), "b": word(bad)})
    assert str(error.value).startswith(
        "b sent Word with NaN or infinite values in values (Talk.hear, round 1). Lower the"
    )


def test_a_message_that_is_not_finite_can_be_left_out():
    posted = Posted(options={"bad_messages": "leave_out"})
    said = {**everybody(), "b": word(float("nan"))}
    assert heard(posted.deliver(METHOD.hear, METHOD.collect, said)) == {SERVER: "acd"}
    assert {row.sender for row in posted.log.messages} == {"a", "c", "d"}
    (note,) = posted.log.notes
    assert (note.kind, note.node, note.round) == ("left out", "b", 1)


def test_a_message_that_a_step_cannot_use_stops_the_run_or_is_left_out():
    with pytest.raises(BadMessage) as error:
        Posted().post.leave_out(3, METHOD.collect, "b", "sent nonsense")
    assert str(error.value) == (
        "b sent nonsense (Talk.collect, round 3). Set federation.bad_messages = "
        '"leave_out" to go on without such messages'
    )
    posted = Posted(options={"bad_messages": "leave_out"})
    posted.post.leave_out(3, METHOD.collect, "b", "sent nonsense")
    (note,) = posted.log.notes
    assert (note.kind, note.node, note.round) == ("left out", "b", 3)


def test_a_server_that_is_not_finite_stops_the_run_in_any_case():
    posted = Posted(options={"bad_messages": "leave_out"})
    with pytest.raises(BadMessage, match="server sent Word with NaN"):
        posted.deliver(METHOD.tell, METHOD.say, {SERVER: word(float("nan"))})


def test_only_floating_point_numbers_are_looked_at():
    assert not_finite(word()) == []
    bad = Word(torch.tensor([1.0]), torch.tensor([1]), 1, torch.tensor([1.0, float("nan")]))
    assert not_finite(bad) == ["more"]
    assert not_finite(Word(torch.zeros(0), torch.zeros(0, dtype=torch.long), 1)) == []


class Weighty(Message):
    """Tensors of any size and kind."""

    tensors: dict[str, Tensor]


def ones(size: int, *others: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Ones of which the last are replaced."""
    made = torch.ones(size, dtype=dtype)
    made[size - len(others) :] = torch.tensor(others, dtype=dtype)
    return made


INFINITE, NAN = float("inf"), float("nan")
SIZES = (3, SMALL, SMALL + 1)
KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("others", [(INFINITE,), (-INFINITE,), (NAN,), (INFINITE, -INFINITE)])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_a_single_bad_entry_is_found_in_tensors_of_every_size(size, dtype, others):
    bad = ones(size, *others, dtype=dtype)
    for place in ("first", "last"):
        named = {"a": ones(5), "b": ones(SMALL + 7), "whole": torch.arange(4)}
        named = {"bad": bad, **named} if place == "first" else {**named, "bad": bad}
        assert not_finite(Weighty(named)) == ["tensors.bad"]


def test_infinities_of_two_tensors_do_not_cancel():
    named = {"up": ones(3, INFINITE), "fine": ones(3), "down": ones(3, -INFINITE)}
    assert not_finite(Weighty(named)) == ["tensors.up", "tensors.down"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", KINDS)
def test_large_numbers_whose_sum_overflows_are_finite(size, dtype):
    largest = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
    assert not_finite(Weighty({"large": largest, "more": -largest, "one": ones(1)})) == []
    assert not_finite(Weighty({"large": largest, "bad": ones(3, NAN)})) == ["tensors.bad"]


def test_a_half_is_checked_beside_doubles_it_cannot_hold():
    large = torch.full((3,), 1e300, dtype=torch.float64)
    named = {"half": ones(3, dtype=torch.float16), "double": large}
    assert not_finite(Weighty(named)) == []


def test_tensors_without_entries_and_views_are_checked_too():
    table = torch.ones(4, 6)
    table[3, 5] = NAN
    named = {
        "none": torch.zeros(0, 3),
        "turned": table.t(),
        "cut": table[:, :5],
        "one": table[3, 5],
    }
    assert not_finite(Weighty(named)) == ["tensors.turned", "tensors.one"]


@dataclass(frozen=True)
class Doubled(Channel):
    """What travels is said twice; its readers get the first half."""

    def receive(self, message: Word, heard: Message | None) -> Word:
        return message.replace(values=message.values[: len(message.values) // 2])


def twice(message: Word) -> Word:
    return message.replace(values=message.values.repeat(2))


def test_messages_are_counted_as_they_travel_and_read_as_they_are_decoded():
    posted = Posted(options={"channels": [Doubled()]})
    mail = posted.deliver(METHOD.hear, METHOD.collect, {"a": twice(word())})
    assert mail[SERVER]["a"].values.tolist() == [1.0, 2.0]
    assert [row.floats for row in posted.log.messages if row.field == "values"] == [4]


def test_a_channel_on_another_way_decodes_nothing():
    posted = Posted(options={"channels": [Doubled(directions=("down",))]})
    mail = posted.deliver(METHOD.hear, METHOD.collect, everybody(("a",)))
    assert mail[SERVER]["a"].values.tolist() == [1.0, 2.0]


def test_what_a_channel_lost_is_noted_and_not_counted():
    posted = Posted()
    outcomes = {"a": Outcome(word()), "b": Outcome(None, lost=True)}
    mail = posted.post.deliver(1, METHOD.hear, METHOD.collect, outcomes, NAMES)
    assert heard(mail) == {SERVER: "a"}
    assert {row.sender for row in posted.log.messages} == {"a"}
    assert [(note.kind, note.node) for note in posted.log.notes] == [("lost", "b")]


def test_observers_see_what_arrives():
    seen = []
    options = {
        "channels": [Doubled()],
        "bad_messages": "leave_out",
        "observers": [lambda message, sender, round: seen.append((sender, round, message))],
    }
    posted = Posted(options=options)
    said = {"a": twice(word()), "b": twice(word(NAN))}
    mail = posted.deliver(METHOD.hear, METHOD.collect, said)
    assert seen == [("a", 1, mail[SERVER]["a"])]


def test_what_cannot_be_decoded_is_left_out_or_ends_the_run():
    options = {"channels": [Half(least=1)], "bad_messages": "leave_out"}
    half, _ = Half(least=1).send(word(), Edge("up", lambda _: torch.Generator()), {})
    said = {"a": half, "b": Coded(half.rest, {"values": {}}), "c": word(), "d": Coded(half, {})}
    posted = Posted(options=options)
    assert heard(posted.deliver(METHOD.hear, METHOD.collect, said)) == {SERVER: "a"}
    assert {row.sender for row in posted.log.messages} == {"a"}
    told = [(note.node, note.text) for note in posted.log.notes]
    assert [node for node, _ in told] == ["b", "c", "d"]
    assert "b sent Word that cannot be decoded: values cannot be decoded to [2]" in told[0][1]
    assert "c sent Word that cannot be decoded: Word came plain" in told[1][1]
    with pytest.raises(BadMessage, match="b sent Word that cannot be decoded"):
        strict = Posted(options={"channels": [Half()]})
        strict.deliver(METHOD.hear, METHOD.collect, {"b": said["b"]})


@dataclass(frozen=True)
class Breaking(Channel):
    """A channel that breaks what passes."""

    def receive(self, message: Word, heard: Message | None) -> Word:
        return message.replace(values=message.values * NAN)


def test_what_an_engine_found_is_believed_until_a_channel_changes_the_message():
    found = {"a": Outcome(word(), bad=[]), "b": Outcome(word(NAN), bad=["values"])}
    posted = Posted(options={"bad_messages": "leave_out"})
    mail = posted.post.deliver(1, METHOD.hear, METHOD.collect, found, NAMES)
    assert heard(mail) == {SERVER: "a"}
    posted = Posted(options={"bad_messages": "leave_out", "channels": [Breaking()]})
    assert posted.post.deliver(1, METHOD.hear, METHOD.collect, found, NAMES) == {}
    assert [note.node for note in posted.log.notes] == ["a", "b"]


def test_a_message_is_judged_for_every_network_of_its_hearers():
    small, large = MLP((2,), 2, hidden=()), MLP((2,), 2, hidden=(3,))
    models = dict(zip(NAMES, (small, MLP((2,), 2, hidden=()), large, large), strict=True))
    asked: list[str] = []

    @dataclass(frozen=True)
    class Picky(Talk):
        def wrong(self, node: Node[Any], sender: str, message: Message) -> str | None:
            asked.append(node.id)
            return "sent too little" if node.model == large else None

    def reader(name: str, round: int) -> Node[Any]:
        return Node(name, round, None, model=models[name], models=models)

    posted, method = Posted(options={"readers": reader}), Picky()
    with pytest.raises(BadMessage, match=r"^server sent too little \(Picky.tell, round 1\)"):
        posted.deliver(method.tell, method.say, {SERVER: word()})
    assert len(asked) == 2 and asked[0] == "a" and asked[1] in "cd"


def test_one_reader_judges_the_messages_of_all_senders():
    asked: list[str] = []

    def reader(name: str, round: int) -> Node[Any]:
        asked.append(name)
        return Node(name, round, None, model=MLP((2,), 2, hidden=()))

    posted = Posted(options={"readers": reader})
    posted.deliver(METHOD.hear, METHOD.collect, everybody())
    assert asked == [SERVER]
