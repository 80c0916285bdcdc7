"""Statistics of static norm layers: those of all examples, wherever they lie."""

from __future__ import annotations

import torch

from fedstill.core import Data
from fedstill.core.seeds import generator
from fedstill.models import ConvNet
from fedstill.parts.statistics import measured, pooled

MODEL = ConvNet((1, 8, 8), 3, depth=2, width=4, norm="static")


def some(count: int, shift: float = 0.0) -> Data:
    x = torch.randn(count, 1, 8, 8, generator=generator(1, count)) + shift
    return Data.of(x, torch.zeros(count, dtype=torch.long))


def test_one_batch_gives_its_own_statistics_for_every_norm_layer() -> None:
    weights, data = MODEL.init(0), some(12)
    found = measured(MODEL, weights, data, 100)
    assert list(found) == [
        f"norm{layer}.running_{kind}" for layer in (0, 1) for kind in ("mean", "var")
    ]
    x = data.all().x
    seen = torch.conv2d(x, weights["conv0.weight"], weights["conv0.bias"], padding=1)
    assert torch.allclose(found["norm0.running_mean"], seen.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(found["norm0.running_var"], seen.var((0, 2, 3)), atol=1e-6)
    # The whole batch is evaluated as it would be by its own statistics, but for unbiasedness.
    own = MODEL({**weights, **found}, x)
    assert torch.allclose(own, MODEL(weights, x), atol=1e-2)


def test_statistics_of_batches_and_of_clients_join_to_those_of_the_union() -> None:
    weights = MODEL.init(0)
    near, far = some(10), some(30, shift=4.0)
    parts = [measured(MODEL, weights, data, 10) for data in (near, far)]
    joined = pooled(parts, [10, 30])
    whole = measured(MODEL, weights, near + far, 40)
    for kind in ("mean", "var"):
        name = f"norm0.running_{kind}"
        assert torch.allclose(joined[name], whole[name], rtol=0.01), name
    # The trap: a mean of the variances alone misses how far apart the clients are.
    within = (10 * parts[0]["norm0.running_var"] + 30 * parts[1]["norm0.running_var"]) / 40
    assert (joined["norm0.running_var"] > 1.2 * within).any()


def test_old_statistics_do_not_matter_and_nothing_is_noted_by_other_norms() -> None:
    weights, data = MODEL.init(0), some(12)
    found = measured(MODEL, weights, data, 6)
    again = measured(MODEL, {**weights, **{k: v + 5 for k, v in found.items()}}, data, 6)
    assert all(torch.equal(found[name], again[name]) for name in found)
    plain = ConvNet((1, 8, 8), 3, depth=2, width=4)
    assert measured(plain, plain.init(0), data, 6) == {}
