"""The table of metrics, and which of them an experiment asks for."""

from __future__ import annotations

from collections.abc import Sequence

from fedstill.core.errors import BadValue
from fedstill.core.names import Names, function_fault, short
from fedstill.metrics import classification
from fedstill.metrics.measured import ALWAYS, Metric

METRICS: dict[str, Metric] = {
    "accuracy": classification.accuracy,
    "loss": classification.loss,
    "macro_f1": classification.macro_f1,
    "auroc": classification.auroc,
    "balanced_accuracy": classification.balanced_accuracy,
    "recall": classification.recall,
    "confusion": classification.confusion,
    "calibration_error": classification.calibration_error,
    "brier": classification.brier,
}


METRIC_NAMES: Names[Metric] = Names(
    "metric", METRICS, "fedstill.metrics", function_fault("a function of labels and logits")
)


def chosen(metrics: Sequence[str | Metric]) -> dict[str, Metric]:
    """Metrics by name, accuracy and loss before the others; a function has its own name."""
    if isinstance(metrics, str) or callable(metrics):
        raise BadValue(f"metrics must be a list, such as ['accuracy'], not {metrics!r}")
    found = {name: METRICS[name] for name in ALWAYS}
    for metric in metrics:
        name = name_of(metric)
        if isinstance(metric, str) and (wrong := METRIC_NAMES.wrong(metric)):
            raise BadValue(f"metrics: {wrong}")
        function = METRIC_NAMES[metric] if isinstance(metric, str) else metric
        if found.setdefault(name, function) is not function:
            raise BadValue(f"metrics: two functions are named {name!r}; give one another name")
    return found


def name_of(metric: str | Metric) -> str:
    """How a metric is called in tables."""
    name = short(metric) if isinstance(metric, str) else getattr(metric, "__name__", "")
    if not isinstance(metric, str) and not name.isidentifier():
        raise BadValue(
            f"metrics: {metric!r} has no name to stand in tables; write it as a function with def, "
            "or set its __name__"
        )
    return name


def lowest(metrics: Sequence[str | Metric]) -> list[str]:
    """The names of those whose best value is the lowest; a function says `lower_is_better`."""
    return [
        name
        for name, metric in chosen(metrics).items()
        if getattr(metric, "lower_is_better", False)
    ]


def counting(metrics: Sequence[str | Metric]) -> list[str]:
    """The names of those that count examples and have no mean; a function says `counts`."""
    return [name for name, metric in chosen(metrics).items() if getattr(metric, "counts", False)]
