"""MODELS, one visible table of names, and MODEL_NAMES, which knows plug-ins and files too."""

from __future__ import annotations

from typing import Any

from fedstill.core.model import Model
from fedstill.core.names import Names, function_fault
from fedstill.models.alexnet import AlexNet
from fedstill.models.conv4 import Conv4
from fedstill.models.convnet import ConvNet
from fedstill.models.mlp import MLP
from fedstill.models.module import Module, as_model
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

MODEL_NAMES: Names[Any] = Names(
    "model",
    MODELS,
    "fedstill.models",
    function_fault("a torch.nn.Module class, a function that builds one, or a Model class"),
)
"""Besides our own: classes of modules, functions that build them, and subclasses of Model."""

__all__ = [
    "MLP",
    "MODELS",
    "MODEL_NAMES",
    "AlexNet",
    "Conv4",
    "ConvNet",
    "Module",
    "PreResNet18",
    "ResNet18",
    "as_model",
]
