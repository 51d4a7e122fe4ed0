"""`Trainer` where there is no module to import from: in a plain script, and in the kernel of a notebook."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from queue import Empty

import forked
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import write_connection_file

OWN = """
import os
from pathlib import Path

from turnwise import Trainer
from turnwise.algorithms.score_estimator import GRPO
from turnwise.algorithms.losses import PolicyLoss
from turnwise.envs.base import TextEnv


class OwnEnv(TextEnv):
    def reset(self, *, seed=None):
        return "write", {}

    def step(self, action):
        return "done", sum(map(str.islower, action)) / max(len(action), 1), True, False, {}


class OwnLoss(PolicyLoss):
    def __call__(self, *args):
        Path("process").write_text(str(os.getpid()))
        return super().__call__(*args)


class Own(GRPO):
    def __init__(self, settings, kl_controller=None):
        super().__init__(settings, kl_controller)
        self.loss = OwnLoss(settings)


texts = {"agent_system_template": "", "agent_template": "{observation}", "action_pattern": None}
texts["max_tokens_per_step"] = 4
trainer = Trainer(
    model=MODEL, env={"Own": {"env_type": OwnEnv, **texts}}, algorithm=Own, max_steps=2, rollout_batch_size=4,
    sequence_length=128, async_generation_ratio=1, train_env_manager={"group_size": 2, "num_env_groups": 2},
)
trainer.train()
print("saved:", trainer.checkpoint.name, "elsewhere:", int(Path("process").read_text()) != os.getpid())
print("evaluated:", trainer.evaluate(num_tasks=2).overall.num_episodes)
"""


@pytest.mark.extra
def test_a_script_without_a_guard_trains_in_two_processes(tiny_model, tmp_path):
    (tmp_path / "script.py").write_text(f"MODEL = {str(tiny_model)!r}\n{OWN}")
    ended = forked.run([], module="script", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "saved: checkpoint-2 elsewhere: True\n" in ended.stdout and "evaluated: 2" in ended.stdout
    [config] = (tmp_path / "runs").rglob("config.yaml")
    assert re.search(r"adv_estimator: object_[0-9a-f]{12}\.__main__:Own\n", config.read_text())


QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


class Notebook:
    """A kernel, and what its cells print."""

    def __init__(self, folder):
        file, _ = write_connection_file(str(folder / "kernel.json"))
        self.kernel = forked.Popen(
            ["-f", file], module="ipykernel_launcher", cwd=folder, start_new_session=True, **QUIET
        )
        self.client = BlockingKernelClient(connection_file=file)
        self.client.load_connection_file()
        self.client.hb_channel.time_to_dead = 60.0  # on a busy machine a beat of the heart may take long
        self.client.start_channels()

    def start(self, code):
        self.cell = self.client.execute(code)

    def texts(self, end=""):
        """What the cell prints until it has ended or has printed `end`."""
        text = ""
        while not end or end not in text:
            try:
                message = self.client.get_iopub_msg(timeout=60)
            except Empty:
                raise AssertionError(f"the cell doesn't end: {text}") from None
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != self.cell:
                continue
            if kind == "stream":
                text += content["text"]
            elif kind == "error":
                text += f"{content['ename']}: {content['evalue']}\n"
            elif kind == "status" and content["execution_state"] == "idle":
                break
        return text

    def run(self, code):
        self.start(code)
        return self.texts()


@pytest.fixture
def notebook(tmp_path):
    notebook = Notebook(tmp_path)
    try:
        notebook.client.wait_for_ready(timeout=120)
        yield notebook
    finally:
        notebook.client.stop_channels()
        os.killpg(notebook.kernel.pid, signal.SIGKILL)


def test_a_notebook_trains_evaluates_is_interrupted_and_goes_on(tiny_model, tmp_path, notebook):
    assert notebook.run("import asyncio; print(asyncio.get_running_loop().is_running())") == "True\n"
    output = notebook.run(f"MODEL = {str(tiny_model)!r}\n{OWN}")
    assert "saved: checkpoint-2 elsewhere: True\n" in output and "evaluated: 2" in output, output
    text = notebook.run("print(trainer.config.custom_envs['Own'].env_type)").strip()
    changed = OWN.partition("class OwnLoss")[0].replace('"write"', '"write it"')
    again = f"{changed}\nfrom turnwise.trainer.objects import Objects; print(Objects().text_of(OwnEnv))"
    assert notebook.run(again).strip() != text
    assert notebook.run(again.replace('"write it"', '"write"')).strip() == text, (
        "the hash is that of the class, not of its cell"
    )

    notebook.start(
        "for report in trainer.steps(max_steps=10_000):\n    print('step', report.step, flush=True)"
    )
    notebook.texts(end="step 3")
    os.killpg(notebook.kernel.pid, signal.SIGINT)
    output = notebook.texts()
    assert re.search(r"saved \d+ steps", output) and "KeyboardInterrupt" in output, output
    output = notebook.run(
        "before = trainer.checkpoint; trainer.train(max_steps=int(before.name[11:]) + "
        "1)\nprint(trainer.checkpoint)"
    )
    assert "going on from" in output and "Error" not in output, output
    assert notebook.run("print(asyncio.get_running_loop().is_running())") == "True\n"
    assert notebook.run("await asyncio.sleep(0); print('awaited')") == "awaited\n"
