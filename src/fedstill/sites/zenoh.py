"""Sites and peers over zenoh with mutual TLS; the only file that imports it.

Who may say and ask what is bound to the name in a certificate by access lists, at every party for
itself: a site is asked by the coordinator alone, and answers in its own name alone. Nothing is
found by itself: no scouting, no gossip, no shared memory, only TLS to addresses that were given.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from queue import Empty, Queue
from typing import Any, TypeVar

import zenoh

from fedstill.core.errors import SiteError
from fedstill.core.records import NodeId
from fedstill.sites.credentials import Credentials
from fedstill.sites.exchange import IN_A_STEP, TWICE, Silence, Stopped

COORDINATOR = "coordinator"  # the name in its certificate
MOST_BYTES = 1 << 30  # of a message, before any of it is decoded
PATIENCE_MS = 5000  # for a site's call to be taken; it calls again
ALIVE = "alive"  # under this name each process of a party has a sign of life of its own
LINGERING = 15.0  # seconds for which that of a process may last which is gone; its line has ten
TOGETHER = 5.0  # seconds between two signs of life whose order is not known
MOST_SIGNS = 16  # of one party that are kept
AGAIN = 30.0  # seconds after which a question is asked again, if it was sent quickly
LOOK = 0.5  # seconds between two looks at whether somebody is still there
SENDING = 86400.0  # seconds that sending a message may take; a dead line is noticed by its silence
SENDING_US = round(SENDING * 1e6)
MOST_WAITING = 64  # questions for one word that is not said yet
MOST_WORDS = 256  # such words that one peer asks for
MOST_ASKERS = 4  # of the same question there; those before have hung up
MOST_SENDING = 8  # words on their way to one peer; it may not take what it asks for
LONGEST_PLACE = 200  # characters of the name of a word

_SPOKEN = ["reply", "declare_queryable", "liveliness_token"]
_ASKED = ["query", "liveliness_query", "declare_liveliness_subscriber"]

T = TypeVar("T")
Session = zenoh.Session
Table = dict[str, Any]
Waiting = dict[str, list[zenoh.Query]]  # for words that are not said yet, by their names
Rule = tuple[str, list[str], list[str]]  # the flow, what may pass, and under which keys


def of_coordinator(
    own: Credentials, run: str, address: str, sites: Iterable[NodeId], most: int = MOST_BYTES
) -> Table:
    """Settings of a coordinator, which listens; each site may answer under its own name."""
    allowed = {
        site: [
            ("ingress", _SPOKEN, [f"{root(run)}/{site}/**"]),
            ("egress", _ASKED, [f"{root(run)}/{site}/**"]),
        ]
        for site in sites
    }
    return _settings(own, allowed, most, listen=address)


def of_site(own: Credentials, run: str, address: str, most: int = MOST_BYTES) -> Table:
    """Settings of a site, which calls the coordinator and is asked by it alone."""
    allowed = {
        COORDINATOR: [
            ("egress", _SPOKEN, [f"{root(run)}/{own.name}/**"]),
            ("ingress", _ASKED, [f"{root(run)}/{own.name}/**"]),
        ]
    }
    return _settings(own, allowed, most, connect=[address])


def of_peer(
    own: Credentials,
    run: str,
    listen: str | None,
    others: Mapping[NodeId, str | None],
    most: int = MOST_BYTES,
) -> Table:
    """Settings of a peer: each of the others speaks under its own name, and asks this one.

    Of what this peer says, each may ask for what is meant for itself alone; so it is known who
    asks, and nobody keeps it from answering others.
    """
    base, me = root(run), own.name
    allowed: dict[NodeId, list[Rule]] = {}
    for peer in others:
        there = [f"{base}/{peer}/{part}/**" for part in (ALIVE, f"for/{me}")]
        here = [f"{base}/{me}/{part}/**" for part in (ALIVE, f"for/{peer}")]
        allowed[peer] = [
            ("ingress", _SPOKEN, [f"{base}/{peer}/**"]),
            ("ingress", _ASKED, here),
            ("egress", _SPOKEN, [f"{base}/{me}/**"]),
            ("egress", _ASKED, there),
        ]
    called = [address for address in others.values() if address]
    return _settings(own, allowed, most, listen=listen, connect=called, peer=True)


def _settings(
    own: Credentials,
    allowed: Mapping[NodeId, Sequence[Rule]],
    most: int,
    *,
    listen: str | None = None,
    connect: Sequence[str] = (),
    peer: bool = False,
) -> Table:
    """Only TLS both ways, only named addresses, and to each certificate its own keys alone."""
    rules = {
        who: [
            {
                "id": f"{who} {place}", "permission": "allow", "flows": [flow],
                "messages": messages, "key_exprs": keys,
            }
            for place, (flow, messages, keys) in enumerate(lines)
        ]
        for who, lines in allowed.items()
    }  # fmt: skip
    key, certificate = str(own.key), str(own.certificate)
    return {
        "mode": "peer" if peer or listen else "client",
        "listen": {
            "endpoints": [f"tls/{listen}"] if listen else [],
            "exit_on_failure": True,
        },
        "connect": {
            # Zenoh looks in the certificate for all that stands before the last colon.
            "endpoints": [f"tls/{re.sub(r'[][]', '', address)}" for address in connect],
            "exit_on_failure": False,
            "timeout_ms": -1 if peer or listen else PATIENCE_MS,  # -1: again and again
            "retry": {
                "period_init_ms": 200,
                "period_max_ms": 2000,
                "period_increase_factor": 2,
            },
        },
        "scouting": {"multicast": {"enabled": False}, "gossip": {"enabled": False}},
        "adminspace": {"enabled": False},
        "transport": {
            "shared_memory": {"enabled": False},
            "unicast": {"max_sessions": 4 * len(allowed) + 16},
            "link": {
                "protocols": ["tls"],
                "rx": {"max_message_size": most},
                # Of a whole message; without it the line is closed after five seconds.
                "tx": {
                    "queue": {"congestion_control": {"block": {"wait_before_close": SENDING_US}}}
                },
                "tls": {
                    "root_ca_certificate": str(own.authority),
                    "enable_mtls": True,
                    "listen_private_key": key,
                    "listen_certificate": certificate,
                    "connect_private_key": key,
                    "connect_certificate": certificate,
                    "verify_name_on_connect": True,
                    "close_link_on_expiration": True,
                },
            },
        },
        "access_control": {
            "enabled": True,
            "default_permission": "deny",
            "subjects": [{"id": who, "cert_common_names": [who]} for who in allowed],
            "rules": [rule for lines in rules.values() for rule in lines],
            "policies": [
                {"rules": [rule["id"] for rule in lines], "subjects": [who]}
                for who, lines in rules.items()
            ],
        },
    }


def opened(settings: Table) -> zenoh.Session:
    """A session with these settings; what it refuses is said in words."""
    try:
        return zenoh.open(zenoh.Config.from_json5(json.dumps(settings)))
    except zenoh.ZError as error:
        listening = ", ".join(settings["listen"]["endpoints"])
        if "in use" in str(error):
            raise SiteError(
                f"{listening} is in use by another program; end that one, or take another port"
            ) from error
        if listening:
            raise SiteError(f"cannot listen at {listening}: {_reason(error)}") from error
        calling = ", ".join(settings["connect"]["endpoints"])
        raise SiteError(
            f"{calling} does not take the call. Is the coordinator running, and were both "
            "certificates signed by the same authority?"
        ) from error


def closed(session: Session) -> None:
    """Hang up, also on whoever has not yet taken all that was being sent."""
    with suppress(zenoh.ZError):
        session.close()  # type: ignore[no-untyped-call]


def _begun(action: Callable[..., T], *arguments: Any) -> Future[T]:
    """Something done in a thread of its own, which keeps neither others nor an end waiting.

    Sending lasts as long as the receiver takes; the threads of a pool would be waited for.
    """
    made: Future[T] = Future()

    def acting() -> None:
        try:
            made.set_result(action(*arguments))
        except BaseException as error:  # told to whoever asks for the result
            made.set_exception(error)

    threading.Thread(target=acting, daemon=True).start()
    return made


def _reason(error: zenoh.ZError) -> str:
    """The first line of what zenoh says, without the places in its code."""
    return str(error).splitlines()[0].split(" at /")[0].strip()


def root(run: str) -> str:
    """Under which key all of a run is said."""
    return f"fedstill/{run}"


class Here:
    """Who is connected now, by the sign of life that everybody keeps up."""

    def __init__(self, session: zenoh.Session, run: str, names: Iterable[NodeId]):
        self._session, self._run = session, run
        self._names: set[NodeId] = set()
        self._signs: dict[NodeId, dict[str, float]] = {}  # of life, by process, and since when
        self._left: dict[NodeId, float] = {}  # when each was there last
        self._doubled: dict[NodeId, float] = {}  # since when somebody is there twice
        self._began = time.monotonic()
        self._changed = threading.Condition()
        self._watching = [
            session.liveliness().declare_subscriber(
                f"{root(run)}/{name}/{ALIVE}/**", self._heard, history=True
            )
            for name in names
        ]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def names(self) -> set[NodeId]:
        """All who are connected."""
        return set(self._names)

    def lost(self, name: NodeId, seconds: float) -> bool:
        """Whether somebody has been away for longer; it is called once more before this is said."""
        if name in self._names:
            return False
        if time.monotonic() - self._left.get(name, self._began) <= seconds:
            return False
        self._ask([name], time.monotonic() + 0.5)
        return name not in self._names

    def doubled(self, name: NodeId, seconds: float) -> bool | None:
        """Whether two processes are connected in a name for longer; None while it is not known.

        They are called once more before this is said: an end may have been missed.
        """
        since = self._doubled.get(name)
        if since is None:
            return False
        if time.monotonic() - since <= seconds:
            return None
        known = self._ask([name], time.monotonic() + 0.5)
        with self._changed:
            ended = {*self._signs.get(name, {})} - known if known else set()
        for key in ended:
            self._noted(key, there=False)
        return name in self._doubled

    def later(self, name: NodeId) -> set[str]:
        """The processes in a name but the one that came first.

        Of those that came at about the same time, as they do for one who has just begun to look,
        the first by their names counts as that one, so that all who look agree.
        """
        with self._changed:
            since = {key.split("/")[-1]: at for key, at in self._signs.get(name, {}).items()}
        began = min(since.values(), default=0.0)
        first = min((id for id, at in since.items() if at - began <= TOGETHER), default="")
        return {*since} - {first}

    def wait_for(
        self,
        names: Iterable[NodeId],
        seconds: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> set[NodeId]:
        """Wait until all are connected; returns who is still missing after so many seconds."""
        wanted, until = set(names), time.monotonic() + seconds
        while (missing := wanted - self._names) and not stopped():
            left = until - time.monotonic()
            if left <= 0:
                break
            with self._changed:
                heard = self._changed.wait_for(lambda: wanted <= self._names, min(left, 0.5))
            if not heard:
                self._ask(missing, until)
        return wanted - self._names

    def _ask(self, names: Iterable[NodeId], until: float) -> set[str]:
        """Ask who is there: a sign of life that was given before the line stood may be missed."""
        found: set[str] = set()
        for name in names:
            seconds = min(0.5, until - time.monotonic())
            if seconds <= 0:
                break
            key = f"{root(self._run)}/{name}/{ALIVE}"
            for reply in self._session.liveliness().get(f"{key}/**", timeout=max(0.05, seconds)):
                if reply.ok is not None and str(reply.ok.key_expr).startswith(key):
                    found.add(str(reply.ok.key_expr))
                    self._noted(str(reply.ok.key_expr), there=True)
        return found

    def _heard(self, sample: zenoh.Sample) -> None:
        self._noted(str(sample.key_expr), there=sample.kind == zenoh.SampleKind.PUT)

    def _noted(self, key: str, *, there: bool) -> None:
        """A sign of life, or its end."""
        name = key.split("/")[2]
        with self._changed:
            signs = self._signs.setdefault(name, {})
            if there:
                if len(signs) < MOST_SIGNS:
                    signs.setdefault(key, time.monotonic())
                self._names.add(name)
            else:
                signs.pop(key, None)
                if not signs:
                    self._names.discard(name)
                    self._left[name] = time.monotonic()
            if len(signs) > 1:
                self._doubled.setdefault(name, time.monotonic())
            else:
                self._doubled.pop(name, None)
            self._changed.notify_all()


class Question:
    """A question that was asked; its answer may come as long as the line stands.

    Sending it lasts until all of it is on its way, and a large answer may be on its way for long.
    """

    def __init__(
        self,
        session: Session,
        key: str,
        seconds: float,
        *,
        data: bytes | None = None,
        priority: zenoh.Priority = zenoh.Priority.DATA,
    ):
        self._key, self._came = key, Queue[bytes | None]()
        self._full = False  # one answer is kept, however many are sent
        self.over = False  # whether nobody is left who could answer
        session.get(
            key,
            zenoh.handlers.Callback(self._heard, lambda: self._came.put(None), indirect=False),
            payload=data,
            target=zenoh.QueryTarget.ALL,
            consolidation=zenoh.ConsolidationMode.NONE,
            timeout=max(0.05, seconds),
            priority=priority,
        )

    def answer(self, seconds: float) -> bytes | None:
        """What came in so many seconds, or until nobody is left."""
        if self.over:
            return None
        try:
            found = self._came.get(timeout=max(0.0, seconds))
        except Empty:
            return None
        self.over = found is None
        return found

    def _heard(self, reply: zenoh.Reply) -> None:
        if self._full or reply.ok is None or str(reply.ok.key_expr) != self._key:
            return
        self._full = True
        self._came.put(reply.ok.payload.to_bytes())


def _answered(asked: Future[Question], seconds: float) -> tuple[bytes | None, bool]:
    """The answer to a question that may still be being sent, and whether none can come any more."""
    until = time.monotonic() + seconds
    try:
        question = asked.result(seconds)
    except TimeoutError:
        return None, False
    return question.answer(until - time.monotonic()), question.over


class Calls:
    """The coordinator's exchange: the same question again until it is answered, or too late."""

    def __init__(
        self,
        session: zenoh.Session,
        run: str,
        sites: Sequence[NodeId],
        *,
        lost: float,
        stopped: Callable[[], bool] = lambda: False,
        lingering: float = LINGERING,
    ):
        self.session, self.run, self.sites = session, run, sites
        self.lost, self.stopped, self.lingering = lost, stopped, lingering
        self.here = Here(session, run, sites)
        self._asked: dict[NodeId, list[Future[bytes | Silence]]] = {}  # what each still is asked

    def ask(
        self, requests: Mapping[NodeId, bytes], seconds: float
    ) -> dict[NodeId, bytes | Silence]:
        """All sites at once."""
        until = time.monotonic() + seconds
        asked = {}
        for site, data in requests.items():
            before = [each for each in self._asked.get(site, []) if not each.done()]
            asked[site] = _begun(self._next, site, data, until, seconds, before)
            self._asked[site] = [*before, asked[site]]
        return {site: self._waited(answer, until, seconds) for site, answer in asked.items()}

    def _next(
        self, site: NodeId, data: bytes, until: float, seconds: float,
        before: Sequence[Future[bytes | Silence]],
    ) -> bytes | Silence:  # fmt: skip
        """Ask once what was asked before is sent, so that nothing piles up for who takes nothing.

        It would be sent behind that in any case.
        """
        if wait(before, until - time.monotonic()).not_done:
            return Silence(f"no answer within {seconds:g} s: what came before is not sent yet")
        return self._one(site, data, until, seconds)

    def _waited(
        self, answer: Future[bytes | Silence], until: float, seconds: float
    ) -> bytes | Silence:
        """An answer; a question that is still being sent when time is up is given up."""
        while True:
            try:
                return answer.result(LOOK)
            except TimeoutError:
                if self.stopped():
                    raise Stopped(IN_A_STEP) from None
                if time.monotonic() > until + 4 * LOOK:  # who waits at the other end is in time
                    return Silence(f"no answer within {seconds:g} s")

    def _one(self, site: NodeId, data: bytes, until: float, seconds: float) -> bytes | Silence:
        question: Question | None = None
        again, pause = 0.0, AGAIN
        while (left := until - time.monotonic()) > 0:
            doubled = self.here.doubled(site, self.lingering)
            if doubled:
                return Silence(TWICE)
            if doubled is None:
                time.sleep(0.1)  # the one before may just have ended
                continue
            if question is None:
                began = time.monotonic()
                question = self._question(site, data, left)
                # What was sent slowly is answered slowly, and asking again would make it slower.
                pause = max(pause, 4 * (time.monotonic() - began))
                again = time.monotonic() + pause
            answer = question.answer(min(left, LOOK))
            if answer is not None:
                return answer
            if self.stopped():
                raise Stopped(IN_A_STEP)
            if self.here.lost(site, self.lost):
                return Silence("its connection is lost", gone=True)
            if question.over:
                question = None
                time.sleep(0.1)  # a question to nobody comes back at once
            elif time.monotonic() > again:
                question, pause = None, 2 * pause
        return Silence(f"no answer within {seconds:g} s")

    def _question(self, site: NodeId, data: bytes, seconds: float) -> Question:
        return Question(self.session, f"{root(self.run)}/{site}/ask", seconds, data=data)

    def close(self) -> None:
        """Hang up."""
        closed(self.session)


class ZenohMesh:
    """What a peer has said lies here by name; others ask for it, and wait until it is there."""

    def __init__(
        self,
        session: Session,
        run: str,
        me: NodeId,
        others: Sequence[NodeId],
        *,
        lingering: float = LINGERING,
    ):
        self.session, self.run, self.me, self.lingering = session, run, me, lingering
        self.others = [*others]
        self.present = Here(session, run, others)
        self._said: dict[str, bytes] = {}
        # Whose answers may be on their way, or which wait behind a large word to be sent.
        self._open: dict[tuple[NodeId, str], Future[Question]] = {}
        self._waiting: dict[NodeId, Waiting] = {other: {} for other in others}
        self._shedding: dict[NodeId, list[zenoh.Query]] = {}  # that are to be hung up on
        self._kept_from = 0  # the first round after the beginning whose words are kept
        self._in_round = 0  # words of rounds before are not said any more
        self._sending: Counter[NodeId] = Counter()  # how many words are on their way to each
        self._lock = threading.Lock()
        # Each is heard in a thread of its own: whoever asks and takes no answer blocks that alone.
        self._queryables = [
            session.declare_queryable(
                f"{root(run)}/{me}/for/{other}/**", partial(self._asked, other)
            )
            for other in self.others
        ]
        self.id = secrets.token_hex(8)
        self._token = _sign_of_life(session, run, me, self.id)

    def say(self, name: str, data: bytes, hearer: NodeId | None = None) -> None:
        """From now on this is the answer to whoever may ask for the name."""
        for other in self.others if hearer is None else [hearer]:
            place = f"for/{other}/{name}"
            with self._lock:
                self._said[place] = data
                waiting = self._waiting.get(other, {}).pop(place, [])
            for query in reversed(waiting):  # for the newest somebody waits certainly
                if not self._replied(other, query, data):
                    self._shed(other, query)

    def fetch(self, peer: NodeId, name: str, seconds: float) -> bytes | None:
        """What a peer says under a name; None when it has not come in so many seconds.

        One who is not connected is asked once.
        """
        # A word for this peer alone may be large; where somebody is, all want to know soon.
        soon = zenoh.Priority.DATA if "/" in name else zenoh.Priority.DATA_HIGH
        place = f"for/{self.me}/{name}"
        key, until = f"{root(self.run)}/{peer}/{place}", time.monotonic() + seconds
        ask = partial(Question, self.session, key, SENDING, priority=soon)
        while (left := until - time.monotonic()) > 0:
            asked = self._open.pop((peer, place), None) or _begun(ask)
            answer, over = _answered(asked, left)
            if answer is not None:
                return answer
            if not over:
                self._open[peer, place] = asked
                return None
            time.sleep(min(0.1, seconds))  # a question to nobody comes back at once
            if peer not in self.present:
                return None
        return None

    def forget(self, before: int) -> None:
        """Words of rounds before this one are no longer asked for; those of round 0 are."""
        with self._lock:
            self._kept_from = before
            for place in [*self._said]:
                if 0 < _round_of(place) < before:
                    del self._said[place]
            for peer, place in [*self._open]:
                if 0 < _round_of(place) < before:
                    self._open.pop((peer, place), None)
        self._decline()

    def passed(self, round: int) -> None:
        """Of rounds before this one nothing is said any more."""
        with self._lock:
            self._in_round = round
        self._decline()

    def _decline(self) -> None:
        """Tell those who wait for words that will not come."""
        queries: list[tuple[NodeId, zenoh.Query]] = []
        with self._lock:
            for hearer, waiting in self._waiting.items():
                for place in [place for place in waiting if self._never(place)]:
                    queries += [(hearer, query) for query in reversed(waiting.pop(place))]
        for hearer, query in queries:
            if not self._replied(hearer, query, b""):
                self._shed(hearer, query)

    def here(self) -> set[NodeId]:
        """Who is connected."""
        return self.present.names()

    def lost(self, peer: NodeId, seconds: float) -> bool:
        """Whether a peer has not been connected for longer."""
        return self.present.lost(peer, seconds)

    def doubled(self, peer: NodeId) -> bool | None:
        """Whether two processes are connected in a peer's name; None while it is not known."""
        return self.present.doubled(peer, self.lingering)

    def later(self, peer: NodeId) -> set[str]:
        """The processes in a peer's name but the one that came first."""
        return self.present.later(peer)

    def close(self) -> None:
        """Hang up."""
        closed(self.session)

    def _replied(self, hearer: NodeId, query: zenoh.Query, data: bytes) -> bool:
        """Answer beside all else, unless too much is on its way to one who may not take it."""
        with self._lock:
            free = self._sending[hearer] < MOST_SENDING
            self._sending[hearer] += free
        if free:
            _begun(self._sent, hearer, query, data)
        return free

    def _sent(self, hearer: NodeId, query: zenoh.Query, data: bytes) -> None:
        try:
            reply(query, data)
        finally:
            with self._lock:
                self._sending[hearer] -= 1

    def _shed(self, hearer: NodeId, query: zenoh.Query) -> None:
        """Hang up on one who may take nothing, beside all else; it asks again."""
        with self._lock:
            line = self._shedding.setdefault(hearer, [])
            line.append(query)
            if len(line) > 1:
                return
        _begun(self._drained, hearer, line)

    def _drained(self, hearer: NodeId, line: list[zenoh.Query]) -> None:
        while line:
            with suppress(zenoh.ZError):
                line[0].drop()  # type: ignore[no-untyped-call]
            with self._lock:
                del line[0]
                if not line:
                    del self._shedding[hearer]

    def _asked(self, hearer: NodeId, query: zenoh.Query) -> None:
        """A question of one peer, in the thread for its questions: only that may be kept waiting.

        Hanging up takes as long as the hearer does, so it is done outside the lock.
        """
        place = str(query.key_expr).removeprefix(f"{root(self.run)}/{self.me}/")
        # Nobody needs more than a name to ask for a word, and what came with it would be kept.
        more = query.payload is not None or query.attachment is not None or str(query.parameters)
        if more or len(place) > LONGEST_PLACE:
            query.drop()  # type: ignore[no-untyped-call]
            return
        surplus: list[zenoh.Query] = []
        with self._lock:
            data = b"" if self._never(place) else self._said.get(place)
            if data is None:
                waiting = self._waiting[hearer]
                line = waiting.setdefault(place, [])
                line.append(query)
                surplus, line[:] = line[:-MOST_WAITING], line[-MOST_WAITING:]
                if len(waiting) > MOST_WORDS:  # who asked for the oldest asks again
                    surplus += waiting.pop(next(iter(waiting)))
        if data is not None and not self._replied(hearer, query, data):
            surplus = [query]
        for old in surplus:
            old.drop()  # type: ignore[no-untyped-call]

    def _never(self, place: str) -> bool:
        """Whether a word is not kept any more, or was not said while its round lasted."""
        round, said = _round_of(place), place in self._said
        return 0 < round < self._kept_from or (0 < round < self._in_round and not said)


def _round_of(place: str) -> int:
    """Of which round a word for one hearer is; 0 for one of no round, which is always kept."""
    match place.split("/"):
        case ["for", _, round, _] if round.isdecimal() and len(round) < 10:
            return int(round)
    return 0


def _sign_of_life(session: zenoh.Session, run: str, me: NodeId, id: str) -> zenoh.LivelinessToken:
    """What others see as long as this process is connected; another one in its name differs."""
    key = f"{root(run)}/{me}/{ALIVE}/{id}"
    return session.liveliness().declare_token(key)


def connected(session: zenoh.Session) -> bool:
    """Whether anybody is at the other end."""
    return bool([*session.info.routers_zid(), *session.info.peers_zid()])


def serve(
    session: zenoh.Session,
    run: str,
    me: NodeId,
    answer: Callable[[bytes], bytes],
    ended: Callable[[], bool],
) -> None:
    """Answer until the end: one question at a time, and whoever asks the same waits along.

    A coordinator has one question at a time. So of those that come while one is worked on only the
    newest is kept: for the others nobody waits any more, and a site that was late once would play
    them all before it is in time again.
    """
    work: Queue[tuple[str, bytes]] = Queue()
    waiting: dict[str, list[zenoh.Query]] = {}
    lock = threading.Lock()

    def asked(query: zenoh.Query) -> None:
        data = b"" if query.payload is None else query.payload.to_bytes()
        key = hashlib.sha256(data).hexdigest()
        with lock:
            if key not in waiting:
                with suppress(Empty):
                    given_up, _ = work.get_nowait()
                    for old in waiting.pop(given_up):
                        old.drop()  # type: ignore[no-untyped-call]
                work.put((key, data))
            line = waiting.setdefault(key, [])
            line.append(query)
            del line[:-MOST_ASKERS]

    queryable = session.declare_queryable(f"{root(run)}/{me}/ask", asked)
    token = _sign_of_life(session, run, me, secrets.token_hex(8))
    try:
        while not ended():
            try:
                key, data = work.get(timeout=0.2)
            except Empty:
                continue
            made = answer(data)
            with lock:
                queries = waiting.pop(key, [])
            for query in reversed(queries):  # for the newest somebody waits certainly
                reply(query, made)
    finally:
        with suppress(zenoh.ZError):
            token.undeclare()  # type: ignore[no-untyped-call]
            queryable.undeclare()  # type: ignore[no-untyped-call]


def reply(query: zenoh.Query, data: bytes) -> None:
    """Answer a question; whoever has gone meanwhile will ask again."""
    with suppress(zenoh.ZError):
        query.reply(query.key_expr, data)
        query.drop()  # type: ignore[no-untyped-call]
