"""pfl-research from a copy of its package: for a machine that it cannot be installed on."""

from __future__ import annotations

import importlib
from multiprocessing import current_process
from typing import Any

from systems import foreign
from work import Work

VERSIONS = ("torch",)
UNUSED = ("dp_accounting", "prv_accountant", "multiprocess")


def run(work: Work) -> dict[str, object]:
    current_process().name = "MainProcess"  # others it takes for workers of a loader
    absent = foreign.stood_in(UNUSED)
    with foreign.searched(foreign.folder(work, "pfl-research")):
        averaging: Any = importlib.import_module("systems.pfl_research")
        return {**averaging.run(work), "stood_in": absent}
