"""Runs of two ranks that end early: by Ctrl-C, by a rank that dies, and by one that stands still."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import forked
import pytest
from small_runs import LAUNCHER, small_yaml, training

from turnwise.lifecycle.checkpoint_files import all_checkpoints, verify

TIMEOUT_S = 240
Runs = list[Any]
"""Processes of `subprocess` or `forked`: one of a command, or two that a launcher has started."""


@pytest.fixture
def start(tmp_path, tiny_model, monkeypatch) -> Iterator[Callable[..., Runs]]:
    """Starts a run that saves nothing by itself and ends by nothing but us, and returns it after its first
    steps."""
    monkeypatch.chdir(tmp_path)
    changes = {"exp_name": "run", "sequence_length": 128, "max_steps": 100_000, "save_steps": 0}
    Path("train.yaml").write_text(small_yaml(tiny_model, **changes, actor_train=training(1e-4, batch_size=4)))
    started: Runs = []

    def start(how: str, *words: str) -> Runs:
        arguments = ["train", "train.yaml", "actor_train.device_mapping=[0,1]", *words]
        options = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
            "start_new_session": True,
        }
        if how == "launched":
            started.extend(forked.launch(arguments, **options))
        elif how == "torchrun":
            started.append(
                subprocess.Popen(
                    [sys.executable, *LAUNCHER, "-m", "turnwise.cli.main", *arguments], **options
                )
            )
        else:
            started.append(forked.Popen(arguments, **options))
        end = time.monotonic() + TIMEOUT_S
        while not any(path.read_text() for path in Path("runs").glob("*/*/metrics.jsonl")):
            assert started[0].poll() is None, started[0].communicate()[0]
            assert time.monotonic() < end, "no step has ended"
            time.sleep(0.1)
        return started

    yield start
    for run in started:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()


def below(process: int) -> list[int]:
    """The processes that a process has started, and those that they have, the older ones first."""
    parents = {}
    for line in subprocess.run(
        ["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout.splitlines():
        child, parent = map(int, line.split())
        parents[child] = parent
    found = [process]
    for known in found:
        found += sorted(child for child, parent in parents.items() if parent == known)
    return found[1:]


def ended(runs: Runs, processes: Sequence[int]) -> str:
    """What the first one said until its end, after which none of the processes is left."""
    said, _ = runs[0].communicate(timeout=TIMEOUT_S)
    for run in runs[1:]:
        with suppress(ProcessLookupError):
            os.kill(run.pid, signal.SIGCONT)  # a guard stops with its process
        run.communicate(timeout=TIMEOUT_S)
    end = time.monotonic() + TIMEOUT_S
    while any(map(is_there, processes)):
        assert time.monotonic() < end, (
            f"left: {[process for process in processes if is_there(process)]}\n{said}"
        )
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


@pytest.mark.extra
@pytest.mark.parametrize("how", ["processes", "torchrun"])
def test_ctrl_c_saves_the_whole_steps_of_two_ranks_and_ends_all_processes(start, how):
    [run] = start(how)
    processes = below(run.pid)
    os.killpg(run.pid, signal.SIGINT)  # a terminal sends it to all that are in the foreground
    said = ended([run], processes)
    assert num_saved(said) > 0
    assert "interrupted" in said and "Traceback" not in said.partition("torch/distributed")[0]
    assert run.returncode == (130 if how == "processes" else 1)


@pytest.mark.extra
def test_a_rank_that_is_gone_under_torchrun_costs_no_whole_step(start):
    """Torchrun notices it too: perhaps first, and then it interrupts the first rank and names the root
    cause."""
    [run] = start("torchrun", "custom_envs.Letters.env_type=toy_envs:GatedLettersEnv")
    processes = below(run.pid)
    leaves = [process for process in processes if not below(process)]
    [second_rank] = [leaf for leaf in leaves if b"\0RANK=1\0" in Path(f"/proc/{leaf}/environ").read_bytes()]
    os.kill(second_rank, signal.SIGKILL)
    Path("gate").touch()
    said = ended([run], processes)
    assert num_saved(said) == 1 and run.returncode == 1
    by_rank, by_launcher = (
        r"the launched process of rank 1 has ended",
        r"interrupted(?s:.*)rank\s+: 1 .*\s+exitcode\s+: (-9|137)",
    )
    assert re.search(f"{by_rank}|{by_launcher}", said), said


@pytest.mark.parametrize(
    ("how", "rank", "number"),
    [
        ("processes", "trainer's process", signal.SIGKILL),
        pytest.param("processes", "trainer's process", signal.SIGSTOP, marks=pytest.mark.extra),
        pytest.param("launched", "launched process", signal.SIGKILL, marks=pytest.mark.extra),
        pytest.param("launched", "launched process", signal.SIGSTOP, marks=pytest.mark.extra),
    ],
)
def test_a_rank_that_is_gone_or_stands_still_costs_no_whole_step(start, how, rank, number):
    """The error names it, the first rank saves alone, and no process is left.

    It happens in a rollout: a rank that dies within an optimiser step leaves no whole step to save.
    """
    words = ["deadlines.train_s=12"] if number == signal.SIGSTOP else []
    runs = start(how, "custom_envs.Letters.env_type=toy_envs:GatedLettersEnv", *words)
    processes = [process for run in runs for process in below(run.pid)]
    # The last that the fork server forked, or the one below the guard of the second.
    second_rank = [process for process in below(runs[-1].pid) if not below(process)][-1]
    os.kill(second_rank, number)
    Path("gate").touch()
    said = ended(runs, processes)
    assert num_saved(said) == 1
    has_ended, waited = (
        rf"actor_train\.\w+: the {rank} of rank 1 has ended",
        "the pipeline waited 12 s for actor_train",
    )
    assert re.search(f"error: {has_ended if number == signal.SIGKILL else waited}", said), said
    assert runs[0].returncode == 2


@pytest.mark.extra
def test_a_rank_that_is_gone_takes_its_share_along(start):
    """FSDP2's first rank can't save alone: the run says which steps are lost, and ends at once."""
    gated = "custom_envs.Letters.env_type=toy_envs:GatedLettersEnv"
    [run] = start("processes", gated, "actor_train.strategy_args.strategy_name=fsdp2_train")
    processes = below(run.pid)
    os.kill([process for process in processes if not below(process)][-1], signal.SIGKILL)
    Path("gate").touch()
    said = ended([run], processes)
    # The death is seen when the next call is made: one before the update or the update itself.
    assert "holds a share" in said or "in the middle of a weight update" in said, said
    assert "1 finished step is lost" in said and "no checkpoint yet" in said
    assert run.returncode == 2
