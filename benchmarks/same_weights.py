"""PFLlib's weights beside ours where nothing is drawn: python benchmarks/same_weights.py --code DIR

Everybody is awake, both sides begin with the same weights, and a client's whole set is its batch.
What is left between the two is rounding. DIR is that of own_code.py.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import torch
from torch import Tensor, nn

import fedstill
from fedstill import Execution, Experiment, Population
from fedstill.data import Collection
from systems import beside, pfllib
from work import Rounds, Work, network, write_split

EXAMPLES = 100  # of a client
CLIENTS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--code", type=Path, required=True, help="folder with PFLlib's repository")
    parser.add_argument("--network", default="logistic", choices=("logistic", "two-conv"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a client in a round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for name in pfllib.SERVERS:
            work = Work(
                options.network, CLIENTS, CLIENTS, options.rounds, batch=EXAMPLES, lr=0.1,
                epochs=options.steps, method=name, data_name="digits5",
                code=str(options.code.resolve()), data=str(Path(place, f"{name}.npz")),
            )  # fmt: skip
            moved, apart = compared(work)
            print(f"{name}: weights moved by at most {moved:.3g} and are {apart:.3g} apart")


def compared(work: Work) -> tuple[float, float]:
    """How far PFLlib's weights moved at most, and how far ours are from them at most."""
    found = beside.everybody(work)
    split = replace(found, sites=tuple(replace(s, rows=s.rows[:EXAMPLES]) for s in found.sites))
    write_split(Path(work.data or ""), split.sites)
    before, theirs, mine = start(work).state_dict(), by_pfllib(work), by_us(work, split)
    return farthest(before, theirs), farthest(mine, theirs)


def start(work: Work) -> nn.Module:
    """The same weights whenever they are asked for."""
    torch.manual_seed(7)
    return network(work)


def by_pfllib(work: Work) -> dict[str, Tensor]:
    """The weights of PFLlib's server after the last round."""
    kept: dict[str, Tensor] = {}

    def trained(work: Work) -> dict[str, object]:
        module, name = pfllib.SERVERS[work.method]
        kind = getattr(importlib.import_module(f"flcore.servers.{module}"), name)
        server = pfllib.timed(kind, Rounds(work))(pfllib.settings(work, model=start(work)), 0)
        server.train()
        kept.update(server.global_model.state_dict())
        return {}

    with redirect_stdout(StringIO()):  # it says much
        pfllib.played(work, "PFLlib", pfllib.UNUSED, trained)
    return kept


def by_us(work: Work, split: Collection) -> dict[str, Tensor]:
    """The weights of our server after the last round."""
    population = Population(split, lambda: start(work))
    experiment = Experiment(beside.method(work), population, rounds=work.rounds, seed=0)
    model = fedstill.run(experiment, execution=Execution("in_process", "cpu")).model()
    return dict(model.weights)


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The greatest difference of two numbers of the same place."""
    return max(float((one[name] - tensor).abs().max()) for name, tensor in other.items())


if __name__ == "__main__":
    main()
