"""Hangs as a user meets them: the process ends by itself, with one screen that says who waited for whom."""

from __future__ import annotations

import re

import forked
import pytest
from messages import mentions, says

STUCK_ENV = """
import time
from toy_envs import LettersEnv

class Mine(LettersEnv):
    def step(self, action):
        while True:
            time.sleep(1)
"""
SILENT_SERVER = """
import asyncio
from turnwise.inference.embedded.server import EmbeddedServer
from toy_envs import LettersEnv as Mine

async def never(*_, **__):
    await asyncio.Event().wait()

EmbeddedServer.generate = never
"""


@pytest.mark.parametrize(
    ("parts", "messages"),
    [
        (
            STUCK_ENV,
            [
                says("1 episode", "batch"),
                says("Letters", "0.2 s", "Mine.step", "env_step_timeout_s"),
                says("in step", "time.sleep(1)"),
            ],
        ),
        (
            SILENT_SERVER,
            [
                says("2 s", "inference replica 0", "deadlines.request_s"),
                says("in never", "asyncio.Event().wait()"),
            ],
        ),
    ],
    ids=["an environment that never returns", "a server that never answers"],
)
def test_a_run_that_hangs_ends_with_one_screen(job, folder, parts, messages):
    (folder / "my_parts.py").write_text(parts)
    manager = {"num_env_groups": 1, "group_size": 4, "env_step_timeout_s": 0.2, "max_env_retries": 1}
    limits = {"parity_max_logprob_diff": 1.0, "deadlines": {"request_s": 2.0}, "train_env_manager": manager}
    done = forked.run(["train", job({"env_type": "my_parts:Mine"}, rollout_batch_size=4, **limits)])
    assert done.returncode == 2, done.stderr
    _, _, error = done.stderr.partition("error: ")
    assert all(re.search(message, error) for message in messages), done.stderr
    assert "Traceback" not in done.stderr and len(error.splitlines()) < 50, error


@pytest.mark.parametrize("method", ["step", "close"])
def test_demonstrations_of_an_environment_that_hangs_end_too(job, folder, method):
    (folder / "my_parts.py").write_text(
        STUCK_ENV.replace("def step(self, action)", f"def {method}(self, *action)")
    )
    config = job({"env_type": "my_parts:Mine"}, train_env_manager={"env_step_timeout_s": 0.2})
    options = ["--policy", "random", "--actions", "a,b", "--episodes", "2", "--out", "demos.jsonl"]
    done = forked.run(["demos", config, *options], timeout=60)
    assert done.returncode == 2, done.stderr
    assert mentions(done.stderr, "error: ", "Letters", f"Mine.{method}", "env_step_timeout_s")
