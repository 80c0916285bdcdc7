"""Networks with their weights as ordinary `torch.nn.Module`s, for use outside of a federation."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fedstill.core.model import Model
from fedstill.core.records import Weights, is_buffer
from fedstill.models import standalone
from fedstill.models.convnet import ConvNet
from fedstill.models.mlp import MLP
from fedstill.models.module import Module

STANDALONE: dict[type[Model], type[nn.Module]] = {ConvNet: standalone.ConvNet, MLP: standalone.MLP}
"""Networks that are written in plain PyTorch too."""


class WithWeights(nn.Module):
    """A network of fedstill that holds its weights, under their own names in its state dict."""

    def __init__(self, network: Model, weights: Weights):
        super().__init__()
        self.network = network.evaluating
        self.names = list(weights)
        for name, tensor in weights.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            if is_buffer(name) or not tensor.is_floating_point():
                owner.register_buffer(last, tensor.detach().clone())
            else:
                owner.register_parameter(last, nn.Parameter(tensor.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        """[example, class], logits of normalised examples."""
        held = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return self.network(held, x)


def fits(model: Model, weights: Weights) -> bool:
    """Whether weights are those of a network, by names and shapes."""
    wanted = {name: tuple(law.shape) for name, law in model.initial().items()}
    return wanted == {name: tuple(tensor.shape) for name, tensor in weights.items()}


def as_module(model: Model, weights: Weights) -> nn.Module:
    """A network with its weights, in evaluation mode.

    A user's module is of its own class again. ConvNet and MLP are plain PyTorch; the others call
    fedstill.
    """
    if isinstance(model, Module):
        return model.module(weights)
    options = standalone_options(model)
    if options is None:
        return WithWeights(model, weights).eval()
    net = STANDALONE[type(model)](**options)
    net.load_state_dict(weights)
    return net.eval()


def standalone_options(model: Model) -> dict[str, Any] | None:
    """The arguments by which the plain twin of a network is built; None where it has none."""
    if type(model) not in STANDALONE or getattr(model, "rate", 1.0) != 1.0:
        return None
    return {"shape": model.shape, "classes": model.classes, **model.options()}
