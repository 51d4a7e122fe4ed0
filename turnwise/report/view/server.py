"""The pages of runs that go on, on this machine only. Each file is made when the browser asks for it."""

import errno
import re
import sys
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from turnwise.errors import ConfigError, DataError
from turnwise.report.view.folder import SITE
from turnwise.report.view.scripts import script
from turnwise.report.view.source import Episodes, RunSource, index_script
from turnwise.runtime.threads import DaemonThread

HOST = "127.0.0.1"
_STEP = re.compile(r"/data/(\d{1,3})-([a-z]+)-(\d{1,12})\.js")
_TIMELINE = re.compile(r"/data/(\d{1,3})-timeline\.js")
_SITE_FILE = re.compile(r"/([a-z]+\.(?:js|css|html))")
_TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # A script may be loaded by any page; these are for our own only.
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_OWN_SITES = (None, "same-origin", "none")
"""What a browser says in Sec-Fetch-Site of a request of our own pages, or of one that was typed."""


class LiveRuns:
    """The shown runs, looked at again whenever a browser asks. `refresh` reads again what isn't an episode
    (metrics, sentences about health)."""

    def __init__(self, runs: Sequence[RunSource], refresh: Callable[[RunSource], None]) -> None:
        self.runs = runs
        self._refresh = refresh
        self._lock = threading.Lock()
        self._num_read = 0

    def head(self) -> bytes:
        """A script that names the present state: if it differs from the one before, something is new."""
        with self._lock:
            self._scan()
            files = [episodes.file for run in self.runs for episodes in run.episodes]
            states = [[file.scanned, file.num_cuts] for file in files]
        return script("head", [states, self._num_read])

    def index(self) -> bytes:
        with self._lock:
            self._scan()
            for run in self.runs:
                self._refresh(run)
            return index_script(self.runs, is_live=True)

    def step(self, number: int, kind: str, step: int) -> bytes | None:
        """The script of a step; None if there is none."""
        with self._lock:
            self._scan()
            episodes = self._episodes(number, kind)
            if episodes is None or step not in episodes.steps():
                return None
            return self.runs[number].step_script(number, episodes, step)

    def timeline(self, number: int) -> bytes | None:
        if number >= len(self.runs) or self.runs[number].timeline is None:
            return None
        return script("timeline", number, self.runs[number].timeline)

    def read_one(self) -> bool:
        """Reads a step for the index that wasn't read yet, the newest first; False if there is none."""
        with self._lock:
            self._scan()
            for run in self.runs:
                for episodes in run.episodes:
                    missing = [step for step in episodes.steps() if step not in episodes.summaries]
                    if missing:
                        episodes.read(missing[-1], run.texts)
                        self._num_read += not missing[:-1] or len(missing) % 16 == 0
                        return True
        return False

    def _episodes(self, number: int, kind: str) -> Episodes | None:
        if number >= len(self.runs):
            return None
        return next((one for one in self.runs[number].episodes if one.kind == kind), None)

    def _scan(self) -> None:
        for run in self.runs:
            for episodes in run.episodes:
                known_steps = episodes.steps()
                num_cuts = episodes.file.num_cuts
                has_grown = episodes.file.scan()
                if episodes.file.num_cuts > num_cuts:
                    # A resumed run plays its steps again, so what was read of them is of the run before.
                    episodes.summaries.clear()
                elif has_grown and known_steps:
                    # The newest step may have been in the middle of being written.
                    episodes.summaries.pop(known_steps[-1], None)


class ViewServer:
    """Serves the pages at `http://127.0.0.1:PORT/`. Raises ConfigError if the port is in use."""

    def __init__(self, port: int, live: LiveRuns) -> None:
        self._live = live
        try:
            self._server = _Server((HOST, port), _Handler)
        except OSError as fault:
            if fault.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            reason = "is in use" if fault.errno == errno.EADDRINUSE else "may not be used by you"
            raise ConfigError(f"--port {port} {reason}; name another one") from fault
        self._server.live = live
        self.port = self._server.server_address[1]
        self.url = f"http://{HOST}:{self.port}/"
        self._is_closed = threading.Event()
        self._reader = DaemonThread("view reader")

    def serve(self) -> None:
        """Answers until `close`, or Ctrl-C."""
        self._reader.start(self._read_all)
        self._server.serve_forever(poll_interval=0.2)

    def _read_all(self) -> None:
        while not self._is_closed.is_set():
            if not self._live.read_one():
                self._is_closed.wait(1.0)

    def close(self) -> None:
        self._is_closed.set()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    live: LiveRuns

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a browser that went away before it had its page."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "turnwise"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self._is_own():
            self._answer(HTTPStatus.FORBIDDEN, b"only pages of this address are answered\n", "text/plain")
            return
        content = self._content("/index.html" if path == "/" else path)
        if content is None:
            self._answer(HTTPStatus.NOT_FOUND, b"there is no such page\n", "text/plain")
            return
        self._answer(HTTPStatus.OK, content, _TYPES.get(path.rpartition(".")[2], "text/html"))

    def _is_own(self) -> bool:
        """Whether the request names this address: a name of somebody else that points here is refused, and
        so is a page of another site that loads our scripts."""
        port = self.server.server_address[1]
        hosts = (f"{HOST}:{port}", f"localhost:{port}")
        return self.headers.get("Host") in hosts and self.headers.get("Sec-Fetch-Site") in _OWN_SITES

    def _content(self, path: str) -> bytes | None:
        live = self.server.live
        try:
            if path == "/data/index.js":
                return live.index()
            if path == "/data/head.js":
                return live.head()
            if match := _STEP.fullmatch(path):
                return live.step(int(match[1]), match[2], int(match[3]))
            if match := _TIMELINE.fullmatch(path):
                return live.timeline(int(match[1]))
        except (OSError, DataError):
            return None
        if match := _SITE_FILE.fullmatch(path):
            file = SITE / match[1]
            return file.read_bytes() if file.is_file() else None
        return None

    def _answer(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Says nothing: the terminal belongs to the command."""
