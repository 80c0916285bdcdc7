"""The post: delivery and counting; what a message means is not its business."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from fedstill.core.algebra import not_finite
from fedstill.core.errors import BadMessage
from fedstill.core.method import Place, Step
from fedstill.core.node import SERVER, Addressed, Inbox
from fedstill.core.records import Direction, Message, NodeId
from fedstill.engines.engine import Outcome
from fedstill.federation.experiment import BadMessages, Channel
from fedstill.logbook.events import Note, Traffic
from fedstill.logbook.writer import Logbook


class Hearing(Protocol):
    """Which clients hear which."""

    def hearers(self, speaker: NodeId, awake: Sequence[NodeId]) -> Sequence[NodeId]: ...


class Post:
    """Delivers the messages of one step to those who act in the next, and counts them."""

    def __init__(
        self,
        hearing: Hearing,
        logbook: Logbook,
        *,
        channels: Sequence[Channel] = (),
        bad_messages: BadMessages = "stop",
    ):
        self.hearing = hearing
        self.logbook = logbook
        self.channels = channels
        self.bad_messages = bad_messages
        self.floats = 0  # said so far
        self.bytes = 0

    def deliver(
        self,
        round: int,
        step: Step,
        following: Step | None,
        outcomes: Mapping[NodeId, Outcome],
        awake: Sequence[NodeId],
    ) -> dict[NodeId, Inbox[Any]]:
        """The inboxes of the following step."""
        mail: dict[NodeId, dict[NodeId, Message]] = {}
        for sender, outcome in sorted(outcomes.items()):
            for message, hearers in self._spoken(step, following, sender, outcome, awake):
                carried = self._carried(message, outcome.bad, sender, round, step)
                if carried is None:
                    continue
                if list(hearers) != [sender]:  # what a server says to itself does not travel
                    self._count(round, step, sender, carried, hearers)
                for hearer in hearers:
                    mail.setdefault(hearer, {})[sender] = carried
        return {hearer: Inbox(messages) for hearer, messages in mail.items()}

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

    def _carried(
        self, message: Message, bad: Sequence[str] | None, sender: NodeId, round: int, step: Step
    ) -> Message | None:
        """The message after the channels, or None if it is lost or left out.

        `bad` is what an engine found in it; what a channel changed is looked at again.
        """
        for channel in self.channels:
            carried = channel.carry(message, sender, round, step.name)
            if carried is None:
                self.logbook.write(Note(round, "lost", sender, f"{step.name}: lost on the way"))
                return None
            if carried is not message:
                message, bad = carried, None
        if bad is None:
            bad = not_finite(message)
        if not bad:
            return message
        text = (
            f"{sender} sent {type(message).__name__} with NaN or infinite values in "
            f"{', '.join(bad[:5])} ({step.title}, round {round})"
        )
        if sender == SERVER:  # without it nobody can go on
            raise BadMessage(f"{text}. Lower the learning rate")
        self._leave_out(round, sender, text, "Lower the learning rate, or set")
        return None

    def leave_out(self, round: int, step: Step, sender: NodeId, why: str) -> None:
        """A message that a step could not use: as the run says, it stops or goes on without it."""
        self._leave_out(round, sender, f"{sender} {why} ({step.title}, round {round})", "Set")

    def _leave_out(self, round: int, sender: NodeId, text: str, advice: str) -> None:
        if self.bad_messages == "stop":
            raise BadMessage(
                f'{text}. {advice} federation.bad_messages = "leave_out" to go on without such '
                "messages"
            )
        self.logbook.write(Note(round, "left out", sender, text))

    def _count(
        self,
        round: int,
        step: Step,
        sender: NodeId,
        message: Message,
        hearers: Sequence[NodeId],
    ) -> None:
        direction: Direction = "up" if SERVER in hearers else "peer"
        if sender == SERVER:
            direction = "down"
        sizes, heard = message.bytes(), len(hearers)
        for name, floats in message.floats().items():
            self.logbook.write(
                Traffic(round, step.name, sender, direction, name, floats, sizes[name], heard)
            )
            self.floats += floats
            self.bytes += sizes[name]


def _by_message(
    addressed: Addressed[Any], reached: Sequence[NodeId]
) -> list[tuple[Message, list[NodeId]]]:
    """Each message once, with all its hearers: the same object for several is said once."""
    groups: dict[int, tuple[Message, list[NodeId]]] = {}
    for hearer, message in sorted(addressed.items()):
        if hearer in reached:
            groups.setdefault(id(message), (message, []))[1].append(hearer)
    return list(groups.values())
