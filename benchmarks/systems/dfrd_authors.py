"""A round of DFRD's server by its authors' ServerManager, on the clients of `dfrd_beside`.

Their Update_generator and Update_global_model are unchanged. Their program around it needs MPI
and folders of data; here the server is given what it would have collected.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstill import Execution
from fedstill.engines.execution import engine_of
from systems import foreign
from systems.dfrd_beside import experiment, sent
from systems.pfllib import seeded
from work import Rounds, Work, accuracy

VERSIONS = ("torch", "numpy")
UNUSED = ("pandas", "mpi4py", "setproctitle", "sklearn.utils")
NETWORKS = {
    "model_type": "Lenet", "generator_model_type": "ACGAN", "latent_dim": 100,
    "noise_label_combine": "mul", "model_norm": "bn", "scale": True, "mask": False,
    "global_model_rate": 1.0,
}  # fmt: skip
DEFAULTS = {
    "n_class": 10, "reload_generator": False, "gen_lr": 2e-4, "gen_I": 5, "b1": 0.5, "b2": 0.999,
    "latent_dim": 100, "temp": 10, "agg_strategy": "1", "tran_strategy": "1", "gamma": 1.0,
    "noise_label_combine": "mul", "beta_tran": 1.0, "beta_div": 1.0, "beta_ey": 1.0, "alpha": 0.5,
    "lambda_": 0.5, "mask_ensemble_gen": False, "mask_ensemble_glo": False, "global_lr": 0.01,
    "global_I": 1, "step": 1,
}  # fmt: skip


class Scaler(nn.Module):
    """Of a file that the public copy leaves out: activations by the width's share in training."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return x / self.rate if self.training else x


def run(work: Work) -> dict[str, object]:
    home = foreign.folder(work, "FL", "DFRD", "LightFed")
    with foreign.searched(home, home / "experiments" / "horizontal" / "DFRD"):
        missing: Any = ModuleType("experiments.modules")
        missing.Scaler = Scaler
        sys.modules["experiments.modules"] = missing
        absent = foreign.stood_in(UNUSED)
        manager: Any = __import__("manager")
        return {**taught(manager, work), "stood_in": absent}


def taught(manager: Any, work: Work) -> dict[str, object]:
    made = experiment(work)
    grey = next(iter(made.networks)).shape[0] == 1
    told = {**NETWORKS, "data_set": "MNIST" if grey else "SVHN"}  # their networks go by names
    execution = Execution("in_process", work.device)
    with execution.applied(made.networks):
        ups = [message for _, message in sorted(sent(engine_of(made, execution)).items())]
    seeded(work.seed)
    teachers = [network(manager.model_pull(told), up.base.weights, work) for up in ups]
    examples = torch.tensor([float(up.base.examples) for up in ups])
    shares = (examples / examples.sum()).tolist()
    mean = {
        name: sum(share * up.base.weights[name] for share, up in zip(shares, ups, strict=True))
        for name in ups[0].base.weights
    }
    counts = np.stack([up.label_counts.cpu().numpy() for up in ups], axis=1)  # [class, client]
    server = object.__new__(manager.ServerManager)
    vars(server).update(
        DEFAULTS, device=torch.device(work.device), client_num=len(ups), batch_size=work.batch,
        selected_client_num=len(ups), label_num=counts, server_train_test_res={}, super_params=told,
        label_weights=counts / counts.sum(axis=1, keepdims=True).clip(1),
        client_collect_list=list(enumerate(teachers)),
        FloatTensor=lambda array: torch.from_numpy(array).float().to(work.device),
        LongTensor=lambda array: torch.from_numpy(array).long().to(work.device),
    )  # fmt: skip
    server.generator = manager.generator_model_pull(told).to(work.device)
    server.EMA_generator = manager.generator_model_pull(told).to(work.device)
    server.EMA_generator.load_state_dict(server.generator.state_dict())
    server.init_loss_fn()
    rounds = Rounds(work)
    for _ in range(work.rounds):
        rounds.begin()
        server.model = network(manager.model_pull(told), mean, work)
        for _ in range(work.epochs):
            server.Update_generator()
            server.Update_global_model()
        blend(server.EMA_generator, server.generator, server.lambda_)
        rounds.end()
    return rounds.result(accuracy(server.model.eval(), work))


def network(made: nn.Module, weights: dict[str, Any], work: Work) -> nn.Module:
    """Their network with weights of ours."""
    state = {"linear.weight": weights["head.weight"], "linear.bias": weights["head.bias"]}
    for block in range(4):
        for part in ("weight", "bias"):
            state[f"conv{block + 1}.0.{part}"] = weights[f"conv{block}.{part}"]
            state[f"n{block + 1}.{part}"] = weights[f"norm{block}.{part}"]
    made.load_state_dict(state)
    return made.to(work.device)


@torch.no_grad()
def blend(average: nn.Module, newest: nn.Module, share: float) -> None:
    """The average of the generator over rounds, as their program forms it."""
    for mine, other in zip(average.parameters(), newest.parameters(), strict=True):
        mine.mul_(share).add_(other, alpha=1 - share)
