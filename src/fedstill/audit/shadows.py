"""Shadow federations: the same experiment with random halves of somebody's records; no attack.

All are played together as one stacked federation, in groups. What they say of every record is
kept in a file as soon as a group has ended, so an audit that was stopped goes on from there.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch

from fedstill.audit.views import Listener, Records, Seen, of_messages, of_models, of_trained
from fedstill.core import Data, ranges
from fedstill.core.errors import BadValue, unknown
from fedstill.core.files import write_whole
from fedstill.core.ranges import Count, Whole
from fedstill.core.records import NodeId
from fedstill.core.seeds import draw, generator
from fedstill.engines.execution import Execution
from fedstill.engines.play.together import Together
from fedstill.federation.budget import calibrated, planned
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Population
from fedstill.federation.run import Progress, rounds_of, run_together
from fedstill.logbook.writer import MemoryLog
from fedstill.methods.virtual import Own, Virtual
from fedstill.privacy.privacy import Plan

Inside = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Key = tuple[NodeId, str]  # whose records, and what is looked at
Watch = Callable[[float], None]  # told which share of the work is done
SEPARATOR = "\t"


@dataclass(frozen=True)
class Shadowing:
    """Whose records are guessed about, and by how many shadow federations."""

    clients: tuple[NodeId, ...]
    records: Count = 2000  # of a client at most; the others are always inside
    shadows: Count = 64
    together: Count = 16  # federations that are played as one
    set_epochs: Count = 100  # of a network trained on a client's synthetic set
    seed: Whole = 0

    def __post_init__(self) -> None:
        wrong = ranges.faults(self)
        if not wrong and self.shadows < 4:
            wrong = [f"shadows = {self.shadows}: an attack needs at least 4; 64 are good"]
        if not self.clients:
            wrong.append("clients: name at least one whose records are guessed about")
        if wrong:
            raise BadValue(wrong)

    def pool(self, client: NodeId, held: int) -> torch.Tensor:
        """[record], which of so many records of a client are guessed about, in their order."""
        order = torch.randperm(held, generator=generator(self.seed, "audit", "records", client))
        return order[: self.records].sort().values

    def inside(self, shadow: int, client: NodeId, records: int) -> torch.Tensor:
        """[record], which of them a shadow holds: a coin for each."""
        coins = generator(self.seed, "audit", "coins", shadow, client)
        return torch.rand(records, generator=coins) < 0.5


class Said(NamedTuple):
    """What shadows said: of each client's records, and of test examples."""

    inside: dict[NodeId, Inside]  # [shadow, record]
    records: dict[Key, Floats]  # [shadow, record]
    tests: dict[Key, Floats]  # [shadow, example]


def check_clients(population: Population, clients: Sequence[NodeId]) -> None:
    """Refuse somebody who is not there, or has too few records to guess about."""
    for client in clients:
        if client not in population.clients:
            raise BadValue(unknown("client", client, population.clients))
        held = len(population.party(client).data)
        if held < 20:
            raise BadValue(
                f"{client} has {held} training examples; an audit needs at least 20 to guess about"
            )


def shadowed(
    experiment: Experiment,
    execution: Execution,
    asked: Shadowing,
    folder: Path,
    watch: Watch,
    virtual: Virtual | None = None,
) -> Said:
    """What all shadows of an experiment said; those of files in the folder are not played.

    With `virtual` clients of a shadow distil what they hold first, and learn from that alone.
    """
    device = execution.torch_device
    located = replace(experiment, population=experiment.population.on(device))
    known = [_records(located, client, asked) for client in asked.clients]
    found = []
    for first in range(0, asked.shadows, asked.together):
        numbers = range(first, min(first + asked.together, asked.shadows))
        path = folder / f"shadows-{numbers[0]:04d}-{numbers[-1]:04d}.npz"
        group = read(path)
        if group is None:
            begun, part = first / asked.shadows, len(numbers) / asked.shadows

            def told(share: float, begun: float = begun, part: float = part) -> None:
                watch(begun + part * share)

            group = _played(located, execution, asked, numbers, known, told, virtual)
            write(path, group)
        watch((numbers[-1] + 1) / asked.shadows)
        found.append(group)
    return joined(found)


def _records(experiment: Experiment, client: NodeId, asked: Shadowing) -> Records:
    party = experiment.population.party(client)
    rows = asked.pool(client, len(party.data)).to(party.data.device)
    most = torch.arange(min(len(party.test), asked.records), device=party.test.device)
    model = party.model.on(party.data.device)
    return Records.of(client, party.data.subset(rows), party.test.subset(most), model, asked.seed)


def shadow(experiment: Experiment, asked: Shadowing, number: int) -> Experiment:
    """The experiment in which the audited clients hold a half of their pools, by other draws."""
    population, data = experiment.population, {}
    for client in asked.clients:
        own = population.party(client).data
        pool = asked.pool(client, len(own))
        held = torch.ones(len(own), dtype=torch.bool)
        held[pool] = asked.inside(number, client, len(pool))
        data[client] = own.subset(held.nonzero().flatten().to(own.device))
    seed = draw(asked.seed, "audit", "shadow", number)
    return replace(experiment, population=population.learning_from(data), seed=seed)


def with_noise(
    made: Sequence[Experiment], first: Experiment, execution: Execution
) -> list[Experiment]:
    """Private shadows with the noise of the first one: halves are alike, and so is what they need.

    Each has its own plan, so that its ledger finds what it does planned.
    """
    privacy = first.privacy
    if privacy is None or privacy.plan is None:
        return list(made)
    noise = privacy.plan.noise
    return [
        replace(each, privacy=replace(privacy, plan=Plan(noise, planned(each, execution))))
        for each in made
    ]


def on_virtual_data(
    made: Sequence[Experiment], first: Experiment, virtual: Virtual, execution: Execution
) -> list[Experiment]:
    """Shadows whose clients learn from sets that they distil; what these cost is all that is spent.

    The sets stay where they are made: an attacker sees what the method shows, and no more.
    """

    def warm_up(each: Experiment) -> Experiment:
        return Experiment(
            virtual, each.population, rounds=0, seed=each.seed, topology=each.topology,
            privacy=each.privacy,
        )  # fmt: skip

    making = [warm_up(each) for each in made]
    if first.privacy is not None:
        making = with_noise(making, calibrated(warm_up(first), execution), execution)
    together = Together(making, execution)
    run_together(
        together, [rounds_of(engine, MemoryLog(), scored=False) for engine in together.engines]
    )
    found = []
    for each, engine in zip(made, together.engines, strict=True):
        states = {client: engine.memory(client) for client in each.population.clients}
        sets = {
            client: Data.of(*state.as_set().flat())
            for client, state in states.items()
            if isinstance(state, Own)
        }
        found.append(replace(each, population=each.population.learning_from(sets), privacy=None))
    return found


def _played(
    experiment: Experiment,
    execution: Execution,
    asked: Shadowing,
    numbers: Sequence[int],
    known: Sequence[Records],
    watch: Watch,
    virtual: Virtual | None = None,
) -> Said:
    made = [shadow(experiment, asked, number) for number in numbers]
    if virtual is not None:
        made = on_virtual_data(made, shadow(experiment, asked, 0), virtual, execution)
    elif experiment.privacy is not None:
        made = with_noise(made, calibrated(shadow(experiment, asked, 0), execution), execution)
    together = Together(made, execution)
    listeners = [Listener(known) for _ in made]

    def at(progress: Progress) -> None:
        watch(0.95 * progress.round / max(1, progress.rounds))

    watches: list[Callable[[Progress], None]] = [at, *[lambda progress: None] * len(made)]
    run_together(
        together,
        [
            rounds_of(engine, MemoryLog(), observers=[heard], watch=told, scored=False)
            for engine, heard, told in zip(together.engines, listeners, watches, strict=False)
        ],
    )
    said: list[list[Seen]] = [
        [*of_models(engine, known), *of_messages(heard)]
        for engine, heard in zip(together.engines, listeners, strict=True)
    ]
    for place, seen in of_trained(listeners, made, execution, asked.set_epochs):
        said[place].append(seen)
    inside = {
        one.client: np.stack(
            [asked.inside(number, one.client, len(one.batch.y)).numpy() for number in numbers]
        )
        for one in known
    }
    return Said(inside, *_stacked(said))


def _stacked(said: Sequence[Sequence[Seen]]) -> tuple[dict[Key, Floats], dict[Key, Floats]]:
    """Each view of each client's records, shadow after shadow, where all shadows have it."""
    by_shadow = [{(c, view): (own, test) for c, view, own, test in seen} for seen in said]
    everywhere = [key for key in by_shadow[0] if all(key in seen for seen in by_shadow)]
    records = {key: np.stack([seen[key][0] for seen in by_shadow]) for key in everywhere}
    tests = {key: np.stack([seen[key][1] for seen in by_shadow]) for key in everywhere}
    return records, tests


def joined(groups: Sequence[Said]) -> Said:
    """Groups of shadows behind each other."""
    keys = [key for key in groups[0].records if all(key in group.records for group in groups)]
    return Said(
        {c: np.concatenate([group.inside[c] for group in groups]) for c in groups[0].inside},
        {key: np.concatenate([group.records[key] for group in groups]) for key in keys},
        {key: np.concatenate([group.tests[key] for group in groups]) for key in keys},
    )


def write(path: Path, said: Said) -> None:
    """Keep what a group of shadows said."""
    path.parent.mkdir(parents=True, exist_ok=True)
    named: Mapping[str, npt.NDArray[np.generic]] = {
        **{SEPARATOR.join(("inside", client)): array for client, array in said.inside.items()},
        **{SEPARATOR.join(("records", *key)): array for key, array in said.records.items()},
        **{SEPARATOR.join(("tests", *key)): array for key, array in said.tests.items()},
    }
    names = np.array(list(named))
    arrays = {f"array{place}": array for place, array in enumerate(named.values())}
    written = io.BytesIO()
    np.savez_compressed(written, names=names, **arrays)  # type: ignore[arg-type]
    write_whole(path, written.getvalue())


def read(path: Path) -> Said | None:
    """What was kept, or None where nothing whole is there."""
    if not path.exists():
        return None
    said = Said({}, {}, {})
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            for place, name in enumerate(file["names"].tolist()):
                part, client, *view = name.split(SEPARATOR)
                array = file[f"array{place}"]
                if part == "inside":
                    said.inside[client] = array
                else:
                    (said.records if part == "records" else said.tests)[client, view[0]] = array
    except (OSError, ValueError, KeyError, BadZipFile):
        return None
    return said
