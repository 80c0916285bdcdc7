"""Metrics by name: functions of all labels and logits of a test set.

    from fedstill.metrics import METRICS

    METRICS["macro_f1"](labels, logits)  # labels [n], logits [n, classes]

A metric of one's own is any such function that returns a number, or several by name:

    def errors(labels, logits):
        return int((logits.argmax(1) != labels).sum())

    Experiment(method, population, metrics=["accuracy", errors])

What is undefined on a test set (the area under a curve where all examples are of one class) is NaN.
"""

from fedstill.metrics.measured import ALWAYS, Metric, Predict, measured
from fedstill.metrics.named import METRIC_NAMES, METRICS, chosen, counting, lowest, name_of

__all__ = [
    "ALWAYS",
    "METRICS",
    "METRIC_NAMES",
    "Metric",
    "Predict",
    "chosen",
    "counting",
    "lowest",
    "measured",
    "name_of",
]
