"""The reward role in actors: a score head gives what it gives in one process, and a judge answers. This
process loads neither."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from turnwise.assemble.placement import place_here
from turnwise.assemble.ray import open_hosts
from turnwise.assemble.reward_model import build_judge, build_reward_model
from turnwise.config import parse_config
from turnwise.models.load import load_tokenizer, save_model
from turnwise.models.make import make_model
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.types import Group, SamplingParams, Task, Trajectory, Turn

TEXT = "One and one is two. Say it. user assistant system"
TOLERANCE = 1e-5


def group_of(answers: list[str]) -> Group:
    task = Task("train/data/0", "data", "train", 1, payload={"prompt": "one"}, row=0)
    trajectories: list[Trajectory] = []
    for sibling, answer in enumerate(answers):
        turn = Turn(np.array([1]), np.array([2]), np.zeros(1, np.float32), text=answer)
        trajectories.append(Trajectory(task, sibling, [turn]))
    return Group(task, trajectories)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        policy = make_model("tiny", Path(scratch) / "model", [TEXT], seed=0).folder
        torch.manual_seed(0)
        judge = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1).eval()
        judge.config.pad_token_id = 0
        tokenizer = load_tokenizer(policy)
        save_model(judge, tokenizer, Path(scratch) / "classifier")
        rows = Path(scratch) / "rows.jsonl"
        rows.write_text(json.dumps({"prompt": "one"}) + "\n")
        values = {
            "pretrain": str(policy),
            "reward_pretrain": f"{scratch}/classifier",
            "data": {"train_files": str(rows), "reward": "reward_model"},
            "cluster": {"name": "ray"},
            "deadlines": {"start_s": 600},
        }
        config, _ = parse_config(values)
        placement = replace(place_here(config), devices=(), roles={})
        with WatchedRunner() as runner:
            hosts = open_hosts(config, placement, runner.watchdog, runner.stopwatch)
            try:
                answers = ["two", "one one", "Say it"]
                reward = build_reward_model(config, placement, runner, hosts)
                scores = runner.run(reward(group_of(answers))).scores
                for answer, score in zip(answers, scores, strict=True):
                    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": answer}]
                    ids = tokenizer.apply_chat_template(messages, return_dict=False)
                    with torch.no_grad():
                        expected = judge(torch.tensor([ids])).logits.flatten()[-1].item()
                    assert abs(score - expected) <= TOLERANCE, (score, expected)
                judging = {"name": "judge", "args": {"rubric": "It is short."}}
                data = {"train_files": str(rows), "reward": [judging]}
                with_judge, _ = parse_config(values | {"reward_pretrain": str(policy), "data": data})
                chat = build_judge(with_judge, placement, runner, hosts)
                sampling = SamplingParams(max_new_tokens=4)
                answer = runner.run(chat.complete([{"role": "user", "content": "one"}], sampling))
                assert answer.finish_reason in ("stop", "length")
            finally:
                hosts.close()
    print(f"ray: a score head in an actor scores {len(answers)} answers as in one process; a judge answers")


if __name__ == "__main__":
    main()
