"""Generated features beside real examples, and what clients' heads say of them (FedGen)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import Batch, Model, Node, Weights
from fedstill.parts.generators import FeatureGenerator


class FeatureLatent(NamedTuple):
    """What the generator makes features of."""

    noise: Tensor  # [feature vector, number]
    labels: Tensor  # [feature vector]

    def at(self, step: int) -> FeatureLatent:
        """Those of one step, where [step, feature vector, ...] holds all."""
        return FeatureLatent(self.noise[step], self.labels[step])


class Guided(NamedTuple):
    """What one local step sees: real examples, and draws for generated features."""

    real: Batch
    noise: Tensor  # [example, number], for features with the labels of the real examples
    free: FeatureLatent  # with labels of their own
    strength: Tensor  # of both terms: decays over rounds, 0 after the guided epochs


def joined(real: tuple[Batch, Tensor], beside: tuple[FeatureLatent, Tensor]) -> Guided:
    """Examples with their noise and what stands beside them, as one step sees both."""
    return Guided(*real, *beside)


def drawn(
    generator: FeatureGenerator, node: Node[Any], seen: Tensor, steps: int, size: int
) -> FeatureLatent:
    """Noise and labels [step, feature vector], uniform over the classes that were seen."""
    known = torch.nonzero(seen.cpu()).flatten()
    picked = torch.randint(len(known), (steps, size), generator=node.rng("labels"))
    noise = generator.noise(node.rng("free noise"), steps, size)
    return FeatureLatent(noise.to(node.device), known[picked].to(node.device))


def heads_of(model: Model, networks: Sequence[Weights]) -> Weights:
    """The last layers of some networks side by side: weight [network, class, feature] and bias."""
    weight, bias = model.head_names
    heads = {"weight": torch.stack([weights[weight] for weights in networks])}
    if bias is not None:
        heads["bias"] = torch.stack([weights[bias] for weights in networks])
    return heads


def teacher_shares(counts: Tensor) -> Tensor:
    """[client, class], a client's say about a class; counts [client, class] start at one each."""
    started = counts + 1.0
    return started / started.sum(0)


def heads_loss(features: Tensor, labels: Tensor, heads: Weights, share: Tensor) -> Tensor:
    """Σ over clients of share · cross-entropy of their heads, mean over feature vectors.

    The released code takes means of shares and losses apart; here each row has its own share.
    """
    logits = torch.einsum("bf,icf->ibc", features, heads["weight"])  # [client, row, class]
    if "bias" in heads:
        logits = logits + heads["bias"].unsqueeze(1)
    rows = labels.expand(logits.shape[:2])
    losses = cross_entropy(logits.transpose(1, 2), rows, reduction="none")
    return (losses * share[:, labels]).sum(0).mean()
