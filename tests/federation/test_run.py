"""The round loop: order of steps, who takes part, absences, and when things are saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Never

import pytest
import torch

import worlds
from fedstill.core import (
    SERVER,
    Inbox,
    Message,
    Method,
    Node,
    Place,
    State,
    Step,
    Weights,
    at_clients,
    at_server,
)
from fedstill.core.errors import StepError
from fedstill.core.release import Use
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.run import Progress, run
from fedstill.federation.sampling import Sample, Scripted
from fedstill.logbook.writer import MemoryLog
from fedstill.methods import METHODS
from fedstill.privacy.privacy import Privacy


class Count(Message):
    """How often somebody has acted."""

    acts: int


class Kept(State):
    """How often a node has acted, and a model to be scored."""

    acts: int
    weights: Weights


@dataclass(frozen=True)
class Counting(Method):
    """Everybody counts; the server adds up what it hears."""

    def before(self) -> Sequence[Step]:
        return [self.greet]

    def each_round(self) -> Sequence[Step]:
        return [self.call, self.answer, self.add]

    def after(self) -> Sequence[Step]:
        return [self.part]

    def server_state(self, server: Node[Any]) -> Kept:
        return Kept(0, server.model.init(0))

    def client_state(self, client: Node[Any]) -> Kept:
        return Kept(0, client.model.init(0))

    @at_clients
    def greet(self, client: Node[Kept], inbox: Inbox[Never]) -> None:
        """Count once before the first round."""
        self.count(client, 100)

    @at_server
    def call(self, server: Node[Kept], inbox: Inbox[Never]) -> Count:
        """Ask."""
        return Count(server.state.acts)

    @at_clients
    def answer(self, client: Node[Kept], inbox: Inbox[Count]) -> Count:
        """Count once and say so."""
        self.count(client, 1)
        return Count(client.state.acts)

    @at_server
    def add(self, server: Node[Kept], inbox: Inbox[Count]) -> None:
        """Add one for each who answered."""
        self.count(server, len(inbox))

    @at_clients
    def part(self, client: Node[Kept], inbox: Inbox[Never]) -> None:
        """Count once after the last round."""
        self.count(client, 10_000)

    def count(self, node: Node[Kept], by: int) -> None:
        node.state = node.state.replace(acts=node.state.acts + by)
        node.log(acts=node.state.acts)


def acts(engine: Any) -> dict[str, int]:
    return {name: state.acts for name, state in sorted(engine.states.items())}


def test_steps_before_and_after_are_played_once_by_everybody():
    engine, log = worlds.played(Counting(), worlds.vectors(), rounds=3)
    assert acts(engine) == dict.fromkeys(("c0", "c1", "c2", "c3"), 10_103) | {SERVER: 12}
    first = [row for row in log.metrics if row.step == "greet"]
    last = [row for row in log.metrics if row.step == "part"]
    assert {row.round for row in first} == {0} and {row.round for row in last} == {3}


def test_only_those_awake_take_part_in_a_round():
    sampler = Scripted({1: ["c0", "c1"], 2: ["c3"]})
    engine, _ = worlds.played(Counting(), worlds.vectors(), rounds=3, sampling=sampler)
    rounds = {"c0": 2, "c1": 2, "c2": 3, "c3": 2}
    assert acts(engine) == {c: 10_100 + n for c, n in rounds.items()} | {SERVER: 2 + 3 + 4}


def test_a_sample_has_its_size_in_every_round():
    sampler = Sample(count=2)
    _, log = worlds.played(Counting(), worlds.vectors(), rounds=5, sampling=sampler)
    rows = [row for row in log.metrics if row.step == "answer"]
    by_round = [{row.node for row in rows if row.round == t} for t in range(1, 6)]
    assert {len(names) for names in by_round} == {2}
    assert len({frozenset(names) for names in by_round}) > 1


@pytest.mark.parametrize("engine", [InProcess, Batched])
def test_an_absent_client_is_left_out_for_the_rest_of_the_round_only(engine):
    def absences(method: Method, step: str, round: int, node: str) -> str | None:
        return "asleep" if (step, round, node) == ("answer", 2, "c1") else None

    played, log = worlds.played(
        Counting(), worlds.vectors(), rounds=3, engine=engine, absences=absences
    )
    assert acts(played) == {"c0": 10_103, "c1": 10_102, "c2": 10_103, "c3": 10_103, SERVER: 11}
    assert [(n.round, n.kind, n.node, n.text) for n in log.notes] == [
        (2, "absent", "c1", "answer: asleep")
    ]
    speakers = {row.sender for row in log.messages if (row.step, row.round) == ("answer", 2)}
    assert speakers == {"c0", "c2", "c3"}


@dataclass(frozen=True)
class Twice(Counting):
    """Two steps of clients in a row."""

    def each_round(self) -> Sequence[Step]:
        return [self.speak, self.listen]

    @at_clients
    def speak(self, client: Node[Kept], inbox: Inbox[Never]) -> Count:
        """Say something to the peers."""
        return Count(1)

    @at_clients
    def listen(self, client: Node[Kept], inbox: Inbox[Count]) -> None:
        """Count those heard."""
        self.count(client, len(inbox))


@pytest.mark.parametrize("engine", [InProcess, Batched])
def test_an_absent_peer_neither_acts_nor_is_heard_until_the_next_round(engine):
    def absences(method: Method, step: str, round: int, node: str) -> str | None:
        return "asleep" if (step, round, node) == ("speak", 1, "c1") else None

    played, _ = worlds.played(Twice(), worlds.vectors(), rounds=2, engine=engine, absences=absences)
    heard = {"c0": 2 + 3, "c1": 0 + 3, "c2": 2 + 3, "c3": 2 + 3}
    assert {c: n - 10_100 for c, n in acts(played).items() if c != SERVER} == heard


def test_a_server_that_hears_nobody_skips_the_rest_of_the_round_and_says_so():
    def absences(method: Method, step: str, round: int, node: str) -> str | None:
        return "asleep" if step == "answer" and round == 2 else None

    engine, log = worlds.played(Counting(), worlds.vectors(), rounds=3, absences=absences)
    assert acts(engine)[SERVER] == 8
    skipped = [note for note in log.notes if note.kind == "skipped"]
    assert [(n.round, n.node, n.text) for n in skipped] == [
        (2, SERVER, "Counting.add heard nobody; the rest of the round is skipped")
    ]
    scored = {row.round for row in log.metrics if row.name == "accuracy"}
    assert scored == {1, 2, 3}, "a skipped round is scored all the same"


def test_an_absent_server_ends_the_round():
    def absences(method: Method, step: str, round: int, node: str) -> str | None:
        return "down" if (step, round) == ("call", 2) else None

    engine, _ = worlds.played(Counting(), worlds.vectors(), rounds=3, absences=absences)
    assert acts(engine) == dict.fromkeys(("c0", "c1", "c2", "c3"), 10_102) | {SERVER: 8}


def test_mail_does_not_cross_rounds_but_memory_does():
    class Forgetful(Counting):
        def each_round(self) -> Sequence[Step]:
            return [self.call, self.answer]

    engine, log = worlds.played(Forgetful(), worlds.vectors(), rounds=2)
    assert {row.step for row in log.messages} == {"call"}, "nobody reads what answer says"
    assert acts(engine)["c0"] == 10_102


def followed(method: Method, rounds: int, done: int | None = None, **options: Any) -> list[Any]:
    """What is watched and saved, in order."""
    seen: list[Any] = []
    engine = worlds.engine_for(method, worlds.vectors(), rounds=rounds, **options)
    run(
        engine, MemoryLog(), done=done,
        save=lambda round: seen.append(("save", round)),
        watch=lambda progress: seen.append(("watch", progress.round)),
    )  # fmt: skip
    return seen


def test_every_complete_round_is_watched_and_then_saved():
    pairs = followed(Counting(), 2)
    assert pairs == [(what, t) for t in (0, 1, 2) for what in ("watch", "save")]


def test_a_resumed_run_saves_only_what_is_new():
    assert followed(Counting(), 3, done=1) == [
        ("watch", 1), ("watch", 2), ("save", 2), ("watch", 3), ("save", 3),
    ]  # fmt: skip
    assert followed(Counting(), 3, done=3) == [("watch", 3)]


def test_the_last_round_is_scored_however_seldom_one_scores():
    _, log = worlds.played(Counting(), worlds.vectors(), rounds=5, evaluate_every=2)
    assert {row.round for row in log.metrics if row.step == "evaluate"} == {2, 4, 5}
    seconds = [row.round for row in log.metrics if row.name == "seconds"]
    assert seconds == [1, 2, 3, 4, 5]


def test_progress_tells_the_mean_accuracy_and_the_bytes_so_far():
    world, log, seen = worlds.vectors(), MemoryLog(), []
    method = Counting()
    run(worlds.engine_for(method, world, rounds=2), log, watch=seen.append)
    scores = [row.value for row in log.metrics if (row.name, row.round) == ("accuracy", 2)]
    last: Progress = seen[-1]
    assert (last.round, last.rounds) == (2, 2)
    assert last.score == pytest.approx(sum(scores) / 4)
    assert last.bytes == 2 * (1 + 4) * 8  # two rounds, one broadcast and four answers of a number


@pytest.mark.parametrize("engine", [InProcess, Batched])
def test_a_failing_step_names_method_step_node_and_round(engine):
    class Failing(Counting):
        @at_clients
        def answer(self, client: Node[Kept], inbox: Inbox[Count]) -> Count:
            """Fail once."""
            if (client.id, client.round) == ("c2", 2):
                raise ValueError("no")
            return Count(1)

    with pytest.raises(StepError, match=r"^Failing.answer failed on c2 in round 2: ValueError: no"):
        worlds.played(Failing(), worlds.vectors(), engine=engine)


def test_a_failed_step_leaves_the_memory_as_it_was():
    class Failing(Counting):
        @at_clients
        def answer(self, client: Node[Kept], inbox: Inbox[Count]) -> Count:
            """Change the memory, then fail."""
            self.count(client, 1)
            raise ValueError("no")

    world = worlds.vectors()
    engine = worlds.engine_for(Failing(), world)
    with pytest.raises(StepError):
        run(engine, MemoryLog())
    assert engine.states["c0"].acts == 100


@dataclass(frozen=True)
class Idle(Method):
    """Clients that do nothing but exist."""

    scored: ClassVar[Place] = Place.CLIENTS

    def each_round(self) -> Sequence[Step]:
        return [self.wait]

    @at_clients
    def wait(self, client: Node[None], inbox: Inbox[Never]) -> None:
        """Do nothing."""
        client.spend(Use("class sums", 2))

    def predict(self, node: Node[Any], x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x), worlds.CLASSES)


def test_uses_of_private_data_are_written_to_the_ledger():
    _, log = worlds.played(Idle(), worlds.vectors(), rounds=1)
    assert log.privacy == []  # nothing is private, so nothing is spent
    _, log = worlds.played(Idle(), worlds.vectors(), 1, privacy=Privacy(1.0, 1e-3))
    assert [(row.round, row.step, row.node, row.releases) for row in log.privacy] == [
        (1, "wait", name, 2) for name in ("c0", "c1", "c2", "c3")
    ]


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_two_runs_with_one_seed_are_equal_and_with_another_are_not(name):
    def weights(seed: int) -> dict[str, Any]:
        engine, _ = worlds.played(METHODS[name](), worlds.vectors(), rounds=2, seed=seed)
        return engine.states[SERVER].weights

    one, same, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not all(torch.equal(one[key], other[key]) for key in one)
