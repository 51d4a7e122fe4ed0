"""`accelerate launch` with the shipped presets: two CPU processes make the steps of one, and what can't run
is refused. `make test` forks the processes itself, with the environment that accelerate gives them."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from turnwise.tracking.jsonl import read_metrics

pytest.importorskip("accelerate")
EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_script.py"
CPU_OVERRIDES = {
    "multi_gpu_ddp": {"num_processes": "2", "mixed_precision": "no"},
    "multi_node_main": {
        "num_processes": "2",
        "mixed_precision": "no",
        "num_machines": "1",
        "main_process_port": "0",
    },
    "deepspeed_zero2": {"num_processes": "2", "mixed_precision": "no"},
    "deepspeed_zero3": {"num_processes": "2", "mixed_precision": "no"},
}
"""The options of each preset that a test on two CPU processes replaces."""
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
ZERO = pytest.mark.skipif(
    not HAS_DEEPSPEED, reason="needs DeepSpeed: tests/engines/train_deepspeed.py runs it"
)
TRAINING: dict[str, dict[str, Any]] = {
    "sft": {"batch_size": 4},
    "grpo": {"batch_size": 2, "num_generations": 4, "max_new_tokens": 8}
    | {"reward_type": "length_penalty", "reward_config": {"max_length": 1, "penalty_weight": 0.01}},
}
TIMEOUT_S = 240


@pytest.fixture
def rows(tmp_path, tiny_model, monkeypatch) -> dict[str, Any]:
    """What every training is told: rows for three steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    texts = [{"prompt": f"P _ {i} O", "completion": f"Left {i}", "ground_truth": str(i)} for i in range(12)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return {"model_name": str(tiny_model), "dataset": "rows.jsonl", "num_epochs": 1, "use_tensorboard": False}


def words(**parameters: Any) -> list[str]:
    return [
        f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"
        for name, value in parameters.items()
    ]


def script(*arguments: str) -> int:
    return int(runpy.run_path(str(SCRIPT), run_name="imported")["main"](arguments))


def launcher_words(preset: str, *arguments: str) -> list[str]:
    """What `accelerate launch` is given."""
    options = [word for name, value in CPU_OVERRIDES[preset].items() for word in (f"--{name}", value)]
    config = ["--config_file", str(EXAMPLES / "accelerate" / f"{preset}.yaml")]
    return [*config, *options, str(SCRIPT), *arguments]


def forked_ranks(preset: str, *arguments: str) -> None:
    """Two processes with the environment that accelerate gives to those of the preset."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    options, *_ = launch._validate_launch_command(
        launch.launch_command_parser().parse_args(launcher_words(preset))
    )
    options.main_process_port = 0
    with pytest.MonkeyPatch.context() as patch:
        for name, value in prepare_multi_gpu_env(options).items():
            patch.setenv(name, value)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks = forked.launch([SCRIPT, *arguments], module="script_file", **pipes)
    outputs = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "on slots 0, 1 (the launcher's processes)" in outputs[0][1]
    assert json.loads(outputs[0][0])["status"] == "success"


def launched(preset: str, *arguments: str) -> None:
    words = launcher_words(preset, *arguments)
    command = [sys.executable, "-m", "accelerate.commands.launch", *words]
    process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert process.returncode == 0, process.stderr
    assert "on slots 0, 1 (the launcher's processes)" in process.stderr
    # Before it, accelerate's own process may have logged DeepSpeed's start there.
    answer = json.loads(process.stdout[process.stdout.index("{\n") :])
    assert answer["status"] == "success"
    zero = {
        "deepspeed_zero2": "ZeRO 2 shards its state and gradients",
        "deepspeed_zero3": "ZeRO 3 shards its state, gradients",
    }
    assert zero.get(preset, "") in process.stderr
    print(process.stdout[: process.stdout.index("{\n")])


def measured(folder: str) -> list[dict[str, float]]:
    [run] = Path(folder, "run").glob("2*")
    return read_metrics(run / "metrics.jsonl")


@pytest.mark.parametrize(
    ("start", "algorithm", "preset", "use_lora"),
    [
        pytest.param(launched, "sft", "multi_node_main", False, marks=pytest.mark.extra),
        (forked_ranks, "grpo", "multi_gpu_ddp", True),
        *(
            pytest.param(launched, algorithm, preset, use_lora, marks=ZERO)
            for preset in ("deepspeed_zero2", "deepspeed_zero3")
            for algorithm in ("sft", "grpo")
            for use_lora in (False, True)
        ),
    ],
)
def test_two_processes_make_three_steps_of_one(rows, start, algorithm, preset, use_lora, tiny_model):
    """The bounds of the project: losses 1e-6 in the mean, gradients 1e-5, displacement after three steps
    1e-3."""
    asked = {
        "algorithm": algorithm,
        **rows,
        **TRAINING[algorithm],
        "max_samples": 3 * TRAINING[algorithm]["batch_size"],
    }
    asked |= {"use_lora": use_lora, "learning_rate": 0.01 if use_lora else 0.001}
    is_sharded = preset.startswith("deepspeed")
    assert script(*words(**asked, output_dir="one")) == 0
    start(preset, *words(**asked, output_dir="two"))
    one, two = measured("one"), measured("two")
    names = {"sft": ("sft/loss", "sft/grad_norm"), "grpo": ("actor/total_loss", "actor_train/grad_norm")}[
        algorithm
    ]
    losses, norms = (np.array([[row[name] for row in rows_] for rows_ in (one, two)]) for name in names)
    assert losses.shape == (2, 3) and abs(losses[0]).max() > 0 and norms.min() > 0
    assert abs(losses[0] - losses[1]).mean() <= 1e-6 and abs(losses[0] - losses[1]).max() <= 1e-4
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-4 if is_sharded else 1e-5)
    file = "adapter_model.safetensors" if use_lora else "model.safetensors"
    ends = [load_file(Path(folder, file)) for folder in ("one", "two")]
    start = {} if use_lora else load_file(tiny_model / "model.safetensors")
    # Adapters start at B = 0; a tied head is written once in both.
    moved = [
        {n: v - start.get(n, 0.0) for n, v in end.items() if n in start or "lora_B" in n} for end in ends
    ]
    assert moved[0] and sum(float((v**2).sum()) for v in moved[0].values()) > 0
    apart = sum(float(((moved[0][n] - moved[1][n]) ** 2).sum()) for n in moved[0])
    assert apart <= 1e-6 * sum(float((v**2).sum()) for v in moved[0].values())


PUBLISHED: dict[str, dict[str, Any]] = {
    "multi_gpu_ddp": {"distributed_type": "MULTI_GPU", "gpu_ids": "all"},
    "deepspeed_zero2": {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
            "zero3_init_flag": False,
            "zero_stage": 2,
        },
    },
}
"""What the two published files hold, beside one machine, four processes and half precision."""


@pytest.mark.parametrize("preset", PUBLISHED)
def test_the_presets_hold_what_was_published(preset):
    ours = yaml.safe_load((EXAMPLES / "accelerate" / f"{preset}.yaml").read_text())
    machine = {
        "compute_environment": "LOCAL_MACHINE",
        "num_processes": 4,
        "machine_rank": 0,
        "num_machines": 1,
    }
    published = {**machine, "mixed_precision": "fp16", **PUBLISHED[preset]}
    assert {name: ours.get(name) for name in published} == published


def test_the_published_presets_are_what_accelerate_reads():
    from accelerate.commands.config.config_args import load_config_from_file

    kinds = {}
    for file in sorted((EXAMPLES / "accelerate").glob("*.yaml")):
        read = load_config_from_file(str(file))
        values = yaml.safe_load(file.read_text())
        assert all(
            getattr(read, name) == value for name, value in values.items() if name != "distributed_type"
        ), file
        kinds[file.stem] = (str(read.distributed_type), read.num_machines, read.num_processes)
        assert CPU_OVERRIDES.get(file.stem, {}).keys() <= values.keys(), (
            "only what a preset says is overridden"
        )
    ddp, zero = "DistributedType.MULTI_GPU", "DistributedType.DEEPSPEED"
    assert kinds["multi_gpu_ddp"] == (ddp, 1, 4) and kinds["multi_node_main"] == (ddp, 4, 16)
    assert kinds["deepspeed_zero2"] == kinds["deepspeed_zero3"] == (zero, 1, 4)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}, "deepspeed_config_file ds.json isn't read"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, "gradient_clipping is 1.0 here"),
        ({"ACCELERATE_USE_FSDP": "true"}, "fsdp2_train"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "mixed_precision fp8 isn't one of no, fp16, bf16"),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}, "leave --cpu out"),
    ],
)
def test_what_accelerate_asks_for_in_vain_is_refused(rows, told, said, monkeypatch, capsys):
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        script(*words(**rows))
    assert ended.value.code == 2 and said in capsys.readouterr().err and not os.path.exists("output")


@pytest.mark.parametrize(
    ("environment", "asked", "status", "said"),
    [
        ({"WORLD_SIZE": "3"}, {"batch_size": 4}, 1, "4 samples, which 3 processes can't share evenly"),
        (
            {"WORLD_SIZE": "3"},
            {"batch_size": 4, "deepspeed": {"zero_optimization": {"stage": 3}}},
            1,
            "3 processes can't share",
        ),
        ({"WORLD_SIZE": "999"}, {"batch_size": 999}, 1, "the launcher started 999 processes"),
        (
            {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "3"},
            {"batch_size": 8},
            1,
            "8 processes, 3 of them on this machine",
        ),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, {"batch_size": 8}, 1, "MASTER_ADDR=127.0.0.1"),
    ],
)
def test_wrong_process_counts_are_refused_before_the_model_is_loaded(
    rows, environment, asked, status, said, monkeypatch, capsys, tiny_model
):
    shutil.copytree(tiny_model, "broken")
    save_file({"nothing": np.zeros(1, np.float32)}, "broken/model.safetensors")
    for name, value in {
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        **environment,
    }.items():
        monkeypatch.setenv(name, value)
    assert script(*words(**{**rows, "model_name": "broken", **asked})) == status
    told = capsys.readouterr()
    assert said in (json.loads(told.out)["message"] if status == 1 else told.err), told
    for name in ("RANK", *environment):
        monkeypatch.delenv(name)
    assert script(*words(**{**rows, "model_name": "broken"})) == 1, "this model can't be loaded"
    assert json.loads(capsys.readouterr().out)["code"] == "model"
