"""Large images as embeddings of a frozen backbone: FedAvg and FedDM on vectors with a small head.

    python examples/embeddings.py [rounds]

Nothing is downloaded: the images are scikit-learn's digits, and the backbone is a convolutional
network whose weights were drawn once. In its place stands any function from images to vectors,
such as a pretrained network without its last layer.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedstill
from fedstill import MLP, Dirichlet, Experiment, FedAvg, FedDM, Population


def frozen_backbone(features: int = 64) -> nn.Module:
    """A network that is never trained; the same for everybody."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(32 * 4 * 4, features), nn.ReLU(),
        )  # fmt: skip
    return backbone.eval()


@torch.no_grad()
def embedded(backbone: nn.Module, images: Tensor, size: int = 256) -> Tensor:
    """[image, feature], some images at a time; a client does this once, where its images are."""
    return torch.cat([backbone(batch) for batch in images.split(size)])


def main(rounds: int) -> None:
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)  # [1797, 1, 8, 8]
    vectors = embedded(frozen_backbone(), images)

    data = fedstill.split(vectors, digits.target, partition=Dirichlet(5, alpha=0.1))
    population = Population(data, partial(MLP, hidden=(32,)))
    methods = [
        FedAvg(lr=0.1, epochs=5),
        FedDM(per_class=5, steps=50, server_epochs=50, server_lr=0.05),
    ]
    runs = [fedstill.run(Experiment(method, population, rounds=rounds)) for method in methods]

    print(f"{len(data.sites)} clients, {data.shape[0]} features, {data.classes} classes")
    print(fedstill.compare(runs).as_markdown())


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
