"""FedAvg and SCAFFOLD by PFLlib's own servers and clients, their code unchanged.

They read examples from files, as they always do; scores of its rounds are left out, since they
are no part of the others' times either.
"""

from __future__ import annotations

import random
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import torch

from systems import foreign
from work import Rounds, Work, accuracy, load, network

VERSIONS = ("torch",)
UNUSED = ("h5py", "sklearn.preprocessing", "sklearn.metrics", "sklearn")
SERVERS = {"fedavg": ("serveravg", "FedAvg"), "scaffold": ("serverscaffold", "SCAFFOLD")}


def run(work: Work) -> dict[str, object]:
    return played(work, "PFLlib", UNUSED, trained)


def played(
    work: Work, repository: str, unused: Sequence[str], trained: Callable[[Work], dict[str, object]]
) -> dict[str, object]:
    """What training brings in a repository's copy, from a folder with the files that it reads."""
    absent = foreign.stood_in(unused)
    with (
        tempfile.TemporaryDirectory() as place,
        foreign.searched(foreign.folder(work, repository, "system")),
    ):
        Path(place, "dataset").symlink_to(files(work))
        Path(place, "system").mkdir()
        with chdir(Path(place, "system")):  # from where its paths count
            return {**trained(work), "stood_in": absent}


def files(work: Work) -> Path:
    """A folder beside the split with every client's examples, as PFLlib and HtFLlib read them.

    It is written once: the split is every seed's.
    """
    assert work.data is not None
    folder = Path(work.data).with_suffix(".files")
    if folder.exists():
        return folder
    examples = load(work.data)
    for kind in ("train", "test"):
        (folder / "bench" / kind).mkdir(parents=True)
    for client in range(work.clients):
        x, y = examples.of(client)
        for kind, rows in (("train", slice(None)), ("test", slice(1))):
            told = {"x": x[rows].numpy(), "y": y[rows].numpy()}
            path = folder / "bench" / kind / f"{client}.npz"
            np.savez_compressed(path, data=np.array(told, dtype=object))
    return folder


def settings(work: Work, **more: Any) -> Namespace:
    """The options of its command line that a server and its clients look at."""
    told: dict[str, Any] = {
        "device": work.device, "dataset": "bench", "num_classes": 10, "algorithm": work.method,
        "global_rounds": work.rounds - 1,  # it plays one more than it is told
        "local_epochs": work.epochs, "batch_size": work.batch, "local_learning_rate": work.lr,
        "learning_rate_decay": False, "learning_rate_decay_gamma": 0.99, "few_shot": 0,
        "num_clients": work.clients, "join_ratio": work.awake / work.clients,
        "random_join_ratio": False, "time_select": False, "goal": "test", "time_threthold": 1e9,
        "save_folder_name": "items", "top_cnt": 100, "auto_break": False, "eval_gap": 1,
        "client_drop_rate": 0.0, "train_slow_rate": 0.0, "send_slow_rate": 0.0, "dlg_eval": False,
        "dlg_gap": 100, "batch_num_per_client": 2, "num_new_clients": 0,
        "fine_tuning_epoch_new": 0, "server_learning_rate": 1.0,
    }  # fmt: skip
    return Namespace(**{**told, **more})


def timed(kind: type[Any], rounds: Rounds) -> type[Any]:
    """A server of theirs that takes the time where a round begins, and scores nothing meanwhile."""

    class Timed(kind):  # type: ignore[misc]
        def select_clients(self) -> Any:
            if rounds.ready is not None:
                rounds.end()
            rounds.begin()
            return super().select_clients()

        def evaluate(self, *args: Any, **kwargs: Any) -> None:
            self.rs_test_acc.append(0.0)

        def save_results(self) -> None:
            rounds.end()

        def save_global_model(self) -> None:
            """It is scored here."""

    return Timed


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def trained(work: Work) -> dict[str, object]:
    module, name = SERVERS[work.method]
    servers = __import__(f"flcore.servers.{module}", fromlist=[name])
    rounds = Rounds(work)
    seeded(work.seed)
    server = timed(getattr(servers, name), rounds)(settings(work, model=network(work)), 0)
    seeded(work.seed)  # its clients set the seed to nought
    server.train()
    return rounds.result(accuracy(server.global_model.eval(), work))
