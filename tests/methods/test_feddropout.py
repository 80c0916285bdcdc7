"""Federated Dropout: random parts, drawn anew for each client and round."""

from __future__ import annotations

from typing import Any

import torch

from fedstill.core import Message, seeds
from fedstill.core.node import SERVER
from fedstill.methods.feddropout import Drawn, FedDropout
from fedstill.parts.submodels import extract, random_units
from worlds import engine_for, played, vectors

METHOD = FedDropout(budgets=(1.0, 0.5, 0.5, 0.5), lr=0.1, batch_size=8)


def sent(rounds: int = 1) -> tuple[list[tuple[int, Drawn]], Any, Any]:
    heard: list[tuple[int, Drawn]] = []

    class Ear:
        def carry(self, message: Message, sender: str, round: int, step: str) -> Message:
            if isinstance(message, Drawn):
                heard.append((round, message))
            return message

    engine, log = played(METHOD, vectors(), rounds, meddling=[Ear()])
    return heard, engine, log


def test_a_client_can_tell_its_units_from_the_seed() -> None:
    heard, _, _ = sent()
    model = vectors().server_model
    start = engine_for(METHOD, vectors()).node(SERVER, 0, "look").state.weights
    for (_, message), rate in zip(heard, METHOD.budgets, strict=True):
        units = random_units(model.narrowed(rate), seeds.generator(message.seed))
        expected = extract(model, start, units)
        assert all(torch.equal(message.weights[name], expected[name]) for name in expected)


def test_parts_differ_between_clients_and_rounds() -> None:
    heard, _, _ = sent(3)
    seeds_heard = [message.seed for _, message in heard]
    assert len(set(seeds_heard)) == len(seeds_heard) == 12


def test_a_seed_travels_with_every_part() -> None:
    _, _, log = sent()
    down = [(row.field, row.floats, row.hearers) for row in log.messages if row.direction == "down"]
    half = 4 * 4 + 4 + 3 * 4 + 3
    assert down == [("weights", 67, 1), ("seed", 1, 1)] + 3 * [("weights", half, 1), ("seed", 1, 1)]


def test_what_is_averaged_is_what_was_handed_out() -> None:
    # With no learning to speak of, parts return as they were: the network must not change.
    still = FedDropout(budgets=(0.5,) * 4, lr=1e-12, batch_size=8)
    short, _ = played(still, vectors(), 1)
    long, _ = played(still, vectors(), 4)
    left, right = (engine.states[SERVER].weights for engine in (short, long))
    assert all(torch.allclose(left[name], right[name], atol=1e-6) for name in left)


def test_one_more_client_does_not_change_the_draws_of_the_others() -> None:
    few, many = vectors((20, 27)), vectors((20, 27, 23))
    drawn = []
    for world in (few, many):
        method = FedDropout(budgets=(0.5,) * len(world.clients))
        engine, _ = played(method, world, 1)
        server = engine.node(SERVER, 1, "aggregate")
        drawn.append(method.units(server, "c1")["layer0"].tolist())
    assert drawn[0] == drawn[1]
