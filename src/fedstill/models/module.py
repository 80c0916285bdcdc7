"""Module: any `torch.nn.Module` as a network of a federation.

    class Net(nn.Module): ...

    Module((3, 32, 32), 10, Net)                      # the class, built without arguments
    Module((3, 32, 32), 10, partial(Net, width=64))   # with arguments
    Module((3, 32, 32), 10, Net(width=64))            # an instance

Weights are passed in by the names of the module's state dict. What enters the last linear layer are
the features, and that layer is the head.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Generator, Tensor, nn

from fedstill.core import ranges
from fedstill.core.errors import BadValue
from fedstill.core.model import NO_OPTION, Initial, Initials, Model
from fedstill.core.names import short
from fedstill.core.records import Weights
from fedstill.models.skeleton import Origin, Skeleton, Wishes, skeleton_of


@dataclass(frozen=True)
class Module(Model):
    """A user's `torch.nn.Module` that takes [example, ...] and returns logits [example, class].

    `net` is an instance, a class, or a function that builds one (with arguments by
    `functools.partial`). Two are equal when equal arguments made them. Every weight starts as the
    constructor draws it from the run's seed; an instance draws anew by its layers'
    `reset_parameters`, or with `start="given"` starts from the values it has, the same for all.

    `head_layer` names the last linear layer where it cannot be found by a pass; "none" says that
    there is none, and takes the logits themselves for features. `stage_layers` names layers
    whose outputs are matched by methods that match several. `fresh_head` replaces the head by one
    for the number of classes.

    Statistics of batch norm are carried and averaged; other buffers and parameters without
    gradient are constants, the same for everybody, neither trained nor sent. Dropout draws from
    the seed of the run.
    """

    net: Any
    head_layer: str | None = None
    stage_layers: tuple[str, ...] | None = None
    start: Literal["fresh", "given"] = "fresh"
    fresh_head: bool = False
    seed: Tensor | None = field(
        default=None, kw_only=True, compare=False, repr=False, metadata=NO_OPTION
    )

    def __post_init__(self) -> None:
        if isinstance(self.net, Origin):
            return
        if wrong := ranges.fault("start", self.start, ranges.hints(type(self))["start"]):
            raise BadValue(wrong)
        object.__setattr__(self, "net", Origin.of(self.net))
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.stage_layers is not None:
            object.__setattr__(self, "stage_layers", tuple(self.stage_layers))

    @property
    def skeleton(self) -> Skeleton:
        """The module without weights, and what was found out about it."""
        wishes = Wishes(self.head_layer, self.stage_layers, self.fresh_head)
        return skeleton_of(self.net, self.shape, self.classes, wishes)

    def initial(self) -> Initials:
        return {name: Initial(shape, "own") for name, shape in self.skeleton.shapes.items()}

    def init(self, seed: int) -> Weights:
        fresh = self.skeleton.fresh(seed, given=self.start == "given")
        return {name: tensor.to(self.device) for name, tensor in fresh.items()}

    def samples(self, rng: Generator, count: int) -> list[Weights]:
        """Random networks; of an instance too, whose given values are one network only."""
        seeds = torch.randint(2**62, (count,), generator=rng, device=rng.device).tolist()
        drawn = (self.skeleton.fresh(seed, given=False) for seed in seeds)
        return [{n: tensor.to(rng.device) for n, tensor in one.items()} for one in drawn]

    def stages(self, weights: Weights, x: Tensor) -> list[Tensor]:
        return self.skeleton.outputs(
            weights, x, training=self.training, notes=self.notes, seed=self.seed
        )

    def head(self, weights: Weights, features: Tensor) -> Tensor:
        return super().head(weights, features) if self.head_names[0] else features

    @property
    def head_names(self) -> tuple[str, str | None]:
        return self.skeleton.head_names

    @property
    def norm_names(self) -> tuple[str, ...]:
        return self.skeleton.norm_names

    @property
    def feature_width(self) -> int:
        return super().feature_width if self.head_names[0] else self.classes

    def with_classes(self, classes: int) -> Self:
        if not self.head_names[0]:
            raise BadValue(f"{self.title} has no linear head that could be replaced")
        head = self.skeleton.head
        return replace(self, classes=classes, head_layer=head, fresh_head=True)

    @property
    def by_example(self) -> bool:
        return self.skeleton.by_example

    @property
    def twice(self) -> bool:
        return self.skeleton.twice

    @property
    def smooth(self) -> bool:
        return self.skeleton.smooth

    @property
    def stackable(self) -> bool:
        return self.skeleton.stackable

    @property
    def stackable_at_rest(self) -> bool:
        return self.skeleton.stackable_at_rest

    @property
    def tokens(self) -> bool:
        return self.skeleton.tokens

    @property
    def draws(self) -> bool:
        return self.skeleton.draws

    def drawing(self, seed: Tensor) -> Self:
        return replace(self, seed=seed)

    @property
    def title(self) -> str:
        return short(str(self.net.name))

    def options(self) -> dict[str, Any]:
        """The arguments that built the module, then what was said of it."""
        named = {str(i): value for i, value in enumerate(self.net.positional)}
        own = {name: value for name, value in super().options().items() if name != "net"}
        return {**named, **self.net.named, **own}

    def describe(self) -> dict[str, Any]:
        # Values that are drawn anew decide nothing: another process builds an instance with others.
        given, skeleton = self.start == "given", self.skeleton
        code = skeleton.digest_as_given if given else skeleton.digest
        return {**super().describe(), "name": self.net.name, "code": code}

    def state_dict(self, weights: Weights) -> Weights:
        """Weights as the module itself loads them."""
        return self.skeleton.state_dict(weights)

    def module(self, weights: Weights) -> nn.Module:
        """The user's own module with these weights, in evaluation mode."""
        return self.skeleton.module(weights)


def as_model(given: Any, shape: tuple[int, ...], classes: int) -> Model:
    """What a user hands in as a network, for examples of a shape and a number of classes.

    A network stays what it is; a kind of network (`ConvNet`, `partial(ConvNet, width=32)`) is made
    for the shape; a module or its class is wrapped. A function is called with the shape and the
    number of classes if it takes two arguments, else without any, and what it builds is wrapped.
    """
    shape = tuple(shape)
    model = given if isinstance(given, Model) else _made(given, shape, classes)
    for what, has, wanted in (("shape", model.shape, shape), ("classes", model.classes, classes)):
        if has != wanted:
            raise BadValue(f"{model.title} is for {what} {has}, but the data have {wanted}")
    return model.fitting()


def _made(given: Any, shape: tuple[int, ...], classes: int) -> Model:
    kind: Any = given
    while isinstance(kind, partial):
        kind = kind.func
    if isinstance(kind, type) and issubclass(kind, Model):
        made: Model = given(shape, classes)
        return made
    if callable(kind) and not _is_module(kind) and _takes_two(given):
        built = given(shape, classes)
        if isinstance(built, Model):
            return built
        return Module(shape, classes, partial(given, shape, classes))
    return Module(shape, classes, given)


def _is_module(kind: Any) -> bool:
    return isinstance(kind, nn.Module) or (isinstance(kind, type) and issubclass(kind, nn.Module))


def _takes_two(function: Any) -> bool:
    """Whether a function cannot be called without two arguments, and with them can."""
    try:
        inspect.signature(function).bind(0, 0)
    except (TypeError, ValueError):
        return False
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    return False
