"""Every method with a budget either runs with rows in the ledger, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedstill.core import Data, Method, Node, Weights, trees
from fedstill.core.data import Pool
from fedstill.core.errors import BadValue
from fedstill.core.release import Spending, Terms
from fedstill.engines.execution import Execution
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.budget import planned
from fedstill.methods import METHODS
from fedstill.models import MLP, ConvNet
from fedstill.parts.learning import private_training
from fedstill.privacy.ledger import composed
from fedstill.privacy.privacy import Privacy
from fedstill.privacy.summary import by_node
from fedstill.testing import worlds

BUDGET = Privacy(4.0, 1e-3, releases=4, gradient_clip=0.5)
MATCHING = {"start": "noise", "steps": 6}
VALUES: dict[str, dict[str, Any]] = {
    "feddm": MATCHING,
    # Adam's first step is as long as its rate, so a gradient that only rounding keeps from zero
    # would move a weight by 0.05 this way on one machine and that way on another; and matching at
    # every depth of a tiny network ends elsewhere if convolutions differ by 1e-5.
    "feddualmatch": {**MATCHING, "tuning": "sgd", "outputs": "features"},
    "fedlgd": {"start": "noise", "local_steps": 4},
    "desa": {"steps": 4, "batch_size": 64},
}
# Steps of clients whose losses are of what was released, or of public data.
MAY_TELL = {
    "feddm": ["synthesize"],
    "feddualmatch": ["synthesize"],
    "fedlgd": ["warm_up", "update"],
    "desa": ["synthesize"],
    "fccl": ["learn"],
}
STACKED = {"feddm", "feddualmatch", "desa", "fedavg", "fedgen", "fedproto", "scaffold", "vhl"}
REFUSED = {"centralised": "hand_over"}  # the step that would hand records over
ON_HOST = Execution(device="cpu")
WHOLE = 64  # a batch that holds everything: rate 1, so that no accountant is needed


def private(name: str) -> Method:
    kind = METHODS[name]
    values = {**kind.presets.get("small", {})}
    if "batch_size" in kind.__dataclass_fields__:
        values["batch_size"] = WHOLE
    if "base" in kind.__dataclass_fields__:
        values["base"] = METHODS["fedavg"](lr=0.1, batch_size=WHOLE)
    return kind(**{**values, **VALUES.get(name, {})})


@pytest.mark.parametrize("name", sorted({*METHODS} - {*REFUSED}))
def test_a_method_with_a_budget_spends_it_in_every_engine_alike(name: str) -> None:
    world = worlds.pictures()
    ended = []
    for engine in (InProcess, Batched) if name in STACKED else (InProcess,):
        played, log = worlds.played(private(name), world, 2, engine, privacy=BUDGET)
        spent = {node: composed(rows, 1e-3) for node, rows in by_node(log.privacy).items()}
        assert spent == {client: pytest.approx(4.0) for client in world.clients}
        told = {row.step for row in log.metrics if row.name == "loss" and row.node == "c1"}
        assert told <= {"evaluate", *MAY_TELL.get(name, ())}, "a loss on records was told"
        ended.append(
            [
                tensor
                for node in ("server", "c1")
                if played.states.get(node) is not None
                for tensor in trees.tensors(played.states[node])
            ]
        )
    for one, other in zip(ended[0], ended[-1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_method_that_hands_records_over_is_refused_by_the_name_of_its_step(name: str) -> None:
    with pytest.raises(BadValue, match=f"cannot be private as it stands: its step {REFUSED[name]}"):
        worlds.played(METHODS[name](), worlds.pictures(), 1, privacy=BUDGET)


@pytest.mark.parametrize("name", sorted({*METHODS} - {*REFUSED}))
def test_the_noise_is_found_without_a_network_working_on_more_than_one_example(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, true = [0], ConvNet.stages

    def stages(self: ConvNet, weights: Weights, x: torch.Tensor) -> list[torch.Tensor]:
        seen.append(len(x))
        return true(self, weights, x)

    monkeypatch.setattr(ConvNet, "stages", stages)
    uses = planned(worlds.experiment(private(name), worlds.pictures(), 2, privacy=BUDGET), ON_HOST)
    assert all(uses.values()) and max(seen) <= 1


def test_batch_norm_mixes_records_and_is_refused() -> None:
    with pytest.raises(BadValue, match="normalises by the whole batch"):
        worlds.played(private("fedavg"), worlds.pictures(norm="batch"), 1, privacy=BUDGET)


def test_the_sample_of_a_step_is_drawn_record_by_record() -> None:
    """Sizes of Poisson samples have the mean qn and the variance q(1 - q)n."""
    model, count = MLP((4,), 3), 200
    data = Data.of(torch.zeros(count, 4), torch.arange(count) % 3)
    node: Node[None] = Node("c0", 1, None, model=model, data=data)
    row = Spending(1, "", "c0", "DP-SGD", 1.0, 0.1, 1)
    node.seal(Terms(1.0, 1.0, 1, 1.0, None), lambda round, step, use, earlier: row)
    batches, _ = private_training(node, model, model.init(0), 20, steps=400)
    sizes = torch.tensor([float((batches[step].share > 0).sum()) for step in range(400)])
    assert sizes.mean() == pytest.approx(20.0, abs=1.0)  # four deviations of the mean
    assert sizes.var() == pytest.approx(18.0, rel=0.3)
    share = batches[0].share
    assert share[share > 0].unique().tolist() == [pytest.approx(1 / 20)]


def test_a_sample_holds_the_records_that_were_drawn_and_their_labels() -> None:
    model, count = MLP((4,), 3), 60
    x, y = torch.arange(240.0).view(count, 4), torch.arange(count) % 3
    node: Node[None] = Node("c0", 1, None, model=model, data=Data.of(x, y))
    row = Spending(1, "", "c0", "DP-SGD", 1.0, 0.1, 1)
    node.seal(Terms(1.0, 1.0, 1, 1.0, None), lambda round, step, use, earlier: row)
    batches, _ = private_training(node, model, model.init(0), 12, steps=3)
    for step in range(3):
        drawn = node.secret("samples").uniform(count, step) < 12 / count
        examples, share = batches[step].examples, batches[step].share
        assert torch.equal(examples.x[share > 0], x[drawn])
        assert torch.equal(examples.y[share > 0], y[drawn])
    assert torch.equal(batches.ahead(1, 2).examples.x[1], batches[2].examples.x)  # type: ignore[union-attr]


def test_samples_of_some_steps_made_together_are_those_of_each_step() -> None:
    model = MLP((4,), 3)
    data = Data.of(torch.arange(240.0).view(60, 4), torch.arange(60) % 3)
    node: Node[None] = Node("c0", 1, None, model=model, data=data)
    row = Spending(1, "", "c0", "DP-SGD", 1.0, 0.1, 1)
    node.seal(Terms(1.0, 1.0, 1, 1.0, None), lambda round, step, use, earlier: row)
    batches, _ = private_training(node, model, model.init(0), 6, steps=5)
    some = batches.ahead(1, 3)
    assert some is not None
    for place in range(3):
        one = trees.map_tensors(lambda tensor, at=place: tensor[at], some)
        for mine, theirs in zip(trees.tensors(one), trees.tensors(batches[1 + place]), strict=True):
            assert torch.equal(mine, theirs)


def test_around_private_images_is_the_black_of_their_own_part() -> None:
    model, white = ConvNet((1, 16, 16), 3, width=4), torch.full((30, 1, 16, 16), 255).byte()
    half, quarter, eighth = (torch.full((1, 1, 1), part) for part in (0.5, 0.25, 0.125))
    laws = ((half, half), (quarter, eighth))
    pools = [Pool(white, torch.full((30,), at), *law) for at, law in enumerate(laws)]
    node: Node[None] = Node("c0", 1, None, model=model, data=pools[0].all() + pools[1].all())
    row = Spending(1, "", "c0", "DP-SGD", 1.0, 0.1, 1)
    node.seal(Terms(1.0, 1.0, 1, 1.0, None), lambda round, step, use, earlier: row)
    batches, _ = private_training(node, model, model.init(0), 40, steps=1, views="black_crop_flip")
    (x, y), share = batches[0].examples, batches[0].share
    for at, seen in ((0, {-1.0, 1.0}), (1, {-2.0, 6.0})):
        assert set(x[(share > 0) & (y == at)].unique().tolist()) == seen
    far, _ = private_training(
        node, model, model.init(0), 40, steps=1, views="black_crop_flip", shift=15
    )
    assert (far[0].examples.x < 0).sum() > 2 * (x < 0).sum()  # more of it is in sight


def test_noise_of_a_step_has_the_deviation_of_the_mechanism() -> None:
    model = MLP((4,), 3, hidden=(200,))
    data = Data.of(torch.zeros(50, 4), torch.arange(50) % 3)
    node: Node[None] = Node("c0", 1, None, model=model, data=data)
    row = Spending(1, "", "c0", "DP-SGD", 3.0, 0.1, 1)
    node.seal(Terms(1.0, 0.5, 1, 3.0, None), lambda round, step, use, earlier: row)
    batches, _ = private_training(node, model, model.init(0), 5, steps=1)
    sample = batches[0]
    noise = torch.cat([steps.flatten() * sample.grid for steps in sample.noise.values()])
    assert noise.std() == pytest.approx(3.0 * 0.5 / 5, rel=0.05)  # sigma · clip / expected
