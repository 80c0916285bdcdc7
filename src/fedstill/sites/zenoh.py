"""Sites and peers over zenoh with mutual TLS; the only file that imports it.

Who may say and ask what is bound to the name in a certificate by access lists, at every party for
itself: a site is asked by the coordinator alone, and answers in its own name alone. Nothing is
found by itself: no scouting, no gossip, no shared memory, only TLS to addresses that were given.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, Queue
from typing import Any

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
AGAIN = 30.0  # seconds after which a question is asked again
MOST_WAITING = 64  # questions for one word that is not said yet
MOST_WORDS = 4096  # such words
MOST_ASKERS = 4  # of the same question there; those before have hung up

_SPOKEN = ["reply", "declare_queryable", "liveliness_token"]
_ASKED = ["query", "liveliness_query", "declare_liveliness_subscriber"]

Session = zenoh.Session
Table = dict[str, Any]
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

    Of what this peer says, each may ask for what is meant for all, and for itself, alone.
    """
    base, me = root(run), own.name
    allowed: dict[NodeId, list[Rule]] = {}
    for peer in others:
        there = [f"{base}/{peer}/{part}/**" for part in (ALIVE, "all", f"for/{me}")]
        here = [f"{base}/{me}/{part}/**" for part in (ALIVE, "all", f"for/{peer}")]
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
            "endpoints": [f"tls/{address}" for address in connect],
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
    """Hang up."""
    session.close()  # type: ignore[no-untyped-call]


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
        self._pool = ThreadPoolExecutor(max(1, len(sites)))

    def ask(
        self, requests: Mapping[NodeId, bytes], seconds: float
    ) -> dict[NodeId, bytes | Silence]:
        """All sites at once."""
        until = time.monotonic() + seconds
        asked = {
            site: self._pool.submit(self._one, site, data, until, seconds)
            for site, data in requests.items()
        }
        return {site: answer.result() for site, answer in asked.items()}

    def _one(self, site: NodeId, data: bytes, until: float, seconds: float) -> bytes | Silence:
        while (left := until - time.monotonic()) > 0:
            doubled = self.here.doubled(site, self.lingering)
            if doubled:
                return Silence(TWICE)
            if doubled is None:
                time.sleep(0.1)  # the one before may just have ended
                continue
            answer = self._asked_once(site, data, min(left, AGAIN))
            if answer is not None:
                return answer
            if self.stopped():
                raise Stopped(IN_A_STEP)
            if self.here.lost(site, self.lost):
                return Silence("its connection is lost", gone=True)
            time.sleep(0.1)  # a question to nobody comes back at once
        return Silence(f"no answer within {seconds:g} s")

    def _asked_once(self, site: NodeId, data: bytes, seconds: float) -> bytes | None:
        key = f"{root(self.run)}/{site}/ask"
        replies = self.session.get(
            key,
            payload=data,
            target=zenoh.QueryTarget.ALL,
            consolidation=zenoh.ConsolidationMode.NONE,
            timeout=max(0.05, seconds),
        )
        for reply in replies:
            if reply.ok is not None and str(reply.ok.key_expr) == key:
                return reply.ok.payload.to_bytes()
        return None

    def close(self) -> None:
        """Hang up."""
        self._pool.shutdown(wait=False, cancel_futures=True)
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
        self.present = Here(session, run, others)
        self._said: dict[str, bytes] = {}
        self._waiting: dict[str, list[zenoh.Query]] = {}
        self._kept_from = 0  # the first round after the beginning whose words are kept
        self._lock = threading.Lock()
        self._queryable = session.declare_queryable(f"{root(run)}/{me}/**", self._asked)
        self.id = secrets.token_hex(8)
        self._token = _sign_of_life(session, run, me, self.id)

    def say(self, name: str, data: bytes, hearer: NodeId | None = None) -> None:
        """From now on this is the answer to whoever may ask for the name."""
        place = f"all/{name}" if hearer is None else f"for/{hearer}/{name}"
        with self._lock:
            self._said[place] = data
            waiting = self._waiting.pop(place, [])
        for query in waiting:
            reply(query, data)

    def fetch(self, peer: NodeId, name: str, seconds: float) -> bytes | None:
        """What a peer says under a name; None when it has not come in so many seconds.

        One who is not connected is asked once.
        """
        place = f"for/{self.me}/{name}" if "/" in name else f"all/{name}"
        key, until = f"{root(self.run)}/{peer}/{place}", time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            replies = self.session.get(
                key,
                target=zenoh.QueryTarget.ALL,
                consolidation=zenoh.ConsolidationMode.NONE,
                timeout=max(0.05, left),
            )
            for found in replies:
                if found.ok is not None and str(found.ok.key_expr) == key:
                    return found.ok.payload.to_bytes()
            time.sleep(min(0.1, seconds))  # a question to nobody comes back at once
            if peer not in self.present:
                return None
        return None

    def forget(self, before: int) -> None:
        """Words of rounds before this one are no longer asked for; those of round 0 are."""
        with self._lock:
            self._kept_from = before
            for place in [*self._said]:
                if self._forgotten(place):
                    del self._said[place]
            late = [place for place in self._waiting if self._forgotten(place)]
            queries = [query for place in late for query in self._waiting.pop(place)]
        for query in queries:
            reply(query, b"")

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

    def _asked(self, query: zenoh.Query) -> None:
        if query.payload is not None:  # nobody needs one to ask for a word, and it would be kept
            query.drop()  # type: ignore[no-untyped-call]
            return
        place = str(query.key_expr).removeprefix(f"{root(self.run)}/{self.me}/")
        with self._lock:
            data = b"" if self._forgotten(place) else self._said.get(place)
            if data is None:
                line = self._waiting.setdefault(place, [])
                line.append(query)
                del line[:-MOST_WAITING]
                if len(self._waiting) > MOST_WORDS:  # who asked for the oldest asks again
                    del self._waiting[next(iter(self._waiting))]
                return
        reply(query, data)

    def _forgotten(self, place: str) -> bool:
        """Whether a word is of a round whose words are no longer kept."""
        match place.split("/"):
            case ["for", _, round, _] if round.isdecimal() and len(round) < 10:
                return 0 < int(round) < self._kept_from
        return False


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
            for query in queries:
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
