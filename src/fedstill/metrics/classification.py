"""The metrics that are ready: each a function of a test set's labels and a model's logits."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 15  # of confidence, for the calibration error


def accuracy(labels: Tensor, logits: Tensor) -> float:
    """The share of examples whose largest logit is that of their class."""
    return float((logits.argmax(1) == labels).double().mean())


def loss(labels: Tensor, logits: Tensor) -> float:
    """The mean cross-entropy, in nats."""
    return float(F.cross_entropy(logits, labels, reduction="none").double().mean())


loss.lower_is_better = True  # type: ignore[attr-defined]


def macro_f1(labels: Tensor, logits: Tensor) -> float:
    """The unweighted mean over classes of 2 right / (examples + answers).

    A class that is neither an example's nor an answer is left out, as by scikit-learn.
    """
    right, examples, answers = _counts(labels, logits)
    seen = examples + answers > 0
    return float((2 * right[seen] / (examples + answers)[seen]).mean())


def balanced_accuracy(labels: Tensor, logits: Tensor) -> float:
    """The unweighted mean of the recalls of those classes that have examples."""
    right, examples, _ = _counts(labels, logits)
    held = examples > 0
    return float((right[held] / examples[held]).mean())


def recall(labels: Tensor, logits: Tensor) -> dict[str, float]:
    """By class, the share of its examples that are found; a class without examples has none."""
    right, examples, _ = _counts(labels, logits)
    return {
        str(number): float(right[number] / examples[number])
        for number in torch.nonzero(examples).flatten().tolist()
    }


def confusion(labels: Tensor, logits: Tensor) -> dict[str, float]:
    """How many examples of a class were given which answer, as `class.answer`, where any were.

    Counts are not averaged over test sets: they stand in metrics.csv and not in the summary.
    """
    classes = logits.shape[1]
    counts = torch.bincount(labels * classes + logits.argmax(1), minlength=classes**2)
    return {
        f"{place // classes}.{place % classes}": float(counts[place])
        for place in torch.nonzero(counts).flatten().tolist()
    }


confusion.counts = True  # type: ignore[attr-defined]


def auroc(labels: Tensor, logits: Tensor) -> float:
    """The area under the curve of true against false positives.

    Of two classes, that of the second. Of more, the unweighted mean of each class against all
    others, over the classes that have examples; NaN where all examples are of one class.
    """
    if not torch.isfinite(logits).all():
        return math.nan
    classes = range(1, 2) if logits.shape[1] == 2 else range(logits.shape[1])
    areas = [_area(_log_odds(logits.double(), each), labels == each) for each in classes]
    known = [area for area in areas if not math.isnan(area)]
    return sum(known) / len(known) if known else math.nan


def calibration_error(labels: Tensor, logits: Tensor) -> float:
    """The expected calibration error in 15 bins of equal width. Guo et al., ICML 2017, eq. 3.

    The mean over examples of the distance between confidence and accuracy of their bin; the
    confidence is the largest probability, and a bin holds its upper end.
    """
    confidence, answer = logits.double().softmax(1).max(1)
    right = (answer == labels).double()
    ends = torch.arange(1, BINS, dtype=torch.float64, device=logits.device) / BINS
    bins = torch.bucketize(confidence, ends)
    gaps = torch.zeros(BINS, dtype=torch.float64, device=logits.device)
    gaps.index_add_(0, bins, right - confidence)  # [bin], summed over its examples
    return float(gaps.abs().sum() / len(labels))


calibration_error.lower_is_better = True  # type: ignore[attr-defined]


def brier(labels: Tensor, logits: Tensor) -> float:
    """The mean squared distance between probabilities and the class, summed over classes."""
    chances = logits.double().softmax(1)
    target = F.one_hot(labels, logits.shape[1]).double()
    return float((chances - target).square().sum(1).mean())


brier.lower_is_better = True  # type: ignore[attr-defined]


def _counts(labels: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By class: right answers, examples and answers."""
    classes, answers = logits.shape[1], logits.argmax(1)
    counted = (labels[answers == labels], labels, answers)
    right, examples, said = (torch.bincount(each, minlength=classes).double() for each in counted)
    return right, examples, said


def _log_odds(logits: Tensor, number: int) -> Tensor:
    """In the order of a class's probabilities, but never rounded to one: [example]."""
    others = torch.cat([logits[:, :number], logits[:, number + 1 :]], 1)
    return logits[:, number] - others.logsumexp(1)


def _area(values: Tensor, positive: Tensor) -> float:
    """The chance that a positive example has the larger value, ties counted half.

    By the sum of ranks (Mann and Whitney 1947), where equal values share their middle rank.
    """
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return math.nan
    _, place, counts = torch.unique(values, return_inverse=True, return_counts=True)
    middle = counts.cumsum(0).double() - (counts - 1).double() / 2
    ranks = middle[place][positive].sum()
    return float((ranks - positives * (positives + 1) / 2) / (positives * negatives))
