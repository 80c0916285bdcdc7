"""One round of FedAvg and of FedDM on a network with a single weight, so that one can see it.

    python examples/one_dimension.py [picture.png]

Two clients hold numbers of two classes. FedAvg lets each go down its own loss for some steps and
takes the mean, which lies beyond the lowest point of both. FedDM has each send a few numbers whose
loss imitates its own near the weight, within a radius, and goes to the bottom of their sum: the
idea of FedDM's first figure, with data of our own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

START, RADIUS = 0.6, 1.0
GRID = torch.linspace(-0.6, 1.8, 241)  # weights that are looked at
Client = tuple[Tensor, Tensor]  # numbers and their classes


def logits(weight: Tensor, x: Tensor) -> Tensor:
    """[weight, number]: the network, bounded so that its loss is not convex."""
    return 4 * torch.tanh(weight[:, None] * x)


def loss(weight: Tensor, client: Client) -> Tensor:
    """[weight]: the mean loss of a client's numbers."""
    x, y = client
    found = logits(weight, x)
    return binary_cross_entropy_with_logits(found, y.expand_as(found), reduction="none").mean(1)


def clients(generator: torch.Generator) -> list[Client]:
    """Of each class 100 numbers; one client's classes lie the other way round near zero."""
    means = (((-1.0, 2.5), (0.6, 0.6)), ((0.4, -0.3), (0.2, 0.2)))
    y = torch.tensor([0.0, 1.0]).repeat_interleave(100)
    found = []
    for centres, spreads in means:
        noise = torch.randn(200, generator=generator)
        centre = torch.tensor(centres).repeat_interleave(100)
        found.append((centre + torch.tensor(spreads).repeat_interleave(100) * noise, y))
    return found


def descended(client: Client, steps: int = 40, rate: float = 0.1) -> float:
    """Where a client of FedAvg comes to by gradient steps on its own loss."""
    weight = torch.tensor([START], requires_grad=True)
    for _ in range(steps):
        (slope,) = torch.autograd.grad(loss(weight, client).sum(), weight)
        weight = (weight - rate * slope).detach().requires_grad_()
    return weight.item()


def sent(
    client: Client, generator: torch.Generator, per_class: int = 3, steps: int = 400
) -> Client:
    """A few numbers of each class whose mean outputs are those of all, for weights near START."""
    real, labels = client
    groups = [real[labels == label] for label in (0, 1)]
    rows = [torch.randperm(len(own), generator=generator)[:per_class] for own in groups]
    chosen = torch.cat([own[row] for own, row in zip(groups, rows, strict=True)]).requires_grad_()
    optimiser = torch.optim.SGD([chosen], lr=0.1)
    for _ in range(steps):
        near = START + RADIUS * (2 * torch.rand(16, generator=generator) - 1)
        parts = zip(groups, chosen.split(per_class), strict=True)
        gaps = [(logits(near, own).mean(1) - logits(near, few).mean(1)) ** 2 for own, few in parts]
        optimiser.zero_grad()
        sum(gap.mean() for gap in gaps).backward()
        optimiser.step()
    return chosen.detach(), torch.tensor([0.0, 1.0]).repeat_interleave(per_class)


def bottom(values: Tensor) -> float:
    """The weight of the lowest value within the radius around the start."""
    inside = (GRID - START).abs() <= RADIUS
    return float(GRID[torch.where(inside, values, torch.inf).argmin()])


def draw(curves: dict[str, tuple[Tensor, Tensor]], points: dict[str, float], path: Path) -> None:
    from fedstill.report import canvas

    figure = canvas.figure(9.6, 3.2)
    for axes, (name, (true, imitated)) in zip(figure.subplots(1, 3), curves.items(), strict=True):
        axes.axvspan(START - RADIUS, START + RADIUS, color=canvas.PALE, alpha=0.5, label="radius")
        axes.plot(GRID, true, color=canvas.COLOURS[0], label="loss")
        axes.plot(GRID, imitated, color=canvas.COLOURS[1], linestyle="--", label="of what is sent")
        axes.set_xlabel("weight", fontsize=8)
        canvas.title(axes, name)
        canvas.plain(axes)
    for number, (name, place) in enumerate(points.items()):
        height = true[(GRID - place).abs().argmin()]
        axes.plot(place, height, canvas.MARKERS[number], color=canvas.COLOURS[6], label=name)
    canvas.legend_beside(axes)
    canvas.save(figure, path)


def main(picture: Path | None) -> None:
    generator = torch.Generator().manual_seed(0)
    federation = clients(generator)
    sets = [sent(client, generator) for client in federation]
    true = [loss(GRID, client) for client in federation]
    imitated = [loss(GRID, few) for few in sets]
    total, sum_of_sets = torch.stack(true).mean(0), torch.stack(imitated).mean(0)
    points = {
        "start": START,
        "FedAvg": sum(descended(client) for client in federation) / len(federation),
        "FedDM": bottom(sum_of_sets),
        "lowest": bottom(total),
    }
    print("| | weight | loss |\n|---|---|---|")
    for name, place in points.items():
        print(f"| {name} | {place:.2f} | {total[(GRID - place).abs().argmin()]:.3f} |")
    inside = (GRID - START).abs() <= RADIUS
    gap = max(float((a - b)[inside].abs().max()) for a, b in zip(true, imitated, strict=True))
    print(f"what is sent differs from the clients' losses by {gap:.3f} at most within the radius")
    if picture is not None:
        curves = {
            f"Client {k + 1}": pair for k, pair in enumerate(zip(true, imitated, strict=True))
        }
        draw({**curves, "Both": (total, sum_of_sets)}, points, picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
