"""The noise of a private run, found by rehearsing it; nothing is released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, inf, log

import torch

from fedstill.core.data import Data
from fedstill.core.errors import BadValue, SealedData, StepError
from fedstill.core.model import Model
from fedstill.core.node import SERVER
from fedstill.core.records import NodeId
from fedstill.core.release import Use
from fedstill.engines.execution import Execution
from fedstill.engines.play.rehearsal import Rehearsal
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Party, Population
from fedstill.federation.private import present
from fedstill.federation.run import rehearsed
from fedstill.privacy.ledger import calibrated as noise_for
from fedstill.privacy.ledger import composed
from fedstill.privacy.privacy import Plan

MOST_KINDS = 20  # of clients by their uses, for each of which the noise is found exactly


def calibrated(
    experiment: Experiment, execution: Execution, key: bytes | None = None
) -> Experiment:
    """The experiment with noise with which each client's planned uses cost exactly its budget.

    Without privacy, or where the noise was found before, the experiment itself. What a method
    cannot do privately is refused here, before anything is played. A site finds the noise of its
    own client, with its own records in place of those that it does not see, and with the counts
    that it will tell, whose noise is of its `key`; where no records are, as at a coordinator of
    sites, there is nothing to find.
    """
    privacy = experiment.privacy
    if privacy is None or privacy.found or not present(experiment.population):
        return experiment
    uses = planned(experiment, execution, key)
    if not privacy.valid:
        if not any(uses.values()):
            raise BadValue(
                f'privacy.mechanism = "{privacy.mechanism}": '
                f"{type(experiment.method).__name__} matches no "
                "distributions, so there is nothing to add the papers' noise to; leave it out"
            )
        noise = dict.fromkeys(uses, privacy.claimed_sigma)
        return replace(experiment, privacy=replace(privacy, plan=Plan(noise, uses)))
    alike: dict[tuple[tuple[Use, int], ...], float] = {}
    found: dict[NodeId, float] = {}
    rounded = len({_summed(own) for own in uses.values()}) > MOST_KINDS
    for client, own in uses.items():
        kind = _summed(own, rounded=rounded)
        if kind not in alike:
            joined = [use._replace(releases=number) for use, number in kind]
            alike[kind] = noise_for(joined, privacy.epsilon, privacy.delta)
        found[client] = alike[kind]
    plan = Plan(found, uses, budget=(privacy.epsilon, privacy.delta))
    return replace(experiment, privacy=replace(privacy, plan=plan))


def planned(
    experiment: Experiment, execution: Execution, key: bytes | None = None
) -> dict[NodeId, list[Use]]:
    """What every client whose records are here asks of them in a whole run, in order."""
    privacy = experiment.privacy
    if privacy is None:
        return {}
    population, clients = experiment.population, present(experiment.population)
    if len(clients) < len(population):
        population = StandIns(population, clients)
    blank = replace(privacy, plan=Plan(dict.fromkeys(population.clients, 1.0), {}))
    rehearsal = replace(experiment, privacy=blank, population=population, clock=None)
    engine = Rehearsal(rehearsal, replace(execution, record=False))
    engine.key = key
    try:
        rehearsed(engine)
    except StepError as error:
        if isinstance(error.__cause__, (SealedData, BadValue)):
            raise BadValue(
                f"privacy: {error.method} cannot be private as it stands: its step {error.step}: "
                f"{error.__cause__}"
            ) from error
        raise
    asked = {} if engine.purse is None else engine.purse.asked
    return {client: asked.get(client, []) for client in clients}


def cost(experiment: Experiment) -> float:
    """The largest ε of any client as planned; infinite for a mechanism that promises nothing."""
    privacy = experiment.privacy
    if privacy is None or privacy.plan is None or not privacy.valid:
        return inf
    rows = privacy.plan.rows().values()
    return max((composed(own, privacy.delta) for own in rows), default=0.0)


class StandIns(Population):
    """A population seen from a site: a client who is here stands in for all who are not."""

    def __init__(self, seen: Population, clients: Sequence[NodeId]):
        self.seen, self.here = seen, clients

    @property
    def clients(self) -> Sequence[NodeId]:
        return self.seen.clients

    @property
    def models(self) -> Mapping[NodeId, Model]:
        return self.seen.models

    @property
    def public(self) -> Data:
        return self.seen.public

    def party(self, node: NodeId) -> Party:
        if node == SERVER or node in self.here:
            return self.seen.party(node)
        return replace(self.seen.party(self.here[0]), model=self.models[node])

    def on(self, device: torch.device | str) -> StandIns:
        return StandIns(self.seen.on(device), self.here)


def _summed(uses: Sequence[Use], *, rounded: bool = False) -> tuple[tuple[Use, int], ...]:
    """Alike uses with the number of their releases, in a fixed order.

    With `rounded` rates are raised by up to a fiftieth, to the safe side, so that many clients
    are of few kinds: for each the accountant is asked several times.
    """
    found: dict[Use, int] = {}
    for use in uses:
        kind = use._replace(releases=0)
        if rounded and use.rate < 1:
            kind = kind._replace(rate=min(1.0, 1.02 ** ceil(log(use.rate) / log(1.02))))
        found[kind] = found.get(kind, 0) + use.releases
    return tuple(sorted(found.items(), key=repr))
