"""Environments that end the process, and signals: what the parent process of a command makes of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
from messages import mentions, says

ENV = """
import asyncio, atexit, ctypes, os, signal, sys, threading, time
from toy_envs import LettersEnv

def unheard():
    print("begun", flush=True)
    time.sleep(0.2)  # the main thread has begun to wait
    signal.pthread_kill(threading.get_ident(), signal.SIGHUP)
    time.sleep(600)

WAYS = {
    "_exit": lambda: os._exit(0),
    "crash": lambda: ctypes.string_at(0),
    "late": lambda: atexit.register(os.abort),
    "closerange": lambda: os.closerange(0, 1000),
    "alarm": lambda: (signal.setitimer(signal.ITIMER_REAL, 0.01), time.sleep(600)),
    "unnamed": lambda: os.kill(os.getpid(), signal.SIGRTMIN + 1),
    "killed": lambda: os.kill(os.getpid(), 9),
    "closed": lambda: (sys.stdout.close(), os.dup2(2, 1), os.close(1)),
    "hang": lambda: (print("begun", flush=True), time.sleep(600)),
    "unheard": unheard,
}

class Mine(LettersEnv):
    def __init__(self, at="step", way="none"):
        super().__init__()
        self.at, self.way = at, way
        self.meet("__init__")

    def meet(self, method):
        if method == self.at:
            WAYS[self.way]()

    def reset(self, *, seed=None):
        self.meet("reset")
        return super().reset(seed=seed)

    def step(self, action):
        self.meet("step")
        return super().step(action)

    def close(self):
        self.meet("close")
"""


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(ENV)
    return tmp_path


def command(*arguments):
    return [sys.executable, "-m", "turnwise.cli.main", *arguments]


def check(folder, at, way):
    arguments = ["check-env", "mine:Mine", f"at={at}", f"way={way}", "--episodes", "2"]
    return forked.run(arguments, cwd=folder)


@pytest.mark.parametrize(
    ("at", "way", "status", "said"),
    [
        ("__init__", "_exit", 70, says("exit status 0", "constructor")),
        ("close", "crash", 128 + signal.SIGSEGV, says("SIGSEGV", "close")),
        ("step", "late", 128 + signal.SIGABRT, says("SIGABRT", "all was done")),
        ("step", "closerange", 1, says("written", "os.closerange")),
        (
            "reset",
            "alarm",
            128 + signal.SIGALRM,
            says("SIGALRM", "signal.alarm, signal.setitimer", "reset"),
        ),
        pytest.param("step", "unnamed", 128 + 35, says("signal 35", "step"), marks=ON_LINUX),
        (
            "step",
            "killed",
            128 + signal.SIGKILL,
            says("SIGKILL", "memory", "step"),
        ),
    ],
)
def test_an_environment_that_ends_the_process_is_named(folder, at, way, status, said):
    done = check(folder, at, way)
    assert done.returncode == status
    assert re.search(said, done.stderr) and "Traceback" not in done.stderr


def test_a_module_that_ends_the_process_is_named(folder):
    (folder / "other.py").write_text("import os\nos._exit(0)\n")
    done = forked.run(["check-env", "other:Mine"], cwd=folder)
    assert done.returncode == 70 and "in importing other" in done.stderr
    (folder / "other.py").write_text("import sys\nsys.exit(0)\n")
    done = forked.run(["check-env", "other:Mine"], cwd=folder)
    assert done.returncode == 2 and mentions(done.stderr, "importing other", "SystemExit: 0")


def test_the_published_launcher_is_guarded_as_the_command_is(folder, tiny_model):
    (folder / "ending.py").write_text("import os\nos._exit(0)\n")
    (folder / "job.yaml").write_text(
        f"pretrain: {tiny_model}\ncustom_envs: {{Toy: {{env_type: 'ending:Mine'}}}}\n"
    )
    launcher = Path(__file__).parents[3] / "examples" / "start_agentic_pipeline.py"
    done = subprocess.run(
        [sys.executable, launcher, "--config_name", "job"], capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 70 and mentions(done.stderr, "exit status 0", "done")


def test_a_closed_stdout_costs_no_result(folder):
    done = check(folder, "step", "closed")
    assert "Mine is not examined" in done.stdout and "Traceback" not in done.stderr


def hanging(folder, way="hang", is_forked=True, **options):
    arguments = ["check-env", "mine:Mine", f"way={way}", "--timeout", "500"]
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
    process = (
        forked.Popen(arguments, **options) if is_forked else subprocess.Popen(command(*arguments), **options)
    )
    assert process.stderr.readline() == "begun\n"  # what an environment prints is no part of the report
    return process


@pytest.mark.parametrize(
    ("number", "to_all"),
    [
        (signal.SIGINT, False),
        (signal.SIGINT, True),
        (signal.SIGTERM, True),
        (signal.SIGHUP, False),
        (None, False),
    ],
)
def test_signals_reach_the_command_once(folder, number, to_all):
    """None stands for one that ends no wait: it reaches another thread, or the main thread just before it
    waits. There is no interrupted system call and no handler of Python."""
    process = hanging(folder, "hang" if number else "unheard", start_new_session=True)
    if number:
        os.killpg(process.pid, number) if to_all else process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n")


def children(process):
    return [int(word) for word in open(f"/proc/{process.pid}/task/{process.pid}/children").read().split()]


def is_gone(process_id):
    try:
        return open(f"/proc/{process_id}/stat").read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_parent_that_is_killed_leaves_no_orphan(folder):
    process = hanging(folder)
    [child] = children(process)
    process.kill()
    process.wait()
    for _ in range(100):
        if is_gone(child):
            break
        time.sleep(0.1)
    assert is_gone(child)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_job_is_seen_as_stopped_and_goes_on(folder):
    process = hanging(
        folder, is_forked=False, process_group=0
    )  # a job of this session: the system stops no group without a shell
    process.send_signal(signal.SIGTSTP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130


PRESSES = """
import signal, sys
class Presses:
    def find_spec(self, name, path=None, target=None):
        if name == "turnwise.cli.guard":
            try: signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt: raise ImportError("what a library makes of it")
sys.meta_path.insert(0, Presses())
sys.argv = ["bin/turnwise", "config"]
from turnwise.cli.main import main
"""


def test_ctrl_c_before_the_command_can_listen_is_one_line():
    done = subprocess.run([sys.executable, "-c", PRESSES], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("verb", "times"), [("check-env", 1), ("play", 2), ("config", 2), ("make-model", 1)])
def test_ctrl_c_during_the_imports_is_one_line(folder, verb, times):
    arguments = {"make-model": ["--out", "model"], "config": ["mine.yaml"]}.get(verb, ["mine:Mine"])
    process = subprocess.Popen(
        command(verb, *arguments), stderr=subprocess.PIPE, text=True, cwd=folder, start_new_session=True
    )
    while process.poll() is None and not children(process):
        time.sleep(0.001)
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
    assert process.communicate(timeout=60)[1] == "interrupted\n" and process.returncode == 130
