"""Sites behind walls: who is late or broken is absent, and nobody's memory leaves its site."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.channels import Channel, TopK
from fedstill.core.errors import BadValue, RankError, WireError
from fedstill.core.method import Method, Scored
from fedstill.core.node import SERVER, Node
from fedstill.core.records import NodeId, State
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks import letters, protocol
from fedstill.engines.ranks.follower import Follower
from fedstill.engines.ranks.leader import Leader
from fedstill.engines.ranks.protocol import Late
from fedstill.engines.ranks.shelf import Shelf
from fedstill.engines.ranks.threads import Threads
from fedstill.federation.run import run
from fedstill.logbook.writer import MemoryLog
from fedstill.methods import METHODS
from fedstill.testing import small, worlds
from fedstill.testing.walls import Seen, behind_walls
from fedstill.wire import codec

REASON = "no answer within 60 s"


class Slow:
    """A line on which one answer of one rank comes late: before the next one."""

    def __init__(self, line: Threads, rank: int, answer: int):
        self.line, self.late, self.left = line, rank, answer
        self.rank, self.size, self.local_rank, self.one_job = 0, line.size, 0, False
        self.held: list[bytes] = []

    def send(self, rank: int, data: bytes) -> None:
        self.line.send(rank, data)

    def receive(self, rank: int, seconds: float | None = None) -> bytes:
        if rank == self.late and self.held:
            return self.held.pop()
        data = self.line.receive(rank, seconds)
        if rank == self.late:
            self.left -= 1
            if self.left == 0:
                self.held.append(data)
                raise Late(REASON)
        return data


class Broken(Slow):
    """The same, but the answer is not late: it is something else."""

    def __init__(self, line: Threads, rank: int, answer: int, change: Callable[[bytes], bytes]):
        super().__init__(line, rank, answer)
        self.change = change

    def receive(self, rank: int, seconds: float | None = None) -> bytes:
        data = self.line.receive(rank, seconds)
        self.left -= rank == self.late
        return self.change(data) if rank == self.late and self.left == 0 else data


def written(log: MemoryLog) -> tuple[list[Any], ...]:
    """All rows but the times."""
    return [row for row in log.metrics if row.name != "seconds"], log.messages, log.notes


def absent(round: int, node: str, reason: str = REASON) -> Callable[..., str | None]:
    """Somebody's absence in one round."""

    def gone(method: Method, step: str, at: int, who: NodeId) -> str | None:
        return reason if (at, who) == (round, node) else None

    return gone


def test_a_site_that_is_late_is_absent_and_undoes_what_nobody_heard_of() -> None:
    method, world = small(METHODS["scaffold"]), worlds.vectors()  # whose clients remember
    _, log = worlds.played(method, world, 4, scores="own", absences=absent(2, "c1"))
    apart = MemoryLog()
    # Of c1: the step of round 1, the scores of round 1, the step of round 2.
    with behind_walls(method, world, line=lambda line: Slow(line, 2, 3)) as engine:
        run(engine, apart)
    assert written(apart) == written(log)
    assert [(note.round, note.node, note.text) for note in apart.notes] == [
        (2, "c1", f"update: {REASON}")
    ]


def test_scores_that_are_late_are_missing_and_it_is_noted() -> None:
    method, world = small(METHODS["fedavg"]), worlds.vectors()
    _, log = worlds.played(method, world, 3, scores="own")
    apart = MemoryLog()
    with behind_walls(method, world, rounds=3, line=lambda line: Slow(line, 2, 2)) as engine:
        run(engine, apart)
    rows, sent, notes = written(apart)
    missing = [row for row in written(log)[0] if row not in rows]
    assert {(row.round, row.node, row.target) for row in missing} == {(1, SERVER, "c1")}
    assert sent == log.messages
    assert [(n.round, n.text) for n in notes] == [(1, f"c1 not scored in round 1: {REASON}")]


class Falls(InProcess):
    """Cannot train in round 2."""

    def _run(self, loop: Any, node: Node[Any]) -> Any:
        if node.round == 2:
            raise ValueError("no more")
        return super()._run(loop, node)


def test_a_step_that_fails_at_a_site_is_an_absence_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, world = small(METHODS["scaffold"]), worlds.vectors()
    why = "Scaffold.update failed on c2 in round 2: ValueError: no more"
    _, log = worlds.played(method, world, 3, scores="own", absences=absent(2, "c2", why))
    apart, plain = MemoryLog(), worlds.engine_for

    def engine_for(method: Method, world: Seen, *rest: Any, **options: Any) -> InProcess:
        kind = Falls if world.own == "c2" else InProcess
        return plain(method, world, kind, **options)  # type: ignore[arg-type,no-any-return]

    monkeypatch.setattr(worlds, "engine_for", engine_for)
    with behind_walls(method, world, rounds=3) as engine:
        run(engine, apart)
    assert written(apart) == written(log)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[:40],
        lambda data: b"\xff" + data[1:],
        lambda data: data[:9] + bytes(len(data) - 9),
    ],
)
def test_an_answer_that_cannot_be_read_is_an_absence(change: Callable[[bytes], bytes]) -> None:
    method, world = small(METHODS["fedavg"]), worlds.vectors()
    log = MemoryLog()
    with behind_walls(
        method, world, rounds=1, line=lambda line: Broken(line, 1, 1, change)
    ) as engine:
        run(engine, log)
    (note,) = [note for note in log.notes if note.kind == "absent"]
    assert (note.round, note.node) == (1, "c0")
    assert {row.target for row in log.metrics if row.step == "evaluate"} == {*world.clients}


def test_what_another_sends_is_read_with_the_limits_for_strangers() -> None:
    for one_job, limits in ((True, codec.OWN), (False, codec.STRANGERS)):
        line = Threads(0, 2, {}, one_job)
        assert protocol.limits_of(line) == limits
    with pytest.raises(WireError, match=r"bytes came as torch.bfloat16 of shape \[2\]"):
        letters.as_bytes(torch.ones(2, dtype=torch.bfloat16))
    opener = letters.Letters([Scored])  # type: ignore[list-item]
    for kind in (-1, 1):
        letter = protocol.Letter(kind, torch.zeros(3, dtype=torch.uint8), ())
        with pytest.raises(WireError, match=f"a letter of kind {kind} came, the method has 1"):
            opener.opened((letter,), torch.device("cpu"))
    for place in (-1, 1):
        with pytest.raises(WireError, match=f"letter {place} is named, but 1 came"):
            letters.at_place([opener], place)  # type: ignore[list-item]


def test_a_site_keeps_its_memory_to_itself() -> None:
    method, world = small(METHODS["scaffold"]), worlds.vectors()
    with behind_walls(method, world, rounds=1) as engine:
        run(engine, MemoryLog())
        assert engine.memory("c0") is None and engine.memory(SERVER) is not None
        for asked in (protocol.Recall("c0"), protocol.Remember("c0", None)):
            with pytest.raises(RankError, match="it keeps what it remembers to itself"):
                protocol.ask_one(engine.transport, 1, asked)


@pytest.mark.parametrize("in_files", [True, False])
@pytest.mark.parametrize("channels", [(), (TopK(share=0.2),)])
def test_a_run_goes_on_from_memories_that_never_left_their_sites(
    tmp_path: Path, in_files: bool, channels: tuple[Channel, ...]
) -> None:
    method, world = small(METHODS["scaffold"]), worlds.vectors()
    _, log = worlds.played(method, world, 4, scores="own", channels=channels)
    folder = tmp_path / "sites" if in_files else None
    first, second = MemoryLog(), MemoryLog()
    with behind_walls(method, world, folder=folder, channels=channels) as engine:

        def save(round: int) -> None:
            if round <= 2:  # what is played after that is lost
                engine.save(tmp_path / "saved", round, digest="d")

        run(engine, first, save=save)
        if not in_files:  # the same sites go back
            assert engine.load(tmp_path / "saved", digest="d") is not None
            run(engine, second, done=2)
    if in_files:  # sites that were ended and begun again
        with behind_walls(method, world, folder=folder, channels=channels) as other:
            assert other.load(tmp_path / "saved", digest="d") is not None
            run(other, second, done=2)
    later = [row for row in written(log)[0] if row.round > 2]
    assert written(second)[0] == later
    assert second.messages == [row for row in log.messages if row.round > 2]
    index = (tmp_path / "saved" / "round-00002" / "checkpoint.json").read_text()
    kept = len(world.clients) * (2 if channels else 1)  # what channels remember stays there too
    assert index.count('"state": "AtSite"') == kept


def test_a_memory_that_a_site_lost_is_named(tmp_path: Path) -> None:
    method, world = small(METHODS["scaffold"]), worlds.vectors()
    with behind_walls(method, world, rounds=1, folder=tmp_path / "sites") as engine:
        run(engine, MemoryLog())
        engine.save(tmp_path / "saved", 1, digest="d")
    for file in (tmp_path / "sites" / "c0").iterdir():
        file.unlink()
    lost = pytest.raises(RankError, match=r"rank 1: it has no memory .* of c0; it was lost")
    with behind_walls(method, world, folder=tmp_path / "sites") as other, lost:
        other.load(tmp_path / "saved", digest="d")


class Mark(State):
    number: int


@pytest.mark.parametrize("in_files", [True, False])
def test_a_shelf_holds_the_last_few_and_nothing_by_a_name_that_is_no_mark(
    tmp_path: Path, in_files: bool
) -> None:
    shelf = Shelf(lambda node: Mark, tmp_path if in_files else None)
    marks = [shelf.put("a", Mark(number), 2) for number in range(4)]
    assert [getattr(shelf.get("a", mark), "number", None) for mark in marks[2:]] == [2, 3]
    for mark in (marks[0], "../../secret", "0" * 64):
        with pytest.raises(RankError, match="it has no memory"):
            shelf.get("a", mark)
    assert shelf.put("a", Mark(2), 2) == marks[2]  # the same memory again is no further one
    assert getattr(shelf.get("a", marks[3]), "number", None) == 3
    assert len(list(tmp_path.iterdir())) == (2 if in_files else 0)


def test_scores_across_sites_are_refused_and_so_are_too_few_sites() -> None:
    method, world = small(METHODS["local"]), worlds.vectors()
    engine = worlds.engine_for(method, world, scores="cross")
    with pytest.raises(BadValue, match="behind walls nobody has another's tests"):
        Leader(engine, Threads(0, 5, {}, one_job=False))
    with pytest.raises(BadValue, match="there are 4 clients and 2 sites"):
        Leader(worlds.engine_for(method, world), Threads(0, 3, {}, one_job=False))


def test_what_goes_to_be_scored_is_the_models_weights_alone() -> None:
    method, world = small(METHODS["centralised"]), worlds.vectors()  # it remembers examples too
    with behind_walls(method, world, rounds=2) as engine:
        run(engine, MemoryLog())
        weights = engine.inner.states[SERVER].weights  # type: ignore[union-attr]
    assert engine.scoring_bytes == 2 * 4 * len(codec.encode(Scored(weights)))


class Tempered(Scored):
    """Weights and a temperature."""

    temperature: float


def test_a_method_may_say_that_its_model_is_more_than_weights() -> None:
    fedavg = METHODS["fedavg"]

    class Warm(fedavg):  # type: ignore[misc,valid-type]
        """Logits are divided by a temperature that the server has."""

        def scored_state(self, server: Node[Any]) -> Tempered:
            return Tempered(server.state.weights, 2.0)

        def predict(self, node: Node[Any], x: torch.Tensor) -> torch.Tensor:
            return node.model(node.state.weights, x) / node.state.temperature

    method, world = Warm(**small(fedavg).__dict__), worlds.vectors()
    assert method.scored_kind is Tempered and small(fedavg).scored_kind is Scored
    _, log = worlds.played(method, world, 1, scores="own")
    _, cold = worlds.played(small(fedavg), world, 1, scores="own")
    apart = MemoryLog()
    with behind_walls(method, world, rounds=1) as engine:
        run(engine, apart)
    assert written(apart) == written(log) != written(cold)


def test_a_site_that_was_asked_something_else_says_so() -> None:
    method, world = small(METHODS["local"]), worlds.vectors()
    site = Follower(worlds.engine_for(method, world), one_job=False)
    with pytest.raises(RankError, match="it was asked for Done at the wrong time"):
        site.answer(protocol.Done())


@pytest.mark.parametrize("name", ["local", "scaffold"])
def test_what_is_undone_is_neither_scored_nor_saved(tmp_path: Path, name: str) -> None:
    """Of c1, the step of round 2, the last one, is late; then come scores and a checkpoint."""
    method, world = small(METHODS[name]), worlds.vectors()
    _, log = worlds.played(method, world, 2, scores="own", absences=absent(2, "c1"))
    apart = MemoryLog()
    folder = tmp_path / "sites"
    late = 3  # the step of round 1 and its scores come first
    with behind_walls(
        method, world, rounds=2, line=lambda line: Slow(line, 2, late), folder=folder
    ) as engine:
        run(engine, apart)
        engine.save(tmp_path / "saved", 2, digest="d")
    assert written(apart) == written(log)
    straight, _ = worlds.played(method, world, 2, absences=absent(2, "c1"))
    (file,) = (folder / "c1").iterdir()
    expected = straight.states["c1"]
    assert expected is not None and file.read_bytes() == codec.encode(expected)
