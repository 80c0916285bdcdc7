"""Data: what there is, how it is split, and one door to it, `load`."""

from fedstill.data.catalogue import DATASETS, Entry, load
from fedstill.data.partitioned import partitioned
from fedstill.data.partitions import PARTITIONS, Partition, described
from fedstill.data.preview import counts_table, counts_text
from fedstill.data.sites import Collection, Examples, LabelledSet, Site, pooled
from fedstill.data.unlabelled import Unlabelled, public_images

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Collection",
    "Entry",
    "Examples",
    "LabelledSet",
    "Partition",
    "Site",
    "Unlabelled",
    "counts_table",
    "counts_text",
    "described",
    "load",
    "partitioned",
    "pooled",
    "public_images",
]
