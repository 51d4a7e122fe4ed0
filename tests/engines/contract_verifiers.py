"""verifiers and skyrl-gym themselves: tasks of the one are played by examples/verifiers through the gateway,
an environment of the other is a simulated user.

Runs in the environment of verifiers: `python contract_verifiers.py MODEL`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from turnwise.cli.main import main
from turnwise.rollout.journal import read_journal
from turnwise.tools.skyrl_gym import SkyRLGym
from turnwise.types import Message, Trajectory

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "verifiers"
TASKSET = """
import verifiers.v1 as vf

__all__ = ["LengthTaskset"]


class LengthTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        if self.data.name == "broken":
            raise RuntimeError("the reward is broken")
        return float(len(str(trace.assistant_messages[-1].content)))


class LengthTaskset(vf.Taskset[LengthTask]):
    INFINITE = True

    def load(self):
        for name in ("plain", "broken"):
            yield LengthTask(vf.TaskData(prompt="Say something.", name=name), self.config.task)
        while True:
            data = vf.TaskData(prompt="Say something.", image="debian")
            yield LengthTask(data, self.config.task)
"""
"""Task 0 is rewarded, the reward of task 1 raises, and the others need a container."""
QUESTION = {"role": "user", "content": "Two cats and three dogs: how many pets?"}


def rollout(config: dict[str, Any], folder: Path) -> list[Trajectory]:
    """What `turnwise rollout` writes."""
    out = folder / "rollouts.jsonl"
    out.unlink(missing_ok=True)
    assert status_of(config, folder) == 0
    return [trajectory for _, trajectory in read_journal(out)]


def failure_of(config: dict[str, Any], folder: Path) -> str:
    """What `turnwise rollout` says if every episode fails."""
    (folder / "rollouts.jsonl").unlink(missing_ok=True)
    said = StringIO()
    with redirect_stderr(said):
        assert status_of(config, folder) == 2
    return said.getvalue()


def status_of(config: dict[str, Any], folder: Path) -> int:
    (folder / "job.yaml").write_text(yaml.safe_dump(config))
    return main(["rollout", str(folder / "job.yaml"), "--out", str(folder / "rollouts.jsonl")])


def config_of(model: str, row: dict[str, Any], folder: Path) -> dict[str, Any]:
    rows = folder / f"row{len(list(folder.glob('row*')))}.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    return {
        "pretrain": model,
        "sequence_length": 512,
        "rollout_batch_size": 2,
        "data": {"train_files": str(rows)},
        "actor_infer": {"generating_args": {"max_new_tokens": 8}},
        "train_env_manager": {"num_env_groups": 1, "group_size": 2, "max_env_retries": 0},
    }


def play_verifiers(model: str, folder: Path) -> None:
    (folder / "vf_length.py").write_text(TASKSET)
    configs = []
    for number in range(3):
        row = {"prompt": "Say it.", "taskset": "vf_length", "number": number, "harness": "one_answer"}
        config = config_of(model, row, folder)
        config["data"]["default_agent"] = "gateway"
        config["agent"] = {"play": "with_verifiers:play"}
        configs.append(config)
    plain, broken, contained = configs
    for trajectory in rollout(plain, folder):
        [turn] = trajectory.turns
        assert trajectory.score == len(turn.text), (trajectory.score, turn.text)
    said = failure_of(broken, folder)
    assert "the reward is broken" in said, said
    said = failure_of(contained, folder)
    assert "container debian" in said, said
    for taskset, words in (("vf_nothing", "vf_nothing"), ("vf_length", "container debian")):
        command = [sys.executable, EXAMPLE / "rows.py", taskset, "--num", "4", "--out", folder / "none"]
        paths = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
        environment = os.environ | {"PYTHONPATH": paths}
        refused = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert refused.returncode == 1 and words in refused.stderr, refused.stderr
        assert "Traceback" not in refused.stderr, refused.stderr


def play_skyrl_gym(model: str, folder: Path) -> None:
    user = {"name": "gym", "class_name": "turnwise.tools.skyrl_gym:SkyRLGym"}
    (folder / "users.yaml").write_text(yaml.safe_dump({"interaction": [user]}))
    kwargs = {"name": "gym", "env_class": "gsm8k_multi_turn", "max_turns": 3}
    known = kwargs | {"reward_spec": {"method": "rule", "ground_truth": "5"}}
    configs = []
    for arguments in (known, kwargs):
        row = {"prompt": [QUESTION], "extra_info": {"interaction_kwargs": arguments}}
        config = config_of(model, row, folder)
        config["data"]["default_agent"] = "single_turn_agent"
        config["agent"] = {"interaction_config_path": str(folder / "users.yaml"), "max_user_turns": 5}
        configs.append(config)
    scored, unscored = configs
    for trajectory in rollout(scored, folder):
        assert trajectory.turns and trajectory.score == 0.0
    assert asyncio.run(answered(["five?", "#### 4", "#### 6"], known)) == [0.0, 0.2 / 3, 0.2 / 3]
    assert asyncio.run(answered(["five?", "#### 5"], known)) == [0.0, 1.0]
    said = failure_of(unscored, folder)
    assert "reward_spec" in said, said


async def answered(answers: list[str], arguments: dict[str, Any]) -> list[float]:
    """The rewards of a model's answers, the last of which ends the conversation."""
    gym = SkyRLGym({})
    extras = {key: value for key, value in arguments.items() if key != "name"}
    state = await gym.start_interaction("", **extras)
    messages: list[Message] = [QUESTION]
    rewards = []
    for number, answer in enumerate(answers, start=1):
        messages.append({"role": "assistant", "content": answer})
        is_over, text, reward, metrics = await gym.generate_response(state, messages)
        assert is_over == (number == len(answers)) and bool(text) != is_over
        messages.append({"role": "user", "content": text})
        rewards.append(reward)
    assert metrics["steps"] == len(answers)
    await gym.finalize_interaction(state)
    return rewards


def contract(model: str) -> None:
    sys.path.insert(0, str(EXAMPLE))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sys.path.insert(0, name)
        play_verifiers(model, folder)
        play_skyrl_gym(model, folder)
    print("verifiers: a taskset is played through the gateway, its errors are failures")
    print("skyrl-gym: an environment is a simulated user; a row without reward_spec is a failure")


if __name__ == "__main__":
    contract(sys.argv[1])
