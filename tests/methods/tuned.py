"""What tests of fine-tuners share: a small world, teachers heard on the way, rounds taken apart."""

from __future__ import annotations

from typing import Any

import torch

from fedstill.core import Method, Weights
from fedstill.core.node import SERVER, Inbox, Node
from fedstill.methods.fedavg import FedAvg
from worlds import World, engine_for, finished, played

FAST = {"lr": 0.1, "batch_size": 8}
BASE = FedAvg(**FAST)
LITTLE: dict[str, Any] = {
    "base": BASE, "iterations": 2, "generator_steps": 2, "distil_steps": 2, "generator_batch": 8,
    "generator_width": 8, "latent": 5,
}  # fmt: skip


def same(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def sent(method: Method, world: World, rounds: int = 1) -> dict[str, Any]:
    """What each client sent in the last round."""
    heard = {}

    class Ear:
        def carry(self, message, sender, round, step):  # type: ignore[no-untyped-def]
            if sender != SERVER:
                heard[sender] = message
            return message

    played(method, world, rounds, meddling=[Ear()])
    return heard


def server_of(method: Method, world: World, round: int = 1) -> Node[Any]:
    """The server as the aggregating step sees it."""
    return engine_for(method, world).node(SERVER, round, "aggregate")


def aggregated(method: Method, world: World, heard: dict[str, Any]) -> Node[Any]:
    """The server after it heard these messages in round one."""
    node = server_of(method, world)
    finished(method.each_round()[-1].played(node, Inbox(heard)))
    return node
