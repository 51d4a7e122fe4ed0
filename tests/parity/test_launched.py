"""A launcher starts the processes: the first runs the pipeline, the others serve it as ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import forked
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file
from small_runs import LAUNCHER, small_yaml, training

from turnwise.cli.main import main
from turnwise.cluster.launched import _checked, _versions
from turnwise.errors import WorkerError

TIMEOUT_S = 120


@pytest.fixture
def folder(tmp_path, tiny_model, monkeypatch) -> Path:
    """Configs of three steps of GRPO and of fine-tuning."""
    monkeypatch.chdir(tmp_path)
    changes = {"sequence_length": 128, "max_steps": 3, "actor_train": training(1e-4, batch_size=4)}
    Path("train.yaml").write_text(small_yaml(tiny_model, **changes))
    rows = [
        {"messages": [{"role": "user", "content": f"a {i}"}, {"role": "assistant", "content": f"b {i}"}]}
        for i in range(12)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = {"pretrain": str(tiny_model), "output_dir": "runs", "train_files": ["rows.jsonl"]}
    sft = {"sequence_length": 128, "track_with": [], "save_steps": 1, **training(1e-3, batch_size=2)}
    Path("sft.yaml").write_text(yaml.safe_dump(places | sft))
    return tmp_path


SCRIPT = """\
import os
import signal
from pathlib import Path

from turnwise import Trainer


class HangsUp:
    def on_step_end(self, report):
        os.kill(int(Path("rank-1").read_text()), signal.SIGHUP)


Path("rank-" + os.environ["RANK"]).write_text(str(os.getpid()))
trainer = Trainer.from_config("train.yaml", exp_name="launched", callbacks=[HangsUp()])
trainer.train()
print("after it:", trainer.save("out"), flush=True)
trainer.train(max_steps=4)
"""


def weights(experiment: str) -> dict[str, np.ndarray]:
    [run] = Path("runs", experiment).glob("2*")
    newest = max(
        (run / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2])
    )
    return load_file(newest / "model.safetensors")


def same_as_processes_of_their_own(verb: str, mapping: str) -> None:
    assert main([verb, f"{verb}.yaml", "exp_name=processes", mapping]) == 0
    for name, tensor in weights("launched").items():
        np.testing.assert_allclose(tensor, weights("processes")[name], atol=2e-5)


def test_launched_processes_fine_tune_as_processes_of_their_own_do(folder):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = forked.launch(["sft", "sft.yaml", "exp_name=launched"], **options)
    said, other = (process.communicate(timeout=TIMEOUT_S)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0], said + other
    assert "on slots 0, 1 (the launcher's processes)" in said and (said + other).count("run folder: ") == 1
    same_as_processes_of_their_own("sft", "device_mapping=[0,1]")


@pytest.mark.extra
def test_a_launched_script_trains_on_all_its_processes_and_goes_on_in_the_first(folder):
    """The others end with the run, so a second one is refused. The signal of a closed terminal, which a
    launcher passes on to every process, is left to the first."""
    Path("script.py").write_text(SCRIPT)
    command = [sys.executable, *LAUNCHER, "script.py"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S
    )
    said = done.stdout
    assert done.returncode == 1 and said.count("after it: out") == 1, said
    assert "WorkerError: the launched processes ended with the first run of this script" in said
    assert "on slots 0, 1 (the launcher's processes)" in said
    same_as_processes_of_their_own("train", "actor_train.device_mapping=[0,1]")


def test_what_cannot_start_under_a_launcher_announces_no_folder(folder, monkeypatch, capsys):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "99",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["sft", "sft.yaml", "num_gpus_per_node=4"]) == 2
    said = capsys.readouterr()
    assert (
        said.out == ""
        and "the launcher started 99 processes" in said.err
        and not list(Path("runs").glob("*/2*"))
    )


def test_other_commands_are_refused_under_a_launcher(folder, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert main(["config", "train.yaml"]) == 2
    assert "only train and sft use" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["turnwise", "Python", "torch", "transformers"])
def test_a_rank_with_another_version_is_refused(name):
    greeting = 1, 4711, "", _versions() | {name: "1.0"}
    with pytest.raises(
        WorkerError, match=rf"rank 1 has {name} 1\.0, and rank 0 \d.*start all processes with the same Python"
    ):
        _checked(None, greeting)
