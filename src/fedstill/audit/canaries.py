"""Canaries: records planted in one run, each by a coin; guesses about the coins bound epsilon.

Steinke, Nasr, Jagielski. Privacy Auditing with One (1) Training Run. NeurIPS 2023. Canaries are
mislabelled images, about which models, uploads and synthetic sets are asked (black box), and of
which released class sums are solved for by somebody who knows all else (white box); or examples
whose gradient is a unit vector, read off the weights that a client sends (white box).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstill.audit.membership import Subject
from fedstill.audit.result import Finding, Result
from fedstill.audit.statistics import CONFIDENCE, curve, most_one_run_can_show, one_run
from fedstill.audit.views import Listener, Records, Values, of_messages, of_models
from fedstill.audit.witness import PLACES, Witness, dirac_canaries
from fedstill.core import Data, Loop, ranges, trees
from fedstill.core.data import Batch, Lazy, Pool, Rows
from fedstill.core.errors import BadValue
from fedstill.core.loop import Descent
from fedstill.core.model import Model
from fedstill.core.node import SERVER, Node
from fedstill.core.ranges import Count, Share, Whole
from fedstill.core.records import Message, NodeId
from fedstill.core.release import clipped
from fedstill.core.seeds import generator
from fedstill.engines.execution import Execution
from fedstill.engines.play.batched import Acting, Batched
from fedstill.engines.play.streams import Streams
from fedstill.federation.budget import calibrated
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Population
from fedstill.federation.run import Progress, run
from fedstill.logbook.writer import MemoryLog
from fedstill.parts import augment
from fedstill.parts.distribution_matching import Matching, class_means
from fedstill.parts.learning import SGD_USE
from fedstill.parts.released import Aim
from fedstill.privacy.privacy import Plan

RELEASED_SUMS = "released class sums"
DIRAC = "own uploads, Dirac canaries"
BLACK, WHITE = "black box", "white box"
NO_NOISE = "control: no noise"
LEAST_NOISE = 0.05  # that an attacker supposes where there is none


@dataclass(frozen=True)
class Canaries:
    """How many canaries are planted at whom, and how many guesses are made about them."""

    client: NodeId
    number: Count = 1000
    share_in: Share = 0.08  # of the canaries that are guessed to be inside
    share_out: Share = 0.08  # and outside, by attacks in a white box
    delta: Share = 1e-5
    seed: Whole = 0

    def __post_init__(self) -> None:
        wrong = ranges.faults(self)
        if not wrong and self.number < 20:
            wrong = [f"number = {self.number}: fewer than 20 canaries prove nothing"]
        if wrong:
            raise BadValue(wrong)

    def coins(self, purpose: str) -> Tensor:
        """[canary], which of them are inside."""
        rng = generator(self.seed, "audit", "canaries", purpose)
        return torch.rand(self.number, generator=rng) < 0.5

    def guesses(self, box: str) -> tuple[int, int]:
        """How many are guessed to be in and out; fixed before any score is seen."""
        guessed_in = max(10, round(self.share_in * self.number))
        return guessed_in, max(10, round(self.share_out * self.number)) if box == WHITE else 0


class Planted(NamedTuple):
    """An experiment with canaries among a client's records."""

    experiment: Experiment
    canaries: Batch
    inside: Tensor  # [canary]
    others: Data  # the client's other records


def mislabelled(experiment: Experiment, asked: Canaries) -> Planted:
    """Some of the client's own images under wrong labels, each there or not by a coin."""
    population = experiment.population
    own = population.party(asked.client).data
    classes = population.models[asked.client].classes
    if 2 * asked.number > len(own):
        raise BadValue(
            f"{asked.number} canaries, but {asked.client} has {len(own)} records; plant at most "
            f"half as many, e.g. --canaries {len(own) // 2}"
        )
    rng = generator(asked.seed, "audit", "canaries", asked.client)
    order = torch.randperm(len(own), generator=rng).to(own.device)
    planted, rest = order[: asked.number], order[asked.number :]
    further = torch.randint(1, classes, (asked.number,), generator=rng).to(own.device)
    inside = asked.coins("mislabelled")
    kept = relabelled(own, planted, (own.labels[planted] + further) % classes)
    held = torch.cat([rest, planted[inside.to(own.device)]])
    changed = population.learning_from({asked.client: kept.subset(held)})
    canaries = kept.subset(planted).all()
    return Planted(replace(experiment, population=changed), canaries, inside, kept.subset(rest))


def relabelled(data: Data, index: Tensor, labels: Tensor) -> Data:
    """The same examples, some of them with other labels; images stay where they are."""
    parts, low = [], 0
    for pool, rows in data.parts:
        here = (index >= low) & (index < low + len(rows))
        changed = pool.labels.clone()
        changed[rows[index[here] - low]] = labels[here]
        parts.append(Rows(Pool(pool.stored, changed, pool.mean, pool.std), rows))
        low += len(rows)
    return Data(tuple(parts))


def with_witness(experiment: Experiment, asked: Canaries) -> Planted:
    """Dirac canaries beside all of the client's records, and networks that have places for them."""
    population = experiment.population
    if population.data is None:
        raise BadValue("Dirac canaries need a population made of a collection of data")
    models = {c: Witness.of(m, asked.number) for c, m in population.models.items()}
    server = Witness.of(population.party(SERVER).model, asked.number)
    widened = Population(
        population.data, server, networks=models, server=server, public=population.unlabelled
    ).on(population.device)
    own = widened.party(asked.client).data
    canaries = dirac_canaries(server, asked.number, own.device)
    inside = asked.coins("Dirac")
    held = own + canaries.subset(inside.nonzero().flatten().to(own.device))
    changed = widened.learning_from({asked.client: held})
    return Planted(replace(experiment, population=changed), canaries.all(), inside, own)


@dataclass(frozen=True, eq=False)
class Tapped:
    """A matching of synthetic images to what was released of records, as the engine runs it."""

    matching: Matching
    model: Model
    images: Tensor  # [class, image, ...] at the start
    share: Tensor  # [class, image]
    aims: Sequence[Aim]


@dataclass(eq=False)
class Tap:
    """Stands where loops are run, and keeps what a client released to match images to."""

    client: NodeId
    releases: int
    seen: list[Tapped] = field(default_factory=list)

    def __call__(self, node: Node[Any], loop: Loop[Any]) -> None:
        if node.id != self.client or not isinstance(loop.body, Descent) or not len(loop.batches):
            return
        matching = getattr(loop.body.objective, "__self__", None)
        if not isinstance(loop.batches, Lazy) or not isinstance(matching, Matching):
            return
        first = loop.batches[0]
        if isinstance(first, Aim):
            number = min(self.releases, len(loop.batches))
            aims = [first, *(loop.batches[step] for step in range(1, number))]
            images, share = loop.carry[0], loop.given["images_share"]
            model = loop.body.model
            assert isinstance(model, Model)
            self.seen.append(Tapped(matching, model.evaluating, images, share, aims))


def tapped_engine(experiment: Experiment, execution: Execution, tap: Tap) -> Batched:
    """An engine that shows every loop to somebody before it runs it."""
    name = execution.engine_name(experiment.networks)
    kind: type[Batched] = Batched if name == Batched.name else Streams

    class Shown(kind):  # type: ignore[valid-type, misc]
        def _run_loops(self, step: Any, round: int, waiting: list[Acting]) -> None:
            for actor in waiting:
                if actor.waiting is not None:
                    tap(actor.node, actor.waiting)
            super()._run_loops(step, round, waiting)

    return Shown(experiment, execution)


@dataclass(eq=False)
class Places:
    """Hears how far a client moves the numbers of canaries from where it was told to start."""

    client: NodeId
    moved: Tensor | None = None  # [canary], over all rounds
    start: Tensor | None = None

    def __call__(self, message: Message, sender: NodeId, round: int) -> None:
        weights = getattr(message, "weights", None)
        if not isinstance(weights, dict) or PLACES not in weights:
            return
        now = weights[PLACES].double()
        if sender == SERVER:
            self.start = now
        elif sender == self.client and self.start is not None:
            # The slope of a canary is positive, so descent makes its number smaller.
            step = self.start - now
            self.moved = step if self.moved is None else self.moved + step


@torch.no_grad()
def solved_sums(seen: Sequence[Tapped], planted: Planted, *, clip: float, sigma: float) -> Values:
    """[canary], how far released sums speak for each, all other records subtracted.

    Of each class the least squares for the memberships, as a normal law with deviation one half
    would have them beforehand; in units of what is then still unknown.
    """
    counts = torch.bincount(
        torch.cat([planted.others.labels, planted.canaries.y[planted.inside.to(_at(planted))]])
    )
    noise, score = max(sigma, LEAST_NOISE), np.zeros(len(planted.inside))
    gram: dict[int, Tensor] = {}
    fit: dict[int, Tensor] = {}
    rest = planted.others.all()
    for tapped in seen:
        held = _held(counts, len(tapped.images))
        for aim in tapped.aims:
            centre = _centre(tapped, aim)
            targets = torch.cat([target.flatten(1) for target in aim.targets], 1).double()
            sums = (targets - centre) * counts[held].double().unsqueeze(1) / clip
            for place, c in enumerate(held.tolist()):
                own = planted.canaries.x[planted.canaries.y == c]
                rows = _rows(tapped, aim, centre, place, own, clip)
                if not len(rows):
                    continue
                known = _rows(tapped, aim, centre, place, rest.x[rest.y == c], clip).sum(0)
                left = sums[place] - known - 0.5 * rows.sum(0)
                gram[c] = gram.get(c, 0.0) + rows @ rows.T / noise**2
                fit[c] = fit.get(c, 0.0) + rows @ left / noise**2
    for c, matrix in gram.items():
        prior = 4 * torch.eye(len(matrix), device=matrix.device, dtype=matrix.dtype)
        spread = torch.linalg.inv(matrix + prior)
        whose = (planted.canaries.y == c).cpu().numpy()
        found = (spread @ fit[c]) / spread.diagonal().clamp(min=1e-12).sqrt().clamp(max=0.5)
        score[whose] = found.cpu().numpy()
    return score


def _at(planted: Planted) -> torch.device:
    return planted.canaries.y.device


def _held(counts: Tensor, number: int) -> Tensor:
    """The classes of a set with so many: those with the most records, in order."""
    return torch.argsort(-counts, stable=True)[:number].sort().values


def _centre(tapped: Tapped, aim: Aim) -> Tensor:
    """[class, number], the mean outputs of the images at the start."""
    images = augment.apply(tapped.images, aim.draws, only=aim.only)
    seen = tapped.matching.seen(tapped.model, aim.network, images)
    return torch.cat([mean.flatten(1) for mean in class_means(seen, tapped.share)], 1).double()


def _rows(tapped: Tapped, aim: Aim, centre: Tensor, place: int, x: Tensor, clip: float) -> Tensor:
    """[record, number], what each record adds to the sum of its class, in units of the clip."""
    if not len(x):
        return centre.new_zeros(0, centre.shape[1])
    draws = trees.map_tensors(lambda tensor: tensor[place : place + 1], aim.draws)
    images = augment.apply(x.unsqueeze(0), draws, only=aim.only)
    seen = tapped.matching.seen(tapped.model, aim.network, images, coarse=True)
    outputs = torch.cat([output.squeeze(0).flatten(1) for output in seen], 1)
    return clipped(outputs - centre[place], clip) / clip


Watch = Callable[[str, float], None]


def canaries(
    subjects: Sequence[Subject],
    execution: Execution,
    asked: Canaries,
    folder: Path,
    *,
    notes: Sequence[str] = (),
    watch: Watch = lambda label, share: None,
) -> Result:
    """One run of each subject with canaries, and where it is private another without noise."""
    findings: list[Finding] = []
    for subject in subjects:
        findings += found_in(subject, execution, asked, watch)
    settings = {**asdict(asked), "confidence": CONFIDENCE}
    most = most_one_run_can_show(sum(asked.guesses(WHITE)), asked.delta, asked.number)
    remark = f"so many guesses, all right, would show an epsilon of {most:.2f}, and no audit more"
    result = Result("canaries", findings, settings, [*notes, remark])
    result.write(folder)
    return result


def found_in(
    subject: Subject, execution: Execution, asked: Canaries, watch: Watch
) -> Iterator[Finding]:
    """What one run tells of its canaries; of a private one also what it would without noise."""
    device = execution.torch_device
    experiment = replace(subject.experiment, population=subject.experiment.population.on(device))
    if asked.client not in experiment.population.clients:
        known = ", ".join(experiment.population.clients)
        raise BadValue(f"unknown client {asked.client!r}; known: {known}")
    planted = mislabelled(experiment, asked)
    if experiment.privacy is None:
        yield from _images(subject, planted, execution, asked, watch)
        return
    for control in (False, True):
        audited = _as_control(subject) if control else subject
        made = _calibrated(planted, execution, control)
        yield from _images(audited, made, execution, asked, watch)
        if SGD_USE in _mechanisms(made, asked.client):
            widened = _calibrated(with_witness(experiment, asked), execution, control)
            yield from _dirac(audited, widened, execution, asked, watch)


def _as_control(subject: Subject) -> Subject:
    return replace(subject, label=f"{NO_NOISE}, {subject.label}", control=True)


def _mechanisms(planted: Planted, client: NodeId) -> set[str]:
    privacy = planted.experiment.privacy
    plan = None if privacy is None else privacy.plan
    return set() if plan is None else {use.mechanism for use in plan.uses.get(client, ())}


def _calibrated(planted: Planted, execution: Execution, control: bool) -> Planted:
    """The experiment with its noise found; of a control, none is added, whatever the plan says."""
    found = calibrated(planted.experiment, execution)
    privacy = found.privacy
    if control and privacy is not None and privacy.plan is not None:
        silent = Plan(dict.fromkeys(privacy.plan.noise, 0.0), privacy.plan.uses)
        found = replace(found, privacy=replace(privacy, plan=silent))
    return planted._replace(experiment=found)


def _images(
    subject: Subject, planted: Planted, execution: Execution, asked: Canaries, watch: Watch
) -> Iterator[Finding]:
    """All that is seen of mislabelled images."""
    experiment, privacy = planted.experiment, planted.experiment.privacy
    model = experiment.population.models[asked.client].on(execution.torch_device)
    known = Records.of(asked.client, Data.of(*planted.canaries), Data(), model, asked.seed)
    heard = Listener([known])
    tap = Tap(asked.client, 0 if privacy is None else privacy.releases)
    engine = tapped_engine(experiment, execution, tap)
    run(engine, MemoryLog(), observers=[heard], watch=_told(watch, subject.label))
    for _, view, scores, _ in [*of_models(engine, [known]), *of_messages(heard)]:
        yield _guessed(subject, view, BLACK, scores, planted.inside, asked)
    private = privacy is not None and privacy.plan is not None
    if private and privacy and privacy.plan and tap.seen and _plain(tap.seen):
        sigma = privacy.plan.noise.get(asked.client, 0.0)
        scores = solved_sums(tap.seen, planted, clip=privacy.clip, sigma=sigma)
        yield _guessed(subject, RELEASED_SUMS, WHITE, scores, planted.inside, asked)


def _plain(seen: Sequence[Tapped]) -> bool:
    """Whether all outputs are clipped as one row, which `solved_sums` can undo."""
    return not any(tapped.matching.outputs.startswith("stages") for tapped in seen)


def _dirac(
    subject: Subject, planted: Planted, execution: Execution, asked: Canaries, watch: Watch
) -> Iterator[Finding]:
    """What the weights that a client sends say of canaries with a place of their own."""
    heard = Places(asked.client)
    engine = tapped_engine(planted.experiment, execution, Tap("", 0))
    label = f"{subject.label}, Dirac"
    run(engine, MemoryLog(), observers=[heard], watch=_told(watch, label))
    if heard.moved is not None:
        scores = heard.moved.cpu().numpy()
        yield _guessed(subject, DIRAC, WHITE, scores, planted.inside, asked)


def _told(watch: Watch, label: str) -> Callable[[Progress], None]:
    return lambda progress: watch(label, progress.round / max(1, progress.rounds))


def _guessed(
    subject: Subject, view: str, box: str, scores: Values, inside: Tensor, asked: Canaries
) -> Finding:
    member = inside.numpy()
    guessed_in, guessed_out = asked.guesses(box)
    bound = one_run(
        scores, member, guessed_in=guessed_in, guessed_out=guessed_out, delta=asked.delta
    )
    found = Finding(
        subject.label, view, box, asked.client, subject.control,
        guesses=bound.guesses, right=bound.right, epsilon_at_least=bound.epsilon,
        epsilon_ledger=subject.epsilon,
    ).with_curve(curve(scores, member))  # fmt: skip
    # Of a run without noise the white box must see it; that a black box does is not asked.
    caught = bound.epsilon > 0 if subject.control else None
    return replace(found, caught=caught)
