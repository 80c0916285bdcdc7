"""The likelihood-ratio attack: what a run says of a record, beside shadow runs with and without it.

Carlini, Chien, Nasr, Song, Terzis, Tramèr. Membership Inference Attacks From First Principles.
IEEE S&P 2022. Every run is in turn the target, and all others are its shadows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedstill.core.errors import BadValue

Values = npt.NDArray[np.float64]
Inside = npt.NDArray[np.bool_]
ENOUGH = 32  # runs for a variance of each record's own; below, one for all records


class Law(NamedTuple):
    """A normal law for each target run and record."""

    mean: Values  # [run, record]
    deviation: Values  # [run, record]
    known: Inside  # [run, record], whether any other run tells of it


def online(statistic: Values, inside: Inside) -> Values:
    """[run, record], how much likelier what a run says is with the record inside than without."""
    centred = _checked(statistic, inside)
    within, without = law(centred, inside), law(centred, ~inside)
    ratio = _log_density(centred, within) - _log_density(centred, without)
    return np.where(within.known & without.known, ratio, 0.0)


def offline(statistic: Values, inside: Inside) -> Values:
    """[run, record], by how many deviations a run says more than runs without the record do.

    For an attacker whose shadows never held the record.
    """
    centred = _checked(statistic, inside)
    without = law(centred, ~inside)
    return np.where(without.known, (centred - without.mean) / without.deviation, 0.0)


def law(statistic: Values, chosen: Inside) -> Law:
    """The law of the chosen runs without the target: means by record, and variances.

    With fewer runs than `ENOUGH` a variance is that of all records together, whose estimate then
    is the better one.
    """
    values = np.where(chosen, statistic, 0.0)
    count = chosen.sum(0) - chosen  # [run, record], chosen runs beside the target
    total = values.sum(0) - values
    squares = np.square(values).sum(0) - np.square(values)
    safe = np.maximum(count, 1)
    mean = total / safe
    spread = np.maximum(squares - safe * np.square(mean), 0.0)  # around the mean
    if len(statistic) >= ENOUGH:
        variance = spread / safe
    else:
        freedom = np.maximum(count - 1, 0).sum(1, keepdims=True)
        variance = spread.sum(1, keepdims=True) / np.maximum(freedom, 1)
    least = 1e-6 * float(statistic.std()) + 1e-12
    deviation = np.broadcast_to(np.maximum(np.sqrt(variance), least), mean.shape)
    return Law(mean, deviation, count > 0)


def _log_density(value: Values, law: Law) -> Values:
    """Up to a constant."""
    found: Values = -0.5 * np.square((value - law.mean) / law.deviation) - np.log(law.deviation)
    return found


def _checked(statistic: Values, inside: Inside) -> Values:
    """The statistic around each record's mean, so that sums of squares stay exact."""
    if statistic.ndim != 2 or statistic.shape != inside.shape:
        raise BadValue(
            f"a statistic of shape {statistic.shape} and memberships of shape {inside.shape}; "
            "both must be [run, record]"
        )
    if len(statistic) < 3:
        raise BadValue(f"{len(statistic)} runs; an attack with shadows needs at least 3")
    found = statistic.astype(np.float64)
    centred: Values = found - found.mean(0)
    return centred
