"""Peers without a coordinator, over zenoh with mutual TLS, each with a folder of its own."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("zenoh", reason="needs fedstill[sites]")
pytest.importorskip("cryptography", reason="needs fedstill[sites]")

from fedstill.core import source
from fedstill.core.errors import SiteError
from fedstill.deploy import folder as folders
from fedstill.deploy import peer
from fedstill.deploy import site as sites
from fedstill.runs import recipes as runs
from fedstill.sites.away import Patience
from fedstill.sites.site import Policy
from fedstill.sites.words import SAME_CODE
from small_deployment import NAMES, free_port, recipe_for, rows, write_data


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
    for party in parties.values():
        party.thread.join(100)
        assert not party.thread.is_alive(), party.said
    return parties


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
    again: list[str] = []
    peer.start(places["north"], again.append)
    assert again == [f"this run is finished: {places['north'] / 'run'}"]


def test_two_peers_of_whom_neither_listens_are_told_that_they_cannot_hear_each_other(
    tmp_path: Path,
) -> None:
    parties = played(joined(tmp_path, 1, Patience(start=2, step=2, gone=1)))
    assert "not connected within 2 s: west. Of two peers" in parties["south"].error
    assert "not connected within 2 s: south" in parties["west"].error


def test_peers_do_not_begin_while_one_of_them_is_there_twice() -> None:
    known: dict[str, list[bool | None]] = {"south": [False], "west": [True, None, None]}

    def doubled(name: str) -> bool | None:  # not known at first: the one before may have ended
        return known[name].pop() if len(known[name]) > 1 else known[name][0]

    peers: Any = SimpleNamespace(others=[*known], mesh=SimpleNamespace(doubled=doubled))
    with pytest.raises(SiteError, match="west: two processes are connected in its name"):
        peer._check_single(peers)
    known["west"] = [False, None]
    peer._check_single(peers)


def test_peers_begin_only_when_all_have_said_what_they_run() -> None:
    compared: list[str] = []
    said: dict[str, Any] = {"south": "standing"}
    peers: Any = SimpleNamespace(
        others=["south", "west"],
        standings=lambda seconds: said,
        check_standing=lambda peer, standing: compared.append(peer),
    )
    with pytest.raises(SiteError, match="west: connected, but did not say within 600 s"):
        peer._check_standings(peers, 600.0, begun=False)
    peer._check_standings(peers, 5.0, begun=True)  # who comes back needs nobody's leave
    said["west"] = "standing"
    peer._check_standings(peers, 600.0, begun=False)
    assert compared == ["south", "south", "south", "west"]


def test_a_peer_with_altered_code_is_refused_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = joined(tmp_path, 3, Patience(start=15, step=60), "run.rounds=1")
    versions = iter("abc")
    monkeypatch.setattr(source, "own_version", lambda: f"fedstill 0.1.0 (code {next(versions)})")
    parties = played(places)
    assert all(party.error for party in parties.values())  # who leaves last may find nobody
    told = [party.error for party in parties.values() if SAME_CODE in party.error]
    assert told and told[0].count("fedstill 0.1.0 (code ") == 2
    assert not [*tmp_path.rglob("metrics.csv")]


def test_privacy_among_peers_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    private = ("privacy.epsilon=8", "data.mean=[0.5]", "data.std=[0.5]")
    with pytest.raises(SiteError, match=r"use a deployment with a coordinator"):
        joined(tmp_path, 3, Patience(), *private)
    assert not (tmp_path / "consortium").exists()
