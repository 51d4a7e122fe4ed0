"""`turnwise rollout` and `turnwise train --from-rollouts` on the command line."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path

import pytest
from messages import mentions, says
from small_runs import LETTERS

from turnwise.cli.main import main
from turnwise.rollout.journal import read_groups, read_journal
from turnwise.tracking.traces_file import read_traces

MANAGER = {"num_env_groups": 2, "group_size": 4, "max_env_retries": 0}


@pytest.fixture
def job(job):
    """A run whose episodes aren't played again, with six validation tasks."""
    return partial(job, val_batch_size=6, train_env_manager=MANAGER, val_env_manager={"num_env_groups": 6})


def test_rollouts_are_written_and_summed_up(job, capsys):
    envs = {"Letters": LETTERS, "Bandit": {"env_type": "toy_envs:BanditEnv", "max_tokens_per_step": 2}}
    assert main(["rollout", job(custom_envs=envs), "--batches", "2", "--out", "played.jsonl"]) == 0
    out = capsys.readouterr().out
    rows = read_journal(Path("played.jsonl"))
    assert [step for step, _ in rows] == [0] * 8 + [1] * 8
    table = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert {"all", "Letters", "Bandit", "speed", "rollouts"} <= set(table)
    scores = [trajectory.score for _, trajectory in rows]
    assert f"{sum(scores) / 16:.3f}" in table["all"] and " 16 " in table["all"] and " 8 " in table["Bandit"]
    assert table["rollouts"].split() == ["rollouts", "played.jsonl:", "16", "trajectories"]
    assert not os.path.exists("runs"), "there is no run"


@pytest.mark.parametrize("split", ["train", "val"])
def test_traces_lie_beside_the_rollouts(job, capsys, split):
    config = job(trace={"backend": "jsonl"})
    assert main(["rollout", config, "--batches", "2", "--split", split, "--out", "played.jsonl"]) == 0
    captured = capsys.readouterr()
    assert "played-traces.jsonl" in captured.out and "trace.backend" not in captured.err
    rows = read_journal(Path("played.jsonl"))
    traces = {
        (trace.tags["step"], trace.tags["task"], trace.tags["rollout_n"]): trace
        for trace in read_traces(Path("played-traces.jsonl"), [])
    }
    assert len(rows) == len(traces)
    for step, trajectory in rows:
        trace = traces[step, trajectory.task.id, trajectory.sibling]
        assert trace.tags["score"] == trajectory.score and trace.tags["validate"] == (split == "val")
        assert trace.tags["run"] == "played"
        assert sum(span.kind == "generate" for span in trace.spans) == len(trajectory.turns)


def test_traces_are_not_mixed_with_those_of_another_command(job, refused):
    config = job(trace={"backend": "jsonl"})
    Path("played-traces.jsonl").touch()
    said = refused("rollout", config, "--out", "played.jsonl")
    assert mentions(said, "trace.backend", "played-traces.jsonl") and not Path("played.jsonl").exists()


def test_greedy_siblings_wait_for_nobody(job, capsys):
    assert main(["rollout", job(adv_estimator="remax")]) == 0
    out = capsys.readouterr().out
    assert "10 episodes at once, one of each group greedy" in out and "at most 10 requests at once" in out
    assert "rollouts.jsonl: 10 trajectories" in out
    assert (
        main(["config", "job.yaml"]) == 0 and "temperature 1, 10 episodes at once" in capsys.readouterr().out
    )


def test_validation_tasks_are_those_of_validation(job, capsys):
    assert main(["rollout", job(), "--split", "val", "--json"]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    rows = read_journal(Path("rollouts.jsonl"))
    assert {trajectory.task.split for _, trajectory in rows} == {"val"}
    assert summary["overall"]["num_episodes"] == summary["num_written"] == len(rows) == 6
    assert summary["sampled_tokens"] == sum(len(turn.response_ids) for _, t in rows for turn in t.turns)
    assert summary["tokens_per_s"] > 0 and summary["engine_s"] > summary["environment_s"] >= 0
    assert "episodes at once" in captured.err


def test_limits_and_failures_are_counted(job, capsys):
    Path("odd_env.py").write_text(
        "from toy_envs import LettersEnv\n\n\n"
        "class OddEnv(LettersEnv):\n"
        "    def reset(self, *, seed=None):\n"
        "        self.is_odd = seed % 2 == 1\n"
        "        return super().reset(seed=seed)\n\n"
        "    def step(self, action):\n"
        "        if self.is_odd:\n"
        "            raise RuntimeError('an odd seed')\n"
        "        return super().step(action)\n"
    )
    odd = {"env_type": "odd_env:OddEnv", "env_config": {"num_turns": 9}}
    config = job(odd, train_env_manager=MANAGER | {"max_failed_fraction": 1.0})
    assert main(["rollout", config, "--batches", "4", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["limits"] == {"max_steps": 32} and summary["overall"]["truncated"] == 1.0
    assert summary["num_failed"] == sum(summary["failures"].values()) >= 4
    assert list(summary["failures"]) == ["RuntimeError: an odd seed"]
    assert summary["num_written"] == 32 + summary["num_failed"]


def test_what_was_played_before_an_error_is_kept(job, counting_env, capsys):
    env = counting_env("if Mine.made > 12:", "    raise RuntimeError('worn out')")
    assert main(["rollout", job(env), "--batches", "3"]) == 2
    captured = capsys.readouterr()
    assert "worn out" in captured.err and "most often" in captured.out
    groups = read_groups(Path("rollouts.jsonl")).groups
    assert len([group for group in groups if not group.rejected]) >= 2


def test_ctrl_c_keeps_what_was_played(job, counting_env, capsys):
    env = counting_env("if Mine.made == 10:", "    signal.raise_signal(signal.SIGINT)")
    config = job(env, train_env_manager={"num_env_groups": 1, "group_size": 4}, rollout_batch_size=40)
    assert main(["rollout", config]) == 130
    captured = capsys.readouterr()
    assert captured.err.endswith("interrupted\n") and "8 trajectories" in captured.out
    assert [group.index for group in read_groups(Path("rollouts.jsonl")).groups] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout", "job.yaml", "--out", "nowhere/x.jsonl"], says("folder", "nowhere")),
        (["rollout", "job.yaml", "--out", "job.yaml"], "already exists"),
        (["rollout", "job.yaml", "--out", "x" * 300], says("written", "File name too long")),
        (["rollout", "job.yaml", "--model", "nowhere"], "no such model folder"),
        (["rollout", "job.yaml", "group_filter=own:keep"], "no module 'own'"),
        (["rollout", "job.yaml", "actor_infer.strategy_args.strategy_name=vllm"], "vllm"),
        (["train", "job.yaml", "--from-rollouts", "none.jsonl"], "there is no such file"),
        (["train", "job.yaml", "--from-rollouts", "."], "there is no such file"),
        (["train", "job.yaml", "--from-rollouts", "empty.jsonl"], "it is empty"),
        (["train", "job.yaml", "--from-rollouts", "job.yaml"], "can't be read"),
    ],
)
def test_bad_input_is_answered_in_a_sentence(job, refused, arguments, message):
    job()
    Path("empty.jsonl").touch()
    before = {*os.listdir("."), "runs"}
    assert re.search(message, refused(*arguments))
    assert set(os.listdir(".")) <= before


def test_training_takes_the_file_and_a_cut_one_as_far_as_it_goes(job, capsys):
    config = job()
    assert main(["rollout", config, "--batches", "2"]) == 0
    assert main(["train", config, "--from-rollouts", "rollouts.jsonl"]) == 0
    out = capsys.readouterr().out
    assert mentions(out, "rollouts.jsonl", "4 groups") and "checkpoint-2" in out
    with open("rollouts.jsonl", "r+", encoding="utf-8") as file:
        file.truncate(os.path.getsize("rollouts.jsonl") - 100)
    capsys.readouterr()
    assert main(["train", config, "--from-rollouts", "rollouts.jsonl"]) == 0
    said = capsys.readouterr().err
    assert mentions(said, "1 of 16 lines") and "train/Letters/3 (3 of 4 trajectories)" in said
    assert "training ends before its 2 steps" in said


def test_a_replay_goes_through_the_loop_and_stops_at_the_first_difference(job, capsys):
    config = job()
    assert main(["rollout", config, "--out", "played.jsonl"]) == 0
    capsys.readouterr()
    assert main(["rollout", config, "--replay", "played.jsonl"]) == 0
    assert "8 trajectories, all as recorded" in capsys.readouterr().out
    lines = Path("played.jsonl").read_text().splitlines()

    def complaint(change):
        record = json.loads(lines[2])
        change(record["turns"])
        record["score"] = sum(turn["reward"] for turn in record["turns"])
        Path("changed.jsonl").write_text("\n".join([*lines[:2], json.dumps(record)]))
        assert main(["rollout", config, "--replay", "changed.jsonl"]) != 0
        return f"{record['task']['id']}, sibling {record['sibling']}, ", " ".join(
            capsys.readouterr().err.split()
        )

    def another_id(turns):
        turns[0]["prompt_ids"][3] += 1

    where, said = complaint(another_id)
    assert f"{where}turn 1, position 3: expected [" in said and ", got [" in said
    where, said = complaint(lambda turns: turns[0].update(reward=turns[0]["reward"] + 2.0))
    assert f"{where}turn 1, reward" in said
    where, said = complaint(lambda turns: turns.append(turns[-1]))
    assert mentions(said, "loop ended", "record continues") and where in said


def test_a_replay_reads_the_ids_that_top_p_and_top_k_kept(job, capsys):
    config = job(actor_infer={"generating_args": {"top_p": 0.9, "top_k": 20}})
    assert main(["rollout", config, "--out", "played.jsonl"]) == 0
    records = [json.loads(line) for line in Path("played.jsonl").read_text().splitlines()]
    assert all(
        len(turn["kept_ids"]) == len(turn["response_ids"]) for record in records for turn in record["turns"]
    )
    assert main(["rollout", config, "--replay", "played.jsonl"]) == 0
    assert "8 trajectories, all as recorded" in capsys.readouterr().out
    del records[2]["turns"][0]["kept_ids"][0]
    Path("changed.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert main(["rollout", config, "--replay", "changed.jsonl"]) != 0
    assert mentions(capsys.readouterr().err, "kept_ids", "sampled token")
