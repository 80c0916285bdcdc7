"""MODELS, one visible table of names; no discovery."""

from __future__ import annotations

from fedstill.core.model import Model
from fedstill.models.alexnet import AlexNet
from fedstill.models.conv4 import Conv4
from fedstill.models.convnet import ConvNet
from fedstill.models.mlp import MLP
from fedstill.models.module import Module, as_model, as_models
from fedstill.models.preresnet import PreResNet18
from fedstill.models.resnet import ResNet18

MODELS: dict[str, type[Model]] = {
    "alexnet": AlexNet,
    "conv4": Conv4,
    "convnet": ConvNet,
    "mlp": MLP,
    "preresnet18": PreResNet18,
    "resnet18": ResNet18,
}

__all__ = [
    "MLP",
    "MODELS",
    "AlexNet",
    "Conv4",
    "ConvNet",
    "Module",
    "PreResNet18",
    "ResNet18",
    "as_model",
    "as_models",
]
