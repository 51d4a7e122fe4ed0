"""Every agentic example of the published system, by its keys and values, through the command that a user
would try first."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from messages import mentions, says
from settings.leaves import with_value

from turnwise.cli.main import main
from turnwise.config import load_any_config, load_config
from turnwise.errors import ConfigError

FILES: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[2] / "data" / "published_configs.yaml").read_text(encoding="utf-8")
)
IMAGES, MESSAGES, PROXY = (
    "images in observations",
    "environments that write the messages themselves",
    "through a proxy",
)
RUNNERS, CONCAT, TOOLS = "agent runners", "step templates in one growing context", "tools"
ADAPTERS = "LoRA adapters of Megatron's layers"
DIFFERENCE = "a filter that bounds exp(old) − exp(sampled)"
LACKING: dict[str, set[str]] = {
    "agentic_deepeyes/deepeyes": {IMAGES},
    "agentic_demo/agent_rollout_rock_swe": {MESSAGES},
    "agentic_demo/agent_val_rock_swe": {MESSAGES},
    "agentic_demo/agent_val_rock_swe_qwen35_2b": {MESSAGES, TOOLS},
    "agentic_demo/atropos_gsm8k_grpo_qwen25_0.5b": {MESSAGES},
    "agentic_demo/openreward_endless_terminals_reinforce_qwen35_2b": {MESSAGES, TOOLS},
    "qwen2.5-0.5B-agentic/agent_val_frozen_lake-pg_var_is_correct": {DIFFERENCE},
    "qwen2.5-0.5B-agentic/agentic_val_sokoban_agent_runner": {PROXY, RUNNERS},
    "qwen2.5-0.5B-agentic/agentic_val_sokoban_lora": {ADAPTERS},
    "qwen2.5-0.5B-agentic/agentic_val_sokoban_native": {MESSAGES},
    "qwen2.5-vl-3B-agentic/agentic_val_sokoban": {IMAGES},
    "qwen3_agentic_gem/gem_game_guess_the_number": {CONCAT},
    "qwen3_agentic_gem/gem_math_dapo_python_code": {TOOLS},
    "qwen3_agentic_gem/gem_math_hotpotqa_search": {TOOLS},
    "qwen3_agentic_gem/gem_rg_letter_counting": {CONCAT},
}
"""What this version lacks for a file to be used; the others pass."""
FLAGSHIP = "qwen2.5-0.5B-agentic/agent_val_frozen_lake"


@pytest.fixture
def file_of(tmp_path: Path):
    def write(name: str, **changes: Any) -> Path:
        path = tmp_path / "published.yaml"
        path.write_text(json.dumps(FILES[name] | changes).replace("${", "\\\\${"), encoding="utf-8")
        return path

    return write


def test_the_table_is_of_all_files() -> None:
    assert len(FILES) == 36 and LACKING.keys() < FILES.keys()


@pytest.mark.parametrize("name", FILES)
def test_a_published_file_passes_or_names_what_this_version_lacks(name: str, file_of) -> None:
    try:
        load_any_config(file_of(name))
        refusals = []
    except ConfigError as error:
        refusals = str(error).splitlines()[1:]
    pattern = r"\b(is|are)n't (in this version|supported yet)"
    assert all(re.search(pattern, line) for line in refusals), refusals
    everything = {IMAGES, MESSAGES, PROXY, RUNNERS, CONCAT, TOOLS, ADAPTERS, DIFFERENCE}
    named = {
        feature for feature in everything for line in refusals if re.search(rf"\b{re.escape(feature)}", line)
    }
    assert named == LACKING.get(name, set()), refusals


def test_the_flagship_file_passes_strict(file_of, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(file_of(FLAGSHIP)), "--strict"]) == 0
    said = capsys.readouterr().out
    for key in ("system_envs", "reference", "actor_train.data_args", "actor_train.infer_batch_size"):
        assert f"note: {key}: " in said


def test_defaults_that_differ_are_listed_with_both_values(file_of) -> None:
    def left_out(**changes: Any) -> str:
        [note] = [
            note for note in load_any_config(file_of(FLAGSHIP, **changes))[1] if "other defaults" in note
        ]
        return note

    plain = left_out()
    for part in (
        ("loss_agg_mode", "token-mean here", "seq-mean-token-mean there"),
        ("dual_clip_loss", "true here", "false there"),
        ("dual clip", "3.0 here", "1 + 2 × pg_clip there"),
        ("lambd", "1.0 here", "0.95 there"),
    ):
        assert mentions(plain, *part)
    assert "learning_rate" not in plain and "lr_scheduler_type" not in plain, "the file gives both"
    without = left_out(
        actor_train={"training_args": {"weight_decay": 0}}, loss_agg_mode="token-mean", lambd=1.0
    )
    assert mentions(without, "actor_train.training_args.learning_rate", "1e-06 here", "5e-05 there")
    assert mentions(without, "actor_train.training_args.lr_scheduler_type", "constant here", "linear there")
    assert "loss_agg_mode" not in without and "lambd" not in without


def test_defaults_are_not_compared_in_a_file_without_published_keys() -> None:
    example = Path(__file__).parents[3] / "examples" / "qwen2.5-0.5B-agentic" / "agent_val_frozen_lake.yaml"
    assert not [note for note in load_any_config(example)[1] if "other defaults" in note]


def test_grpo_of_plain_scores_is_read_as_what_it_does_there(file_of) -> None:
    config, notes = load_config(file_of("agentic_demo/agent_val_frozen_lake_single_node_demo"))
    assert (config.adv_estimator, config.reward_placement) == ("reinforce", "final")
    assert any(mentions(note, "adv_estimator", "reinforce", "reward_placement final") for note in notes)


def test_a_file_that_only_plays_needs_no_siblings(file_of) -> None:
    path = file_of("qwen2.5-0.5B-agentic/agentic_rollout_sokoban")
    _, notes = load_any_config(path)
    assert any(
        mentions(note, "group_size", "1", "`train`") and "`train` refuses that" in note for note in notes
    )
    load_config(path, purpose="play")
    with pytest.raises(ConfigError, match=says("group_size", "1", "grpo")):
        load_config(path)


@pytest.mark.parametrize("command", ["rollout", "eval"])
def test_rollout_and_eval_have_no_sibling_rule(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(
        "{pretrain: nowhere, custom_envs: {L: {env_type: frozen_lake}}, train_env_manager: {group_size: 1}}"
    )
    out = ["--out", str(tmp_path / "out.jsonl")] if command == "rollout" else []
    assert main([command, str(path), *out]) != 0  # there is no model
    assert "siblings" not in capsys.readouterr().err
    assert main(["config", str(path)]) == 2
    assert "siblings" in capsys.readouterr().err


def test_what_is_wrong_with_a_tag_that_nothing_plays_is_a_note(tmp_path: Path) -> None:
    envs = {
        "Lake": {"env_type": "frozen_lake"},
        "Tools": {"env_type": "frozen_lake", "tool_wrapper": {"a": 1}},
        "Typo": {"env_type": "frozen_lake", "max_stps": 3},
        "Type": {"env_type": "frozen_lake", "max_steps": "many"},
        "Template": {"env_type": "frozen_lake", "agent_template": "{history}"},
    }
    path = tmp_path / "idle.yaml"
    values = {"pretrain": "x", "custom_envs": envs, "train_env_manager": {"tags": ["Lake"]}}
    path.write_text(json.dumps(values))
    _, notes = load_any_config(path)
    for tag in envs.keys() - {"Lake"}:
        assert [
            note
            for note in notes
            if note.startswith(f"custom_envs.{tag}.") and mentions(note, "manager", "tags")
        ]
        path.write_text(json.dumps(values | {"val_env_manager": {"tags": ["Lake", tag]}}))
        with pytest.raises(ConfigError, match=f"custom_envs.{tag}"):
            load_any_config(path)


@pytest.mark.parametrize(
    "where", [(), ("actor_train",), ("actor_train", "model_args"), ("actor_infer", "training_args")], ids=str
)
def test_use_remove_padding_is_answered_at_any_level(where: tuple[str, ...], file_of) -> None:
    values = with_value(FILES[FLAGSHIP], (*where, "use_remove_padding"), True)
    _, notes = load_any_config(file_of(FLAGSHIP, **values), strict=True)
    key = ".".join([*where, "use_remove_padding"])
    assert mentions(notes, f"{key}: ", "use_sequence_packing")


WEBSHOP = "qwen2.5-7B-agentic_megatron/agentic_val_webshop"


def with_env_config(**changes: Any) -> dict[str, Any]:
    env = FILES[WEBSHOP]["custom_envs"]["WebShopEnv"]
    return {"custom_envs": {"WebShopEnv": env | {"env_config": env["env_config"] | changes}}}


def test_keys_of_the_published_shop_are_read(file_of) -> None:
    changes = with_env_config(num_products=1000, show_attrs=True, env_instruction="Shop.", human_goals=False)
    changes["custom_envs"]["WebShopEnv"]["env_config"] |= {"limit_goals": -1, "file_path": None}
    config, notes = load_config(file_of(WEBSHOP, **changes))
    env = config.custom_envs["WebShopEnv"]
    assert env.env_config == {
        "num_products": 1000,
        "show_attrs": True,
        "env_instruction": "Shop.",
        "format_penalty": -0.05,
        "observation": "full",
    }
    assert env.max_steps == 10
    assert any(mentions(note, "observation_mode", "observation", "full") for note in notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file_path": "items.json"}, says("file_path", "catalogue", "JSONL")),
        ({"server": "http://shop"}, says("server", "process")),
        ({"filter_goals": "all"}, says("filter_goals", "split")),
        ({"limit_goals": 50}, says("limit_goals", "val_batch_size")),
        ({"human_goals": True}, says("human_goals", "module:Class")),
        ({"observation_mode": "html"}, says("observation_mode", "'html'", "full")),
    ],
)
def test_other_keys_of_the_published_shop_are_answered_with_what_to_use(
    changes: dict[str, Any], message: str, file_of
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(file_of(WEBSHOP, **with_env_config(**changes)))
