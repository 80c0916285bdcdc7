"""Counts the arithmetic of a client's round, which FedLGD's table 6 sets out."""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import cross_entropy

from fedstill.core.model import Model
from fedstill.core.torch_internals import operations
from fedstill.models import ConvNet

REAL = {"DIGITS, MNIST's client": 60_000, "DIGITS, USPS's client": 7_291}
VIRTUAL, COMMON = 100, 100  # images of a client and of the server: ten for each of ten classes
REAL_BATCH, LOCAL_STEPS, GLOBAL_STEPS = 256, 100, 500
CLASSES = 10


def passes(model: Model, images: int = 4) -> tuple[float, float]:
    """Multiplications and additions for one image: forwards, and there and back to all weights."""
    weights = {k: w.requires_grad_() for k, w in model.init(0).items()}
    x = torch.randn(images, *model.shape)
    with torch.no_grad():
        forwards = operations(lambda: model.logits(weights, x))

    def there_and_back() -> None:
        loss = cross_entropy(model.logits(weights, x), torch.zeros(images, dtype=torch.long))
        torch.autograd.grad(loss, list(weights.values()), allow_unused=True)

    return forwards / images, operations(there_and_back) / images


def main() -> None:
    """Print the table in units of 10^9."""
    forward, both = passes(ConvNet((3, 28, 28), CLASSES))
    print(f"ConvNet, 3x28x28: {forward / 1e6:.1f} M forwards, {both / 1e6:.1f} M there and back")
    for name, examples in REAL.items():
        print(f"FedAvg on real data, an epoch, {name}: {examples * both / 1e9:.0f} G")
    training = (VIRTUAL + COMMON) * both
    matching = LOCAL_STEPS * CLASSES * (REAL_BATCH * forward + VIRTUAL / CLASSES * both)
    print(f"FedLGD, a client's epoch on its own and the common images: {training / 1e9:.1f} G")
    print(f"FedLGD, a client's refinement of its images: {matching / 1e9:.0f} G")


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    main()
