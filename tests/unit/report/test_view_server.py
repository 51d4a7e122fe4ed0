"""`turnwise view --port`: who is answered, and what is new in a run that goes on."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from viewed_run import Writer, groups_of, write_run

from turnwise.errors import ConfigError
from turnwise.report.view.rollouts_file import RolloutsFile
from turnwise.report.view.server import HOST, LiveRuns, ViewServer
from turnwise.report.view.source import Episodes, RunSource
from turnwise.rollout.journal import Journal


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / "run", num_steps=1)


@pytest.fixture
def server(run) -> Iterator[ViewServer]:
    source = RunSource("run", str(run), [Episodes("train", RolloutsFile(run / "rollouts.jsonl"), 1)], None)
    server = ViewServer(0, LiveRuns([source], lambda source: None))
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    server.close()
    thread.join(20)


def ask(server: ViewServer, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(HOST, server.port, timeout=20)
    connection.putrequest("GET", path, skip_host=True)
    for name, value in ({"Host": f"{HOST}:{server.port}"} | headers).items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    return connection.getresponse()


def test_pages_and_data_are_answered(server):
    page = ask(server, "/")
    assert (
        page.status == 200
        and b"app.js" in page.read()
        and page.headers["Content-Type"].startswith("text/html")
    )
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert page.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert ask(server, "/app.js").headers["Content-Type"].startswith("text/javascript")
    assert ask(server, "/data/index.js").read().startswith(b"turnwise.index(")
    assert ask(server, "/data/0-train-1.js").read().startswith(b"turnwise.step(")


@pytest.mark.parametrize(
    "path",
    [
        "/data/0-train-9.js",
        "/data/0-val-1.js",
        "/data/7-train-1.js",
        "/data/0-timeline.js",
        "/../source.py",
        "/x.js",
        "/data/",
    ],
)
def test_nothing_else_is_there(server, path):
    assert ask(server, path).status == 404


def test_other_hosts_and_other_sites_are_refused(server):
    port = server.port
    assert ask(server, "/data/index.js", Host=f"localhost:{port}").status == 200
    for host in ("evil.example", f"evil.example:{port}", HOST, f"{HOST}:{port + 1}", ""):
        assert ask(server, "/data/index.js", Host=host).status == 403
    assert ask(server, "/data/index.js", Sec_Fetch_Site="cross-site").status == 403
    assert ask(server, "/data/index.js", Sec_Fetch_Site="same-origin").status == 200


def test_a_new_step_changes_the_head(server, run):
    first = ask(server, "/data/head.js").read()
    journal = Journal(run / "rollouts.jsonl")
    journal.append(1, groups_of(Writer(), 1))
    journal.close()
    assert ask(server, "/data/head.js").read() != first
    assert ask(server, "/data/0-train-2.js").status == 200


def scores_in_index(live: LiveRuns) -> dict[int, float]:
    """Step → score of its first episode, once all steps are read."""
    while live.read_one():
        pass
    rows = live.runs[0].index_entry()["kinds"][0]["steps"]
    return {row["step"]: row["score"][0] for row in rows}


@pytest.mark.parametrize("looks_between", [True, False])
def test_after_a_resumed_run_the_index_says_what_the_file_says(tmp_path, looks_between):
    path = tmp_path / "rollouts.jsonl"

    def line(step: int, score: float) -> str:
        task = {"id": "t"}
        record = {"step": step, "group": 0, "task": task, "sibling": 0, "score": score, "turns": []}
        return json.dumps(record) + "\n"

    path.write_text("".join(line(step, 0.0) for step in range(5)))
    source = RunSource("run", str(tmp_path), [Episodes("train", RolloutsFile(path), 1)], None)
    live = LiveRuns([source], lambda source: None)
    live.index()
    assert scores_in_index(live) == dict.fromkeys(range(1, 6), 0.0)
    first = live.head()
    kept = "".join(line(step, 0.0) for step in range(2))
    path.write_text(kept)
    if looks_between:
        live.head()
    path.write_text(kept + "".join(line(step, 1.0) for step in range(2, 5)))
    assert b'"score":1.0' in live.step(0, "train", 5) and live.head() != first
    assert scores_in_index(live) == {1: 0.0, 2: 0.0, 3: 1.0, 4: 1.0, 5: 1.0}


def test_a_browser_that_goes_away_is_not_said_but_a_fault_is(server, capsys):
    handler = server._server
    for fault, is_said in (
        (BrokenPipeError(), False),
        (ConnectionResetError(), False),
        (KeyError("x"), True),
    ):
        try:
            raise fault
        except Exception:
            handler.handle_error(None, ("127.0.0.1", 9))
        assert ("Traceback" in capsys.readouterr().err) == is_said


def test_a_port_in_use_is_one_sentence(server):
    with pytest.raises(ConfigError, match=f"--port {server.port}"):
        ViewServer(server.port, LiveRuns([], lambda source: None))
