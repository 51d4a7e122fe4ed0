"""A run folder for `turnwise view`, written by the journal of runs: episodes with tools, branches, long
prompts, failures and hostile texts, from a random generator with a fixed seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.batching.samples import build_samples
from turnwise.rollout.journal import Journal
from turnwise.testing.fakes import byte_tokenizer
from turnwise.tracking.spans import Span, Trace
from turnwise.tracking.traces_file import TracesFile
from turnwise.types import Group, Message, SamplingParams, Task, Trajectory, Turn, VersionRun

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> \u202eevil\u202c "
    "'); window.hacked = 1; (' \u2028 {{7*7}} <b>bold</b> \x00 \u200b &amp; \\u0041 ${1}"
)
LONG = "\n".join(
    f"Rule {number}: never enter room {number * 7 % 40} before room {number}." for number in range(1, 70)
)
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds pages.",
            "parameters": {"type": "object", "properties": {"words": {"type": "string"}}},
        },
    },
)
CALLED = {"name": "search", "arguments": {"words": "sea level"}}
CONFIG = """\
exp_name: viewed
pretrain: {tokenizer}
max_steps: 3
rollout_batch_size: 16
adv_estimator: gigpo
train_env_manager: {{num_env_groups: 4, group_size: 4}}
custom_envs:
  Lake: {{env_type: frozen_lake}}
"""


class Writer:
    """Writes turns with a byte-level tokenizer, as a conversation would."""

    def __init__(self, seed: int = 0) -> None:
        words = [
            "<answer>Left</answer> <answer>Right</answer> the goal is near, so I walk there step by step"
        ]
        self.tokenizer = byte_tokenizer(training_texts=words * 4, vocab_size=400)
        self.random = np.random.default_rng(seed)

    def turn(self, messages: Sequence[Message], text: str, version: int = 0, **fields: Any) -> Turn:
        """A turn whose prompt shows the messages, and whose response is the text."""
        shown = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        prompt_ids = self.tokenizer(shown + "<|im_start|>assistant\n")["input_ids"]
        response_ids = self.tokenizer(text + "<|im_end|>")["input_ids"]
        size = len(response_ids)
        logprobs = -self.random.exponential(0.5, size).astype(np.float32)
        fields.setdefault("sampling", SamplingParams(max_new_tokens=64))
        fields.setdefault("messages", [*messages, {"role": "assistant", "content": text}])
        values = {
            "old": logprobs + self.random.normal(0, 0.02, size).astype(np.float32),
            "entropy": self.random.exponential(0.6, size).astype(np.float32),
        }
        return Turn(
            prompt_ids=np.array(prompt_ids, np.int64),
            response_ids=np.array(response_ids, np.int64),
            logprobs=logprobs,
            versions=(VersionRun(version, size),),
            text=text,
            observation=str(messages[-1]["content"]) if messages else "",
            generate_s=float(self.random.uniform(0.02, 0.4)),
            step_s=float(self.random.uniform(1e-5, 1e-3)),
            token_values=values,
            **fields,
        )

    def group(
        self,
        index: int,
        turns_of: Sequence[list[Turn]],
        tag: str = "Lake",
        payload: Any = None,
        **fields: Any,
    ) -> Group:
        """A group with an episode of each list of turns. The second half of the siblings succeeds."""
        row = index if payload else None
        task = Task(f"train/{tag}/{index}", tag, "train", 2**61 + index, payload=payload or {}, row=row)
        rejected = fields.pop("rejected", None)
        trajectories = []
        for sibling, turns in enumerate(turns_of):
            score = float(sibling >= len(turns_of) / 2)
            trajectory = Trajectory(task, sibling, turns, metrics={"success": score}, **fields)
            if payload:
                trajectory.outcome_rewards = {"gsm8k": score, "length": -0.1}
                trajectory.metrics |= {"reward/gsm8k": score, "reward/length": -0.2}
                trajectory.comments = {"judge/words": f"{'Right' if score else 'Wrong'}. Score: {score:g}"}
            elif turns:
                turns[-1].reward = score
            self._credit(trajectory, score)
            trajectories.append(trajectory)
        return Group(task, trajectories, index, rejected=rejected)

    def _credit(self, trajectory: Trajectory, score: float) -> None:
        trajectory.samples = build_samples(trajectory)
        for sample in trajectory.samples:
            sample.advantages = np.where(sample.response_mask, score - 0.5, 0).astype(np.float32)
            sample.advantages += np.float32(0.1) * self.random.normal(size=sample.num_tokens).astype(
                np.float32
            )


def lake(writer: Writer, index: int, version: int) -> Group:
    """Four episodes of some turns in the same maze."""
    turns_of = []
    for sibling in range(4):
        turns = []
        for number in range(3 + sibling % 2):
            messages = [{"role": "user", "content": f"P{number},{sibling // 2} G3,3 O1,2"}]
            if number == 0:
                messages.insert(0, {"role": "system", "content": "Walk to the goal G and avoid the holes O."})
            action = ("Left", "Right", "Down")[(sibling + number) % 3]
            turn = writer.turn(
                messages,
                f"<answer>{action}</answer>",
                version,
                action=action,
                state_key=f"3f77a1:{number}{sibling // 2}",
                starts_context=number == 0,
                metrics={"action_is_valid": 1.0},
            )
            turns.append(turn)
        turns_of.append(turns)
    return writer.group(index, turns_of)


def tools(writer: Writer, index: int, version: int) -> Group:
    """Two episodes of a row, with a call of a tool and a long prompt."""
    turns_of = []
    for sibling in range(2):
        call = {
            "id": "a",
            "type": "function",
            "function": {"name": "search", "arguments": {"words": "sea level"}},
        }
        first = writer.turn(
            [{"role": "system", "content": LONG}, {"role": "user", "content": "How high is the sea?"}],
            f"the goal is near\n<tool_call>{json.dumps(CALLED)}</tool_call>",
            version,
            starts_context=True,
            tools=TOOLS,
        )
        first.messages = [
            *first.messages[:-1],
            {"role": "assistant", "content": "the goal is near", "tool_calls": [call]},
        ]
        result = [{"role": "tool", "content": "Page 1: 0 m by definition.", "tool_call_id": "a"}]
        second = writer.turn(result, "0 m" + " naïve 海" * sibling, version, finish_reason="stop")
        turns_of.append([first, second])
    payload = {"question": "How high is the sea?", "answer": "0 m"}
    return writer.group(index, turns_of, "rows", payload)


def branches(writer: Writer, index: int, version: int) -> Group:
    """Two episodes whose contexts branch: a sub-agent, and a turn that two others continue."""
    turns_of = []
    for _ in range(2):
        ask = [{"role": "user", "content": "Plan a walk to the goal."}]
        turns = [
            writer.turn(ask, "I walk there step by step", version, starts_context=True),
            writer.turn([{"role": "user", "content": "Go on."}], "Left", version),
            writer.turn([{"role": "user", "content": "Try again."}], "Right", version, parent=0),
            writer.turn(
                [{"role": "user", "content": "You check a plan."}],
                "near",
                version,
                starts_context=True,
                parent=1,
            ),
            writer.turn([{"role": "user", "content": "Go on."}], "the goal", version, parent=2),
            writer.turn([{"role": "user", "content": "Is it safe?"}], "step by step", version, parent=3),
            writer.turn([{"role": "user", "content": "End."}], "the goal is near", version, parent=4),
        ]
        turns_of.append(turns)
    return writer.group(index, turns_of, "tree")


def hostile(writer: Writer, index: int, version: int) -> Group:
    """Two episodes whose texts try to become markup."""
    turns_of = []
    for _ in range(2):
        messages = [{"role": "user", "content": HOSTILE}]
        turn = writer.turn(messages, HOSTILE, version, action=HOSTILE, state_key=HOSTILE, starts_context=True)
        turn.metrics = {HOSTILE: 1.0, "__proto__": 2.0}
        turns_of.append([turn])
    group = writer.group(
        index, turns_of, "hostile", {"question": HOSTILE, "answer": HOSTILE, HOSTILE: HOSTILE}
    )
    group.trajectories[0].error = HOSTILE
    group.trajectories[0].status = "failed"
    group.rejected = "failed"
    return group


def write_run(folder: Path, num_steps: int = 3) -> Path:
    """Writes the run, and returns its folder."""
    folder.mkdir(parents=True)
    writer = Writer()
    tokenizer = folder / "checkpoints" / "checkpoint-3"
    writer.tokenizer.save_pretrained(tokenizer)
    (folder / "config.yaml").write_text(CONFIG.format(tokenizer=tokenizer), encoding="utf-8")
    journal = Journal(folder / "rollouts.jsonl")
    rows = []
    for step in range(num_steps):
        journal.append(step, groups_of(writer, step))
        rows.append(metrics_of(step))
    journal.close()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_traces(folder)
    (folder / "timeline.json").write_text(json.dumps(timeline()), encoding="utf-8")
    return folder


def groups_of(writer: Writer, step: int) -> list[Group]:
    """The groups of one step."""
    first = step * 10
    filtered = lake(writer, first + 1, step)
    filtered.rejected = "filtered"
    return [
        lake(writer, first, step),
        filtered,
        tools(writer, first + 2, step),
        branches(writer, first + 3, step),
        hostile(writer, first + 4, step),
    ]


def write_traces(folder: Path, num_steps: int = 1) -> Path:
    """Writes the traces of the run's first steps as a run with `trace.backend: jsonl` does."""
    path = folder / "traces.jsonl"
    writer = Writer()
    file = TracesFile(path, 10_000_000, None)
    for step in range(num_steps):
        file.write([trace_of(one, step) for group in groups_of(writer, step) for one in group.trajectories])
    file.close()
    return path


def trace_of(trajectory: Trajectory, step: int) -> Trace:
    """The trace of an episode whose responses take 100 ms, 40 of which wait for a server, and whose calls
    take 50 ms."""
    start = 1_700_000_000_000_000_000
    episode = Span("invoke_agent", "episode", start, start, None, error=trajectory.error or "")
    spans = [episode]
    now = start
    for number, turn in enumerate(trajectory.turns):
        attributes: dict[str, Any] = {
            "gen_ai.usage.output_tokens": len(turn.response_ids),
            "gen_ai.response.finish_reasons": [turn.finish_reason],
            "turnwise.turn": number,
            "turnwise.context": 0,
            "turnwise.reused_tokens": 0,
            "turnwise.new_tokens": len(turn.prompt_ids),
        }
        spans.append(Span("chat", "generate", now, now + 100_000_000, 0, attributes, turn=turn))
        spans.append(Span("server_wait", "server_wait", now, now + 40_000_000, len(spans) - 1))
        call: dict[str, Any] = {
            "gen_ai.tool.call.arguments": {"words": HOSTILE},
            "gen_ai.tool.call.result": HOSTILE,
            "turnwise.waited_s": 0.0,
            "turnwise.turn": number,
        }
        now += 150_000_000
        spans.append(Span("execute_tool search", "tool", now - 50_000_000, now, 0, call))
    reward = {"turnwise.reward": trajectory.score}
    spans.append(Span("reward judge", "reward", now, now + 10_000_000, 0, reward))
    episode.end_ns = now + 10_000_000
    tags = {"step": step, "validate": False, "task": trajectory.task.id, "rollout_n": trajectory.sibling}
    tags |= {"status": trajectory.status, "score": trajectory.score}
    return Trace(f"{step:032x}", tags, spans)


def metrics_of(step: int) -> dict[str, Any]:
    """A row of metrics.jsonl."""
    row: dict[str, Any] = {
        "step": step,
        "env/Lake/success": 0.3 + 0.2 * step,
        "rollout/score/mean": 0.3 + 0.2 * step,
    }
    row |= {
        "time/trainer/waiting": 0.6,
        "time/trainer/update": 0.4,
        "time/step_rollout": 1.5,
        "time/step_train": 1.0,
    }
    row |= {"time/rollouts/engine": 0.7, "time/rollouts/waiting": 0.3}
    if step == 1:
        row["health"] = {"entropy_collapse": f"after step 2: {HOSTILE}"}
    return row


def timeline() -> dict[str, Any]:
    """A small Chrome trace."""
    events: list[dict[str, Any]] = []
    for track, name in enumerate(("trainer", "engine"), start=1):
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": track, "args": {"name": name}})
        for number in range(30):
            start = number * 100_000 + track * 20_000
            span = {"ph": "X", "name": ("step", "forward", HOSTILE)[number % 3], "ts": start, "dur": 60_000}
            events.append(span | {"pid": 1, "tid": track, "args": {}})
    return {"displayTimeUnit": "ms", "traceEvents": events}
