"""Every shipped config trains: as it stands but for sizes, and for a model that this test makes."""

from __future__ import annotations

import json
import random
import runpy
from pathlib import Path
from typing import get_args

import pytest
import yaml
from toy_examples import on_cpus, toy_policy, toy_sizes

from turnwise.cli.main import main
from turnwise.config import load_config
from turnwise.models.make import make_model
from turnwise.play.tokenizer_text import environment_text
from turnwise.tracking.jsonl import read_metrics
from turnwise.types import Split

ROOT = Path(__file__).parents[2]
ELSEWHERE = (
    "config",
    "tool_config",
    "accelerate",
    "grpo_trainer",
    "sglang_multiturn",
    "langgraph",
    "verifiers",
)
"""Parts of configs, and examples that train in tests of their own."""
CONFIGS = sorted(
    path
    for path in (ROOT / "examples").rglob("*.yaml")
    if path.parent.name not in ELSEWHERE and path.name != "tools.yaml"
)
LIBRARIES = {"agents_sdk": "agents"}
"""The module of a library that an example needs, and that a development environment needn't have."""
LAPTOP = ["strategy_args", "device_mapping", "model_args"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    return make_model(
        "tiny", tmp_path_factory.mktemp("model") / "made", environment_text(), overrides=sizes
    ).folder


def of_sums(folder: Path) -> None:
    """The files of examples/arithmetic, with a few sums each."""
    script = runpy.run_path(str(ROOT / "examples" / "arithmetic" / "sums.py"))
    rows, held_out = script["sums"](seed=0)
    script["write"](folder / "train.jsonl", rows[:16])
    script["write"](folder / "val.jsonl", held_out[:8])
    script["write"](folder / "demos.jsonl", [{"messages": script["conversation"](row)} for row in rows[:16]])


def of_products(folder: Path) -> None:
    """The files of examples/products, with a few products each."""
    script = runpy.run_path(str(ROOT / "examples" / "products" / "products.py"))
    rows = [script["row"](a, b, index, True) for index, (a, b) in enumerate(script["pairs"](seed=0)[:24])]
    script["write"](folder / "train.jsonl", rows[:16])
    script["write"](folder / "val.jsonl", rows[16:])
    rng = random.Random(0)
    script["write"](folder / "demos.jsonl", [script["demonstration"](12, 34, rng, True) for _ in range(16)])


def of_one_digit(folder: Path) -> None:
    """The files of examples/smollm."""
    script = runpy.run_path(str(ROOT / "examples" / "smollm" / "one_digit.py"))
    rows, held_out = script["rows"](seed=0)
    script["write"](folder / "train.jsonl", rows)
    script["write"](folder / "val.jsonl", held_out[:8])


def of_shown_products(folder: Path) -> None:
    """The files of examples/smollm whose prompts show calls of a tool."""
    script = runpy.run_path(str(ROOT / "examples" / "smollm" / "products.py"))
    rows, held_out = script["rows"](seed=0)
    script["write"](folder / "train.jsonl", rows[:16])
    script["write"](folder / "val.jsonl", held_out[:8])


def of_choices(folder: Path) -> None:
    """The files of examples/tool_choice, with a few questions each."""
    script = runpy.run_path(str(ROOT / "examples" / "tool_choice" / "choice.py"))
    asked = script["questions"](seed=0)[:24]
    rows = [script["row"](question, index) for index, question in enumerate(asked)]
    script["write"](folder / "train.jsonl", rows[:16])
    script["write"](folder / "val.jsonl", rows[16:])
    rng = random.Random(0)
    script["write"](folder / "demos.jsonl", [script["demonstration"](question, rng) for question in asked])


ROWS = {
    "arithmetic": of_sums,
    "products": of_products,
    "gateway": of_products,
    "smollm": of_one_digit,
    "smollm/tool": of_shown_products,
    "tool_choice": of_choices,
}


def write_rows(path: Path, folder: Path) -> None:
    """The rows of a config, by its own name, or by that of its folder."""
    example = path.parent.name
    ROWS.get(f"{example}/{path.stem}", ROWS[example])(folder)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_one_small_step(path: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if path.stem in LIBRARIES:
        pytest.importorskip(LIBRARIES[path.stem], reason=f"{path.name} needs {LIBRARIES[path.stem]}")
    changes = [f"pretrain={model}", f"output_dir={tmp_path}", "max_steps=1"]
    if "train_files" in yaml.safe_load(path.read_text(encoding="utf-8")):
        demos = tmp_path / "demos.jsonl"
        if path.parent.name in ROWS:
            write_rows(path, tmp_path)
            changes += [] if path.parent.name == "arithmetic" else ["sequence_length=2048"]
        else:
            assert (
                main(["demos", str(path.parent / "agentic.yaml"), "--episodes", "16", "--out", str(demos)])
                == 0
            )
        assert main(["sft", str(path), *changes, f"train_files=[{demos}]", "--quiet"]) == 0
        return
    config, _ = load_config(path, [])
    if config.data.train_files:
        write_rows(path, tmp_path)
        changes += ["sequence_length=2048"] if path.parent.name != "arithmetic" else []
        changes += [f"data.{split}_files=[{tmp_path / f'{split}.jsonl'}]" for split in get_args(Split)]
    has_critic = config.adv_estimator == "gae"
    for split in get_args(Split):
        manager, num_tags = f"{split}_env_manager", len(config.env_manager(split).tags)
        group_size = 1 if split == "val" or has_critic else 2
        changes += [f"{manager}.num_env_groups={num_tags}", f"{manager}.group_size={group_size}"]
        changes += [f"{manager}.num_groups_partition=[{','.join('1' * num_tags)}]"]
        batch = "val_batch_size" if split == "val" else "rollout_batch_size"
        changes += [f"{batch}={num_tags * group_size}"]
    if "one_gpu" in path.name:
        changes += ["actor_infer.strategy_args=null", "actor_infer.model_args.dtype=fp32"]
        changes += ["actor_train.model_args.dtype=fp32", "actor_train.model_args.attn_implementation=sdpa"]
        changes += ["sequence_length=1024", "actor_train.training_args.gradient_accumulation_steps=1"]
    elif "qwen" in str(path):  # eight GPUs, as its first lines say
        of_reference = LAPTOP if path.stem.endswith("_fsdp2") else LAPTOP[1:]
        roles = {"actor_train": LAPTOP, "actor_infer": LAPTOP, "reference": of_reference}
        changes += [f"{role}.{key}=null" for role, keys in roles.items() for key in keys]
        changes += ["sequence_length=2048", "actor_train.training_args.gradient_accumulation_steps=1"]
    changes += ["critic_warmup=0"] if has_critic else []
    size = len(config.train_env_manager.tags) * (1 if has_critic else 2)
    changes += ["eval_steps=0", f"actor_train.training_args.per_device_train_batch_size={size}"]
    changes += [f"critic.training_args.per_device_train_batch_size={size}"] if has_critic else []
    assert main(["train", str(path), *changes, "--quiet"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("num_devices", [2, 4])
def test_the_example_of_fsdp2_trains_on_fewer_devices(num_devices: int, tmp_path: Path) -> None:
    """The others for eight GPUs are trained by `tests/engines/train_examples.py`."""
    path = ROOT / "examples" / "qwen2.5-0.5B-agentic" / "agent_val_frozen_lake_fsdp2.yaml"
    config, _ = load_config(path, [])
    changes = toy_sizes(config, toy_policy(tmp_path / "model"), tmp_path / "runs", num_devices)
    changes += on_cpus(num_devices)
    for role in ("actor_train", "reference"):
        options = f"{role}.strategy_args.strategy_config"
        changes += [f"{options}.fsdp_size=2", f"{options}.param_dtype=fp32"]
    assert main(["config", str(path), *changes]) == 0
    assert main(["train", str(path), *changes, "--quiet"]) == 0
    [metrics] = (tmp_path / "runs").glob("**/metrics.jsonl")
    steps = read_metrics(metrics)
    assert all(step["actor_train/grad_norm"] > 0 for step in steps)
    assert max(step["parity/logprob_diff_max"] for step in steps) <= 1e-4


def test_the_sums_train_from_python(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    (tmp_path / "sft_model").symlink_to(model)
    monkeypatch.setattr("sys.argv", ["train.py", "--out", str(tmp_path), "--steps", "1"])
    runpy.run_path(str(ROOT / "examples" / "arithmetic" / "train.py"), run_name="imported")["main"]()
    assert (tmp_path / "trained" / "model.safetensors").is_file() and "success" in capsys.readouterr().out


def test_the_word_problems_go_through_six_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    sizes = ["--rounds", "2", "--round-size", "32", "--prompts", "32", "--tests", "4"]
    monkeypatch.setattr("sys.argv", ["word_problems.py", "--out", str(tmp_path), *sizes])
    assert (
        runpy.run_path(str(ROOT / "examples" / "rl_tool" / "word_problems.py"), run_name="imported")["main"]()
        == 0
    )
    assert "imitation, round 2: 0.000" in capsys.readouterr().out, "a model with random weights knows no sums"
    results = json.loads((tmp_path / "training_results.json").read_text())
    assert results["grpo_training"]["num_steps"] == 1 and results["sft_training"]["num_rounds"] == 2
    assert (tmp_path / "report.html").is_file()


def test_imitation_takes_settings_behind_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(ROOT / "examples" / "imitate.py"))
    monkeypatch.setattr("sys.argv", ["imitate.py", "maze.yaml", "--seed", "3", "num_epochs=2"])
    options = script["parse_arguments"]()
    assert (options.config, options.seed, options.overrides) == ("maze.yaml", 3, ["num_epochs=2"])
