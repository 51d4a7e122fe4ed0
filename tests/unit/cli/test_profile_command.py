"""`turnwise train --profile` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from turnwise.cli.main import main


@pytest.fixture
def job(tiny_model, tmp_path, monkeypatch):
    """Writes a config of two short steps, played ahead or one after the other."""
    monkeypatch.chdir(tmp_path)

    def write(ratio):
        values = {
            "exp_name": "job",
            "pretrain": str(tiny_model),
            "output_dir": "runs",
            "max_steps": 2,
            "save_steps": 1,
            "entropy_loss_coef": 0.001,  # Without it an update whose episodes all score alike is left out.
            "rollout_batch_size": 4,
            "sequence_length": 256,
            "track_with": [],
            "async_generation_ratio": ratio,
            "train_env_manager": {"num_env_groups": 2, "group_size": 2},
            "custom_envs": {"Letters": {"env_type": "toy_envs:LettersEnv", "max_steps": 2, "max_tokens_per_step": 4}},
        }
        Path("job.yaml").write_text(yaml.safe_dump(values))
        return "job.yaml"

    return write


def tracks(file):
    """Names of the spans of each track of a Chrome trace, and that each lies within the run."""
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(span["ts"] >= 0 and span["dur"] >= 0 for span in spans)
    return {track: {span["name"] for span in spans if names[span["tid"]] == track} for track in names.values()}


@pytest.mark.parametrize("ratio", [0, 1])
def test_a_profiled_run_leaves_a_timeline_and_where_each_step_went(job, capsys, ratio):
    assert main(["train", job(ratio), "--profile"]) == 0
    [run] = Path("runs/job").iterdir()
    assert f"timeline: {(run / 'timeline.json').resolve()}" in capsys.readouterr().out
    found = tracks(run / "timeline.json")
    assert {"step 0", "step 1"} <= found["steps"]
    assert {"rollout", "adv", "train", "model_update"} <= found["pipeline"]
    assert found["engine"] == {"step"} and "environments" in found and "optimizer" in found["trainer"]
    [log] = run.rglob("job-*.log")
    assert log.read_text().count("; rollouts: ") == 2


def test_a_resumed_run_keeps_the_timeline_of_the_process_before(job):
    assert main(["train", job(0), "--profile", "max_steps=1"]) == 0
    [run] = Path("runs/job").iterdir()
    before = (run / "timeline.json").read_text()
    assert main(["train", "job.yaml", "--profile", "resume_from_checkpoint=true"]) == 0
    assert (run / "timeline.json").read_text() == before
    assert "step 1" in tracks(run / "timeline-from-1.json")["steps"]
