"""MODELS, one visible table of names; no discovery."""

from __future__ import annotations

from fedstill.core.model import Model
from fedstill.models.alexnet import AlexNet
from fedstill.models.convnet import ConvNet
from fedstill.models.mlp import MLP
from fedstill.models.resnet import ResNet18

MODELS: dict[str, type[Model]] = {
    "alexnet": AlexNet,
    "convnet": ConvNet,
    "mlp": MLP,
    "resnet18": ResNet18,
}
