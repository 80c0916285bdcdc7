"""B1: what a client costs when it does nothing; python benchmarks/overhead.py"""

from __future__ import annotations

from side_by_side import Row, arguments, measure
from work import Work

SYSTEMS = ("fedstill-in_process", "fedstill-batched", "plain", "pfllib-style", "flower")
FLOATS = {"0.24 MB": 60_000, "10 MB": 2_500_000}


def main() -> None:
    parser = arguments(__doc__ or "", SYSTEMS)
    parser.add_argument("--rounds", type=int, default=6, help="the first one warms up")
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 100, 1000], metavar="N")
    options = parser.parse_args()
    counts = options.clients[:1] if options.small else options.clients
    rows = [
        Row(
            f"{clients} clients, {size}",
            Work("none", clients, clients, options.rounds, epochs=0, floats=floats),
            unit="a client",
            parts=clients,
            bytes=4 * clients * floats,
        )
        for size, floats in FLOATS.items()
        for clients in counts
    ]
    what = "a round in which clients send back what they got"
    measure("overhead", what, rows, options, baseline="plain")


if __name__ == "__main__":
    main()
