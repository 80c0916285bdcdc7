"""A mechanism's own code, many thousand times with and without one record; no training.

Class sums: every class is a trial, half of them hold a record that is as long as the clip. DP-SGD:
every canary is a trial, whose gradient is a unit vector (`audit.witness`). The attacker knows all
else, subtracts it, and sees a normal number around one or around zero. A threshold in the middle,
fixed beforehand, then bounds mu, and so epsilon, from below: nearly tightly.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from copy import copy
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.audit.result import Finding, Result
from fedstill.audit.statistics import CONFIDENCE, Inside, Scores, curve, told
from fedstill.audit.witness import PLACES, Witness, dirac_canaries
from fedstill.core import Batch, Data, Node, Weights, ranges, trees
from fedstill.core.errors import BadValue
from fedstill.core.mechanism import LossOn
from fedstill.core.model import Model
from fedstill.core.ranges import Count, Share, Whole
from fedstill.core.release import SUMS, Spending, Terms, Use
from fedstill.core.seeds import draw, generator
from fedstill.engines.engine import autograd_gradient, functional_gradient
from fedstill.models import MLP
from fedstill.parts.distribution_matching import Matching
from fedstill.parts.learning import SGD_USE, private_training
from fedstill.parts.released import Releasing
from fedstill.parts.synthetic_sets import SyntheticSet
from fedstill.privacy.accounting import epsilon_of, mu_of

CLIP = 3.0
CLASSES, RELEASES, OTHERS = 20, 25, 3  # classes, releases a round, other records of a class
CANARIES, STEPS = 200, 20  # at once, and steps that are made together
ATTACK = "Gaussian test"
MIDDLE = 0.5  # between what is seen with the record and without


@dataclass(frozen=True)
class Trials:
    """Which budgets are audited, and how often a mechanism is played for each."""

    epsilons: tuple[float, ...] = (1.0, 4.0, 10.0)
    delta: Share = 1e-5
    number: Count = 40_000  # for an epsilon of 4 or more; below, more: there is less to see
    seed: Whole = 0

    def __post_init__(self) -> None:
        wrong = ranges.faults(self)
        wrong += [f"epsilon = {e:g}: must be above 0" for e in self.epsilons if not e > 0]
        if not wrong and not (0 < self.delta < 1):
            wrong = [f"delta = {self.delta:g}: must be above 0 and below 1"]
        if not self.epsilons:
            wrong.append("epsilon: name at least one")
        if wrong:
            raise BadValue(wrong)

    def of(self, epsilon: float) -> int:
        """How many trials an epsilon needs for a bound within a tenth of it."""
        return ceil(self.number * min(10.0, max(1.0, 4.0 / epsilon)))


def node_of(model: Model, data: Data, round: int, seed: int, terms: Terms) -> Node[Any]:
    """A client whose examples are sealed, with a ledger that grants everything."""

    def grant(round: int, step: str, use: Use, earlier: Sequence[Spending]) -> Spending:
        return Spending(round, step, "client", use.mechanism, terms.sigma, use.rate, use.releases)

    node: Node[Any] = Node("client", round, None, model=model, data=data, seed=seed, step="audit")
    node.seal(terms, grant)
    return node


def terms_of(sigma: float) -> Terms:
    return Terms(clip=CLIP, gradient_clip=CLIP, releases=RELEASES, sigma=sigma, counts_sigma=None)


def played(step: Coroutine[Any, Any, Any]) -> None:
    """Play a step to its end, each of its loops batch by batch."""
    answer = None
    while True:
        try:
            loop = step.send(answer)
        except StopIteration:
            return
        answer = loop.carry
        for batch in loop.batches:
            answer, _ = loop.body(answer, loop.given, batch, autograd_gradient)


def class_sum_trials(sigma: float, number: int, seed: int) -> tuple[Scores, Inside]:
    """What released class sums say of a record, in classes with and without it."""
    rng = generator(seed, "audit", SUMS)
    model = MLP((4,), CLASSES, hidden=(8,))
    weights = model.init(draw(seed, "audit", "network"))
    inside = torch.rand(CLASSES, generator=rng) < 0.5
    others = torch.randn(OTHERS * CLASSES, 4, generator=rng)
    labels = torch.arange(CLASSES).repeat(OTHERS)
    record = 1e3 * torch.randn(4, generator=rng)  # far out, so that it is clipped
    held = inside.nonzero().flatten()
    data = Data.of(torch.cat([others, record.expand(len(held), 4)]), torch.cat([labels, held]))
    start = SyntheticSet(torch.zeros(CLASSES, 1, 4), torch.ones(CLASSES, 1), torch.arange(CLASSES))
    matching = Matching(RELEASES, 1.0, 0.0, 8, "none", "features")

    def releasing(data: Data) -> Releasing:
        node = node_of(model, data, 0, seed, terms_of(sigma))
        return Releasing(matching, node, start, lambda release: weights, None)

    known, first = releasing(Data.of(others, labels)), releasing(data)
    played(known.summed())
    played(first.summed())
    exact = known.sums * known.grids
    moved = (first.sums * first.grids - exact)[0, held[0]]
    direction = moved / moved.norm()
    scores: list[Tensor] = []
    for round in range(1, 1 + ceil(number / (RELEASES * CLASSES))):
        again = copy(first)  # the same sums, with the noise of another round
        again.secret = node_of(model, data, round, seed, terms_of(sigma)).secret(SUMS)
        scores.append(((again.noisy - exact) @ direction / CLIP).flatten())
    found = torch.cat(scores).numpy()
    return found, np.tile(inside.numpy(), len(found) // CLASSES)


def gradient_trials(sigma: float, number: int, seed: int) -> tuple[Scores, Inside]:
    """What private gradients of whole data say of Dirac canaries that are there or not."""
    rng = generator(seed, "audit", SGD_USE)
    model = Witness.of(MLP((4,), 2, hidden=(4,)), CANARIES)
    weights = model.init(draw(seed, "audit", "network"))
    inside = torch.rand(CANARIES, generator=rng) < 0.5
    others = Data.of(torch.randn(8, 4, generator=rng), torch.arange(8) % 2)
    held = dirac_canaries(model, CANARIES, "cpu").subset(inside.nonzero().flatten())
    data = Data.of(*_joined(others, held))
    node = node_of(model, data, 1, seed, terms_of(sigma))
    steps = ceil(number / (CANARIES * STEPS)) * STEPS
    # A batch as large as the data: every record takes part in every step.
    batches, mechanism = private_training(node, model, weights, len(data), steps=steps)
    assert mechanism is not None
    gradient = torch.func.vmap(
        lambda batch: mechanism.gradient(loss_of(model), weights, batch, functional_gradient)[0][
            PLACES
        ]
    )
    scores = []
    for begin in range(0, steps, STEPS):
        some = [batches[step] for step in range(begin, begin + STEPS)]
        together = trees.map_tensors(lambda *each: torch.stack(each), some[0], *some[1:])
        scores.append((gradient(together) * len(data) / CLIP).flatten())
    found = torch.cat(scores).double().numpy()
    return found, np.tile(inside.numpy(), len(found) // CANARIES)


def _joined(first: Data, second: Data) -> tuple[Tensor, Tensor]:
    one, other = first.all(), second.all()
    return torch.cat([one.x, other.x]), torch.cat([one.y, other.y])


def loss_of(model: Model) -> LossOn:
    """The loss of a classifier on a batch."""

    def loss_on(batch: Batch) -> Callable[[Weights], tuple[Tensor, Any]]:
        return lambda value: (cross_entropy(model(value, batch.x), batch.y), {})

    return loss_on


Mechanism = Callable[[float, int, int], tuple[Scores, Inside]]
MECHANISMS: dict[str, Mechanism] = {SUMS: class_sum_trials, SGD_USE: gradient_trials}


def mechanism(
    trials: Trials,
    folder: Path | None = None,
    *,
    mechanisms: dict[str, Mechanism] | None = None,
    watch: Callable[[str, float], None] = lambda label, share: None,
) -> Result:
    """Audit every mechanism at every budget, and a copy with a tenth of the noise at the first."""
    findings = []
    for name, code in (mechanisms or MECHANISMS).items():
        for place, epsilon in enumerate(trials.epsilons):
            watch(name, place / (len(trials.epsilons) + 1))
            findings.append(audited(name, code, trials, epsilon))
        watch(name, len(trials.epsilons) / (len(trials.epsilons) + 1))
        findings.append(audited(name, code, trials, trials.epsilons[0], noise=0.1))
        watch(name, 1.0)
    settings = {
        "epsilons": list(trials.epsilons), "delta": trials.delta, "trials": trials.number,
        "seed": trials.seed, "confidence": CONFIDENCE,
    }  # fmt: skip
    notes = ["one release at each budget; how releases add up is the accountant's part"]
    result = Result("mechanism", findings, settings, notes)
    if folder is not None:
        result.write(folder)
    return result


def audited(
    name: str, code: Mechanism, trials: Trials, epsilon: float, *, noise: float = 1.0
) -> Finding:
    """What trials at a budget prove; with less noise than that needs, as a control."""
    mu = mu_of(epsilon, trials.delta)
    control = noise != 1.0
    number = trials.number // 4 if control else trials.of(epsilon)
    seed = draw(trials.seed, "audit", name, repr(epsilon), repr(noise))
    scores, inside = code(noise / mu, number, seed)
    counted = told(scores, inside, MIDDLE)
    least = counted.mu()
    found = epsilon_of(least, trials.delta)
    label = f"control: {name}, {noise:g} of the noise" if control else name
    return Finding(
        label, f"release at epsilon {epsilon:g}", ATTACK, control=control,
        guesses=counted.inside + counted.outside,
        right=counted.true + counted.outside - counted.false,
        epsilon_at_least=found, epsilon_ledger=epsilon, mu_at_least=least, mu_ledger=mu,
        caught=found > epsilon if control else None,
    ).with_curve(curve(scores, inside))  # fmt: skip
