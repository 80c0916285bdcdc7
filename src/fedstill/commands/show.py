"""What a method is, as plain values: plan, memories, messages and floats, by a rehearsal."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from fedstill.commands.meanings import options_of
from fedstill.core.data import Data, Pool, Rows
from fedstill.core.errors import BadValue, unknown
from fedstill.core.method import Method, Step
from fedstill.core.model import Model
from fedstill.core.node import SERVER
from fedstill.core.records import NodeId, State
from fedstill.engines.execution import Execution
from fedstill.engines.play.rehearsal import Rehearsal
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Party, Population
from fedstill.federation.run import run
from fedstill.federation.topology import Complete
from fedstill.logbook.events import Traffic
from fedstill.logbook.writer import MemoryLog
from fedstill.wire.codec import describe


@dataclass(frozen=True)
class Stage:
    """Whom a rehearsal is played with: equal clients that hold the first `held` classes."""

    model: Model
    held: int
    clients: int = 2
    per_class: int = 64
    public: int = 0  # examples that everybody holds

    @property
    def names(self) -> Sequence[NodeId]:
        return [f"client-{i}" for i in range(self.clients)]

    def experiment(self, method: Method) -> Experiment:
        """Everybody hears everybody; the last round is scored, but there are no tests."""
        return Experiment(method, _Cast(self), rounds=1, topology=Complete(), evaluate_every=2)


class _Cast(Population):
    """Blank images with the right labels."""

    def __init__(self, stage: Stage):
        if not 1 <= stage.held <= stage.model.classes:
            raise BadValue(f"held = {stage.held}: must be in [1, {stage.model.classes}]")
        self._names = stage.names
        self._network = stage.model
        blank = torch.zeros(1, *stage.model.shape, dtype=torch.uint8)
        self.public = Data.unlabelled(blank.expand(stage.public, *stage.model.shape))
        labels = torch.arange(stage.held).repeat_interleave(stage.per_class)
        images = blank.expand(len(labels), *stage.model.shape)
        everything = Rows(Pool(images, labels), torch.arange(len(labels)))
        self._client = Party(Data((everything,)), Data(), stage.model)
        self._server = Party(Data(), Data(), stage.model)

    @property
    def clients(self) -> Sequence[NodeId]:
        return self._names

    @property
    def models(self) -> Mapping[NodeId, Model]:
        return dict.fromkeys(self._names, self._network)

    def on(self, device: torch.device | str) -> Population:
        """Rehearsals are on the host."""
        return self

    def party(self, node: NodeId) -> Party:
        return self._server if node == SERVER else self._client


def shown(method: Method, name: str, stage: Stage) -> dict[str, Any]:
    """A method in one table; messages are counted per client and, for a broadcast, once."""
    log = MemoryLog()
    engine = Rehearsal(stage.experiment(method), Execution(device="cpu"))
    run(engine, log)
    steps = [
        _step(part, step, times, log, stage)
        for part, acts in _parts(method).items()
        for step, times in Counter(acts).items()
    ]
    return {
        "name": name,
        "paper": inspect.getdoc(inspect.getmodule(type(method))) or "",
        "purpose": (inspect.getdoc(type(method)) or "").split("\n")[0],
        "hyper_parameters": {f.name: getattr(method, f.name) for f in fields(method)},
        "options": options(method),
        "presets": {key: dict(value) for key, value in method.presets.items()},
        "scored": method.scored.value,
        "scores_own": method.scores_own,
        "sends_examples": method.sends_examples,
        "needs_public": method.needs_public,
        "example": {
            "model": stage.model.describe(),
            "classes": stage.model.classes,
            "held": stage.held,
            "clients": stage.clients,
            "public": stage.public,
            "model_floats": sum(stage.model.floats().values()),
        },
        "steps": steps,
        "messages": [{"step": step["name"], **step["sends"]} for step in steps if step["sends"]],
        "memories": {
            place: _memory(engine.memory(node), method)
            for place, node in (("server", SERVER), ("client", stage.names[0]))
        },
        "floats_per_round": _floats_per_round(log.messages),
    }


def options(method: Method, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What a method's options are, or those of some names, with the values that they have."""
    known = {option.name: option for option in options_of(type(method))}
    strange = [unknown("option", name, known) for name in only if name not in known]
    if strange:
        raise BadValue(strange)
    return [
        {
            "name": name,
            "value": getattr(method, name),
            "range": known[name].range,
            "meaning": known[name].meaning,
        }
        for name in only or known
    ]


def _parts(method: Method) -> dict[str, Sequence[Step]]:
    return {"before": method.before(), "each round": method.each_round(), "after": method.after()}


def _step(part: str, step: Step, times: int, log: MemoryLog, stage: Stage) -> dict[str, Any]:
    """A step with its message; numbers are of one sender and, where it is repeated, of one time.

    What it logs is so without its loops, each of which logs its loss.
    """
    speaker = SERVER if step.place.value == "server" else stage.names[0]
    rows = [row for row in log.messages if row.step == step.name and row.sender == speaker]
    logged = [row.name for row in log.metrics if (row.step, row.node) == (step.name, speaker)]
    message = None
    if step.sends is not None:
        hints = describe(step.sends, step.method.holds)
        message = {
            "name": step.sends.__name__,
            "direction": rows[0].direction if rows else None,
            "different": _different(rows) // times,
            "floats": sum(row.floats for row in rows) // times,
            "bytes": sum(row.bytes for row in rows) // times,
            "fields": {
                field: {
                    "type": hints[field],
                    "floats": sum(row.floats for row in rows if row.field == field) // times,
                    "bytes": sum(row.bytes for row in rows if row.field == field) // times,
                }
                for field in dict.fromkeys(row.field for row in rows)
            },
        }
    return {
        "name": step.name,
        "part": part,
        "times": times,
        "at": step.place.value,
        "purpose": step.purpose,
        "reads": step.reads.__name__ if step.reads else None,
        "sends": message,
        "logs": list(dict.fromkeys(logged)),
    }


def _different(rows: Sequence[Traffic]) -> int:
    """How many messages that differ were said: one, unless each client hears its own."""
    return max(Counter(row.field for row in rows).values(), default=0)


def _memory(state: State | None, method: Method) -> dict[str, Any] | None:
    if state is None:
        return None
    hints, floats = describe(type(state), method.holds), state.floats()
    fields = {name: {"type": hints[name], "floats": floats[name]} for name in hints}
    return {"name": type(state).__name__, "fields": fields}


def _floats_per_round(sent: Sequence[Traffic]) -> dict[str, int]:
    """Floats of one client up and to peers, and of the server's broadcast, in a round."""
    speakers: dict[str, dict[str, int]] = {}
    for row in sent:
        if row.round > 0:
            by_sender = speakers.setdefault(row.direction, {})
            by_sender[row.sender] = by_sender.get(row.sender, 0) + row.floats
    return {way: max(speakers.get(way, {0: 0}).values()) for way in ("up", "down", "peer")}


def shape_of(text: str) -> tuple[int, ...]:
    """An image shape such as 3x32x32."""
    try:
        sides = tuple(int(side) for side in text.lower().split("x"))
    except ValueError:
        sides = ()
    if not sides or math.prod(sides) <= 0:
        raise BadValue(f"shape {text!r}: write it as channels x height x width, e.g. 3x32x32")
    return sides
