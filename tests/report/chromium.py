"""A real browser for tests, spoken to through pipes by the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
     if (found := shutil.which(name))),
    None,
)  # fmt: skip


class Page:
    """One tab: what it shows, what it complains of, and what it asks for."""

    def __init__(self, write: int, read: int):
        self._write, self._read = write, read
        self._kept, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """A command and its answer."""
        self._number += 1
        order: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._write, json.dumps(order).encode() + b"\0")
        while True:
            message = self._next(60)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]  # type: ignore[no-any-return]
            self._heard(message)

    def open(self, url: str) -> float:
        """Go to an address; the seconds until the page says that it is ready."""
        self.complaints, self.requests = [], []
        began = time.perf_counter()
        self.send("Page.navigate", url=url)
        self.wait("document.body && document.body.dataset.ready === 'true'")
        return time.perf_counter() - began

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        """Until a condition holds in the page."""
        until = time.perf_counter() + seconds
        while not self.js(f"Boolean({condition})"):
            assert time.perf_counter() < until, f"never came true: {condition}"
            time.sleep(0.02)

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=phone)  # fmt: skip

    def scheme(self, name: str, media: str = "") -> None:
        """Light or dark, on a screen or in print."""
        wanted = {"name": "prefers-color-scheme", "value": name}
        self.send("Emulation.setEmulatedMedia", media=media, features=[wanted])

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path

    def printed(self) -> bytes:
        """The page as a PDF file."""
        answer = self.send("Page.printToPDF", printBackground=False, preferCSSPageSize=True)
        return base64.b64decode(answer["data"])

    def cpu_seconds(self) -> float:
        """The work of all processes of the browser so far."""
        session, self._session = self._session, ""
        try:
            found = self.send("SystemInfo.getProcessInfo")["processInfo"]
        finally:
            self._session = session
        return sum(float(each["cpuTime"]) for each in found)

    def _next(self, seconds: float) -> dict[str, Any]:
        until = time.perf_counter() + seconds
        while b"\0" not in self._kept:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.perf_counter()))
            assert ready, "the browser does not answer"
            found = os.read(self._read, 1 << 20)
            assert found, "the browser has ended"
            self._kept += found
        line, _, self._kept = self._kept.partition(b"\0")
        return json.loads(line)  # type: ignore[no-any-return]

    def _heard(self, event: dict[str, Any]) -> None:
        name, told = event.get("method"), event.get("params", {})
        if name == "Runtime.exceptionThrown":
            self.complaints.append(str(told["exceptionDetails"]))
        elif name == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.complaints.append(str(told["args"]))
        elif name == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])
        elif name == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])


@contextmanager
def browser() -> Iterator[Page]:
    """A headless browser with an empty profile, ended and removed afterwards."""
    assert PROGRAM is not None
    here, theirs = os.pipe(), os.pipe()  # what the browser reads, what it writes
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        program = [
            *("bash", "-c", f'exec "$@" 3<&{here[0]} 4>&{theirs[1]}', "bash", PROGRAM),
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-extensions", "--disable-dev-shm-usage", "--hide-scrollbars"),
            *("--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"),
        ]
        process = subprocess.Popen(
            program, pass_fds=(here[0], theirs[1]),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(here[0])
        os.close(theirs[1])
        try:
            yield Page(here[1], theirs[0])
        finally:
            process.terminate()
            process.wait(20)
            os.close(here[1])
            os.close(theirs[0])
