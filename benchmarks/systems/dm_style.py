"""Distribution matching as in the public script: a new module in each iteration, class by class.

Written for this benchmark; the augmentation is fedstill's, so the loops alone differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.parts import augment
from work import Rounds, Work, convnet, load, trained_accuracy

VERSIONS = ("torch",)


class Task:
    """The real images by class, and the synthetic ones."""

    def __init__(self, work: Work):
        assert work.data is not None
        self.work, self.examples = work, load(work.data, work.device)
        classes = range(self.examples.classes)
        self.by_class = [torch.nonzero(self.examples.train_y == c).flatten() for c in classes]
        torch.manual_seed(work.seed)
        self.rng = torch.Generator().manual_seed(work.seed)
        start = torch.randn(len(self.by_class), work.per_class, *self.examples.shape)
        self.images = start.to(work.device).requires_grad_()
        self.optimizer = torch.optim.SGD([self.images], work.pixel_lr, work.pixel_momentum)

    def real(self, label: int) -> Tensor:
        rows = self.by_class[label]
        drawn = torch.randperm(len(rows), device=rows.device)[: self.work.batch]
        return self.examples.train_x[rows[drawn]]

    def network(self) -> torch.nn.Module:
        """The features of a fresh random network."""
        whole = convnet(self.examples.shape, self.examples.classes, self.work.width)
        return whole[:-1].to(self.work.device).requires_grad_(False)

    def augmentation(self, groups: int) -> tuple[augment.Draws, str]:
        """One operation, drawn as fedstill does, and its parameters for each group."""
        names = augment.operations(augment.DEFAULT)
        name = names[int(torch.randint(len(names), (), generator=self.rng))]
        size = self.examples.shape[1:]
        draws = augment.draw(self.rng, name, groups=groups, image=(size[0], size[1]))
        return trees.to(draws, self.work.device), name

    def move(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def timed(self, iteration: object) -> dict[str, object]:
        """So many iterations after a few that prepare everything; then what the images teach."""
        assert callable(iteration)
        kept = self.images.detach().clone()
        for _ in range(10):
            iteration()
        with torch.no_grad():
            self.images.copy_(kept)
        self.optimizer.state.clear()
        rounds = Rounds(self.work)
        rounds.begin()
        for _ in range(self.work.rounds):
            iteration()
        rounds.end()
        labels = torch.arange(len(kept), device=kept.device).repeat_interleave(self.work.per_class)
        images = self.images.detach().flatten(0, 1)
        return rounds.result(trained_accuracy(images, labels, self.work, self.work.epochs))


def run(work: Work) -> dict[str, object]:
    task = Task(work)

    def iteration() -> None:
        network = task.network()
        loss = torch.zeros((), device=work.device)
        for label in range(len(task.by_class)):
            draws, name = task.augmentation(1)
            real = augment.apply(task.real(label).unsqueeze(0), draws, only=name)[0]
            synthetic = augment.apply(task.images[label].unsqueeze(0), draws, only=name)[0]
            target = network(real).detach().mean(0)
            loss = loss + (target - network(synthetic).mean(0)).square().sum()
        task.move(loss)
        loss.item()  # the script averages its loss on the host

    return task.timed(iteration)
