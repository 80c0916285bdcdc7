"""Centralised: training on the union, which it says it was shown."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedstill.core import Data
from fedstill.core.node import SERVER
from fedstill.federation.population import Party
from fedstill.methods.centralised import Centralised, stretches
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.local import Local
from worlds import World, engine_for, pictures, played, vectors


def test_a_full_batch_round_is_one_step_down_the_loss_on_the_union() -> None:
    world, method = vectors(), Centralised(lr=0.5, batch_size=1000)
    start = engine_for(method, world).node(SERVER, 0, "look").state.weights
    engine, _ = played(method, world, rounds=1)
    held = [world.party(client).data.all() for client in world.clients]
    x, y = torch.cat([batch.x for batch in held]), torch.cat([batch.y for batch in held])
    grad = torch.func.grad(lambda w: cross_entropy(world.server_model(w, x), y))(start)
    for name, reached in engine.states[SERVER].weights.items():
        assert torch.allclose(reached, start[name] - 0.5 * grad[name], atol=1e-6)


def test_with_one_client_centralised_averaged_and_local_are_one() -> None:
    # To 1e-6: each draws its orders under a name of its own, so sums are in another order.
    world, values = vectors((25,)), {"lr": 0.3, "batch_size": 100, "weight_decay": 0.01}
    pooled, _ = played(Centralised(**values), world, rounds=5)
    averaged, _ = played(FedAvg(**values), world, rounds=5)
    alone, _ = played(Local(**values), world, rounds=5)
    for name, reached in pooled.states[SERVER].weights.items():
        assert torch.allclose(reached, averaged.states[SERVER].weights[name], atol=1e-6)
        assert torch.allclose(reached, alone.states["c0"].weights[name], atol=1e-6)


def test_one_full_step_of_everybody_averaged_is_one_step_on_the_union() -> None:
    # The weighted mean of the clients' gradients is the gradient on the union; to 1e-6.
    world = vectors()
    pooled, _ = played(Centralised(lr=0.5, batch_size=1000), world, rounds=3)
    averaged, _ = played(FedAvg(lr=0.5, batch_size=1000), world, rounds=3)
    for name, reached in pooled.states[SERVER].weights.items():
        assert torch.allclose(reached, averaged.states[SERVER].weights[name], atol=1e-6)


def test_it_says_that_examples_are_shown_and_shows_them_once() -> None:
    method = Centralised()
    assert method.sends_examples
    _, log = played(method, vectors(), rounds=3)
    assert {(row.round, row.step) for row in log.messages} == {(0, "hand_over")}
    sent = sum(row.floats for row in log.messages)
    assert sent == (20 + 27 + 23 + 30) * 4  # four numbers an example; labels are positions


def test_pictures_travel_as_bytes_and_are_normalised_as_at_home() -> None:
    world = pictures()
    engine, log = played(Centralised(), world, rounds=1)
    sizes = {row.sender: row.bytes for row in log.messages if row.field == "stored"}
    assert sizes == {"c0": 20 * 64, "c1": 27 * 64, "c2": 23 * 64}
    first = engine.states[SERVER].pools[0]
    assert first.stored.dtype == torch.uint8
    assert torch.equal(first.mean, torch.tensor(0.5))


def test_only_the_rows_that_a_client_holds_are_handed_over() -> None:
    whole = vectors((30,))
    model = whole.server_model
    pool = whole.party("c0").data
    halves = {
        "c0": Party(pool.subset(torch.arange(0, 10)), Data(), model),
        "c1": Party(pool.subset(torch.arange(10, 15)) + Data.of(*pool.take(torch.arange(15, 17))),
                    Data(), model),
    }  # fmt: skip
    engine, _ = played(Centralised(), World(halves, model), rounds=1)
    handed = torch.cat([sent.stored for sent in engine.states[SERVER].pools])
    assert torch.equal(handed, pool.take(torch.arange(17)).x)


@pytest.mark.parametrize(
    ("given", "fits"),
    [((), True), ((3, 1, 1), True), ((1,), True), ((8, 8), True), ((3, 8, 8), True),
     ((2, 1, 1), False), ((3,), False), ((1, 3, 8, 8), False)],
)  # fmt: skip
def test_statistics_stretch_to_an_example_as_torch_does(given: tuple[int, ...], fits: bool) -> None:
    assert stretches(torch.zeros(given), (3, 8, 8)) == fits
    if fits:
        assert torch.broadcast_to(torch.zeros(given), (3, 8, 8)).shape == (3, 8, 8)
