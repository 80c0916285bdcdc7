"""B5: distribution matching of one client; python benchmarks/matching.py

10 classes, 256 real and 50 synthetic images of each, augmented, under a fresh random network in
each iteration. CIFAR-10 from --data-dir; without it the embedded digits in a reduced size.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from side_by_side import Row, arguments, export, measure
from work import Work

SYSTEMS = ("fedstill-matching", "fedstill-matching-half", "dm-style", "dm-stacked")


def main() -> None:
    parser = arguments((__doc__ or "").partition("\n")[0], SYSTEMS)
    parser.add_argument("--data-dir", type=Path, help="folder with the three cifar10 files")
    parser.add_argument("--iterations", type=int, default=500)
    options = parser.parse_args()
    reduced = options.small or options.data_dir is None
    with tempfile.TemporaryDirectory() as place:
        name = "digits5" if reduced else "cifar10"
        data = export(Path(place), name, 1, options.data_dir, size=32)
        sizes = {"batch": 32, "per_class": 5, "width": 16, "epochs": 60}
        if not reduced:
            sizes = {"batch": 256, "per_class": 50, "width": 128, "epochs": 300}
        count = min(options.iterations, 40) if options.small else options.iterations
        work = Work("convnet", awake=1, rounds=count, **sizes, **data)
        label = (
            f"{name}, {sizes['batch']} real and {sizes['per_class']} synthetic images a class, "
            f"width {sizes['width']}, {count} iterations"
        )
        row = Row(label, work, unit="an iteration", parts=count)
        what = "distribution matching, 10 classes"
        measure("matching", what, [row], options, baseline="dm-style")


if __name__ == "__main__":
    main()
