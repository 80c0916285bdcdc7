"""METHODS, one visible table of names, and METHOD_NAMES, which knows plug-ins and files too."""

from __future__ import annotations

from typing import Any

from fedstill.core.method import Method, undecorated
from fedstill.core.names import Names, subclass_fault
from fedstill.methods.centralised import Centralised
from fedstill.methods.dense import Dense
from fedstill.methods.desa import DeSA
from fedstill.methods.dfrd import DFRD
from fedstill.methods.dynafed import DynaFed
from fedstill.methods.fccl import FCCL
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.feddf import FedDF
from fedstill.methods.feddm import FedDM
from fedstill.methods.feddropout import FedDropout
from fedstill.methods.feddualmatch import FedDualMatch
from fedstill.methods.fedftg import FedFTG
from fedstill.methods.fedgen import FedGen
from fedstill.methods.fedhe import FedHe
from fedstill.methods.fedlgd import FedLGD
from fedstill.methods.fednova import FedNova
from fedstill.methods.fedproto import FedProto
from fedstill.methods.fedprox import FedProx
from fedstill.methods.fedrolex import FedRolex
from fedstill.methods.heterofl import HeteroFL
from fedstill.methods.local import Local
from fedstill.methods.moon import Moon
from fedstill.methods.scaffold import Scaffold
from fedstill.methods.vhl import VHL

METHODS: dict[str, type[Method]] = {
    "local": Local,
    "centralised": Centralised,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fednova": FedNova,
    "scaffold": Scaffold,
    "vhl": VHL,
    "fedgen": FedGen,
    "moon": Moon,
    "fedproto": FedProto,
    "fedhe": FedHe,
    "feddm": FedDM,
    "feddualmatch": FedDualMatch,
    "fedlgd": FedLGD,
    "dynafed": DynaFed,
    "desa": DeSA,
    "feddf": FedDF,
    "fccl": FCCL,
    "heterofl": HeteroFL,
    "feddropout": FedDropout,
    "fedrolex": FedRolex,
    "dfrd": DFRD,
    "dense": Dense,
    "fedftg": FedFTG,
}

_no_method = subclass_fault(Method)


def _fault(value: Any) -> str | None:
    """Why something is not a method, or None."""
    if wrong := _no_method(value):
        return wrong
    line = undecorated(value)
    return f"cannot be used: {line}" if line else None


METHOD_NAMES: Names[type[Method]] = Names("method", METHODS, "fedstill.methods", _fault)

__all__ = [
    "DFRD",
    "FCCL",
    "METHODS",
    "METHOD_NAMES",
    "VHL",
    "Centralised",
    "DeSA",
    "Dense",
    "DynaFed",
    "FedAvg",
    "FedDF",
    "FedDM",
    "FedDropout",
    "FedDualMatch",
    "FedFTG",
    "FedGen",
    "FedHe",
    "FedLGD",
    "FedNova",
    "FedProto",
    "FedProx",
    "FedRolex",
    "HeteroFL",
    "Local",
    "Moon",
    "Scaffold",
]
