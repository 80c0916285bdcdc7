"""B2: logistic regression with many clients, ten a round; python benchmarks/small.py

MNIST from --data-dir, 1000 clients of 60 images; without it the embedded digits, 150 clients of 10.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from side_by_side import Row, arguments, export, measure
from work import Work

SYSTEMS = (
    "fedstill-in_process", "fedstill-batched", "plain", "pfllib-style", "flower", "pfl-research",
)  # fmt: skip


def main() -> None:
    parser = arguments((__doc__ or "").partition("\n")[0], SYSTEMS)
    parser.add_argument("--data-dir", type=Path, help="folder with mnist.npz")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if options.data_dir is None:
            print("no --data-dir: the embedded digits stand in for MNIST")
            data = export(Path(place), "digits5", 150, None)
        else:
            clients = 100 if options.small else 1000
            data = export(Path(place), "mnist", clients, options.data_dir)
        rounds = min(options.rounds, 10) if options.small else options.rounds
        work = Work("logistic", awake=10, rounds=rounds, batch=10, lr=0.05, epochs=2, **data)
        label = f"{data['data_name']}, {data['clients']} clients, {rounds} rounds"
        what = "logistic regression, 10 clients a round"
        measure("small", what, [Row(label, work)], options, baseline="plain")


if __name__ == "__main__":
    main()
