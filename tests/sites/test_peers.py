"""Peers without a coordinator: each one's numbers are those of one process."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.core.errors import BadMessage, BadValue, SiteError
from fedstill.core.method import Method
from fedstill.engines.ranks.letters import Letters, kinds_of
from fedstill.federation.run import run
from fedstill.federation.sampling import Sample
from fedstill.federation.topology import Ring
from fedstill.logbook.writer import MemoryLog
from fedstill.methods import METHODS
from fedstill.methods.desa import MEAN, Opinions
from fedstill.privacy.ledger import composed
from fedstill.privacy.privacy import Privacy
from fedstill.sites.away import Patience
from fedstill.sites.exchange import TWICE
from fedstill.sites.journal import Journal
from fedstill.sites.peers import Peers, Said, Standing, Twins
from fedstill.sites.private_acts import PrivateActs
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

    other.passed(5)
    assert heard() == "it is further, and has no word of this round for this peer"
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
    assert "this peer has this" in own._fetched("c1", 4, 0, until)  # type: ignore[operator]
    assert own.furthest() == 0  # what it says of rounds does not count either
    assert own._fetched("c1", 4, 0, until) == f"it has {code}, this peer has this{SAME_CODE}"
    back = Standing(STANDING.replace(node="c1"), 5, False)
    other.say("standing", codec.encode(back))
    assert own.furthest() == 5
    assert own._fetched("c1", 4, 0, until) == b"a word"


def test_a_method_with_a_server_needs_a_coordinator() -> None:
    with pytest.raises(BadValue, match=r"FedAvg has a server \(broadcast, aggregate\)"):
        peer(small(METHODS["fedavg"]), worlds.pictures(), Meeting(), "c0")


def private_peer(
    meeting: Meeting, name: str, folder: Path, key: bytes = b"k", step: float = 600
) -> Peers:
    """With noise of its own key, and what it has played and heard in a folder of its own."""
    method, world = small(METHODS["desa"]), worlds.pictures()
    privacy = Privacy(epsilon=8, gradient_clip=0.5)
    engine = at_sites.engine_at(method, world, name, rounds=2, privacy=privacy)
    engine.key = (key * 32)[:32]
    return Peers(
        engine,
        ThreadMesh(meeting, name),
        STANDING.replace(node=name),
        Patience(start=step, step=step),
        Journal(folder / name / "journal"),
        PrivateActs(name, engine, folder / name),
    )


def private_run(folder: Path, keys: bytes = b"k") -> tuple[Meeting, dict[str, bytes]]:
    """Three private peers to the end: what they said, and what each remembers."""
    meeting = Meeting()
    peers = {name: private_peer(meeting, name, folder, keys) for name in worlds.pictures().clients}
    threads = [
        threading.Thread(target=run, args=(own, MemoryLog()), daemon=True) for own in peers.values()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    return meeting, {name: codec.encode(own.memory(name)) for name, own in peers.items()}


def test_noise_among_peers_is_made_with_their_keys(tmp_path: Path) -> None:
    _, first = private_run(tmp_path / "first")
    _, again = private_run(tmp_path / "again")
    _, other = private_run(tmp_path / "other", b"x")
    assert first == again
    assert all(first[name] != other[name] for name in first)
    method, world = small(METHODS["desa"]), worlds.pictures()
    engine = at_sites.engine_at(method, world, "c0", privacy=Privacy(epsilon=8))
    with pytest.raises(SiteError, match="needs a key that only this peer has, and a log"):
        Peers(engine, ThreadMesh(Meeting(), "c0"), STANDING.replace(node="c0"))


def words_of(meeting: Meeting, speaker: str) -> dict[Any, bytes]:
    return {key: word for key, word in meeting.said.items() if key[0] == speaker and "/" in key[2]}


def test_a_private_peer_that_comes_back_hears_what_it_heard_and_says_the_same(
    tmp_path: Path,
) -> None:
    meeting, memories = private_run(tmp_path)
    silent, log = Meeting(), MemoryLog()  # nobody says anything any more
    back = private_peer(silent, "c0", tmp_path, step=0.1)
    run(back, log)
    assert codec.encode(back.memory("c0")) == memories["c0"]
    assert words_of(silent, "c0") == words_of(meeting, "c0")
    assert not [note for note in log.notes if note.kind == "absent"]
    first, again = back.private, private_peer(silent, "c0", tmp_path).private
    assert first is not None and again is not None
    assert again._spent == first._spent  # nothing is spent twice


def test_under_privacy_a_peer_does_not_play_an_act_again_for_something_else(tmp_path: Path) -> None:
    meeting, _ = private_run(tmp_path)
    for file in (tmp_path / "c0" / "journal").glob("heard-*"):
        file.unlink()
    silent, log = Meeting(), MemoryLog()
    run(private_peer(silent, "c0", tmp_path, step=0.1), log)
    own = [note for note in log.notes if note.kind == "absent" and note.node == "c0"]
    assert own and all("under privacy an act is released once" in note.text for note in own)
    before, now = words_of(meeting, "c0"), words_of(silent, "c0")
    for key, word in now.items():
        said = codec.decode(word, Said)
        assert word == before[key] or (said.letter is None and said.absent)
    assert any(word != before[key] for key, word in now.items())


def test_what_a_private_peer_spent_is_told_though_it_does_not_play_those_acts_again(
    tmp_path: Path,
) -> None:
    private_run(tmp_path)
    for file in (tmp_path / "c0" / "journal").glob("heard-*"):
        file.unlink()
    back, log = private_peer(Meeting(), "c0", tmp_path, step=0.1), MemoryLog()
    run(back, log)
    assert back.private is not None
    own = [row for rows in back.private._spent.values() for row in rows]
    assert [(row.round, row.step) for row in log.privacy] == [
        (0, "synthesize"), (1, "learn"), (2, "learn"),
    ]  # fmt: skip
    assert composed(log.privacy, 1e-5) == composed(own, 1e-5)


def test_what_was_heard_is_kept_since_the_checkpoint_before_the_last(tmp_path: Path) -> None:
    private_run(tmp_path)
    journal = private_peer(Meeting(), "c0", tmp_path).journal
    assert journal is not None

    def rounds() -> set[int]:
        return {int(file.name.split("-")[1]) for file in journal.folder.glob("heard-*")}

    assert rounds() == {0, 1, 2}
    journal.saved(1)
    assert rounds() == {0, 1, 2}
    journal.saved(2)
    assert rounds() == {2}


def test_a_peer_that_comes_back_says_again_what_others_have_not_asked_for_yet(
    tmp_path: Path,
) -> None:
    """It has ended its round, so it would not play it again."""
    meeting, _ = private_run(tmp_path)
    later = Meeting()
    private_peer(later, "c0", tmp_path).load(tmp_path / "checkpoints", digest=None)
    assert words_of(later, "c0") == words_of(meeting, "c0")


class Killed(Exception):
    """So ends a process that is killed."""


class Dying(Journal):
    """Of a peer that is killed in round 1, when it has spoken and heard nobody yet."""

    def heard(self, round: int, number: int, listen: Any) -> Any:
        if round == 1:
            raise Killed
        return super().heard(round, number, listen)


def test_a_peer_that_was_killed_between_speaking_and_hearing_plays_that_round_though_it_is_over(
    tmp_path: Path,
) -> None:
    method, world, meeting = small(METHODS["desa"]), worlds.pictures(), Meeting()
    engine, log = worlds.played(method, world, 2, scores="own")
    found = {n: (peer(method, world, meeting, n, rounds=2), MemoryLog()) for n in world.clients}
    others = [threading.Thread(target=run, args=found[name], daemon=True) for name in ("c1", "c2")]
    for thread in others:
        thread.start()
    found["c0"][0].journal = Dying(tmp_path)
    with pytest.raises(Killed):
        run(*found["c0"])

    def further() -> bool:
        said = [meeting.said.get((name, None, "standing")) for name in ("c1", "c2")]
        return all(each and codec.decode(each, Standing).round == 2 for each in said)

    with meeting.changed:  # they have heard it, and wait for its next word
        assert meeting.changed.wait_for(further, 600)
    found["c0"] = peer(method, world, meeting, "c0", rounds=2), MemoryLog()
    found["c0"][0].journal = Journal(tmp_path)
    run(*found["c0"])
    for thread in others:
        thread.join(600)
    check_equal(found, engine, log)


@pytest.mark.parametrize("rounds", [1, 5])  # since its last checkpoint
def test_a_peer_of_a_method_that_sends_nothing_plays_the_rounds_since_its_checkpoint(
    rounds: int, tmp_path: Path
) -> None:
    method, world, meeting = small(METHODS["local"]), worlds.pictures(), Meeting()
    engine, _ = worlds.played(method, world, rounds, scores="own")

    def started() -> Peers:
        own = peer(method, world, meeting, "c0", rounds=rounds)
        own.journal = Journal(tmp_path / "journal")
        return own

    first = started()
    plain = first.inner.play

    def dying(step: Any, round: int, *given: Any) -> Any:
        if round == rounds:
            raise Killed
        return plain(step, round, *given)

    first.inner.play = dying  # type: ignore[method-assign]
    with pytest.raises(Killed):
        run(first, MemoryLog())
    for name in ("c1", "c2"):  # meanwhile the others have gone on
        further = Standing(STANDING.replace(node=name), rounds, False)
        ThreadMesh(meeting, name).say("standing", codec.encode(further))
    back, log = started(), MemoryLog()
    run(back, log)
    assert not [note for note in log.notes if "is over elsewhere" in note.text]
    assert codec.encode(back.memory("c0")) == codec.encode(engine.states["c0"])


def test_what_was_said_is_kept_as_long_as_others_ask_for_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for round in range(4):
        journal.say(round, 0, {"c1": b"to all", "c2": b"to all", "c3": b"to one"})
    journal.forget(2)
    said = {(round, number): words for round, number, words in journal.said()}
    assert [*said] == [(0, 0), (2, 0), (3, 0)]  # all may still ask for what came before the first
    assert said[2, 0] == {"c1": b"to all", "c2": b"to all", "c3": b"to one"}


def word_of(message: Any, spare: int = 0) -> bytes:
    """A peer's word of round 1, with as many bytes beside it as nobody needs."""
    _, (letter,) = Letters(kinds_of(small(METHODS["desa"]))).enclosed({"c1": {"": message}})
    said = Said("trial", "c1", 1, 0, "speak", None, letter, False, False)
    data = codec.encode(said)
    length = int.from_bytes(data[:8], "little")
    head = (length + spare).to_bytes(8, "little") + data[8 : 8 + length]
    return head + b" " * spare + data[8 + length :]


def test_a_word_that_cannot_be_used_is_not_kept(tmp_path: Path) -> None:
    """A peer that lies could fill others' disks, an act after the other."""
    method, world = small(METHODS["desa"]), worlds.pictures()
    step = next(s for s in method.each_round() if s.name == "speak")
    classes, spare = worlds.pictures().models["c0"].classes, 4 << 20
    fits = Opinions({MEAN: torch.zeros(2 * classes, classes)})

    def heard(word: bytes, bad_messages: str, folder: Path, *, again: bool = False) -> Any:
        meeting = Meeting()
        own = peer(method, world, meeting, "c0", rounds=9, bad_messages=bad_messages)
        own.journal = Journal(folder)
        ThreadMesh(meeting, "c1").say("1/0", b"nothing" if again else word, "c0")
        return own._heard(step, 1, ["c1"])["c1"].absent

    def kept(folder: Path) -> int:
        return sum(file.stat().st_size for file in folder.glob("*"))

    large = Opinions({MEAN: torch.zeros(100_000, classes)})
    wordy = Said("trial", "c1", 1, 0, "speak", "x" * spare, None, False, False)
    words = {
        "fits": (word_of(fits), None),
        "large": (word_of(large), "sent logits of 100000 anchors"),
        "padded": (word_of(fits, spare), "bytes for a message that takes at most"),
        "unreadable": (b"\x00" * spare, "cannot be read"),
        "wordy": (codec.encode(wordy), "xxx"),
    }
    for name, (word, why) in words.items():
        for again in (False, True):  # it comes back, and hears what it heard
            absent = heard(word, "leave_out", tmp_path / name, again=again)
            assert absent is None if why is None else why in absent
        assert kept(tmp_path / name) < 1 << 16
    for name in ("large", "padded"):
        with pytest.raises(BadMessage, match=r'c1 sent .* Set federation.bad_messages = "leave'):
            heard(words[name][0], "stop", tmp_path / f"{name}, stopped")
        assert kept(tmp_path / f"{name}, stopped") == 0
