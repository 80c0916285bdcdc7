"""A first run from Python: a recipe as tables, two methods, and the numbers they leave behind.

    python examples/first_run.py [folder]

The same can be done with a recipe file and `fedstill run`. Nothing is downloaded.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from fedstill import recipe as config
from fedstill.logbook.reader import read_run
from fedstill.report.tables import comparison
from fedstill.runs import recipes as runs

TABLES = {
    "run": {"name": "first", "rounds": 3, "seed": 0, "device": "cpu", "pictures": False},
    "data": {"name": "digits5"},
    "models": {"name": "convnet", "width": 8},
    "method": [
        {"name": "local", "lr": 0.05},
        {"name": "fedavg", "lr": 0.05},
    ],
}


def main(out: Path) -> None:
    recipes = config.checked(TABLES)  # one for each method; raises with every fault at once
    pairs = runs.folders_for(recipes, [0], out)
    for recipe, folder in pairs:
        runs.begin(recipe, folder, watch=lambda p: print(f"  round {p.round} of {p.rounds}"))
        print(f"{recipe.label} → {folder.name}")

    # A run folder read back: the summary, and every row that was written.
    run = read_run(out / "fedavg")
    print("average accuracy after each round:", run.accuracy_by_round())
    print("floats said upwards:", run.summary["traffic"]["up"]["said"]["floats"])

    print(comparison([folder for _, folder in pairs]).as_markdown())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
