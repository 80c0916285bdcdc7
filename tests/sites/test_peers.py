"""Peers without a coordinator: each one's numbers are those of one process."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fedstill.core.errors import BadValue, SiteError
from fedstill.core.method import Method
from fedstill.federation.run import run
from fedstill.federation.sampling import Sample
from fedstill.federation.topology import Ring
from fedstill.logbook.writer import MemoryLog
from fedstill.methods import METHODS
from fedstill.sites.away import Patience
from fedstill.sites.exchange import TWICE
from fedstill.sites.peers import Peers, Said, Standing, Twins
from fedstill.sites.words import SAME_CODE
from fedstill.testing import at_sites, small, worlds
from fedstill.testing.at_sites import STANDING, Meeting, ThreadMesh
from fedstill.testing.closely import written
from fedstill.wire import codec

QUICK = Patience(start=600, step=600)


def peer(
    method: Method, world: Any, meeting: Meeting, name: str, patience: Patience = QUICK, **more: Any
) -> Peers:
    engine = at_sites.engine_at(method, world, name, **more)
    return Peers(engine, ThreadMesh(meeting, name), STANDING.replace(node=name), patience)


def met(method: Method, world: Any, **options: Any) -> dict[str, tuple[Peers, MemoryLog]]:
    """Every client a peer in a thread of its own, to the end."""
    meeting = Meeting()
    found = {n: (peer(method, world, meeting, n, **options), MemoryLog()) for n in world.clients}
    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in found.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    return found


def check_equal(found: Any, engine: Any, log: MemoryLog, *, all_heard: bool = True) -> None:
    for name, (own, rows) in found.items():
        assert codec.encode(own.memory(name)) == codec.encode(engine.states[name])
        mine = [row for row in written(log)[1] if row.node == name]
        assert written(rows)[1] == mine
        if all_heard:
            assert rows.messages == log.messages
        assert not [note for note in rows.notes if note.kind == "absent"]


@pytest.mark.parametrize("name", ["desa", "local"])
def test_peers_end_with_the_memories_of_one_process(name: str) -> None:
    method, world = small(METHODS[name]), worlds.pictures()
    engine, log = worlds.played(method, world, 2, scores="own")
    check_equal(met(method, world, rounds=2), engine, log)


def test_peers_on_a_ring_hear_their_neighbours_alone() -> None:
    method = METHODS["desa"](**{**METHODS["desa"].presets["small"], "combination": "neighbour"})
    world = worlds.pictures((9, 10, 11, 9, 10))
    options: dict[str, Any] = {"topology": Ring()}
    engine, log = worlds.played(method, world, 1, scores="own", **options)
    found = met(method, world, rounds=1, **options)
    check_equal(found, engine, log, all_heard=False)
    said = found["c0"][0].mesh.meeting.said  # type: ignore[attr-defined]
    assert {hearer for speaker, hearer, _ in said if speaker == "c0"} == {"c1", "c4", None}


def test_peers_that_take_turns_agree_on_who_is_awake() -> None:
    method, world = small(METHODS["desa"]), worlds.pictures()
    options: dict[str, Any] = {"sampling": Sample(count=2)}
    engine, _ = worlds.played(method, world, 2, scores="own", **options)
    for name, (own, _) in met(method, world, rounds=2, **options).items():
        assert codec.encode(own.memory(name)) == codec.encode(engine.states[name])


def alone_with(said: Said | bytes | None) -> Any:
    """What a peer makes of another's word in round 1."""
    method, world, meeting = small(METHODS["desa"]), worlds.pictures(), Meeting()
    own = peer(method, world, meeting, "c0", Patience(start=1, step=60 if said else 0.2))
    other = ThreadMesh(meeting, "c1")
    if said is not None:
        other.say("1/0", said if isinstance(said, bytes) else codec.encode(said), "c0")
    step = next(s for s in method.each_round() if s.name == "speak")
    return own._heard(step, 1, ["c1"])["c1"]


def test_late_broken_replayed_and_forged_words_are_absences_by_name() -> None:
    head: dict[str, Any] = {"run": "trial", "node": "c1", "round": 1, "number": 0, "step": "speak"}
    rest: dict[str, Any] = {"absent": None, "letter": None, "addressed": False, "lost": False}
    assert alone_with(Said(**head, **rest)).absent is None  # nothing said is no fault
    assert alone_with(None).absent == "nothing was heard in time"
    assert "cannot be read" in alone_with(b"\x00" * 50).absent
    assert "cannot be read" in alone_with(codec.encode(Said(**head, **rest))[:-9]).absent
    for name, value in {
        "round": 0,
        "node": "c2",
        "run": "old",
        "step": "learn",
        "number": 3,
    }.items():
        text = alone_with(Said(**{**head, name: value}, **rest)).absent
        assert text.startswith("spoke of")


def test_a_peer_that_slept_through_a_round_is_not_waited_for_until_the_deadline() -> None:
    method, world, meeting = small(METHODS["desa"]), worlds.pictures(), Meeting()
    own = peer(method, world, meeting, "c0")  # it would wait for 600 seconds
    other = ThreadMesh(meeting, "c1")

    def heard() -> Any:
        return own._fetched("c1", 4, 0, time.monotonic() + 600)

    other.say("standing", codec.encode(Standing(STANDING.replace(node="c1"), 5, False)))
    assert heard() == "it slept through this round"
    other.say("4/0", b"a word", "c0")
    assert heard() == b"a word"  # said before it went on


def test_a_peer_that_is_there_twice_is_heard_in_neither_form_until_one_has_ended() -> None:
    method, world, meeting = small(METHODS["desa"]), worlds.pictures(), Meeting()
    own = peer(method, world, meeting, "c0", rounds=9)
    for name in ("c1", "c2"):
        other = ThreadMesh(meeting, name)
        other.say("standing", codec.encode(Standing(STANDING.replace(node=name), 5, False)))
        other.say("4/0", b"a word", "c0")
        other.say("0/0", b"an early word", "c0")
    meeting.twice.add("c1")
    until = time.monotonic() + 600
    assert own._fetched("c1", 4, 0, until) == TWICE
    assert own.furthest() == 0  # one of two says where c1 is
    assert own._fetched("c1", 0, 0, time.monotonic() + 0.3) == TWICE  # waited for before round 1
    threading.Timer(0.3, meeting.twice.clear).start()
    assert own._fetched("c1", 0, 0, until) == b"an early word"
    assert own._fetched("c1", 4, 0, until) == b"a word"
    assert own.furthest() == 5


def test_a_process_ends_when_more_than_half_of_all_others_saw_another_one_before_it() -> None:
    method, world, meeting = small(METHODS["desa"]), worlds.pictures((9, 10, 11, 9, 10)), Meeting()
    own = peer(method, world, meeting, "c0", rounds=9)
    others = {name: ThreadMesh(meeting, name) for name in own.others}

    def named(*who: str, by: str = "c0", id: str = own.mesh.id) -> bool:
        """Whether it ends when so many others name a process of a peer."""
        for name, mesh in others.items():
            later = {by: (id,)} if name in who else {}
            mesh.say("twins", codec.encode(Twins("trial", later)))
        own.look_for_twins()
        try:
            own.check_alone()
        except SiteError as error:
            assert (
                f"another process plays c0 and was connected before this one, as {who[0]}"
                in str(error)
            )
            return True
        return False

    assert not named() and not named("c1") and not named("c1", "c2")  # two of four are not enough
    assert not named(*others, id="another process") and not named(*others, by="c1")
    others["c1"].say("twins", b"something else")
    own.look_for_twins()
    own.check_alone()
    meeting.twice.add("c3")
    assert not named("c1", "c2", "c3")  # of c3, one of two would say it
    meeting.twice.clear()
    assert named("c1", "c2", "c3")
    with pytest.raises(SiteError, match="end the other and start again"):
        own._fetched("c1", 4, 0, time.monotonic() + 600)
    with pytest.raises(SiteError, match="end the other and start again"):
        own.experiment.sampling.awake(1, ["c0"], 0)


def test_a_peer_says_which_process_of_another_came_later() -> None:
    meeting = Meeting()
    own = peer(small(METHODS["desa"]), worlds.pictures(), meeting, "c0")
    meeting.twice.add("c1")
    meeting.second["c1"] = meeting.second["c2"] = "the later one"
    own.look_for_twins()
    said = codec.decode(meeting.said["c0", None, "twins"], Twins)
    assert said.later == {"c1": ("the later one",)}  # c2 is not known to be there twice


def test_a_returning_peer_sleeps_through_rounds_that_more_than_half_have_left(
    tmp_path: Path,
) -> None:
    method, world, meeting = small(METHODS["desa"]), worlds.pictures(), Meeting()
    own = peer(method, world, meeting, "c0", rounds=9)

    def stands(name: str, round: int) -> None:
        said = Standing(STANDING.replace(node=name), round, False)
        ThreadMesh(meeting, name).say("standing", codec.encode(said))

    stands("c1", 7)
    stands("c2", 3)
    assert own.experiment.awake(2) == []  # both are further
    assert "round 2 is over elsewhere" in own.notes[-1]
    assert list(own.experiment.awake(5)) == ["c0", "c1", "c2"]  # only one of two is further
    stands("c1", 10**9)
    stands("c2", 10**9)
    assert list(own.experiment.awake(9)) == ["c0", "c1", "c2"]  # the last round is not skipped


def test_one_of_several_peers_cannot_make_another_skip_rounds_while_the_rest_are_away() -> None:
    method, world = small(METHODS["desa"]), worlds.pictures((9, 10, 11, 9, 10))
    meeting = Meeting()
    own = peer(method, world, meeting, "c0", rounds=9)

    def stands(name: str, round: int) -> ThreadMesh:
        mesh, said = ThreadMesh(meeting, name), Standing(STANDING.replace(node=name), round, False)
        mesh.say("standing", codec.encode(said))
        return mesh

    def away(mesh: ThreadMesh) -> None:
        mesh.leave()
        del meeting.said[mesh.me, None, "standing"]

    stands("c1", 10**9)
    assert own.furthest() == 0  # three of four are away
    second = stands("c2", 7)
    assert own.furthest() == 0  # two of four say so: not more than half
    third = stands("c3", 6)
    assert own.furthest() == 6
    away(second)
    away(third)
    assert own.furthest() == 6  # what they said when they were last heard


def test_of_two_peers_the_other_ones_word_is_enough() -> None:
    method, world, meeting = small(METHODS["desa"]), worlds.pictures((9, 10)), Meeting()
    own = peer(method, world, meeting, "c0", rounds=9)
    said = Standing(STANDING.replace(node="c1"), 7, False)
    ThreadMesh(meeting, "c1").say("standing", codec.encode(said))
    assert own.furthest() == 7


def test_a_peer_of_another_recipe_is_refused_with_both_values() -> None:
    own = peer(small(METHODS["desa"]), worlds.pictures(), Meeting(), "c0")
    other = STANDING.replace(node="c1", recipe="another")
    with pytest.raises(SiteError, match="it has recipe another, this peer has recipe the same"):
        own.check_standing("c1", Standing(other, 0, False))


def test_a_peer_that_comes_back_with_other_code_is_absent_with_both_versions() -> None:
    method, world, meeting = small(METHODS["desa"]), worlds.pictures(), Meeting()
    own = peer(method, world, meeting, "c0", rounds=9)
    other, code = ThreadMesh(meeting, "c1"), "fedstill 0.1.0 (code bbbbbbbbbbbb)"
    other.say("4/0", b"a word", "c0")
    hello = STANDING.replace(node="c1", fedstill=code)
    other.say("standing", codec.encode(Standing(hello, 5, False)))
    ThreadMesh(meeting, "c2").say(
        "standing", codec.encode(Standing(STANDING.replace(node="c2"), 5, False))
    )
    until = time.monotonic() + 600
    with pytest.raises(SiteError, match="install the same release, or check out the same commit"):
        own.check_standing("c1", Standing(hello, 5, False))
    assert own.furthest() == 0  # what it says of rounds does not count either
    assert own._fetched("c1", 4, 0, until) == f"it has {code}, this peer has this{SAME_CODE}"
    back = Standing(STANDING.replace(node="c1"), 5, False)
    other.say("standing", codec.encode(back))
    assert own.furthest() == 5
    assert own._fetched("c1", 4, 0, until) == b"a word"


def test_a_method_with_a_server_needs_a_coordinator() -> None:
    with pytest.raises(BadValue, match=r"FedAvg has a server \(broadcast, aggregate\)"):
        peer(small(METHODS["fedavg"]), worlds.pictures(), Meeting(), "c0")
