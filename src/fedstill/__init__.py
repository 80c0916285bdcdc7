"""Federated learning by distillation.

    import fedstill

    data = fedstill.split(x, y, partition=fedstill.Dirichlet(10, alpha=0.5))
    population = fedstill.Population(data, Net)  # any torch.nn.Module
    runs = [
        fedstill.run(fedstill.Experiment(method, population, rounds=10))
        for method in (fedstill.FedAvg(), fedstill.FedDM())
    ]
    fedstill.compare(runs)
    fedstill.plot(runs, "accuracy.png")

Names are fetched from their rooms when they are asked for, so that `import fedstill` is quick.
Whole rooms can be asked for too, such as `fedstill.data`, `fedstill.metrics` or, for authors of
methods, `fedstill.testing`.
"""
# ruff: noqa: I001

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, which takes ten times as long to import as this file

if TYPE_CHECKING:
    from typing import Any

    # fmt: off
    from fedstill.runs.run import (
        Run as Run, compare as compare, plot as plot, read as read, run as run,
    )
    from fedstill.federation.experiment import (
        Experiment as Experiment,
    )
    from fedstill.federation.population import (
        Population as Population,
    )
    from fedstill.federation.run import (
        Progress as Progress,
    )
    from fedstill.federation.topology import (
        TOPOLOGIES as TOPOLOGIES, Complete as Complete, ErdosRenyi as ErdosRenyi,
        Exponential as Exponential, Grid as Grid, RandomRegular as RandomRegular, Ring as Ring,
        SmallWorld as SmallWorld, Star as Star, Topology as Topology, Torus as Torus,
    )
    from fedstill.federation.sampling import (
        Everyone as Everyone, Sample as Sample, Scripted as Scripted,
    )
    from fedstill.engines.execution import (
        ENGINES as ENGINES, Execution as Execution,
    )
    from fedstill.data import (
        DATASETS as DATASETS, PARTITIONS as PARTITIONS, ClassesPerClient as ClassesPerClient,
        Collection as Collection, Dirichlet as Dirichlet, DirichletPrior as DirichletPrior,
        Domains as Domains, FromFile as FromFile, Iid as Iid, NIIDBench as NIIDBench,
        Partition as Partition, QuantitySkew as QuantitySkew, clients as clients, load as load,
        split as split, unlabelled as unlabelled,
    )
    from fedstill.methods import (
        METHODS as METHODS, DFRD as DFRD, FCCL as FCCL, VHL as VHL, Centralised as Centralised,
        DeSA as DeSA, Dense as Dense, DynaFed as DynaFed, FedAvg as FedAvg, FedDF as FedDF,
        FedDM as FedDM, FedDropout as FedDropout, FedDualMatch as FedDualMatch, FedFTG as FedFTG,
        FedGen as FedGen, FedHe as FedHe, FedLGD as FedLGD, FedNova as FedNova,
        FedProto as FedProto, FedProx as FedProx, FedRolex as FedRolex, HeteroFL as HeteroFL,
        Local as Local, Moon as Moon, Scaffold as Scaffold,
    )
    from fedstill.models import (
        MLP as MLP, MODELS as MODELS, AlexNet as AlexNet, Conv4 as Conv4, ConvNet as ConvNet,
        Module as Module, PreResNet18 as PreResNet18, ResNet18 as ResNet18,
    )
    from fedstill.channels import (
        CHANNELS as CHANNELS, Channel as Channel, EightBit as EightBit, Half as Half,
        LowRank as LowRank, TensorChannel as TensorChannel, TopK as TopK,
    )
    from fedstill.core import (
        SERVER as SERVER, SGD as SGD, Adam as Adam, Addressed as Addressed, Batch as Batch,
        Data as Data, Inbox as Inbox, Message as Message, Method as Method, Model as Model,
        Node as Node, NodeId as NodeId, Place as Place, Positional as Positional, State as State,
        Step as Step, Weights as Weights, at_clients as at_clients, at_server as at_server,
        minimize as minimize,
    )
    from fedstill.core.errors import (
        FedstillError as FedstillError,
    )
    # fmt: on

# Where each name lives. The imports above say the same to type checkers; a test compares the two.
# fmt: off
_HOMES = {
    "fedstill.runs.run": (
        "Run", "compare", "plot", "read", "run",
    ),
    "fedstill.federation.experiment": (
        "Experiment",
    ),
    "fedstill.federation.population": (
        "Population",
    ),
    "fedstill.federation.run": (
        "Progress",
    ),
    "fedstill.federation.topology": (
        "TOPOLOGIES", "Complete", "ErdosRenyi", "Exponential", "Grid", "RandomRegular", "Ring",
        "SmallWorld", "Star", "Topology", "Torus",
    ),
    "fedstill.federation.sampling": (
        "Everyone", "Sample", "Scripted",
    ),
    "fedstill.engines.execution": (
        "ENGINES", "Execution",
    ),
    "fedstill.data": (
        "DATASETS", "PARTITIONS", "ClassesPerClient", "Collection", "Dirichlet", "DirichletPrior",
        "Domains", "FromFile", "Iid", "NIIDBench", "Partition", "QuantitySkew", "clients", "load",
        "split", "unlabelled",
    ),
    "fedstill.methods": (
        "METHODS", "DFRD", "FCCL", "VHL", "Centralised", "DeSA", "Dense", "DynaFed", "FedAvg",
        "FedDF", "FedDM", "FedDropout", "FedDualMatch", "FedFTG", "FedGen", "FedHe", "FedLGD",
        "FedNova", "FedProto", "FedProx", "FedRolex", "HeteroFL", "Local", "Moon", "Scaffold",
    ),
    "fedstill.models": (
        "MLP", "MODELS", "AlexNet", "Conv4", "ConvNet", "Module", "PreResNet18", "ResNet18",
    ),
    "fedstill.channels": (
        "CHANNELS", "Channel", "EightBit", "Half", "LowRank", "TensorChannel", "TopK",
    ),
    "fedstill.core": (
        "SERVER", "SGD", "Adam", "Addressed", "Batch", "Data", "Inbox", "Message", "Method",
        "Model", "Node", "NodeId", "Place", "Positional", "State", "Step", "Weights",
        "at_clients", "at_server", "minimize",
    ),
    "fedstill.core.errors": (
        "FedstillError",
    ),
}
# fmt: on
_HOME = {name: room for room, names in _HOMES.items() for name in names}
_ROOMS = (
    "channels", "core", "data", "engines", "federation", "logbook", "methods", "metrics", "models",
    "parts", "recipe", "report", "runs", "testing", "wire",
)  # fmt: skip

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name in _ROOMS:
        return import_module(f"fedstill.{name}")
    elif name == "__version__":
        value = _version()
    else:
        raise AttributeError(_unknown(name))
    globals()[name] = value  # the next time it is here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fedstill")
    except PackageNotFoundError:
        return "0"  # run from its source


def _unknown(name: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, _HOME, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"module 'fedstill' has no attribute {name!r}{hint}"
