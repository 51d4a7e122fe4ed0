"""A server of chat completions, of a few lines, for tests of what asks one."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ChatServer(ThreadingHTTPServer):
    """Answers every request alike, or by a function of its content, which gives a reply's text, its body, or
    a status. `asked` keeps `(path, key, content)` of each request."""

    def __init__(self, body: object, status: int = 200) -> None:
        self.body, self.status, self.asked = body, status, []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.base_url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers["Authorization"], content))
        body, status = self.server.body, self.server.status
        if callable(body):
            said = body(content)
            said = answer(said) if isinstance(said, str) else said
            body, status = (said, 200) if isinstance(said, dict) else ("", said)
        self.send_response(status)
        self.end_headers()
        self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Writes nothing to stderr."""


def answer(text: str | None, reason: str = "stop") -> dict[str, object]:
    """The body of an answer."""
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]}
