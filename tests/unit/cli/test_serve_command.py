"""`turnwise serve` as a user meets it: a small model behind three protocols, and what can't be served."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import forked
import pytest

from turnwise.cli.main import EXIT_ERROR, main
from turnwise.lifecycle.interrupt import EXIT_INTERRUPTED

GO = {"role": "user", "content": "go"}


def post(url: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "x-api-key": key}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        content: dict[str, Any] = json.loads(response.read())
    return content


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def test_a_model_is_served_until_ctrl_c_and_its_key_is_printed_once(tiny_model: Path, folder: Path) -> None:
    arguments = ["serve", tiny_model, "--port", str(free_port()), "sequence_length=128"]
    process = forked.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    first = process.stdout.readline()
    assert first, process.stderr.read()
    [url] = re.findall(r"http://\S+(?=/v1)", first)
    key = process.stdout.readline().split()[-1]
    body = {"model": "m", "messages": [GO], "max_tokens": 4}
    answer = post(f"{url}/v1/chat/completions", key, body)
    assert answer["usage"]["completion_tokens"] <= 4
    count = post(f"{url}/v1/messages/count_tokens", key, {"model": "m", "messages": [GO]})
    assert count["input_tokens"] == answer["usage"]["prompt_tokens"]
    assert post(f"{url}/s/{key}/v1/messages", key, body)["type"] == "message"
    assert post(f"{url}/v1/responses", key, {"model": "m", "input": "go"})["object"] == "response"
    process.send_signal(signal.SIGINT)
    status = process.wait(timeout=60)
    lines = process.stdout.read().splitlines()
    errors = process.stderr.read()
    assert status == EXIT_INTERRUPTED
    assert len(lines) == 3 and all(line.split()[1] == "m" for line in lines)
    assert key not in "".join(lines) + errors and "Traceback" not in errors


REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "no folder": (["nowhere"], ["nowhere", "make-model"]),
    "every address": (["MODEL", "--host", "0.0.0.0"], ["--public-url"]),
    "no public address": (["MODEL", "--public-url", "myhost:8000"], ["--public-url", "http://"]),
    "no address": (["MODEL", "--host", "256.0.0.1"], ["--host"]),
    "no port": (["MODEL", "--port", "70000"], ["--port"]),
    "no setting": (["MODEL", "sequnce_length=9"], ["sequence_length"]),
    "a setting of training": (["MODEL", "ppo_epochs=3"], ["ppo_epochs", "sequence_length"]),
    "too long": (["MODEL", "sequence_length=999999"], ["sequence_length"]),
    "a key without a value": (["MODEL", "sequence_length"], ["sequence_length"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_one_sentence(
    name: str, tiny_model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, expected = REFUSED[name]
    port = [] if "--port" in words else ["--port", str(free_port())]
    assert main(["serve", *(word.replace("MODEL", str(tiny_model)) for word in words), *port]) == EXIT_ERROR
    errors = capsys.readouterr().err
    assert all(word in errors for word in expected) and "Traceback" not in errors


def test_a_port_in_use_is_said_before_the_model_is_loaded(
    tiny_model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        assert main(["serve", str(tiny_model), "--port", port]) == EXIT_ERROR
    errors = capsys.readouterr().err
    assert "--port" in errors and port in errors


def test_without_aiohttp_the_extra_is_named(
    tiny_model: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert main(["serve", str(tiny_model)]) == EXIT_ERROR
    errors = capsys.readouterr().err
    assert "aiohttp" in errors and "gateway" in errors
