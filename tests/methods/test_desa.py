"""DeSA: anchors of all, logits on them from those awake, three streams, limits and traps."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import Batch, Data, Inbox, Message, Model, Pool
from fedstill.core.errors import BadValue, StepError
from fedstill.core.seeds import generator
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.sampling import Sample, Scripted
from fedstill.federation.topology import RandomRegular, Ring, Topology
from fedstill.methods.anchored import COMMON, MEAN, Anchors
from fedstill.methods.desa import DeSA, Draw, Opinions, teachers
from fedstill.methods.local import Local
from fedstill.models.alexnet import AlexNet
from fedstill.models.convnet import ConvNet
from fedstill.models.mlp import MLP
from fedstill.parts import pixels
from fedstill.parts.generators import StyleGenerator, untrained_set
from fedstill.parts.losses import hinton, supervised_contrastive
from small_recipes import fedstill
from worlds import World, as_bytes, engine_for, examples, experiment, pictures, played

TRAINING: dict[str, Any] = {"lr": 0.1, "batch_size": 8}
SMALL: dict[str, Any] = {
    **TRAINING, "per_class": 2, "steps": 3, "real_batch": 8, "synthesis_width": 4,
    "reg_weight": 0.1,
}  # fmt: skip
SHAPE = (1, 8, 8)


def desa(**changes: Any) -> DeSA:
    return DeSA(**{**SMALL, **changes})


class Ear:
    """Hears every message, and loses those it is told to."""

    def __init__(self, *, lost: dict[int, str] | None = None):
        self.heard: list[tuple[int, str, str, Message]] = []
        self.lost = lost or {}

    def carry(self, message: Message, sender: str, round: int, step: str) -> Message | None:
        if self.lost.get(round) == sender:
            return None
        self.heard.append((round, step, sender, message))
        return message

    def sets(self) -> dict[str, Anchors]:
        """What each peer made, as it sent it."""
        found = [(who, m) for _, step, who, m in self.heard if step == "share"]
        return {who: message for who, message in found if isinstance(message, Anchors)}

    def opinions(self, round: int) -> dict[str, Opinions]:
        found = [(who, m) for r, _, who, m in self.heard if r == round]
        return {who: message for who, message in found if isinstance(message, Opinions)}


def crowd(count: int) -> World:
    return pictures([12] * count)


def weights_of(engine: InProcess) -> dict[str, dict[str, Tensor]]:
    return {name: state.weights for name, state in engine.states.items()}


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def learning_from_anchors_too(world: World, engine: InProcess) -> World:
    """The same clients, with the anchors they remember among their examples."""
    parties = {}
    for name, party in world.parties.items():
        state = engine.states[name]
        images = torch.cat([made.flatten(0, 1) for made in state.sets.values()])
        labels = torch.cat([c.repeat_interleave(2) for c in state.classes.values()])
        parties[name] = replace(party, data=party.data + Data.of(images, labels))
    return World(parties, world.server_model)


# Limits


@pytest.mark.parametrize("engine", [InProcess, Batched])
def test_without_both_terms_it_is_local_training_on_data_and_anchors(engine: Any) -> None:
    method = desa(reg_weight=0.0, kd_weight=0.0)
    ours, _ = played(method, pictures(), 3, engine=engine)
    theirs, _ = played(Local(**TRAINING), learning_from_anchors_too(pictures(), ours), 3, engine)
    for name in ours.states:
        assert same(ours.states[name].weights, theirs.states[name].weights)


class Apart(Topology):
    """Nobody hears anybody."""

    def pairs(self, clients: int, seed: int) -> tuple[()]:
        return ()


@pytest.mark.parametrize("reg_weight", [0.0, 0.1])
def test_without_neighbours_it_is_training_on_data_and_own_anchors(reg_weight: float) -> None:
    world = pictures()
    alone = {"topology": Apart()}
    ours, log = played(desa(reg_weight=reg_weight), world, 3, **alone)
    silent, _ = played(desa(reg_weight=reg_weight, kd_weight=0.0), world, 3, **alone)
    for name in ours.states:
        assert same(ours.states[name].weights, silent.states[name].weights)
    assert all(row.hearers == 0 for row in log.messages)
    ear = Ear()
    played(desa(), world, 1, meddling=[ear])
    for name, sent in ear.sets().items():  # the own set, whatever others make
        mine = ours.states[name]
        assert torch.equal(mine.sets[MEAN], sent.images[name])
    if not reg_weight:
        theirs, _ = played(Local(**TRAINING), learning_from_anchors_too(world, ours), 3)
        for name in ours.states:
            assert same(ours.states[name].weights, theirs.states[name].weights)


# The ledger


def test_the_ledger_is_that_of_the_papers_example() -> None:
    # 50 per class, ten classes, 3x32x32: 50 · 10 · 3072 once, 10 · 500 in every round.
    said = fedstill("show", "desa", "--held", "10", "--format", "json")
    found = json.loads(said.out)
    sent = {message["name"]: message for message in found["messages"]}
    assert sent["Anchors"]["floats"] == 1_536_000 and sent["Opinions"]["floats"] == 5_000
    assert {message["direction"] for message in sent.values()} == {"peer"}
    assert found["floats_per_round"] == {"up": 0, "down": 0, "peer": 5_000}
    hundred = sent["Anchors"]["floats"] + 100 * sent["Opinions"]["floats"]
    assert hundred == 2_036_000


def test_each_exchange_of_mixing_costs_the_set_and_a_number_for_each_class() -> None:
    said = fedstill("show", "desa", "mix=fastmix", "mix_steps=7", "--format", "json")
    found = json.loads(said.out)
    sent = {message["step"]: message["floats"] for message in found["messages"]}
    assert sent == {"begin": 1_536_010, "blend": 1_536_010, "speak": 4_500}  # one class is missing
    times = {step["name"]: step["times"] for step in found["steps"]}
    assert times["begin"] + times["blend"] == 7


def test_a_union_costs_as_many_logits_as_it_has_sets() -> None:
    _, log = played(desa(combination="union"), pictures(), 1)
    logits = {row.sender: row.floats for row in log.messages if row.field == "logits"}
    assert set(logits.values()) == {(4 + 6 + 6) * 3}  # the first client lacks a class


# Anchors


def test_all_have_the_same_anchors_averaged_over_the_holders_of_each_class() -> None:
    ear = Ear()
    engine, _ = played(desa(), pictures(), 1, meddling=[ear])
    sent = ear.sets()
    assert sent["c0"].classes["c0"].tolist() == [0, 1]  # it lacks the last class
    every = [engine.states[name] for name in sent]
    for state in every:
        assert state.classes[MEAN].tolist() == [0, 1, 2]
        assert torch.equal(state.sets[MEAN], every[0].sets[MEAN])
    mean = every[0].sets[MEAN]
    own = {name: message.images[name] for name, message in sent.items()}
    assert torch.allclose(mean[0], (own["c0"][0] + own["c1"][0] + own["c2"][0]) / 3, atol=1e-6)
    assert torch.allclose(mean[2], (own["c1"][2] + own["c2"][2]) / 2, atol=1e-6)


def test_a_class_that_nobody_holds_has_no_anchors() -> None:
    world = pictures()
    held = {name: examples(name, 15, SHAPE, [0, 2]) for name in world.clients}
    parties = {n: replace(p, data=as_bytes(held[n])) for n, p in world.parties.items()}
    for changes in ({}, {"mix": "fastmix", "mix_steps": 3}, {"combination": "union"}):
        engine, _ = played(desa(**changes), World(parties, world.server_model), 2)
        for state in engine.states.values():
            assert all(classes.tolist() == [0, 2] for classes in state.classes.values())
            assert all(torch.isfinite(tensor).all() for tensor in state.weights.values())


def test_all_anchors_grow_from_one_noise_unless_told_otherwise() -> None:
    # With a pixel rate that moves nothing, what is shared is the noise itself.
    sets = {}
    for common in (True, False):
        ear = Ear()
        still = desa(pixel_lr=1e-30, common_start=common)
        played(still, pictures(), rounds=1, meddling=[ear])
        sets[common] = [sent.images[name] for name, sent in sorted(ear.sets().items())]
    first, second, third = sets[True]  # the first client lacks the last class
    assert torch.equal(first, second[:2]) and torch.equal(second, third)
    assert not torch.isclose(second[0], second[1]).any()
    own = sets[False]
    assert not torch.isclose(own[1], own[2]).any() and not torch.isclose(own[0], own[1][:2]).any()


def test_anchors_do_not_depend_on_what_a_client_trains() -> None:
    plain, mixed = pictures(), architectures()
    one, other = (played(desa(), world, 1)[0] for world in (plain, mixed))
    for name in plain.clients:
        assert torch.equal(one.states[name].sets[MEAN], other.states[name].sets[MEAN])


def architectures() -> World:
    """The clients of `pictures`, each with a network of its own kind."""
    world = pictures()
    kinds: list[Model] = [
        ConvNet(SHAPE, 3, depth=2, width=4),
        AlexNet(SHAPE, 3, width=4),
        MLP(SHAPE, 3, hidden=(8,)),
    ]
    parties = {
        name: replace(party, model=model)
        for (name, party), model in zip(world.parties.items(), kinds, strict=True)
    }
    return World(parties, kinds[0])


@pytest.mark.parametrize("engine", [InProcess, Batched])
def test_peers_of_different_architectures_learn_from_each_other(engine: Any) -> None:
    world = architectures()
    ours, _ = played(desa(lr=0.02), world, 2, engine=engine)
    deaf, _ = played(desa(lr=0.02, kd_weight=0.0), world, 2, engine=engine)
    for name in world.clients:
        weights = ours.states[name].weights
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())
        assert not same(weights, deaf.states[name].weights)


# Spaces


def statistics(world: World) -> World:
    """Every client with a mean and deviation of its own."""
    parties = {}
    for i, (name, party) in enumerate(world.parties.items()):
        pool, rows = party.data.parts[0]
        wide = (1, 1, 1)
        mean, std = torch.full(wide, 0.3 + 0.1 * i), torch.full(wide, 0.2 + 0.1 * i)
        own = Pool(pool.stored, pool.labels, mean, std).all().subset(rows)
        parties[name] = replace(party, data=own)
    return World(parties, world.server_model)


@pytest.mark.parametrize("combination", ["average", "union"])
def test_in_pixel_space_all_see_the_same_pixels_each_normalised_in_its_own_way(
    combination: Any,
) -> None:
    world, ear = statistics(pictures()), Ear()
    method = desa(anchor_space="pixel", combination=combination)
    engine, _ = played(method, world, 1, meddling=[ear])
    states = {name: engine.states[name] for name in world.clients}
    shown = {
        name: {which: pixels.to_pixels(world.party(name).data, x) for which, x in s.sets.items()}
        for name, s in states.items()
    }
    for name in world.clients:
        for which, seen in shown[name].items():
            assert torch.allclose(seen, shown["c0"][which], atol=1e-5)
    if combination == "average":
        sent = [message.images[name][0] for name, message in ear.sets().items()]
        assert torch.allclose(shown["c1"][MEAN][0], sum(sent) / 3, atol=1e-5)
        assert not torch.allclose(states["c0"].sets[MEAN], states["c1"].sets[MEAN], atol=0.1)


def test_in_normalised_space_sets_are_averaged_as_they_are() -> None:
    engine, _ = played(desa(), statistics(pictures()), 1)
    first, *others = (state.sets[MEAN] for state in engine.states.values())
    assert all(torch.equal(first, other) for other in others)


def test_with_equal_statistics_the_spaces_are_the_same() -> None:
    one, other = (
        played(desa(anchor_space=space), pictures(), 1)[0] for space in ("normalised", "pixel")
    )
    for name in one.states:
        pair = [engine.states[name].sets[MEAN] for engine in (one, other)]
        assert torch.allclose(*pair, atol=1e-5)


@pytest.mark.parametrize("space", ["normalised", "pixel"])
def test_quantised_anchors_have_256_levels_between_black_and_white(space: Any) -> None:
    world, ear = statistics(pictures()), Ear()
    played(desa(anchor_space=space, quantize_anchors=True), world, 1, meddling=[ear])
    for name, message in ear.sets().items():
        sent = message.images[name]
        shown = sent if space == "pixel" else pixels.to_pixels(world.party(name).data, sent)
        levels = shown * 255
        assert torch.allclose(levels, levels.round(), atol=1e-3)
        assert shown.min() > -1e-5 and shown.max() < 1 + 1e-5


def test_pixels_of_examples_that_are_held_normalised_are_not_known() -> None:
    world = pictures()
    parties = {n: replace(p, data=Data.of(*p.data.all())) for n, p in world.parties.items()}
    with pytest.raises(StepError, match="mean and deviation"):
        played(desa(anchor_space="pixel"), World(parties, world.server_model), 1)


# Opinions


def test_opinions_are_logits_in_evaluation_mode_before_any_training() -> None:
    world, ear = pictures(norm="batch"), Ear()
    engine, _ = played(desa(), world, 2, meddling=[ear])
    first, _ = played(desa(), world, 1)
    for name in world.clients:
        anchors = engine.states[name].sets[MEAN].flatten(0, 1)
        model = world.party(name).model
        start = engine_for(desa(), world).node(name, 0, "look").state.weights
        for round, weights in ((1, start), (2, first.states[name].weights)):
            expected = model(weights, anchors)  # [anchor, class]
            assert torch.equal(ear.opinions(round)[name].logits[MEAN], expected)


def test_a_lone_participant_learns_from_nobody() -> None:
    one, other = (
        played(desa(kd_weight=kd), pictures(), 3, sampling=Sample(count=1))[0] for kd in (1.0, 0.0)
    )
    for name, weights in weights_of(one).items():
        assert same(weights, other.states[name].weights)


def test_only_peers_that_are_awake_teach() -> None:
    # Two awake and one away is the same as a federation whose third never speaks.
    away = Scripted({1: ["c2"], 2: ["c2"]})
    ours, _ = played(desa(), pictures(), 2, sampling=away)
    ear = Ear(lost={1: "c2", 2: "c2"})
    mute, _ = played(desa(), pictures(), 2, meddling=[ear])
    for name in ("c0", "c1"):
        assert same(ours.states[name].weights, mute.states[name].weights)


def test_a_peer_that_drops_out_changes_nothing_for_others_but_their_inbox() -> None:
    gone = {round: ["c2"] for round in (2, 3, 4)}
    ear, lost = Ear(), Ear(lost={2: "c2", 3: "c2", 4: "c2"})
    ours, _ = played(desa(), pictures(), 4, sampling=Scripted(gone), meddling=[ear])
    unheard, _ = played(desa(), pictures(), 4, meddling=[lost])
    for name in ("c0", "c1"):
        assert same(ours.states[name].weights, unheard.states[name].weights)
        assert torch.equal(ours.states[name].sets[MEAN], unheard.states[name].sets[MEAN])
    assert [sorted(ear.opinions(round)) for round in (1, 2, 3, 4)] == [
        ["c0", "c1", "c2"], ["c0", "c1"], ["c0", "c1"], ["c0", "c1"]
    ]  # fmt: skip
    # Without distillation nobody notices.
    deaf = desa(kd_weight=0.0)
    one, _ = played(deaf, pictures(), 5, sampling=Scripted(gone))
    other, _ = played(deaf, pictures(), 5)
    for name in ("c0", "c1"):
        assert same(one.states[name].weights, other.states[name].weights)


def test_a_peer_that_comes_back_goes_on_from_where_it_was_and_is_heard_again() -> None:
    gone = Scripted({round: ["c2"] for round in (2, 3, 4)})
    ear = Ear()
    back, _ = played(desa(), pictures(), 5, sampling=gone, meddling=[ear])
    left, _ = played(desa(), pictures(), 1)
    assert sorted(ear.opinions(5)) == ["c0", "c1", "c2"]
    anchors = back.states["c2"].sets[MEAN].flatten(0, 1)
    model = pictures().party("c2").model
    expected = model(left.states["c2"].weights, anchors)
    assert torch.equal(ear.opinions(5)["c2"].logits[MEAN], expected)
    assert not same(back.states["c2"].weights, left.states["c2"].weights)


# The objective


def draw(model: Model, *, heard: float = 1.0) -> Draw:
    def batch(name: str, count: int) -> Batch:
        rng = generator(0, name)
        return Batch(
            torch.randn(count, *model.shape, generator=rng),
            torch.randint(model.classes, (count,), generator=rng),
        )

    teacher = torch.randn(6, model.classes, generator=generator(0, "teacher"))
    return Draw(batch("own", 8), batch("distil", 6), teacher, torch.full((6,), heard),
                batch("lean", 5))  # fmt: skip


@pytest.mark.parametrize("heard", [1.0, 0.0])
def test_the_gradient_is_that_of_three_terms_with_the_anchors_to_lean_on_held_fixed(
    heard: float,
) -> None:
    model = ConvNet(SHAPE, 3, depth=2, width=4)
    weights, batch = model.init(0), draw(model, heard=heard)
    method = DeSA(reg_weight=0.5, kd_weight=2.0)
    fixed = model.features(weights, batch.lean.x)

    def terms(w: Any) -> Tensor:
        features, logits = model.both(w, batch.own.x)
        reg = supervised_contrastive(
            torch.cat([features, fixed]), torch.cat([batch.own.y, batch.lean.y])
        )
        kd = hinton(
            model(w, batch.distil.x), batch.teacher, batch.distil.y, temperature=20.0,
            soft_share=0.9, reduction="elements",
        )  # fmt: skip
        return cross_entropy(logits, batch.own.y) + 0.5 * reg + 2.0 * heard * kd

    ours = torch.func.grad(lambda w: method.objective(model.train(), w, batch))(weights)
    theirs = torch.func.grad(terms)(weights)
    for name in weights:
        assert torch.allclose(ours[name], theirs[name], atol=1e-5)


def test_the_printed_divergence_is_a_preset() -> None:
    model = ConvNet(SHAPE, 3, depth=2, width=4)
    weights, batch = model.init(0), draw(model)
    plain = DeSA(**{**DeSA.presets["plain_kl"], "reg_weight": 0.0})
    log_q = torch.log_softmax(model(weights, batch.distil.x), 1)
    p = torch.softmax(batch.teacher, 1)
    divergence = (p * (p.log() - log_q)).sum(1).mean()
    task = cross_entropy(model(weights, batch.own.x), batch.own.y)
    found = plain.objective(model.train(), weights, batch)
    assert float(found) == pytest.approx(float(task + divergence), rel=1e-5)


def test_statistics_of_norm_layers_come_from_the_first_stream() -> None:
    model = ConvNet(SHAPE, 3, depth=1, width=4, norm="batch")
    weights, batch, notes, alone = model.init(0), draw(model), {}, {}
    DeSA().objective(model.train(notes), weights, batch)
    model.train(alone)(weights, batch.own.x)
    assert notes.keys() == alone.keys() and same(notes, alone)


# Graphs


@pytest.mark.parametrize(
    ("topology", "count", "steps"), [(Ring(), 10, 60), (RandomRegular(3), 20, 40)], ids=str
)
def test_mixed_anchors_are_those_of_all_although_peers_hear_only_neighbours(
    topology: Any, count: int, steps: int
) -> None:
    world = crowd(count)
    hearing = topology.graph(world.clients, 0)
    method = desa(mix="fastmix", mix_steps=steps)
    sparse, log = played(method, world, 2, topology=topology)
    whole, _ = played(desa(), world, 1)
    for name in world.clients:
        mine, all_of_them = sparse.states[name], whole.states[name]
        assert torch.allclose(mine.sets[MEAN], all_of_them.sets[MEAN], atol=1e-3)
        assert mine.classes[MEAN].tolist() == [0, 1, 2]
        assert mine.sums == mine.sums_before == {}
    degree = len(hearing.neighbours["c0"])
    assert {row.hearers for row in log.messages} == {degree}
    images = sum(row.floats for row in log.messages if row.field == "images" and row.sender == "c1")
    assert images == steps * 3 * 2 * 64


def test_fastmix_comes_closer_than_plain_gossip() -> None:
    world = crowd(10)
    topology = Ring()
    whole = played(desa(), world, 1)[0].states["c0"].sets[MEAN]
    far = {}
    for mix in ("fastmix", "gossip"):
        engine, _ = played(desa(mix=mix, mix_steps=25), world, 1, topology=topology)
        far[mix] = max(float((s.sets[MEAN] - whole).norm()) for s in engine.states.values())
    assert far["fastmix"] < 0.01 * far["gossip"]


def test_a_ring_averaged_once_is_refused_before_anchors_are_made_with_what_to_do() -> None:
    with pytest.raises(BadValue, match=r"^topology: DeSA: .*not everybody hears.*fastmix"):
        experiment(desa(), crowd(4), topology=Ring())
    experiment(desa(), crowd(3), topology=Ring())  # where all hear all


def test_mixing_cut_short_leaves_out_classes_that_have_not_come_through() -> None:
    # Only c0 holds the last class; on a ring of seven, one exchange reaches c1 and c6.
    world = crowd(7)
    parties = {
        name: replace(
            party, data=as_bytes(examples(name, 12, SHAPE, [0, 1, 2] if name == "c0" else [0, 1]))
        )
        for name, party in world.parties.items()
    }
    topology = Ring()
    method = desa(mix="gossip", mix_steps=1)
    engine, _ = played(method, World(parties, world.server_model), 2, topology=topology)
    known = {name: state.classes[MEAN].tolist() for name, state in engine.states.items()}
    assert known["c0"] == known["c1"] == known["c6"] == [0, 1, 2]
    assert known["c3"] == known["c4"] == [0, 1]


# Unions


def test_a_union_keeps_every_set_as_it_was_made() -> None:
    ear = Ear()
    engine, _ = played(desa(combination="union"), pictures(), 1, meddling=[ear])
    for state in engine.states.values():
        assert [*state.sets] == ["c0", "c1", "c2"]
        for name, message in ear.sets().items():
            assert torch.equal(state.sets[name], message.images[name])


def test_where_all_hear_all_a_union_and_the_neighbours_are_the_same() -> None:
    one, other = (played(desa(combination=how), pictures(), 2)[0] for how in ("union", "neighbour"))
    for name in one.states:
        assert same(one.states[name].weights, other.states[name].weights)


def test_on_a_ring_a_peer_knows_its_neighbours_sets_and_flooding_brings_the_rest() -> None:
    world = crowd(6)
    topology = Ring()
    near, _ = played(desa(combination="neighbour"), world, 2, topology=topology)
    assert [*near.states["c0"].sets] == ["c0", "c1", "c5"]
    flood = {"combination": "union", "mix": "flood"}
    two, log = played(desa(**flood, mix_steps=2), world, 1, topology=topology)
    assert [*two.states["c0"].sets] == ["c0", "c1", "c2", "c4", "c5"]
    three, _ = played(desa(**flood, mix_steps=3), world, 1, topology=topology)
    assert len(three.states["c0"].sets) == 6
    passed = [r.floats for r in log.messages if (r.step, r.sender, r.field) ==
              ("pass_on", "c3", "images")]  # fmt: skip
    assert passed == [2 * 3 * 2 * 64]  # only what it has just heard


def test_peers_teach_on_the_sets_that_both_know() -> None:
    # On a ring of four, c0 knows c0, c1 and c3; c1 knows c0, c1, c2; c3 knows c0, c2, c3.
    world, ear = crowd(4), Ear()
    topology = Ring()
    engine, _ = played(desa(combination="neighbour"), world, 1, topology=topology, meddling=[ear])
    node = engine.node("c0", 1, "learn")
    said = ear.opinions(1)
    inbox = Inbox({name: said[name] for name in ("c1", "c3")})
    teacher, heard = teachers(node, inbox)
    expected = [
        (said["c1"].logits["c0"] + said["c3"].logits["c0"]) / 2,
        said["c1"].logits["c1"],
        said["c3"].logits["c3"],
    ]
    assert torch.allclose(teacher, torch.cat(expected), atol=1e-6)
    assert bool((heard == 1).all())
    teacher, heard = teachers(node, Inbox({"c3": said["c3"]}))
    own, theirs = len(said["c0"].logits["c0"]), len(said["c1"].logits["c1"])
    assert heard[own : own + theirs].tolist() == [0] * theirs  # nobody awake knows this set
    assert not teacher[own : own + theirs].any()


# A generator


def imagining(**changes: Any) -> DeSA:
    return desa(anchors="generator", generator_width=4, **changes)


def test_anchors_of_a_generator_are_the_same_for_all_and_nothing_travels_before_the_logits() -> (
    None
):
    world = pictures()
    engine, log = played(imagining(), world, 2)
    seed = engine_for(imagining(), world).node("c1", 0, "imagine").draw("anchors", shared=True)
    made = untrained_set(StyleGenerator(SHAPE, 3, width=4), seed, 2).images
    for state in engine.states.values():
        assert torch.equal(state.sets[COMMON], made)
        assert state.classes[COMMON].tolist() == [0, 1, 2]  # c0 holds two of them
    assert {(row.field, row.floats) for row in log.messages} == {("logits", 3 * 2 * 3)}
    assert {row.round for row in log.messages} == {1, 2}


def test_anchors_of_a_generator_say_nothing_of_the_data() -> None:
    one, _ = played(imagining(), pictures(), 1)
    other, _ = played(imagining(), crowd(3), 1)
    assert torch.equal(one.states["c0"].sets[COMMON], other.states["c0"].sets[COMMON])


@pytest.mark.parametrize("engine", [InProcess, Batched])
def test_only_the_anchors_differ_with_a_generator(engine: Any) -> None:
    method = imagining(reg_weight=0.0, kd_weight=0.0)
    ours, _ = played(method, pictures(), 2, engine=engine)
    theirs, _ = played(Local(**TRAINING), learning_from_anchors_too(pictures(), ours), 2, engine)
    taught, _ = played(imagining(), pictures(), 2, engine=engine)
    for name in ours.states:
        assert same(ours.states[name].weights, theirs.states[name].weights)
        assert not same(ours.states[name].weights, taught.states[name].weights)


def test_on_a_ring_a_generator_needs_no_mixing() -> None:
    world, ear = crowd(4), Ear()
    topology = Ring()
    engine, _ = played(imagining(), world, 1, topology=topology, meddling=[ear])
    said = ear.opinions(1)
    inbox = Inbox({name: said[name] for name in ("c1", "c3")})
    teacher, heard = teachers(engine.node("c0", 1, "learn"), inbox)
    expected = (said["c1"].logits[COMMON] + said["c3"].logits[COMMON]) / 2
    assert torch.allclose(teacher, expected, atol=1e-6) and bool((heard == 1).all())


def test_a_generator_shows_in_the_ledger_that_no_image_is_sent() -> None:
    said = fedstill("show", "desa", "anchors=generator", "--format", "json")
    found = json.loads(said.out)
    assert [message["name"] for message in found["messages"]] == ["Opinions"]
    assert found["floats_per_round"] == {"up": 0, "down": 0, "peer": 5_000}


# Streams


def test_all_of_the_data_and_anchors_are_seen_once_an_epoch_beside_anchors_alone() -> None:
    world, method = pictures(), desa(epochs=2)
    engine, _ = played(method, world, 1)
    node = engine.node("c1", 1, "learn")
    draws = list(method.draws(node, Inbox()))
    size = len(node.data) + 6
    assert len(draws) == 2 * -(-size // 8)
    assert sum(len(batch.own.y) for batch in draws) == 2 * size
    anchors = node.state.sets[MEAN].flatten(0, 1)
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    for batch in draws:
        for x, y in (batch.distil, batch.lean):
            assert len(y) == 6  # no more than there are
            place = (x.unsqueeze(1) == anchors).flatten(2).all(2).float().argmax(1)
            assert torch.equal(labels[place], y)
        assert not batch.heard.any()


def test_logits_are_gathered_with_the_anchors_they_belong_to() -> None:
    world, method, ear = pictures(), desa(), Ear()
    engine, _ = played(method, world, 1, meddling=[ear])
    node = engine.node("c1", 1, "learn")
    said = {name: message for name, message in ear.opinions(1).items() if name != "c1"}
    mean = torch.stack([message.logits[MEAN] for message in said.values()]).mean(0)
    anchors = node.state.sets[MEAN].flatten(0, 1)
    for batch in method.draws(node, Inbox(said)):
        place = (batch.distil.x.unsqueeze(1) == anchors).flatten(2).all(2).float().argmax(1)
        assert torch.equal(batch.teacher, mean[place])


# Values


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"per_class": 0}, "per_class = 0: must be at least 1"),
        ({"temperature": 0.0}, "temperature = 0.0: must be above 0"),
        ({"soft_share": 1.5}, r"soft_share = 1.5: must be in \[0, 1\]"),
        ({"kd_weight": -1.0}, "kd_weight = -1.0: must be at least 0"),
        ({"combination": "averge"}, "did you mean 'average'"),
        ({"mix": "flood"}, "average sets are mixed by once or fastmix or gossip"),
        ({"combination": "union", "mix": "fastmix"}, "union sets are mixed by once or flood"),
        ({"combination": "neighbour", "mix": "flood"}, "neighbour sets are mixed by once"),
        ({"augmentation": "flop"}, "did you mean 'flip'"),
        ({"anchors": "generater"}, "did you mean 'generator'"),
        ({"anchors": "generator", "mix": "fastmix"}, "mix = 'fastmix': anchors of a generator"),
        (
            {"anchors": "generator", "anchor_space": "pixel"},
            "anchor_space = 'pixel': anchors of a generator are the same for all",
        ),
        ({"anchors": "generator", "quantize_anchors": True}, "no set is shared; leave it out"),
    ],
)
def test_bad_values_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadValue, match=words):
        DeSA(**values)


def test_presets_are_those_of_the_papers_sets() -> None:
    office, corrupted = DeSA(**DeSA.presets["office"]), DeSA(**DeSA.presets["cifar10c"])
    assert (DeSA().per_class, DeSA().steps, DeSA().real_batch) == (50, 1000, 256)
    assert (office.per_class, office.steps, office.real_batch) == (10, 1000, 32)
    assert (corrupted.per_class, corrupted.steps, corrupted.real_batch) == (50, 2000, 256)


def test_clients_without_anchors_train_on_their_data_alone() -> None:
    # c2 is away while anchors are made, and takes part in the rounds.
    def gone(_: Any, step: str, round: int, node: str) -> str | None:
        return "no answer" if node == "c2" and step == "synthesize" else None

    engine, log = played(desa(), pictures(), 2, absences=gone)
    theirs, _ = played(Local(**TRAINING), pictures(), 2)
    assert engine.states["c2"].sets == {}
    assert same(engine.states["c2"].weights, theirs.states["c2"].weights)
    assert {note.kind for note in log.notes} == {"absent"}


def test_it_is_scored_by_the_clients_own_models() -> None:
    _, log = played(desa(), pictures(), 1)
    scored = {(row.node, row.target) for row in log.metrics if row.name == "accuracy"}
    assert len(scored) == 9
