"""How one set is split over clients: rules from labels to rows, by name. No loading.

No row appears twice. All rows are used, except where a rule says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields

from fedstill.core.errors import DataError, unknown
from fedstill.core.names import Names, subclass_fault
from fedstill.data.partitions.classes import ClassesPerClient
from fedstill.data.partitions.dirichlet import Dirichlet
from fedstill.data.partitions.even import Iid, QuantitySkew
from fedstill.data.partitions.given import Domains, FromFile
from fedstill.data.partitions.niid_bench import NIIDBench
from fedstill.data.partitions.partition import Partition, Rows, Split
from fedstill.data.partitions.prior import DirichletPrior

PARTITIONS: dict[str, type[Partition]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "dirichlet-prior": DirichletPrior,
    "niid-bench": NIIDBench,
    "classes-per-client": ClassesPerClient,
    "quantity": QuantitySkew,
    "domains": Domains,
    "file": FromFile,
}

PARTITION_NAMES: Names[type[Partition]] = Names(
    "partition kind", PARTITIONS, "fedstill.partitions", subclass_fault(Partition)
)

__all__ = [
    "PARTITIONS",
    "PARTITION_NAMES",
    "ClassesPerClient",
    "Dirichlet",
    "DirichletPrior",
    "Domains",
    "FromFile",
    "Iid",
    "NIIDBench",
    "Partition",
    "QuantitySkew",
    "Rows",
    "Split",
    "described",
]


def described(table: Mapping[str, object]) -> Partition:
    """The partition that a table asks for: `kind` names it, the other keys are its fields."""
    kind = table.get("kind")
    wrong = PARTITION_NAMES.wrong(kind)
    if wrong is not None:
        raise DataError(wrong)
    made_by = PARTITION_NAMES[str(kind)]
    given = {key: value for key, value in table.items() if key != "kind"}
    known = [field.name for field in fields(made_by)]
    strange = [key for key in given if key not in known]
    if strange:
        raise DataError(unknown(f"key of partition {kind}", strange[0], known))
    needed = [field.name for field in fields(made_by) if field.default is MISSING]
    missing = [name for name in needed if name not in given]
    if missing:
        raise DataError(f"partition {kind} needs more than it was given: {', '.join(missing)}")
    return made_by(**given)
