"""Which loops run as one stack, seen without a look at their shapes, and which cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstill
from fedstill.core import SGD, Batch, Loop, Model, Weights
from fedstill.core.loop import Descent
from fedstill.core.seeds import generator
from fedstill.engines.loops.stacks import begin_as_one, few_convolutions, stacked
from fedstill.models import MLP, AlexNet, Conv4, ResNet18

MODEL = MLP((2,), 2, hidden=())
SHAPE = (3, 32, 32)
START = {"head.weight": torch.randn(2, 2, generator=generator(0, "stacks"))}


def objective(model: Model, weights: Weights, batch: Batch) -> Tensor:
    return weights["head.weight"].square().sum()


def loop(start: Weights = START, lr: float = 0.1, **given: Tensor) -> Loop[tuple[Weights, None]]:
    return Loop(Descent(objective, MODEL, SGD(lr)), (start, None), given, [])


def test_loops_from_a_common_start_begin_as_one() -> None:
    assert begin_as_one(loop(), loop())


def test_loops_that_learn_otherwise_or_elsewhere_do_not() -> None:
    assert not begin_as_one(loop(), loop(lr=0.2))
    assert not begin_as_one(loop(), loop({"head.weight": START["head.weight"].clone()}))
    assert not begin_as_one(loop(near=torch.zeros(1)), loop(near=torch.zeros(2)))
    assert not begin_as_one(loop(), loop(near=torch.zeros(1)))


@pytest.mark.parametrize(
    ("model", "few"),
    [(AlexNet(SHAPE, 10), True), (Conv4(SHAPE, 10), True), (ResNet18(SHAPE, 10), False)],
)
def test_kernels_are_compiled_for_networks_with_few_kinds_of_convolutions(
    model: Model, few: bool
) -> None:
    """ResNet-18 has eleven: the first, one of 64 channels, and three for each later width."""
    weights = model.init(0).values()
    assert few_convolutions([stacked([tensor] * 2) for tensor in weights]) == few


class Undecided(nn.Module):
    """A network whose way rests on what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1) if x.mean() > 0 else -x.flatten(1))


class Restless(fedstill.FedAvg):
    """Its loss draws random numbers."""

    def objective(self, model: Model, weights: Weights, batch: Batch, *, start: Weights) -> Tensor:
        drawn = Batch(batch.x * torch.rand(()), batch.y)
        return super().objective(model, weights, drawn, start=start)


class Packed(nn.Module):
    """A network of sequences, each as long as it is without its padding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 4, padding_idx=0)
        self.reader = nn.GRU(4, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(1).clamp(min=1).cpu()
        read = self.tokens(x)
        packed = nn.utils.rnn.pack_padded_sequence(read, lengths, True, enforce_sorted=False)
        return self.head(self.reader(packed)[1][-1])


def of_two_clients(method: fedstill.FedAvg, network: nn.Module) -> fedstill.Experiment:
    numbers = np.random.default_rng(0)
    images, labels = numbers.normal(size=(60, 1, 2, 2)).astype("float32"), np.arange(60) % 2
    data = fedstill.split(images, labels, partition=fedstill.Dirichlet(2, alpha=100.0))
    return fedstill.Experiment(method, fedstill.Population(data, network), rounds=1)


def test_a_loss_that_draws_is_told_where_to_draw() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(fedstill.FedstillError, match="draws random numbers; draw them by purpose"):
        fedstill.run(
            of_two_clients(Restless(lr=0.1), network),
            execution=fedstill.Execution(device="cpu", engine="batched"),
        )


def test_a_network_that_asks_for_values_is_told_which_engine_trains_it() -> None:
    experiment = of_two_clients(fedstill.FedAvg(lr=0.1), Undecided())
    with pytest.raises(fedstill.FedstillError, match='choose engine = "in_process"'):
        fedstill.run(experiment, execution=fedstill.Execution(device="cpu", engine="batched"))
    fedstill.run(experiment, execution=fedstill.Execution(device="cpu", engine="in_process"))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_packed_sequences_in_a_stack_are_refused_with_the_engine_that_trains_them() -> None:
    numbers = np.random.default_rng(0)
    sets = {name: (numbers.integers(0, 9, (20, 6)), np.arange(20) % 2) for name in ("a", "b")}
    data = fedstill.clients(sets, test_share=0.2, normalise=None)
    population = fedstill.Population(data, Packed)
    experiment = fedstill.Experiment(fedstill.FedAvg(lr=0.1), population, rounds=1)
    words = 'failed on a, b .*packed sequences.*choose engine = "in_process"'
    with pytest.raises(fedstill.FedstillError, match=words):
        fedstill.run(experiment, execution=fedstill.Execution(device="cpu", engine="batched"))
    fedstill.run(experiment, execution=fedstill.Execution(device="cpu", engine="in_process"))
