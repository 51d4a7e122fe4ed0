"""Runs of two ranks that end early: by Ctrl-C, by a rank that dies, and by one that stands still."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_runs import LAUNCHER, small_yaml, training

from turnwise.pipelines.checkpoints import all_checkpoints, verify

TIMEOUT_S = 240


@pytest.fixture
def start(tmp_path, tiny_model, monkeypatch) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a run that saves nothing by itself and ends by nothing but us, and returns it after its first steps."""
    monkeypatch.chdir(tmp_path)
    changes = {"exp_name": "run", "sequence_length": 128, "max_steps": 100_000, "save_steps": 0}
    Path("train.yaml").write_text(small_yaml(tiny_model, **changes, actor_train=training(1e-4, batch_size=4)))
    started = []

    def start(*words: str, launcher: list[str]) -> subprocess.Popen[str]:
        command = [sys.executable, *launcher, "-m", "turnwise.cli.main", "train", "train.yaml", *words]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        started.append(run)
        end = time.monotonic() + TIMEOUT_S
        while not any(path.read_text() for path in Path("runs").glob("*/*/metrics.jsonl")):
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < end, "no step has ended"
            time.sleep(0.1)
        return run

    yield start
    for run in started:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()


def below(process: int) -> list[int]:
    """The processes that a process has started, and those that they have, the older ones first."""
    parents = {}
    for line in subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout.splitlines():
        child, parent = map(int, line.split())
        parents[child] = parent
    found = [process]
    for known in found:
        found += sorted(child for child, parent in parents.items() if parent == known)
    return found[1:]


def second_rank(run: subprocess.Popen[str], is_launched: bool) -> int:
    """The process of rank 1: the last that the fork server forked, or the launched one that serves."""
    processes = below(run.pid)
    leaves = [process for process in processes if not below(process)]
    if not is_launched:
        return leaves[-1]
    [serving] = [leaf for leaf in leaves if b"\0RANK=1\0" in Path(f"/proc/{leaf}/environ").read_bytes()]
    return serving


def ended(run: subprocess.Popen[str], processes: list[int]) -> str:
    """What the run said until its end, after which none of its processes is left."""
    said, _ = run.communicate(timeout=TIMEOUT_S)
    end = time.monotonic() + TIMEOUT_S
    while any(map(is_there, processes)):
        assert time.monotonic() < end, f"left: {[process for process in processes if is_there(process)]}\n{said}"
        time.sleep(0.1)
    return said


def is_there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def num_saved(said: str) -> int:
    """The steps that were saved, as the run said it; the checkpoint is whole."""
    told = re.search(r"saved (\d+) steps?: (\S+)", said)
    assert told, said
    [run] = Path("runs/run").glob("2*")
    [folder] = all_checkpoints(run / "checkpoints")
    assert folder.name == f"checkpoint-{told[1]}" == Path(told[2]).name
    verify(folder)
    return int(told[1])


@pytest.mark.parametrize("launcher", [[], LAUNCHER], ids=["processes", "launched"])
def test_ctrl_c_saves_the_whole_steps_of_two_ranks_and_ends_all_processes(start, launcher):
    run = start("actor_train.device_mapping=[0,1]", launcher=launcher)
    processes = below(run.pid)
    os.killpg(run.pid, signal.SIGINT)  # a terminal sends it to all that are in the foreground
    said = ended(run, processes)
    assert num_saved(said) > 0
    assert "interrupted" in said and "Traceback" not in said.partition("torch/distributed")[0]
    assert run.returncode == (130 if not launcher else 1)


@pytest.mark.parametrize("launcher", [[], LAUNCHER], ids=["processes", "launched"])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_is_gone_or_stands_still_costs_no_whole_step(start, launcher, how):
    """The error names it, the first rank saves alone, and no process is left.

    It happens in a rollout: a rank that dies within an optimiser step leaves no whole step to save.
    """
    words = ["custom_envs.Letters.env_type=toy_envs:GatedLettersEnv"]
    # Also the start of a launched rank has to fit into the deadline, with its imports on a busy machine.
    deadline_s = 30 if launcher else 12
    words += [f"deadlines.train_s={deadline_s}"] if how == "stopped" else []
    run = start("actor_train.device_mapping=[0,1]", *words, launcher=launcher)
    processes = below(run.pid)
    os.kill(second_rank(run, bool(launcher)), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    Path("gate").touch()
    said = ""
    if launcher and how == "stopped":
        while "closing signal SIGTERM" not in said:
            said += run.stdout.readline()
        for process in filter(is_there, processes):  # its guard stopped with it; torchrun would kill them in another 30 s
            os.kill(process, signal.SIGCONT)
    said += ended(run, processes)
    assert num_saved(said) == 1
    rank = "the launched process of rank 1" if launcher else "the trainer's process of rank 1"
    has_ended, waited = rf"actor_train\.\w+: {rank} has ended", f"the pipeline waited {deadline_s} s for actor_train"
    told = f"error: {has_ended if how == 'killed' else waited}"
    # torchrun notices a death too: it interrupts the first rank and names the root cause.
    by_launcher = r"interrupted(?s:.*)rank\s+: 1 .*\s+exitcode\s+: (-9|137)" if launcher else told
    assert re.search(told, said) or re.search(by_launcher, said), said
    assert run.returncode == (2 if not launcher else 1)
