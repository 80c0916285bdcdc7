"""Canaries in one run: seen where there is no noise, below the ledger where there is."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedstill
from fedstill.audit.canaries import (
    DIRAC,
    NO_NOISE,
    RELEASED_SUMS,
    Canaries,
    canaries,
    mislabelled,
    with_witness,
)
from fedstill.audit.membership import Subject
from fedstill.audit.witness import PLACES, STEEP, Witness, dirac_canaries
from fedstill.core.errors import BadValue
from fedstill.engines.execution import Execution
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Population
from fedstill.methods import METHODS
from fedstill.models import MLP, ConvNet, Module
from fedstill.privacy.privacy import Privacy

CPU = Execution(device="cpu", engine="in_process")


def population(records: int = 160, network: object = MLP) -> Population:
    rng = np.random.default_rng(0)

    def client() -> tuple[np.ndarray, ...]:
        labels = rng.integers(0, 3, records + 9)
        images = rng.normal(size=(records + 9, 1, 8, 8)).astype("float32")
        images += labels[:, None, None, None]
        return images[:records], labels[:records], images[records:], labels[records:]

    data = fedstill.clients({"a": client(), "b": client()}, normalise=None)
    return Population(data, network)


def test_a_dirac_canary_moves_its_own_place_alone() -> None:
    model = Witness.of(MLP((5,), 3, hidden=(4,)), 6)
    weights = model.init(0)
    batch = dirac_canaries(model, 6, "cpu").all()

    def loss(value: dict) -> torch.Tensor:
        return cross_entropy(model(value, batch.x[2:3]), batch.y[2:3])

    slope = torch.func.grad(loss)(weights)
    # Three classes alike: the first one's probability is a third.
    assert slope[PLACES].tolist() == pytest.approx([0, 0, STEEP / 3, 0, 0, 0])
    assert all(not slope[name].any() for name in weights if name != PLACES)


def test_on_ordinary_inputs_the_network_with_places_is_the_one_without() -> None:
    base = MLP((5,), 3, hidden=(4,))
    model, x = Witness.of(base, 6), torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    weights = model.init(3)
    torch.testing.assert_close(model(weights, x), base(base.init(3), x))


class Own(nn.Module):
    """A network as a user writes it, whose norm and head have names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.LayerNorm(6), nn.Dropout(0.1))
        self.fc = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.fc(self.body(x))
        return made


def test_a_users_module_has_places_for_canaries_too() -> None:
    base = Module((1, 8, 8), 3, Own)
    model, x = Witness.of(base, 6), torch.ones(2, 1, 8, 8)
    weights = model.init(3)
    torch.testing.assert_close(model(weights, x), base(base.init(3), x))
    assert model.draws and model.feature_width == 6
    assert (model.head_names, model.norm_names) == (base.head_names, base.norm_names)
    method = METHODS["fedavg"](lr=0.1, batch_size=400, round_steps=2)
    experiment = Experiment(method, population(20, Own), rounds=1)
    planted = with_witness(experiment, Canaries("a", 20)).experiment
    places = fedstill.run(planted, execution=CPU).model().weights[PLACES]
    assert places.shape == (20,) and places.any()


def test_canaries_have_wrong_labels_and_half_of_them_are_there() -> None:
    experiment = Experiment(METHODS["fedavg"](), population())
    planted = mislabelled(experiment, Canaries("a", 60))
    own = experiment.population.party("a").data
    held = planted.experiment.population.party("a").data
    assert len(held) == len(own) - 60 + int(planted.inside.sum())
    assert 15 < int(planted.inside.sum()) < 45
    truth = {tuple(x.flatten().tolist()): int(y) for x, y in zip(*own.all(), strict=True)}
    pairs = zip(*planted.canaries, strict=True)
    assert all(truth[tuple(x.flatten().tolist())] != int(y) for x, y in pairs)
    assert len(planted.experiment.population.party("b").data) == 160


def test_without_noise_released_sums_tell_every_canary_and_with_noise_no_more_than_the_ledger(
    tmp_path: Path,
) -> None:
    method = METHODS["feddm"](
        per_class=2, start="noise", steps=4, server_epochs=1, augmentation="none",
        server_augmentation="none",
    )  # fmt: skip
    world = population(160, partial(ConvNet, depth=2, width=8))
    private = Experiment(method, world, rounds=1, privacy=Privacy(epsilon=4.0, clip=6.0))
    subject = Subject("feddm", private, epsilon=4.0)
    result = canaries([subject], CPU, Canaries("a", 60, share_in=0.25, share_out=0.25), tmp_path)
    white = {f.control: f for f in result.findings if f.view == RELEASED_SUMS}
    assert white[True].auc > 0.95
    assert white[True].caught
    assert white[True].subject.startswith(NO_NOISE)
    assert white[False].epsilon_at_least <= 4.0
    assert white[False].auc < white[True].auc
    assert not result.missed
    assert not result.refuted
    assert (tmp_path / "audit.json").exists()


def test_dirac_canaries_see_missing_noise_in_private_gradients(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    method = METHODS["fedavg"](lr=0.1, batch_size=400, round_steps=2)  # whole data: closed form
    private = Experiment(method, population(40), rounds=2, privacy=Privacy(epsilon=4.0))
    planted = with_witness(private, Canaries("a", 100))
    assert len(planted.experiment.population.party("a").data) == 40 + int(planted.inside.sum())
    subject = Subject("fedavg", private, epsilon=4.0)
    asked = Canaries("a", 20, share_in=0.5, share_out=0.5)
    result = canaries([subject], CPU, asked, tmp_path)
    white = {f.control: f for f in result.findings if f.view == DIRAC}
    assert white[True].auc == 1.0
    assert white[True].caught
    assert white[False].epsilon_at_least <= 4.0
    assert not result.missed


def test_without_privacy_models_and_uploads_are_asked_and_nothing_is_promised(
    tmp_path: Path,
) -> None:
    method = METHODS["fedavg"](lr=0.1, epochs=2, batch_size=16)
    subject = Subject("fedavg", Experiment(method, population(60), rounds=1))
    result = canaries([subject], CPU, Canaries("a", 20), tmp_path)
    assert {f.view for f in result.findings} == {"server's model", "own upload"}
    assert all(f.epsilon_ledger is None and not f.refutes for f in result.findings)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Canaries("z"), "unknown client 'z'; known: a, b"),
        (Canaries("a", 100), "plant at most half as many, e.g. --canaries 80"),
    ],
)
def test_canaries_that_cannot_be_planted_are_refused(
    asked: Canaries, words: str, tmp_path: Path
) -> None:
    subject = Subject("fedavg", Experiment(METHODS["fedavg"](), population(), rounds=1))
    with pytest.raises(BadValue, match=words):
        canaries([subject], CPU, asked, tmp_path)
    with pytest.raises(BadValue, match="fewer than 20"):
        replace(asked, number=5)
