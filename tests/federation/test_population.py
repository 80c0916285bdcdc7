"""Ten thousand clients of whom fifty are awake: what is made depends on the fifty."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fedstill.core import SERVER, Data, Model, NodeId
from fedstill.core.errors import BadValue
from fedstill.data.doors import split
from fedstill.data.partitioned import partitioned
from fedstill.data.partitions import Iid
from fedstill.data.sites import Examples as Images
from fedstill.data.sites import LabelledSet, whole_site
from fedstill.engines.execution import Execution
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.scoring import EVERYONE
from fedstill.federation import population as populations
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Party, Population
from fedstill.federation.run import run
from fedstill.federation.sampling import Sample
from fedstill.federation.topology import Complete
from fedstill.logbook.writer import MemoryLog
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.local import Local
from fedstill.methods.scaffold import Scaffold
from fedstill.models import MLP
from worlds import CLASSES, examples

MANY = 10_000
MODEL = MLP((1, 4, 4), CLASSES, hidden=(6,))


def images(count: int, seed: int) -> Images:
    rng = np.random.Generator(np.random.PCG64(seed))
    labels = np.arange(count, dtype=np.int64) % CLASSES
    made = rng.integers(0, 120, (count, 1, 4, 4)).astype(np.uint8)
    made[np.arange(count), 0, labels] += 100
    return Images(made, labels)


class Counted(Population):
    """Counts the parties that are made."""

    def __init__(self, clients: int, **options: Any):
        whole = LabelledSet(
            "made up", images(4 * clients, 0), images(60, 1), ("a", "b", "c"), (0.3,), (0.2,)
        )
        collection = partitioned(whole, Iid(clients), seed=0)
        super().__init__(collection, MODEL, **options)
        self.made: Counter[NodeId] = Counter()

    def _made(self, node: NodeId) -> Party:
        self.made[node] += 1
        return super()._made(node)


class Invented(Population):
    """Clients who are invented when they are asked for; nothing is kept."""

    def __init__(self, clients: int):
        self.names: Sequence[NodeId] = [f"c{i:05d}" for i in range(clients)]
        self.common_test: Data | None = examples("test", 30, MODEL.shape, [0, 1, 2])
        self.made: Counter[NodeId] = Counter()

    @property
    def clients(self) -> Sequence[NodeId]:
        return self.names

    @property
    def models(self) -> Mapping[NodeId, Model]:
        return dict.fromkeys(self.names, MODEL)

    def on(self, device: torch.device | str) -> Invented:
        return self

    def party(self, node: NodeId) -> Party:
        if node == SERVER:
            return Party(Data(), Data(), MODEL)
        self.made[node] += 1
        assert self.common_test is not None
        return Party(examples(node, 6, MODEL.shape, [0, 1, 2]), self.common_test, MODEL)


def played(
    method: Any, population: Any, engine: Any = InProcess, **options: Any
) -> tuple[Any, Any]:
    log, options = MemoryLog(), {"scores": "own", **options}
    experiment = Experiment(method, population, sampling=Sample(count=50), rounds=3, **options)
    made = engine(experiment, Execution(device="cpu"))
    run(made, log)
    return made, log


def awake(log: MemoryLog) -> set[str]:
    return {row.node for row in log.metrics if row.step == "update"}


@pytest.mark.parametrize("engine", [InProcess, Batched])
def test_of_ten_thousand_clients_only_those_awake_are_made(engine: Any) -> None:
    population = Counted(MANY)
    began = time.perf_counter()
    made, log = played(FedAvg(lr=0.1), population, engine)
    assert time.perf_counter() - began < 20
    assert 100 < len(population.made) <= 150
    assert set(population.made) == awake(log)
    assert set(population.made.values()) == {1}
    assert len(made.states) == len(population.made) + 1
    assert len(log.metrics) == 3 * (50 + 2 + 1)  # losses, the two scores, the seconds


def test_a_population_invented_on_demand_is_asked_for_those_awake_alone() -> None:
    population = Invented(MANY)
    _, log = played(Scaffold(lr=0.1), population)
    assert set(population.made) == awake(log)
    assert len(population.made) <= 150


def test_clients_with_models_are_made_when_they_have_acted() -> None:
    population = Counted(MANY)
    made, log = played(Local(lr=0.1), population)
    assert set(population.made) == set(made.states)
    assert len(made.states) <= 150
    last = [row for row in log.metrics if (row.round, row.name) == (3, "accuracy")]
    assert {row.node: row.target for row in last} == {name: name for name in made.states}


def test_peers_hear_those_awake_of_ten_thousand() -> None:
    population = Invented(MANY)
    graph = Complete().graph(population.clients, 0)
    awake = population.clients[::200]
    assert graph.hearers("c00200", awake) == [SERVER, *(n for n in awake if n != "c00200")]
    assert graph.hearers("c00001", awake) == [SERVER, *awake]
    assert len(graph.neighbours["c00001"]) == MANY - 1
    with pytest.raises(KeyError):
        graph.neighbours["nobody"]


def test_the_score_on_one_common_set_is_written_once() -> None:
    population = Counted(60)
    _, log = played(FedAvg(lr=0.1), population)
    _, crossed = played(FedAvg(lr=0.1), population, scores="cross")
    rows = [row for row in log.metrics if row.step == "evaluate"]
    every = [row for row in crossed.metrics if row.step == "evaluate"]
    assert [row.target for row in rows] == [EVERYONE] * 6
    assert len(every) == 60 * 6
    assert {(r.round, r.name, r.value) for r in rows} == {(r.round, r.name, r.value) for r in every}
    assert log.rows().accuracy_by_round() == pytest.approx(crossed.rows().accuracy_by_round())


def test_several_test_sets_are_not_a_common_one() -> None:
    one, other = images(6, 0), images(6, 1)
    sites = [whole_site(name, one, test) for name, test in zip("ab", (one, other), strict=True)]
    collection = partitioned(
        LabelledSet("x", one, one, ("a", "b", "c"), (0.0,), (1.0,)), Iid(2), seed=0
    )
    apart = type(collection)("x", tuple(sites), ("a", "b", "c"))
    assert Population(apart, MODEL).common_test is None
    # One set seen by two clients in two ways is two sets.
    ways = [whole_site(n, one, one, mean=(m,), std=(1.0,)) for n, m in (("a", 0.0), ("b", 0.5))]
    assert Population(type(apart)("x", tuple(ways), apart.class_names), MODEL).common_test is None
    names = [site.name for site in collection.sites]
    shared = Population(collection, MODEL)
    assert shared.common_test is shared.party(names[0]).test is shared.party(names[1]).test


def test_no_more_parties_are_kept_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populations, "MOST_PARTIES", 3)
    population = Counted(8)
    first = population.party(population.clients[0])
    for name in population.clients[1:3]:
        population.party(name)
    assert population.party(population.clients[0]) is first
    for name in population.clients[3:5]:
        population.party(name)
    assert population.party(population.clients[0]) is first
    assert len(population._parties) == 3
    population.party(population.clients[1])
    assert population.made[population.clients[1]] == 2
    with pytest.raises(KeyError):
        population.party("nobody")


def test_others_examples_are_learnt_from_without_making_anybody() -> None:
    population = Counted(8)
    other = Data.of(torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.long))
    twin = population.learning_from({population.clients[1]: other})
    assert not population.made
    assert twin.party(population.clients[1]).data is other
    assert (
        twin.party(population.clients[0]).data.digest()
        == population.party(population.clients[0]).data.digest()
    )
    assert population.party(population.clients[1]).data is not other


def test_a_network_may_be_given_by_its_class_and_single_clients_may_have_others() -> None:
    data = Counted(4).data
    assert data is not None
    first, *others = (site.name for site in data.sites)
    wide = MLP((1, 4, 4), CLASSES, hidden=(9,))
    made = Population(data, MLP, networks={first: wide}, server=MODEL)
    assert made.models[first] is wide
    assert {made.models[name] for name in others} == {MLP((1, 4, 4), CLASSES)}
    assert made.party(SERVER).model is MODEL
    assert made.networks == {wide, MODEL, MLP((1, 4, 4), CLASSES)}


def test_a_network_for_other_examples_and_an_unknown_client_are_refused() -> None:
    data = Counted(4).data
    assert data is not None
    wrong = r"mlp is for shape \(3, 4, 4\), but the data have \(1, 4, 4\)"
    with pytest.raises(BadValue, match=wrong):
        Population(data, MLP((3, 4, 4), CLASSES))
    with pytest.raises(BadValue, match="networks: unknown client 'nobody'"):
        Population(data, MODEL, networks={"nobody": MODEL})
    with pytest.raises(BadValue, match="networks: unknown client '0'"):
        Population(data, MODEL, networks={0: MODEL})


def test_data_are_moved_to_a_device_once_and_shared_there() -> None:
    population = Counted(4)
    there = population.on("meta")
    assert there is population.on("meta") and population.on("cpu") is population
    one, other = (there.party(name) for name in there.clients[:2])
    assert one.data.device == torch.device("meta")
    assert one.data.parts[0].pool is other.data.parts[0].pool and one.test is other.test
    assert population.party(population.clients[0]).data.device == torch.device("cpu")
    data = Data.of(torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.long))
    twin = population.learning_from(dict.fromkeys(population.clients, data)).on("meta")
    assert twin.party(twin.clients[0]).data.device == torch.device("meta")
    assert len(twin.party(twin.clients[0]).data) == 2
    assert twin.party(twin.clients[0]).test is one.test


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_given_numbers_of_any_precision_normalise_in_single_precision(kind: type):
    inputs = np.full((4, 1, 2, 2), 255 if kind is np.uint8 else 1.0, dtype=kind)
    data = split(
        inputs, [0, 1, 0, 1], test=(inputs, [0, 1, 0, 1]), normalise=(np.float64(0.5), 0.2)
    )
    people = populations.Population(data, MLP((1, 2, 2), 2))
    x = people.on("cpu").party(data.sites[0].name).data.take(torch.arange(4)).x
    assert x.dtype == torch.float32
    assert torch.allclose(x, torch.tensor(2.5))  # (1 - 0.5) / 0.2
