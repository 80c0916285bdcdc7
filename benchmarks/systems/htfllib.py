"""FedProto and FedGen by HtFLlib's own servers and clients, their code unchanged.

It keeps every model in a file between any two uses; that is its way and stays in its times. But
for FedGen's generator, which it trains in every round and does not put back: clients go on with the
untrained one. `mended` puts it back.
"""

from __future__ import annotations

import os
from statistics import mean
from typing import Any

from torch import Tensor, nn

from systems.pfllib import played, seeded, settings, timed
from work import Rounds, Work, accuracy, network

VERSIONS = ("torch",)
UNUSED = ("h5py", "sklearn.preprocessing", "sklearn.metrics", "sklearn", "torchvision")
GENERATOR = {"noise_dim": 32, "hidden_dim": 64, "generator_learning_rate": 0.005}
SERVERS = {"fedproto": ("serverproto", "FedProto"), "fedgen": ("servergen", "FedGen")}


class Split(nn.Module):
    """The workload's network with its last layer by the name under which HtFLlib looks for it."""

    def __init__(self, whole: nn.Sequential):
        super().__init__()
        self.body, self.fc = whole[:-1], whole[-1]

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.fc(self.body(x))
        return made


def run(work: Work) -> dict[str, object]:
    # It loads whole modules, which newer versions of torch refuse unless told; they are its own.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    return played(work, "HtFLlib", UNUSED, trained)


def trained(work: Work) -> dict[str, object]:
    module, name = SERVERS[work.method]
    servers = __import__(f"flcore.servers.{module}", fromlist=[name])
    models = __import__("flcore.trainmodel.models", fromlist=["models"])
    items = __import__("flcore.clients.clientbase", fromlist=["load_item"])
    seeded(work.seed)
    first = network(work)
    assert isinstance(first, nn.Sequential)
    models.bench_network = lambda: Split(first)
    last = first[-1]
    assert isinstance(last, nn.Linear)
    rounds = Rounds(work)
    told = settings(
        work, models=["bench_network()"], models_folder_name="", feature_dim=last.in_features,
        lamda=1.0, server_epochs=50, save_folder_name="items", **GENERATOR,
    )  # fmt: skip
    kind = timed(getattr(servers, name), rounds)
    server = (keeping(kind, servers) if work.mended else kind)(told, 0)
    seeded(work.seed)
    server.train()
    return rounds.result(reached(server, items, work))


def keeping(kind: type[Any], servers: Any) -> type[Any]:
    """A server of theirs that puts the generator back when it has trained it."""

    class Keeping(kind):  # type: ignore[misc]
        def train_generator(self) -> None:
            load, loaded = servers.load_item, {}

            def remembered(role: str, name: str, folder: str) -> Any:
                return loaded.setdefault(name, load(role, name, folder))

            servers.load_item = remembered
            try:
                super().train_generator()
            finally:
                servers.load_item = load
            servers.save_item(
                loaded["generative_model"], self.role, "generative_model", self.save_folder_name
            )

    return Keeping


def reached(server: Any, items: Any, work: Work) -> float:
    """FedGen's common head, which is the whole network here; else the mean of clients' networks."""
    if work.method == "fedgen":
        found = [
            nn.Sequential(nn.Flatten(), items.load_item("Server", "head", server.save_folder_name))
        ]
    else:
        found = [
            items.load_item(client.role, "model", client.save_folder_name)
            for client in server.clients
        ]
    scores = [accuracy(network.eval(), work) for network in found]
    return mean(score for score in scores if score is not None)
