"""Drives a real browser over DevTools, through a pipe: no library and no port is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 60.0


def browser_here() -> str | None:
    """The path of a browser on this machine; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a headless browser. `errors` gathers what its console complains about."""

    def __init__(self, width: int = 1280, height: int = 860, is_dark: bool = False) -> None:
        path = browser_here()
        assert path is not None, "ask browser_here() first"
        self._profile = tempfile.mkdtemp(prefix="browser-")
        read_there, self._write = os.pipe()
        self._read, write_there = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        flags += ["--disable-dev-shm-usage", "--disable-background-networking", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={self._profile}", f"--window-size={width},{height}", "about:blank"]

        def wire() -> None:
            """Puts the ends of the pipes where the browser looks for them, whatever stands there."""
            ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 100) for end in (read_there, write_there)]
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [path, *flags],
            preexec_fn=wire,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        self._buffer = b""
        self._next_id = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets", session=None)["targetInfos"]
        target = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True}, session=None)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.size(width, height)
        scheme = "dark" if is_dark else "light"
        self.call(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", metrics)

    def call(
        self, method: str, params: dict[str, Any] | None = None, session: str | None = "own"
    ) -> dict[str, Any]:
        self._next_id += 1
        number = self._next_id
        message: dict[str, Any] = {"id": number, "method": method, "params": params or {}}
        if session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            readable, _, _ = select.select([self._read], [], [], max(deadline - time.monotonic(), 0))
            if not readable:
                raise TimeoutError("the browser doesn't answer")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise RuntimeError(f"the browser ended with status {self._process.wait()}")
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str([one.get("value") for one in params["args"]]))
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", {"url": url})

    def run(self, code: str) -> Any:
        """The value of a piece of JavaScript; a promise is awaited."""
        params = {"expression": code, "returnByValue": True, "awaitPromise": True, "userGesture": True}
        result = self.call("Runtime.evaluate", params)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"].get("description", "an exception"))
        return result["result"].get("value")

    def wait(self, code: str, seconds: float = 20.0) -> Any:
        """The value of the code once it is true."""
        end = time.monotonic() + seconds
        while True:
            try:
                value = self.run(code)
            except RuntimeError:
                value = None
            if value:
                return value
            if time.monotonic() > end:
                raise TimeoutError(f"not within {seconds:g} s: {code}")
            time.sleep(0.05)

    def click(self, selector: str, place: int = 0) -> None:
        """Clicks the middle of an element, as a hand does."""
        spot = self._spot(selector, place)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", {"type": kind, **spot, "button": "left", "clickCount": 1})

    def point(self, selector: str, place: int = 0) -> None:
        """Moves the pointer over an element."""
        self.call("Input.dispatchMouseEvent", {"type": "mouseMoved", **self._spot(selector, place)})

    def _spot(self, selector: str, place: int) -> dict[str, float]:
        box = self.run(
            f"(() => {{ const it = document.querySelectorAll({json.dumps(selector)})[{place}];"
            "it.scrollIntoView({block: 'center'}); const box = it.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        return {"x": box[0], "y": box[1]}

    def key(self, key: str) -> None:
        code = {"Enter": 13, "Escape": 27}.get(key, ord(key[0].upper()))
        text = "\r" if key == "Enter" else key if len(key) == 1 else ""
        params = {"key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", {"type": "keyDown", "text": text, **params})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", **params})

    def type(self, text: str) -> None:
        self.call("Input.insertText", {"text": text})

    def picture(self, path: Path, is_whole: bool = False) -> None:
        params: dict[str, Any] = {"format": "png"}
        if is_whole:
            params["captureBeyondViewport"] = True
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            params["clip"] = {
                "x": 0,
                "y": 0,
                "width": size["width"],
                "height": min(size["height"], 3000),
                "scale": 1,
            }
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", params)["data"]))

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._profile, ignore_errors=True)
