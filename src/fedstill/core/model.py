"""Network and Model: architectures without weights; no architecture, no training.

A network is a frozen, hashable description. Weights are passed in, so that batching, sub-models,
teachers, perturbed networks and gradients of gradients are ordinary expressions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.errors import BadValue
from fedstill.core.records import Weights, is_buffer
from fedstill.core.seeds import generator

Norm = Literal["instance", "batch", "static", "layer", "group", "none"]


class Initial(NamedTuple):
    """How one tensor of a network starts: its shape and the distribution of its entries.

    One of the kind `own` is drawn by the network's own `init`, all tensors together.
    """

    shape: tuple[int, ...]
    kind: Literal["uniform", "normal", "ones", "zeros", "count", "own"]
    scale: float = 1.0  # half-width of the uniform law, deviation of the normal one
    mean: float = 0.0  # of the normal law

    def sample(self, rng: torch.Generator, pool: tuple[int, ...] = ()) -> Tensor:
        """One draw, or a whole pool of independent draws, on the generator's device."""
        shape, device = pool + self.shape, rng.device
        if self.kind == "own":
            raise TypeError("a tensor of the kind 'own' is drawn by its network's init()")
        if self.kind == "uniform":
            drawn = torch.rand(shape, generator=rng, device=device)
            return drawn.mul_(2 * self.scale).sub_(self.scale)
        if self.kind == "normal":
            drawn = torch.randn(shape, generator=rng, device=device).mul_(self.scale)
            return drawn.add_(self.mean) if self.mean else drawn
        if self.kind == "count":
            return torch.zeros(shape, dtype=torch.long, device=device)
        fill = torch.ones if self.kind == "ones" else torch.zeros
        return fill(shape, device=device)


Initials = dict[str, Initial]


def linear_initial(name: str, inputs: int, outputs: int) -> Initials:
    """Weight and bias of a linear layer, by the framework's default law (uniform in 1/√inputs)."""
    bound = 1 / math.sqrt(inputs)
    return {
        f"{name}.weight": Initial((outputs, inputs), "uniform", bound),
        f"{name}.bias": Initial((outputs,), "uniform", bound),
    }


def conv_initial(
    name: str, inputs: int, outputs: int, kernel: int, *, bias: bool = True
) -> Initials:
    """Weight (and bias) of a square convolution, by the framework's default law."""
    bound = 1 / math.sqrt(inputs * kernel * kernel)
    initial = {f"{name}.weight": Initial((outputs, inputs, kernel, kernel), "uniform", bound)}
    if bias:
        initial[f"{name}.bias"] = Initial((outputs,), "uniform", bound)
    return initial


def norm_initial(name: str, channels: int, norm: Norm, shape: tuple[int, ...] = ()) -> Initials:
    """Affine parameters and statistics of a norm layer; `shape` is the map's, for layer norm."""
    if norm == "none":
        return {}
    affine = shape if norm == "layer" else (channels,)
    initial = {f"{name}.weight": Initial(affine, "ones"), f"{name}.bias": Initial(affine, "zeros")}
    if norm == "batch":
        initial[f"{name}.running_mean"] = Initial((channels,), "zeros")
        initial[f"{name}.running_var"] = Initial((channels,), "ones")
    return initial


NO_OPTION = {"option": False}
"""The metadata of a field that a network has besides the options one chooses it by."""


def option_names(kind: type[Network]) -> list[str]:
    """The fields by which one chooses a network of a kind, such as its width."""
    return [f.name for f in fields(kind) if f.init and f.metadata.get("option", True)]


@dataclass(frozen=True)
class Network:
    """Something with weights: `initial()` says which tensors it needs and how they start."""

    training: bool = field(default=False, kw_only=True, repr=False, metadata=NO_OPTION)
    device: torch.device | str = field(
        default="cpu", kw_only=True, compare=False, repr=False, metadata=NO_OPTION
    )
    notes: Weights | None = field(
        default=None, kw_only=True, compare=False, repr=False, metadata=NO_OPTION
    )

    def initial(self) -> Initials:
        """Every tensor of the network with its starting law, in a fixed order."""
        raise TypeError(f"{type(self).__name__} must define initial()")

    def init(self, seed: int) -> Weights:
        """Fresh weights, drawn on the host so that they do not depend on the device."""
        rng = generator(seed)
        return {name: law.sample(rng).to(self.device) for name, law in self.initial().items()}

    def samples(self, rng: torch.Generator, count: int) -> list[Weights]:
        """Fresh weights of so many networks, drawn together on the generator's own device."""
        drawn = {name: law.sample(rng, (count,)).unbind() for name, law in self.initial().items()}
        return [{name: each[i] for name, each in drawn.items()} for i in range(count)]

    @property
    def takes_half(self) -> bool:
        """Whether it can train in half precision on a GPU (see `core.precision`)."""
        return False

    @property
    def stacks_well(self) -> bool:
        """Whether many such networks train faster on a GPU as a stack than side by side."""
        return False

    @property
    def by_example(self) -> bool:
        """Whether an answer in evaluation depends on its example alone, not on the batch."""
        return True

    @property
    def couples(self) -> bool:
        """Whether examples that are trained together mix, as by the statistics of batch norm."""
        return not self.by_example or any(is_buffer(name) for name in self.initial())

    @property
    def twice(self) -> bool:
        """Whether gradients of its gradients can be taken."""
        return True

    @property
    def smooth(self) -> bool:
        """Whether gradients by its inputs can be taken: not where they are tokens, looked up."""
        return True

    @property
    def tokens(self) -> bool:
        """Whether inputs are whole numbers that an embedding looks up."""
        return False

    @property
    def stackable(self) -> bool:
        """Whether torch trains several of it as one, without a loop over them."""
        return True

    @property
    def stackable_at_rest(self) -> bool:
        """Whether it also asks several as one where none is trained."""
        return self.stackable

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers in training, as dropout does (see `drawing`)."""
        return False

    def drawing(self, seed: Tensor) -> Self:
        """The same network, whose draws in training are a function of a seed: [2], whole numbers.

        The steps of a loop bring the seed with their batch, so that draws are data like any other.
        """
        return self

    @property
    def evaluating(self) -> Self:
        """The same network in evaluation mode."""
        return replace(self, training=False, notes=None)

    def train(self, notes: Weights | None = None) -> Self:
        """The same network in training mode; new statistics are put into `notes`."""
        return replace(self, training=True, notes=notes)

    def recording(self, notes: Weights) -> Self:
        """The same network in evaluation mode; statistics of what batch norms see go to `notes`.

        They stand under the names of the layers' own statistics. Gradients pass through those of
        `batch` norms; a `static` one notes what its re-estimation wants.
        """
        return replace(self, training=False, notes=notes)

    def on(self, device: torch.device | str) -> Self:
        """The same network, its fresh weights made for a device."""
        there = torch.device(device) == torch.device(self.device)
        return self if there else replace(self, device=device)

    def floats(self) -> dict[str, int]:
        """Numbers by kind: `parameters` and `buffers`."""
        sizes = {"parameters": 0, "buffers": 0}
        for name, law in self.initial().items():
            sizes["buffers" if is_buffer(name) else "parameters"] += math.prod(law.shape)
        return sizes

    @property
    def title(self) -> str:
        """The name of this kind of network in recipes and logs."""
        return type(self).__name__.lower()

    def options(self) -> dict[str, Any]:
        """The options by which this network was chosen."""
        return {name: getattr(self, name) for name in option_names(type(self))}

    def describe(self) -> dict[str, Any]:
        """All that tells this network from others, as plain values, for recipes and logs."""
        return {"name": self.title, **self.options()}

    def normalise(self, weights: Weights, name: str, x: Tensor, norm: Norm) -> Tensor:
        """One norm layer. Instance norm is a group per channel; `group` has four groups.

        `static` is batch norm that keeps no statistics: it goes by the batch, but for evaluation
        with weights that hold re-estimated ones.
        """
        if norm == "none":
            return x
        if norm == "batch":
            return self._batch_norm(weights, name, x)
        if norm == "static":
            return self._static_norm(weights, name, x)
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        if norm == "layer":
            return F.layer_norm(x, x.shape[1:], weight, bias)
        groups = x.shape[1] if norm == "instance" else 4
        return F.group_norm(x, groups, weight, bias)

    def _batch_norm(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        weight, bias = weights.get(f"{name}.weight"), weights.get(f"{name}.bias")
        mean, var = weights[f"{name}.running_mean"], weights[f"{name}.running_var"]
        if not self.training or single(x):  # one value has no variance to go by, or to note
            if not self.training and self.notes is not None:
                over = [0, *range(2, x.dim())]
                self.notes[f"{name}.running_mean"] = x.mean(over)
                self.notes[f"{name}.running_var"] = x.var(over, unbiased=False)
            return batch_norm(x, mean, var, weight, bias)
        if self.notes is not None:
            momentum = 0.1
            new_mean, new_var = _moments(x)
            self.notes[f"{name}.running_mean"] = (1 - momentum) * mean + momentum * new_mean
            self.notes[f"{name}.running_var"] = (1 - momentum) * var + momentum * new_var
        return batch_norm(x, None, None, weight, bias)

    def _static_norm(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        mean, var = f"{name}.running_mean", f"{name}.running_var"
        if self.notes is not None and not self.training:
            self.notes[mean], self.notes[var] = _moments(x)
        elif mean in weights and not self.training:
            return batch_norm(x, weights[mean], weights[var], weight, bias)
        return batch_norm(x, None, None, weight, bias)


def batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
) -> Tensor:
    """Maps normalised by given statistics, or where there are none by those of the batch.

    A single value of a channel is its own mean, and zero when normalised; torch refuses it. A
    stack of maps with a single channel each reaches the GPU's kernel in an order that it refuses,
    so there a lone channel goes in twice and comes out once.
    """

    def scaled(x: Tensor, *others: Tensor | None) -> Tensor:
        mean, var, weight, bias = others
        return F.batch_norm(x, mean, var, weight, bias, training=mean is None, eps=eps)

    if mean is None and single(x):
        wide = (1, -1, *[1] * (x.dim() - 2))
        nothing = torch.zeros_like(x)
        scaled_nothing = nothing if weight is None else nothing * weight.reshape(wide)
        return scaled_nothing if bias is None else scaled_nothing + bias.reshape(wide)
    others = (mean, var, weight, bias)
    if not (x.is_cuda and x.shape[1] == 1):
        return scaled(x, *others)
    twice = (None if tensor is None else torch.cat([tensor, tensor]) for tensor in others)
    return scaled(torch.cat([x, x], 1), *twice)[:, :1]


def single(x: Tensor) -> bool:
    """Whether each channel of maps [example, channel, ...] has one value alone."""
    return x.numel() == x.shape[1]


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the unbiased variance of each channel; a single value has none."""
    over, seen = [0, *range(2, x.dim())], x.detach().float()
    return seen.mean(over), seen.var(over, unbiased=not single(x))


@dataclass(frozen=True)
class Model(Network):
    """A classifier for inputs of one shape and a number of classes.

    A subclass says two things: `initial()`, the tensors it needs and how they start, and
    `stages(weights, x)`, the outputs of its blocks. The flattened last stage is the feature
    vector; a linear layer named `head` makes logits of it. Where features come cheaper than all
    stages, a subclass may say so.
    """

    shape: tuple[int, ...] = field(metadata=NO_OPTION)
    classes: int = field(metadata=NO_OPTION)

    of_images: ClassVar[bool] = False  # whether examples must have channels, height and width

    def fitting(self) -> Self:
        """Itself, where it can take examples of its shape."""
        if self.of_images and len(self.shape) != 3:
            given = "x".join(map(str, self.shape))
            raise BadValue(
                f"{self.title}: cannot take examples of {given}, but images of channels x height x "
                "width alone; an mlp takes vectors"
            )
        self.initial()  # refuses images that are too small
        return self

    def describe(self) -> dict[str, Any]:
        chosen = {"shape": self.shape, "classes": self.classes, **self.options()}
        return {"name": self.title, **chosen}

    @property
    def head_names(self) -> tuple[str, str | None]:
        """The names of the head's weight and bias; the bias is None where there is none."""
        return "head.weight", "head.bias"

    @property
    def norm_names(self) -> tuple[str, ...]:
        """The names of all that norm layers hold: weights, biases and statistics.

        A norm layer is one whose name begins with `norm`.
        """
        return tuple(n for n in self.initial() if f".{n}".split(".")[-2].startswith("norm"))

    @property
    def feature_width(self) -> int:
        """How many numbers the head sees."""
        return self.initial()[self.head_names[0]].shape[1]

    def with_classes(self, classes: int) -> Self:
        """The same network with a head for another number of classes, or why it cannot be."""
        return replace(self, classes=classes)

    def state_dict(self, weights: Weights) -> Weights:
        """Weights as an ordinary module of this kind loads them."""
        return dict(weights)

    def stages(self, weights: Weights, x: Tensor) -> list[Tensor]:
        """The output of every block, first to last."""
        raise TypeError(f"{type(self).__name__} must define stages()")

    def halved(self, weights: Weights) -> Weights:
        """Those weights that a pass in half precision begins by halving, halved; if any.

        A network at rest may be handed them in place of its own for many such passes.
        """
        return {}

    def coarse_stages(self, weights: Weights, x: Tensor) -> list[Tensor]:
        """As `stages`, for a pass without gradient that may be rounded (see `core.precision`)."""
        return self.stages(weights, x)

    def features(self, weights: Weights, x: Tensor) -> Tensor:
        """[example, feature], what the head sees."""
        return self.stages(weights, x)[-1].flatten(1)

    def features_beside(self, weights: Weights, x: Tensor, resting: int) -> tuple[Tensor, Tensor]:
        """Features of all examples but the last, and of so many last ones, which rest.

        Those pass no gradient on and are noted nowhere, but are computed as the others are; so
        what is compared with them is rounded alike. A network may make both in one pass.
        """
        moving, rest = x[: len(x) - resting], x[len(x) - resting :]
        found = self.features(weights, moving)
        still = {name: tensor.detach() for name, tensor in weights.items()}
        return found, replace(self, notes=None).features(still, rest).detach()

    def coarse_features(self, weights: Weights, x: Tensor) -> Tensor:
        """As `features`, for a pass without gradient that may be rounded."""
        return self.coarse_stages(weights, x)[-1].flatten(1)

    def head(self, weights: Weights, features: Tensor) -> Tensor:
        """[example, class], logits from features."""
        weight, bias = self.head_names
        return F.linear(features, weights[weight], None if bias is None else weights[bias])

    def both(self, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features and logits from one pass."""
        features = self.features(weights, x)
        return features, self.head(weights, features)

    def logits(self, weights: Weights, x: Tensor) -> Tensor:
        """[example, class]"""
        return self.head(weights, self.features(weights, x))

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        return self.logits(weights, x)
