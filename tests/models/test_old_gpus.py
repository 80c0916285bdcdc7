"""On a GPU that is too old for kernels torch's own operations compute all that there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from fedstill.core import Model, Weights, algebra, gpu, precision
from fedstill.core.convolutions import by_example
from fedstill.core.data import Pool
from fedstill.core.precision import Precision
from fedstill.core.release import shortening, weighted_sums
from fedstill.core.seeds import generator
from fedstill.models import AlexNet, Conv4, ConvNet, ResNet18
from fedstill.parts import augment, losses
from fedstill.parts.distribution_matching import class_means

PHOTOS = (3, 16, 16)
LABELS = torch.arange(4) % 3
NETWORKS: list[Model] = [
    ConvNet(PHOTOS, 3, depth=2, width=4),
    AlexNet(PHOTOS, 3, width=4),
    Conv4(PHOTOS, 3, widths=(4, 4, 8, 8), norm="instance"),
    ResNet18(PHOTOS, 3),
]
NEAR = {"single": 0.0, "tf32": 1e-5, "half": 0.1}  # of the largest number


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(7, *shape))


def trained(model: Model) -> list[Tensor]:
    """Logits and gradients; features beside others at rest; an evaluation."""
    weights = {name: tensor.requires_grad_() for name, tensor in model.init(0).items()}
    logits = model(weights, noise(4, *PHOTOS))
    loss = losses.task_loss(logits, LABELS)
    grads = torch.autograd.grad(loss, [*weights.values()], materialize_grads=True)
    beside, still = model.features_beside(weights, noise(4, *PHOTOS), 2)
    with torch.no_grad():
        return [logits, *grads, beside, still, model(weights, noise(4, *PHOTOS))]


def stacked(model: Model) -> list[Tensor]:
    """Gradients of a stack of two."""
    weights = {name: torch.stack([one, 2 * one]) for name, one in model.init(0).items()}

    def loss(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        return losses.task_loss(model(weights, x), y)

    y = LABELS.expand(2, -1)
    return [*torch.func.vmap(torch.func.grad(loss))(weights, noise(2, 4, *PHOTOS), y).values()]


def one_by_one(model: Model) -> list[Tensor]:
    """Gradients of single examples, clipped and added up."""

    def loss(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        return losses.task_loss(model(weights, x[None]), y[None])

    with precision.of_examples(), by_example():
        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
        found = each(model.init(0), noise(4, *PHOTOS), LABELS)
        rows = [tensor.flatten(1) for tensor in found.values()]
        return weighted_sums(rows, shortening(rows, 0.1).to(rows[0].dtype))


def all_else(_: Model) -> list[Tensor]:
    """Losses, augmentation, means of classes, stored examples, means of weights."""
    draws = augment.draw(
        generator(1), "color_crop_cutout_flip_scale_rotate", groups=2, image=(16, 16), mode="multi"
    )
    bytes = torch.arange(2 * 3 * 16 * 16).view(2, *PHOTOS).byte()
    pool = Pool(bytes, LABELS[:2], torch.full((3, 1, 1), 0.4), torch.full((3, 1, 1), 0.2))
    return [
        losses.hinton(noise(4, 3), noise(3, 4).T, LABELS, temperature=2.0, soft_share=0.5),
        losses.supervised_contrastive(noise(4, 5), LABELS),
        augment.apply(noise(2, 2, *PHOTOS), draws),
        *class_means([noise(2, 3, 5)], noise(2, 3)),
        pool.inputs(torch.tensor([1, 0, 1])),
        algebra.mean([{"w": noise(2, number)[:, 0]} for number in range(1, 40)])["w"],
    ]


@pytest.mark.parametrize("kind", ["single", "tf32", "half"])
@pytest.mark.parametrize(
    ("work", "model"),
    [(work, model) for work in (trained, stacked, one_by_one) for model in NETWORKS]
    + [(all_else, NETWORKS[0])],
    ids=lambda given: getattr(given, "__name__", getattr(given, "title", None)),
)
def test_an_old_gpu_is_asked_for_no_kernel(
    work: Callable[[Model], list[Tensor]], model: Model, kind: Precision, monkeypatch: Any
) -> None:
    with precision.using("single"):
        wanted = work(model)

    def launched(module: str) -> NoReturn:
        raise AssertionError(f"{module} is not for this GPU")

    monkeypatch.setattr(gpu, "_loaded", launched)
    monkeypatch.setattr(gpu, "is_too_old", lambda device: device.type == "cpu")
    monkeypatch.setattr(gpu, "current", lambda: torch.device("cuda:1"))  # a newer one beside it
    monkeypatch.setattr(Tensor, "is_cuda", True)
    with precision.using(kind):
        found = work(model)
    for one, other in zip(found, wanted, strict=True):
        most = float(other.detach().abs().max()) if other.numel() else 0.0
        assert torch.allclose(one, other, rtol=0, atol=NEAR[kind] * most + 1e-5)
