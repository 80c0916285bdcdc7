"""What an exchange with sites costs: nothing, 1 MB and 50 MB there and back, over mutual TLS.

    python benchmarks/sites_overhead.py --sites 3

Each site is a process of its own that sends back what it got; nothing is computed.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedstill.sites import certificates, zenoh
from fedstill.sites.credentials import Credentials
from fedstill.sites.zenoh import COORDINATOR, Calls

RUN = "overhead"
SIZES = {"empty": (1, 50), "1 MB": (1_000_000, 20), "50 MB": (50_000_000, 3)}  # bytes, times


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def joined(folder: Path, authority: certificates.Authority, name: str) -> Credentials:
    """A party with a key and a certificate."""
    folder.mkdir(parents=True)
    asked = certificates.request(folder, name).read_bytes()
    own = Credentials(folder, name)
    own.certificate.write_bytes(certificates.signed(authority, asked, name, ["127.0.0.1"]))
    pem = authority.certificate.public_bytes(certificates.serialization.Encoding.PEM)
    own.authority.write_bytes(pem)
    return own


def echo(folder: str, name: str, address: str) -> None:
    """A site that sends back what it got."""
    session = zenoh.opened(zenoh.of_site(Credentials(Path(folder), name), RUN, address))
    zenoh.serve(session, RUN, name, lambda data: data, lambda: False)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--sites", type=int, default=3)
    asked.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    asked.add_argument("--echo", nargs=3, metavar=("FOLDER", "NAME", "ADDRESS"))
    given = asked.parse_args()
    if given.echo:
        echo(*given.echo)
        return
    folder, address = Path(tempfile.mkdtemp(prefix="fedstill-")), f"127.0.0.1:{free_port()}"
    authority = certificates.make_authority(folder)
    names = [f"site-{place}" for place in range(given.sites)]
    own = joined(folder / COORDINATOR, authority, COORDINATOR)
    calls = Calls(zenoh.opened(zenoh.of_coordinator(own, RUN, address, names)), RUN, names, lost=60)
    processes = []
    for name in names:
        site = joined(folder / name, authority, name)
        words = [sys.executable, __file__, "--echo", str(site.folder), name, address]
        processes.append(subprocess.Popen(words, env=dict(os.environ)))
    try:
        missing = calls.here.wait_for(names, 900)
        assert not missing, missing
        for title in given.sizes:
            size, times = SIZES[title]
            data, seconds = os.urandom(size), []
            for _ in range(times):
                began = time.perf_counter()
                answers = calls.ask(dict.fromkeys(names, data), 600)
                seconds.append(time.perf_counter() - began)
                assert all(answer == data for answer in answers.values())
            median, low, high = statistics.median(seconds), min(seconds), max(seconds)
            print(f"{given.sites} sites, {title}: {median:.4f} s ({low:.4f} to {high:.4f})")
    finally:
        for process in processes:
            process.kill()
            process.wait()
        calls.close()


if __name__ == "__main__":
    main()
