"""The tiny federations of `fedstill.testing.worlds`, under a short name."""

from fedstill.testing.worlds import (
    CLASSES,
    World,
    around,
    as_bytes,
    engine_for,
    examples,
    experiment,
    finished,
    pictures,
    played,
    vectors,
)

__all__ = [
    "CLASSES",
    "World",
    "around",
    "as_bytes",
    "engine_for",
    "examples",
    "experiment",
    "finished",
    "pictures",
    "played",
    "vectors",
]
