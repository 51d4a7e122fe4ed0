"""Files, defaults lists, interpolation, overrides, places of errors, and what importing and printing a config
costs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from messages import mentions, says
from small_configs import config_of

from turnwise.cli.main import main
from turnwise.config import SFTConfig, describe, find_config, load_any_config, load_config, parse_config
from turnwise.config.read.yaml_text import KeyLocations
from turnwise.config.show.step_rows import most_sampled
from turnwise.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
PUBLISHED = ROOT / "examples" / "qwen2.5-0.5B-agentic" / "agent_val_frozen_lake.yaml"
ALL_PUBLISHED = [PUBLISHED, PUBLISHED.with_name("agent_val_sokoban.yaml")]
"""The other files beside them are ours: `test_gpu_examples.py`."""

SHARED = """
pattern: <a>(.*?)</a>
unused_here: 3
seed: 1
custom_env:
  Lake:
    env_type: frozen_lake
    action_pattern: ${pattern}
    max_stepz: ${unused_here}
"""
MAIN = """\
defaults:
  - ../config/shared@_here_
pretrain: models/none
seed: 2
custom_envs:
  Lake: ${custom_env.Lake}
actor_train:
  training_args:
    learning_rate: 1e-5
"""


@pytest.fixture
def main_file(tmp_path: Path) -> Path:
    (tmp_path / "config").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "config" / "shared.yaml").write_text(SHARED.replace("max_stepz", "max_steps"))
    path = tmp_path / "run" / "main.yaml"
    path.write_text(MAIN)
    return path


def test_defaults_interpolation_and_overrides(main_file: Path) -> None:
    overrides = [
        "ppo_epochs=2",
        "+max_steps=3",
        "actor_train.training_args.weight_decay=0.1",
        "track_with=[stdout]",
    ]
    config, notes = load_config(main_file, overrides)
    lake = config.custom_envs["Lake"]
    assert (lake.action_pattern, lake.max_steps) == ("<a>(.*?)</a>", 3)
    assert (config.seed, config.ppo_epochs, config.max_steps, config.exp_name) == (2, 2, 3, "main")
    assert config.actor_train.training_args.learning_rate == 1e-5
    assert config.actor_train.training_args.weight_decay == 0.1
    assert config.track_with == ["stdout"]
    assert notes == []


def test_an_override_reaches_what_interpolates_it(main_file: Path) -> None:
    assert load_config(main_file, ['pattern="x(.)"'])[0].custom_envs["Lake"].action_pattern == "x(.)"


def test_an_override_below_an_interpolated_section_changes_only_its_key(main_file: Path) -> None:
    main_file.write_text(
        MAIN.replace("  Lake: ${custom_env.Lake}", "  Lake: ${custom_env.Lake}\n  Other: ${custom_env.Lake}")
    )
    envs = load_config(main_file, ["custom_envs.Lake.max_steps=5", "+custom_envs.Lake.env_config.size=6"])[
        0
    ].custom_envs
    assert (envs["Lake"].max_steps, envs["Lake"].env_config, envs["Lake"].env_type) == (
        5,
        {"size": 6},
        "frozen_lake",
    )
    assert (envs["Other"].max_steps, envs["Other"].env_config) == (3, {})


def test_deleted_keys_and_lists_and_sweeps(main_file: Path) -> None:
    assert load_config(main_file, ["~actor_train"])[0].actor_train.training_args.learning_rate == 1e-6
    assert load_config(main_file, ["+track_with=[stdout,wandb]"])[0].track_with == ["stdout", "wandb"]
    with pytest.raises(ConfigError, match=says("seed=1,2", "key=[1,2]")):
        load_config(main_file, ["seed=1,2"])


def test_nothing_global_stays(main_file: Path) -> None:
    from hydra.core.global_hydra import GlobalHydra

    load_config(main_file)
    with pytest.raises(ConfigError):
        load_config(main_file, ["pretrain=${nowhere}"])
    assert not GlobalHydra.instance().is_initialized()
    assert list(main_file.parent.iterdir()) == [main_file]


def test_an_interpolated_key_is_found_where_it_was_written(main_file: Path) -> None:
    shared = main_file.parent.parent / "config" / "shared.yaml"
    shared.write_text(SHARED)
    with pytest.raises(ConfigError) as caught:
        load_config(main_file)
    assert mentions(str(caught.value), f"{shared}:9", "custom_envs.Lake.max_stepz", "'max_steps'")


def test_interpolation_in_a_circle_has_a_place(tmp_path: Path) -> None:
    path = tmp_path / "circle.yaml"
    path.write_text("a: ${b}\nb: ${a}\n")
    assert KeyLocations([path]).of(("a", "x", "y")).rpartition(":")[0].endswith("circle.yaml")


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("a: [", [], "can't be read"),
        ("a: ${b}", [], says("x.yaml", "'b'", "not found")),
        ("defaults: [nowhere]", [], "can't be read.*nowhere"),
        ("a: 1", ["a=[1"], says("'a=[1'", "quote")),
        ("a: 1\na: 2", [], "can't be read.*duplicate"),
    ],
)
def test_files_that_hydra_refuses(tmp_path: Path, text: str, overrides: list[str], message: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "x.yaml", overrides)


def test_a_missing_file_names_its_neighbour(main_file: Path) -> None:
    with pytest.raises(ConfigError, match=says("Did you mean", "'main.yaml'")):
        load_config(main_file.with_name("mian.yaml"))


def test_folder_and_name_of_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    examples = ROOT / "examples"
    name = "agent_val_frozen_lake"
    assert find_config("examples/qwen2.5-0.5B-agentic", name).samefile(PUBLISHED)
    assert find_config("qwen2.5-0.5B-agentic", name, examples).samefile(PUBLISHED)
    assert find_config(str(PUBLISHED.parent), f"{name}.yaml", tmp_path) == PUBLISHED
    with pytest.raises(ConfigError, match="looked for"):
        find_config("qwen", name, examples)


@pytest.mark.parametrize("path", ALL_PUBLISHED, ids=lambda path: path.stem)
def test_a_published_example_makes_one_optimizer_step_of_a_batch_and_lacks_vllm(path: Path) -> None:
    config, _ = load_config(path)
    assert any("vllm" in line for line in describe(config).missing)
    assert config.optimizer_steps_per_batch() == 1


@pytest.mark.parametrize("path", ALL_PUBLISHED, ids=lambda path: path.stem)
def test_a_published_example_runs_on_a_laptop_as_its_comment_says(path: Path) -> None:
    overrides = re.findall(r"\S+=\S+", path.read_text(encoding="utf-8").split("defaults:")[0])
    assert len(overrides) > 10
    config, _ = load_config(path, overrides, strict=True)
    assert describe(config).missing == []


@pytest.mark.parametrize(
    ("keys", "validation"),
    [
        ("", "never (no val_files)"),
        ("val_files: val.jsonl", "at the end"),
        ("val_files: val.jsonl\neval_steps: 1", "every 1 step and at the end"),
    ],
)
def test_a_file_with_train_files_is_for_fine_tuning(tmp_path: Path, keys: str, validation: str) -> None:
    (tmp_path / "sft.yaml").write_text(f"pretrain: models/none\ntrain_files: demos.jsonl\n{keys}\n")
    config, _ = load_any_config(tmp_path / "sft.yaml")
    assert isinstance(config, SFTConfig)
    rows = dict(describe(config).rows)
    assert "samples" in rows["steps"] and rows["validation"] == validation


def print_config(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["config", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_the_command_prints_yaml_and_table(main_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, _, table = print_config(capsys, main_file).partition("# what this applies")
    assert yaml.safe_load(text)["actor_train"]["training_args"]["learning_rate"] == 1e-5
    assert mentions(table, "64 trajectories", "8 groups of 8", "Lake")
    assert mentions(table, "8 × 8 samples", "1600")
    content = json.loads(print_config(capsys, main_file, "--json"))
    assert content["config"] == yaml.safe_load(text)
    assert mentions(content["applied"]["KL"], "none", "reference")


def test_the_command_says_each_warning_once(main_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main_file.write_text(MAIN + "gamma: 0.9\nsystem_envs: {A: b}\n")
    assert len([note for note in load_config(main_file)[1] if "other defaults" not in note]) == 2
    text = print_config(capsys, main_file)
    assert text.count("gamma: has") == text.count("system_envs: has") == 1
    content = json.loads(print_config(capsys, main_file, "--json"))
    notes = [note for note in content["notes"] if "other defaults" not in note]
    assert (len(content["warnings"]), len(notes)) == (1, 1)


def test_tags_are_said_as_they_are_played() -> None:
    envs = {tag: {"env_type": "frozen_lake"} for tag in ("A", "B", "C")}
    manager = {"num_env_groups": 9, "num_groups_partition": [6, 3, 0]}
    rows = dict(
        describe(config_of(custom_envs=envs, eval_steps=5, val_batch_size=2, train_env_manager=manager)).rows
    )
    assert rows["one step"] == "64 trajectories in 8 groups of 8, from A, B (groups 2 : 1)"
    few = "2 groups hold at most 2 of the 3 tags in validation, always the same ones"
    assert (
        rows["validation"]
        == f"every 5 steps, temperature 1, 2 trajectories from A, B, C (groups 3 : 3 : 2); {few}"
    )


def memory_of_a_llama(main_file: Path, folder: Path, *overrides: str) -> dict[str, str]:
    shape = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 1000, "intermediate_size": 1000}
    content = shape | {"vocab_size": 1000, "num_attention_heads": 10, "max_position_embeddings": 100}
    (folder / "config.json").write_text(json.dumps(content))
    config, _ = load_config(
        main_file, [f"pretrain={folder}", "custom_envs.Lake.max_tokens_per_step=8", *overrides]
    )
    return dict(describe(config).rows)


def test_memory_is_estimated_from_config_json(main_file: Path, tmp_path: Path) -> None:
    rows = memory_of_a_llama(main_file, tmp_path)
    assert "9.00 M parameters, context 100" in rows["model"]
    assert mentions(rows["memory"], "144.0 MB weights", "51.2 MB keys and values", "64 contexts")
    assert mentions(rows["memory"], "36.0 MB", "CPU")
    assert "sampler" not in rows["memory"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor_infer.strategy_args.strategy_name=hf", []),
        ("actor_infer.strategy_args.strategy_name=vllm", ["36.0 MB sampler"]),
        ("actor_infer.model_args.dtype=bf16", ["18.0 MB sampler"]),
        ("actor_train.model_update_frequency=2", ["36.0 MB sampler", "36.0 MB packed"]),
        ("async_generation_ratio=1", ["36.0 MB sampler", "36.0 MB on the way", "36.0 MB packed"]),
        (
            "actor_infer.device_mapping=[0,1]",
            ["72.0 MB in 2 samplers", "36.0 MB on the way", "72.0 MB packed"],
        ),
        (
            "actor_train.device_mapping=[0,1]",
            ["on each of 2 ranks", "36.0 MB sampler", "36.0 MB on the way", "36.0 MB packed"],
        ),
    ],
)
def test_memory_has_every_copy_of_the_weights(main_file: Path, tmp_path: Path, override, expected) -> None:
    memory = memory_of_a_llama(main_file, tmp_path, override)["memory"]
    copies = re.findall(
        r"on each of \d ranks|[\d.]+ MB (?:(?:in \d )?samplers?|on the way|weights packed)", memory
    )
    assert [copy.replace("weights packed", "packed") for copy in copies] == expected


def test_memory_of_the_cache_is_at_most_its_bound(main_file: Path, tmp_path: Path) -> None:
    bound = "actor_infer.strategy_args.strategy_config.kv_cache_bytes=20000000"
    memory = memory_of_a_llama(main_file, tmp_path, bound)["memory"]
    assert mentions(memory, "20.0 MB keys and values", "kv_cache_bytes", "51.2 MB")
    unbounded = memory_of_a_llama(main_file, tmp_path, "actor_infer.strategy_args.strategy_name=hf")["memory"]
    assert "at most 51.2 MB" in unbounded and "kv_cache_bytes" not in unbounded


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        ({}, 40),
        ({"agent.function_tool_path": "tools.py"}, 100),
        ({"agent.function_tool_path": "tools.py", "agent.max_assistant_turns": 2}, 80),
        ({"data.default_agent": "tool_agent"}, 100),
    ],
    ids=str,
)
def test_an_episode_of_a_row_may_sample_as_many_responses_as_its_agent_takes(keys, most):
    data = {"train_files": "rows.jsonl", "reward": "exact_match"}
    sizes = {"sequence_length": 100, "actor_infer.generating_args.max_new_tokens": 40}
    assert most_sampled(config_of(data=data, custom_envs={}, **sizes | keys)) == most


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        (
            {"actor_train.training_args.per_device_train_batch_size": 64},
            says("1 batch", "as they end"),
        ),
        (
            {"async_generation_ratio": 2, "stream_training": False},
            says("2 batches", "when the batch is complete"),
        ),
        ({"async_generation_ratio": 2}, says("2 batches")),
        ({"train_infer_correction.is_weight": {}}, says("corrected", "train_infer_correction")),
        ({"train_infer_correction.is_weight.enabled": False}, says("train_infer_correction", "as they are")),
        ({"use_rollout_log_probs": True}, says("ratios", "policies")),
    ],
    ids=["as it is", "as a whole", "two ahead", "corrected", "switched off", "spanned"],
)
def test_an_asynchronous_run_says_what_becomes_of_stale_samples(changes, row):
    rows = dict(describe(config_of(**{"async_generation_ratio": 1} | changes)).rows)
    assert re.search(row, rows["asynchronous"])
    assert mentions(rows["actor_train"], "trainer's process")
    assert "asynchronous" not in dict(describe(config_of()).rows)


def test_files_beside_the_config_are_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, elsewhere = tmp_path / "job" / "rows.yaml", tmp_path / "elsewhere"
    config.parent.mkdir()
    elsewhere.mkdir()
    data = {"train_files": ["a.jsonl", "b.jsonl"], "reward": "exact_match"}
    config.write_text(
        yaml.safe_dump({"pretrain": "M", "data": data, "agent": {"tool_config_path": "t.yaml"}})
    )
    for name in ("a.jsonl", "b.jsonl", "t.yaml"):
        (config.parent / name).write_text("")
    (elsewhere / "b.jsonl").write_text("")
    monkeypatch.chdir(elsewhere)
    loaded, notes = load_config("../job/rows.yaml")
    assert loaded.data.train_files == [os.path.join("..", "job", "a.jsonl"), "b.jsonl"], (
        "the working directory comes first"
    )
    assert loaded.agent.tool_config_path == os.path.join("..", "job", "t.yaml")
    assert sum("beside the config" in note for note in notes) == 2


def test_validation_rows_that_no_step_plays_are_noted() -> None:
    rows = {"train_files": ["a.jsonl"], "val_files": ["b.jsonl"], "reward": "exact_match"}
    sizes = {"pretrain": "M", "data": rows}
    notes = [parse_config({**sizes, "eval_steps": steps})[1] for steps in (0, 5)]
    assert [any("val_files" in note and "eval_steps" in note for note in of_steps) for of_steps in notes] == [
        True,
        False,
    ]
