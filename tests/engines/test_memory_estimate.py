"""Stacks are no larger than memory allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import SGD, Inbox, Model, Weights
from fedstill.core.loop import Descent, Loop
from fedstill.engines import allocator as host
from fedstill.engines.loops import memory_estimate as room
from fedstill.engines.loops.stacks import Stack
from fedstill.engines.play.batched import Batched
from fedstill.methods.local import Local
from fedstill.models import MLP
from worlds import engine_for, vectors


def objective(model: Model, weights: Weights, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(weights, batch[0]), batch[1])


def loop_of(width: int, examples: int, **given: Any) -> Loop[Any]:
    net = MLP((50,), 10, hidden=(width,))
    batch = (torch.randn(examples, 50), torch.zeros(examples, dtype=torch.long))
    return Loop(Descent(objective, net, SGD(0.1)), (net.init(0), ()), given, [batch])


def test_the_measure_holds_weights_gradients_and_maps() -> None:
    small, wide, long = (
        room.bytes_a_loop(loop_of(*sizes)) for sizes in ((64, 8), (256, 8), (64, 800))
    )
    assert small and wide and long
    weights = 4 * sum(t.numel() for t in loop_of(256, 8).carry[0].values())
    assert 3 * weights < wide < 8 * weights  # where they start, their slopes, where they come to
    maps = 4 * 800 * (50 + 64 + 10)
    assert maps < long - small < 6 * maps


def test_what_is_given_counts_for_each_loop() -> None:
    def with_centre(model: Model, weights: Weights, batch: Any, centre: Tensor) -> Tensor:
        return objective(model, weights, batch) + centre[0]

    plain, given = loop_of(8, 4), loop_of(8, 4, centre=torch.zeros(10_000))
    given = Loop(Descent(with_centre, given.body.model, SGD(0.1)), *_rest(given))
    assert room.bytes_a_loop(given) - room.bytes_a_loop(plain) >= 40_000


def _rest(loop: Loop[Any]) -> tuple[Any, Any, Any]:
    return loop.carry, loop.given, loop.batches


def test_a_loop_without_batches_takes_nothing_and_one_that_fails_is_unknown() -> None:
    loop = loop_of(8, 4)
    assert room.bytes_a_loop(Loop(loop.body, loop.carry, {}, [])) == 0
    assert room.bytes_a_loop(Loop(loop.body, loop.carry, {}, [(torch.zeros(4, 3), None)])) is None


@pytest.mark.parametrize(
    ("left", "expected"), [(None, [5]), (10**9, [5]), ("two", [2, 2]), (0, [])]
)
def test_stacks_are_as_large_as_memory_allows(
    left: Any, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    run = Stack.run

    def seen(self: Stack) -> Any:
        sizes.append(len(self.loops))
        return run(self)

    world = vectors((20, 27, 23, 30, 8))
    method = Local(epochs=1, batch_size=6, lr=0.1)
    inboxes = {client: Inbox() for client in world.clients}
    if left == "two":
        monkeypatch.setattr(room, "bytes_a_loop", lambda loop: 1000)
        left = int(2.5 * 1000 * room.MARGIN)
    monkeypatch.setattr(room, "memory_left", lambda: left)
    monkeypatch.setattr(Stack, "run", seen)
    engine = engine_for(method, world, Batched)
    step = next(iter(method.each_round()))
    found = [engine.play(step, round, inboxes) for round in (1, 2)][-1]
    assert sizes == expected * 2
    told = [note for note in engine.notes if "by the memory that is free" in note]
    assert len(told) == (expected != [5])
    plain = engine_for(method, world)
    for node, outcome in [plain.play(step, round, inboxes) for round in (1, 2)][-1].items():
        assert outcome.numbers == pytest.approx(found[node].numbers, rel=1e-4)


def test_what_is_left_is_the_least_of_machine_and_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "_of_the_machine", lambda: 900)
    monkeypatch.setattr(host, "_of_the_groups", lambda: 500)
    assert host.memory_left() == 500
    monkeypatch.setattr(host, "_of_the_groups", lambda: None)
    assert host.memory_left() == 900
    monkeypatch.setattr(host, "_of_the_machine", lambda: None)
    assert host.memory_left() is None


def limited(group: Path, limit: str, words: host.Words) -> None:
    """A control group that uses 700, of which 200 are files that can be read again."""
    group.mkdir(parents=True, exist_ok=True)
    (group / words.limit).write_text(f"{limit}\n")
    (group / words.used).write_text("700\n")
    (group / "memory.stat").write_text(f"anon 500\n{words.files} 200\n")


@pytest.mark.parametrize(
    ("kinds", "top", "words"), [("", "", host.NEWER), ("cpu,memory", "memory", host.OLDER)]
)
def test_a_group_has_what_is_left_in_it_and_in_those_around_it(
    kinds: str, top: str, words: host.Words, tmp_path: Path
) -> None:
    mine, root = tmp_path / "mine", tmp_path / "groups"
    assert host._of_the_groups(root, mine) is None
    mine.write_text(f"1:name=systemd:/\n4:{kinds}:/jobs/7\n")
    assert host._of_the_groups(root, mine) is None

    job = root / top / "jobs" / "7"
    limited(job, "max" if words is host.NEWER else str(2**63 - 4096), words)
    left = host._of_the_groups(root, mine)
    assert left is None or left > 2**62
    limited(job, "1000", words)
    assert host._of_the_groups(root, mine) == 500
    limited(job.parent, "900", words)
    assert host._of_the_groups(root, mine) == 400
    limited(root / top, "800", words)  # as a container sees its own
    assert host._of_the_groups(root, mine) == 300
    mine.write_text(f"4:{kinds}:/elsewhere\n")
    assert host._of_the_groups(root, mine) == 300
