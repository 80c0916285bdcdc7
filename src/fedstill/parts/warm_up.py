"""Sets matched before the first round, under random networks, made once and kept between runs."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fedstill.core import Model, Node, Record, trees
from fedstill.core.beside import begun
from fedstill.core.errors import BadValue
from fedstill.models.convnet import ConvNet
from fedstill.models.mlp import MLP
from fedstill.parts import random_networks
from fedstill.parts.distribution_matching import Matching
from fedstill.parts.synthetic_sets import STARTS, Start, SyntheticSet, from_noise, held_classes

MatchingNetwork = Literal["own", "convnet"]


def plain_network(model: Model, width: int = 128) -> Model:
    """The network under which the distillation papers match, for what a model sees.

    For images a ConvNet of three blocks with instance norm, fewer where the images are too small
    to be pooled so often. For vectors, which the papers do not have, as many linear layers.
    """
    if len(model.shape) == 1:
        return MLP(model.shape, model.classes, (width,) * 3, device=model.device)
    if len(model.shape) != 3:
        raise BadValue(
            "sets are matched for images of channels, height and width or for vectors, not for "
            f"inputs of shape {tuple(model.shape)}"
        )
    depth = min(3, max(1, min(model.shape[1:]).bit_length() - 1))
    return ConvNet(model.shape, model.classes, depth, width, device=model.device)


MAKING = 3  # raised when the same settings come to make other warm-up sets


class Kept(Record):
    """A warm-up set as it is kept between runs."""

    key: str
    images: Tensor
    share: Tensor
    classes: Tensor
    loss: Tensor | None  # which the step that made it told


async def warmed_up(
    node: Node[Any],
    matching: Matching,
    start: Start,
    per_class: int,
    model: Model | None = None,
) -> SyntheticSet:
    """A set matched to the node's data under fresh random networks, the same for all nodes.

    It depends on data, settings, network and seed alone, to the last digits on what computes it
    too; where the node has a cache, it is made once and found again by all these, with the loss
    that was told of it. The networks are of the node's own kind unless `model` is given. A set of
    private data is made anew in every run: each is a release of its own.
    """
    held = held_classes(node)
    if not held:  # nothing to distil
        return from_noise(node, held, per_class)
    kind = model or node.model
    seed = node.draw("warm-up networks", shared=True)
    key = ""
    cache = node.cache if node.privacy is None else None
    if cache is not None:
        settings = [float(v) if isinstance(v, int) else v for v in astuple(matching)]  # 1 is 1.0
        draws = (seed, node.draw("warm-up"))
        made_by = (MAKING, settings, start, per_class, kind.describe(), draws)
        key = cache.key(f"{node.data.digest()} {made_by}")
        kept = cache.find(key, Kept)
        if kept is not None:
            if kept.loss is not None:
                node.log(loss=kept.loss)
            return SyntheticSet(*trees.to((kept.images, kept.share, kept.classes), node.device))
    starting = begun(partial(STARTS[start], node, held, per_class), node.device)
    networks = random_networks.networks(
        seed, kind.samples, sum(kind.floats().values()), node.device
    )
    steps = None if node.private else matching.iterations(node, held, networks, kind)
    matched = await matching.matched(node, starting(), networks, kind, steps)
    if cache is not None:
        told = node.numbers.get("loss")
        loss = None if told is None else torch.as_tensor(told)
        cache.keep(key, Kept(key, matched.images, matched.share, matched.classes, loss))
    return matched
