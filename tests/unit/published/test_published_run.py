"""A run whose rows are played by a user's loop in verl's form, from a file that imports verl's modules."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from turnwise.cli.main import main
from turnwise.config import parse_config
from turnwise.errors import ConfigError
from turnwise.examine.agents import row_agent_class
from turnwise.examine.graphs import load_graph

LOOP = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op


@register("twice")
class Twice(AgentLoopBase):
    prepared = []

    @classmethod
    def init_class(cls, config, tokenizer, **kwargs):
        cls.prepared.append(config.actor_rollout_ref.rollout.response_length)

    def __init__(self, *args, suffix="!", **kwargs):
        super().__init__(*args, **kwargs)
        self.suffix = suffix

    @rollout_trace_op
    async def run(self, sampling_params, **kwargs):
        assert self.prepared == [4], self.prepared
        metrics = {}
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
        response_ids, mask = [], []
        for _ in range(2):
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id="a", prompt_ids=prompt_ids + response_ids, sampling_params=sampling_params
                )
            added = self.tokenizer.encode(self.suffix, add_special_tokens=False)
            response_ids += output.token_ids + added
            mask += [1] * len(output.token_ids) + [0] * len(added)
        return AgentLoopOutput(
            prompt_ids=prompt_ids, response_ids=response_ids, response_mask=mask, num_turns=4, metrics=metrics
        )
"""


def test_a_published_loop_is_trained(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("published_twice.py").write_text(LOOP)
    Path("agent.yaml").write_text("- {name: twice, _target_: published_twice.Twice, suffix: '?'}\n")
    rows = [{"prompt": str(n), "answer": str(n), "agent_name": "twice"} for n in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = [
        f"pretrain={tiny_model}",
        "data={train_files: rows.jsonl, reward: exact_match}",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=agent.yaml",
        "actor_infer.generating_args.max_new_tokens=4",
        "train_env_manager={num_env_groups: 1, group_size: 2}",
        "rollout_batch_size=2",
        "max_steps=1",
        "eval_steps=0",
        "save_steps=0",
        "sequence_length=256",
        "actor_train.training_args.per_device_train_batch_size=2",
    ]
    Path("run.yaml").write_text("exp_name: published\n")
    assert main(["train", "run.yaml", *[f"++{change}" for change in changes]]) == 0
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    [file] = Path("runs").glob("*/*/rollouts.jsonl")
    episodes = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(episodes) == 2 and not any(episode["error"] for episode in episodes)
    for episode in episodes:
        assert episode["metrics"]["num_turns"] == 4 and episode["metrics"]["generate_sequences"] > 0
        assert [turn["parent"] for turn in episode["turns"]] == [None, 0]


def test_graphs_that_are_not_there_and_estimators_of_states_are_refused() -> None:
    values = {"pretrain": "models/none", "custom_envs": {"Lake": {"env_type": "frozen_lake"}}}
    config, _ = parse_config({**values, "agent": {"graph": "nowhere:graph"}})
    with pytest.raises(ConfigError, match=r"agent\.graph 'nowhere:graph'"):
        load_graph(config)
    states, _ = parse_config({**values, "adv_estimator": "gigpo"})
    with pytest.raises(ConfigError, match="gigpo"):
        row_agent_class(states, {}, "turnwise.published:AgentLoopBase")
