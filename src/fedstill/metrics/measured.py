"""Some metrics of a model on some test sets, measured in one pass; no names are looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.data import Batch, Data
from fedstill.core.errors import FedstillError

CHUNK = 1024
ALWAYS = ("accuracy", "loss")  # measured in every evaluation, in the pass itself

Metric = Callable[[Tensor, Tensor], float | Mapping[str, float]]
"""Of labels [n] and logits [n, classes], on the host: one number, or several by name."""
Predict = Callable[[Tensor], Tensor]  # examples -> logits [n, classes]


@torch.no_grad()
def measured(
    predict: Predict, tests: Sequence[Data], metrics: Mapping[str, Metric], *, apart: bool = False
) -> list[dict[str, float]]:
    """Each metric on each test set, by name; several numbers of one metric as `metric.name`.

    Small sets go through the model together, unless its answers depend on the batch (`apart`).
    Accuracy and loss are taken on the way, and the host waits once for all sets; logits are
    gathered only where another metric asks for them.
    """
    if not tests:
        return []
    others = {name: metric for name, metric in metrics.items() if name not in ALWAYS}
    answers: list[Tensor] = []  # right or not, and the loss, of each example
    gathered: list[tuple[Tensor, Tensor]] = []
    for x, y in _chunks(tests, apart):
        logits = predict(x)
        right, loss = logits.argmax(1) == y, F.cross_entropy(logits, y, reduction="none")
        answers.append(torch.stack([right.double(), loss.double()]))
        if others:
            gathered.append((y, logits))
    sizes = [len(test) for test in tests]
    means = torch.stack([s.mean(1) for s in torch.split(torch.cat(answers, 1), sizes, 1)]).tolist()
    found = [dict(zip(ALWAYS, pair, strict=True)) for pair in means]
    if others:
        labels, logits = (torch.cat(each).cpu() for each in zip(*gathered, strict=True))
        parts = zip(torch.split(labels, sizes), torch.split(logits, sizes), strict=True)
        for scores, (own, said) in zip(found, parts, strict=True):
            for name, metric in others.items():
                scores |= _values(name, metric, own, said)
    return found


def _values(name: str, metric: Metric, labels: Tensor, logits: Tensor) -> dict[str, float]:
    """What a metric says of one test set, as numbers by name."""
    try:
        value: Any = metric(labels, logits)
    except Exception as error:
        raise FedstillError(
            f"metric {name!r} failed on labels of shape {list(labels.shape)} and logits of shape "
            f"{list(logits.shape)}: {type(error).__name__}: {error}"
        ) from error
    several = isinstance(value, Mapping)
    named = {f"{name}.{key}": each for key, each in value.items()} if several else {name: value}
    try:
        return {key: float(each) for key, each in named.items()}
    except (TypeError, ValueError) as error:
        raise FedstillError(
            f"metric {name!r} returned {_shown(value)}; expected a number, or a mapping of names "
            "to numbers"
        ) from error


def _shown(value: Any) -> str:
    """What came, in a few words: of a tensor or an array its form, not its numbers."""
    form = getattr(value, "shape", None)
    return repr(value) if form is None else f"a {type(value).__name__} of shape {list(form)}"


def _chunks(tests: Sequence[Data], apart: bool) -> Iterator[Batch]:
    """Every example in order, some at a time; small sets together, unless they stay apart."""
    held: list[Batch] = []
    room = CHUNK
    for test in tests:
        for piece in test.chunks(CHUNK):
            if held and (apart or len(piece.y) > room):
                yield _joined(held)
                held, room = [], CHUNK
            held.append(piece)
            room -= len(piece.y)
    yield _joined(held)


def _joined(pieces: Sequence[Batch]) -> Batch:
    if len(pieces) == 1:
        return pieces[0]
    x, y = (torch.cat(column) for column in zip(*pieces, strict=True))
    return Batch(x, y)
