"""Federated averaging by pfl-research's simulation, in one process."""

from __future__ import annotations

import types

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn

from work import Rounds, Work, accuracy, load, network

VERSIONS = ("pfl", "torch")


class Clock(TrainingProcessCallback):
    """Takes the times of central iterations."""

    def __init__(self, rounds: Rounds):
        self.rounds = rounds

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.rounds.begin()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.rounds.end()
        if len(self.rounds.seconds) < self.rounds.work.rounds:
            self.rounds.begin()
        return False, Metrics()


def run(work: Work) -> dict[str, object]:
    assert work.data is not None, "it has no empty step"
    np.random.seed(work.seed)
    torch.manual_seed(work.seed)
    examples, made = load(work.data, work.device), network(work)
    people = FederatedDataset(
        lambda user: Dataset(list(examples.of(user)), user_id=str(user)),
        get_user_sampler("random", list(range(work.clients))),
    )
    made.loss = types.MethodType(loss, made)  # where pfl looks for them
    made.metrics = types.MethodType(metrics, made)
    model = PyTorchModel(made, torch.optim.SGD, torch.optim.SGD(made.parameters(), 1.0))
    rounds = Rounds(work)
    plan = NNAlgorithmParams(
        central_num_iterations=work.rounds, evaluation_frequency=work.rounds + 1,
        train_cohort_size=work.awake, val_cohort_size=0,
    )  # fmt: skip
    FederatedAveraging().run(
        algorithm_params=plan,
        backend=SimulatedBackend(training_data=people, val_data=people),
        model=model,
        model_train_params=NNTrainHyperParams(work.batch, work.epochs, work.lr),
        model_eval_params=NNEvalHyperParams(local_batch_size=1000),
        callbacks=[Clock(rounds)],
        send_metrics_to_platform=False,
    )
    return rounds.result(accuracy(made.eval(), work))


def loss(self: nn.Module, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
    return nn.functional.cross_entropy(self(x), y)


@torch.no_grad()
def metrics(
    self: nn.Module, x: torch.Tensor, y: torch.Tensor, eval: bool = True
) -> dict[str, Weighted]:
    summed = nn.functional.cross_entropy(self(x), y, reduction="sum").item()
    return {"loss": Weighted(summed, len(y))}
