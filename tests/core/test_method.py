"""Method: the protocol is checked when the object is made, and the object never changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, ClassVar, Literal, Never

import pytest
import torch
from torch import Tensor

from fedstill.core import (
    SERVER,
    Addressed,
    Inbox,
    Message,
    Method,
    Node,
    Place,
    State,
    Step,
    at_clients,
    at_server,
)
from fedstill.core.errors import BadValue, ProtocolError
from fedstill.core.method import memory_of
from fedstill.core.ranges import Count, Positive
from fedstill.methods import METHOD_NAMES, FedAvg
from fedstill.methods.fedavg import Global
from fedstill.methods.fedavg import Up as FedAvgUp
from fedstill.models import MLP


class Memory(State):
    weights: Tensor


class Down(Message):
    number: int


class Up(Message):
    number: int


class LongUp(Up):
    more: int


class Moving(State):
    weights: Tensor
    velocity: Tensor


class Wider(Global):
    velocity: Tensor


@dataclass(frozen=True)
class Talk(Method):
    """A server speaks and clients answer."""

    lr: Positive = 0.1
    count: Count = 2
    kind: Literal["loud", "quiet"] = "loud"

    def faults(self) -> Sequence[str]:
        return ["count must be even"] if self.count % 2 else ()

    def each_round(self) -> Sequence[Any]:
        return [self.speak, self.answer, self.hear]

    @at_server
    def speak(self, server: Node[Memory], inbox: Inbox[Never]) -> Addressed[Down]:
        """Say a number to each.

        And no more than that.
        """
        return Addressed()

    @at_clients
    async def answer(self, client: Node[None], inbox: Inbox[Down]) -> LongUp | None:
        """Say one back."""
        return None

    @at_server
    def hear(self, server: Node[Memory], inbox: Inbox[Up]) -> None:
        """Keep quiet."""

    @at_clients
    def unhinted(self, client, inbox):  # type: ignore[no-untyped-def]
        return None

    @at_clients
    def half_hinted(self, client, inbox) -> Up:  # type: ignore[no-untyped-def]
        return Up(1)

    @at_clients
    def wordy(self, client: Node[None], inbox: Inbox[Never]) -> str:
        return ""

    @at_clients
    def crowded(self, client: Node[None], inbox: Inbox[Never], more: int) -> None:
        return None

    def plain(self, client: Node[None], inbox: Inbox[Never]) -> None:
        return None


def planned(part: str, *names: str) -> type[Talk]:
    """A talk whose plan is these steps in this part, and nothing else."""
    plan = {"before": (), "each_round": (), "after": (), part: names}

    def steps(of: str) -> Any:
        return lambda self: [getattr(self, name) for name in plan[of]]

    made = type("Planned", (Talk,), {of: steps(of) for of in plan})
    return dataclass(frozen=True)(made)


def test_hints_are_the_wire_format() -> None:
    speak, answer, hear = Talk().each_round()
    assert (speak.reads, answer.reads, hear.reads) == (None, Down, Up)
    assert (speak.sends, answer.sends, hear.sends) == (Down, LongUp, None)
    assert (speak.remembers, answer.remembers, hear.remembers) == (Memory, None, Memory)
    assert (speak.place, answer.place) == (Place.SERVER, Place.CLIENTS)


def test_a_step_knows_its_name_its_purpose_and_its_method() -> None:
    step = Talk(lr=0.5).speak
    assert (step.title, step.purpose) == ("Talk.speak", "Say a number to each.")
    assert step.method == Talk(lr=0.5)


def test_a_step_is_called_with_node_and_inbox_alone() -> None:
    assert Talk().hear(None, Inbox()) is None


class Wide(Talk):
    """A talk that leaves open which messages it plays with."""

    @at_clients
    def pass_on(self, client: Node[Any], inbox: Inbox[Message]) -> Message:
        """Say what is said elsewhere."""
        return Down(1)


def test_a_step_can_be_narrowed_to_kinds_that_its_hints_leave_open() -> None:
    step = Wide().pass_on
    assert (step.reads, step.sends, step.remembers) == (Message, Message, None)
    narrow = step.narrowed(reads=Down, sends=LongUp, remembers=Memory)
    assert (narrow.reads, narrow.sends, narrow.remembers) == (Down, LongUp, Memory)
    assert (narrow.name, narrow.place, narrow.act) == (step.name, step.place, step.act)
    silent = step.narrowed(reads=None, sends=None, remembers=None)
    assert (silent.reads, silent.sends, silent.remembers) == (None, None, None)
    assert narrow != silent and narrow == step.narrowed(reads=Down, sends=LongUp, remembers=Memory)


@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        ({"reads": Down}, "Talk.hear reads Up by its hints, which Down is not"),
        ({"sends": Up}, "Talk.hear sends nothing by its hints, which Up is not"),
        ({"remembers": State}, "Talk.hear remembers Memory by its hints, which State is not"),
    ],
)
def test_a_step_cannot_be_narrowed_to_what_its_hints_exclude(kinds: Any, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        Talk().hear.narrowed(**{"reads": None, "sends": None, "remembers": None, **kinds})


def test_records_that_a_method_holds_are_told_apart_by_name() -> None:
    class Other(Message):
        number: int

    Other.__name__ = "Up"

    class Holding(Talk):
        @property
        def holds(self) -> list[Any]:
            return [Up, Down, Other]

    with pytest.raises(ProtocolError, match="Holding holds two kinds of record called Up"):
        Holding()


@pytest.mark.parametrize("name", ["speak", "answer"])
def test_a_step_is_played_by_another_whether_it_awaits_or_not(name: str) -> None:
    playing = getattr(Talk(), name).played(None, Inbox())
    with pytest.raises(StopIteration) as end:
        playing.send(None)
    assert not end.value.value


def test_a_step_may_read_a_simpler_message_than_is_sent() -> None:
    assert issubclass(LongUp, Up)
    planned("each_round", "speak", "answer", "hear")()


def test_a_step_may_ignore_what_the_step_before_it_sends() -> None:
    assert len(planned("each_round", "speak", "speak")().each_round()) == 2


def test_a_step_that_reads_another_message_is_refused_with_both_names() -> None:
    with pytest.raises(ProtocolError) as error:
        planned("each_round", "speak", "hear")()
    assert str(error.value) == ("Planned.hear reads Up, but the step before it, speak, sends Down")


def test_a_step_that_reads_after_a_silent_one_is_refused_with_both_names() -> None:
    with pytest.raises(ProtocolError) as error:
        planned("each_round", "speak", "answer", "hear", "answer")()
    assert str(error.value) == (
        "Planned.answer reads Down, but the step before it, hear, sends nothing"
    )


@pytest.mark.parametrize(
    ("part", "said"), [("before", "before"), ("each_round", "each round"), ("after", "after")]
)
def test_the_first_step_of_a_part_may_read_nothing(part: str, said: str) -> None:
    with pytest.raises(ProtocolError) as error:
        planned(part, "answer", "hear")()
    assert str(error.value) == (
        f"Planned.answer reads Down, but it is the first step {said} and nothing is delivered to it"
    )


def test_a_method_without_steps_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"Planned has no steps; each_round returns them"):
        planned("each_round")()


def test_a_step_that_is_named_as_scoring_is_refused() -> None:
    class Named(Method):
        def each_round(self) -> list[Step]:
            return [self.evaluate]

        @at_clients
        def evaluate(self, client: Node[None], inbox: Inbox[Never]) -> None:
            """Look."""

    with pytest.raises(ProtocolError, match=r"Named.evaluate: evaluate is what scoring is called"):
        Named()


def test_steps_that_hint_two_memories_of_one_party_are_refused() -> None:
    @dataclass(frozen=True)
    class Restated(FedAvg):
        @at_server
        def aggregate(self, server: Node[Moving], inbox: Inbox[FedAvgUp]) -> None:
            """A memory that no checkpoint could be read by, since broadcast hints another."""

    @dataclass(frozen=True)
    class Widened(FedAvg):
        @at_server
        def aggregate(self, server: Node[Wider], inbox: Inbox[FedAvgUp]) -> None:
            """The same memory and more."""

    with pytest.raises(
        ProtocolError,
        match=r"broadcast remembers Global, .*aggregate Moving: .* e\.g\. class Moving\(Global\)",
    ):
        Restated()
    assert memory_of(Widened(), Place.SERVER) is Wider


@pytest.mark.parametrize("name", ["unhinted", "half_hinted", "crowded"])
def test_a_step_without_every_hint_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError) as error:
        planned("each_round", name)()
    assert str(error.value).startswith(f"Planned.{name} must be written (self, node: Node[...]")


def test_hints_that_name_what_is_inside_a_function_are_refused_before_a_run() -> None:
    class Inside(Message):
        number: int

    Short = Positive

    class Nested(Message):
        number: Short

    class Reading(Method):
        def each_round(self) -> list[Step]:
            return [self.say]

        @at_clients
        def say(self, client: Node[None], inbox: Inbox[Never]) -> Inside:
            """A hint that Python looks for at the top of the file."""
            return Inside(1)

    class Holding(Method):
        def each_round(self) -> list[Step]:
            return [self.say]

        @at_clients
        def say(self, client: Node[None], inbox: Inbox[Never]) -> Message:
            """A message whose own hints are of such a kind."""
            return Nested(1)

        say.act.__annotations__["return"] = Nested

    @dataclass(frozen=True)
    class Valued(FedAvg):
        pull: Short = 0.1

    for kind, owner, name in (
        (Reading, "Reading.say", "Inside"),
        (Holding, "Nested", "Short"),
        (Valued, "Valued", "Short"),
    ):
        said = rf"{owner}: a hint names '{name}', which is not found at the top of {__name__}; .*"
        with pytest.raises(ProtocolError, match=f"{said}not inside a function"):
            kind()


def test_a_step_that_returns_something_else_than_a_message_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"Planned.wordy returns <class 'str'>.*not a Message"):
        planned("each_round", "wordy")()


def test_a_function_that_was_not_marked_is_not_a_step() -> None:
    said = r"^[\w.<>]*plain is not a step: mark it @at_server or @at_clients$"
    with pytest.raises(ProtocolError, match=said):
        planned("each_round", "plain")()


def test_values_of_a_class_without_its_decorator_are_not_lost_in_silence() -> None:
    class Bare(FedAvg):
        marked: ClassVar[bool] = True
        pull: float = 0.5

    class Same(FedAvg):
        """Changes a step and nothing else, so that it needs no decorator."""

        keeps_own: ClassVar[bool] = False

    said = r"^Bare: pull is no value of the method yet; write @dataclass\(frozen=True\) above"
    with pytest.raises(BadValue, match=said):
        Bare()
    with pytest.raises(BadValue, match=said):
        type("Below", (Bare,), {})()
    with pytest.raises(BadValue, match=said):
        Bare(pull=0.1)  # type: ignore[call-arg]
    Same()
    assert "Bare: pull is no value" in str(METHOD_NAMES.fault(Bare))
    assert METHOD_NAMES.fault(Same) is None


def test_all_values_out_of_range_are_reported_at_once() -> None:
    with pytest.raises(BadValue) as error:
        Talk(lr=-1, count=-3, kind="soft")  # type: ignore[arg-type]
    assert error.value.faults == [
        "Talk: lr = -1: must be above 0",
        "Talk: count = -3: must be at least 1",
        "Talk: kind = 'soft': unknown choice 'soft'; known: loud, quiet",
        "Talk: count must be even",
    ]


def test_an_option_that_a_method_does_not_have_is_told_what_it_has() -> None:
    with pytest.raises(BadValue, match=r"FedAvg: unknown option 'learning_rate'; .* 'lr'\?") as one:
        FedAvg(learning_rate=0.1)  # type: ignore[call-arg]
    assert "known: aggregation, batch_size, " in str(one.value)
    with pytest.raises(BadValue) as two:
        FedAvg(optimizer="adam", epoch=2)  # type: ignore[call-arg]
    assert len(two.value.faults) == 2


def test_a_method_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Talk().lr = 1.0  # type: ignore[misc]


def test_methods_of_equal_values_are_equal_and_found_in_a_table() -> None:
    assert Talk(lr=0.2) == Talk(lr=0.2) != Talk(lr=0.3)
    assert {Talk(): 1}[Talk()] == 1
    assert Talk().speak == Talk().speak
    assert Talk().speak != Talk(lr=0.3).speak
    assert len({Talk().speak, Talk().speak, Talk().hear}) == 2
    assert isinstance(Talk().speak, Step)


def test_a_method_that_says_nothing_else_shows_no_examples_and_is_scored_at_the_server() -> None:
    assert not Talk().sends_examples
    assert Talk.scored is Place.SERVER


def test_a_model_that_nobody_keeps_is_missed_with_what_to_write() -> None:
    class Bare(State):
        count: int

    for state, kept in ((None, "nothing"), (Bare(3), "Bare without weights")):
        server: Node[Any] = Node(SERVER, 1, state, model=MLP((2,), 2))
        with pytest.raises(ProtocolError, match=f"server keeps, which remembers {kept}; let serv"):
            Talk().predict(server, torch.zeros(1, 2))
    with pytest.raises(ProtocolError, match="client-0 keeps, which remembers nothing; let client_"):
        Talk().predict(Node("client-0", 1, None, model=MLP((2,), 2)), torch.zeros(1, 2))
