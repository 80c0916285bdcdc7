"""One liar among three clients: it is left out by name, and the rest is a run without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from tests.worlds import pictures, played

from fedstill.core.errors import BadMessage
from fedstill.core.node import SERVER
from fedstill.core.records import Message
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.run import run
from fedstill.logbook.writer import MemoryLog
from fedstill.methods import METHODS
from fedstill.testing import small
from fedstill.testing.closely import Memories, memories
from fedstill.testing.walls import behind_walls

Change = Callable[[Any], Message]


@dataclass(frozen=True)
class Liar:
    """Changes what c1 says in a step of the second round."""

    step: str
    change: Change

    def carry(self, message: Any, sender: str, round: int, step: str) -> Message:
        lying = (sender, round, step) == ("c1", 2, self.step)
        return self.change(message) if lying else message


def weights(**changes: Any) -> Change:
    """Weights with some tensors replaced; None takes one out."""

    def change(up: Any) -> Message:
        lied = {**up.weights, **{n.replace("_", "."): c(up.weights) for n, c in changes.items()}}
        return up.replace(
            weights={name: tensor for name, tensor in lied.items() if tensor is not None}
        )

    return change


LIES: list[tuple[str, str, str, Change, str]] = [
    ("fedavg", "update", "a first tensor that broadcasts",
     weights(conv0_weight=lambda w: w["conv0.weight"][:1]), "conv0.weight is (1, 1, 3, 3) and not"),
    ("fedavg", "update", "double precision",
     weights(head_bias=lambda w: w["head.bias"].double()), "head.bias is float64 and not float32"),
    ("fedavg", "update", "a name missing",
     weights(head_bias=lambda w: None), "head.bias is missing"),
    ("fedavg", "update", "one more name",
     weights(more=lambda w: torch.zeros(1)), "more is not known"),
    ("fedavg", "update", "10^18 examples", lambda up: up.replace(examples=10**18), "must be in [0"),
    ("fedavg", "update", "-300 examples", lambda up: up.replace(examples=-300), "must be in [0"),
    ("fedavg", "update", "weights times 1e30",
     lambda up: up.replace(weights={n: t * 1e30 for n, t in up.weights.items()}),
     "sent Up with values beyond 1.1e+12 in weights.conv0.weight"),
    ("fedavg", "update", "infinity",
     lambda up: up.replace(weights={n: t / 0 for n, t in up.weights.items()}), "with NaN"),
    ("feddm", "synthesize", "labels of 999",
     lambda up: up.replace(labels=torch.full_like(up.labels, 999)), "values from 999 to 999"),
    ("feddm", "synthesize", "labels of -1",
     lambda up: up.replace(labels=torch.full_like(up.labels, -1)), "values from -1 to -1"),
    ("feddm", "synthesize", "floating labels",
     lambda up: up.replace(labels=up.labels.float()), "labels of float32; expected int64"),
    ("feddm", "synthesize", "images of other height",
     lambda up: up.replace(images=up.images[..., :4, :]), "images of shape [6, 1, 4, 8]"),
    ("feddm", "synthesize", "fewer labels than images",
     lambda up: up.replace(labels=up.labels[:-1]), "labels of shape [5]; expected [image = 6]"),
    ("feddm", "synthesize", "no images",
     lambda up: up.replace(images=up.images[:0], labels=up.labels[:0]), "images of shape [0, 1"),
    ("feddm", "synthesize", "more images than asked for",
     lambda up: up.replace(images=up.images.repeat(2, 1, 1, 1), labels=up.labels.repeat(2)),
     "images of shape [12, 1, 8, 8]; expected [image from 1 to 6"),
    ("fednova", "update", "more steps than examples make",
     lambda up: up.replace(steps=10**6), "sent steps = 1000000, but 27 examples make 3"),
    ("fedgen", "update", "counts of other examples",
     lambda up: up.replace(counts=up.counts + 5), "counts 42 labels, but used 27 examples"),
    ("fedproto", "learn", "a class twice",
     lambda up: up.replace(classes=torch.tensor([0, 0, 1])), "classes, from one to the next"),
    ("fccl", "speak", "logits of one example", lambda up: up.replace(logits=up.logits[:1]),
     "logits of shape [1, 3]; expected [public = 24, class = 3]"),
    ("desa", "speak", "logits of one anchor",
     lambda up: up.replace(logits={n: t[:1] for n, t in up.logits.items()}), "of 1 anchors"),
    ("desa", "speak", "logits on a set that nobody has",
     lambda up: up.replace(logits={"mine": next(iter(up.logits.values()))}), "on 'mine'"),
]  # fmt: skip


def away(method: str) -> Callable[..., str | None]:
    step = next(step for name, step, *_ in LIES if name == method)

    def gone(_: Any, playing: str, round: int, node: str) -> str | None:
        return "away" if (playing, round, node) == (step, 2, "c1") else None

    return gone


@cache
def without_c1(name: str, engine: type[InProcess]) -> Memories:
    """What is remembered where c1 is away in that step."""
    return memories(played(small(METHODS[name]), pictures(), 2, engine, absences=away(name))[0])


@pytest.mark.parametrize("engine", [InProcess, Batched])
@pytest.mark.parametrize(
    ("name", "step", "lie", "change", "why"),
    LIES,
    ids=[f"{name}, {lie}" for name, _, lie, *_ in LIES],
)
def test_a_liar_is_left_out_by_name_and_the_rest_is_a_run_without_it(
    engine: type[InProcess], name: str, step: str, lie: str, change: Change, why: str
) -> None:
    if engine is Batched and name != "fedavg":
        pytest.skip("the post is the same for all engines; one method stands for all")
    method, world = small(METHODS[name]), pictures()
    options: dict[str, Any] = {"bad_messages": "leave_out"}
    found, log = played(method, world, 2, engine, meddling=[Liar(step, change)], **options)
    (note,) = log.notes
    assert (note.kind, note.node, note.round) == ("left out", "c1", 2)
    assert why in note.text and note.text.startswith("c1 "), note.text
    here, there = memories(found), without_c1(name, engine)
    for node in {*here} - {"c1"}:  # what it learnt itself in spite of its lie is its own affair
        assert all(torch.equal(here[node][n], there[node][n]) for n in here[node]), (lie, node)
    if name == "fedavg":
        with pytest.raises(BadMessage, match=r"c1 .*bad_messages = \"leave_out\""):
            played(method, world, 2, engine, meddling=[Liar(step, change)])


def test_a_liar_behind_walls_is_left_out_too() -> None:
    """Its own look at what it sends counts for nothing: the post looks again."""
    method, world, log = small(METHODS["fedavg"]), pictures(), MemoryLog()
    liar = Liar("update", lambda up: up.replace(examples=10**18))
    with behind_walls(method, world, rounds=2, bad_messages="leave_out") as engine:
        play = engine.play

        def meddled(step: Any, round: int, inboxes: Any, toward: Any = None) -> Any:
            outcomes = play(step, round, inboxes, toward)
            for sender, outcome in outcomes.items():
                lied = liar.carry(outcome.message, sender, round, step.name)
                object.__setattr__(outcome, "message", lied)
            return outcomes

        engine.play = meddled  # type: ignore[method-assign]
        run(engine, log)
    assert [(note.kind, note.node) for note in log.notes] == [("left out", "c1")]
    state, wanted = engine.memory(SERVER), without_c1("fedavg", InProcess)[SERVER]
    assert state is not None
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in state.tensors().items())


def test_a_server_that_lies_stops_the_run() -> None:
    @dataclass(frozen=True)
    class Server(Liar):
        def carry(self, message: Any, sender: str, round: int, step: str) -> Message:
            return self.change(message) if (sender, round) == (SERVER, 2) else message

    cut = weights(head_bias=lambda w: w["head.bias"][:1])
    with pytest.raises(BadMessage, match=r"server sent another network .*head.bias is \(1,\)"):
        played(
            small(METHODS["fedavg"]), pictures(), 2, meddling=[Server("broadcast", cut)],
            bad_messages="leave_out",
        )  # fmt: skip
