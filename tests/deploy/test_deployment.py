"""A deployment from end to end: made, joined, signed, checked, started; and what is refused."""

from __future__ import annotations

import errno
import json
import re
import resource
import shutil
import threading
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("zenoh", reason="needs fedstill[sites]")
pytest.importorskip("cryptography", reason="needs fedstill[sites]")

from cryptography import x509
from typer.testing import CliRunner

from fedstill.commands import deploying
from fedstill.commands.cli import app
from fedstill.core import Inbox, Node, at_clients, source
from fedstill.core.errors import BadValue, RecipeError, RunFolderError, SiteError
from fedstill.deploy import coordinator
from fedstill.deploy import folder as folders
from fedstill.deploy import site as sites
from fedstill.deploy.board import Board, Row, ask_to_stop, read_board
from fedstill.deploy.place import faults, versions_beside
from fedstill.methods.fedavg import Down, FedAvg, Up
from fedstill.recipe import checked
from fedstill.recipe.toml import toml_text
from fedstill.runs import recipes as runs
from fedstill.sites import certificates, words, zenoh
from fedstill.sites.away import Patience
from fedstill.sites.site import Policy, Site
from fedstill.sites.words import SAME_CODE, Act, Present
from ports import free_port
from small_deployment import NAMES, recipe_for, rows, write_data


@dataclass
class Consortium:
    """A coordinator and sites in threads of this process, each with folders of their own."""

    out: Path
    data: dict[str, Path]
    said: dict[str, list[str]] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    def invitation(self, name: str) -> Path:
        return self.out / "invitations" / name

    def joined(self) -> Consortium:
        for name in NAMES:
            self.join(name)
        return self

    def join(self, name: str, policy: Policy | None = None) -> None:
        invited = sites.opened(self.invitation(name))
        number = invited.deployment.number
        asked = sites.join(
            invited, self.data[name], number, policy or Policy(), data_dir=None, device="cpu"
        )
        signed = folders.sign(self.out, asked)
        (self.invitation(name) / signed.name).write_bytes(signed.read_bytes())

    def site(self, name: str, over: threading.Event | None = None) -> threading.Thread:
        said = self.said.setdefault(name, [])

        def playing() -> None:
            sites.start(self.invitation(name), said.append, (over or self.over).is_set)

        thread = threading.Thread(target=playing, daemon=True)
        thread.start()
        return thread

    def played(self) -> Path:
        threads = [self.site(name) for name in NAMES]
        try:
            found = coordinator.start(self.out, self.said.setdefault("coordinator", []).append)
        finally:
            self.over.set()
            for thread in threads:
                thread.join(120)
        return found


def called(*words: object) -> None:
    """A command whose error is raised."""
    CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)


Made = Callable[..., Consortium]
VIRTUAL = (
    "run.rounds=2", "privacy.epsilon=8", "data.mean=[0.5]", "data.std=[0.5]",
    "data.virtual.per_class=2", "data.virtual.warm_up_steps=4", "data.virtual.start=noise",
)  # fmt: skip


@pytest.fixture
def make(tmp_path: Path) -> Made:
    def made(*changes: str, method: str = "fedavg", patience: Patience | None = None) -> Consortium:
        data = write_data(tmp_path)
        recipe, out = recipe_for(data, *changes, method=method), tmp_path / "consortium"
        address = f"127.0.0.1:{free_port()}"
        folders.make(recipe, out, address=address, patience=patience or Patience(150, 150))
        return Consortium(out, data)

    return made


def test_a_deployment_gives_the_tables_of_one_process(make: Made, tmp_path: Path) -> None:
    consortium = make().joined()
    alone = runs.begin(recipe_for(consortium.data), tmp_path / "alone")
    apart = consortium.played()
    for table in ("metrics.csv", "messages.csv"):
        assert rows(apart, table) == rows(alone, table)
    assert (apart / "summary.json").exists()
    for kept in ("run", "cache"):  # memories and failures are for the site's own user
        assert (consortium.invitation("north") / kept).stat().st_mode & 0o077 == 0
    assert apart.stat().st_mode & 0o077 == 0  # so is what sites sent for the coordinator's
    board = read_board(apart)
    assert board["ended"] and board["round"] == 2
    assert {name: row["said"] for name, row in board["sites"].items()} == dict.fromkeys(NAMES, "ok")
    log = sites.answers(consortium.invitation("north"))
    assert {row["asked"] for row in log} >= {"hello", "examine", "over"}
    assert all(row["said"] == "ok" for row in log)
    said = consortium.said["coordinator"]
    assert any("north: the same recipe" in line for line in said)
    # The common model is that of one process, and is written without anybody's data.
    files = []
    for folder in (alone, apart):
        shown = CliRunner().invoke(app, ["export", str(folder), "--out", str(folder / "common")])
        assert shown.exit_code == 0, shown.output
        files.append(folder / "common.safetensors")
    assert files[0].read_bytes() == files[1].read_bytes()
    said_of_it = json.loads((apart / "common.json").read_text())
    assert said_of_it["normalisation"] == {} and "which only it knows" in said_of_it["note"]
    assert set(said_of_it["metrics"]["accuracy"]) == {*NAMES}
    with pytest.raises(SiteError, match="has ended; there is nothing to stop"):
        ask_to_stop(apart)
    with pytest.raises(RunFolderError, match=r"no model of north is in .*; what north keeps is at"):
        called("export", apart, "--node", "north")
    # Of one that has not ended it is said how it goes on, which is not by resume.
    going = tmp_path / "going"
    shutil.copytree(apart, going)
    (going / "summary.json").unlink()
    with pytest.raises(RunFolderError, match=r"has not ended; .* by `fedstill deploy start`"):
        called("export", going)
    with pytest.raises(RunFolderError, match=r"data of this run are not here; .*deploy start"):
        called("resume", going)
    # A second start finds nothing to do.
    again: list[str] = []
    coordinator.start(consortium.out, again.append)
    assert again == [f"this run is finished: {apart}"]


def test_sites_with_altered_code_are_refused_by_name_before_anything_is_played(
    make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    consortium, versions = make().joined(), iter("abcd")
    monkeypatch.setattr(source, "own_version", lambda: f"fedstill 0.1.0 (code {next(versions)})")
    with pytest.raises(SiteError) as caught:
        consortium.played()
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [*NAMES]
    for line in lines:
        assert line.count("fedstill 0.1.0 (code ") == 2 and line.endswith(SAME_CODE)
    assert not [*consortium.out.rglob("metrics.csv")]


def test_the_code_of_plug_ins_that_a_recipe_names_is_compared_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site"
    (folder / "own_rate-0.3.dist-info").mkdir(parents=True)
    for name, text in {
        "own_rate.py": "def confidence(labels, logits):\n    return 1.0\n",
        "own_rate-0.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: own-rate\nVersion: 0.3\n",
        "own_rate-0.3.dist-info/entry_points.txt": "[fedstill.metrics]\n"
        "confidence = own_rate:confidence\naccuracy = own_rate:confidence\n",
    }.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    data = write_data(tmp_path)
    assert versions_beside(recipe_for(data)) == []  # accuracy is fedstill's own
    recipe = recipe_for(data, "run.metrics=['accuracy','confidence']")
    (before,) = versions_beside(recipe)
    assert re.fullmatch(r"own-rate 0\.3 \(code [0-9a-f]{12}\)", before)
    (folder / "own_rate.py").write_text("def confidence(labels, logits):\n    return 2.0\n")
    (after,) = versions_beside(recipe)
    assert after != before


def test_a_site_that_comes_back_after_the_end_does_not_wait_for_ever(
    make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(settings: object) -> None:
        raise SiteError("nobody takes the call.")

    monkeypatch.setattr(zenoh, "opened", nobody)
    consortium, said = make().joined(), []
    folder = consortium.invitation("north")
    log = folder / sites.RUN / "answers.csv"
    log.parent.mkdir()
    log.write_text("asked,said\nhello,ok\nover,ok\n")
    sites.start(folder, said.append)
    assert said == ["the run is over"]
    # Killed before it heard so, it only knows that it has answered before.
    log.write_text("asked,said\nhello,ok\n")
    with pytest.raises(SiteError, match=r"has been away for 0\.1 s\. If the run is over, nothing"):
        sites.start(folder, said.append, wait=0.1)


def test_a_step_that_takes_longer_than_the_wait_is_no_absence(
    make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(sites, "time", SimpleNamespace(monotonic=lambda: now[0]))
    absence = sites.Absence.begun(sites.opened(make().joined().invitation("north")), wait=60)
    for seconds, here in [(0, False), (90, False), (91, True), (4000, False), (4059, False)]:
        now[0] = seconds  # before it first was there nobody counts; then a step of an hour
        absence.noted(here)
    now[0] = 4061
    with pytest.raises(SiteError, match=r"has been away for 60 s"):
        absence.noted(False)


def test_a_site_whose_certificate_expires_during_the_run_says_so_and_ends(make: Made) -> None:
    consortium = make().joined()
    folder = consortium.invitation("north")
    absence = sites.Absence.begun(sites.opened(folder), wait=60)
    absence.noted(True)
    absence.noted(False)
    authority = certificates.read_authority(consortium.out / "coordinator")
    asked = (folder / "north.csr").read_bytes()
    (folder / "north.pem").write_bytes(certificates.signed(authority, asked, "north", days=-1))
    with pytest.raises(SiteError, match=r"north\.pem has expired: .* or have a new one signed"):
        absence.noted(False)


def test_a_coordinators_certificate_lasts_as_long_as_its_authority(make: Made) -> None:
    """Nobody can have a new one signed for it."""
    own = make().out / "coordinator"
    ends = [
        x509.load_pem_x509_certificate((own / name).read_bytes()).not_valid_after_utc
        for name in ("ca.crt", "coordinator.pem")
    ]
    assert timedelta() <= ends[0] - ends[1] <= timedelta(days=1)


def test_a_site_whose_coordinator_ended_without_a_word_ends_too(make: Made) -> None:
    consortium, said = make().joined(), []
    own = consortium.out / "coordinator"
    deployment = folders.read_deployment(own)
    credentials = folders.credentials(own, deployment)
    settings = zenoh.of_coordinator(credentials, deployment.run, deployment.address, NAMES)
    there = zenoh.opened(settings)

    def told(line: str) -> None:
        said.append(line)
        if line == "connected":
            zenoh.closed(there)

    with pytest.raises(
        SiteError, match=r"the coordinator at 127.0.0.1:\d+ has been away for 0\.5 s"
    ):
        sites.start(consortium.invitation("north"), told, wait=0.5)
    assert said[-2:] == ["connected", sites.LOST]


def test_a_stopped_coordinator_goes_on_and_the_tables_are_those_of_one_process(
    make: Made, tmp_path: Path
) -> None:
    consortium = make("run.rounds=3", method="scaffold").joined()
    alone = runs.begin(
        recipe_for(consortium.data, "run.rounds=3", method="scaffold"), tmp_path / "alone"
    )
    threads = [consortium.site(name) for name in NAMES]
    folder = consortium.out / "coordinator" / "run"

    def stopping(line: str) -> None:
        if line.startswith("round 1/"):
            ask_to_stop(folder)

    with pytest.raises(SiteError, match=r"stopped after round"):
        coordinator.start(consortium.out, stopping)
    assert not (folder / "summary.json").exists()
    coordinator.start(consortium.out, lambda line: None)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    for table in ("metrics.csv", "messages.csv"):
        assert rows(folder, table) == rows(alone, table)
    assert "connected" in consortium.said["north"]
    assert consortium.said["north"][-1] == "the run is over"


def test_who_has_not_answered_when_the_coordinator_is_stopped_is_not_absent(
    make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    consortium = make("run.rounds=2").joined()
    alone = runs.begin(recipe_for(consortium.data), tmp_path / "alone")
    monkeypatch.setattr(zenoh, "AGAIN", 0.2)  # a step takes longer than one asking
    folder, stopped, released = consortium.out / "coordinator" / "run", [], threading.Event()
    answer = Site.answer

    def slow(site: Site, data: bytes) -> bytes:
        if isinstance(words.read(data), Act) and site.name == "west" and not stopped:
            stopped.append(ask_to_stop(folder))
            released.wait(60)
        return answer(site, data)

    monkeypatch.setattr(Site, "answer", slow)
    threads = [consortium.site(name) for name in NAMES]
    with pytest.raises(SiteError, match=r"stopped before all sites had answered; go on with"):
        coordinator.start(consortium.out, lambda line: None)
    released.set()
    coordinator.start(consortium.out, lambda line: None)
    for thread in threads:
        thread.join(120)
    assert not [row for row in rows(folder, "notes.csv") if row["kind"] == "absent"]
    for table in ("metrics.csv", "messages.csv"):
        assert rows(folder, table) == rows(alone, table)


def test_a_stop_while_sites_are_waited_for_is_said_as_such(make: Made) -> None:
    consortium = make().joined()
    folder = consortium.out / "coordinator" / "run"

    def stopping(line: str) -> None:
        if line.startswith("waiting"):
            ask_to_stop(folder)

    with pytest.raises(SiteError, match=r"^stopped while sites were waited for"):
        coordinator.start(consortium.out, stopping)


def test_a_stop_is_heard_from_the_very_start_and_refused_while_nothing_runs(
    make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    consortium = make().joined()
    folder, placed = consortium.out / "coordinator" / "run", coordinator.placed

    def stopping(line: str) -> None:
        ask_to_stop(folder)

    with pytest.raises(SiteError, match=r"^stopped while sites were waited for"):
        coordinator.start(consortium.out, stopping)
    with pytest.raises(SiteError, match=r"nothing runs in .* now: it was stopped or killed"):
        ask_to_stop(folder)

    def slow(*given: Any, **more: Any) -> Any:
        ask_to_stop(folder)  # while data and networks are loaded
        return placed(*given, **more)

    monkeypatch.setattr(coordinator, "placed", slow)
    with pytest.raises(SiteError, match=r"^stopped while sites were waited for"):
        coordinator.start(consortium.out, lambda line: None)


def test_a_coordinator_that_is_started_again_goes_on_without_a_site_that_refuses(
    make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One site alone could keep a run from going on for ever, and no other can be put in."""
    consortium = make("run.rounds=3").joined()
    folder, hello = consortium.out / "coordinator" / "run", Site._hello
    threads = [consortium.site(name) for name in NAMES]

    def stopping(line: str) -> None:
        if line.startswith("round 1/"):
            ask_to_stop(folder)

    with pytest.raises(SiteError, match=r"stopped after round"):
        coordinator.start(consortium.out, stopping)

    def refusing(site: Site, asked: Any) -> Any:
        if site.name == "west":
            raise SiteError("it will not")
        return hello(site, asked)

    monkeypatch.setattr(Site, "_hello", refusing)
    said: list[str] = []
    coordinator.start(consortium.out, said.append)
    assert "  west: refused: it will not; absent until it is as was agreed" in said
    absent = [row for row in rows(folder, "notes.csv") if row["kind"] == "absent"]
    assert {row["node"] for row in absent} == {"west"}
    assert all("refused: it will not" in row["text"] for row in absent)
    for thread in threads:
        thread.join(120)


def test_a_coordinator_that_is_started_again_goes_on_without_a_site_that_is_gone(
    make: Made,
) -> None:
    patience = Patience(150, 150, gone=1.0)
    consortium = make("run.rounds=3", method="scaffold", patience=patience).joined()
    gone = threading.Event()
    threads = [consortium.site(name, gone if name == "west" else None) for name in NAMES]
    folder = consortium.out / "coordinator" / "run"

    def stopping(line: str) -> None:
        if line.startswith("round 1/"):
            gone.set()
            ask_to_stop(folder)

    with pytest.raises(SiteError, match=r"stopped after round"):
        coordinator.start(consortium.out, stopping)
    threads[-1].join(120)
    said: list[str] = []
    coordinator.start(consortium.out, said.append)
    assert "going on without west, absent until back" in said
    assert (folder / "summary.json").exists()
    absent = [row for row in rows(folder, "notes.csv") if row["kind"] == "absent"]
    assert {row["node"] for row in absent} == {"west"}
    assert all("its connection is lost" in row["text"] for row in absent)
    for thread in threads:
        thread.join(120)


def test_paths_and_keys_stay_where_they_are(make: Made) -> None:
    consortium = make().joined()
    sent = consortium.invitation("north")
    recipe = tomllib.loads((sent / "recipe.toml").read_text())
    assert recipe["data"]["options"]["clients"] == {name: name for name in NAMES}
    assert (sent / "north.key").stat().st_mode & 0o077 == 0
    own = {path.name for path in (consortium.out / "coordinator").rglob("*")}
    assert "north.key" not in own and "ca.key" in own
    assert not (sent / "ca.key").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--deadline", "0"), r"^patience\.step = 0\.0: must be in \(0, 1e\+09\] \(--deadline\)$"),
        (("--deadline", "inf"), r"^patience\.step = inf: must be a finite number \(--deadline\)$"),
        (("--deadline", "1e20"), r"^patience\.step = 1e\+20: must be in "),  # overflows in a wait
        (("--start-deadline", "-1"), r"^patience\.start = -1\.0: .* \(--start-deadline\)$"),
        (("--gone", "nan"), r"^patience\.gone = nan: must be a finite number \(--gone\)$"),
        (("data.options.clients={}",), r"data\.options\.clients names no site"),
    ],
)
def test_what_could_not_be_started_is_not_made(
    words: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(toml_text(recipe_for(write_data(tmp_path)).as_tables()))
    out = tmp_path / "consortium"
    call = ["deploy", "make", str(recipe), "--address", "127.0.0.1:7447", "--out", str(out)]
    said = CliRunner().invoke(app, [*call, *words])
    assert re.search(says, str(said.exception)), said.exception
    assert not out.exists()


@pytest.mark.parametrize(
    ("south", "says"),
    [
        ("north=127.0.0.1:2", r"--peer north is given more than once"),
        ("south=127.0.0.1:1", r"north and south cannot both listen at 127\.0\.0\.1:1"),
    ],
)
def test_peers_need_an_address_each(south: str, says: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(toml_text(recipe_for(write_data(tmp_path), method="desa").as_tables()))
    call = ["deploy", "make", str(recipe), "--out", str(tmp_path / "consortium")]
    said = CliRunner().invoke(app, [*call, "--peer", "north=127.0.0.1:1", "--peer", south])
    assert re.search(says, str(said.exception)), said.exception


def test_numbers_that_nobody_can_use_are_refused_where_they_are_given(make: Made) -> None:
    consortium = make().joined()
    asked = consortium.invitation("north") / "north.csr"
    for days in ("4000", "10000000000"):  # beyond the authority, and beyond any calendar
        call = ["deploy", "sign", str(consortium.out), str(asked), "--days", days]
        said = str(CliRunner().invoke(app, call).exception)
        assert re.search(r"would outlive the authority .* give --days 36\d\d or fewer", said)
    call = ["deploy", "flower", str(consortium.out), "--port", "65536"]
    said = CliRunner().invoke(app, call).output
    assert "less than or equal to 65535" in said or "is not in the range" in said
    assert not (consortium.out / "flower").exists()


def test_a_site_whose_device_is_not_there_is_not_called_ready(make: Made) -> None:
    consortium = make().joined()
    place = consortium.invitation("north")
    own, policy = folders.read_own(place)
    folders.write_own(place, replace(own, device="nonsense"), policy)
    said = CliRunner().invoke(app, ["site", "check", str(place)])
    assert "ready" not in said.output
    assert "site.toml: site.device = 'nonsense': use auto, cpu" in str(said.exception)
    with pytest.raises(SiteError, match=r"site\.device = 'nonsense'"):
        sites.start(place, print)


def test_a_changed_recipe_is_refused_with_both_numbers(make: Made) -> None:
    consortium = make().joined()
    path = consortium.invitation("north") / "recipe.toml"
    path.write_text(path.read_text().replace("rounds = 2", "rounds = 3"))
    agreed = folders.read_deployment(path.parent).number
    with pytest.raises(SiteError, match=f"has the number (?!{agreed}).*but {agreed} was agreed"):
        sites.start(path.parent, print)


def test_what_a_site_tells_of_its_classes_cannot_write_over_the_coordinators_screen() -> None:
    present = Present("north", "2.0", 3, {"healthy": 2, "\x1b[2Jill\n": 1})
    assert coordinator._told(present).endswith("; 3 examples (healthy 2,  [2Jill  1)")


def test_a_coordinator_whose_recipe_changed_is_told_what_to_do(make: Made) -> None:
    consortium = make()
    path = consortium.out / "coordinator" / "recipe.toml"
    path.write_text(path.read_text().replace("rounds = 2", "rounds = 3"))
    with pytest.raises(SiteError, match=r"was agreed on; put back the recipe that the sites were"):
        coordinator.start(consortium.out, print)


def test_changed_data_are_refused_with_both_numbers(make: Made) -> None:
    consortium = make().joined()
    consortium.data["north"].write_bytes(consortium.data["south"].read_bytes())
    with pytest.raises(SiteError, match=r"data at .* have changed .*their number was .* and is "):
        sites.start(consortium.invitation("north"), print)
    consortium.data["north"].unlink()
    with pytest.raises(Exception, match=r"client north: there is nothing at"):
        sites.start(consortium.invitation("north"), print)


def test_a_full_disk_is_said_as_such_when_private_virtual_data_are_made(make: Made) -> None:
    consortium = make(*VIRTUAL)
    consortium.join("north")
    folder = consortium.invitation("north")
    own, _ = folders.read_own(folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
        says = "cannot write to its folder: File too large"
        with pytest.raises(SiteError, match=says), sites.at_work(sites.opened(folder), own):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with sites.at_work(sites.opened(folder), own) as place:  # with room it begins as it would have
        assert place.spent and (folder / "run" / "virtual.safetensors").exists()


@pytest.mark.parametrize("changes", [(), VIRTUAL], ids=["memories", "private virtual data"])
def test_a_site_that_has_begun_does_not_go_on_with_other_data(
    make: Made, changes: tuple[str, ...]
) -> None:
    consortium = make(*changes)
    consortium.join("north")
    folder = consortium.invitation("north")
    own, policy = folders.read_own(folder)
    with sites.at_work(sites.opened(folder), own):  # what it keeps is made from these data
        pass
    consortium.join("north")  # the same ones again are no others
    consortium.data["north"].write_bytes(consortium.data["south"].read_bytes())
    says = r"run was begun with other data: their number was .* and is .* remove .*run"
    with pytest.raises(SiteError, match=says):
        consortium.join("north")
    assert folders.read_own(folder)[0] == own
    content = sites.own_data(
        recipe_for(consortium.data, *changes), "north", str(consortium.data["north"])
    ).digest()
    folders.write_own(folder, replace(own, content=content), policy)  # as one writes it by hand
    with pytest.raises(SiteError, match=says):
        sites.start(folder, print)
    shutil.rmtree(folder / sites.RUN)
    consortium.join("north")
    with sites.at_work(sites.opened(folder), folders.read_own(folder)[0]):
        pass


def test_a_folder_in_which_another_run_has_begun_is_not_gone_on_with(
    make: Made, tmp_path: Path
) -> None:
    consortium = make()
    consortium.join("north")
    folder = consortium.invitation("north")
    with sites.at_work(sites.opened(folder), folders.read_own(folder)[0]):
        pass
    log = folder / sites.RUN / "answers.csv"
    log.write_text("asked,said\nover,ok\n")
    other = tmp_path / "other"
    folders.make(recipe_for(consortium.data), other, address="127.0.0.1:7447")
    shutil.copytree(other / "invitations" / "north", folder, dirs_exist_ok=True)
    invited = sites.opened(folder)
    with pytest.raises(SiteError, match=r"run was begun for the run trial-.*, this is trial-"):
        sites.join(
            invited, consortium.data["north"], invited.deployment.number, Policy(), data_dir=None,
            device="cpu",
        )  # fmt: skip


def test_a_site_joins_only_with_the_number_that_it_was_told(make: Made) -> None:
    consortium = make()
    invited = sites.opened(consortium.invitation("north"))
    with pytest.raises(SiteError, match=r"not 1234-1234"):
        sites.join(
            invited, consortium.data["north"], "1234-1234", Policy(), data_dir=None, device="cpu"
        )
    with pytest.raises(SiteError, match=r"join first"):
        sites.start(consortium.invitation("north"), print)


def test_an_invitation_with_another_authority_has_another_number(make: Made) -> None:
    consortium = make()
    folder = consortium.invitation("north")
    told = sites.opened(folder).deployment.number
    other = certificates.make_authority(consortium.out / "other").certificate
    assert other is not None
    (folder / "ca.crt").write_bytes((consortium.out / "other" / "ca.crt").read_bytes())
    with pytest.raises(SiteError, match=r"ca\.crt is not of the authority that"):
        sites.opened(folder)
    # Whoever changes what the invitation says of it, or takes it away, cannot keep the number.
    path = folder / folders.AGREEMENT
    true, forged = (certificates.digest(place / "ca.crt") for place in (
        consortium.out / "coordinator", consortium.out / "other"
    ))  # fmt: skip
    agreement = path.read_text()
    for authority in (f'authority = "{forged}"', ""):
        path.write_text(agreement.replace(f'authority = "{true}"', authority))
        invited = sites.opened(folder)
        assert invited.deployment.number != told
        with pytest.raises(SiteError, match=rf"not {told}; compare it"):
            sites.join(
                invited, consortium.data["north"], told, Policy(), data_dir=None, device="cpu"
            )


def test_a_coordinator_says_who_did_not_come(make: Made) -> None:
    consortium = make(patience=Patience(start=1.0)).joined()
    with pytest.raises(SiteError, match=r"not connected within 1 s: north, south, west"):
        coordinator.start(consortium.out, print)


def test_a_recipe_for_sites_must_say_what_nobody_sees(tmp_path: Path) -> None:
    data = write_data(tmp_path)
    good = recipe_for(data)
    assert faults(good) == []
    assert "nobody has another's tests" in faults(recipe_for(data, "run.scores=cross"))[0]
    assert faults(recipe_for(data, "run.keep_checkpoints=32")) == []
    many = "run.keep_checkpoints = 33: sites keep the memories of 32 checkpoints at most"
    assert faults(recipe_for(data, "run.keep_checkpoints=33")) == [many]
    timed = recipe_for(data, "federation.clock.speed=1e9")
    assert faults(timed) == ["federation.clock: sites take the time that they take; leave it out"]
    unsized = replace(good, data=replace(good.data, size=None))
    assert faults(unsized) == [
        "data.size is missing; nobody sees all data, so the recipe must say it"
    ]
    (digits,) = checked({"data": {"name": "digits5"}, "method": {"name": "fedavg"}})
    assert "every site brings its own data" in faults(digits)[0]
    with pytest.raises(RecipeError, match=r"every site brings its own data"):
        folders.make(digits, tmp_path / "out", address="127.0.0.1:1")


CODE = {
    "a method": {"method": {"name": "came_along.py:Mine"}},
    "a metric": {"run": {"metrics": ["came_along.py:Mine"]}},
    "a network": {"models": {"name": "came_along.py:Mine"}},
    "a channel": {"federation": {"channel": [{"name": "came_along.py:Mine"}]}},
    "public data": {"data": {"public": {"name": "came_along.py:Mine"}}},
    "a function of Python": {"models": {"name": "os:system", "command": "touch ran"}},
}


@pytest.mark.parametrize("tables", CODE.values(), ids=CODE)
def test_opening_an_invitation_runs_nothing_that_came_with_it(
    make: Made, tables: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    folder = make().invitation("north")
    ran = tmp_path / "ran"
    (folder / "came_along.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    recipe = tomllib.loads((folder / "recipe.toml").read_text())
    for name, table in tables.items():
        kept = {} if name in ("method", "models") else recipe.get(name, {})
        recipe[name] = {**kept, **table}
    (folder / "recipe.toml").write_text(toml_text(recipe))
    with pytest.raises(RecipeError, match=r"says where code lies, and code does not travel"):
        sites.opened(folder)
    assert not ran.exists()


def test_a_recipe_that_names_code_by_its_place_is_not_made_a_deployment(tmp_path: Path) -> None:
    recipe = recipe_for(write_data(tmp_path), 'run.metrics=["torch:relu"]')
    with pytest.raises(RecipeError, match=r"^run\.metrics: 'torch:relu' says where code lies"):
        folders.make(recipe, tmp_path / "out", address="127.0.0.1:1")


@pytest.mark.parametrize("name", ["../../north", "/tmp/north", "..", "*", "a/b", "north$(id)"])
def test_an_invitation_whose_names_lead_elsewhere_is_refused(make: Made, name: str) -> None:
    folder = make().invitation("north")
    path = folder / folders.AGREEMENT
    path.write_text(path.read_text().replace('"north"', f'"{name}"'))
    with pytest.raises(BadValue, match=r"cannot name a site"):
        sites.opened(folder)


@pytest.mark.parametrize(
    "host", ["$(touch ran)", "a b", "a#verify_name_on_connect=false", "`id`", "[1:2]", "fd00::1"]
)
def test_an_invitation_whose_address_is_more_than_one_is_refused(make: Made, host: str) -> None:
    folder = make().invitation("north")
    path = folder / folders.AGREEMENT
    path.write_text(path.read_text().replace("127.0.0.1", host))
    with pytest.raises(BadValue, match=r"is no address"):
        sites.opened(folder)


def test_an_invitation_for_somebody_who_takes_no_part_is_refused(make: Made) -> None:
    folder = make().invitation("north")
    path = folder / folders.AGREEMENT
    path.write_text(path.read_text().replace('name = "north"', 'name = "../north"'))
    with pytest.raises(SiteError, match=r"'\.\./north' is no party"):
        sites.opened(folder)


class Logging(FedAvg):
    """Logs how many examples a client trained on."""

    @at_clients
    async def update(self, client: Node[Any], inbox: Inbox[Down]) -> Up:
        """Train and log."""
        weights, _ = await self.trained(client, inbox.only().weights)
        client.log(seen=len(client.data), share=1.0)
        return Up(weights, len(client.data))


def test_a_site_is_told_which_numbers_its_steps_log(tmp_path: Path) -> None:
    recipe = recipe_for(write_data(tmp_path))
    deployment = SimpleNamespace(name="north", sites=NAMES, address="fl:7447", number="f25f")
    besides = "leaves this site besides: mean losses of training, {}scores on its test set"
    assert besides.format("") in "\n".join(deploying._leaving(recipe, deployment))
    told = "\n".join(deploying._leaving(replace(recipe, method=Logging()), deployment))
    assert besides.format("seen, share of update, ") in told


def test_the_commands_lead_from_a_recipe_to_a_site_that_is_ready(tmp_path: Path) -> None:
    data = write_data(tmp_path)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(toml_text(recipe_for(data, method="feddm").as_tables()))
    out, call = tmp_path / "c", CliRunner()

    def run(*words: str) -> str:
        found = call.invoke(app, [str(word) for word in words])
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            return f"{found.output}{found.exception}"
        return found.output

    said = run("deploy", "make", str(recipe), "--address", "127.0.0.1:7447", "--out", str(out))
    number = said.split("number ")[1].split()[0]
    place, npz = str(out / "invitations" / "north"), str(data["north"])
    refused = run("site", "join", place, "--data", npz)
    assert "begin as training examples" in refused and "add --agree NUMBER" not in refused
    asked = run("site", "join", place, "--data", npz, "--allow-examples")
    assert "leaves this site in synthesize, in each of 2 rounds: images" in asked
    assert f"number {number} (compare" in asked
    assert 'its images begin as training examples (start = "real")' in asked
    assert "north: 18 training and 12 test images 1x8x8" in asked and "add --agree NUMBER" in asked
    nowhere = run("site", "join", place, "--data", str(tmp_path / "nowhere"), "--allow-examples")
    assert "client north: there is nothing at" in nowhere and "add --agree" not in nowhere
    told = run("site", "join", place, "--data", npz, "--agree", number, "--allow-examples")
    assert "send" in told and "north.csr" in told
    key = told.split("key by telephone: ")[1].split()[0]
    assert "north.pem is missing" in run("site", "check", place)
    assert f"for the key {key}" in run("deploy", "sign", str(out), f"{place}/north.csr")
    assert "another key" not in run("deploy", "sign", str(out), f"{place}/north.csr")
    (tmp_path / "else").mkdir()
    foreign = certificates.request(tmp_path / "else", "north")
    again = run("deploy", "sign", str(out), str(foreign))
    assert f"north has a certificate for another key, {key}, which stays valid" in again
    run("deploy", "sign", str(out), f"{place}/north.csr")
    (Path(place) / "north.pem").write_bytes(
        (out / "coordinator" / "signed" / "north.pem").read_bytes()
    )
    ready = run("site", "check", place)
    assert "north: 18 training and 12 test images 1x8x8" in ready
    assert f"ready: fedstill site start {place}" in ready
    assert "nothing was asked yet" in run("site", "status", place)
    assert "is no folder of a deployment" in run("site", "status", str(tmp_path / "other"))
    assert "nothing runs in" in run("deploy", "status", str(out))
    assert "there is no folder" in run("deploy", "status", str(tmp_path / "other"))
    assert "give --address" in run("deploy", "make", str(recipe), "--out", str(tmp_path / "d"))


def test_whoever_watches_may_come_before_the_run(
    make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    consortium = make()
    run = consortium.out / "coordinator" / "run"
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            run.mkdir(exist_ok=True)
            Board("trial", run, {name: Row() for name in NAMES}, ended=True).write()

    monkeypatch.setattr(deploying, "time", SimpleNamespace(sleep=wait, time=time.time))
    words = ["deploy", "status", str(consortium.out), "--watch"]
    said = CliRunner().invoke(app, words).output
    assert "nothing runs in" in said and "north" in said and len(waited) == 2


def test_a_coordinator_that_was_killed_is_not_shown_as_running(
    make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    consortium = make()
    run = consortium.out / "coordinator" / "run"
    run.mkdir()
    Board("trial", run, {name: Row() for name in NAMES}, lambda: {*NAMES}, rounds=7).write()
    call = ["deploy", "status", str(consortium.out)]
    said = CliRunner().invoke(app, call).output
    assert "round 0/7" in said
    assert "killed" not in said and said.count("yes") == 3 and said.count("0 s ago") == 3
    later = time.time() + 90
    monkeypatch.setattr(deploying, "time", SimpleNamespace(time=lambda: later))
    said = " ".join(CliRunner().invoke(app, call).output.split())
    assert re.search(r"stopped or killed (89|90) s ago", said)
    assert "yes" not in said and said.count("90 s ago") + said.count("89 s ago") >= 4


def test_a_method_that_shows_examples_is_joined_only_on_purpose(make: Made) -> None:
    consortium = make(method="centralised")
    with pytest.raises(SiteError, match=r"shows training examples to others"):
        consortium.join("north")
    consortium.join("north", Policy(allow_examples=True))
    _, policy = folders.read_own(consortium.invitation("north"))
    assert policy == Policy(allow_examples=True)


def test_a_method_with_a_server_is_not_for_peers(tmp_path: Path) -> None:
    data = write_data(tmp_path)
    ports = {name: f"127.0.0.1:{free_port()}" for name in NAMES[:2]}  # the third cannot listen
    folders.make(recipe_for(data, method="desa"), tmp_path / "c", address="", addresses=ports)
    with pytest.raises(SiteError, match=r"this deployment has no coordinator"):
        coordinator.start(tmp_path / "c", print)
    place = tmp_path / "c" / "invitations" / "north"
    invited = sites.opened(place)
    sites.join(
        invited, data["north"], invited.deployment.number, Policy(), data_dir=None, device="cpu"
    )
    with pytest.raises(SiteError, match=r"no coordinator; use `fedstill peer start .*north`"):
        sites.start(place, print)
    with pytest.raises(BadValue, match=r"FedAvg has a server"):
        folders.make(recipe_for(data), tmp_path / "d", address="", addresses=ports)


def test_a_private_deployment_has_noise_of_keys_that_stay_at_the_sites(make: Made) -> None:
    changes = (
        "run.rounds=1", "privacy.epsilon=8", "data.mean=[0.5]", "data.std=[0.5]",
        "method.preset=small",
    )  # fmt: skip
    consortium = make(*changes)
    with pytest.raises(SiteError, match=r"spends epsilon = 8 .* this site allows 2"):
        consortium.join("north", Policy(most_epsilon=2))
    for name in NAMES:
        consortium.join(name, Policy(most_epsilon=8))
    folder = consortium.played()
    spent = rows(folder, "privacy.csv")
    assert {row["node"] for row in spent} == set(NAMES)
    summary = json.loads((folder / "summary.json").read_text())["privacy"]
    assert summary["epsilon_spent"] == pytest.approx(8, rel=0.01)
    assert not any("simulated" in line for line in summary["limits"])
    told = CliRunner().invoke(app, ["privacy", str(folder)]).output
    assert "computed in floating point" in " ".join(told.split()) and "simulated" not in told
    assert "what a site released too late is in its own ledger alone" in " ".join(told.split())
    status = ["site", "status", str(consortium.invitation("north"))]
    own = CliRunner().invoke(app, status).output
    assert re.search(r"epsilon = (8|7\.99\d) spent of 8 at delta = 1e-05, by this site's own", own)
    keys = {(consortium.invitation(name) / "run" / "noise.key").read_bytes() for name in NAMES}
    assert len(keys) == 3 and {len(key) for key in keys} == {32}


@pytest.mark.parametrize("labels", ["public", "private"])
def test_private_virtual_data_are_distilled_once_and_all_else_costs_nothing(
    make: Made, labels: str
) -> None:
    consortium = make(*VIRTUAL, f"privacy.labels={labels}")
    for name in NAMES:
        consortium.join(name, Policy(most_epsilon=8))
        folder = consortium.invitation(name)
        sites.check_noise(sites.opened(folder))
        assert not (folder / "run" / "virtual.safetensors").exists()  # a check spends nothing
    folder = consortium.played()
    spent = rows(folder, "privacy.csv")
    assert {(row["round"], row["node"]) for row in spent} == {("0", name) for name in NAMES}
    told = [row["text"] for row in rows(folder, "notes.csv")]
    assert any("virtual data, 2 images per class, which each site distils" in text for text in told)
    summary = json.loads((folder / "summary.json").read_text())["privacy"]
    assert summary["epsilon_spent"] == pytest.approx(8, rel=0.01)
    assert [*summary["epsilon_by_client"]] == [*NAMES]
    assert not any("simulated" in line for line in summary["limits"])
    place = consortium.invitation("north")
    status = CliRunner().invoke(app, ["site", "status", str(place)]).output
    assert re.search(
        r"epsilon = (8|7\.99\d) spent of 8 at delta = 1e-05, by this site's own", status
    )
    kept = place / "run" / "virtual.safetensors"
    first = kept.read_bytes()
    own, _ = folders.read_own(place)
    with sites.at_work(sites.opened(place), own) as again:  # as it is started again
        party = again.experiment.population.party("north")
        assert kept.read_bytes() == first and len(party.data) in (2, 4, 6)
        assert again.experiment.privacy is None and again.spent
    kept.unlink()
    with sites.at_work(sites.opened(place), own):  # with its key it is the very same release
        assert kept.read_bytes() == first
    (place / "run" / "noise.key").unlink()
    kept.unlink()
    with sites.at_work(sites.opened(place), own):
        assert kept.read_bytes() != first


def test_virtual_data_that_no_site_could_keep_private_are_not_made_a_deployment(make: Made) -> None:
    with pytest.raises(BadValue, match=r"warm_up"):
        make(*VIRTUAL[:-1], "data.virtual.start=real")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            ("method.start=noise",),
            r"data\.mean and data\.std are missing: sites would be normalised",
        ),
        (
            ("data.mean=[0.5]", "data.std=[0.5]"),
            r'its step synthesize: start = "real" shows private',
        ),
    ],
    ids=["by its own statistics", "from real images"],
)
def test_what_no_site_could_keep_private_is_not_made_a_deployment(
    make: Made, changes: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    with pytest.raises((RecipeError, BadValue), match=says):
        make("privacy.epsilon=8", *changes, method="feddm")
    assert not (tmp_path / "consortium").exists()


def test_a_site_that_could_not_keep_its_own_records_private_is_not_called_ready(make: Made) -> None:
    constants = ("data.mean=[0.5]", "data.std=[0.5]")
    consortium = make("privacy.epsilon=8", "privacy.delta=0.05", *constants)
    consortium.join("west")
    place = consortium.invitation("west")
    said = CliRunner().invoke(app, ["site", "check", str(place)])
    assert "ready" not in said.output
    assert "must be below one over the records of a client, but west has" in str(said.exception)
    assert not (place / "run").exists()


def test_a_full_disk_leaves_no_half_of_a_key_and_is_said_in_words(
    make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    consortium = make()
    folder = consortium.invitation("north")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(SiteError, match=r"cannot write to .*north: No space left .*make room"):
            consortium.join("north")
        with pytest.raises(SiteError, match=r"cannot write to .*north: No space left"):
            sites.noise_key(folder, "these data")
        with pytest.raises(SiteError, match=r"cannot write to .*other: No space left"):
            recipe = recipe_for(consortium.data)
            folders.make(recipe, consortium.out / "other", address="127.0.0.1:1")
    consortium.join("north")
    assert len(sites.noise_key(folder, "these data")) == 32


def test_a_flood_of_questions_does_not_fill_what_a_site_prints(make: Made) -> None:
    consortium, said = make(), list[str]()
    consortium.join("north")
    with sites.answering(consortium.invitation("north"), said.append) as (_, site):
        for _ in range(1000):
            site.answer(b"nothing that can be read")
    assert len(said) == 601 and said[-1].startswith("600 answers within a minute")
    assert len(sites.answers(consortium.invitation("north"))) == 1000


def test_what_is_printed_again_after_a_flood_begins_with_how_much_was_left_out() -> None:
    clock, said = [0.0], list[str]()
    some = sites.sparing(said.append, lambda: clock[0])
    for _ in range(1000):
        some("in the first minute")
    clock[0] = 61.0
    some("in the next")
    assert said[601:] == ["400 lines of answers were left out", "in the next"]


def test_a_run_that_begins_anew_or_with_other_data_has_other_noise(tmp_path: Path) -> None:
    first = sites.noise_key(tmp_path, "these data")
    assert (
        sites.noise_key(tmp_path, "these data") == first != sites.noise_key(tmp_path, "other data")
    )
    (tmp_path / "noise.key").unlink()  # as with all that was kept of the run
    assert sites.noise_key(tmp_path, "these data") != first


def test_a_private_site_does_not_start_from_a_copy_of_its_folder(tmp_path: Path) -> None:
    """Both would have the same noise and a ledger each; who asked both would learn twice."""
    first, copy, moved = (tmp_path / name for name in ("first", "copy", "moved"))
    first.mkdir()
    key = sites.noise_key(first, "these data")
    assert sites.noise_key(first, "these data") == key
    shutil.copytree(first, copy)
    with pytest.raises(SiteError, match=r"noise\.key is a copy: expected the file number \d+"):
        sites.noise_key(copy, "these data")
    first.rename(moved)
    assert sites.noise_key(moved, "these data") == key  # a folder may move
    (copy / "noise.place").unlink()  # a person has said that the other one is gone
    assert sites.noise_key(copy, "these data") == key
