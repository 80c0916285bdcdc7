"""Networks and losses at the sizes of docs/benchmarks.md, for `make kernels`: compiled, never run.

Tensors lie on the host and are taken for a GPU's, so that networks choose the kernels that they
would choose there, with the blocks that go with these sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core import precision
from fedstill.core.records import Weights
from fedstill.models.alexnet import AlexNet
from fedstill.models.conv4 import Conv4
from fedstill.models.convnet import ConvNet
from fedstill.parts import losses

PHOTOS, DIGITS = (3, 32, 32), (1, 28, 28)


@pytest.fixture(autouse=True)
def taken_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    with precision.using("half"):
        yield


def moving(model: ConvNet | AlexNet) -> Weights:
    return {name: tensor.requires_grad_() for name, tensor in model.init(0).items()}


@pytest.mark.parametrize("shape", [PHOTOS, DIGITS], ids=["photos", "digits"])
def test_images_are_matched(shape: tuple[int, ...]) -> None:
    model = ConvNet(shape, 10, depth=3, width=128)
    weights, images = model.init(0), torch.zeros(100, *shape, requires_grad=True)
    torch.autograd.grad(model.features(weights, images).sum(), images)
    with torch.no_grad():
        model.features(weights, torch.zeros(256, *shape))


@pytest.mark.parametrize(("shape", "width", "batch"), [(PHOTOS, 128, 32), (DIGITS, 32, 10)])
def test_a_stack_of_clients_trains(shape: tuple[int, ...], width: int, batch: int) -> None:
    model = ConvNet(shape, 10, depth=3, width=width)
    weights = {name: torch.stack([tensor] * 2) for name, tensor in model.init(0).items()}
    x, y = torch.zeros(2, batch, *shape), torch.zeros(2, batch, dtype=torch.long)

    def loss(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(weights, x), y)

    torch.func.vmap(torch.func.grad(loss))(weights, x, y)


@pytest.mark.parametrize("shape", [PHOTOS, DIGITS], ids=["photos", "digits"])
@pytest.mark.parametrize("kind", [ConvNet, AlexNet])
def test_features_learn_beside_others_at_rest(
    kind: type[ConvNet] | type[AlexNet], shape: tuple[int, ...]
) -> None:
    model = kind(shape, 10, width=128)
    found, _ = model.features_beside(moving(model), torch.zeros(64, *shape), 32)
    found.sum().backward()  # type: ignore[no-untyped-call]


def test_a_teacher_is_asked() -> None:
    images = torch.zeros(64, *PHOTOS, requires_grad=True)
    model = Conv4(PHOTOS, 10)
    torch.autograd.grad(model(model.init(0), images).sum(), images)


# Eight rows of ImageNet's classes, and the most that a program has to hold.
@pytest.mark.parametrize(("rows", "classes"), [(8, 1000), (65, 126)])
def test_many_classes_are_learned(rows: int, classes: int) -> None:
    logits, labels = torch.zeros(2, rows, classes), torch.zeros(2, rows, dtype=torch.long)
    torch.func.vmap(torch.func.grad(losses.task_loss))(logits, labels)
    student = logits[0].clone().requires_grad_()
    losses.hinton(student, logits[1], labels[0], temperature=2.0, soft_share=0.5).backward()


def test_peers_agree_and_contrast() -> None:
    logits = torch.zeros(32, 10, requires_grad=True)
    labels = torch.zeros(32, dtype=torch.long)
    losses.hinton(logits, torch.zeros(32, 10), labels, temperature=20.0, soft_share=0.9).backward()
    features = torch.ones(64, 2048, requires_grad=True)
    losses.supervised_contrastive(features, torch.zeros(64, dtype=torch.long)).backward()
