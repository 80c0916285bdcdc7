"""What a round among p2pfl's peers costs when nothing is learnt: three peers, gRPC with TLS.

    pip install p2pfl opendp "pyarrow<18" "huggingface_hub<0.30" "fsspec<2024" && pip uninstall ray
    python benchmarks/p2pfl_overhead.py

In an environment of its own: p2pfl stays outside this project. Without Ray, which listens on every
interface. The peers are threads of one process. A round is half of what three rounds take more
than one.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from p2pfl.learning.aggregators.fedavg import FedAvg
from p2pfl.learning.dataset.p2pfl_dataset import P2PFLDataset
from p2pfl.learning.frameworks.learner import Learner
from p2pfl.learning.frameworks.p2pfl_model import P2PFLModel
from p2pfl.node import Node

SIZES = {"empty": 4, "1 MB": 10**6, "50 MB": 50 * 10**6}
SECONDS = 300.0


class Numbers(P2PFLModel):  # type: ignore[misc]
    """Weights and nothing else."""

    def get_parameters(self) -> list[np.ndarray]:
        return list(self.model)

    def set_parameters(self, params: Any) -> None:
        if isinstance(params, bytes):
            params, self.additional_info = self.decode_parameters(params)
        self.model = list(params)

    def get_framework(self) -> str:
        return "pytorch"


class Nothing(Learner):  # type: ignore[misc]
    """Learns nothing."""

    def fit(self) -> P2PFLModel:
        self.get_model().set_contribution([self.addr], 1)
        return self.get_model()

    def interrupt_fit(self) -> None:
        """There is nothing to interrupt."""

    def evaluate(self) -> dict[str, float]:
        return {}

    def get_framework(self) -> str:
        return "pytorch"


def seconds(size: int, rounds: int, peers: int = 3) -> float:
    """So many rounds, from the first word to the end of all."""
    rows = Dataset.from_dict({"x": [0]})
    data = P2PFLDataset(DatasetDict({"train": rows, "test": rows}))
    nodes = []
    for _ in range(peers):
        model = Numbers([np.zeros(max(1, size // 4), np.float32)], num_samples=1)
        nodes.append(Node(model, data, addr="127.0.0.1", learner=Nothing(), aggregator=FedAvg()))
    try:
        for node in nodes:
            node.start()
        for one in nodes:
            for other in nodes:
                if one is not other:
                    one.connect(other.addr)
        time.sleep(3)
        began = time.perf_counter()
        nodes[0].set_start_learning(rounds=rounds, epochs=1, trainset_size=peers)
        time.sleep(1)
        while any(node.state.round is not None for node in nodes):
            if time.perf_counter() - began > SECONDS:
                raise SystemExit(f"{rounds} rounds of {size} bytes did not end in {SECONDS} s")
            time.sleep(0.02)
        return time.perf_counter() - began
    finally:
        for node in nodes:
            node.stop()


def main() -> None:
    for name, size in SIZES.items():
        one, three = seconds(size, 1), seconds(size, 3)
        print(json.dumps({"size": name, "seconds a round": round((three - one) / 2, 3)}))


if __name__ == "__main__":
    main()
