"""The batched engine against the plain one, over invented methods that no paper has.

Each method here is one shape of loop that a method may have. What is compared is everything a
step leaves behind: messages, memories and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Never

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import worlds
from clipped import Clipped, noised
from fedstill.core import (
    SGD,
    Adam,
    Batch,
    Data,
    Inbox,
    Lazy,
    Loop,
    Message,
    Method,
    Model,
    Node,
    State,
    Step,
    Weights,
    algebra,
    at_clients,
    minimize,
    precision,
    seeds,
    trees,
)
from fedstill.core.content import LARGEST
from fedstill.core.errors import StepError
from fedstill.core.method import Place
from fedstill.engines.engine import Outcome, autograd_gradient
from fedstill.engines.execution import Execution
from fedstill.engines.loops import compiled, recorded, stacks
from fedstill.engines.loops.graphs import CudaGraphs, Replay, Unrecordable
from fedstill.engines.loops.recorded import Recorder
from fedstill.engines.loops.stacks import Stack, StackRecorder, shared_or_stacked, still_there
from fedstill.engines.play import streams
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.play.streams import Stream, Streams, StreamSet
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Party
from fedstill.methods.feddualmatch import FedDualMatch
from fedstill.models import MLP, Module
from fedstill.parts.matching import GradientMatching
from worlds import CLASSES, World, engine_for, examples, pictures, vectors

TOLERANCE = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore:Flat.loss gave a loss that does not depend")


class Memory(State):
    weights: Weights


class Told(Message):
    weights: Weights
    extra: Tensor


@dataclass(frozen=True)
class Invented(Method):
    """Clients train their own weights in some way and tell where they came."""

    lr: float = 0.1
    scored: ClassVar[Place] = Place.CLIENTS

    def each_round(self) -> Sequence[Step]:
        return [self.learn]

    def client_state(self, client: Node[Any]) -> Memory:
        return Memory(client.model.init(client.draw("weights")))

    @at_clients
    async def learn(self, client: Node[Memory], inbox: Inbox[Never]) -> Told:
        """Train."""
        return await self.told(client)

    async def told(self, client: Node[Memory]) -> Told:
        weights = await self.trained(client, client.state.weights)
        client.state = Memory(weights)
        return Told(weights, torch.zeros(1))

    async def trained(self, client: Node[Memory], start: Weights) -> Weights:
        batches = client.data.batches(6, client.rng("order"))
        return await minimize(self.loss, client.model, start, batches, SGD(self.lr, 0.9, 0.01))

    def loss(self, model: Model, weights: Weights, batch: Batch) -> Tensor:
        return cross_entropy(model(weights, batch.x), batch.y)


@dataclass(frozen=True)
class OddBatches(Invented):
    """Every client has a batch size of its own, so shapes differ at every step."""

    async def trained(self, client: Node[Memory], start: Weights) -> Weights:
        size = 3 + int(client.id[1:]) % 2
        batches = client.data.batches(size, client.rng("order"), epochs=2)
        return await minimize(self.loss, client.model, start, batches, Adam(0.01))


@dataclass(frozen=True)
class Given(Invented):
    """One tensor is everybody's, one is the client's own, one is a number, one is absent."""

    async def trained(self, client: Node[Memory], start: Weights) -> Weights:
        batches = client.data.batches(6, client.rng("order"))
        return await minimize(
            self.pulled, client.model, start, batches, SGD(self.lr),
            common=COMMON, own={"a": client.noise("own", CLASSES)}, factor=0.5, nothing=None,
        )  # fmt: skip

    def pulled(
        self, model: Model, weights: Weights, batch: Batch, common: Tensor,
        own: dict[str, Tensor], factor: float, nothing: None,
    ) -> Tensor:  # fmt: skip
        logits = model(weights, batch.x) @ common + own["a"]
        return factor * cross_entropy(logits, batch.y)


COMMON = torch.randn(CLASSES, CLASSES, generator=seeds.generator(0, "common"))


@dataclass(frozen=True)
class SlopeInSlope(Invented):
    """The objective holds the gradient of another: weights are pulled to where it is small."""

    def loss(self, model: Model, weights: Weights, batch: Batch) -> Tensor:
        def task(head: Tensor) -> Tensor:
            logits = model({**weights, "head.weight": head}, batch.x)
            return cross_entropy(logits, batch.y)

        grad = torch.func.grad(task)(weights["head.weight"])
        return task(weights["head.weight"]) + grad.square().sum()


class Pixels(NamedTuple):
    network: Weights
    step: Tensor


@dataclass(frozen=True)
class Synthetic(Invented):
    """Images are optimised, not weights; a new network for each step, made on demand."""

    async def told(self, client: Node[Memory]) -> Told:
        start = client.noise("images", 5, *client.model.shape)
        seed, model = client.draw("networks"), client.model

        def make(step: int) -> Pixels:
            at = torch.tensor(float(step), device=client.device)
            return Pixels(model.init(seeds.draw(seed, step)), at)

        steps = 3 + int(client.id[1:])
        images = await minimize(self.seen, model, start, Lazy(steps, make), SGD(0.5, 0.5))
        return Told(client.state.weights, images)

    def seen(self, model: Model, images: Tensor, batch: Pixels) -> Tensor:
        return (model(batch.network, images).mean(0) - batch.step).square().sum()


@dataclass(frozen=True)
class Repeated(Invented):
    """Two loops of different kinds, then loops in a `for`, as many as the client's number."""

    async def trained(self, client: Node[Memory], start: Weights) -> Weights:
        weights = await super().trained(client, start)
        for turn in range(1 + int(client.id[1:])):
            weights = await self.helped(client, weights, turn)
        return weights

    async def helped(self, client: Node[Memory], start: Weights, turn: int) -> Weights:
        """A helper that awaits, which a step awaits."""
        batches = client.data.batches(10, client.rng(f"turn {turn}"))
        near = await minimize(self.held, client.model, start, batches, SGD(0.05), centre=start)
        return algebra.mean([start, near])

    def held(self, model: Model, weights: Weights, batch: Batch, centre: Weights) -> Tensor:
        away = algebra.square(algebra.sub(algebra.parameters(weights), algebra.parameters(centre)))
        return self.loss(model, weights, batch) + away


@dataclass(frozen=True)
class SomeIdle(Invented):
    """One client awaits nothing, one awaits a loop without batches."""

    async def trained(self, client: Node[Memory], start: Weights) -> Weights:
        if client.id == "c0":
            return algebra.scale(start, 2.0)
        if client.id == "c1":
            return await minimize(self.loss, client.model, start, [], SGD(self.lr, 0.9))
        return await super().trained(client, start)


@dataclass(frozen=True)
class NoBatches(Invented):
    """Everybody awaits a loop without batches."""

    async def trained(self, client: Node[Memory], start: Weights) -> Weights:
        return await minimize(self.loss, client.model, start, [], SGD(self.lr, 0.9))


@dataclass(frozen=True)
class EmptyExamples(Invented):
    """Batches that hold no examples leave weights to the decay alone."""

    async def trained(self, client: Node[Memory], start: Weights) -> Weights:
        nothing = torch.zeros(0, dtype=torch.long)
        batches = [client.data.take(nothing)] * 2
        return await minimize(self.total, client.model, start, batches, SGD(self.lr, 0.0, 0.5))

    def total(self, model: Model, weights: Weights, batch: Batch) -> Tensor:
        return model(weights, batch.x).sum()


@dataclass(frozen=True)
class OwnBody(Invented):
    """A loop that is no descent: a running mean of the batches, and a count."""

    async def told(self, client: Node[Memory]) -> Told:
        carry = {"mean": torch.zeros(*client.model.shape), "count": torch.zeros(())}
        batches = client.data.batches(4, client.rng("order"))
        ended = await Loop(running_mean, carry, {}, batches)
        return Told(client.state.weights, torch.cat([ended["mean"], ended["count"].reshape(1)]))


def running_mean(carry: Weights, given: Any, batch: Batch, gradient: Any) -> tuple[Weights, Tensor]:
    count = carry["count"] + 1
    mean = carry["mean"] + (batch.x.mean(0) - carry["mean"]) / count
    return {"count": count, "mean": mean}, mean.sum()  # not the order in which they came


@dataclass(frozen=True)
class Turned(Invented):
    """A projection that gives the entries back in another order."""

    async def trained(self, client: Node[Memory], start: Weights) -> Weights:
        batches = client.data.batches(6, client.rng("order"))
        ends = {name: start[name] for name in ("head.weight", "layer0.weight")}
        ends = await minimize(
            self.of_ends, client.model, ends, batches, SGD(self.lr), project=backwards, rest=start
        )
        return {**start, **ends}

    def of_ends(self, model: Model, ends: Weights, batch: Batch, rest: Weights) -> Tensor:
        return self.loss(model, {**rest, **ends}, batch)


def backwards(ends: Weights, rest: Weights) -> Weights:
    return {name: 0.9 * ends[name] for name in reversed(ends)}


@dataclass(frozen=True)
class Flat(Invented):
    """An objective that does not depend on the value at all."""

    def loss(self, model: Model, weights: Weights, batch: Batch) -> Tensor:
        return batch.x.square().mean()


@dataclass(frozen=True)
class ExampleByExample(Invented):
    """Gradients are clipped example by example, with noise that lies in the batch."""

    async def trained(self, client: Node[Memory], start: Weights) -> Weights:
        plan = client.data.batches(6, client.rng("order"))
        batches = noised(plan, start, 0.01, client.draw("noise"))
        return await minimize(
            self.loss, client.model, start, batches, SGD(self.lr), mechanism=Clipped(0.5)
        )


def played(
    method: Method, world: World, engine: type[InProcess], rounds: int = 2, **options: Any
) -> tuple[list[Mapping[str, Outcome]], dict[str, State | None]]:
    """What every step of some rounds left, and what everybody remembers in the end."""
    made = engine_for(method, world, engine, seed=3, **options)
    outcomes = [
        made.play(step, round, dict.fromkeys(world.clients, Inbox()))
        for round in range(1, rounds + 1)
        for step in method.each_round()
    ]
    return outcomes, made.states


def assert_close(left: Any, right: Any, what: str) -> None:
    expected, found = dict(trees.named_tensors(left)), dict(trees.named_tensors(right))
    assert expected.keys() == found.keys()
    for name, one in expected.items():
        assert one.shape == found[name].shape, f"{what}: {name}"
        assert torch.allclose(one, found[name], TOLERANCE, TOLERANCE), f"{what}: {name}"


def assert_agree(
    method: Method, world: World, engine: type[InProcess] = Batched, **options: Any
) -> None:
    plain, plain_states = played(method, world, InProcess)
    stacked, stacked_states = played(method, world, engine, **options)
    for round, (expected, outcomes) in enumerate(zip(plain, stacked, strict=True), 1):
        assert list(expected) == list(outcomes) == list(world.clients)
        for node in expected:
            assert_close(expected[node].message, outcomes[node].message, f"{node} round {round}")
            numbers = outcomes[node].numbers
            assert numbers == pytest.approx(expected[node].numbers, rel=1e-4, abs=1e-6)
    for node, state in plain_states.items():
        assert_close(state, stacked_states[node], f"memory of {node}")


SHAPES = [
    Invented(), OddBatches(), Given(), SlopeInSlope(), Synthetic(), Repeated(), SomeIdle(),
    NoBatches(), EmptyExamples(), OwnBody(), Turned(), Flat(), ExampleByExample(),
]  # fmt: skip


@pytest.mark.parametrize("method", SHAPES, ids=lambda method: type(method).__name__)
def test_stacked_clients_come_where_single_ones_come(method: Method) -> None:
    assert_agree(method, vectors())


@pytest.mark.parametrize("method", SHAPES, ids=lambda method: type(method).__name__)
def test_clients_of_two_architectures_are_stacked_in_two_groups(method: Method) -> None:
    assert_agree(method, vectors((20, 27, 23, 30, 8), mixed=True))


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize("method", [Invented(), Repeated()], ids=["Invented", "Repeated"])
def test_the_size_of_a_stack_changes_nothing(method: Method, size: int) -> None:
    assert_agree(method, vectors(), stack_at_most=size)


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_networks_with_statistics_on_pictures_agree(norm: str) -> None:
    world = pictures(norm=norm)
    assert_agree(Invented(), world)
    _, states = played(Invented(), world, Batched)
    moved = [name for name in states["c0"].tensors() if name.endswith("running_mean")]  # type: ignore[union-attr]
    assert len(moved) == (2 if norm == "batch" else 0)
    assert all(states["c0"].tensors()[name].abs().max() > 0 for name in moved)  # type: ignore[union-attr]


def test_very_ragged_clients_agree() -> None:
    assert_agree(Invented(), vectors((1, 40, 7, 6, 0)))


def test_clients_that_share_one_pool_agree() -> None:
    pool = examples("shared", 40, (4,), [0, 1, 2]).parts[0].pool
    model = MLP((4,), CLASSES, hidden=(8,), activation="tanh")
    rows = torch.arange(40)
    cut = {f"c{i}": pool.all().subset(rows[i : 7 * i + 9]) for i in range(4)}
    assert_agree(Invented(), World({n: Party(d, Data(), model) for n, d in cut.items()}, model))


def test_one_client_alone_is_the_very_same() -> None:
    plain, _ = played(Invented(), vectors((20,)), InProcess)
    alone, _ = played(Invented(), vectors((20,)), Batched)
    expected, found = plain[-1]["c0"].message, alone[-1]["c0"].message
    assert isinstance(expected, Told) and isinstance(found, Told)
    assert all(torch.equal(expected.weights[n], found.weights[n]) for n in expected.weights)


@pytest.mark.parametrize("engine", [InProcess, Batched])
@pytest.mark.parametrize("method", [Invented(), Repeated()], ids=["Invented", "Repeated"])
def test_the_order_of_the_nodes_is_irrelevant(engine: type[InProcess], method: Method) -> None:
    world = vectors()
    turned = World(dict(reversed(world.parties.items())), world.server_model)
    _, expected = played(method, world, engine)
    _, found = played(method, turned, engine)
    for node in world.clients:
        assert_close(expected[node], found[node], node)


@pytest.mark.parametrize("engine", [InProcess, Batched])
def test_a_client_gets_the_same_whoever_else_is_there(engine: type[InProcess]) -> None:
    world = vectors()
    fewer = World({n: world.parties[n] for n in ("c1", "c3")}, world.server_model)
    _, expected = played(Invented(), world, engine)
    _, found = played(Invented(), fewer, engine)
    for node in fewer.clients:
        assert_close(expected[node], found[node], node)


# Failures


@dataclass(frozen=True)
class Failing(Invented):
    """One client fails: before its loop, in its batches, in its loop's body, or after it."""

    where: str = "before"
    error: type[Exception] = ValueError

    async def told(self, client: Node[Memory]) -> Told:
        client.state = Memory(algebra.zeros(client.state.weights))
        if client.id == "c2":
            self.fail("before")
        batches = client.data.batches(6, client.rng("order"))

        def make(step: int) -> Batch:
            if client.id == "c2" and step == 1:
                self.fail("batches")
            return batches[step]

        objective = self.bad_loss if self.where == "objective" else self.loss
        weights = await minimize(
            objective, client.model, client.state.weights, Lazy(len(batches), make), SGD(0.1)
        )
        if client.id == "c2":
            self.fail("after")
        return Told(weights, torch.zeros(1))

    def bad_loss(self, model: Model, weights: Weights, batch: Batch) -> Tensor:
        raise self.error("broken on purpose")

    def fail(self, where: str) -> None:
        if self.where == where:
            raise self.error("broken on purpose")


@pytest.mark.parametrize("engine", [InProcess, Batched])
@pytest.mark.parametrize("where", ["before", "batches", "after"])
def test_a_failure_names_method_step_node_and_round(engine: type[InProcess], where: str) -> None:
    method = Failing(where=where)
    made = engine_for(method, vectors(), engine)
    with pytest.raises(StepError) as error:
        made.play(method.learn, 7, dict.fromkeys(["c0", "c1", "c2", "c3"], Inbox()))
    assert str(error.value) == (
        "Failing.learn failed on c2 in round 7: ValueError: broken on purpose"
    )
    assert isinstance(error.value.__cause__, ValueError)
    seen = error.value
    assert (seen.method, seen.step, seen.node, seen.round) == ("Failing", "learn", "c2", 7)


@pytest.mark.parametrize("engine", [InProcess, Batched])
def test_a_failure_that_everybody_shares_is_told_of_one(engine: type[InProcess]) -> None:
    method = Failing(where="objective")
    with pytest.raises(StepError, match=r"failed on c[01] in round 1: ValueError: broken"):
        engine_for(method, vectors(), engine).play(
            method.learn, 1, dict.fromkeys(["c0", "c1"], Inbox())
        )


@pytest.mark.parametrize("engine", [InProcess, Batched])
def test_the_client_with_a_label_too_large_is_found_in_the_stack(engine: type[InProcess]) -> None:
    world = vectors()
    x, y = world.parties["c2"].data.all()
    model = world.parties["c2"].model
    world.parties["c2"] = Party(Data.of(x, y + CLASSES), Data(), model)
    with pytest.raises(StepError, match=r"Invented.learn failed on c2 in round 1: IndexError"):
        played(Invented(), world, engine)


@dataclass(frozen=True)
class Forgetful(Invented):
    """A step that is hinted to send what it was told, and does not."""

    async def told(self, client: Node[Memory]) -> Told:
        await super().told(client)
        return None  # type: ignore[return-value]


@dataclass(frozen=True)
class Reserved(Forgetful):
    """The same, where the hint allows it."""

    @at_clients
    async def learn(self, client: Node[Memory], inbox: Inbox[Never]) -> Told | None:
        """Train, and say nothing."""
        return await self.told(client)


@pytest.mark.parametrize("engine", [InProcess, Batched])
def test_a_step_that_forgets_its_message_is_refused_unless_its_hint_allows_it(
    engine: type[InProcess],
) -> None:
    said = "Forgetful.learn failed on c0 in round 1: ProtocolError: it returned nothing, but by"
    with pytest.raises(StepError, match=said):
        played(Forgetful(), vectors(), engine)
    outcomes, _ = played(Reserved(), vectors(), engine)
    assert {outcome.message for round in outcomes for outcome in round.values()} == {None}


@pytest.mark.parametrize("engine", [InProcess, Batched])
@pytest.mark.parametrize("error", [AttributeError, AssertionError, OSError, KeyError])
def test_any_kind_of_failure_is_told_in_the_same_way(
    engine: type[InProcess], error: type[Exception]
) -> None:
    method = Failing(error=error)
    with pytest.raises(StepError, match=f"failed on c2 in round 1: {error.__name__}"):
        engine_for(method, vectors(), engine).play(method.learn, 1, {"c2": Inbox()})


@pytest.mark.parametrize("engine", [InProcess, Batched])
@pytest.mark.parametrize("where", ["before", "batches", "after"])
def test_the_memory_of_a_step_that_failed_is_not_kept(engine: type[InProcess], where: str) -> None:
    method = Failing(where=where)
    made = engine_for(method, vectors(), engine)
    before = made.node("c2", 0, "look").state
    with pytest.raises(StepError):
        made.play(method.learn, 1, dict.fromkeys(["c1", "c2"], Inbox()))
    assert made.states["c2"] is before


@pytest.mark.parametrize("engine", [InProcess, Batched])
def test_absent_nodes_keep_their_memory_and_leave_the_others_alone(
    engine: type[InProcess],
) -> None:
    def away(method: Method, step: str, round: int, node: str) -> str | None:
        return "asleep" if (step, round, node) == ("learn", 1, "c1") else None

    world = vectors()
    outcomes, states = played(Invented(), world, engine, rounds=1, absences=away)
    assert list(outcomes[0]) == world.clients
    assert [node for node, out in outcomes[0].items() if out.absent] == ["c1"]
    assert outcomes[0]["c1"] == Outcome(absent="asleep")
    assert "c1" not in states
    _, everybody = played(Invented(), world, engine, rounds=1)
    for node in states:
        assert_close(everybody[node], states[node], node)


# Stacking


def test_the_very_same_tensor_is_not_copied() -> None:
    one, twin = torch.ones(3), torch.ones(3)
    kept, axis = shared_or_stacked([one, one, one])
    assert kept is one and axis is None
    stacked, axis = shared_or_stacked([one, twin])
    assert stacked.shape == (2, 3) and axis == 0


@dataclass(frozen=True)
class Watched(Given):
    """Tells how many clients stand behind the tensors that a loop sees."""

    def pulled(
        self, model: Model, weights: Weights, batch: Batch, common: Tensor,
        own: dict[str, Tensor], factor: float, nothing: None,
    ) -> Tensor:  # fmt: skip
        STACKED.append([torch._C._functorch.is_batchedtensor(t) for t in (common, own["a"])])
        return super().pulled(model, weights, batch, common, own, factor, nothing)


STACKED: list[list[bool]] = []


def test_a_shared_tensor_reaches_the_stacked_loop_as_one() -> None:
    STACKED.clear()
    played(Watched(), vectors(), Batched, rounds=1)
    assert [False, True] in STACKED
    assert not any(common for common, _ in STACKED)


def test_loops_of_different_given_numbers_are_not_stacked() -> None:
    @dataclass(frozen=True)
    class Apart(Given):
        async def trained(self, client: Node[Memory], start: Weights) -> Weights:
            batches = client.data.batches(6, client.rng("order"))
            return await minimize(
                self.pulled, client.model, start, batches, SGD(self.lr), common=COMMON,
                own={"a": torch.zeros(CLASSES)}, factor=float(client.id[1:]), nothing=None,
            )  # fmt: skip

    assert_agree(Apart(), vectors())


class Replayed(InProcess):
    """Replays every loop, on a CPU by a stand-in for graphs: the step itself, tried once."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        on_cpu = self.device.type == "cpu"
        record = tried_once if on_cpu else CudaGraphs(self.device)
        self.recorder = Recorder(record, keep=2, compiler=self.compiler)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_stack_too_large_for_memory_is_run_in_parts(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Stack.run

    def cramped(self: Stack) -> Any:
        if len(self.loops) > most:
            raise torch.OutOfMemoryError("no memory")
        return plain(self)

    monkeypatch.setattr(Stack, "run", cramped)
    world = vectors((20, 27, 23, 30, 8))
    engine = engine_for(Invented(), world, Batched)
    answers = engine.play(Invented().learn, 1, {client: Inbox() for client in world.clients})
    monkeypatch.undo()
    whole = engine_for(Invented(), world, Batched)
    for node, outcome in whole.play(
        Invented().learn, 1, {client: Inbox() for client in world.clients}
    ).items():
        assert_close(outcome.message, answers[node].message, node)
    assert engine.stack_at_most <= max(most, 1)
    assert any("memory did not suffice" in note for note in engine.notes)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_streams_that_memory_does_not_suffice_for_become_fewer(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "WORTHWHILE", 1)
    recordings: list[object] = []

    def cramped(step: Callable[[], None]) -> Replay:
        recordings.append(step)
        if len({id(stream) for stream in engine.beside.streams}) > most:
            raise torch.OutOfMemoryError("no memory")
        return tried_once(step)

    world = vectors((20, 27, 23, 30, 8))
    engine = engine_for(Invented(), world, Streams)
    engine.beside = StreamSet(lambda: Stream(Recorder(cramped)), 8, engine.notes)
    inboxes = {client: Inbox() for client in world.clients}
    answers = engine.play(Invented().learn, 1, inboxes)
    for node, outcome in engine_for(Invented(), world).play(Invented().learn, 1, inboxes).items():
        assert_equal(outcome.message, answers[node].message)
        assert outcome.numbers == pytest.approx(answers[node].numbers)
    assert engine.beside.count <= most
    assert any("memory did not suffice" in note for note in engine.notes)


class SideBySide(Streams):
    """Every loop in a stream, on a CPU in a stand-in; fewer streams than clients."""

    def __init__(self, experiment: Experiment, execution: Execution, **options: Any):
        super().__init__(experiment, replace(execution, streams=2), **options)
        if self.device.type == "cpu":
            self.beside = StreamSet(lambda: Stream(Recorder(tried_once, compiler=self.compiler)), 2)


class StacksReplayed(Batched):
    """Replays every stack, on a CPU by the stand-in."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if self.device.type == "cpu":
            self.stacks = StackRecorder(tried_once)


def tried_once(step: Callable[[], None]) -> Replay:
    step()
    return step


DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


# Whether networks are alike decides which loops meet, not how one is recorded.
RECORDED = [
    *((method, False) for method in SHAPES),
    *((method, True) for method in (Invented(), OddBatches(), Repeated(), SomeIdle())),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", [Replayed, SideBySide, StacksReplayed])
@pytest.mark.parametrize(
    ("method", "mixed"),
    RECORDED,
    ids=[f"{type(m).__name__}-{'mixed' if mixed else 'alike'}" for m, mixed in RECORDED],
)
def test_replayed_loops_give_the_very_same(
    method: Method, mixed: bool, engine: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda" and isinstance(method, (Given, EmptyExamples, OwnBody)):
        pytest.skip("made for a CPU")
    monkeypatch.setattr(recorded, "WORTHWHILE", 1)
    monkeypatch.setattr(stacks, "WORTHWHILE", 1)
    world = vectors((20, 27, 23, 30, 8), mixed=mixed)
    reference = Batched if engine is StacksReplayed else InProcess
    plain, states = played(method, world.on(device), reference, device=device, record=False)
    replayed, replayed_states = played(method, world.on(device), engine, device=device)
    check = assert_equal if device == "cpu" else assert_rounded
    for expected, found in zip(plain, replayed, strict=True):
        for node in expected:
            check(expected[node].message, found[node].message)
            assert found[node].numbers == pytest.approx(expected[node].numbers, rel=1e-5)
    check(states, replayed_states)


# Loops alone and loops in stacks are compiled in two ways, whatever records them then.
COMPILED = [
    *((method, engine) for method in SHAPES for engine in (InProcess, Batched)),
    *((method, engine) for method in (Invented(), OddBatches())
      for engine in (Replayed, SideBySide, StacksReplayed)),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("method", "engine"), COMPILED, ids=[f"{type(m).__name__}-{e.__name__}" for m, e in COMPILED]
)
def test_compiled_loops_give_the_same(
    method: Method, engine: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda" and isinstance(method, (Given, EmptyExamples, OwnBody)):
        pytest.skip("made for a CPU")
    monkeypatch.setattr(compiled, "WORTHWHILE", 1)
    # The operations one by one, as traced; those of two methods through torch's compiler as well.
    through = "eager" if isinstance(method, (Invented, OddBatches)) else compiled.TRACED
    monkeypatch.setattr(compiled, "BACKEND", through)
    monkeypatch.setattr(recorded, "WORTHWHILE", 1)
    monkeypatch.setattr(stacks, "WORTHWHILE", 1)
    world = vectors((20, 27, 8)).on(device)  # each new shape of a batch is traced
    plain, states = played(method, world, InProcess, device=device, record=False)
    found, found_states = played(method, world, engine, device=device, compile=True)
    for expected, outcomes in zip(plain, found, strict=True):
        for node in expected:
            assert_rounded(expected[node].message, outcomes[node].message)
            numbers = outcomes[node].numbers
            assert numbers == pytest.approx(expected[node].numbers, rel=1e-4, abs=1e-6)
    assert_rounded(states, found_states)


@pytest.mark.parametrize("least", [5, 6])
def test_streams_stack_what_stacks_well(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(Stack):
        def __init__(self, loops: Sequence[Loop[Any]], *more: Any):
            sizes.append(len(loops))
            super().__init__(loops, *more)

    sizes: list[int] = []
    monkeypatch.setattr(recorded, "WORTHWHILE", 1)
    monkeypatch.setattr(streams, "STACK", least)
    monkeypatch.setattr("fedstill.engines.play.batched.Stack", Seen)
    monkeypatch.setattr(MLP, "stacks_well", True)
    world = vectors((20, 27, 23, 30, 8))
    assert_agree(Invented(), world, SideBySide)
    assert sizes == ([5, 5] if least == 5 else [])  # in each of two rounds
    sizes.clear()
    assert_agree(Synthetic(), world, SideBySide)  # trains images, not networks
    assert_agree(ExampleByExample(), world, SideBySide)  # kernels for stacks make plain gradients
    assert not sizes


@pytest.mark.parametrize(
    ("asked", "numbers", "stacked"), [("half", 24, True), ("half", 23, False), ("tf32", 24, False)]
)
def test_streams_stack_networks_without_kernels_whose_steps_are_slight(
    asked: precision.Precision, numbers: int, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    plain = Stack.__init__

    def counted(self: Stack, loops: Sequence[Loop[Any]], *more: Any) -> None:
        sizes.append(len(loops))
        plain(self, loops, *more)

    monkeypatch.setattr(recorded, "WORTHWHILE", 1)
    monkeypatch.setattr(streams, "STACK", 2)
    monkeypatch.setattr(streams, "SLIGHT", numbers)
    monkeypatch.setattr(Stack, "__init__", counted)
    world = vectors((20, 27, 23))
    with precision.using(asked):
        assert_agree(Invented(), world, SideBySide)  # six examples of four numbers in a batch
    assert bool(sizes) == stacked


class Choosing(nn.Module):
    """Asks for the value of a tensor, which a stack has not."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x / 10 if x.abs().max() > 1000 else x)  # type: ignore[no-any-return]


def test_streams_do_not_stack_networks_that_know_no_stacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorded, "WORTHWHILE", 1)
    monkeypatch.setattr(streams, "STACK", 2)
    world = vectors((20, 27, 23))
    model = Module((4,), 3, Choosing)
    world.parties = {name: replace(party, model=model) for name, party in world.parties.items()}
    with precision.using("half"):
        assert_agree(Invented(), world, SideBySide)


def assert_rounded(left: Any, right: Any) -> None:
    for one, other in zip(trees.tensors(left), trees.tensors(right), strict=True):
        assert torch.allclose(one, other, TOLERANCE, TOLERANCE)


def assert_equal(left: Any, right: Any) -> None:
    for one, other in zip(trees.tensors(left), trees.tensors(right), strict=True):
        assert torch.equal(one, other)


def test_a_step_is_recorded_once_for_each_shape_of_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "WORTHWHILE", 1)
    engine = engine_for(Invented(), vectors((20, 20, 20)), Replayed, seed=3)
    seen: list[Any] = []
    assert engine.recorder is not None
    engine.recorder.record = lambda step: seen.append(step) or tried_once(step)  # type: ignore[func-returns-value]
    for round in (1, 2):
        engine.play(Invented().learn, round, dict.fromkeys(engine.population.clients, Inbox()))
    assert len(seen) == 2  # batches of 6, and the last of 2


def test_steps_with_batches_of_one_shape_are_recorded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = vectors((59, 59))  # nine batches of 6 and one of 5
    engine = engine_for(Invented(), world, Replayed, seed=3)
    seen: list[int] = []
    assert engine.recorder is not None

    def counted(step: Callable[[], None]) -> Replay:
        number = len(seen)
        seen.append(0)

        def replay() -> None:
            seen[number] += 1
            step()

        step()
        return replay

    engine.recorder.record = counted
    inboxes = dict.fromkeys(engine.population.clients, Inbox())
    found = engine.play(Invented().learn, 1, inboxes)
    assert seen == [4, 2, 2]  # for two clients: two fours, one alone, the last
    plain = engine_for(Invented(), world, seed=3).play(Invented().learn, 1, inboxes)
    for node, outcome in plain.items():
        assert_equal(outcome.message, found[node].message)


def test_a_step_that_cannot_be_recorded_is_run_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorded, "WORTHWHILE", 1)
    engine = engine_for(Invented(), vectors(), Replayed, seed=3)
    attempts: list[Any] = []

    def refuse(step: Callable[[], None]) -> Replay:
        attempts.append(step)
        step()
        raise Unrecordable

    assert engine.recorder is not None
    engine.recorder.record = refuse
    found = engine.play(Invented().learn, 1, dict.fromkeys(engine.population.clients, Inbox()))
    plain, _ = played(Invented(), vectors(), InProcess, rounds=1)
    assert_equal([o.message for o in plain[0].values()], [o.message for o in found.values()])
    assert len(attempts) == 1


def test_short_loops_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "WORTHWHILE", 100)
    engine = engine_for(Invented(), vectors(), Replayed, seed=3)
    engine.play(Invented().learn, 1, dict.fromkeys(engine.population.clients, Inbox()))
    assert engine.recorder is not None and not engine.recorder.known


@dataclass(frozen=True)
class Overflowing(Invented):
    """One client tells infinity; those of all are as large as may be, their norms beyond that."""

    async def told(self, client: Node[Memory]) -> Told:
        weights = {name: torch.full_like(w, LARGEST) for name, w in client.state.weights.items()}
        return Told(weights, torch.tensor([float("inf") if client.id == "c2" else 1.0]))


@pytest.mark.parametrize("engine", [InProcess, Batched])
def test_engines_look_for_messages_that_are_not_finite(engine: type[InProcess]) -> None:
    world = vectors()
    outcomes, _ = played(Overflowing(), world, engine, rounds=1)
    found = {node: out.bad for node, out in outcomes[0].items()}
    assert found == {node: ["extra"] if node == "c2" else [] for node in world.clients}


@pytest.mark.parametrize(
    ("lengths", "active"),
    [([3, 3], [2, 2, 2]), ([4, 2, 1], [3, 2, 1, 1]), ([2, 0], [1, 1]), ([0, 0], []), ([], [])],
)
def test_a_stack_knows_how_many_loops_are_left_at_each_step(
    lengths: list[int], active: list[int]
) -> None:
    assert still_there(lengths) == active
    assert active == [sum(n > step for n in lengths) for step in range(max(lengths, default=0))]


def test_loops_side_by_side_of_one_node_are_stacked_where_they_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Two of three clients hold all classes, so two of three sets on the server have one shape.
    plain, sizes = Stack.run, []

    def watched(self: Stack) -> Any:
        if isinstance(self.loops[0].body.objective.__self__, GradientMatching):
            sizes.append(len(self.loops))
        return plain(self)

    monkeypatch.setattr(Stack, "run", watched)
    method = FedDualMatch(**FedDualMatch.presets["small"])
    worlds.played(method, pictures(), 1, Batched)
    assert sizes == [2] * method.samplings


def test_gradients_hang_on_no_graph_whatever_a_networks_own_backward_pass_returns() -> None:
    """One that can be differentiated twice returns a gradient that can be, in some versions."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(context: Any, *slopes: Any) -> torch.Tensor:
            (x,) = context.saved_tensors
            with torch.enable_grad():
                return 2 * x * slopes[0]

    grad, loss, _ = autograd_gradient(
        lambda x: (Twice.apply(x).sum(), {}), torch.tensor([3.0, -1.0])
    )
    assert grad.tolist() == [6.0, -2.0] and not grad.requires_grad and not loss.requires_grad
