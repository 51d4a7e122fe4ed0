"""A run with traces: every episode of training and validation, and the same training as without."""

from __future__ import annotations

from pathlib import Path

from small_runs import LETTERS, folder_of_run, small_config

from turnwise.rollout.journal import read_journal
from turnwise.tracking.traces_file import read_traces


def test_every_episode_of_a_run_is_traced(tiny_model: Path, tmp_path: Path) -> None:
    config = small_config(
        tiny_model,
        tmp_path,
        max_steps=2,
        eval_steps=2,
        val_batch_size=2,
        val_env_manager={"num_env_groups": 2},
        custom_envs={"Letters": {**LETTERS, "max_steps": 3}},
        data={"reward": "toy_rewards:length"},
        trace={"backend": "jsonl", "token2text": True},
    )
    folder = folder_of_run(config)
    lost: list[str] = []
    traces = list(read_traces(folder.traces, lost))
    assert not lost and {trace.tags["run"] for trace in traces} == {folder.path.name}
    trained = {
        (trace.tags["step"], trace.tags["task"], trace.tags["rollout_n"]): trace
        for trace in traces
        if not trace.tags["validate"]
    }
    played = read_journal(folder.rollouts)
    assert len(trained) == len(played) == 16 and len(traces) == 16 + 2 * 2
    for step, trajectory in played:
        trace = trained[step, trajectory.task.id, trajectory.sibling]
        assert trace.tags["status"] == trajectory.status and trace.tags["score"] == trajectory.score
        generated = [span for span in trace.spans if span.kind == "generate"]
        steps = [span for span in trace.spans if span.kind == "env_step"]
        assert len(generated) == len(steps) == len(trajectory.turns)
        for turn, span, env_step in zip(trajectory.turns, generated, steps, strict=True):
            assert span.attributes["turnwise.response_ids"] == turn.response_ids.tolist()
            assert span.attributes["turnwise.response_text"].startswith(turn.text)
            assert env_step.attributes["turnwise.reward"] == turn.reward
        assert [span.kind for span in trace.spans if span.kind == "reward"] == ["reward"]


def test_without_a_backend_nothing_is_made(tiny_model: Path, tmp_path: Path) -> None:
    folder = folder_of_run(small_config(tiny_model, tmp_path, max_steps=1, eval_steps=0))
    assert not folder.traces.exists()
