"""Models named on the hub, against a stand-in that speaks its protocol. Every download is made by a process
of its own."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from glob import glob
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import forked
import pytest

SHA = "0123456789abcdef0123456789abcdef01234567"
MODEL = "somebody/tiny"


class Hub(ThreadingHTTPServer):
    """`somebody/tiny` and what happens to it: `cuts` connections for the weights are closed half-way,
    `stalls` wait there, and of a gated repository nobody gets a file."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.gets: list[tuple[str, str | None]] = []
        self.num_requests = self.cuts = self.stalls = 0
        self.is_gated = False
        self.has_stalled, self.goes_on = threading.Event(), threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed says nothing more."""

    @property
    def names(self) -> list[str]:
        return sorted(name for name, _ in self.gets)


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.server.num_requests += 1
        path = unquote(urlsplit(self.path).path)
        files = self.server.files
        if not path.startswith((f"/api/models/{MODEL}", f"/{MODEL}/resolve/")):
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                for name, data in files.items()
            ]
            self._send(200, json.dumps(tree).encode())
        elif path.startswith("/api/"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            self._send(
                200,
                json.dumps(
                    {"id": MODEL, "sha": SHA, "siblings": siblings, "tags": [], "downloads": 0}
                ).encode(),
            )
        elif self.server.is_gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        else:
            self._file(path.split("/", 5)[5] if path.count("/") > 4 else path.rpartition("/")[2])

    def _file(self, name: str) -> None:
        data, wanted = self.server.files[name], self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        headers = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET":
            self.server.gets.append((name, wanted))
        is_weights = name.endswith(".safetensors") and self.command == "GET"
        body, half = data[start:], len(data[start:]) // 2
        if is_weights and self.server.cuts + self.server.stalls:
            self._send(206 if wanted else 200, body, headers, half)
            if self.server.cuts:
                self.server.cuts -= 1
                self.close_connection = True
            else:
                self.server.has_stalled.set()
                self.server.goes_on.wait(60)
                self.wfile.write(body[half:])
        else:
            self._send(206 if wanted else 200, body, headers)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, num_sent: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:num_sent])
            self.wfile.flush()


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub(tiny_model: Path) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in tiny_model.iterdir()}
    files |= dict.fromkeys(
        ("README.md", "pytorch_model.bin", "own.py", "onnx/model.onnx", "old/model.safetensors"),
        b"not wanted",
    )
    server = Hub(files)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.goes_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    url = f"http://127.0.0.1:{hub.server_port}"
    (tmp_path / "work").mkdir()
    own = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1"}


def start(environment: dict[str, str], folder: Path, *words: str) -> forked.Popen:
    pipe = subprocess.PIPE
    return forked.Popen(
        words, module="fresh_hub", env=environment, cwd=folder / "work", stdout=pipe, stderr=pipe
    )


def run(environment: dict[str, str], folder: Path, *words: str) -> tuple[int, str, str]:
    done = forked.run(words, module="fresh_hub", env=environment, cwd=folder / "work")
    return done.returncode, done.stdout, done.stderr


WANTED = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.mark.extra
def test_a_name_is_downloaded_once_with_its_progress_and_comes_from_the_cache_then(
    hub: Hub, environment: dict[str, str], tmp_path: Path, tiny_model: Path
) -> None:
    config = tmp_path / "work" / "lake.yaml"
    config.write_text(f"pretrain: {MODEL}\ncustom_envs: {{Lake: {{env_type: frozen_lake}}}}\n")
    status, output, errors = run(environment, tmp_path, "config", "lake.yaml")
    assert status == 0, errors
    assert f"{MODEL} (not on this machine: train downloads it from the hub)" in output
    assert hub.num_requests == 0, "config looks nothing up"

    status, output, errors = run(environment, tmp_path, "export", "--model", MODEL, "--out", "a")
    assert status == 0, errors
    assert hub.names == WANTED, "only what is needed"
    assert (
        f"{MODEL}: no folder here, so 5 files" in errors
        and environment["HF_ENDPOINT"] in errors
        and "100%" in errors
    )
    for file in ("tokenizer.json", "model.safetensors"):
        assert (tmp_path / "work" / "a" / file).read_bytes() == (tiny_model / file).read_bytes()

    num_requests = hub.num_requests
    status, output, errors = run(environment, tmp_path, "folder", MODEL)
    assert status == 0 and hub.num_requests == num_requests, "the second time nobody is asked"
    assert (Path(output.strip()) / "model.safetensors").read_bytes() == (
        tiny_model / "model.safetensors"
    ).read_bytes()
    status, output, errors = run(environment | {"HF_HUB_OFFLINE": "1"}, tmp_path, "config", "lake.yaml")
    assert status == 0 and f"{MODEL}: qwen3" in output, "the cache tells config the size"


def test_a_connection_that_breaks_is_taken_up_where_it_broke(
    hub: Hub, environment: dict[str, str], tmp_path: Path
) -> None:
    # huggingface_hub writes parts of 10 MB.
    weights = hub.files["model.safetensors"] = os.urandom(30_000_000)
    hub.cuts = 1
    status, output, errors = run(environment, tmp_path, "folder", MODEL)
    assert status == 0, errors
    ranges = [wanted for name, wanted in hub.gets if name == "model.safetensors"]
    assert (
        len(ranges) == 2
        and ranges[0] is None
        and int(ranges[1].removeprefix("bytes=").rstrip("-")) >= 10_000_000
    )
    assert (Path(output.strip()) / "model.safetensors").read_bytes() == weights


def test_a_killed_download_goes_on_with_the_files_that_are_missing(
    hub: Hub, environment: dict[str, str], tmp_path: Path
) -> None:
    hub.stalls = 1
    process = start(environment, tmp_path, "folder", MODEL)
    assert hub.has_stalled.wait(120)
    while set(hub.names) != set(WANTED) or not glob(
        f"{tmp_path}/cache/**/snapshots/*/config.json", recursive=True
    ):
        threading.Event().wait(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.stalls = 0
    hub.goes_on.set()
    offline = environment | {"HF_HUB_OFFLINE": "1"}
    status, _, errors = run(offline, tmp_path, "folder", MODEL)
    assert status != 0 and "HF_HUB_OFFLINE is set" in errors, "half a model is none"
    hub.gets.clear()
    status, _, errors = run(environment, tmp_path, "folder", MODEL)
    assert status == 0, errors
    assert "model.safetensors" in hub.names and len(hub.names) < len(WANTED)


def test_two_processes_download_a_file_once(hub: Hub, environment: dict[str, str], tmp_path: Path) -> None:
    hub.stalls = 1
    both = [start(environment, tmp_path, "folder", MODEL) for _ in range(2)]
    assert hub.has_stalled.wait(120)
    hub.stalls = 0
    hub.goes_on.set()
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert hub.names == WANTED


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            "offline",
            "HF_HUB_OFFLINE is set; on a machine with network run `hf download somebody/tiny --local-dir "
            "tiny`",
        ),
        (
            "no network",
            "without network, on a machine with network run `hf download somebody/tiny --local-dir tiny`",
        ),
        ("unknown", "nobody/none: there is no such folder here and no such model on the hub"),
        ("gated", "its owners ask for an agreement first; accept it at"),
        ("pickled", "has no safetensors weights on the hub"),
    ],
)
def test_what_the_hub_does_not_give_is_one_sentence(
    case: str, expected: str, hub: Hub, environment: dict[str, str], tmp_path: Path
) -> None:
    hub.is_gated = case == "gated"
    if case == "pickled":
        del hub.files["model.safetensors"]
    environment |= {
        "offline": {"HF_HUB_OFFLINE": "1"},
        "no network": {"HF_ENDPOINT": "http://127.0.0.1:9"},
    }.get(case, {})
    name = "nobody/none" if case == "unknown" else MODEL
    status, _, errors = run(environment, tmp_path, "folder", name)
    assert status == 2 and expected in errors and "Traceback" not in errors, errors
    assert ("isn't on this machine" in errors) == (
        case in ("offline", "no network")
    ) and "is incomplete on" not in errors, errors
    assert not any(".safetensors" in name for name in hub.names)


def test_a_path_is_not_looked_up(hub: Hub, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "work" / "runs").mkdir()
    names = ("./model", "/nowhere/model", "runs/a/model", "runs/model", "model")
    status, _, errors = run(environment, tmp_path, "folder", *names)
    assert status == 2 and errors.count("no such model folder") == len(names), errors
    assert hub.num_requests == 0
