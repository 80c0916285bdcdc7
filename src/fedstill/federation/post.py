"""The post: delivery and counting; what a message means is not its business."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeGuard

from fedstill.channels import Channel, received
from fedstill.channels.coded import Coded, unwrapped
from fedstill.core.algebra import not_finite
from fedstill.core.content import LARGEST, early_refusal, refusal, strange_numbers
from fedstill.core.errors import LONGEST, BadMessage, WireError, told
from fedstill.core.method import Method, Place, Step
from fedstill.core.node import SERVER, Addressed, Inbox, Node
from fedstill.core.records import Direction, Message, NodeId
from fedstill.engines.engine import Outcome
from fedstill.federation.experiment import BadMessages
from fedstill.federation.timeline import Parcel
from fedstill.logbook.events import Note, Traffic
from fedstill.logbook.writer import Logbook

SAID_BY = (
    "What its messages hold a method says by their hints, for weights by network_for, and by "
    "layout where a part of a network travels"
)

GROWTH = 8  # times a message's own size that the parts of one channel may take once decoded
SMALL = 1 << 20  # bytes of a message below which it counts as so large


class Hearing(Protocol):
    """Says who hears a speaker among those awake."""

    def hearers(self, speaker: NodeId, awake: Sequence[NodeId]) -> Sequence[NodeId]: ...


class Observer(Protocol):
    """Looks at every message that arrives, as its hearers read it."""

    def __call__(self, message: Message, sender: NodeId, round: int) -> None: ...


def toward(step: Step, following: Step | None) -> Direction | None:
    """Where the messages of a step travel; None where nobody hears them but the speaker."""
    if following is None:
        return None
    if step.place is Place.SERVER:
        return "down" if following.place is Place.CLIENTS else None
    return "up" if following.place is Place.SERVER else "peer"


def idle_channels(method: Method, channels: Sequence[Channel]) -> list[str]:
    """Of channels on ways where the method sends nothing, a line each."""
    parts = (method.before(), method.each_round(), method.after())
    pairs = [pair for steps in parts for pair in pairwise(steps) if pair[0].sends is not None]
    ways = {way for step, following in pairs if (way := toward(step, following)) is not None}
    name, told = type(method).__name__, ", ".join(f'"{way}"' for way in sorted(ways))
    advice = f"give it directions = [{told}], or leave it out" if ways else "leave it out"
    return [
        f"{type(channel).__name__} codes nothing: it acts {' and '.join(channel.directions)}, and "
        f"{name} sends {' and '.join(sorted(ways)) or 'nothing'}; {advice}"
        for channel in channels
        if not ways & {*channel.directions}
    ]


class Post:
    """Delivers the messages of one step to those who act in the next, and counts them.

    A message is counted in the form in which it travels, and read as its channels decode it. What
    cannot be used is not delivered: the method is asked about every message that travels, as
    `readers` knows the one who would read it.
    """

    def __init__(
        self,
        hearing: Hearing,
        logbook: Logbook,
        *,
        channels: Sequence[Channel] = (),
        bad_messages: BadMessages = "stop",
        observers: Sequence[Observer] = (),
        readers: Callable[[NodeId, int], Node[Any]] | None = None,
    ):
        self.hearing = hearing
        self.logbook = logbook
        self.channels = channels
        self.bad_messages = bad_messages
        self.observers = observers
        self.readers = readers
        self.floats = 0  # said so far
        self.bytes = 0

    def deliver(
        self,
        round: int,
        step: Step,
        following: Step | None,
        outcomes: Mapping[NodeId, Outcome],
        awake: Sequence[NodeId],
        read: Mapping[NodeId, Inbox[Any]] | None = None,
        late: Collection[tuple[NodeId, NodeId]] = (),
    ) -> dict[NodeId, Inbox[Any]]:
        """The inboxes of the following step; `read` are those of this one.

        What is `late` from a sender to a hearer is counted as said, and not heard.
        """
        mail: dict[NodeId, dict[NodeId, Message]] = {}
        known: dict[NodeId, Node[Any]] = {}  # those who were asked about a message
        direction = toward(step, following)
        for sender, outcome in sorted(outcomes.items()):
            if outcome.lost:
                self.logbook.write(Note(round, "lost", sender, f"{step.name}: lost on the way"))
            own = read.get(sender) if read and direction == "up" else None
            heard = None if own is None else own.get(SERVER)
            for message, reached in self._spoken(step, following, sender, outcome, awake):
                hearers = [h for h in reached if (sender, h) not in late] if late else reached
                if not self._good(message, outcome.bad, sender, round, step):
                    continue
                opened = message
                if direction is not None:
                    if self._announces(message, direction) and not self._expected(
                        message, sender, hearers, round, step, known
                    ):
                        continue
                    decoded = self._decoded(message, direction, heard, sender, round, step)
                    if decoded is None:
                        continue
                    opened = decoded
                    if not self._usable(opened, sender, hearers, round, step, known):
                        continue
                    self._count(round, step, sender, direction, message, hearers)
                for observe in self.observers:
                    observe(opened, sender, round)
                for hearer in hearers:
                    mail.setdefault(hearer, {})[sender] = opened
        return {hearer: Inbox(messages) for hearer, messages in mail.items()}

    def parcels(
        self,
        step: Step,
        following: Step | None,
        outcomes: Mapping[NodeId, Outcome],
        awake: Sequence[NodeId],
    ) -> list[Parcel]:
        """What is on its way to whom, in bytes."""
        if toward(step, following) is None:
            return []
        return [
            Parcel(sender, hearer, size)
            for sender, outcome in sorted(outcomes.items())
            for message, hearers in self._spoken(step, following, sender, outcome, awake)
            for size in [sum(message.bytes().values())]
            for hearer in hearers
        ]

    def _spoken(
        self,
        step: Step,
        following: Step | None,
        sender: NodeId,
        outcome: Outcome,
        awake: Sequence[NodeId],
    ) -> Iterator[tuple[Message, Sequence[NodeId]]]:
        """Each message that a sender leaves, with those who will hear it."""
        if outcome.message is None or following is None:
            return
        reached: Sequence[NodeId]
        if following.place is Place.SERVER:
            reached = [SERVER]
        elif step.place is Place.SERVER:
            reached = awake
        else:
            reached = [n for n in self.hearing.hearers(sender, awake) if n != SERVER]
        if isinstance(outcome.message, Addressed):
            yield from _by_message(outcome.message, reached)
        else:
            yield outcome.message, reached

    def _decoded(
        self, message: Message, direction: Direction, heard: Message | None, sender: NodeId,
        round: int, step: Step,
    ) -> Message | None:  # fmt: skip
        """The message as its hearers read it; None where it cannot be decoded or is not good."""
        try:
            decoded = received(self.channels, message, direction, heard)
            if isinstance(decoded, Coded):
                raise WireError("more channels coded it than stand on its way")
        except WireError as error:
            kind = type(unwrapped(message)[0]).__name__
            why = f"sent {kind} that cannot be decoded: {error}"
            if sender == SERVER:
                raise BadMessage(f"{sender} {why} ({step.title}, round {round})") from error
            self.leave_out(round, step, sender, why)
            return None
        if decoded is not message and not self._good(decoded, None, sender, round, step):
            return None
        return decoded

    def _good(
        self, message: Message, bad: Sequence[str] | None, sender: NodeId, round: int, step: Step
    ) -> bool:
        """Whether a message may be delivered; `bad` is what an engine found in it, if it looked."""
        if bad is None:
            bad = not_finite(message, LARGEST)
        if not bad:
            return True
        kind, why = type(unwrapped(message)[0]).__name__, strange_numbers(message, bad)
        text = f"{sender} sent {kind} {why} ({step.title}, round {round})"
        if sender == SERVER:  # without it nobody can go on
            raise BadMessage(f"{text}. Lower the learning rate")
        self._leave_out(round, sender, text, "Lower the learning rate, or set")
        return False

    def _announces(self, message: Message, direction: Direction) -> TypeGuard[Coded]:
        """Whether a message says of which shapes the one is that its hearers will read."""
        return isinstance(message, Coded) and shapes_kept(self.channels, direction)

    def _expected(
        self, message: Coded, sender: NodeId, hearers: Sequence[NodeId], round: int, step: Step,
        known: dict[NodeId, Node[Any]],
    ) -> bool:  # fmt: skip
        """Whether a coded message announces one that can be used.

        A few bytes can stand for a tensor that fills the memory, so the method is asked before
        anything is decoded.
        """
        if sender == SERVER:  # it speaks here, and to all
            return True
        why = unexpected(message, step.method, self._asked(hearers, round, known), sender)
        if why is None:
            return True
        self.leave_out(round, step, sender, why)
        return False

    def _usable(
        self, message: Message, sender: NodeId, hearers: Sequence[NodeId], round: int, step: Step,
        known: dict[NodeId, Node[Any]],
    ) -> bool:  # fmt: skip
        """Whether the method finds nothing wrong in a message."""
        asked = self._asked(hearers, round, known)
        said = (refusal(step.method, reader, sender, message, finite=True) for reader in asked)
        why = next((line for line in said if line is not None), None)
        if why is None:
            return True
        if sender == SERVER:
            raise BadMessage(f"{sender} {why} ({step.title}, round {round}). {SAID_BY}")
        self.leave_out(round, step, sender, why)
        return False

    def _asked(
        self, hearers: Sequence[NodeId], round: int, known: dict[NodeId, Node[Any]]
    ) -> list[Node[Any]]:
        """Who judges a message: the first hearer, and the first of those with any other network."""
        if self.readers is None or not hearers:
            return []
        first = self._reader(hearers[0], round, known)
        return [first, *(self._reader(other, round, known) for other in _unlike(first, hearers))]

    def _reader(self, hearer: NodeId, round: int, known: dict[NodeId, Node[Any]]) -> Node[Any]:
        assert self.readers is not None
        if hearer not in known:
            known[hearer] = self.readers(hearer, round)
        return known[hearer]

    def leave_out(self, round: int, step: Step, sender: NodeId, why: str) -> None:
        """A message that a step could not use: as the run says, it stops or goes on without it."""
        self._leave_out(round, sender, f"{sender} {why} ({step.title}, round {round})", "Set")

    def _leave_out(self, round: int, sender: NodeId, text: str, advice: str) -> None:
        text = told(text, 3 * LONGEST)  # the sender's own names may stand in it
        check_left_out(self.bad_messages, text, advice)
        self.logbook.write(Note(round, "left out", sender, text))

    def _count(
        self,
        round: int,
        step: Step,
        sender: NodeId,
        direction: Direction,
        message: Message,
        hearers: Sequence[NodeId],
    ) -> None:
        sizes, heard = message.bytes(), len(hearers)
        for name, floats in message.floats().items():
            self.logbook.write(
                Traffic(round, step.name, sender, direction, name, floats, sizes[name], heard)
            )
            self.floats += floats
            self.bytes += sizes[name]


def shapes_kept(channels: Sequence[Channel], direction: Direction) -> bool:
    """Whether a message has on this way the shapes that its hearers will read."""
    return all(channel.keeps_shapes for channel in channels if direction in channel.directions)


def unexpected(
    message: Message, method: Method, readers: Sequence[Node[Any]], sender: NodeId
) -> str | None:
    """Why a message, by what it announces where it is coded, is none that its readers can use."""
    whole = message.announced() if isinstance(message, Coded) else message
    said = (early_refusal(method, reader, sender, whole) for reader in readers)
    why = next((line for line in said if line is not None), None)
    return why or (_overgrown(message, whole) if isinstance(message, Coded) else None)


def check_left_out(bad_messages: BadMessages, text: str, advice: str = "Set") -> None:
    """Stop because of a message that cannot be used, unless such messages are left out."""
    if bad_messages == "stop":
        raise BadMessage(
            f'{text}. {advice} federation.bad_messages = "leave_out" to go on without such messages'
        )


def _overgrown(message: Coded, whole: Message) -> str | None:
    """Why what several channels coded would take far more memory on its way than at its end."""
    size, layers = sum(whole.bytes().values()), len(unwrapped(message)[1])
    most, needed = GROWTH * layers * max(size, SMALL), message.decoded_bytes()
    if needed <= most:
        return None
    kind = type(whole).__name__
    return f"sent {kind} of {size} bytes whose parts take {needed} once decoded; at most {most} may"


def _unlike(first: Node[Any], hearers: Sequence[NodeId]) -> list[NodeId]:
    """Of each network that is not the first hearer's, one who has it."""
    networks = {id(model := first.models.get(hearer)): (model, hearer) for hearer in hearers}
    if len(networks) < 2:
        return []
    found = {first.model: first.id}
    for model, hearer in networks.values():
        found.setdefault(first.model if model is None else model, hearer)
    return [hearer for hearer in found.values() if hearer != first.id]


def _by_message(
    addressed: Addressed[Any], reached: Sequence[NodeId]
) -> list[tuple[Message, list[NodeId]]]:
    """Each message once, with all its hearers: the same object for several is said once."""
    groups: dict[int, tuple[Message, list[NodeId]]] = {}
    for hearer, message in sorted(addressed.items()):
        if hearer in reached:
            groups.setdefault(id(message), (message, []))[1].append(hearer)
    return list(groups.values())
