"""A report that follows runs while they go on, served on this machine alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedstill.core.errors import FedstillError, RunFolderError
from fedstill.logbook.reader import DESCRIPTIONS
from fedstill.report.page.content import content, found_in
from fedstill.report.page.document import document

LOOPBACK = "127.0.0.1"
READ = ("metrics.csv", "messages.csv", "notes.csv", "summary.json", "privacy.csv")
BESIDE = ("audit.json", "shift.json")  # anywhere below the folders


class Watched:
    """Some folders as a page; read again only when a file in them has changed."""

    def __init__(self, folders: Sequence[Path], title: str | None = None):
        self.folders, self.title = list(folders), title
        self._lock = threading.Lock()
        self._seen: object = None
        self._values: dict[str, Any] = {}
        self.mark = ""
        self.values()

    def values(self) -> dict[str, Any]:
        """What the page holds now."""
        with self._lock:
            seen = self._state()
            if seen != self._seen:
                try:
                    self._values = content(found_in(self.folders), title=self.title)
                except RunFolderError as error:  # nothing has begun yet
                    self._values = _empty(self.folders, self.title, str(error))
                self._seen = seen
                self.mark = sha256(repr(seen).encode()).hexdigest()[:16]
            return self._values

    def _state(self) -> list[tuple[str, int, int]]:
        """Sizes and times of all that a page is made of."""
        found = []
        for folder in self.folders:
            places = {path.parent for name in DESCRIPTIONS for path in folder.rglob(name)}
            files = [place / name for place in places for name in READ]
            files += [path for place in places for path in place.glob("pictures/synthetic/*.npz")]
            files += [path for name in BESIDE for path in folder.rglob(name)]
            for path in files:
                try:
                    about = path.stat()
                except OSError:  # not there yet
                    continue
                found.append((str(path), about.st_size, about.st_mtime_ns))
        return sorted(found)


def server(watched: Watched, port: int = 0) -> ThreadingHTTPServer:
    """A server of the page on the loopback; port 0 is a free one."""

    class Answer(BaseHTTPRequestHandler):
        server_version = "fedstill"
        sys_version = ""

        def do_GET(self) -> None:
            """The page, or its values; nothing else is here, and no file is ever handed out."""
            if self.headers.get("Host", "").rpartition(":")[0] not in (LOOPBACK, "localhost"):
                self.send_error(HTTPStatus.FORBIDDEN, "ask for 127.0.0.1")
            elif self.path in ("/", "/index.html"):
                self._send("text/html; charset=utf-8", document(watched.values(), live=True))
            elif self.path == "/content.json":
                values = watched.values()
                if self.headers.get("If-None-Match") == watched.mark:
                    self.send_response(HTTPStatus.NOT_MODIFIED)
                    self.end_headers()
                else:
                    text = json.dumps(values, ensure_ascii=False, allow_nan=False)
                    self._send("application/json", text, watched.mark)
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _send(self, kind: str, text: str, mark: str = "") -> None:
            body = text.encode()
            self.send_response(HTTPStatus.OK)
            headers = {
                "Content-Type": kind,
                "Content-Length": str(len(body)),
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
                **({"ETag": mark} if mark else {}),
            }
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: Any) -> None:
            """Requests are not worth a line."""

    try:
        made = ThreadingHTTPServer((LOOPBACK, port), Answer)
    except OSError as error:
        raise FedstillError(
            f"cannot listen on {LOOPBACK}:{port}: {error.strerror or error}; give another --port"
        ) from error
    made.daemon_threads = True
    return made


def serve(made: ThreadingHTTPServer, seconds: float | None = None) -> None:
    """Answer until Ctrl-C, or for some seconds."""
    timer = threading.Timer(seconds, made.shutdown) if seconds is not None else None
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        made.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
        return
    finally:
        if timer is not None:
            timer.cancel()
        made.server_close()


def _empty(folders: Sequence[Path], title: str | None, why: str) -> dict[str, Any]:
    """A page before the first run has begun."""
    nothing: list[Any] = []
    return {
        "title": title or folders[0].resolve().name,
        "folder": ", ".join(map(str, folders)),
        "made": "now",
        "version": "",
        "about": {"source": "", "note": "", "network": ""},
        "held_out": False,
        **dict.fromkeys(
            ("methods", "runs", "clients", "partitions", "recipes", "shifts", "audits"), nothing
        ),
        "remarks": [why],
        "images": {"shown": [], "left_out": 0},
    }
