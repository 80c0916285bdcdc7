"""Federated averaging as a careful researcher writes it: one model, clients in turn."""

from __future__ import annotations

import torch
from torch import nn

from work import Rounds, Work, accuracy, load, network

VERSIONS = ("torch",)


def run(work: Work) -> dict[str, object]:
    torch.manual_seed(work.seed)
    model = network(work)
    examples = load(work.data, work.device) if work.data else None
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rounds = Rounds(work)
    for _ in range(work.rounds):
        rounds.begin()
        total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        count = 0
        for client in torch.randperm(work.clients)[: work.awake].tolist():
            model.load_state_dict(weights)
            size = 1
            if examples is not None:
                x, y = examples.of(client)
                size = len(y)
                train(model, x, y, work)
            for name, tensor in model.state_dict().items():
                total[name] += size * tensor
            count += size
        weights = {name: tensor / count for name, tensor in total.items()}
        rounds.end()
    model.load_state_dict(weights)
    return rounds.result(accuracy(model, work))


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, work: Work) -> None:
    """Local epochs of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), work.lr)
    for _ in range(work.epochs):
        for rows in torch.randperm(len(y), device=y.device).split(work.batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
