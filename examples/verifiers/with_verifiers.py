"""Plays tasks of verifiers (version 1) as an agent over HTTP. Each row names its taskset and the number of a
task in it; the score is the reward of verifiers' trace."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from threading import Lock
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import harness_config_type, load_taskset, taskset_config_type

_reading = Lock()


async def play(base_url: str, api_key: str, task: dict[str, Any], model: str) -> dict[str, Any]:
    """Plays the task of a row. Errors of verifiers fail the episode, which is then played again."""
    config = vf.AgentConfig(
        harness=harness_config_type(task["harness"])(id=task["harness"]),
        client=vf.EvalClientConfig(base_url=base_url),
        runtime=vf.SubprocessConfig(),
        model=model,
    )
    async with vf.Agent(config) as agent:
        trace = await agent.run(task_at(task["taskset"], task["number"]))
    if not trace.ok:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in trace.errors))
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {"score": trace.reward, "metrics": metrics}


def task_at(taskset: str, number: int) -> vf.Task:
    """The task with this number, from 0. Tasks are read once, in their order, and only so far."""
    read, unread = _tasks(taskset)
    with _reading:
        while len(read) <= number:
            read.append(next(unread))
    return _checked(read[number], taskset)


@cache
def _tasks(taskset: str) -> tuple[list[vf.Task], Iterator[vf.Task]]:
    return [], iter(load_taskset(taskset_config_type(taskset)(id=taskset)))


def _checked(task: vf.Task, taskset: str) -> vf.Task:
    if task.data.image is not None:
        raise ValueError(
            f"taskset {taskset}, task {task.data.idx} runs in the container {task.data.image}; here tasks "
            "run as processes of this machine, so choose a taskset without containers"
        )
    return task
