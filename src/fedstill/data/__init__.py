"""Data: what there is, how it is split, and one door to it, `load`."""

from fedstill.data.catalogue import DATASETS, SET_NAMES, Entry, entry_named, entry_of, load
from fedstill.data.doors import clients, split, unlabelled
from fedstill.data.partitioned import partitioned
from fedstill.data.partitions import (
    PARTITION_NAMES,
    PARTITIONS,
    ClassesPerClient,
    Dirichlet,
    DirichletPrior,
    Domains,
    FromFile,
    Iid,
    NIIDBench,
    Partition,
    QuantitySkew,
    described,
)
from fedstill.data.preview import counts_table
from fedstill.data.sites import Collection, Examples, LabelledSet, Site, pooled
from fedstill.data.unlabelled import Unlabelled, public_images

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "PARTITION_NAMES",
    "SET_NAMES",
    "ClassesPerClient",
    "Collection",
    "Dirichlet",
    "DirichletPrior",
    "Domains",
    "Entry",
    "Examples",
    "FromFile",
    "Iid",
    "LabelledSet",
    "NIIDBench",
    "Partition",
    "QuantitySkew",
    "Site",
    "Unlabelled",
    "clients",
    "counts_table",
    "described",
    "entry_named",
    "entry_of",
    "load",
    "partitioned",
    "pooled",
    "public_images",
    "split",
    "unlabelled",
]
