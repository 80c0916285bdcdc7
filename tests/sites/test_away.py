"""A coordinator and sites over bytes: the numbers of one process, whatever gets lost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.channels import LowRank, TopK
from fedstill.channels.coded import Layer
from fedstill.core.errors import LONGEST, BadValue, SiteError
from fedstill.core.method import Method
from fedstill.core.records import NodeId
from fedstill.engines.ranks.letters import as_bytes, as_tensor
from fedstill.engines.ranks.protocol import Letter, Spent
from fedstill.federation.run import run
from fedstill.federation.sampling import Sample
from fedstill.logbook.reader import read_rows
from fedstill.logbook.writer import FolderLog, MemoryLog
from fedstill.methods import METHODS
from fedstill.methods.fedavg import Up
from fedstill.privacy.privacy import Privacy
from fedstill.sites import words
from fedstill.sites.away import Patience
from fedstill.sites.exchange import Exchange, Silence
from fedstill.sites.words import Acted
from fedstill.testing import at_sites, small, worlds
from fedstill.testing.closely import written
from fedstill.wire import codec

LOST = "its answer got lost"


class Twice:
    """Every request reaches its site twice; the second answer counts."""

    def __init__(self, line: Exchange):
        self.line = line

    def ask(self, requests: Mapping[NodeId, bytes], seconds: float) -> Any:
        first = self.line.ask(requests, seconds)
        second = self.line.ask(requests, seconds)
        assert first == second
        return second


class Losing:
    """The answers of some sites get lost the first time, by how often each was asked."""

    def __init__(self, line: Exchange, lost: Mapping[NodeId, int]):
        self.line, self.left = line, dict(lost)

    def ask(self, requests: Mapping[NodeId, bytes], seconds: float) -> Any:
        answers = dict(self.line.ask(requests, seconds))
        for node in requests:
            self.left[node] = self.left.get(node, 0) - 1
            if self.left[node] == 0:
                answers[node] = Silence(LOST)
        return answers


class Cut:
    """The coordinator is killed when its sites have answered the first request of a round."""

    def __init__(self, line: Exchange, round: int):
        self.line, self.round = line, round

    def ask(self, requests: Mapping[NodeId, bytes], seconds: float) -> Any:
        answers = self.line.ask(requests, seconds)
        asked = words.read(next(iter(requests.values())))
        if getattr(asked, "round", 0) == self.round:
            raise KeyboardInterrupt
        return answers


def absent(round: int, node: str, step: str) -> Any:
    """Somebody's absence in one step."""

    def gone(method: Method, at_step: str, at: int, who: NodeId) -> str | None:
        return LOST if (at, who, at_step) == (round, node, step) else None

    return gone


@pytest.mark.parametrize("name", METHODS)
def test_sites_give_the_numbers_of_one_process_though_each_request_comes_twice(
    name: str, tmp_path: Path
) -> None:
    method, world = small(METHODS[name]), worlds.pictures()
    options: dict[str, Any] = {"sampling": Sample(count=2)}
    alone, log = worlds.played(method, world, 2, scores="own", **options)
    there = at_sites.sites(method, world, rounds=2, **options)
    first = at_sites.away(
        method, world, there, lambda line: Cut(Twice(line), 2), rounds=2, **options
    )
    one, other = MemoryLog(), MemoryLog()
    with pytest.raises(KeyboardInterrupt):
        run(first, one, save=lambda round: first.save(tmp_path, round, digest="d"))
    # A second coordinator goes on from marks alone, to sites that have begun round 2 already.
    second = at_sites.away(method, world, there, Twice, rounds=2, **options)
    saved = second.load(tmp_path, digest="d")
    assert saved is not None and saved.round == 1
    run(second, other, done=1)
    for here, began, ended in zip(written(log), written(one), written(other), strict=True):
        assert here == [row for row in began if row.round < 2] + ended
    for client in world.clients:
        mark, twin = second._mark(client), alone.states.get(client)
        if twin is not None:
            state = there[client].keeper.shelf.get(client, mark)
            assert codec.encode(state) == codec.encode(twin)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "desa"])
def test_a_lost_answer_is_an_absence_and_the_site_goes_on_from_before(name: str) -> None:
    method, world = small(METHODS[name]), worlds.pictures()
    step = next(s for s in method.each_round() if s.place.value == "clients")
    acts = len(method.before())
    _, log = worlds.played(method, world, 3, scores="own", absences=absent(1, "c1", step.name))
    there = at_sites.sites(method, world, rounds=3)
    engine = at_sites.away(
        method, world, there, lambda line: Losing(line, {"c1": acts + 1}), rounds=3
    )
    apart = MemoryLog()
    run(engine, apart)
    assert written(apart) == written(log)
    assert any(note.text == f"{step.name}: {LOST}" for note in apart.notes)


def test_what_channels_remember_stays_at_the_site_too(tmp_path: Path) -> None:
    method, world = small(METHODS["fedavg"]), worlds.pictures()
    options: dict[str, Any] = {"channels": [TopK(share=0.3)]}
    _, log = worlds.played(method, world, 3, scores="own", **options)
    there = at_sites.sites(method, world, tmp_path / "sites", rounds=3, **options)
    first = at_sites.away(method, world, there, rounds=2, **options)
    run(first, MemoryLog(), save=lambda round: first.save(tmp_path / "c", round, digest="d"))
    # Sites and coordinator are begun again: all that is known lies in their folders.
    there = at_sites.sites(method, world, tmp_path / "sites", rounds=3, **options)
    second, rows = at_sites.away(method, world, there, rounds=3, **options), MemoryLog()
    assert second.load(tmp_path / "c", digest="d") is not None
    run(second, rows, done=2)
    assert written(rows)[1] == [row for row in written(log)[1] if row.round == 3]


def test_too_few_sites_stop_the_run_and_say_who_is_missing() -> None:
    method, world = small(METHODS["fedavg"]), worlds.pictures()
    there = at_sites.sites(method, world)
    engine = at_sites.away(
        method, world, there, lambda line: Losing(line, {"c1": 1}), Patience(least=3)
    )
    with pytest.raises(SiteError, match=r"2 of 3 sites answered update in round 1.*c1: its answer"):
        run(engine, MemoryLog())


class Away:
    """A site is not connected while its first round is played."""

    def __init__(self, line: Exchange):
        self.line = line

    def ask(self, requests: Mapping[NodeId, bytes], seconds: float) -> Any:
        rounds = {getattr(words.read(data), "round", None) for data in requests.values()}
        gone = Silence("its connection is lost", gone=True)
        return {**self.line.ask(requests, seconds), **({"c1": gone} if rounds == {1} else {})}


@pytest.mark.parametrize("version", ["this", "another"])
def test_a_site_that_comes_back_says_first_what_it_has_joined(version: str) -> None:
    method, world = small(METHODS["fedavg"]), worlds.pictures()
    there = at_sites.sites(method, world, rounds=3)
    there["c1"].standing = there["c1"].standing.replace(fedstill=version)
    log = MemoryLog()
    run(at_sites.away(method, world, there, Away, rounds=3), log)
    texts = {n.round: n.text for n in log.notes if n.node == "c1" and n.kind == "absent"}
    assert texts.pop(1) == "update: its connection is lost"
    refused = f"update: refused: it has another, the coordinator has this{words.SAME_CODE}"
    assert texts == ({} if version == "this" else {2: refused, 3: refused})


def test_a_coordinator_that_is_back_waits_for_a_site_that_still_plays_a_step() -> None:
    waited: list[float] = []

    class Clock(Away):
        def ask(self, requests: Mapping[NodeId, bytes], seconds: float) -> Any:
            waited.append(seconds)
            return super().ask(requests, seconds)

    method, world = small(METHODS["fedavg"]), worlds.pictures()
    there = at_sites.sites(method, world)
    at_sites.away(method, world, there, Clock, Patience(start=600, step=7200)).met(["c0"])
    assert waited == [7200]


def test_crosswise_scores_are_refused() -> None:
    method, world = small(METHODS["fedavg"]), worlds.pictures()
    with pytest.raises(BadValue, match="nobody has another's tests"):
        at_sites.away(method, world, {}, scores="cross")


class Lying:
    """One site says something else than it did."""

    def __init__(self, line: Exchange, lie: Callable[[Acted], Acted]):
        self.line, self.lie = line, lie

    def ask(self, requests: Mapping[NodeId, bytes], seconds: float) -> Any:
        answers = dict(self.line.ask(requests, seconds))
        answer = answers["c1"]
        said = None if isinstance(answer, Silence) else words.read(answer)
        if isinstance(said, Acted):
            answers["c1"] = words.written(self.lie(said))
        return answers


def played_with(lie: Callable[[Acted], Acted], log: Any, **options: Any) -> None:
    method, world = small(METHODS["fedavg"]), worlds.pictures()
    there = at_sites.sites(method, world, rounds=1, channels=options.get("channels", ()))
    options = {"rounds": 1, "bad_messages": "leave_out", **options}
    run(at_sites.away(method, world, there, lambda line: Lying(line, lie), **options), log)


def test_a_letter_in_too_many_layers_is_an_absence() -> None:
    empty = as_tensor(codec.encode(Layer({})))

    def wrapped(said: Acted) -> Acted:
        (letter,) = said.letters
        return said.replace(letters=(letter.replace(layers=(empty,) * 5000),))

    log = MemoryLog()
    played_with(wrapped, log)
    (note,) = [note for note in log.notes if note.node == "c1"]
    assert note.text.endswith("Up: coded by 5000 channels, the limit is 64")


@pytest.mark.parametrize(
    "channels",
    [(LowRank(),), (TopK(share=0.001),), (LowRank(), LowRank(of_change=False, feedback=False))],
    ids=["low_rank", "top_k", "low_rank twice"],
)
def test_a_few_bytes_that_announce_a_huge_tensor_are_refused_before_they_are_decoded(
    channels: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have been made first and then compared with the network: 1.6 GB from 0.6 MB."""
    decoded: list[int] = []
    for kind in (LowRank, TopK):
        whole = kind.decode

        def small(self: Any, parts: Any, shape: tuple[int, ...], whole: Any = whole) -> Any:
            decoded.append(math.prod(shape))
            if decoded[-1] > 10**6:
                raise RuntimeError("too large")
            return whole(self, parts, shape)

        monkeypatch.setattr(kind, "decode", small)
    side = 20_000
    thin = {"left": torch.zeros(side, 4), "right": torch.zeros(side, 4)}
    count = math.ceil(0.001 * side**2)
    few = {"values": torch.zeros(count), "places": torch.zeros(count, dtype=torch.int32)}

    def huge(said: Acted) -> Acted:
        (letter,) = said.letters
        message = codec.decode(as_bytes(letter.data), Up)
        if len(channels) == 1:  # what the message becomes
            name, parts = "conv0.weight", few if isinstance(channels[0], TopK) else thin
            message.weights[name] = torch.empty(0, side, side)
            layers = [Layer({f"weights.{name}": parts})]
        else:  # or what the first layer makes of the second
            name = next(n for n, t in message.weights.items() if t.dim() > 1 and t.numel() > 16)
            shape = message.weights[name].shape
            message.weights[name] = torch.empty(0, *shape)
            inner = {"left": torch.empty(0, side, side), "right": torch.empty(0, 4)}
            coded = {f"weights.{name}": inner}
            layers = [Layer({f"parts.weights.{name}.left": thin}), Layer(coded)]
        encoded = tuple(as_tensor(codec.encode(layer)) for layer in layers)
        data = as_tensor(codec.encode(message))
        return said.replace(letters=(letter.replace(data=data, layers=encoded),))

    log = MemoryLog()
    played_with(huge, log, channels=channels)
    (note,) = [note for note in log.notes if note.node == "c1"]
    assert note.kind == "left out"
    expected = "whose parts take" if len(channels) > 1 else "conv0.weight is (20000, 20000) and not"
    assert expected in note.text, note.text
    assert max(decoded, default=0) <= 10**6


def renamed(letter: Letter, name: str) -> Letter:
    """A letter with a tensor more of weights, of a name that may be no valid text."""
    data = as_bytes(letter.data).tobytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    about = json.loads(header["__metadata__"]["fedstill"])
    last = max(entry["data_offsets"][1] for key, entry in header.items() if "weights" in key)
    header[f"weights.{name}"] = {"dtype": "U8", "shape": [0], "data_offsets": [last, last]}
    about["fields"]["weights"][name] = "tensor"
    header["__metadata__"]["fedstill"] = json.dumps(about)
    made = json.dumps(header).encode()
    return letter.replace(data=as_tensor(len(made).to_bytes(8, "little") + made + data[end:]))


@pytest.mark.parametrize(
    ("name", "noted"),
    [
        ("\ud800", "c1 sent another network than it was given"),
        ("x" * 4000, "c1 sent another network than it was given"),
        ("x" * 200_000, "sent what cannot be read: Up.weights: expected keys of at most 4096"),
        ("\x1b[31mred\r", "c1 sent another network than it was given"),
    ],
    ids=["no text", "long", "longer than any", "control characters"],
)
def test_names_that_a_site_chose_do_no_harm_in_the_notes(
    name: str, noted: str, tmp_path: Path
) -> None:
    def strange(said: Acted) -> Acted:
        (letter,) = said.letters
        return said.replace(letters=(renamed(letter, name),))

    with FolderLog(tmp_path) as log:
        played_with(strange, log)
    notes = [note.text for note in read_rows(tmp_path).notes if note.node == "c1"]
    assert len(notes) == 1 and noted in notes[0]
    assert len(notes[0]) <= 3 * LONGEST + 1 and notes[0].isprintable()


@pytest.mark.parametrize(
    ("privacy", "row", "reason"),
    [
        (None, Spent("normal", 1.0, 1.0, 1), "the recipe has no privacy"),
        (Privacy(epsilon=8.0), Spent("normal", math.nan, 1.0, 1), "with noise nan, which no plan"),
        (Privacy(epsilon=8.0), Spent("normal", 1e-200, 1.0, 1), "with noise 1e-200, which no"),
        (Privacy(epsilon=8.0), Spent("normal", 1.0, math.nan, 1), "at rate nan with noise 1"),
        (Privacy(epsilon=8.0), Spent("normal", 1.0, 0.5, 2**62), "4611686018427387904 releases"),
        (Privacy(epsilon=8.0), Spent("normal", 1.0, 1.0, -5), "it spent -5 releases"),
        (Privacy(epsilon=8.0), Spent("normal", 1e160, 0.5, 10), "with noise 1e+160, which no"),
        (Privacy(epsilon=8.0), Spent("normal", 0.05, 1 - 1e-16, 2), "at rate 1 with noise 0.05"),
    ],
)
def test_a_ledger_that_nobody_can_account_for_is_an_absence(
    privacy: Privacy | None, row: Spent, reason: str
) -> None:
    log = MemoryLog()
    played_with(
        lambda said: said.replace(left=said.left.replace(spent=(row,))), log, privacy=privacy
    )
    (note,) = [note for note in log.notes if note.node == "c1"]
    assert reason in note.text


def test_a_site_that_logs_numbers_without_end_is_an_absence() -> None:
    """Each would be a row of the coordinator's tables, and an answer has room for a million."""
    log = MemoryLog()
    many = {f"n{at}": 0.0 for at in range(1001)}
    played_with(lambda said: said.replace(left=said.left.replace(numbers=many)), log)
    (note,) = [note for note in log.notes if note.node == "c1"]
    assert note.kind == "absent" and "1001 numbers of a log came, the limit is 1000" in note.text
