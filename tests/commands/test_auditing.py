"""fedstill audit, as one types it."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedstill.audit import canaries, membership
from fedstill.commands import progress
from small_recipes import CLIENTS, fedstill, write_client, write_recipe

MEMBERSHIP = ("--shadows", 4, "--together", 2, "--no-controls", "--quiet")


def test_the_mechanisms_are_audited_and_their_copies_caught(tmp_path: Path) -> None:
    out = tmp_path / "audit"
    said = fedstill("audit", "mechanism", "--epsilon", 4, "--trials", 4000, "--out", out)
    assert said.code == 0
    assert "class sums" in said.out and "DP-SGD" in said.out
    lines = said.out.splitlines()
    assert [line.split()[-2:] for line in lines if "eps ≥" in line] == [["≥", "ledger"]] * 4
    assert all(line.split()[-1] == "4" for line in lines if "release at epsilon" in line)
    assert max(map(len, lines)) <= 80  # bounds stand beside what was seen in a narrow terminal too
    told = json.loads((out / "audit.json").read_text())
    assert told["controls_caught"] and not told["ledger_refuted"]
    assert (out / "curves.png").exists()
    assert (out / "audit.csv").read_text().startswith("subject,view,attack,")


@pytest.mark.parametrize(
    ("attack", "options", "then"),
    [
        (membership, MEMBERSHIP, "go on with the same command"),
        (canaries, ("--canaries", 20, "--quiet"), "begin again with the same command"),
    ],
)
def test_an_audit_that_is_stopped_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: ModuleType, options: Any, then: str
) -> None:
    def stopped(*given: object, **options: object) -> None:
        raise KeyboardInterrupt

    name = attack.__name__.rpartition(".")[2]
    monkeypatch.setattr(attack, name, stopped)
    said = fedstill("audit", name, write_recipe(tmp_path), *options, "--out", tmp_path / "audit")
    assert said.code == 130 and f"stopped; {then}" in said.err


def test_a_recipe_is_attacked_and_the_same_command_again_gives_the_same(tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path, run={"rounds": 1}), tmp_path / "audit"
    first = fedstill("audit", "membership", recipe, "--client", "north", *MEMBERSHIP, "--out", out)
    assert first.code == 0
    assert "server's model" in first.out and "own upload" in first.out
    before = (out / "audit.json").read_bytes()
    again = fedstill("audit", "membership", recipe, "--client", "north", *MEMBERSHIP, "--out", out)
    assert again.code == 0
    assert (out / "audit.json").read_bytes() == before
    markdown = fedstill(
        "audit", "membership", recipe, "--client", "north", *MEMBERSHIP, "--out", out,
        "--format", "markdown",
    )  # fmt: skip
    assert markdown.out.startswith("| audited | seen | AUC |")
    other = fedstill(
        "audit", "membership", recipe, "method.lr=0.2", "--client", "north", *MEMBERSHIP,
        "--out", out,
    )  # fmt: skip
    assert other.code == 2
    assert "holds an audit with other digests" in other.err


def test_an_audit_without_a_terminal_says_how_far_it_is_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = write_recipe(tmp_path, run={"rounds": 1}), tmp_path / "audit"
    command = ("audit", "membership", recipe, "--client", "north", *MEMBERSHIP[:-1])
    assert "%" not in fedstill(*command, "--out", out).err  # it is soon over
    monkeypatch.setattr(progress, "LINES_APART_AT_MOST", 0.0)
    said = fedstill(*command, "--out", tmp_path / "again", "--format", "json")
    lines = [line for line in said.err.splitlines() if line.startswith("fedstill: fedavg: ")]
    assert lines[0] == "fedstill: fedavg: 0 %" and lines[-1].startswith("fedstill: fedavg: 100 %")
    assert json.loads(said.out)["findings"]
    for quiet in (("--quiet", *command), (*command, "--quiet")):
        assert (
            "fedavg: " not in fedstill(*quiet, "--out", tmp_path / str(quiet.index("--quiet"))).err
        )


def test_canaries_are_planted_beside_controls(tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path, run={"rounds": 1}), tmp_path / "audit"
    for number, name in enumerate(CLIENTS):
        write_client(tmp_path / f"{name}.npz", number, train=60)
    said = fedstill("audit", "canaries", recipe, "--quiet", "--out", out)
    assert said.code in (0, 1)  # whether so small a control is caught is a matter of luck
    told = json.loads((out / "audit.json").read_text())
    subjects = {row["subject"] for row in told["findings"]}
    assert subjects == {"control: local training", "control: raw upload", "fedavg"}
    assert (said.code == 1) == (not told["controls_caught"])


def test_what_cannot_be_audited_is_refused_in_a_sentence(tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path), ("--out", tmp_path / "audit")
    unknown = fedstill("audit", "membership", recipe, "--client", "nort", *MEMBERSHIP, *out)
    assert unknown.code == 2
    assert not (tmp_path / "audit").exists()
    assert "unknown client 'nort'; did you mean 'north'?" in unknown.err
    few = fedstill("audit", "canaries", recipe, *out)
    assert few.code == 2
    assert "fewer than 20 canaries prove nothing" in few.err
    wrong = fedstill("audit", "mechanism", "--epsilon", 0, *out)
    assert wrong.code == 2
    assert "epsilon = 0: must be above 0" in wrong.err


def test_shadows_distil_virtual_data_first_and_canaries_are_refused(tmp_path: Path) -> None:
    virtual = {"per_class": 1, "warm_up_steps": 1}
    recipe = write_recipe(tmp_path, data={"virtual": virtual})
    asked = (*MEMBERSHIP, "--no-controls", "--out", tmp_path / "audit")
    said = fedstill("audit", "membership", recipe, *asked)
    assert said.code == 0, said.err
    assert "server's model" in said.out
    refused = fedstill("audit", "canaries", recipe, "--out", tmp_path / "other")
    assert refused.code == 2
    assert "data.virtual makes sets before the run, in which no canaries are planted" in refused.err
