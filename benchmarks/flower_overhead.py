"""What a round over Flower costs besides computing: three SuperNodes, TLS, keys, the filter.

Measured inside one ServerApp: the exchange of a deployment over Flower, whose ClientApp carries
bytes to a door that says them back, and Flower's own FedAvg with arrays of the same size, whose
ClientApp gives other numbers back. No scoring. Needs `fedstill[flower]` and nginx.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
from pathlib import Path

from demo_sites import write_data
from fedstill.deploy import flower
from fedstill.deploy import site as sites
from fedstill.deploy.flower_app import PACKAGE
from fedstill.sites import door
from flower_trial import FlowerConsortium, wait

SIZES = (("empty", 0), ("1 MB", 10**6), ("50 MB", 50 * 10**6))

SERVER = """\
import json
import os
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


def exchanges(nodes, size, times):
    seconds = []
    for _ in range(times):
        asked = {site: os.urandom(size) for site in nodes.keys}
        began = time.perf_counter()
        found = nodes.ask(asked, 900)
        seconds.append(time.perf_counter() - began)
        assert found == asked, {site: str(answer)[:80] for site, answer in found.items()}
    return seconds


def fedavg(grid, size, times):
    moments = [time.perf_counter()]

    def scored(round, arrays):
        moments.append(time.perf_counter())

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    array = np.random.default_rng(0).random(max(1, size // 4), dtype=np.float32)
    strategy.start(grid, ArrayRecord([array]), num_rounds=times, evaluate_fn=scored)
    # The first call is before the first round.
    return [after - before for before, after in zip(moments[1:], moments[2:])]


@app.main()
def main(grid, context):
    from fedstill.deploy import flower
    from fedstill.sites.flower import Nodes

    nodes = Nodes(grid, flower.keys_of(Path(DEPLOYMENT)), 600)
    assert not nodes.wait_for(nodes.keys, 300)
    found = []
    for label, size in SIZES:
        for system, seconds in (
            ("fedstill over Flower", exchanges(nodes, size, TIMES)),
            ("Flower FedAvg", fedavg(grid, size, TIMES)),
        ):
            found.append({"system": system, "size": label, "seconds": seconds})
            Path(FOUND).with_suffix(".part").write_text(json.dumps(found))
    os.replace(Path(FOUND).with_suffix(".part"), FOUND)
"""

TRAIN = """

@app.train()
def train(message, context):
    import numpy as np
    from flwr.app import ArrayRecord, MetricRecord

    (array,) = message.content["arrays"].to_numpy_ndarrays()
    content = RecordDict({
        "arrays": ArrayRecord([array + np.float32(context.node_id % 97)]),
        "metrics": MetricRecord({"num-examples": 1}),
    })
    return Message(content, reply_to=message)
"""


def write_app(consortium: FlowerConsortium, times: int, found: Path) -> None:
    """The deployment's app with another ServerApp, and a ClientApp that can train as well."""
    package = consortium.flower / "app" / PACKAGE
    constants = (
        f"DEPLOYMENT, FOUND = {str(consortium.out)!r}, {str(found)!r}\n"
        f"SIZES, TIMES = {SIZES!r}, {times}\n"
    )
    (package / "server.py").write_text(SERVER + constants)
    client = package / "client.py"
    client.write_text(client.read_text() + TRAIN)


def open_door(consortium: FlowerConsortium, name: str) -> None:
    """A door that says everything back, until this process ends."""
    node = consortium.nodes / name
    consortium.make_node(name)
    flower.write_node(sites.opened(consortium.place(name)), node)
    secret = door.read_secret(node / "door.key")
    thread = threading.Thread(
        target=door.serve, args=(node / "door", secret, lambda data: data), daemon=True
    )
    thread.start()


def measured(folder: Path, times: int, seconds: float) -> list[dict[str, object]]:
    consortium = FlowerConsortium(folder, write_data(folder / "data", 3), "fedavg")
    found = folder / "overhead.json"
    write_app(consortium, times, found)
    try:
        consortium.start_link()
        consortium.start_filter()
        consortium.said(consortium.flower / "register.sh")
        for name in consortium.data:
            open_door(consortium, name)
            consortium.start_node(name)
        consortium.submit()
        wait(found.exists, f"the measurements; logs: {folder}", seconds)
    finally:
        consortium.close()
    rows: list[dict[str, object]] = json.loads(found.read_text())
    return rows


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--times", type=int, default=3)
    asked.add_argument("--seconds", type=float, default=1500, help="after which it is given up")
    asked.add_argument("--out", type=Path)
    given = asked.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fedstill-overhead-"))
    rows = measured(folder, given.times, given.seconds)
    for row in rows:
        seconds = row["seconds"]
        assert isinstance(seconds, list)
        print(
            f"{row['system']:22} {row['size']:6} {statistics.median(seconds):7.2f} s "
            f"({min(seconds):.2f} to {max(seconds):.2f})"
        )
    if given.out:
        load = os.getloadavg()
        given.out.write_text(json.dumps({"load": load, "nodes": 3, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
