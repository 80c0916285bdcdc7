"""Peers without a coordinator, over zenoh with mutual TLS, each with a folder of its own."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("zenoh", reason="needs fedstill[sites]")
pytest.importorskip("cryptography", reason="needs fedstill[sites]")

from fedstill.commands.cli import app
from fedstill.core import source
from fedstill.core.errors import SiteError
from fedstill.deploy import folder as folders
from fedstill.deploy import peer
from fedstill.deploy import site as sites
from fedstill.deploy.place import networks_in
from fedstill.runs import export
from fedstill.runs import recipes as runs
from fedstill.sites import certificates
from fedstill.sites.away import Patience
from fedstill.sites.journal import Journal
from fedstill.sites.peers import Peers
from fedstill.sites.site import Policy
from fedstill.sites.words import SAME_CODE
from fedstill.sites.zenoh import ZenohMesh
from ports import free_port
from small_deployment import NAMES, recipe_for, rows, write_data


@dataclass
class Party:
    """A peer in a thread of this process, what it said, and why it stopped."""

    folder: Path
    said: list[str] = field(default_factory=list)
    error: str = ""

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._playing, daemon=True)
        self.thread.start()

    def _playing(self) -> None:
        try:
            peer.start(self.folder, self.said.append)
        except Exception as error:
            self.error = str(error)


def joined(tmp_path: Path, listening: int, patience: Patience, *changes: str) -> dict[str, Path]:
    """Invitations that all have answered; so many peers listen, the others only call."""
    data, out = write_data(tmp_path), tmp_path / "consortium"
    recipe = recipe_for(data, *changes, method="desa")
    ports = {name: f"127.0.0.1:{free_port()}" for name in NAMES[:listening]}
    made = folders.make(recipe, out, address="", addresses=ports, patience=patience)
    found = {}
    for name in NAMES:
        place = found[name] = out / "invitations" / name
        invited = sites.opened(place)
        asked = sites.join(
            invited, data[name], made.number, Policy(), data_dir=None, device="cpu"
        )  # fmt: skip
        (place / f"{name}.pem").write_bytes(folders.sign(out, asked).read_bytes())
    return found


def played(places: dict[str, Path]) -> dict[str, Party]:
    parties = {name: Party(place) for name, place in places.items()}
    ended_all(parties)
    return parties


def ended_all(parties: dict[str, Party]) -> None:
    for party in parties.values():
        party.thread.join(100)
        assert not party.thread.is_alive(), party.said


def test_three_peers_one_of_whom_cannot_listen_have_the_tables_of_one_process(
    tmp_path: Path,
) -> None:
    cache = f"run.cache_dir={tmp_path / 'cache'}"
    places = joined(tmp_path, 2, Patience(start=60, step=60), cache)
    parties = played(places)
    alone = runs.begin(recipe_for(write_data(tmp_path), cache, method="desa"), tmp_path / "alone")
    for name, party in parties.items():
        assert party.error == "" and party.said[-1] == "the run is over"
        own = places[name] / "run"
        mine = [row for row in rows(alone, "metrics.csv") if row["node"] == name]
        assert rows(own, "metrics.csv") == mine
        assert rows(own, "messages.csv") == rows(alone, "messages.csv")
        mine = export.of_folder(own, name, apart=networks_in(own)).weights  # without any data
        theirs = export.of_folder(tmp_path / "alone", name).weights
        assert all(torch.equal(mine[key], theirs[key]) for key in {*mine, *theirs})
    assert networks_in(tmp_path / "alone") is None
    again: list[str] = []
    peer.start(places["north"], again.append)
    assert again == [f"this run is finished: {places['north'] / 'run'}"]


def test_a_peer_whose_certificate_expires_during_the_run_does_not_play_on_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines are cut then; here it says so of itself."""
    places = joined(tmp_path, 3, Patience(start=60, step=60, gone=1))
    north, authority = (
        places["north"],
        certificates.read_authority(tmp_path / "consortium/coordinator"),
    )
    expired = certificates.signed(authority, (north / "north.csr").read_bytes(), "north", days=-1)
    here, stand = ZenohMesh.here, Peers.stand

    def standing(own: Peers, **ended: bool) -> None:
        if own.me == "north" and own.round == 1:
            (north / "north.pem").write_bytes(expired)
        stand(own, **ended)

    def seen(mesh: ZenohMesh) -> set[str]:
        cut = mesh.me == "north" and (north / "north.pem").read_bytes() == expired
        return set() if cut else here(mesh)

    monkeypatch.setattr(Peers, "stand", standing)
    monkeypatch.setattr(ZenohMesh, "here", seen)
    parties = played(places)
    assert "north.pem has expired" in parties["north"].error
    assert not (north / "run" / "summary.json").exists()
    assert parties["south"].error == ""


def test_two_peers_of_whom_neither_listens_are_told_that_they_cannot_hear_each_other(
    tmp_path: Path,
) -> None:
    parties = played(joined(tmp_path, 1, Patience(start=2, step=2, gone=1)))
    assert "not connected within 2 s: west. Of two peers" in parties["south"].error
    assert "not connected within 2 s: south" in parties["west"].error


def test_peers_do_not_begin_while_one_of_them_is_there_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer, "NOTICE", 1.0)
    known: dict[str, list[bool | None]] = {"south": [False], "west": [True, None, None]}

    def doubled(name: str) -> bool | None:  # not known at first: the one before may have ended
        return known[name].pop() if len(known[name]) > 1 else known[name][0]

    peers: Any = SimpleNamespace(
        others=[*known], mesh=SimpleNamespace(doubled=doubled), check_alone=lambda: None
    )
    with pytest.raises(SiteError, match="west: two processes are connected in its name"):
        peer._check_single(peers)
    known["west"] = [False, None]
    peer._check_single(peers)
    known["west"] = [False, True, True, None]  # the second one was told, and has ended
    peer._check_single(peers)


class SoonSure(ZenohMesh):
    """Does not wait long for the sign of life of a process that is gone."""

    north: SoonSure

    def __init__(self, *given: Any):
        super().__init__(*given, lingering=1.0)
        if self.me == "north":
            SoonSure.north = self


def test_of_a_peer_that_is_started_twice_one_ends_with_a_plain_error_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "LOOK", 0.2)
    monkeypatch.setattr(peer, "ZenohMesh", SoonSure)
    places = joined(tmp_path, 2, Patience(start=60, step=60), "run.rounds=1")
    places["copy"] = tmp_path / "copy"
    shutil.copytree(places["west"], places["copy"])
    parties = {name: Party(place) for name, place in places.items() if name != "south"}
    until = time.monotonic() + 60
    while not (hasattr(SoonSure, "north") and SoonSure.north.later("west")):  # it sees both
        assert time.monotonic() < until
        time.sleep(0.1)
    parties["south"] = Party(places["south"])
    ended_all(parties)
    twins = [parties["west"], parties["copy"]]
    (ended,) = [party.error for party in twins if party.error]
    assert re.match(
        "another process plays west and was connected before this one, as north, south see", ended
    )
    whole = [place for name, place in places.items() if not parties[name].error]
    assert len(whole) == 3
    assert all((place / "run" / "summary.json").exists() for place in whole)


def test_peers_begin_only_when_all_have_said_what_they_run() -> None:
    compared: list[str] = []
    said: dict[str, Any] = {"south": "standing"}
    peers: Any = SimpleNamespace(
        others=["south", "west"],
        standings=lambda seconds: said,
        check_standing=lambda peer, standing: compared.append(peer),
        mesh=SimpleNamespace(doubled=lambda peer: False),
    )
    with pytest.raises(SiteError, match="west: connected, but did not say within"):
        peer._check_standings(peers, 0.3, begun=False)
    compared.clear()
    peer._check_standings(peers, 5.0, begun=True)  # who comes back needs nobody's leave
    assert compared == ["south"]
    timer = threading.Timer(0.3, said.update, [{"west": "standing"}])
    timer.start()
    peer._check_standings(peers, 600.0, begun=False)
    assert compared[-1] == "west"


def test_one_peer_that_says_that_it_differs_does_not_keep_others_from_coming_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer, "PARTING", 0.0)
    differing = {"south"}

    def check(other: str, standing: str) -> None:
        if other in differing:
            raise SiteError(f"{other}: it has another recipe")

    others = ["south", "west"]
    peers: Any = SimpleNamespace(
        others=others,
        standings=lambda seconds: dict.fromkeys(others, "standing"),
        check_standing=check,
        mesh=SimpleNamespace(doubled=lambda peer: False),
    )
    with pytest.raises(SiteError, match="south: it has another recipe"):
        peer._check_standings(peers, 5.0, begun=False)  # at the beginning all must agree
    peer._check_standings(peers, 5.0, begun=True)
    differing.add("west")
    with pytest.raises(SiteError, match="south: it has another recipe"):
        peer._check_standings(peers, 5.0, begun=True)


def test_a_peer_with_altered_code_is_refused_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = joined(tmp_path, 3, Patience(start=15, step=60), "run.rounds=1")
    versions = iter("abc")
    monkeypatch.setattr(source, "own_version", lambda: f"fedstill 0.1.0 (code {next(versions)})")
    parties = played(places)
    errors = [party.error for party in parties.values()]  # whoever refuses first lets all know
    assert all(SAME_CODE in error for error in errors), errors
    assert all(error.count("fedstill 0.1.0 (code ") == 2 for error in errors)
    assert not [*tmp_path.rglob("metrics.csv")]


PRIVATE = ("run.rounds=3", "privacy.epsilon=8", "data.mean=[0.5]", "data.std=[0.5]")


def with_known_keys(places: dict[str, Path]) -> dict[str, Path]:
    """Keys for noise are drawn when a party first starts; two runs with the same are alike."""
    for name, place in places.items():
        (place / "run").mkdir(mode=0o700)
        (place / "run" / "noise.key").write_bytes(name.encode().ljust(32, b"."))
    return places


class Killed(BaseException):
    """So ends a process that is killed: nothing more is written."""


def with_west_killed_in_round_two(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Party]:
    """All to the end; west is ended when it has heard the others, and started again."""
    heard, dead = Journal.heard, []

    def until_round_two(self: Journal, round: int, number: int, listen: Any) -> Any:
        found = heard(self, round, number, listen)
        if round == 2 and places["west"] in self.folder.parents and not dead:
            dead.append("west")
            raise Killed
        return found

    monkeypatch.setattr(Journal, "heard", until_round_two)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    parties = {name: Party(place) for name, place in places.items()}
    parties["west"].thread.join(100)
    assert dead and not parties["west"].thread.is_alive()
    parties["west"] = Party(places["west"])
    ended_all(parties)
    return parties


@pytest.mark.parametrize("private", [False, True], ids=["plain", "private"])
def test_a_peer_that_was_killed_goes_on_as_if_it_had_not_been(
    private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for folder in (tmp_path / "whole", tmp_path / "broken"):
        folder.mkdir()
        changes = PRIVATE if private else ("run.rounds=3",)
        made.append(with_known_keys(joined(folder, 3, Patience(start=60, step=60), *changes)))
    unbroken, places = made
    played(unbroken)
    for name, party in with_west_killed_in_round_two(places, monkeypatch).items():
        assert party.error == "" and party.said[-1] == "the run is over"
        own, other = places[name] / "run", unbroken[name] / "run"
        for table in ("metrics.csv", "messages.csv", *(["privacy.csv"] if private else [])):
            assert rows(own, table) == rows(other, table)
        if private:
            assert (own / "spent.json").read_bytes() == (other / "spent.json").read_bytes()
    if not private:
        return
    summary = json.loads((places["west"] / "run" / "summary.json").read_text())["privacy"]
    assert [*summary["epsilon_by_client"]] == ["west"]
    assert summary["epsilon_spent"] == pytest.approx(8, rel=0.01)
    status = CliRunner().invoke(app, ["site", "status", str(places["west"])]).output
    assert "spent of 8 at delta = 1e-05, by this site's own ledger" in status


def test_a_peer_that_was_killed_when_it_had_ended_says_its_last_words_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others had not asked for them yet."""
    made = []
    for folder in (tmp_path / "whole", tmp_path / "broken"):
        folder.mkdir()
        made.append(joined(folder, 3, Patience(start=60, step=60), "run.rounds=2"))
    unbroken, places = made
    played(unbroken)
    heard, stand, dead = Journal.heard, Peers.stand, threading.Event()

    def late(self: Journal, round: int, number: int, listen: Any) -> Any:
        if round == 2 and places["west"] not in self.folder.parents:
            dead.wait(100)
        return heard(self, round, number, listen)

    def dying(self: Peers, *, ended: bool = False) -> None:
        if ended and self.me == "west" and not dead.is_set():
            raise Killed
        stand(self, ended=ended)

    monkeypatch.setattr(Journal, "heard", late)
    monkeypatch.setattr(Peers, "stand", dying)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    parties = {name: Party(place) for name, place in places.items()}
    parties["west"].thread.join(100)
    assert (places["west"] / "run" / "summary.json").exists()
    dead.set()
    parties["west"] = Party(places["west"])
    ended_all(parties)
    for name, party in parties.items():
        assert party.error == "" and party.said[-1] == "the run is over"
        for table in ("metrics.csv", "messages.csv"):
            assert rows(places[name] / "run", table) == rows(unbroken[name] / "run", table)


def test_private_virtual_data_of_peers_are_in_their_ledgers(tmp_path: Path) -> None:
    virtual = ("per_class=2", "warm_up_steps=4", "start=noise")
    changes = (*PRIVATE, *(f"data.virtual.{change}" for change in virtual))
    places = joined(tmp_path, 3, Patience(start=60, step=60), *changes)
    for name, party in played(places).items():
        assert party.error == "" and party.said[-1] == "the run is over"
        (row,) = rows(places[name] / "run", "privacy.csv")
        assert (row["round"], row["node"], row["mechanism"]) == ("0", name, "class sums")
        status = CliRunner().invoke(app, ["site", "status", str(places[name])]).output
        assert re.search(r"epsilon = (8|7\.99\d) spent of 8", status)
