"""Whole runs with a budget: what is spent, what is refused, and that going on changes nothing."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Never

import numpy as np
import pytest
import torch

import fedstill
from fedstill.commands import budget
from fedstill.core import Inbox, Method, Node, Step, at_clients, side_by_side, trees
from fedstill.core.errors import BadValue, RunFolderError, SealedData, StepError
from fedstill.core.method import Place
from fedstill.core.release import Spending, Terms, Use
from fedstill.data.folders import own_data
from fedstill.engines.execution import Execution
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.budget import calibrated
from fedstill.federation.experiment import Experiment
from fedstill.federation.run import run
from fedstill.logbook.writer import MemoryLog
from fedstill.methods import METHODS
from fedstill.parts.class_tables import ClassTable, Logits, class_averages
from fedstill.parts.distribution_matching import Matching
from fedstill.parts.synthetic_sets import from_noise
from fedstill.privacy.accounting import mu_of
from fedstill.privacy.ledger import composed
from fedstill.privacy.privacy import SIMULATED, Plan, Privacy
from fedstill.privacy.summary import by_node, summary_of, words_of
from fedstill.sites.people import OnePlace
from fedstill.testing import worlds

BUDGET = Privacy(4.0, 1e-3, releases=2)


def method(name: str, **values: Any) -> Method:
    kind = METHODS[name]
    return kind(**{**kind.presets.get("small", {}), **values})


def feddm(**values: Any) -> Method:
    return method("feddm", **{"start": "noise", "keep": True, **values})


def test_a_planned_run_spends_exactly_its_budget() -> None:
    _, log = worlds.played(feddm(), worlds.pictures(), 3, privacy=BUDGET)
    spent = {node: composed(rows, 1e-3) for node, rows in by_node(log.privacy).items()}
    assert spent == {name: pytest.approx(4.0) for name in ("c0", "c1", "c2")}
    # Three rounds of two releases each: sigma = sqrt(6) / mu.
    (sigma,) = {row.sigma for row in log.privacy}
    assert sigma == pytest.approx(6**0.5 / mu_of(4.0, 1e-3))


def test_clients_that_sleep_spend_nothing_and_get_less_noise_for_what_they_do() -> None:
    sampling = fedstill.Scripted({1: ["c2"], 2: ["c1", "c2"]})
    _, log = worlds.played(feddm(), worlds.pictures(), 2, privacy=BUDGET, sampling=sampling)
    noise = {row.node: row.sigma for row in log.privacy}
    assert noise["c0"] == pytest.approx(2**0.5 * noise["c1"])
    assert set(noise) == {"c0", "c1"}


def test_a_private_loop_on_records_tells_no_loss_and_one_on_releases_may() -> None:
    _, log = worlds.played(feddm(), worlds.pictures(), 1, privacy=BUDGET)
    told = {(row.step, row.name) for row in log.metrics if row.node == "c0"}
    assert ("synthesize", "loss") in told  # of matching what was released
    _, log = worlds.played(
        feddm(steps=2), worlds.pictures(), 1, privacy=replace(BUDGET, releases=1)
    )
    assert log.privacy


@dataclass(frozen=True)
class Peeking(Method):
    """Reads the first record."""

    def each_round(self) -> Sequence[Step]:
        return [self.peek]

    @at_clients
    def peek(self, client: Node[None], inbox: Inbox[Never]) -> None:
        """Look."""
        client.log(first=client.data.take(torch.tensor([0])).x.sum())


def test_a_method_that_reads_sealed_records_fails_by_the_name_of_its_step() -> None:
    with pytest.raises(BadValue, match=r"Peeking cannot be private.*step peek: it reads examples"):
        worlds.played(Peeking(), worlds.pictures(), 1, privacy=BUDGET)


@dataclass(frozen=True)
class Growing(Method):
    """Asks for one more release when it is really played than when it is rehearsed."""

    def each_round(self) -> Sequence[Step]:
        return [self.ask]

    @at_clients
    def ask(self, client: Node[None], inbox: Inbox[Never]) -> None:
        """Ask."""
        rehearsed = client.privacy is not None and client.privacy.sigma == 1.0
        client.spend(Use("class sums", 1 if rehearsed else 2))


def test_a_use_beyond_the_budget_is_refused_before_anything_is_released() -> None:
    with pytest.raises(StepError, match=r"would bring epsilon to 6\.22, but the budget is 4 "):
        worlds.played(Growing(), worlds.pictures(), 1, privacy=BUDGET)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"start": "real"}, r'start = "real" shows private examples.*start = "noise"'),
        ({"upload": "real", "keep": False}, r'start = "real" shows private examples'),
        ({"steps": 1}, r"privacy.releases = 2, but there are 1 steps"),
    ],
)
def test_what_would_show_records_is_refused_with_what_to_do(
    values: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadValue, match=said):
        worlds.played(feddm(**values), worlds.pictures(), 1, privacy=BUDGET)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"epsilon": 0.0}, r"privacy.epsilon = 0.0: must be in \(0, 1000\]"),
        ({"epsilon": 1e9}, r"privacy.epsilon"),
        ({"epsilon": 1.0, "delta": 0.0}, r"privacy.delta = 0.0: must be in \(0, 1\)"),
        ({"epsilon": 1.0, "clip": 0.0}, r"privacy.clip = 0.0: must be above 0"),
        ({"epsilon": 1.0, "releases": 5000}, r"privacy.releases = 5000: must be in \[1, 1000\]"),
        ({"epsilon": 1.0, "labels": "secret"}, r"privacy.labels = 'secret'"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(BadValue, match=said):
        Privacy(**values)


def test_a_delta_that_would_allow_to_publish_a_record_is_refused() -> None:
    with pytest.raises(BadValue, match=r"privacy.delta = 0.1: must be below one over.*c1 has 27"):
        Experiment(feddm(), worlds.pictures(), privacy=Privacy(1.0, 0.1))


def test_normalisation_by_the_records_own_statistics_is_refused() -> None:
    x, y = torch.rand(40, 1, 8, 8).numpy(), (torch.arange(40) % 3).numpy()
    data = fedstill.split(x, y, test=(x, y))
    with pytest.raises(BadValue, match="exact mean and deviation of its records"):
        Experiment(feddm(), fedstill.Population(data, fedstill.ConvNet), privacy=BUDGET)
    data = fedstill.split(x, y, test=(x, y), normalise=(0.5, 0.5))
    Experiment(feddm(), fedstill.Population(data, fedstill.ConvNet), privacy=BUDGET)


def test_normalisation_by_one_statistic_of_the_records_is_refused_too(tmp_path: Path) -> None:
    x = torch.randint(0, 256, (40, 8, 8), dtype=torch.uint8).numpy()
    np.savez(tmp_path / "a.npz", train_images=x, train_labels=(torch.arange(40) % 3).numpy())
    for given in ({"mean": (0.5,)}, {"std": (0.5,)}):
        data = own_data({"a": tmp_path / "a.npz"}, **given)
        with pytest.raises(BadValue, match="exact mean and deviation of its records"):
            Experiment(feddm(), fedstill.Population(data, fedstill.ConvNet), privacy=BUDGET)


@dataclass(frozen=True)
class Beforehand(Method):
    """Uses records where nothing is written down: as a memory is made, or as a model is scored."""

    when: str

    def each_round(self) -> Sequence[Step]:
        return [self.rest]

    def client_state(self, client: Node[Any]) -> None:
        self.use(client, "memory")

    @at_clients
    def rest(self, client: Node[None], inbox: Inbox[Never]) -> None:
        """Do nothing."""

    def predict(self, node: Node[Any], x: torch.Tensor) -> torch.Tensor:
        self.use(node, "score")
        return node.model(node.model.init(0), x)

    def use(self, node: Node[Any], when: str) -> None:
        if when == self.when:
            node.spend(Use("class sums"))


@dataclass(frozen=True)
class ByClients(Beforehand):
    """The same, and clients' models are scored."""

    scored: ClassVar[Place] = Place.CLIENTS


@pytest.mark.parametrize("when", ["memory", "score"])
def test_records_are_used_in_steps_alone_where_the_ledger_hears_of_it(when: str) -> None:
    with pytest.raises((BadValue, SealedData), match="records are used in steps alone"):
        worlds.played(ByClients(when), worlds.pictures(), 1, privacy=BUDGET)


def test_noise_that_was_found_for_another_budget_is_found_again() -> None:
    cpu = Execution(device="cpu")
    ready = calibrated(experiment(), cpu)
    assert ready.privacy is not None and calibrated(ready, cpu) is ready
    less = calibrated(replace(ready, privacy=replace(ready.privacy, epsilon=1.0)), cpu)
    assert less.privacy is not None and less.privacy.plan is not None
    assert less.privacy.plan.noise["c0"] == pytest.approx(6**0.5 / mu_of(1.0, 1e-3))


def test_a_clip_is_of_what_networks_make_of_records_and_another_of_gradients() -> None:
    plan = Plan({"c0": 2.0}, {})
    asked = Privacy(epsilon=4, clip=3.0, gradient_clip=7.0, releases=5, plan=plan)
    assert asked.terms("c0") == Terms(
        clip=3.0, gradient_clip=7.0, releases=5, sigma=2.0, counts_sigma=None
    )
    assert asked.terms("c1").sigma == 0  # nothing is planned of it


def test_a_summary_tells_the_noise_of_what_is_released_and_not_that_of_counts() -> None:
    asked = replace(BUDGET, labels="private")
    assert asked.counts_sigma is not None
    rows = [
        Spending(1, "update", "c0", "class counts", asked.counts_sigma, 1.0, 1),
        Spending(1, "update", "c0", "class sums", 9.0, 1.0, 1),
        Spending(2, "update", "c0", "class sums", 11.0, 1.0, 1),
        Spending(1, "update", "c1", "class counts", asked.counts_sigma, 1.0, 1),
    ]
    told = summary_of(asked, rows)
    assert told["noise_by_client"] == {"c0": 11.0, "c1": None}
    both, one = told["epsilon_by_client"]["c0"], told["epsilon_by_client"]["c1"]
    assert told["epsilon_spent"] == both > one > 0
    nobody = summary_of(asked, [])
    assert nobody["epsilon_spent"] == 0 and nobody["noise_by_client"] == {}


@pytest.mark.parametrize(
    "said",
    [
        [Spending(1, "update", "b", "DP-SGD", 0.05, 0.5, 2**20)],
        # An accountant may take five seconds for a kind of samples.
        [Spending(1, "update", "b", "DP-SGD", 5.0, 0.1 / at, 1) for at in range(1, 300)],
    ],
)
def test_a_run_ends_whatever_one_site_says_that_it_spent(said: list[Spending]) -> None:
    pytest.importorskip("dp_accounting")
    honest = Spending(1, "update", "a", "DP-SGD", 1.0, 1.0, 1)
    told = summary_of(Privacy(epsilon=8.0), [honest, *said])
    assert told["epsilon_spent"] is None and [*told["epsilon_by_client"]] == ["a"]
    assert told["epsilon_note"] == "more was spent than can be accounted for, by b"
    json.dumps(told, allow_nan=False)
    shown = budget.told(Privacy(epsilon=8.0), [honest, *said], "run: spent")["clients"]
    assert {row["client"]: row["epsilon"] for row in shown} == {"a": "4.377", "b": "unknown"}


def test_a_promise_is_in_words_also_before_noise_was_found() -> None:
    first, *limits = words_of(BUDGET)
    assert first.startswith("epsilon = 4 at delta = 0.001 for the whole run, of one record")
    assert SIMULATED in limits
    at_sites = replace(BUDGET, plan=Plan({}, {}, secret=True))
    assert SIMULATED not in words_of(at_sites)


def test_private_labels_tell_counts_with_noise_and_pay_for_them_once() -> None:
    private = replace(BUDGET, labels="private")
    _, log = worlds.played(feddm(), worlds.pictures(), 2, privacy=private)
    rows = by_node(log.privacy)["c1"]
    assert [row.mechanism for row in rows] == ["class counts", "class sums", "class sums"]
    assert composed(rows, 1e-3) == pytest.approx(4.0)
    # A twentieth of mu² goes to the counts, the rest to four releases.
    mu = mu_of(4.0, 1e-3)
    assert rows[1].sigma == pytest.approx((4 / (0.95 * mu**2)) ** 0.5)


@pytest.mark.parametrize("name", ["feddm", "fedavg"])
def test_engines_agree_with_unequal_noise(name: str) -> None:
    sampling = fedstill.Scripted({2: ["c1"]})
    chosen = feddm() if name == "feddm" else method("fedavg", batch_size=64)
    ended = []
    for engine in (InProcess, Batched):
        played, log = worlds.played(
            chosen, worlds.pictures(), 2, engine, privacy=BUDGET, sampling=sampling
        )
        assert len({row.sigma for row in log.privacy}) == 2
        ended.append(trees.tensors(played.states["server"]))
    for one, other in zip(*ended, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_another_seed_draws_other_noise_and_the_same_seed_the_same() -> None:
    def images(seed: int) -> torch.Tensor:
        engine, _ = worlds.played(feddm(), worlds.pictures(), 1, privacy=BUDGET, seed=seed)
        return engine.states["c0"].images

    assert torch.equal(images(0), images(0))
    assert not torch.equal(images(0), images(1))


def test_a_record_that_is_clipped_to_nothing_changes_no_byte_of_a_message() -> None:
    """An image of NaN counts as nothing, so it and a black one beside its class do the same."""

    def message(odd: float) -> torch.Tensor:
        world = worlds.vectors()
        party = world.parties["c1"]
        x, y = party.data.all()
        x = x.clone()
        x[3] = odd
        world.parties["c1"] = replace(party, data=fedstill.Data.of(x, y))
        engine, _ = worlds.played(feddm(), world, 1, privacy=BUDGET)
        return engine.states["c1"].images

    assert torch.equal(message(float("nan")), message(float("inf")))
    assert torch.isfinite(message(float("nan"))).all()


def test_the_papers_mechanism_runs_warns_and_reports_no_epsilon() -> None:
    paper = replace(BUDGET, mechanism="paper", clip=5.0)
    _, log = worlds.played(feddm(), worlds.pictures(), 2, privacy=paper)
    told = summary_of(paper, log.privacy)
    assert told["epsilon_spent"] is None and "none: the papers' mechanism" in told["promise"]
    assert {row.mechanism for row in log.privacy} == {"batch gradients"}


@pytest.mark.parametrize(
    ("epsilon", "sigma"), [(4.845, 1.0), (1.615, 3.0), (0.969, 5.0), (8.07, 0.6)]
)
def test_the_noise_levels_that_papers_print_are_had_by_a_budget(
    epsilon: float, sigma: float
) -> None:
    paper = Privacy(epsilon, 1e-5, mechanism="paper", clip=5.0)
    assert paper.terms("c0").sigma == pytest.approx(sigma, rel=1e-3)


def test_the_form_of_desas_code_runs_and_reports_no_epsilon_either() -> None:
    code = replace(BUDGET, mechanism="desa", clip=2.0)
    _, log = worlds.played(method("desa"), worlds.pictures(), 1, privacy=code)
    told = summary_of(code, log.privacy)
    assert told["epsilon_spent"] is None and told["mechanism"] == "desa"
    assert {(row.step, row.mechanism) for row in log.privacy} == {("synthesize", "group gradients")}
    with pytest.raises(BadValue, match='"desa": FedAvg matches no distributions'):
        worlds.played(method("fedavg"), worlds.pictures(), 1, privacy=code)


def test_the_papers_mechanism_guards_anchors_alone_and_nothing_where_nothing_is_matched() -> None:
    paper = replace(BUDGET, mechanism="paper", clip=2.0)
    _, log = worlds.played(method("desa"), worlds.pictures(), 1, privacy=paper)
    assert {(row.step, row.mechanism) for row in log.privacy} == {("synthesize", "batch gradients")}
    with pytest.raises(BadValue, match="FedAvg matches no distributions"):
        worlds.played(method("fedavg"), worlds.pictures(), 1, privacy=paper)


def experiment(rounds: int = 3, **values: Any) -> Experiment:
    private = replace(BUDGET, **values)
    return Experiment(feddm(), worlds.pictures(), rounds=rounds, privacy=private)


def ledger(folder: Path) -> list[list[str]]:
    with (folder / "privacy.csv").open() as file:
        return [*csv.reader(file)]


def test_a_run_that_was_stopped_leaves_the_ledger_of_one_that_was_not(tmp_path: Path) -> None:
    cpu = Execution(device="cpu")
    whole = fedstill.run(experiment(), execution=cpu, folder=tmp_path / "whole", pictures=False)

    class Stop(Exception):
        pass

    def stop(progress: Any) -> None:
        if progress.round == 2:
            raise Stop

    with pytest.raises(Stop):
        fedstill.run(
            experiment(), execution=cpu, folder=tmp_path / "cut", watch=stop, pictures=False
        )
    assert len(ledger(tmp_path / "cut")) == 7  # a header, and the rows of both rounds
    again = fedstill.run(
        experiment(), execution=cpu, folder=tmp_path / "cut", resume=True, pictures=False
    )
    assert ledger(tmp_path / "cut") == ledger(tmp_path / "whole")
    assert again.summary["privacy"] == whole.summary["privacy"]
    assert whole.summary["privacy"]["epsilon_spent"] == pytest.approx(4.0)
    assert whole.summary["data_digest"] is None  # a digest of records would confirm a guess
    assert any("simulated" in note.text for note in whole.notes)


def test_another_budget_or_more_rounds_do_not_go_on(tmp_path: Path) -> None:
    cpu, folder = Execution(device="cpu"), tmp_path / "run"
    fedstill.run(experiment(2), execution=cpu, folder=folder, pictures=False)
    with pytest.raises(RunFolderError, match=r"privacy.epsilon was 4.0, not 8.0"):
        fedstill.run(experiment(2, epsilon=8.0), execution=cpu, folder=folder, resume=True)
    with pytest.raises(
        RunFolderError, match=r"privacy.rounds was 2, not 3. Only names, .* found for its rounds"
    ):
        fedstill.run(experiment(3), execution=cpu, folder=folder, resume=True)


def test_many_clients_of_many_sizes_share_noise_found_for_a_slightly_higher_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []

    def noise(uses: Sequence[Use], epsilon: float, delta: float) -> float:
        asked.append(uses[0].rate)
        return 1.0

    monkeypatch.setattr("fedstill.federation.budget.noise_for", noise)
    world = worlds.vectors(sizes=range(100, 130))
    chosen = Experiment(method("fedavg", batch_size=20), world, rounds=1, privacy=BUDGET)
    found = calibrated(chosen, Execution(device="cpu")).privacy
    assert found is not None and found.plan is not None and len(found.plan.noise) == 30
    assert len(asked) <= 16  # rates from 20/129 to 20/100 in steps of two hundredths: 14
    assert all(any(rate <= one <= 1.02 * rate for one in asked) for rate in (20 / 100, 20 / 129))


def test_a_site_finds_the_noise_of_its_own_client_without_seeing_others() -> None:
    world = worlds.pictures()
    whole = calibrated(experiment(), Execution(device="cpu"))
    own = {"c1": world.party("c1")}
    site = OnePlace(world.models, world.server_model, parties=own, public=world.public)
    alone = calibrated(replace(experiment(), population=site), Execution(device="cpu"))
    assert whole.privacy is not None and whole.privacy.plan is not None
    assert alone.privacy is not None and alone.privacy.plan is not None
    assert alone.privacy.plan.noise == {"c1": whole.privacy.plan.noise["c1"]}
    nobody = OnePlace(world.models, world.server_model)
    away = replace(experiment(), population=nobody)
    assert calibrated(away, Execution(device="cpu")) is away  # the coordinator releases nothing


def test_a_site_with_private_labels_finds_its_noise_for_the_counts_that_it_tells() -> None:
    """Found for counts with the seed's noise it would show the exact ones to who knows the seed."""
    pytest.importorskip("dp_accounting")
    cpu, key, private = Execution(device="cpu"), b"k" * 32, replace(BUDGET, labels="private")
    asked = Experiment(method("fedavg", batch_size=5), worlds.pictures(), privacy=private)
    ready = calibrated(asked, cpu, key)
    engine, log = InProcess(ready, cpu), MemoryLog()
    engine.key = key
    run(engine, log)
    assert ready.privacy is not None and ready.privacy.plan is not None
    for node, rows in by_node(log.privacy).items():
        assert [row.rate for row in rows] == [use.rate for use in ready.privacy.plan.uses[node]]
        assert composed(rows, 1e-3) <= 4


def test_with_private_labels_rates_and_steps_follow_from_noisy_counts_alone() -> None:
    pytest.importorskip("dp_accounting")
    cpu, private = Execution(device="cpu"), replace(BUDGET, labels="private")
    world = worlds.pictures()
    ready = calibrated(Experiment(method("fedavg", batch_size=5), world, privacy=private), cpu)
    assert ready.privacy is not None and ready.privacy.plan is not None
    engine = InProcess(ready, cpu)
    exact = []
    for name in world.clients:
        told = len(engine.node(name, 1, "update").data)
        uses = [use for use in ready.privacy.plan.uses[name] if use.mechanism == "DP-SGD"]
        epochs = ready.method.epochs  # type: ignore[attr-defined]
        wanted = (min(1.0, 5 / told), epochs * math.ceil(told / 5))
        assert uses and {(use.rate, use.releases) for use in uses} == {wanted}
        exact.append(told == len(world.party(name).data))
    assert not all(exact)


@pytest.mark.parametrize("name", ["fedavg", "fedproto", "fedhe", "desa", "feddm"])
def test_with_private_labels_nothing_depends_on_records_where_every_noisy_count_is_0(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No samples are planned then, and of sums beside them nothing would be proved."""
    told = Node._told_counts
    monkeypatch.setattr(Node, "_told_counts", lambda node: torch.zeros_like(told(node)))
    ended = []
    for records in (slice(None), slice(0, 9, 2)):
        world = worlds.pictures()
        for client, party in world.parties.items():
            x, y = party.data.all()
            fewer = fedstill.Data.of(x[records] + len(y[records]), y[records])
            world.parties[client] = replace(party, data=fewer)
        chosen = feddm() if name == "feddm" else method(name)
        private = replace(BUDGET, labels="private")
        engine, log = worlds.played(chosen, world, 2, privacy=private)
        assert {row.mechanism for row in log.privacy} == {"class counts"}
        states = {node: engine.states[node] for node in ("server", *world.clients)
                  if engine.states.get(node) is not None}  # fmt: skip
        ended.append((states.keys(), [t for s in states.values() for t in trees.tensors(s)]))
    assert ended[0][0] == ended[1][0]
    assert all(torch.equal(one, other) for one, other in zip(ended[0][1], ended[1][1], strict=True))


def test_a_site_with_a_key_makes_other_noise_than_the_seed_tells() -> None:
    def images(key: bytes | None) -> torch.Tensor:
        engine = worlds.engine_for(feddm(), worlds.pictures(), rounds=1, privacy=BUDGET)
        engine.key = key
        run(engine, MemoryLog())
        return engine.states["c0"].images

    assert torch.equal(images(b"key"), images(b"key"))  # a resumed round is the same release
    assert not torch.equal(images(b"key"), images(b"other"))
    assert not torch.equal(images(b"key"), images(None))


@dataclass(frozen=True)
class Twice(Method):
    """Tells two tables of the same records, whose sums are made beside each other."""

    def each_round(self) -> Sequence[Step]:
        return [self.tell]

    @at_clients
    async def tell(self, client: Node[None], inbox: Inbox[Never]) -> None:
        """Tell how far apart the two are."""
        weights, known = client.model.init(0), ClassTable.empty(3, client.model.classes, "cpu")
        look = Logits(client.model.evaluating)
        one, other = await side_by_side(
            [class_averages(client, look, weights, known) for _ in range(2)]
        )
        client.log(apart=(one.rows - other.rows).abs().max())

    def predict(self, node: Node[Any], x: torch.Tensor) -> torch.Tensor:
        return node.model(node.model.init(0), x)


def test_two_tables_that_are_made_beside_each_other_have_noise_of_their_own() -> None:
    _, log = worlds.played(Twice(), worlds.pictures(), 1, privacy=BUDGET)
    assert all(row.value > 0 for row in log.metrics if row.name == "apart")


@dataclass(frozen=True)
class Averaged(Twice):
    """Tells a table of records whether or not there are any by the counts."""

    @at_clients
    async def tell(self, client: Node[None], inbox: Inbox[Never]) -> None:
        """Tell how many rows it has."""
        weights, known = client.model.init(0), ClassTable.empty(3, client.model.classes, "cpu")
        means = await class_averages(client, Logits(client.model.evaluating), weights, known)
        client.log(rows=len(means.rows))


def test_a_table_of_class_averages_has_no_rows_where_every_noisy_count_is_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, private = Node._told_counts, replace(BUDGET, labels="private")

    def rows() -> set[float]:
        _, log = worlds.played(Averaged(), worlds.pictures(), 1, privacy=private)
        return {row.value for row in log.metrics if row.name == "rows"}

    assert max(rows()) > 0
    monkeypatch.setattr(Node, "_told_counts", lambda node: torch.zeros_like(told(node)))
    assert rows() == {0}


@dataclass(frozen=True)
class Doubled(Twice):
    """Matches a set in which a class stands twice, so that its records would be summed twice."""

    @at_clients
    async def tell(self, client: Node[None], inbox: Inbox[Never]) -> None:
        """Match."""
        weights = client.model.init(0)
        await Matching(2).matched(client, from_noise(client, [0, 1, 0], 1), lambda _: weights)


def test_a_set_in_which_a_class_stands_twice_is_refused() -> None:
    with pytest.raises(BadValue, match=r"class 0 stands in 2 rows of the set"):
        worlds.played(Doubled(), worlds.pictures(), 1, privacy=BUDGET)
