"""Method, Step, at_server, at_clients and the protocol check; no loop over nodes."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    NamedTuple,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from torch import Tensor

from fedstill.core import content, ranges
from fedstill.core.content import Layout, Length
from fedstill.core.errors import BadValue, ProtocolError, unknown
from fedstill.core.model import Model
from fedstill.core.node import SERVER, Addressed, Inbox, Node
from fedstill.core.records import Message, NodeId, Pictured, Record, State, Weights

R = TypeVar("R", bound=Record)

RESERVED = {"evaluate": "scoring", "memory": "the making of memories"}  # names of no step

Result = Message | Addressed[Any] | None
Acting = Callable[[Any, Node[Any], Inbox[Any]], Result | Coroutine[Any, Any, Result]]


class Scored(State):
    """What a model is scored by: its weights."""

    weights: Weights


class Place(Enum):
    """Who acts a step."""

    SERVER = "server"
    CLIENTS = "clients"


class Kinds(NamedTuple):
    """What a step reads, sends and remembers; None for nothing."""

    reads: type[Message] | None
    sends: type[Message] | None
    remembers: type[State] | None


@dataclass(frozen=True)
class Step:
    """One act of a method: who acts, what is read, what is sent. Hints are the wire format."""

    method: Method
    name: str
    place: Place
    act: Acting
    kinds: Kinds | None = None  # where hints leave open what the method's values decide
    again: int = 0  # how often a step of its name comes before it in its round, see `in_turn`

    @property
    def _hints(self) -> Mapping[str, Any]:
        return _hints_of(self.act)

    @property
    def reads(self) -> type[Message] | None:
        """The kind of message read, or None."""
        return (self.kinds or self.hinted).reads

    @property
    def sends(self) -> type[Message] | None:
        """The kind of message sent, or None."""
        return (self.kinds or self.hinted).sends

    @property
    def may_be_silent(self) -> bool:
        """Whether the hints allow that it leaves no message."""
        return self.sends is None or NoneType in get_args(self._hints.get("return"))

    @property
    def remembers(self) -> type[State] | None:
        """The kind of memory the acting node has, as hinted by `Node[...]`, or None."""
        return (self.kinds or self.hinted).remembers

    @property
    def hinted(self) -> Kinds:
        """What the hints of the act say."""
        return _kinds_of(self.act)

    def narrowed(
        self,
        *,
        reads: type[Message] | None,
        sends: type[Message] | None,
        remembers: type[State] | None,
    ) -> Step:
        """The same step with kinds that its hints leave open, because values decide on them.

        A hint `Inbox[Message]` may become any message or none; so may `-> Message` and a memory
        hinted `Node[Any]`. A method that plays another one's step says so in its plan.
        """
        asked = Kinds(reads, sends, remembers)
        wide = self.hinted._replace(remembers=self.hinted.remembers or State)
        for word, hint, kind in zip(Kinds._fields, wide, asked, strict=True):
            if kind is not None and (hint is None or not issubclass(kind, hint)):
                said = hint.__name__ if hint else "nothing"
                raise ProtocolError(
                    f"{self.title} {word} {said} by its hints, which {kind.__name__} is not"
                )
        return replace(self, kinds=asked)

    @property
    def title(self) -> str:
        return f"{type(self.method).__name__}.{self.name}"

    @property
    def purpose(self) -> str:
        """The first line of the step's docstring."""
        return (inspect.getdoc(self.act) or "").split("\n")[0]

    def __call__(self, node: Node[Any], inbox: Inbox[Any]) -> Any:
        return self.act(self.method, node, inbox)

    async def played(self, node: Node[Any], inbox: Inbox[Any]) -> Any:
        """What the step returns when another step plays it, whether it awaits loops or not."""
        acting = self(node, inbox)
        return await acting if inspect.iscoroutine(acting) else acting


def _inner(hint: Any, wanted: type[R]) -> type[R] | None:
    """The kind of record between the brackets of a hint, or None."""
    return next((k for k in get_args(hint) if isinstance(k, type) and issubclass(k, wanted)), None)


def _sent(hint: Any) -> type[Message] | None:
    """The kind of message that a step returns, alone or addressed, or None."""
    for option in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if get_origin(option) is Addressed:
            return _inner(option, Message)
        if isinstance(option, type) and issubclass(option, Message):
            return option
    return None


class _Acted:
    """A step in a class body: gives a `Step` bound to the method object it is asked of."""

    def __init__(self, place: Place, act: Acting):
        self.place, self.act = place, act
        self.__doc__ = act.__doc__
        self.name = act.__name__

    def __get__(self, method: Method | None, owner: type) -> Any:
        return self if method is None else Step(method, self.name, self.place, self.act)


@lru_cache(maxsize=256)
def _hints_of(act: Acting) -> Mapping[str, Any]:
    """The types of an act's arguments and of what it returns, resolved."""
    return ranges.resolved(act)


@lru_cache(maxsize=256)
def _parameters_of(act: Acting) -> Sequence[str]:
    """The names of an act's arguments."""
    return tuple(inspect.signature(act).parameters)


@lru_cache(maxsize=256)
def _kinds_of(act: Acting) -> Kinds:
    """What an act reads, sends and remembers by its hints."""
    names, hints = _parameters_of(act), _hints_of(act)
    node, inbox = (hints.get(names[i]) if len(names) > i else None for i in (1, 2))
    return Kinds(_inner(inbox, Message), _sent(hints.get("return")), _inner(node, State))


def at_server(act: Callable[[Any, Any, Any], Any]) -> Any:
    """A step acted by the server."""
    return _Acted(Place.SERVER, act)


def at_clients(act: Callable[[Any, Any, Any], Any]) -> Any:
    """A step acted by every client that is awake."""
    return _Acted(Place.CLIENTS, act)


@dataclass(frozen=True)
class Method:
    """A frozen dataclass of hyper-parameters and a plan of steps.

    `scored` says whose models are evaluated; `presets` holds named sets of values; a method that
    `distils` makes its clients' virtual sets itself; one that `needs_public` data cannot do
    without `node.public`; one that `moves_inputs` makes examples by gradients with respect to them.
    """

    scored: ClassVar[Place] = Place.SERVER
    distils: ClassVar[bool] = False
    needs_public: ClassVar[bool] = False
    moves_inputs: ClassVar[bool] = False
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __new__(cls, *values: Any, **named: Any) -> Self:
        known = [field.name for field in fields(cls) if field.init]
        strange = [name for name in named if name not in known]
        if strange:
            lines = [f"{cls.__name__}: {unknown('option', name, known)}" for name in strange]
            raise BadValue(undecorated(cls) or lines)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if line := undecorated(type(self)):
            raise BadValue(line)
        wrong = ranges.faults(self) + list(self.faults())
        if not isinstance(self.scored, Place):
            wrong.append(f"scored = {self.scored!r}: must be Place.SERVER or Place.CLIENTS")
        if wrong:
            raise BadValue([f"{type(self).__name__}: {line}" for line in wrong])
        check_protocol(self)

    def faults(self) -> Sequence[str]:
        """What is wrong with the values together; a line each."""
        return ()

    def unfit(self, server: Model, models: Mapping[NodeId, Model]) -> Sequence[str]:
        """What is wrong with the parties' networks for this method; a line each."""
        return ()

    def unheard(self, graph: Mapping[NodeId, Sequence[NodeId]]) -> Sequence[str]:
        """What is wrong with who hears whom among the clients for this method; a line each."""
        return ()

    @property
    def one_network(self) -> bool:
        """Whether server and clients must have the same network: where the server's is scored.

        A method that averages weights and scores clients says True; one that scores a server
        whose network is another than its clients' says False.
        """
        return self.scored is Place.SERVER

    @property
    def scores_own(self) -> bool:
        """Whether clients' models are scored beside the server's, each on its own test set."""
        return False

    @property
    def sends_examples(self) -> bool:
        """Whether training examples are shown to others, which the contract then allows."""
        return False

    @property
    def begins_with_examples(self) -> bool:
        """Whether images that are sent began as training examples, and may still show them."""
        return False

    @property
    def holds(self) -> Sequence[type[Record]]:
        """The kinds of record that fields hinted `Message` or `State` may hold, and no others."""
        return ()

    def before(self) -> Sequence[Step]:
        """Steps before the first round, played by all."""
        return ()

    def each_round(self) -> Sequence[Step]:
        """The steps of a round."""
        return ()

    def after(self) -> Sequence[Step]:
        """Steps after the last round, played by all."""
        return ()

    def server_state(self, server: Node[Any]) -> State | None:
        """What the server remembers at the start."""
        return None

    def client_state(self, client: Node[Any]) -> State | None:
        """What a client remembers the first time it acts."""
        return None

    # What arrives.

    def wrong(self, node: Node[Any], sender: NodeId, message: Message) -> str | None:
        """Why a node cannot use what a sender says, as in "sent labels of float32"; or None.

        Asked before a message is delivered. The node is the one who would read it, as others know
        it: with its network and what is public, without memory and data. By default the hints of
        the message are asked (see `core.content`), with `axes` and `layout`.
        """
        return content.wrong(
            message,
            self.axes(node, sender),
            lambda field: self.layout(node, sender, message, field),
        )

    def axes(self, node: Node[Any], sender: NodeId) -> Mapping[str, Length]:
        """The lengths of the axes that hints name by these words."""
        model = node.model
        return {"class": model.classes, "input": tuple(model.shape), "public": len(node.public)}

    def layout(self, node: Node[Any], sender: NodeId, message: Message, field: str) -> Layout:
        """Names, shapes and types of the tensors in a field of weights of a message."""
        return content.layout(self.network_for(node, node.id if sender == SERVER else sender))

    def network_for(self, node: Node[Any], who: NodeId) -> Model:
        """The network whose weights a party sends and hears; for the server, the one it keeps."""
        return node.server_model if who == SERVER else node.models.get(who, node.model)

    def scored_state(self, server: Node[Any]) -> Scored | None:
        """What `predict` needs of the server's memory: all that goes to those who hold tests.

        By default its weights alone. A method whose `predict` needs more returns a subclass of
        `Scored` with further fields, and hints that very class.
        """
        return None if server.state is None else Scored(self._kept_weights(server))

    @property
    def scored_kind(self) -> type[Scored]:
        """The kind of record that `scored_state` returns, as its hint says."""
        hint = _hints_of(type(self).scored_state).get("return")
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        return next((o for o in options if isinstance(o, type) and issubclass(o, Scored)), Scored)

    def predict(self, node: Node[Any], x: Tensor) -> Tensor:
        """[example, class], logits of the model that a node holds, each by its example alone.

        A client's node has its whole memory; the server's has what `scored_state` returns.
        """
        return node.model(self._kept_weights(node), x)

    def _kept_weights(self, node: Node[Any]) -> Weights:
        weights: Weights | None = getattr(node.state, "weights", None)
        if weights is None:
            kept = (
                "nothing" if node.state is None else f"{type(node.state).__name__} without weights"
            )
            first = "server_state" if node.id == SERVER else "client_state"
            raise ProtocolError(
                f"{type(self).__name__} is scored by the model that {node.id} keeps, which "
                f"remembers {kept}; let {first} and the steps there keep `weights`, write "
                "`predict`, or say with `scored` whose models are scored"
            )
        return weights

    def pictures(self, node: Node[Any]) -> Mapping[str, Pictured]:
        """Sets of images that a node holds, by name, for the pictures of a run.

        What is sent is said by messages, see `Message.pictures`; what the server can make, by
        `imagined`.
        """
        return {}

    def imagined(self, server: Node[Any], per_class: int) -> Pictured | None:
        """Images that the server can make of each class and their labels, for pictures."""
        return None


def undecorated(kind: type[Method]) -> str | None:
    """A line where a class has values of its own that nobody can set, for want of a decorator."""
    for each in kind.__mro__:
        if not issubclass(each, Method) or "__dataclass_fields__" in vars(each):
            continue
        named = inspect.get_annotations(each).items()
        lost = [name for name, hint in named if "ClassVar" not in str(hint)]
        if lost:
            return (
                f"{each.__name__}: {lost[0]} is no value of the method yet; write "
                "@dataclass(frozen=True) above the class"
            )
    return None


def steps_of(method: Method) -> list[Step]:
    """All steps of a method, in the order of their first acts."""
    return [*method.before(), *method.each_round(), *method.after()]


def in_turn(steps: Sequence[Step], earlier: Sequence[Step] = ()) -> list[Step]:
    """Steps that are played one after another, each with how often it came before in its round.

    What a step draws depends on that too. `earlier` are those that were listed before in the round.
    """
    seen = Counter(step.name for step in earlier)
    found = []
    for step in steps:
        found.append(replace(step, again=seen[step.name]) if seen[step.name] else step)
        seen[step.name] += 1
    return found


def plan_of(method: Method, round: int, rounds: int) -> list[list[Step]]:
    """The steps of a round by parts: before the first one (round 0), of it, after the last."""
    if not round:
        return [in_turn(method.before())]
    each = method.each_round()
    last = [in_turn(method.after(), each)] if round == rounds else []
    return [in_turn(each), *last]


def memory_of(method: Method, place: Place) -> type[State] | None:
    """What a party remembers, as the hints of the method's steps say."""
    found = [s.remembers for s in steps_of(method) if s.place is place and s.remembers]
    # A step taken over from another method may hint that method's smaller memory.
    return max(found, key=lambda memory: len(memory.__mro__), default=None)


def check_protocol(method: Method) -> None:
    """Each step reads what the step before it sends; the first of a part reads nothing."""
    parts = {"before": method.before(), "each round": method.each_round(), "after": method.after()}
    if not any(parts.values()):
        raise ProtocolError(
            f"{type(method).__name__} has no steps; each_round returns them in their order, e.g. "
            "[self.broadcast, self.update, self.aggregate]"
        )
    names = [kind.__name__ for kind in method.holds]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ProtocolError(
            f"{type(method).__name__} holds two kinds of record called {twice[0]}; by their names "
            "they are told apart on the wire, so give each its own"
        )
    for part, steps in parts.items():
        for step in steps:
            _check_signature(step)
            if step.name in RESERVED:
                raise ProtocolError(
                    f"{step.title}: {step.name} is what {RESERVED[step.name]} is called in logs "
                    "and draws; give the step another name"
                )
        if steps and steps[0].reads is not None:
            raise ProtocolError(
                f"{steps[0].title} reads {steps[0].reads.__name__}, but it is the first step "
                f"{part} and nothing is delivered to it"
            )
        for earlier, later in pairwise(steps):
            if later.reads is None:
                continue
            if earlier.sends is None or not issubclass(earlier.sends, later.reads):
                sent = earlier.sends.__name__ if earlier.sends else "nothing"
                raise ProtocolError(
                    f"{later.title} reads {later.reads.__name__}, "
                    f"but the step before it, {earlier.name}, sends {sent}"
                )
    for place in Place:
        _check_memories(method, place)


def _check_memories(method: Method, place: Place) -> None:
    """The steps of a place hint one memory, or kinds that it is: by that a checkpoint is read."""
    whole = memory_of(method, place) or State
    steps = [step for step in steps_of(method) if step.place is place and step.remembers]
    owner = next((step for step in steps if step.remembers is whole), None)
    for step in steps:
        if owner is not None and not issubclass(whole, step.remembers or State):
            one, other = whole.__name__, (step.remembers or State).__name__
            raise ProtocolError(
                f"{owner.title} remembers {one}, {step.title} {other}: a party has one memory; "
                f"let the kind that holds more inherit from the other, e.g. class {other}({one})"
            )


def _check_signature(step: Step) -> None:
    if not isinstance(step, Step):
        name = getattr(step, "__qualname__", repr(step))
        raise ProtocolError(f"{name} is not a step: mark it @at_server or @at_clients")
    names = _parameters_of(step.act)
    if len(names) != 3 or not {*names[1:], "return"} <= step._hints.keys():
        raise ProtocolError(
            f"{step.title} must be written (self, node: Node[...], inbox: Inbox[...]) -> Message, "
            "with every hint: hints are the wire format"
        )
    for kind in filter(None, step.hinted):
        ranges.hints(kind)  # what a record holds is known before a run, too
    sent = step._hints["return"]
    if step.sends is None and sent is not NoneType and sent is not None:
        raise ProtocolError(f"{step.title} returns {sent!r}, which is not a Message or None")
