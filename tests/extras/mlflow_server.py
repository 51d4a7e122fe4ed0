"""Traces in a real server of MLflow, which answers, refuses a trace, dies in the middle of the run or was
never there.

Runs in the environment of the trackers: `python mlflow_server.py MODEL FOLDER`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import real_trackers
from toy_envs import LettersEnv

from turnwise.tracking import mlflow_traces, store, traces

GROUP_SIZE = 4
START_S = 120
QUICK = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""MLflow tries seven times, for four minutes, unless its own variables say otherwise."""


class Server:
    """`mlflow server` over a file of SQLite."""

    def __init__(self, folder: Path) -> None:
        self.store = f"sqlite:///{folder / 'server.db'}"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--workers", "1", "--backend-store-uri", self.store]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert time.monotonic() < deadline, (folder / "server.log").read_text()
            time.sleep(0.2)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "mlflow server has ended"
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def traces(self) -> list[Any]:
        """The traces that its database holds with their spans."""
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        client = MlflowClient(self.store)
        experiment = client.get_experiment_by_name("letters")
        if experiment is None:
            return []
        infos = client.search_traces(locations=[experiment.experiment_id], include_spans=False)
        whole = []
        for trace in infos:
            # A trace whose spans are on their way can't be read.
            with contextlib.suppress(MlflowException):
                whole.append(client.get_trace(trace.info.trace_id))
        return [trace for trace in whole if trace.data.spans]

    def kill(self) -> None:
        """Kills it with its workers; does nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class FatalLetters(LettersEnv):
    """Kills the server at the start of the second step's episodes, once the traces of the first are there.
    The first start of all is that of the run's check."""

    server: Server | None = None
    num_started = 0

    def reset(self, *, seed: int | None = None) -> Any:
        FatalLetters.num_started += 1
        if self.server is not None and self.num_started == 1 + GROUP_SIZE + 1:
            deadline = time.monotonic() + 60
            while len(self.server.traces()) < GROUP_SIZE:
                assert time.monotonic() < deadline, "the first step's traces don't arrive"
                time.sleep(0.1)
            self.server.kill()
        return super().reset(seed=seed)


class Warnings(logging.Handler):
    """Keeps the warnings of a run."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def warnings_of(*names: str) -> Iterator[Warnings]:
    handler = Warnings()
    for name in names:
        logging.getLogger(name).addHandler(handler)
    try:
        yield handler
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(handler)


def train(
    model: str, folder: Path, uri: str, env_type: str = "toy_envs:LettersEnv", **keys: Any
) -> list[str]:
    """Trains two steps with all traces, and returns what traces and trackers have warned of."""
    lake = {"env_type": env_type, "max_steps": 1, "max_tokens_per_step": 4}
    values = {
        "trace": {"backend": "mlflow", "max_samples_per_step": GROUP_SIZE},
        "tracker_kwargs": {"mlflow": {"tracking_uri": uri}},
        "custom_envs": {"Toy": lake},
        **keys,
    }
    with warnings_of(traces.__name__, store.__name__) as warnings:
        assert real_trackers.trained(model, folder, **values) == 0
    return warnings.texts


def answers(model: str, folder: Path) -> None:
    server = Server(folder)
    try:
        assert not train(model, folder, server.uri, track_with=["mlflow"])
        kept = server.traces()
        assert len(kept) == 2 * GROUP_SIZE
        for trace in kept:
            kinds = [span.span_type for span in trace.data.spans]
            assert kinds[0] == "AGENT" and kinds.count("CHAT_MODEL") == 1, kinds
            [root] = [span for span in trace.data.spans if span.parent_id is None]
            assert root.outputs["status"] in ("finished", "truncated"), root.outputs
    finally:
        server.kill()


def refuses_a_trace(model: str, folder: Path) -> None:
    """The server refuses a trace of an experiment that it doesn't have: the others of the step are there."""
    from mlflow.entities import TraceLocation

    server = Server(folder)
    MlflowTraces = mlflow_traces.MlflowTraces
    info_of = MlflowTraces._info

    def misplaced(self: Any, trace: Any) -> Any:
        info = info_of(self, trace)
        if info.tags["rollout_n"] == "2":
            info.trace_location = TraceLocation.from_experiment_id("987654321")
        return info

    MlflowTraces._info = misplaced
    try:
        texts = train(model, folder, server.uri)
        siblings = [trace.info.tags["rollout_n"] for trace in server.traces()]
        assert sorted(siblings) == ["0", "0", "1", "1", "3", "3"], siblings
    finally:
        MlflowTraces._info = info_of
        server.kill()
    assert len(texts) == 2 and "refuses" in texts[0] and "2 episodes of 8" in texts[1], texts


def dies(model: str, folder: Path) -> None:
    server = Server(folder)
    FatalLetters.server = server
    env_type = f"{Path(__file__).stem}:FatalLetters"
    try:
        texts = train(model, folder, server.uri, env_type, track_with=["mlflow"])
    finally:
        server.kill()
    assert len(server.traces()) == GROUP_SIZE
    assert len([text for text in texts if "gets nothing more" in text]) == 1, texts
    assert len([text for text in texts if "go without a trace" in text]) == 1, texts
    assert len([text for text in texts if f"{GROUP_SIZE} episodes of {2 * GROUP_SIZE}" in text]) == 1, texts


def was_never_there(model: str, folder: Path) -> None:
    texts = train(model, folder, "http://127.0.0.1:9")
    assert len(texts) == 2 and "8 episodes of 8" in texts[1], texts


if __name__ == "__main__":
    os.environ.update(QUICK)
    sys.modules[Path(__file__).stem] = sys.modules["__main__"]
    for case in (answers, refuses_a_trace, dies, was_never_there):
        place = Path(sys.argv[2], case.__name__)
        place.mkdir()
        case(sys.argv[1], place)
        print(f"{case.__name__}: as it should", flush=True)
    print("a run outlives its MLflow server")
