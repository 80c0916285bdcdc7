"""Flower as a carrier of bytes: the coordinator's exchange over a Grid.

The only file that imports flwr, and only where a message is made. Who a node is follows from the
key with which it has signed itself in: it must be that of the certificate which the coordinator
gave to the site. Flower starts a process for every message, so what answers at a site is not the
ClientApp: that carries the bytes to the site's door and back (`sites.door`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedstill.core.errors import told
from fedstill.core.records import NodeId
from fedstill.sites.exchange import IN_A_STEP, Silence, Stopped

PART = "fedstill"  # the record in which bytes travel
KIND = "query.fedstill"  # the message type that the ClientApp answers
POLL = 0.25  # seconds between two looks for answers
LOOK = 3.0  # seconds between two looks at who is connected, and between two questions after a fault
LEAST = 60.0  # seconds for any answer: Flower itself takes ten of them, more on a busy machine
LOST = Silence("its SuperNode is not connected", gone=True)


def message(data: bytes, node: int, seconds: float) -> Any:
    """A question to a node that Flower forgets after so many seconds."""
    from flwr.app import ConfigRecord, Message, RecordDict

    content = RecordDict({PART: ConfigRecord({"data": data})})
    return Message(content, dst_node_id=node, message_type=KIND, ttl=seconds)


@dataclass
class _Question:
    """What one site was asked, and how that stands."""

    data: bytes
    id: str | None = None  # of the message on its way
    node: int = 0  # to which it went
    since: float | None = None  # when it first came back without an answer
    last: float = 0.0  # when it did so last
    fault: Silence = LOST

    def failed(self, fault: Silence, now: float) -> None:
        """It is to be asked again."""
        self.id, self.fault, self.last = None, fault, now
        self.since = now if self.since is None else self.since


@dataclass
class Nodes:
    """Asks the SuperNodes of a Grid; nobody but those whose keys are known is asked."""

    grid: Any
    keys: Mapping[NodeId, bytes]  # the public key of each site, as PEM
    lost: float  # seconds that a fault may last
    stopped: Callable[[], bool] = lambda: False
    poll: float = POLL
    look: float = LOOK
    least: float = LEAST
    write: Callable[[bytes, int, float], Any] = message
    _ids: dict[NodeId, int] = field(default_factory=dict)  # as seen at the last look
    _looked: float = float("-inf")

    @property
    def here(self) -> Nodes:
        """Who is connected, as a coordinator asks for it."""
        return self

    def names(self) -> set[NodeId]:
        """All on the roster who were connected at the last look."""
        return set(self._ids)

    def wait_for(
        self,
        names: Iterable[NodeId],
        seconds: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> set[NodeId]:
        """Wait until all are connected; returns who is still missing after so many seconds."""
        wanted, until = set(names), time.monotonic() + seconds
        while (missing := wanted - set(self._look())) and not stopped():
            if time.monotonic() >= until:
                break
            time.sleep(self.poll)
        return missing

    def ask(
        self, requests: Mapping[NodeId, bytes], seconds: float
    ) -> dict[NodeId, bytes | Silence]:
        """All at once; whoever fails or is away is asked again while its fault lasts no longer."""
        seconds = max(seconds, self.least)
        until = time.monotonic() + seconds
        open_ = {site: _Question(data) for site, data in requests.items()}
        found: dict[NodeId, bytes | Silence] = {}
        while open_ and not self.stopped() and (left := until - time.monotonic()) > 0:
            self._send(open_, left)
            self._take(open_, found)
            self._give_up(open_, found)
            if open_:
                time.sleep(min(self.poll, left))
        if open_ and self.stopped():
            raise Stopped(IN_A_STEP)
        late = Silence(f"no answer within {seconds:g} s")
        return {**found, **dict.fromkeys(open_, late)}

    def close(self) -> None:
        """The Grid is Flower's own."""

    def _send(self, open_: Mapping[NodeId, _Question], left: float) -> None:
        ids, now = self._look(), time.monotonic()
        due = {
            site: question
            for site, question in open_.items()
            if question.id is None and (question.since is None or now >= question.last + self.look)
        }
        away = [question for site, question in due.items() if site not in ids]
        for question in away:
            question.failed(LOST, now)
        due = {site: question for site, question in due.items() if site in ids}
        for site, question in due.items():
            question.node = ids[site]
        made = [self.write(question.data, question.node, left) for question in due.values()]
        taken = list(self.grid.push_messages(made) or ()) if made else []
        for place, question in enumerate(due.values()):
            question.id = taken[place] if place < len(taken) else None
            if question.id is None:
                question.failed(Silence("Flower did not take the message to it"), now)

    def _take(self, open_: dict[NodeId, _Question], found: dict[NodeId, bytes | Silence]) -> None:
        waiting = {question.id: site for site, question in open_.items() if question.id}
        if not waiting:
            return
        for reply in self.grid.pull_messages(list(waiting)) or ():
            site = waiting.pop(reply.metadata.reply_to_message_id, None)
            if site is None:
                continue
            answer = _opened(reply, open_[site].node)
            if isinstance(answer, Silence):
                open_[site].failed(answer, time.monotonic())
            else:
                found[site] = answer
                del open_[site]

    def _give_up(
        self, open_: dict[NodeId, _Question], found: dict[NodeId, bytes | Silence]
    ) -> None:
        """Only a question that came back is given up: one on its way may be under work."""
        for site, question in [*open_.items()]:
            if question.id is not None or question.since is None:
                continue
            if time.monotonic() - question.since > self.lost:
                found[site] = question.fault
                del open_[site]

    def _look(self) -> dict[NodeId, int]:
        now = time.monotonic()
        if now - self._looked >= self.look:
            sites = {key.strip(): site for site, key in self.keys.items()}
            known = {node.public_key.strip(): node.node_id for node in self.grid.get_nodes()}
            self._ids = {site: known[key] for key, site in sites.items() if key in known}
            self._looked = now
        return self._ids


def _opened(reply: Any, node: int) -> bytes | Silence:
    """The bytes of an answer; of one that is none, why."""
    if reply.has_error():
        return Silence(f"Flower error {reply.error.code}: {told(str(reply.error.reason))}")
    if reply.metadata.src_node_id != node:
        return Silence(f"node {reply.metadata.src_node_id} answered in its place")
    records = reply.content.config_records
    data = records[PART].get("data") if PART in records else None
    return data if isinstance(data, bytes) else Silence("its answer holds no bytes")
