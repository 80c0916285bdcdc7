"""A first run from Python: two methods on the embedded digits, and the numbers they leave behind.

    python examples/first_run.py [folder]

The same can be done with a recipe file and `fedstill run`. Nothing is downloaded.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import fedstill
from fedstill import ConvNet, Execution, Experiment, FedAvg, Local, Population


def main(out: Path) -> None:
    data = fedstill.load("digits5")  # five clients, each with digits of its own style
    population = Population(data, partial(ConvNet, width=8))  # or any torch.nn.Module
    runs = []
    for method in (Local(lr=0.05), FedAvg(lr=0.05)):
        experiment = Experiment(method, population, rounds=3, seed=0)
        run = fedstill.run(
            experiment,
            execution=Execution(device="cpu"),
            folder=out / type(method).__name__.lower(),  # left out, all stays in memory
            watch=lambda progress: print(f"  round {progress.round} of {progress.rounds}"),
            pictures=False,
        )
        print(f"{run.summary['label']} → {run.folder}")
        runs.append(run)

    # A run can be asked for its summary and for every row that was written; `fedstill.read` gives
    # the same from a folder.
    fedavg = fedstill.read(out / "fedavg")
    print("average accuracy after each round:", fedavg.accuracy_by_round())
    print("floats said upwards:", fedavg.summary["traffic"]["up"]["said"]["floats"])

    print(fedstill.compare(runs).as_markdown())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
