"""Sets of images that clients sent: what an image stands for, its weight, and who is believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fedstill.core import Batch, Model, Node, NodeId, Weights, trees
from fedstill.core.content import Length
from fedstill.parts.outliers import believed
from fedstill.parts.robust import Aggregation


class Sent(Protocol):
    """A message with images, sorted by class."""

    @property
    def images(self) -> Tensor: ...

    @property
    def labels(self) -> Tensor: ...

    @property
    def counts(self) -> Tensor | None: ...


S = TypeVar("S", bound=Sent)


def images_sent(model: Model, per_class: int) -> dict[str, Length]:
    """How many images a client may send: one at least, at most so many of every class."""
    return {"image": range(1, per_class * model.classes + 1)}


def stands_for(client: Node[Any], labels: Tensor) -> Tensor:
    """[image], a client's examples of a class over the images that it sends of it."""
    counts = client.data.counts(client.model.classes).to(labels.device)
    return counts[labels] / torch.bincount(labels)[labels]


def image_weights(sent: Sequence[Sent]) -> Tensor:
    """[image], one in the mean: by the examples that an image stands for, or all alike."""
    counts = [each.counts for each in sent if each.counts is not None]
    weight = torch.cat(counts or [torch.ones_like(each.labels) for each in sent])
    return weight / weight.float().mean()


def believed_sets(
    sent: Mapping[NodeId, S], model: Model, weights: Weights, how: Aggregation
) -> dict[NodeId, S]:
    """What clients sent; unless means are taken, without classes that look unlike the others'."""
    if how.rule == "mean":
        return dict(sent)
    sets = {name: Batch(each.images, each.labels) for name, each in sent.items()}
    kept = believed(sets, model, weights, how)
    left = {
        name: trees.map_tensors(lambda t, k=kept[name]: t[k], each) for name, each in sent.items()
    }
    return {name: each for name, each in left.items() if len(each.labels)}
