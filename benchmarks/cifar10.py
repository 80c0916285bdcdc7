"""B3: CIFAR-10 as pfl-research publishes it; python benchmarks/cifar10.py --data-dir DIR

1000 clients of 50 images, 50 a round, batch 10, rate 0.1, a network of two convolutions. The
published network has dropout; here it is left out for every system.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from side_by_side import Row, arguments, export, measure
from work import Work

SYSTEMS = (
    "fedstill-in_process", "fedstill-lanes", "fedstill-batched",
    "plain", "pfllib-style", "flower", "pfl-research",
)  # fmt: skip


def main() -> None:
    parser = arguments((__doc__ or "").partition("\n")[0], SYSTEMS)
    parser.add_argument("--data-dir", type=Path, help="folder with the three cifar10 files")
    parser.add_argument("--rounds", type=int, default=150)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if options.small:
            data = export(Path(place), "digits5", 150, None, size=16)
        elif options.data_dir is None:
            raise SystemExit("cifar10 needs --data-dir, or --small for the embedded digits")
        else:
            data = export(Path(place), "cifar10", 1000, options.data_dir)
        rounds, awake = (min(options.rounds, 5), 10) if options.small else (options.rounds, 50)
        work = Work("two-conv", awake=awake, rounds=rounds, batch=10, lr=0.1, **data)
        label = f"{data['data_name']}, {data['clients']} clients, {rounds} rounds"
        what = f"two convolutions, {awake} clients a round"
        measure("cifar10", what, [Row(label, work)], options, baseline="plain")


if __name__ == "__main__":
    main()
