"""The engine one reads first: node after node, loop after loop."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from fedstill.core import algebra, pulse, trees
from fedstill.core.content import LARGEST
from fedstill.core.errors import FedstillError, ProtocolError, StepError
from fedstill.core.loop import Loop, Several
from fedstill.core.method import Place, Step, memory_of, steps_of
from fedstill.core.model import Model
from fedstill.core.node import SERVER, Addressed, Cache, Inbox, Node
from fedstill.core.records import Direction, Message, NodeId, State
from fedstill.core.trees import field_names
from fedstill.core.work import Work
from fedstill.engines import checkpoint, scoring
from fedstill.engines.allocator import room_made
from fedstill.engines.cached import CachedAs, rounding
from fedstill.engines.engine import Absences, Outcome
from fedstill.engines.loops.compiled import Compiler, Steps
from fedstill.engines.loops.graphs import BRANCHES, CudaGraphs, Lines
from fedstill.engines.loops.recorded import Recorder
from fedstill.engines.loops.work import Counter
from fedstill.engines.memories import Memories
from fedstill.engines.outbox import Outbox, kind_of, owner
from fedstill.engines.scoring import Scores
from fedstill.engines.spending import Purse
from fedstill.federation.experiment import Experiment

if TYPE_CHECKING:
    from fedstill.engines.execution import Execution

R = TypeVar("R")


class InProcess:
    """Plays a step on its nodes in turn."""

    name = "in_process"

    def __init__(
        self,
        experiment: Experiment,
        execution: Execution,
        *,
        cache: Cache | None = None,
        absences: Absences | None = None,
    ):
        self.experiment = experiment
        self.device = execution.torch_device
        self.population = experiment.population.on(self.device)
        # A clock counts the work of every run alike: what another run made is made again.
        clock = experiment.clock
        self.counter = None if clock is None else Counter(clock.counts_operations)
        self.cache: CachedAs | None = None
        if cache is not None and self.counter is None:
            self.cache = CachedAs(cache, self.computed)
        self.execution = execution
        self.absences = absences
        self.notes: list[str] = []
        self.compiler = Compiler(self.notes) if execution.compile else None
        self.recorder: Recorder | None = None
        if execution.record and self.device.type == "cuda":
            graphs = CudaGraphs(self.device, BRANCHES)
            lines = Lines(self.device)
            self.recorder = Recorder(graphs, notes=self.notes, compiler=self.compiler, lines=lines)
        self.states = Memories(execution.memory_limit, self.device)
        self.key: bytes | None = None  # of a site: what its noise is made with (`Node.secret`)
        self.purse = self._purse()
        self.far_kind: type[State] | None = None  # of clients' memories that lie elsewhere
        self._saved: Path | None = None  # the last checkpoint

    def computed(self) -> str:
        """What may change the last digits of what nodes make, besides data, values and seed."""
        return f"{self.name}, {rounding(self.execution)}"

    def _purse(self) -> Purse | None:
        """What grants uses of private examples; None where nothing is private."""
        privacy = self.experiment.privacy
        return None if privacy is None else Purse(privacy, self.states, self._step_names())

    def _step_names(self) -> set[str]:
        return {step.name for step in steps_of(self.experiment.method)}

    def remember_in(self, states: Memories) -> None:
        """Keep what nodes remember, and what they have spent, in another place from now on."""
        self.states = states
        self.purse = self._purse()

    def restore(self, states: Mapping[NodeId, State | None]) -> None:
        """Replace what every node remembers, and go on from there."""
        self.states.clear()
        self.states.update(states)

    def save(
        self,
        folder: Path,
        round: int,
        *,
        digest: str,
        keep: int = 2,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """A checkpoint of all memories; those that have not changed share the files of the last."""
        self._saved = checkpoint.write(
            folder, round, self.states, digest=digest, keep=keep, extra=extra,
            base=self._saved, changed=self.states.changed,
        )  # fmt: skip
        self.states.changed.clear()

    def load(self, folder: Path, *, digest: str | None) -> checkpoint.Saved | None:
        """Go on from the newest checkpoint that is whole; None where there is none."""
        saved = checkpoint.read_latest(
            folder, self.kind_of, digest=digest, into=self.states, device=self.device,
            held=self.experiment.method.holds,
        )  # fmt: skip
        self._saved = None if saved is None else saved.path
        self.states.changed.clear()
        return saved

    def kind_of(self, node: NodeId) -> type[State] | None:
        """Which memory a node has here, as the hints of the method's steps say."""
        at_server = owner(node) == SERVER
        if self.far_kind is not None and not at_server:
            return self.far_kind
        place = Place.SERVER if at_server else Place.CLIENTS
        return kind_of(node, memory_of(self.experiment.method, place))

    def memory(self, node: NodeId) -> State | None:
        """What a node remembers; None where it remembers nothing or has not acted."""
        return self.states.get(node)

    def spilling_to(self, folder: Path) -> AbstractContextManager[None]:
        """For a while, put memories beyond the limit into files of this folder."""
        return self.states.spilling_to(folder)

    def play(
        self,
        step: Step,
        round: int,
        inboxes: Mapping[NodeId, Inbox[Any]],
        toward: Direction | None = None,
    ) -> dict[NodeId, Outcome]:
        """One step on every node that has an inbox; channels code what travels `toward` others."""
        return {
            id: self._play_one(step, round, id, inbox, toward)
            for id, inbox in pulse.counted(inboxes.items())
        }

    def _play_one(
        self, step: Step, round: int, id: NodeId, inbox: Inbox[Any], toward: Direction | None
    ) -> Outcome:
        gone = self._absence(step, round, id)
        if gone:
            return Outcome(absent=gone)
        node = self.node(id, round, step.name, step.again)
        try:
            acting = step(node, inbox)
            message = self._driven(acting, node) if inspect.iscoroutine(acting) else acting
        except Exception as error:
            raise StepError(type(step.method).__name__, step.name, id, round, error) from error
        return self._all_committed([(node, inbox, message)], step, toward)[0]

    def _driven(self, acting: Any, node: Node[Any]) -> Any:
        """Run a step to its end, doing each loop that it awaits."""
        answer: Any = None
        while True:
            try:
                asked = acting.send(answer)
            except StopIteration as end:
                return end.value
            loops = asked.loops if isinstance(asked, Several) else (asked,)
            answers = [
                self._run(self._noted(loop, node), node) for loop in pulse.counted(loops, "loop")
            ]
            answer = answers if isinstance(asked, Several) else answers[0]

    def _noted(self, loop: Loop[Any], node: Node[Any]) -> Loop[Any]:
        """A loop that a node awaits, with the seeds of its draws; its work is counted."""
        drawing = loop.drawing(node.next_loop)
        if self.counter is not None:
            node.work = (node.work or Work()).more(self.counter.of(drawing))
        return drawing

    def _run(self, loop: Loop[Any], node: Node[Any]) -> Any:
        replayed = self.recorder.run(loop) if self.recorder else None
        if replayed is not None:
            carry, loss = replayed
            if loop.tells_loss:
                node.log(loss=loss)
            return carry
        carry = loop.carry
        losses: list[Tensor] = []
        step = Steps(loop, self.compiler)
        for batch in pulse.counted(loop.batches, "iteration"):
            room_made()
            carry, loss = step(carry, loop.given, batch)
            losses.append(loss)
        if losses and loop.tells_loss:
            node.log(loss=torch.stack(losses).mean())
        return carry

    def node(self, id: NodeId, round: int, step: str, again: int = 0) -> Node[Any]:
        """A node as a step sees it; its memory is made the first time it is asked for."""
        if id not in self.states:
            fresh = self._bare(id, 0, "memory")
            method = self.experiment.method
            make = method.server_state if id == SERVER else method.client_state
            try:
                first = make(fresh)
                _check_memory(first)
            except FedstillError:
                raise
            except Exception as error:
                raise StepError(type(method).__name__, make.__name__, id, 0, error) from error
            self.states[id] = _without_graph(first)
        node = self._bare(id, round, step, again)
        node.state = self.states[id]
        return node

    def score(self, round: int) -> Iterator[tuple[NodeId, Scores]]:
        """Model after model its metrics by test set; nothing is changed."""
        room_made()  # evaluation takes blocks of other sizes
        experiment = self.experiment
        scored = scoring.holders(experiment.method, self.states, self.population.clients)
        for holder in pulse.counted(list(scored)):
            yield holder, self.scores_of(holder, round)

    def scores_of(self, holder: NodeId, round: int) -> Scores:
        """The metrics of one model on all test sets that it is scored on."""
        tests = dict(scoring.tests_for(self.experiment, self.population, holder))
        node = self.node(holder, round, scoring.EVALUATION)
        if holder == SERVER:
            node.state = self.experiment.method.scored_state(node)
        return scoring.scores(self.experiment, node, tests)

    def own_scores(self, client: NodeId, round: int) -> Scores:
        """The metrics of a client's model on its own tests."""
        node = self.node(client, round, scoring.EVALUATION)
        return scoring.scores(self.experiment, node, {client: self.population.party(client).test})

    def scores_at(self, client: NodeId, state: State | None, round: int) -> Scores:
        """The metrics of the server's model, of which this is known, on one client's tests."""
        node = self._bare(SERVER, round, scoring.EVALUATION)
        node.state = state
        return scoring.scores(self.experiment, node, {client: self.population.party(client).test})

    @cached_property
    def _server_model(self) -> Model:
        """The server's network, made for this device once and not for each node."""
        return self.population.party(SERVER).model.on(self.device)

    def _bare(self, id: NodeId, round: int, step: str, again: int = 0) -> Node[Any]:
        party = self.population.party(id)
        node: Node[Any] = Node(
            id,
            round,
            None,
            model=party.model.on(self.device),
            data=party.data,
            public=self.population.public,
            models=self.population.models,
            server_model=self._server_model,
            graph=self.experiment.graph.neighbours,
            seed=self.experiment.seed,
            step=step,
            again=again,
            device=self.device,
            cache=self.cache,
            key=self.key,
        )
        if self.purse is not None:
            self.purse.seal(node)
        return node

    def _absence(self, step: Step, round: int, id: NodeId) -> str | None:
        method = self.experiment.method
        return self.absences(method, step.name, round, id) if self.absences else None

    def _all_committed(
        self, ended: Sequence[Ended], step: Step, toward: Direction | None
    ) -> list[Outcome]:
        """Keep the memories of a step that succeeded; move numbers to the host; code messages.

        The host waits for the device once or twice, not for each node. Messages are looked at now,
        since a moment later the processor has to fetch them again.
        """
        _check_said(step, ended)
        ended = [_without_graphs(node, inbox, message) for node, inbox, message in ended]
        sent = [message for _, _, message in ended if isinstance(message, Message)]
        strange = iter(algebra.not_finite_each(sent, LARGEST))
        told = iter(_on_host([n for node, _, _ in ended for n in node.numbers.values()]))
        outbox = Outbox(self.experiment.channels, self.states)
        outcomes = []
        for node, inbox, message in ended:
            numbers = {name: next(told) for name in node.numbers}
            bad = next(strange) if isinstance(message, Message) else None
            lost = False
            if toward is not None and message is not None and not bad and outbox.acts(toward):
                try:
                    message, lost = outbox.coded(node, inbox, message, toward, step.name)
                except Exception as error:
                    title = type(step.method).__name__
                    raise StepError(title, step.name, node.id, node.round, error) from error
            self.states[node.id] = node.state
            if self.purse is not None:
                self.purse.keep(node)
            outcomes.append(
                Outcome(
                    message,
                    numbers,
                    tuple(node.spent),
                    dict(node.rejected),
                    bad=bad,
                    lost=lost,
                    work=None if self.counter is None else node.work or Work(),
                )
            )
        return outcomes


Ended = tuple[Node[Any], Inbox[Any], Any]
"""A node after a step, what it had read, and the message that it leaves."""


def _check_said(step: Step, ended: Sequence[Ended]) -> None:
    """Refuse a step that leaves no message where it should, or something else, or no memory."""
    for node, _, message in ended:
        try:
            _check_message(step, message)
            _check_hearers(node, message)
            _check_memory(node.state)
        except (ProtocolError, TypeError) as why:
            title = type(step.method).__name__
            raise StepError(title, step.name, node.id, node.round, why) from why


def _without_graphs(node: Node[Any], inbox: Inbox[Any], message: Any) -> Ended:
    """What a step leaves, without graphs of gradients, which neither sites nor files know."""
    node.state = _without_graph(node.state)
    if not isinstance(message, Addressed):
        return node, inbox, _without_graph(message)
    each = {id(said): _without_graph(said) for said in message.values()}
    return node, inbox, Addressed({who: each[id(said)] for who, said in message.items()})


def _without_graph(record: R) -> R:
    """The same values; the record itself where no tensor of it has a graph."""
    graphs = any(tensor.requires_grad for tensor in trees.tensors(record))
    return trees.detach(record) if graphs else record


def _check_message(step: Step, message: Any) -> None:
    """Refuse what is no message; without one nothing would be learned, and nobody told."""
    kind = step.sends.__name__ if step.sends else "nothing"
    if message is None and not step.may_be_silent:
        raise ProtocolError(
            f"it returned nothing, but by its hint it sends {kind}; return one, or write -> {kind} "
            "| None where a party may say nothing"
        )
    if message is None:
        return
    for each in message.values() if isinstance(message, Addressed) else (message,):
        if not isinstance(each, Message):
            raise ProtocolError(
                f"it returned a {type(each).__name__}, but by its hint it sends {kind}; return "
                f"{kind}(…), or Addressed with one for each hearer"
            )
        for name in field_names(type(each)):
            if inspect.iscoroutine(getattr(each, name)):
                raise ProtocolError(
                    f"{type(each).__name__}.{name} is a coroutine; write await before the call "
                    "that makes it, in a step that begins with async def"
                )


def _check_hearers(node: Node[Any], message: Any) -> None:
    """Refuse a message to somebody who is not there: nobody would hear it, and nobody told."""
    for name in message if isinstance(message, Addressed) else ():
        if name != SERVER and name not in node.models:
            raise ProtocolError(
                f"it has a message for {name!r}, but there is no such client; clients have the "
                "names of node.models"
            )


def _check_memory(state: Any) -> None:
    if state is not None and not isinstance(state, State):
        raise TypeError(
            f"it gave a {type(state).__name__} to be remembered; a memory is a State with fields, "
            "or None"
        )


def _on_host(numbers: Sequence[float | Tensor]) -> list[float]:
    """Numbers that may be on a device, fetched together."""
    there = [n.detach() for n in numbers if isinstance(n, Tensor) and n.is_cuda]
    if len({n.dtype for n in there}) > 1:
        there = [n.double() for n in there]
    fetched = iter(torch.stack(there).tolist() if there else [])
    return [next(fetched) if isinstance(n, Tensor) and n.is_cuda else float(n) for n in numbers]
