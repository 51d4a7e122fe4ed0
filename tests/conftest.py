"""Fixtures that tests of several rooms share: a small model folder, made once a session."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

# huggingface_hub reads it when it is first imported: no test asks the real hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# Commands that tests start find the environments of tests/support, too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import odd_envs
from toy_model import TINY

from turnwise.cluster import fork_server
from turnwise.models.make import make_model

with suppress(ImportError):  # Machines that only run tests/gpu needn't have it.
    from hypothesis import HealthCheck, settings

    # The same examples on every run, however slow the machine is at the moment.
    settings.register_profile(
        "turnwise", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("turnwise")

PROCESS_GROUPS = (
    "test_accelerate",
    "test_ctrl_c_twice",
    "test_guard",
    "test_launched",
    "test_process",
    "test_ranks",
    "test_replicas",
    "test_resume.py::test_fine_tuning_goes_on_with_another_number_of_devices",
    "test_places.py::",
)
"""Beginnings of `file::test` of tests that start several processes that wait for each other, or signal groups
of them."""


DURATIONS = Path(__file__).parent / "durations.json"
"""Seconds of every test file, and of every test of a second or more; `make test-full` has them written, and
`TURNWISE_DURATIONS=1 make test` (or another part) those of that part alone."""
KINDS = {"not extra": "test", "extra": "extras"}
"""The part that runs the tests that `-m` selects."""
_seconds: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("exit_status_file", "where pytest's exit status is written, which make hides")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workerinput"):  # of pytest-xdist: its controller gets all reports
        return
    file = session.config.getini("exit_status_file")
    if file:
        Path(file).write_text(f"{int(exitstatus)}\n")
    if os.environ.get("TURNWISE_DURATIONS"):
        _write_durations(session)


def _write_durations(session: pytest.Session) -> None:
    saved = json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {"files": {}, "tests": {}}
    files: Counter[str] = Counter()
    for test, seconds in _seconds.items():
        files[test.partition("::")[0]] += seconds
    # A file may have tests of two commands (`extra`), so its tests are added up, not replaced as a whole.
    tests = saved["tests"] | {test: round(s, 1) for test, s in sorted(_seconds.items()) if s >= 1}
    kind = KINDS.get(session.config.option.markexpr, "engines")
    saved["files"][kind] = {file: round(seconds, 1) for file, seconds in files.most_common()}
    DURATIONS.write_text(json.dumps({"files": saved["files"], "tests": tests}, indent=1) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first worker of pytest-xdist gets what comes first, and others steal from its end: few wait for the
    lock below."""
    items.sort(key=lambda item: not f"{item.path.name}::{item.name}".startswith(PROCESS_GROUPS))


def pytest_collection_finish() -> None:
    """What there is now stays to the end: no garbage collection goes through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def process_groups_run_one_at_a_time(request, tmp_path_factory) -> Iterator[None]:
    """Two groups at once have more processes than cores: ranks would wait for each other past their
    deadlines."""
    if not f"{request.path.name}::{request.node.name}".startswith(PROCESS_GROUPS):
        yield
        return
    folder = tmp_path_factory.getbasetemp()
    # The workers of pytest-xdist have folders of their own in one.
    shared = folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder
    with open(shared / "process_groups.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True, scope="session")
def signals_of_a_terminal() -> Iterator[None]:
    """A shell starts what runs in the background with Ctrl-C ignored, and nohup ignores a closed terminal:
    tests press both."""
    signals = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in signals.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


WARM = ("turnwise.assemble.strategies", "server_factories", "turnwise.cluster.child")
"""What forked ranks and servers import; with torch that takes seconds."""


@pytest.fixture(autouse=True, scope="session")
def forks_have_imported_torch() -> Iterator[None]:
    """Whichever test starts the fork server, and whatever it needs itself: tests after it use the same."""
    start = fork_server.ForkServer

    def warm(modules: Sequence[str]) -> fork_server.ForkServer:
        return start(tuple(dict.fromkeys((*modules, *WARM))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "ForkServer", warm)
        yield


@pytest.fixture(autouse=True)
def modules_of_a_test_are_forgotten(tmp_path_factory) -> Iterator[None]:
    """Two tests may write different modules of one name, `guess.py` say: each imports its own, and none that
    is gone."""
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    folder = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A Qwen3 of some 20,000 parameters with random weights, and a tokenizer that knows the words of the toy
    environments."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    words = (
        "<answer>Left</answer> <answer>Down</answer> <answer>Right</answer> <answer>Up</answer> P _ O G "
        "X √ 0 1 2 3\n"
    )
    make_model("tiny", folder, [words * 20], overrides=TINY)
    return folder


@pytest.fixture
def nothing_stays_stuck() -> Iterator[None]:
    """Ends what a test has left behind in threads: the stacks of later tests would show it."""
    before = set(threading.enumerate())
    yield
    odd_envs.LET_GO.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    odd_envs.LET_GO.clear()
