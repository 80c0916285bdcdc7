"""Federated averaging in the manner of PFLlib, written for this benchmark.

Every client is an object with a model of its own; it makes a list of its examples and a
DataLoader in each round, and the server copies parameters one by one.
"""

from __future__ import annotations

import copy
import random

import torch
from torch import nn
from torch.utils.data import DataLoader

from work import Rounds, Work, accuracy, load, network

VERSIONS = ("torch",)


class Client:
    """One client with its own model and optimiser."""

    def __init__(self, number: int, model: nn.Module, work: Work):
        self.number, self.work = number, work
        self.model = copy.deepcopy(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), work.lr)
        self.loss = nn.CrossEntropyLoss()
        self.samples = 1

    def receive(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.data = theirs.data.clone()

    def loader(self) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
        assert self.work.data is not None
        x, y = load(self.work.data).of(self.number)
        pairs = list(zip(x, y, strict=True))
        return DataLoader(pairs, self.work.batch, shuffle=True)  # type: ignore[arg-type]

    def train(self) -> None:
        loader = self.loader()
        self.model.train()
        for _ in range(self.work.epochs):
            for x, y in loader:
                x, y = x.to(self.work.device), y.to(self.work.device)
                loss = self.loss(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
        self.samples = len(loader.dataset)  # type: ignore[arg-type]


def run(work: Work) -> dict[str, object]:
    torch.manual_seed(work.seed)
    random.seed(work.seed)
    model = network(work)
    clients = [Client(number, model, work) for number in range(work.clients)]
    rounds = Rounds(work)
    for _ in range(work.rounds):
        rounds.begin()
        awake = random.sample(clients, work.awake)
        for client in awake:
            client.receive(model)
            if work.data is not None:
                client.train()
        total = sum(client.samples for client in awake)
        uploads = [copy.deepcopy(client.model) for client in awake]
        for parameter in model.parameters():
            parameter.data.zero_()
        for client, upload in zip(awake, uploads, strict=True):
            for mine, theirs in zip(model.parameters(), upload.parameters(), strict=True):
                mine.data += theirs.data.clone() * (client.samples / total)
        rounds.end()
    return rounds.result(accuracy(model, work))
