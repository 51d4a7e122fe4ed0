"""Trains a toy run with every tracker that keeps a run in a library, offline, and reads what each of them has
kept.

Runs in the environment of the trackers: `python real_trackers.py MODEL FOLDER`.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from turnwise.cli.main import main

NAME = "time/step_wall"
BLOCK, FULL, LAST = 2**15, 1, 4


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log, which may be cut over blocks, after the 7 bytes in which wandb says whose
    it is."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        room = BLOCK - place % BLOCK
        if room < 7:
            place += room
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def wandb_kept(run: Path) -> tuple[dict[int, float], dict[str, object], int]:
    """The steps, settings and number of texts that wandb has kept."""
    from wandb.proto import wandb_internal_pb2

    [path] = run.glob("wandb/offline-run-*/run-*.wandb")
    steps: dict[int, float] = {}
    settings: dict[str, object] = {}
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        row = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
        }
        if NAME in row:
            steps[int(row["_step"])] = row[NAME]
    return steps, settings, len(list(path.parent.glob("files/media/html/*.html")))


def swanlab_kept(run: Path) -> tuple[dict[str, object], int]:
    [folder] = run.glob("swanlab/run-*")
    [kept] = folder.glob("run-*.swanlab")
    assert NAME.encode() in kept.read_bytes()
    config = yaml.safe_load((folder / "files" / "config.yaml").read_text())
    return {name: entry["value"] for name, entry in config.items()}, len(
        list(folder.glob("media/text/*.txt"))
    )


def mlflow_kept(run: Path) -> tuple[dict[int, float], dict[str, str], int]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("letters")
    [kept] = client.search_runs([experiment.experiment_id])
    assert kept.info.status == "FINISHED" and kept.info.run_name == run.name
    history = {metric.step: metric.value for metric in client.get_metric_history(kept.info.run_id, NAME)}
    return history, kept.data.params, len(client.list_artifacts(kept.info.run_id, "samples"))


def traces_kept(run: Path) -> list[tuple[str, dict[str, str], list[str]]]:
    """The id, tags and kinds of spans of each trace of the last step, as MLflow's search finds them."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("letters")
    found = client.search_traces(locations=[experiment.experiment_id], filter_string="tags.step = '1'")
    traces = [client.get_trace(trace.info.trace_id) for trace in found]
    return [
        (trace.info.trace_id, trace.info.tags, [span.span_type for span in trace.data.spans])
        for trace in traces
    ]


def trained(model: str, folder: Path, **keys: object) -> int:
    values = {
        "pretrain": model,
        "output_dir": str(folder),
        "exp_name": "letters",
        "max_steps": 2,
        "seed": 7,
        "sequence_length": 384,
        "rollout_batch_size": 4,
        "train_env_manager": {"num_env_groups": 1, "group_size": 4},
        "custom_envs": {"Toy": {"env_type": "toy_envs:LettersEnv", "max_steps": 1, "max_tokens_per_step": 4}},
        **keys,
    }
    (folder / "letters.yaml").write_text(yaml.safe_dump(values))
    return main(["train", str(folder / "letters.yaml")])


if __name__ == "__main__":
    model, folder = sys.argv[1], Path(sys.argv[2])
    assert trained(model, folder, track_with=["wandb"]) == 2
    assert trained(model, folder, track_with=["swanlab"]) == 2
    offline = {"mode": "offline"}
    assert not list(folder.glob("letters/*")), "a run that was refused has left its folder"
    kwargs = {"wandb": {**offline, "api_key": "0" * 40}, "swanlab": offline}
    everywhere = {"track_with": ["wandb", "swanlab", "mlflow"], "trace": {"backend": "mlflow"}}
    assert trained(model, folder, tracker_kwargs=kwargs, **everywhere) == 0
    [run] = (path.parent for path in folder.glob("letters/*/metrics.jsonl"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = {row["step"] + 1: row[NAME] for row in rows}
    assert len(expected) == 2
    steps, settings, num_texts = wandb_kept(run)
    assert steps == expected and settings["seed"] == 7 and num_texts == 2, (steps, settings, num_texts)
    assert not [name for name in settings if name.startswith("tracker_kwargs")]
    settings, num_texts = swanlab_kept(run)
    assert settings["seed"] == 7 and num_texts == 2, (settings, num_texts)
    steps, settings, num_texts = mlflow_kept(run)
    assert steps == expected and settings["seed"] == "7" and num_texts == 2, (steps, settings, num_texts)
    traces = traces_kept(run)
    assert len(traces) == 4, "one task with its four siblings"
    assert {tags["rollout_n"] for _, tags, _ in traces} == {"0", "1", "2", "3"}, traces
    for _, tags, kinds in traces:
        assert tags["run"] == run.name and tags["status"] in ("finished", "truncated")
        float(tags["score"])
        assert kinds.count("AGENT") == kinds.count("CHAT_MODEL") == 1 and kinds[0] == "AGENT", kinds
    print("wandb, swanlab and mlflow have kept the run")
