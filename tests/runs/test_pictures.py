"""What is drawn of a run is what methods and messages say; nothing is guessed from names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Never

import pytest
import torch
from torch import Tensor

import worlds
from fedstill.core import SERVER, Inbox, Message, Method, Node, Positional, State, Step, Weights
from fedstill.core.method import at_clients, at_server
from fedstill.core.records import Pictured
from fedstill.methods import METHODS
from fedstill.recipe.check import checked
from fedstill.recipe.read import read_recipe
from fedstill.recipe.tables import Recipe
from fedstill.report import image_sets
from fedstill.runs import pictures
from fedstill.runs import recipes as runs
from fedstill.testing import small
from small_recipes import CLIENTS, FEDDM, contents, images_recipe


class Global(State):
    """What the server remembers."""

    weights: Weights


class Own(State):
    """What a client remembers."""

    memory: Tensor  # [class, ...]


class Sketches(Message):
    """An image of each class."""

    paper: Tensor
    subjects: Positional

    def pictures(self) -> Pictured:
        return self.paper, self.subjects


class Silent(Message):
    """Images that nobody asked to draw, though their names sound like it."""

    images: Tensor
    labels: Positional


@dataclass(frozen=True)
class Sketching(Method):
    """Clients send a sketch of each class and keep another."""

    silent: bool = False

    def each_round(self) -> Sequence[Step]:
        return [self.whisper, self.hear] if self.silent else [self.sketch, self.look]

    def server_state(self, server: Node[Any]) -> Global:
        return Global(server.model.init(0))

    def client_state(self, client: Node[Any]) -> Own:
        return Own(torch.zeros(client.model.classes, *client.model.shape))

    def pictures(self, node: Node[Any]) -> Mapping[str, Pictured]:
        if self.silent or not isinstance(node.state, Own):
            return {}
        return {"kept": (node.state.memory, torch.arange(node.model.classes))}

    @at_clients
    def sketch(self, client: Node[Own], inbox: Inbox[Never]) -> Sketches:
        """Send a sketch."""
        return Sketches(client.state.memory, torch.arange(client.model.classes))

    @at_server
    def look(self, server: Node[Global], inbox: Inbox[Sketches]) -> None:
        """Look at the sketches."""

    @at_clients
    def whisper(self, client: Node[Own], inbox: Inbox[Never]) -> Silent:
        """Send images that are not to be drawn."""
        return Silent(client.state.memory, torch.arange(client.model.classes))

    @at_server
    def hear(self, server: Node[Global], inbox: Inbox[Silent]) -> None:
        """Hear them."""


def recipe_from(path: Path, *overrides: str) -> Recipe:
    return checked(read_recipe(path, overrides))[0]


def drawn(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("pictures/synthetic-*")}


@pytest.mark.parametrize("silent", [False, True], ids=["declared", "not declared"])
def test_a_method_of_ones_own_gets_the_pictures_that_it_declares(
    silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "sketching", Sketching)
    method = {"name": "sketching", "silent": silent}
    path = images_recipe(tmp_path, method, pictures=True, rounds=1)
    folder = runs.begin(recipe_from(path), tmp_path / "run")
    assert drawn(folder) == (set() if silent else {f"synthetic-{client}" for client in CLIENTS})


def test_what_is_sent_stands_beside_what_is_kept() -> None:
    gallery = pictures.Gallery(last=1)
    worlds.played(Sketching(), worlds.pictures(), 1, observers=[gallery])
    assert set(gallery.seen) == {"c0", "c1", "c2"}
    sent, kept = torch.zeros(3, 1, 8, 8), torch.ones(3, 1, 8, 8)
    grids = [pictures.grid(images, torch.arange(3), 3) for images in (sent, kept)]
    assert pictures.side_by_side(grids).shape == (3, 1 + 1 + 1, 1, 8, 8)


def test_only_the_last_round_is_looked_at() -> None:
    gallery = pictures.Gallery(last=3)
    worlds.played(Sketching(), worlds.pictures(), 2, observers=[gallery])
    assert gallery.seen == {}


def test_senders_on_the_way_are_looked_at_in_every_stage() -> None:
    stages = [round for round in range(1, 26) if pictures.is_stage(round, 25)]
    assert stages == [3, 6, 9, 12, 15, 18, 21, 24, 25]  # every third, and the last
    gallery = pictures.Gallery(last=30, on_the_way=["c1"])
    worlds.played(Sketching(), worlds.pictures(), 4, observers=[gallery])
    assert set(gallery.of(3)) == {"c1"}
    assert gallery.of(4) == {}


def test_images_of_stages_are_kept_as_bytes_for_reports(tmp_path: Path) -> None:
    path = images_recipe(tmp_path, FEDDM, pictures=True, rounds=2)
    folder = runs.begin(recipe_from(path), tmp_path / "run")
    kept = image_sets.rounds(folder / "pictures" / "synthetic")
    assert list(kept) == [1, 2]
    sets = image_sets.read(kept[2])
    assert [each.node for each in sets] == list(CLIENTS)
    assert all(each.there.any() and each.images.std() > 0 for each in sets)
    without = runs.begin(recipe_from(path, "run.pictures=false"), tmp_path / "without")
    assert not (without / "pictures").exists()
    alone = runs.begin(recipe_from(path, "run.pictures=sets"), tmp_path / "alone") / "pictures"
    assert contents(alone / "synthetic") == contents(folder / "pictures" / "synthetic")
    assert not list(alone.glob("*.png")) and list((folder / "pictures").glob("*.png"))


def test_coded_images_are_drawn_as_they_arrive(tmp_path: Path) -> None:
    path = images_recipe(tmp_path, FEDDM, pictures=True, rounds=1)
    channel = 'federation.channel=[{name = "eight_bit"}]'
    folder = runs.begin(recipe_from(path, channel), tmp_path / "run")
    assert drawn(folder) == {f"synthetic-{client}" for client in CLIENTS}


def sets_of(name: str, **changes: Any) -> dict[str, dict[str, tuple[int, ...]]]:
    """For every node the shapes of the sets that it can show after two rounds."""
    method = replace(small(METHODS[name]), **changes)
    engine, _ = worlds.played(method, worlds.pictures(), 2)
    nodes = {id: engine.node(id, 2, "pictures") for id in (SERVER, "c0", "c1")}
    found = {}
    for id, node in nodes.items():
        sets = method.pictures(node)
        for images, labels in sets.values():
            assert len(images) == len(labels) and int(labels.max()) < worlds.CLASSES
        found[id] = {key: tuple(images.shape[1:]) for key, (images, _) in sets.items()}
    return found


IMAGE = (1, 8, 8)


def test_fedlgd_shows_the_clients_own_set_and_the_global_one() -> None:
    shown = sets_of("fedlgd")
    assert shown == {SERVER: {}, "c0": {"own": IMAGE, "global": IMAGE},
                     "c1": {"own": IMAGE, "global": IMAGE}}  # fmt: skip


def test_desa_shows_the_anchors_that_all_share() -> None:
    shown = sets_of("desa")
    assert shown["c0"] == shown["c1"] == {"global": IMAGE}
    apart = sets_of("desa", combination="union")
    assert apart["c0"] == apart["c1"] == {"own": IMAGE}


def test_dynafed_shows_the_set_that_the_server_distilled() -> None:
    shown = sets_of("dynafed", path_rounds=1, expert_steps=1)
    assert shown == {SERVER: {"distilled": IMAGE}, "c0": {}, "c1": {}}


def test_methods_without_images_show_nothing() -> None:
    assert sets_of("fedavg") == {SERVER: {}, "c0": {}, "c1": {}}
