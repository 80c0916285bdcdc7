"""The exchange over a Grid, with a Grid of this file: who is asked, believed, asked again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from fedstill.sites.exchange import Silence, Stopped
from fedstill.sites.flower import PART, Nodes

KEYS = {"north": b"key of north", "south": b"key of south"}


QUICK: dict[str, Any] = {"poll": 0.001, "look": 0.002, "least": 0.0}


def node(id: int, key: bytes, name: str = "") -> Any:
    return SimpleNamespace(node_id=id, public_key=key + b"\n", name=name)


def written(data: bytes, to: int, seconds: float) -> Any:
    return SimpleNamespace(data=data, to=to, seconds=seconds)


def reply(id: str, sender: int, data: object = None, error: str | None = None) -> Any:
    return SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=id, src_node_id=sender),
        has_error=lambda: error is not None,
        error=SimpleNamespace(code=2, reason=error),
        content=SimpleNamespace(config_records={} if data is None else {PART: {"data": data}}),
    )


@dataclass
class FakeGrid:
    """Nodes that answer what `answers` says; it is given the message's id and the message."""

    answers: Callable[[str, Any], Iterable[Any]]
    nodes: list[Any] = field(
        default_factory=lambda: [node(1, KEYS["north"]), node(2, KEYS["south"])]
    )
    sent: dict[str, Any] = field(default_factory=dict)

    def get_nodes(self) -> Iterable[Any]:
        return self.nodes

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(f"message {len(self.sent)}")
            self.sent[ids[-1]] = message
        return ids

    def pull_messages(self, ids: Iterable[str]) -> list[Any]:
        return [one for id in ids for one in self.answers(id, self.sent[id])]


def echo(id: str, message: Any) -> list[Any]:
    return [reply(id, message.to, b"heard " + message.data)]


def over(grid: FakeGrid, lost: float = 0.05, **more: Any) -> Nodes:
    return Nodes(grid, KEYS, lost, write=written, **{**QUICK, **more})


def test_each_site_is_asked_at_the_node_that_has_its_key() -> None:
    grid = FakeGrid(echo)
    found = over(grid).ask({"north": b"a", "south": b"b"}, 5)
    assert found == {"north": b"heard a", "south": b"heard b"}
    assert {m.to: m.data for m in grid.sent.values()} == {1: b"a", 2: b"b"}
    assert all(0 < m.seconds <= 5 for m in grid.sent.values())


def test_a_node_that_calls_itself_by_a_sites_name_is_nobody_without_its_key() -> None:
    grid = FakeGrid(echo, [node(7, b"another key", "north"), node(2, KEYS["south"])])
    nodes = over(grid)
    assert nodes.wait_for(KEYS, 0.01) == {"north"}
    assert nodes.names() == {"south"}
    found = nodes.ask({"north": b"a"}, 5)
    assert found == {"north": Silence("its SuperNode is not connected")}
    assert not grid.sent


def test_an_answer_of_another_node_is_not_believed() -> None:
    grid = FakeGrid(lambda id, message: [reply(id, 2, b"forged")])
    found = over(grid).ask({"north": b"a"}, 5)
    assert found == {"north": Silence("node 2 answered in its place")}


@pytest.mark.parametrize("data", [None, "text", 5, ["list"]])
def test_an_answer_that_holds_no_bytes_is_a_silence(data: object) -> None:
    grid = FakeGrid(lambda id, message: [reply(id, 1, data)])
    assert over(grid).ask({"north": b"a"}, 5) == {"north": Silence("its answer holds no bytes")}


def test_answers_to_questions_that_were_not_asked_are_passed_over() -> None:
    grid = FakeGrid(lambda id, message: [reply("another", 1, b"old"), *echo(id, message)])
    assert over(grid).ask({"north": b"a"}, 5) == {"north": b"heard a"}


def test_a_site_whose_node_fails_is_asked_again_until_it_answers() -> None:
    def answers(id: str, message: Any) -> list[Any]:
        if id in ("message 0", "message 1"):
            return [reply(id, 1, error="the door\nis shut")]
        return echo(id, message)

    grid = FakeGrid(answers)
    assert over(grid, lost=60).ask({"north": b"a"}, 60) == {"north": b"heard a"}
    assert [m.data for m in grid.sent.values()] == [b"a"] * 3, "the same bytes each time"


def test_a_fault_that_lasts_is_told_in_one_line() -> None:
    grid = FakeGrid(lambda id, message: [reply(id, 1, error="the door\nis shut" + "." * 400)])
    silence = over(grid).ask({"north": b"a"}, 5)["north"]
    assert isinstance(silence, Silence)
    assert silence.reason.startswith("Flower error 2: the door is shut...")
    assert len(silence.reason) < 330


def test_a_question_under_work_is_waited_for_beyond_the_time_for_faults() -> None:
    looks = []

    def answers(id: str, message: Any) -> list[Any]:
        looks.append(id)
        return echo(id, message) if len(looks) > 100 else []

    grid = FakeGrid(answers)
    assert over(grid, lost=0.01).ask({"north": b"a"}, 60) == {"north": b"heard a"}
    assert len(grid.sent) == 1


def test_a_site_that_never_answers_is_silent_at_the_deadline() -> None:
    found = over(FakeGrid(lambda id, message: [])).ask({"north": b"a"}, 0.05)
    assert found == {"north": Silence("no answer within 0.05 s")}


def test_no_site_is_given_less_time_than_flower_itself_takes() -> None:
    found = over(FakeGrid(lambda id, message: []), least=0.1).ask({"north": b"a"}, 0.01)
    assert found == {"north": Silence("no answer within 0.1 s")}


def test_a_coordinator_that_is_told_to_stop_asks_no_longer() -> None:
    with pytest.raises(Stopped, match=r"before all sites had answered"):
        over(FakeGrid(lambda id, message: []), stopped=lambda: True).ask({"north": b"a"}, 60)


def test_a_message_that_flower_does_not_take_is_a_silence() -> None:
    class Full(FakeGrid):
        def push_messages(self, messages: Iterable[Any]) -> list[str]:
            return []

    found = over(Full(echo)).ask({"north": b"a"}, 5)
    assert found == {"north": Silence("Flower did not take the message to it")}


def test_a_message_of_flowers_own_holds_the_bytes() -> None:
    pytest.importorskip("flwr", reason="needs fedstill[flower]")
    from fedstill.sites.flower import KIND, message

    made = message(b"bytes", 5, 60.0)
    assert made.content.config_records[PART]["data"] == b"bytes"
    assert (made.metadata.dst_node_id, made.metadata.message_type) == (5, KIND)
