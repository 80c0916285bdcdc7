"""Sites over zenoh on this machine: who is let in, who is not, and who comes back."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zenoh", reason="needs fedstill[sites]")
pytest.importorskip("cryptography", reason="needs fedstill[sites]")

from fedstill.core.errors import SiteError
from fedstill.deploy.folder import host_of
from fedstill.sites import certificates, zenoh
from fedstill.sites.certificates import Authority
from fedstill.sites.credentials import Credentials
from fedstill.sites.exchange import Silence
from fedstill.sites.zenoh import COORDINATOR, Calls
from parties import Proxy, joined, trusting
from ports import free_port

RUN = "trial-1"
SITES = ["north", "south"]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return certificates.make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def line(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority
) -> Iterator[tuple[Calls, str, Path]]:
    """A coordinator, its address, and a folder for sites."""
    folder, address = tmp_path_factory.mktemp("line"), f"127.0.0.1:{free_port()}"
    own = trusting(joined(folder / "coordinator", authority, COORDINATOR), authority)
    settings = zenoh.of_coordinator(own, RUN, address, SITES, most=1 << 20)
    calls = Calls(zenoh.opened(settings), RUN, SITES, lost=0.5)
    yield calls, address, folder
    calls.close()


@contextmanager
def answering(
    own: Credentials, address: str, answer: Any = lambda data: b"ok " + data, name: str = ""
) -> Iterator[list[str]]:
    """A site that answers in a thread, under its own name or another's; why it was not let in."""
    done, opened = threading.Event(), threading.Event()
    refused: list[str] = []

    def serving() -> None:
        settings = zenoh.of_site(own, RUN, address)
        settings["connect"] |= {"timeout_ms": 500}  # one that is not let in gives up
        if name:  # whoever lies about the name does not restrain itself either
            settings["access_control"] = {"enabled": False}
        try:
            session = zenoh.opened(settings)
        except SiteError as error:
            refused.append(str(error))
            return
        finally:
            opened.set()
        try:
            zenoh.serve(session, RUN, name or own.name, answer, done.is_set)
        finally:
            session.close()

    thread = threading.Thread(target=serving, daemon=True)
    thread.start()
    opened.wait(10)
    try:
        yield refused
    finally:
        done.set()
        thread.join(10)


def asked(calls: Calls, site: str = "north", data: bytes = b"hello", seconds: float = 2.0) -> Any:
    return calls.ask({site: data}, seconds)[site]


def unheard(calls: Calls, site: str) -> bool:
    """Whether nobody comes under this name within a second, and nobody answers."""
    return calls.here.wait_for([site], 1.0) == {site} and isinstance(asked(calls, site), Silence)


def test_a_site_on_the_roster_is_heard_and_its_absence_is_noticed(
    line: Any, authority: Authority
) -> None:
    calls, address, folder = line
    own = trusting(joined(folder / "north", authority, "north"), authority)
    with answering(own, address):
        assert calls.here.wait_for(["north"], 10) == set()
        assert asked(calls) == b"ok hello"
    assert asked(calls, seconds=5) == Silence("its connection is lost")


def test_a_site_that_is_there_twice_is_asked_nothing_until_one_of_them_has_ended(
    line: Any, authority: Authority, tmp_path: Path
) -> None:
    calls, address, _ = line
    own = trusting(joined(tmp_path / "north", authority, "north"), authority)
    asking = Calls(calls.session, RUN, ["north"], lost=0.5, lingering=1.0)
    worked_on: list[bytes] = []

    def counted(data: bytes) -> bytes:
        worked_on.append(data)
        return b"ok"

    with answering(own, address, counted):
        assert asking.here.wait_for(["north"], 10) == set()
        with answering(own, address, counted):  # such as a copy of its folder on another machine
            assert wait_until(lambda: asking.here.doubled("north", 60) is None)
            assert asked(asking, data=b"both", seconds=20) == Silence(zenoh.TWICE)
            assert worked_on == []
        assert wait_until(lambda: not asking.here.doubled("north", 0.0))  # its end is noticed
        assert asked(asking, data=b"one", seconds=20) == b"ok"
        assert worked_on == [b"one"]
    # One who was killed and is back at once is not taken for two.
    with answering(own, address, counted):
        assert asked(asking, data=b"back", seconds=20) == b"ok"


def wait_until(true: Any, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.02)
    return bool(true())


@pytest.mark.parametrize("trusted", ["its own", "ours"])
def test_a_certificate_of_a_foreign_authority_is_not_let_in(
    line: Any, authority: Authority, tmp_path: Path, trusted: str
) -> None:
    calls, address, _ = line
    foreign = certificates.make_authority(tmp_path / "ca")
    own = joined(tmp_path / "north", foreign, "north")
    trusting(own, foreign if trusted == "its own" else authority)
    with answering(own, address):
        assert unheard(calls, "north")
    if trusted == "ours":
        (wrong,) = certificates.faults(own)
        assert "was not signed by the authority" in wrong
    true = trusting(joined(tmp_path / "true", authority, "north"), authority)
    with answering(true, address):  # the same folder of settings with the true certificate
        assert calls.here.wait_for(["north"], 10) == set()
        assert asked(calls) == b"ok hello"


def test_a_name_that_is_not_on_the_roster_is_not_heard(
    line: Any, authority: Authority, tmp_path: Path
) -> None:
    calls, address, _ = line
    own = trusting(joined(tmp_path / "west", authority, "west"), authority)
    strange = Calls(calls.session, RUN, ["west"], lost=0.5)
    with answering(own, address):
        assert unheard(strange, "west")
    known = trusting(joined(tmp_path / "south", authority, "south"), authority)
    with answering(known, address):
        assert calls.here.wait_for(["south"], 10) == set()
        assert asked(calls, "south") == b"ok hello"


def test_a_member_that_speaks_in_anothers_name_is_not_heard(
    line: Any, authority: Authority, tmp_path: Path
) -> None:
    calls, address, _ = line
    own = trusting(joined(tmp_path / "south", authority, "south"), authority)
    with answering(own, address, lambda data: b"forged", name="north"):
        assert unheard(calls, "north")
    with answering(own, address):
        assert calls.here.wait_for(["south"], 10) == set()
        assert asked(calls, "south") == b"ok hello"


def test_an_expired_certificate_is_not_let_in_and_the_site_is_told_why(
    line: Any, authority: Authority, tmp_path: Path
) -> None:
    calls, address, _ = line
    own = trusting(joined(tmp_path / "north", authority, "north", days=-1), authority)
    with answering(own, address):
        assert unheard(calls, "north")
    (wrong,) = certificates.faults(own)
    assert "has expired" in wrong and "the clock here says" in wrong
    own.certificate.write_bytes(
        certificates.signed(authority, (tmp_path / "north" / "north.csr").read_bytes(), "north")
    )
    assert certificates.faults(own) == []
    with answering(own, address):
        assert calls.here.wait_for(["north"], 10) == set()
        assert asked(calls) == b"ok hello"


def test_a_message_beyond_the_limit_never_arrives_and_the_line_lives_on(
    line: Any, authority: Authority, tmp_path: Path
) -> None:
    calls, address, _ = line
    own = trusting(joined(tmp_path / "north", authority, "north"), authority)
    with answering(own, address, lambda data: bytes(2 << 20) if data == b"much" else b"little"):
        assert calls.here.wait_for(["north"], 10) == set()
        assert asked(calls, data=b"much", seconds=1) == Silence("no answer within 1 s")
        assert asked(calls, data=b"more") == b"little"


def test_the_same_question_is_worked_on_once_and_all_who_asked_hear_the_answer(
    line: Any, authority: Authority, tmp_path: Path
) -> None:
    calls, address, _ = line
    own = trusting(joined(tmp_path / "north", authority, "north"), authority)
    times: list[float] = []

    def slow(data: bytes) -> bytes:
        times.append(time.monotonic())
        time.sleep(0.5)
        return b"once"

    with answering(own, address, slow):
        assert calls.here.wait_for(["north"], 10) == set()
        threads = [threading.Thread(target=asked, args=(calls,)) for _ in range(1)]
        for thread in threads:
            thread.start()
        assert asked(calls) == b"once"
        for thread in threads:
            thread.join()
    assert len(times) == 1


def test_questions_that_nobody_waits_for_do_not_pile_up(
    line: Any, authority: Authority, tmp_path: Path
) -> None:
    calls, address, _ = line
    own = trusting(joined(tmp_path / "north", authority, "north"), authority)
    worked_on: list[bytes] = []
    free = threading.Event()

    def slow(data: bytes) -> bytes:
        worked_on.append(data)
        free.wait(20)
        return b"ok"

    with answering(own, address, slow):
        assert calls.here.wait_for(["north"], 10) == set()
        for number in range(30):
            assert calls._question("north", b"%d" % number, 0.05).answer(0.05) is None
        free.set()
        assert asked(calls, data=b"last", seconds=20) == b"ok"
    # A site that was late is in time again at once: only the newest may have been begun meanwhile.
    assert worked_on in ([b"0", b"last"], [b"0", b"29", b"last"])


def test_an_answer_that_comes_too_late_is_there_when_it_is_asked_for_again(
    line: Any, authority: Authority, tmp_path: Path
) -> None:
    calls, address, _ = line
    own = trusting(joined(tmp_path / "north", authority, "north"), authority)
    known: dict[bytes, bytes] = {}

    def slow(data: bytes) -> bytes:
        if data not in known:
            time.sleep(1.0)
            known[data] = b"done " + data
        return known[data]

    with answering(own, address, slow):
        assert calls.here.wait_for(["north"], 10) == set()
        assert asked(calls, seconds=0.2) == Silence("no answer within 0.2 s")
        assert asked(calls, seconds=20) == b"done hello"
    assert len(known) == 1


def test_a_link_that_is_cut_for_a_while_loses_nothing(
    line: Any, authority: Authority, tmp_path: Path
) -> None:
    calls, address, _ = line
    patient = Calls(calls.session, RUN, ["north"], lost=60)
    own = trusting(joined(tmp_path / "north", authority, "north"), authority)
    with Proxy(address) as proxy, answering(own, proxy.address):
        assert patient.here.wait_for(["north"], 10) == set()
        assert asked(patient) == b"ok hello"
        proxy.cut()
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.append(asked(patient, seconds=60)))
        asking.start()
        asking.join(1.0)
        assert asking.is_alive() and found == []  # nobody answers while the link is cut
        proxy.mend()
        asking.join(60)
        assert found == [b"ok hello"]


def test_a_message_that_takes_long_to_send_arrives_and_keeps_nobody_else_waiting(
    authority: Authority, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    own = trusting(joined(tmp_path / "coordinator", authority, COORDINATOR), authority)
    settings = zenoh.of_coordinator(own, RUN, address, SITES)
    settings["transport"]["link"]["tls"]["so_sndbuf"] = 1 << 16  # else the system takes it all
    calls = Calls(zenoh.opened(settings), RUN, SITES, lost=60)
    north, south = (trusting(joined(tmp_path / n, authority, n), authority) for n in SITES)
    with (
        closing(calls),
        Proxy(address, rate=150_000) as slow,
        answering(north, slow.address, lambda data: b"%d" % len(data)),
        answering(south, address, lambda data: b"%d" % len(data)),
    ):
        assert calls.here.wait_for(SITES, 20) == set()
        found: list[Any] = []
        large = bytes(1_200_000)  # eight seconds, longer than zenoh waits if it is not told to
        asking = threading.Thread(target=lambda: found.append(asked(calls, data=large, seconds=60)))
        asking.start()
        time.sleep(1.0)
        assert asked(calls, "south", large, 5) == b"1200000" and found == []
        asking.join(60)
        assert found == [b"1200000"]


def test_questions_to_one_who_takes_none_do_not_pile_up(
    line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, _, _ = line
    asking = Calls(calls.session, RUN, SITES, lost=60)
    taken, begun = threading.Event(), []

    class Untaken:
        over = False

        def answer(self, seconds: float) -> bytes | None:
            return b"ok"

    def question(site: str, data: bytes, seconds: float) -> Untaken:
        begun.append(data)
        taken.wait(60)
        return Untaken()

    monkeypatch.setattr(asking, "_question", question)
    try:
        for number in range(4):
            said = asked(asking, data=b"%d" % number, seconds=0.2)
            assert isinstance(said, Silence) and said.reason.startswith("no answer within 0.2 s")
        assert said.reason.endswith(": what came before is not sent yet")
        assert begun == [b"0"]
        south: list[Any] = []
        other = threading.Thread(target=lambda: south.append(asked(asking, "south", b"x", 20)))
        other.start()
    finally:
        taken.set()
    other.join(20)
    assert south == [b"ok"] and asked(asking, data=b"then", seconds=20) == b"ok"
    assert begun == [b"0", b"x", b"then"]


STOPPED = """
import sys
from pathlib import Path
from fedstill.sites import zenoh
from fedstill.sites.credentials import Credentials
from fedstill.sites.exchange import Stopped
own, stopped = Credentials(Path(sys.argv[1]), zenoh.COORDINATOR), []
settings = zenoh.of_coordinator(own, sys.argv[3], sys.argv[2], ["north"])
settings["transport"]["link"]["tls"]["so_sndbuf"] = 1 << 16
session = zenoh.opened(settings)
calls = zenoh.Calls(session, sys.argv[3], ["north"], lost=60, stopped=lambda: bool(stopped))
calls.here.wait_for(["north"], 60)
stopped.append(True)
try:
    calls.ask({"north": bytes(3_000_000)}, 600)
except Stopped:
    calls.close()
    print("stopped", flush=True)
"""


def test_a_coordinator_that_is_stopped_while_it_sends_does_not_wait_for_that(
    authority: Authority, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    own = trusting(joined(tmp_path / "coordinator", authority, COORDINATOR), authority)
    north = trusting(joined(tmp_path / "north", authority, "north"), authority)
    arguments = [sys.executable, "-c", STOPPED, str(own.folder), address, RUN]
    with (
        Proxy(address, rate=20_000) as slow,  # 150 seconds
        subprocess.Popen(arguments, stdout=subprocess.PIPE, env=dict(os.environ)) as process,
    ):
        try:
            assert wait_until(lambda: listens(address), 60)
            with answering(north, slow.address):
                assert process.stdout is not None and process.stdout.read() == b"stopped\n"
                assert process.wait(60) == 0
        finally:
            process.kill()


def listens(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def test_who_takes_nothing_is_waited_for_no_longer_than_the_deadline(
    line: Any, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, _, _ = line
    free = threading.Event()
    monkeypatch.setattr(calls, "_question", lambda site, data, seconds: free.wait(30))
    try:
        began = time.monotonic()
        assert asked(calls, "south", seconds=0.5) == Silence("no answer within 0.5 s")
        assert time.monotonic() - began < 10
    finally:
        free.set()


def test_one_who_has_been_away_for_long_is_not_waited_for_again(
    line: Any, authority: Authority, tmp_path: Path
) -> None:
    calls, address, _ = line
    patient = Calls(calls.session, RUN, ["north"], lost=1.0)
    own = trusting(joined(tmp_path / "north", authority, "north"), authority)
    with answering(own, address):
        assert patient.here.wait_for(["north"], 10) == set()
    assert asked(patient, seconds=20) == Silence("its connection is lost")
    began = time.monotonic()
    assert asked(patient, seconds=20) == Silence("its connection is lost")
    assert time.monotonic() - began < 1.0
    with answering(own, address):
        assert patient.here.wait_for(["north"], 10) == set()
        assert asked(patient, seconds=20) == b"ok hello"


def test_sites_reach_a_coordinator_at_an_address_of_ipv6(
    authority: Authority, tmp_path: Path
) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            address = f"[::1]:{probe.getsockname()[1]}"
    except OSError as error:
        pytest.skip(f"needs IPv6: {error}")
    hosts = [host_of(address)]
    own = trusting(joined(tmp_path / "c", authority, COORDINATOR, hosts=hosts), authority)
    assert certificates.faults(own, "::1") == certificates.faults(own, "0::1") == []
    calls = Calls(zenoh.opened(zenoh.of_coordinator(own, RUN, address, SITES)), RUN, SITES, lost=5)
    site = trusting(joined(tmp_path / "north", authority, "north"), authority)
    with closing(calls), answering(site, address):
        assert calls.here.wait_for(["north"], 20) == set()
        assert asked(calls) == b"ok hello"


def test_a_port_in_use_is_said_as_such(line: Any) -> None:
    _, address, folder = line
    settings = zenoh.of_coordinator(
        Credentials(folder / "coordinator", COORDINATOR), RUN, address, SITES
    )
    with pytest.raises(SiteError, match=r"in use by another program"):
        zenoh.opened(settings)


PROCESS = """
import sys
from pathlib import Path
from fedstill.sites import zenoh
from fedstill.sites.credentials import Credentials
own = Credentials(Path(sys.argv[1]), "north")
session = zenoh.opened(zenoh.of_site(own, sys.argv[3], sys.argv[2]))
print("connected", flush=True)
zenoh.serve(session, sys.argv[3], "north", lambda data: sys.argv[4].encode(), lambda: False)
"""


def test_a_killed_site_is_lost_and_heard_again_when_it_is_back(
    line: Any, authority: Authority, tmp_path: Path
) -> None:
    calls, address, _ = line
    own = trusting(joined(tmp_path / "north", authority, "north"), authority)
    for word in ("first", "second"):
        arguments = [sys.executable, "-c", PROCESS, str(own.folder), address, RUN, word]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=dict(os.environ)) as site:
            try:
                assert site.stdout is not None and b"connected" in site.stdout.readline()
                assert calls.here.wait_for(["north"], 20) == set()
                assert asked(calls, seconds=10) == word.encode()
            finally:
                site.kill()
        assert asked(calls, seconds=20) == Silence("its connection is lost")


def test_certificates_say_what_is_wrong_with_them(authority: Authority, tmp_path: Path) -> None:
    own = Credentials(tmp_path, "north")
    assert [line.split(" is missing")[0] for line in certificates.faults(own)] == [
        str(own.authority), str(own.key), str(own.certificate)
    ]  # fmt: skip
    trusting(joined(tmp_path, authority, "north"), authority)
    assert certificates.faults(own) == []
    assert certificates.faults(own, "127.0.0.1") == []
    (wrong,) = certificates.faults(own, "10.0.0.1")
    assert "not for the address 10.0.0.1" in wrong
    assert own.key.stat().st_mode & 0o077 == 0
    other = trusting(joined(tmp_path / "other", authority, "north"), authority)
    own.certificate.write_bytes(other.certificate.read_bytes())
    (wrong,) = certificates.faults(own)
    assert f"does not belong to {own.key}" in wrong
    with pytest.raises(SiteError, match=r"the request is of north, but a certificate for south"):
        certificates.signed(authority, (tmp_path / "north.csr").read_bytes(), "south")
    with pytest.raises(SiteError, match=r"cannot be read"):
        certificates.signed(authority, b"nothing", "south")


def test_a_clock_that_is_off_is_said_with_both_dates(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = trusting(joined(tmp_path, authority, "north"), authority)
    assert certificates.faults(own) == []

    class Early(datetime):
        @classmethod
        def now(cls, zone: Any = None) -> datetime:
            return datetime(2020, 1, 1, tzinfo=zone)

    monkeypatch.setattr(certificates, "datetime", Early)
    (wrong,) = certificates.faults(own)
    assert "is not valid yet" in wrong and "the clock here says 2020-01-01" in wrong
    assert "set the clock" in wrong
