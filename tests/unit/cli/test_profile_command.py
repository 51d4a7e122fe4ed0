"""`turnwise train --profile` on the command line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from turnwise.cli.main import main


@pytest.fixture
def job(job):
    """Two short steps. Without the entropy term an update whose episodes all score alike would be left
    out."""
    manager = {"num_env_groups": 2, "group_size": 2}
    return partial(job, entropy_loss_coef=0.001, rollout_batch_size=4, train_env_manager=manager)


def tracks(file):
    """Names of the spans of each track of a Chrome trace, and that each lies within the run."""
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(span["ts"] >= 0 and span["dur"] >= 0 for span in spans)
    return {
        track: {span["name"] for span in spans if names[span["tid"]] == track} for track in names.values()
    }


@pytest.mark.parametrize("ratio", [0, 1])
def test_a_profiled_run_leaves_a_timeline_and_where_each_step_went(job, capsys, ratio):
    assert main(["train", job(async_generation_ratio=ratio), "--profile"]) == 0
    [run] = Path("runs/job").iterdir()
    assert f"timeline: {(run / 'timeline.json').resolve()}" in capsys.readouterr().out
    found = tracks(run / "timeline.json")
    assert {"step 1", "step 2"} <= found["steps"]
    assert {"rollout", "adv", "train", "model_update"} <= found["pipeline"]
    assert found["engine"] == {"step"} and "environments" in found and "optimizer" in found["trainer"]
    [log] = run.rglob("job-*.log")
    assert log.read_text().count("; rollouts: ") == 2


def test_a_resumed_run_keeps_the_timeline_of_the_process_before(job):
    assert main(["train", job(), "--profile", "max_steps=1"]) == 0
    [run] = Path("runs/job").iterdir()
    before = (run / "timeline.json").read_text()
    assert main(["train", "job.yaml", "--profile", "resume_from_checkpoint=true"]) == 0
    assert (run / "timeline.json").read_text() == before
    assert "step 2" in tracks(run / "timeline-from-1.json")["steps"]
