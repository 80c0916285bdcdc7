"""fedstill beside a plain PyTorch loop on a processor: python benchmarks/two_cores.py

Local training of a client, and an iteration of distribution matching, by fedstill's own engine as
`auto` chooses it and by the loop that one would write. Both are played in turn in one process with
one thread. The least processor time of all repetitions counts: other programs on the machine make
it longer, nothing makes it shorter.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedstill import Execution, Experiment, FedAvg
from fedstill.commands.bench import machine
from fedstill.commands.bench_work import BENCHMARKS, CLASSES, SHAPE, Sizes, repetition
from fedstill.engines.execution import engine_of
from systems import dm_stacked, dm_style
from work import Work, convnet

HERE = Path(__file__).resolve().parent
Play = Callable[[], object]
Applied = Callable[[], AbstractContextManager[None]]  # the switches of a run of fedstill


@dataclass(frozen=True)
class Pair:
    """The same work by fedstill and by a plain loop; a time is for so many units."""

    what: str
    units: int
    ours: Play
    plain: Play
    engine: str
    applied: Applied


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="a reduced size, to see that it works")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for pair in pairs(options.small):
        rows.append(measured(pair, options.repeat))
        print(f"{pair.what}: {rows[-1]['ours_ms']:.2f} ms, plain {rows[-1]['plain_ms']:.2f} ms, "
              f"ratio {rows[-1]['ratio']:.2f}", flush=True)  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "two_cores.json"
    found = {"when": time.strftime("%Y-%m-%d"), "small": options.small, "machine": machine()}
    path.write_text(json.dumps({**found, "repeat": options.repeat, "rows": rows}) + "\n")
    print(f"→ {path}")


def measured(pair: Pair, repeat: int) -> dict[str, Any]:
    """Both in turn; the first of each prepares things."""
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(repeat + 1):
        for name, play in (("ours", pair.ours), ("plain", pair.plain)):
            with pair.applied() if name == "ours" else nullcontext():
                began = time.process_time()
                play()
                times[name].append(time.process_time() - began)
    ours, plain = (1000 * min(times[name][1:]) / pair.units for name in ("ours", "plain"))
    return {
        "what": pair.what, "engine": pair.engine, "units": pair.units, "ours_ms": ours,
        "plain_ms": plain, "ratio": ours / plain, "seconds": times,
    }  # fmt: skip


def pairs(small: bool) -> list[Pair]:
    narrow = 8 if small else 128
    default = Sizes(clients=2, width=narrow, batch=32, steps=2)
    large = Sizes(clients=1, width=narrow, batch=8 if small else 256, steps=4)
    own = Sizes(clients=2, width=4 if small else 64, batch=32, steps=2)
    light = Sizes(clients=10, width=8, batch=10, steps=8)
    return [
        local("a local step, the default ConvNet", "local-step", default),
        local("the same, batches of 256", "local-step", large),
        local("a local step, a small ConvNet", "small-step", light),
        local("a local step, a module of one's own", "module-step", own),
        matching("an iteration of distribution matching", BENCHMARKS["matching"].small),
    ]


def local(what: str, name: str, sizes: Sizes) -> Pair:
    """Clients train once through their examples."""
    benchmark, device = BENCHMARKS[name], torch.device("cpu")
    crowd = benchmark.crowd(sizes, device)
    experiment = Experiment(FedAvg(batch_size=sizes.batch), crowd)
    execution = Execution("auto", "cpu", threads=1)
    engine = engine_of(experiment, execution)
    play, number = repetition(engine, "step"), iter(range(10**6))
    model = next(iter(experiment.networks))
    net = plain_network(name, model, sizes)
    everything = crowd.party(crowd.clients[0]).data.all()
    x, y = everything.x, everything.y
    return Pair(
        what, sizes.clients * sizes.steps, lambda: play(next(number)),
        lambda: [train(net, x, y, sizes) for _ in range(sizes.clients)],
        execution.engine_name(experiment.networks),
        lambda: execution.applied(experiment.networks),
    )  # fmt: skip


def plain_network(name: str, model: Any, sizes: Sizes) -> nn.Module:
    """The same network as modules of torch."""
    if name == "module-step":
        made: nn.Module = model.module(model.init(0))
        return made
    return convnet(SHAPE, CLASSES, sizes.width)


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor, sizes: Sizes) -> None:
    """One pass over a client's examples, as one writes it."""
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for rows in torch.randperm(len(y)).split(sizes.batch):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()


def matching(what: str, sizes: Sizes) -> Pair:
    """One client's iterations, against all classes in one pass by hand."""
    benchmark, sizes = BENCHMARKS["matching"], replace(sizes, clients=1)
    experiment = Experiment(benchmark.method(sizes), benchmark.crowd(sizes, torch.device("cpu")))
    execution = Execution("auto", "cpu", threads=1)
    play, number = repetition(engine_of(experiment, execution), "step"), iter(range(10**6))
    with tempfile.TemporaryDirectory() as place:
        work = Work(
            "convnet", 1, 1, sizes.steps, batch=sizes.batch, per_class=sizes.per_class,
            width=sizes.width, data=str(noise(Path(place) / "noise.npz", 2 * sizes.batch)),
        )  # fmt: skip
        iteration = dm_stacked.iteration(dm_style.Task(work))
    return Pair(
        what, sizes.steps, lambda: play(next(number)),
        lambda: [iteration() for _ in range(sizes.steps)],
        execution.engine_name(experiment.networks),
        lambda: execution.applied(experiment.networks),
    )  # fmt: skip


def noise(path: Path, per_class: int) -> Path:
    """Images of noise, in a file as the side-by-side benchmarks read them."""
    labels = np.arange(per_class * CLASSES) % CLASSES
    images = np.random.default_rng(0).integers(0, 256, (len(labels), *SHAPE), dtype=np.uint8)
    np.savez(
        path, train_x=images, train_y=labels, test_x=images[:10], test_y=labels[:10],
        rows=np.arange(len(labels)), counts=np.array([len(labels)]),
        mean=np.full(3, 0.5), std=np.full(3, 0.25),
    )  # fmt: skip
    return path


if __name__ == "__main__":
    main()
