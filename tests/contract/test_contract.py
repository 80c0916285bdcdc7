"""What holds for every method, run from METHODS; no method is named here.

`python tests/contract/test_contract.py` prints the table of methods and checks.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

import worlds
from contract.small import small
from fedstill.channels import Channel, EightBit, Half, TopK
from fedstill.core import Message, Record
from fedstill.core.method import Method, Place, check_protocol
from fedstill.core.records import Direction
from fedstill.engines.loops import compiled
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.population import Party
from fedstill.federation.run import run
from fedstill.federation.sampling import Sample, Scripted
from fedstill.logbook.writer import MemoryLog
from fedstill.methods import METHODS
from fedstill.wire import codec
from walls import behind_walls

ROUNDS = 4


def world_for(method: Method) -> worlds.World:
    """Images for every method: those that synthesise need them, the others do not mind."""
    return worlds.pictures()


def memories(engine: InProcess) -> dict[str, dict[str, torch.Tensor]]:
    return {n: s.tensors() for n, s in engine.states.items() if s is not None}


def assert_same(left: Any, right: Any, tolerance: float = 0.0) -> None:
    assert left.keys() == right.keys()
    for node in left:
        assert left[node].keys() == right[node].keys()
        for name, tensor in left[node].items():
            if tolerance:
                assert torch.allclose(tensor, right[node][name], atol=tolerance, rtol=tolerance)
            else:
                assert torch.equal(tensor, right[node][name]), f"{node} {name}"


def check_plan(method: Method) -> None:
    """Each step reads what the step before sends; every step is documented."""
    check_protocol(method)
    steps = [*method.before(), *method.each_round(), *method.after()]
    assert steps
    for step in steps:
        assert step.purpose, f"{step.title} has no docstring"
        assert step.sends is None or (step.sends.__doc__ or "").strip()
    assert (type(method).__doc__ or "").strip()


def check_engines_agree(method: Method) -> None:
    """Memories after four rounds: in_process = batched to 1e-4; with norm layers, what they say.

    A bias before an instance norm has no slope but rounding errors, which Adam blows up to whole
    steps; it changes no output. So memories are compared without norm layers, losses with them.
    """
    world = worlds.pictures(norm="none")
    plain, _ = worlds.played(method, world, ROUNDS)
    stacked, _ = worlds.played(method, world, ROUNDS, engine=Batched)
    assert_same(memories(plain), memories(stacked), 1e-4)
    _, log = worlds.played(method, worlds.pictures(), ROUNDS)
    _, stacked_log = worlds.played(method, worlds.pictures(), ROUNDS, engine=Batched)
    assert scores(log, "loss").keys() == scores(stacked_log, "loss").keys()
    for key, loss in scores(log, "loss").items():
        assert scores(stacked_log, "loss")[key] == pytest.approx(loss, abs=1e-3)


def check_compiled(method: Method) -> None:
    """Memories after a round whose steps are traced as for compilation = plain ones to 1e-4."""
    world = worlds.pictures(norm="none")
    plain, _ = worlds.played(method, world, rounds=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "WORTHWHILE", 1)
        patch.setattr(compiled, "BACKEND", "eager")  # what was traced, operation by operation
        traced, _ = worlds.played(method, world, rounds=1, compile=True)
    assert not traced.notes
    assert_same(memories(plain), memories(traced), 1e-4)


def check_resume(method: Method, rounds: int = ROUNDS, channels: Sequence[Channel] = ()) -> None:
    """Saved half-way and continued = straight run, bit for bit."""
    world, half = world_for(method), rounds // 2
    straight, _ = worlds.played(method, world, rounds, channels=channels)
    with TemporaryDirectory() as folder:
        first = worlds.engine_for(method, world, rounds=half, channels=channels)

        def save(round: int) -> None:
            first.save(Path(folder), round, digest="d")

        run(first, MemoryLog(), save=save)
        second = worlds.engine_for(method, world, rounds=rounds, channels=channels)
        saved = second.load(Path(folder), digest="d")
    assert saved is not None and saved.round == half
    run(second, MemoryLog(), done=saved.round)
    assert_same(memories(straight), memories(second))


EVERY_WAY: tuple[Direction, ...] = ("up", "down", "peer")
EIGHT_BIT = EightBit(directions=EVERY_WAY, stochastic=True, least=1)
TOP_K = TopK(directions=EVERY_WAY, share=0.3, least=1)


def check_channels(method: Method) -> None:
    """With eight bits and with top-k fewer bytes travel and a resumed run is the straight one.

    Where messages are coded without chance, engines agree up to a step of the code.
    """
    sent, log, _ = recorded(method, rounds=1)
    tensors = [tensor for message in sent for tensor in message.tensors().values()]
    codable = any(tensor.is_floating_point() and len(tensor.flatten()) > 16 for tensor in tensors)
    for row in ([EIGHT_BIT], [TOP_K]):
        engine, coded_log = worlds.played(method, world_for(method), 1, channels=row)
        finite(engine)
        assert [said[:5] for said in traffic(log)] == [said[:5] for said in traffic(coded_log)]
        before, after = (sum(said.bytes for said in one.messages) for one in (log, coded_log))
        assert after < before if codable else after == before
    check_resume(method, 2, [TOP_K, EIGHT_BIT])
    one, other = (
        worlds.played(method, worlds.pictures(norm="none"), 1, engine=engine, channels=[Half()])[0]
        for engine in (InProcess, Batched)
    )
    assert_same(memories(one), memories(other), 0.01)


def traffic(log: MemoryLog) -> list[tuple[Any, ...]]:
    """Who said what to how many, with the sizes last."""
    return [
        (row.round, row.step, row.sender, row.field, row.hearers, row.floats, row.bytes)
        for row in log.messages
    ]


def check_order(method: Method) -> None:
    """Playing nodes in another order changes nothing."""

    class Backwards(InProcess):
        def play(self, step, round, inboxes, toward=None):  # type: ignore[no-untyped-def]
            turned = dict(reversed(list(inboxes.items())))
            return super().play(step, round, turned, toward)

    one, log = worlds.played(method, world_for(method), ROUNDS)
    other, other_log = worlds.played(method, world_for(method), ROUNDS, engine=Backwards)
    assert_same(memories(one), memories(other))
    assert scores(log) == scores(other_log)


def check_part_time(method: Method) -> None:
    """One client awake, half awake, one away for rounds, one absent in mid-round: all work."""
    world = world_for(method)
    for sampler in (Sample(count=1), Sample(share=0.5), Scripted({2: ["c1"], 3: ["c1"]})):
        engine, _ = worlds.played(method, world, ROUNDS, sampling=sampler)
        finite(engine)
    acting = [s for s in method.each_round() if s.place is Place.CLIENTS]

    def gone(_: Method, step: str, round: int, node: str) -> str | None:
        return (
            "no answer"
            if node == "c2" and round == 2 and acting and step == acting[0].name
            else None
        )

    engine, log = worlds.played(method, world, ROUNDS, absences=gone)
    finite(engine)
    assert ("absent" in {note.kind for note in log.notes}) == bool(acting)


def check_wire(method: Method) -> None:
    """Every message and memory survives the codec; counted floats equal the fields' sizes."""
    sent, log, engine = recorded(method)
    for message in sent:
        again = codec.decode(codec.encode(message), type(message), held=method.holds)
        assert_same({"": message.tensors()}, {"": again.tensors()})
        assert again.floats() == message.floats()
        for field in fields(message):  # type: ignore[arg-type]
            value = getattr(message, field.name)
            if isinstance(value, torch.Tensor) and message.floats()[field.name]:
                assert message.floats()[field.name] == value.numel()
    for state in engine.states.values():
        if state is not None:
            again = codec.decode(codec.encode(state), type(state), held=method.holds)
            assert_same({"": state.tensors()}, {"": again.tensors()})
    assert sum(row.floats for row in log.messages) == sum(sum(m.floats().values()) for m in sent)


def check_purity(method: Method) -> None:
    """The method is unchanged and hashable; no global generator moved; messages stay as sent."""
    before, hashed = copy.copy(vars(method)), hash(method)
    torch_state, numpy_state, own_state = (
        torch.random.get_rng_state(), np.random.get_state()[1].copy(), random.getstate(),  # type: ignore[union-attr]
    )  # fmt: skip
    worlds.played(method, world_for(method), 2)
    assert vars(method) == before and hash(method) == hashed
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()  # type: ignore[index]
    assert random.getstate() == own_state
    twin = type(method)(**{f.name: getattr(method, f.name) for f in fields(method)})
    assert twin == method and hash(twin) == hashed


def check_privacy(method: Method) -> None:
    """No message contains a training example, unless the method says so; memory never travels."""
    sent, _, _ = recorded(method)
    world = world_for(method)
    private = torch.cat([world.party(c).data.all().x.flatten(1) for c in world.clients])
    stored = [
        p.stored.flatten(1).float() for c in world.clients for p, _ in world.party(c).data.parts
    ]
    shown = any(
        holds_row(tensor, private) or any(holds_row(tensor, rows) for rows in stored)
        for message in sent
        for tensor in message.tensors().values()
    )
    assert shown == method.sends_examples
    assert all(isinstance(message, Message) for message in sent)


def check_learning(method: Method) -> None:
    """On the tiny world the score after ten rounds exceeds chance by far."""
    _, log = worlds.played(method, world_for(method), 10)
    last = [v for (round, *_), v in scores(log).items() if round == 10]
    assert sum(last) / len(last) > 1 / worlds.CLASSES + 0.2


def check_empty_client(method: Method) -> None:
    """A client without a single example takes part, and harms nobody."""
    world = world_for(method)
    party = world.parties["c2"]
    nothing = party.data.subset(torch.zeros(0, dtype=torch.long))
    world.parties["c2"] = Party(nothing, party.test, party.model)
    engine, log = worlds.played(method, world, 2)
    finite(engine)
    assert scores(log)


def check_walls(method: Method) -> None:
    """Each client a site of its own, behind encoded bytes, with nobody else's data in reach.

    What is logged and what travels is that of one process, evaluation included.
    """
    world = world_for(method)
    _, log = worlds.played(method, world, 2, scores="own")
    apart = MemoryLog()
    with behind_walls(method, world, rounds=2) as engine:
        run(engine, apart)
    assert written(apart) == written(log)
    assert bool(engine.scoring_bytes) == (method.scored is Place.SERVER)


def written(log: MemoryLog) -> tuple[list[Any], ...]:
    """All rows but the times."""
    return [row for row in log.metrics if row.name != "seconds"], log.messages, log.notes


CHECKS: dict[str, Callable[[Method], None]] = {
    "plan": check_plan,
    "engines agree": check_engines_agree,
    "compiled": check_compiled,
    "resume": check_resume,
    "channels": check_channels,
    "order": check_order,
    "part-time": check_part_time,
    "empty client": check_empty_client,
    "wire": check_wire,
    "walls": check_walls,
    "purity": check_purity,
    "privacy": check_privacy,
    "learning": check_learning,
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("promise", CHECKS)
def test_every_method_keeps_the_contract(name: str, promise: str) -> None:
    check = CHECKS[promise]
    check(small(METHODS[name]))


def test_every_preset_makes_a_method() -> None:
    for kind in METHODS.values():
        for values in kind.presets.values():
            assert kind(**values) is not None


def scores(log: MemoryLog, name: str = "accuracy") -> dict[tuple[int, str, str], float]:
    rows = [n for n in log.metrics if n.step == "evaluate" and n.name == name]
    return {(n.round, n.node, n.target): n.value for n in rows}


def finite(engine: InProcess) -> None:
    for named in memories(engine).values():
        for tensor in named.values():
            assert torch.isfinite(tensor.float()).all()


def recorded(method: Method, rounds: int = 2) -> tuple[list[Record], MemoryLog, InProcess]:
    """Every message of some rounds."""
    sent: list[Record] = []

    def ear(message: Message, sender: str, round: int) -> None:
        sent.append(message)

    engine, log = worlds.played(method, world_for(method), rounds, observers=[ear])
    return sent, log, engine


def holds_row(tensor: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether some row of a tensor is one of the given rows."""
    if tensor.dim() < 2 or tensor[0].numel() != rows.shape[1]:
        return False
    return bool((torch.cdist(tensor.flatten(1).float(), rows) < 1e-4).any())


def table() -> str:
    """Methods by checks, as they come out."""
    lines = ["| method | " + " | ".join(CHECKS) + " |", "|---|" + "---|" * len(CHECKS)]
    for name, kind in METHODS.items():
        cells = []
        for check in CHECKS.values():
            try:
                check(small(kind))
                cells.append("green")
            except AssertionError as error:
                cells.append(f"RED {error}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
