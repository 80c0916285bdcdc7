"""Shadow federations end to end: controls are caught, a stopped audit goes on bit for bit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import fedstill
from fedstill.audit.membership import (
    LOCAL_CONTROL,
    ONLINE,
    REAL_CONTROL,
    Controls,
    Guessing,
    Subject,
    controls,
    membership,
)
from fedstill.audit.result import Finding, Result
from fedstill.audit.shadows import Shadowing, on_virtual_data, read, shadow, with_noise
from fedstill.core.errors import BadValue, RunFolderError
from fedstill.engines.execution import Execution
from fedstill.federation.budget import calibrated
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Population
from fedstill.methods import METHODS
from fedstill.methods.virtual import Virtual
from fedstill.models import ConvNet
from fedstill.privacy.privacy import Privacy

CPU = Execution(device="cpu", engine="in_process")


def population(records: int = 60) -> Population:
    """Two clients with noise and labels that mean little: what is learnt is learnt by heart."""
    rng = np.random.default_rng(0)

    def client() -> tuple[np.ndarray, ...]:
        labels = rng.integers(0, 3, records + 30)
        images = rng.normal(size=(records + 30, 1, 8, 8)).astype("float32")
        parts = images[:records], labels[:records], images[records:], labels[records:]
        return parts

    data = fedstill.clients({"a": client(), "b": client()}, normalise=None)
    return Population(data, partial(ConvNet, depth=2, width=8))


def asked(**changes: object) -> Shadowing:
    return Shadowing(("a",), **{"shadows": 6, "together": 3, "set_epochs": 2, **changes})


def fedavg(world: Population, **values: object) -> Subject:
    method = METHODS["fedavg"](**{"lr": 0.1, "batch_size": 16, **values})
    return Subject("fedavg", Experiment(method, world, rounds=2))


def best(result: Result, subject: str, view: str) -> Finding:
    return max(
        (f for f in result.findings if (f.subject, f.view) == (subject, view)),
        key=lambda found: found.auc or 0.0,
    )


def test_controls_are_caught_and_a_method_that_hardly_learns_is_not(tmp_path: Path) -> None:
    world = population()
    dull = fedavg(world, lr=1e-6)
    made, notes = controls(dull.experiment, Controls(40, 5, lr=0.05), ["a"])
    result = membership([*made, dull], CPU, asked(shadows=8, together=8), tmp_path / "audit")
    assert not notes
    assert not result.missed
    assert best(result, LOCAL_CONTROL, "own model").auc > 0.8
    sent = best(result, REAL_CONTROL, "set: nearest image")
    # Five of about ten images of each class were sent, and those of the others were not.
    assert sent.true_at_0_1_percent > 0.3
    silent = [f for f in result.findings if f.subject == "fedavg" and f.attack == ONLINE]
    assert {f.view for f in silent} == {"server's model", "own upload"}
    assert all(abs(f.auc - 0.5) < 0.12 and f.epsilon_at_least == 0.0 for f in silent)
    told = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert told["audit"] == "membership"
    assert told["controls_caught"] is True
    assert len((tmp_path / "audit" / "audit.csv").read_text().splitlines()) == 1 + len(
        told["findings"]
    )


def test_an_audit_stopped_between_groups_ends_as_one_that_was_not(tmp_path: Path) -> None:
    world = population()
    whole = membership([fedavg(world)], CPU, asked(), tmp_path / "whole")

    class Stopped(Exception):
        """As if the power went."""

    def stop(label: str, share: float) -> None:
        if share > 0.6:
            raise Stopped

    with pytest.raises(Stopped):
        membership([fedavg(world)], CPU, asked(), tmp_path / "broken", watch=stop)
    kept = tmp_path / "broken" / "shadows" / "00" / "shadows-0000-0002.npz"
    written = kept.stat().st_mtime_ns
    assert not (tmp_path / "broken" / "audit.json").exists()
    again = membership([fedavg(world)], CPU, asked(), tmp_path / "broken")
    assert kept.stat().st_mtime_ns == written
    assert again.as_dict() == whole.as_dict()


def test_a_torn_file_of_shadows_is_played_again(tmp_path: Path) -> None:
    torn = tmp_path / "shadows-0000-0002.npz"
    torn.write_bytes(b"PK\x03\x04 cut off")
    assert read(torn) is None


def test_another_audit_does_not_go_on_in_the_folder(tmp_path: Path) -> None:
    world = population()
    plan = {"fedavg": "one digest"}
    membership([fedavg(world)], CPU, asked(), tmp_path, digests=plan)
    with pytest.raises(RunFolderError, match="other digests"):
        membership([fedavg(world)], CPU, asked(), tmp_path, digests={"fedavg": "another"})
    with pytest.raises(RunFolderError, match="other settings"):
        membership([fedavg(world)], CPU, asked(shadows=5), tmp_path, digests=plan)


def test_a_shadow_holds_its_half_of_the_pool_and_all_the_rest() -> None:
    world = population()
    plan = asked(records=40)
    made = shadow(fedavg(world).experiment, plan, 3)
    inside = plan.inside(3, "a", 40)
    assert len(made.population.party("a").data) == 20 + int(inside.sum())
    assert len(made.population.party("b").data) == 60
    other = shadow(fedavg(world).experiment, asked(records=40, shadows=64), 3)
    assert made.seed == other.seed  # more shadows leave the first ones as they are
    rows = made.population.party("a").data.parts[0].rows
    assert rows.equal(other.population.party("a").data.parts[0].rows)


def test_peers_models_and_sets_are_looked_at_too(tmp_path: Path) -> None:
    world = population(40)
    kind = METHODS["desa"]
    method = kind(**{**kind.presets["small"], "steps": 2})
    subject = Subject("desa", Experiment(method, world, rounds=1))
    result = membership([subject], CPU, asked(shadows=4, together=4), tmp_path)
    views = {found.view for found in result.findings}
    assert {"own model", "model of b", "set: nearest image", "set: mean embedding"} <= views
    assert "set: network trained on it" in views


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Shadowing(()), "name at least one"),
        (lambda: Shadowing(("a",), shadows=2), "at least 4"),
        (lambda: Guessing(share_in=0.0), "above 0"),
        (lambda: Guessing(share_in=0.8, share_out=0.8), "at most 1"),
    ],
)
def test_audits_that_make_no_sense_are_refused(make, words: str) -> None:
    with pytest.raises(BadValue, match=words):
        make()


def test_somebody_unknown_or_with_too_few_records_is_refused(tmp_path: Path) -> None:
    world = population(30)
    with pytest.raises(BadValue, match="unknown client 'c'"):
        membership([fedavg(world)], CPU, Shadowing(("c",)), tmp_path / "c")
    few = population(12)
    with pytest.raises(BadValue, match="12 training examples; an audit needs at least 20"):
        membership([fedavg(few)], CPU, asked(), tmp_path / "few")


def test_a_ledger_is_refuted_by_a_bound_above_it_and_controls_are_left_out() -> None:
    above = Finding("fedavg", "own upload", ONLINE, epsilon_at_least=2.0, epsilon_ledger=1.0)
    below = Finding("feddm", "own upload", ONLINE, epsilon_at_least=0.5, epsilon_ledger=1.0)
    made = Finding("noiseless", "sums", ONLINE, control=True, epsilon_at_least=5.0,
                   epsilon_ledger=1.0, caught=True)  # fmt: skip
    assert Result("canaries", [above, below, made]).refuted == [above]


def test_private_shadows_share_their_noise_and_stay_below_the_ledger(tmp_path: Path) -> None:
    kind = METHODS["feddm"]
    values = {**kind.presets["small"], "start": "noise", "steps": 2, "server_epochs": 1}
    private = Experiment(
        kind(**values), population(60), rounds=1, privacy=Privacy(epsilon=10.0, releases=2)
    )
    plan = asked(shadows=4, together=4)
    first = calibrated(shadow(private, plan, 0), CPU)
    made = with_noise([shadow(private, plan, number) for number in (1, 2)], first, CPU)
    assert all(one.privacy.plan.noise == first.privacy.plan.noise for one in made)
    subject = Subject("feddm", private, epsilon=10.0)
    result = membership([subject], CPU, plan, tmp_path)
    assert {found.epsilon_ledger for found in result.findings} == {10.0}
    assert not result.refuted
    assert "set: nearest image" in {found.view for found in result.findings}


def test_shadows_learn_from_what_they_distil_and_spend_nothing_more() -> None:
    virtual = Virtual(per_class=2, warm_up_steps=2, start="noise", augmentation="none")
    world, budget = population(), Privacy(4.0, 1e-3, releases=1)
    whole = Experiment(METHODS["fedavg"](), world, rounds=1, privacy=budget)
    shadows = [shadow(whole, asked(), number) for number in (0, 1)]
    made = on_virtual_data(shadows, shadows[0], virtual, CPU)
    for each in made:
        assert each.privacy is None
        # Two images of each of three classes, in place of the records.
        assert [len(each.population.party(client).data) for client in ("a", "b")] == [6, 6]
    first, second = (each.population.party("a").data.all().x for each in made)
    assert not first.equal(second), "each distils its own half"
