"""Values that are allowed and far from anything that trains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import small_configs
from messages import mentions, says
from settings.leaves import leaves
from small_configs import SFT, values_of

from turnwise.cli.main import main
from turnwise.config import AgenticConfig, SFTConfig, parse_config
from turnwise.config.checks.learning_rates import TABLE
from turnwise.config.checks.unusual import USUAL


def notes_of(**values: Any) -> list[str]:
    return [note for note in small_configs.notes_of(**values) if "far from the usual" in note]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"use_kl_loss": True, "kl_loss_coef": 1000.0},
            says("kl_loss_coef", "1000", "0.001 to 0.1", "outweighs"),
        ),
        ({"entropy_loss_coef": -0.5}, says("entropy_loss_coef", "-0.5")),
        ({"add_token_level_kl": True, "init_kl_coef": 50.0}, says("init_kl_coef", "50")),
        (
            {"actor_train.training_args.learning_rate": 10.0},
            says("actor_train.training_args.learning_rate", "10"),
        ),
        (
            {"actor_train.training_args.learning_rate": 1e-12},
            says("1e-12", "1e-6 to 1e-4", "3e-3"),
        ),
        (
            {"adv_estimator": "gae", "critic.training_args.learning_rate": 1.0},
            says("critic.training_args.learning_rate", "1"),
        ),
        (
            {"train_env_manager.generating_args.temperature": 50.0},
            "train_env_manager.generating_args.temperature: 50",
        ),
        ({"ppo_epochs": 500}, says("ppo_epochs", "500", "1 to 4")),
        ({"max_grad_norm": 1e-9}, says("max_grad_norm", "1e-09", "0.1 to 10")),
    ],
)
def test_a_value_far_from_any_that_trains_is_one_sentence(values: dict[str, Any], expected: str) -> None:
    (note,) = notes_of(**values)
    assert re.search(expected, note) and note.count(". ") == 0


def test_what_has_no_effect_or_is_usual_or_off_is_left_alone() -> None:
    assert not notes_of(**{"kl_loss_coef": 1000.0, "critic.training_args.learning_rate": 10.0})
    assert not notes_of(
        **{"entropy_loss_coef": 0.0, "pg_clip": 0.2, "actor_infer.generating_args.temperature": 0.7}
    )
    assert not notes_of(use_kl_loss=True, kl_loss_coef=0.0)


def model_of(folder: Path, hidden: int, layers: int) -> str:
    """A folder with the config.json of a model of this size."""
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": 4,
    }
    shape = {"model_type": "qwen3", "vocab_size": 512, "max_position_embeddings": 512, **sizes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("hidden", "layers", "rank", "rate", "said"),
    [
        (128, 4, None, 1e-2, "break"),
        (128, 4, None, 5e-2, "break"),
        (128, 4, None, 3e-3, ""),
        (128, 4, None, 1e-9, "hardly move"),
        (128, 4, None, 1e-6, "hardly move"),
        (128, 4, 8, 5e-3, ""),
        (128, 4, 8, 2e-2, "break"),
        (512, 8, None, 3e-4, ""),
        (1024, 24, None, 1e-6, ""),
        (1024, 24, None, 1e-3, "break"),
        (1024, 24, 8, 1e-4, ""),
        (1024, 24, 8, 1e-2, "break"),
        (4096, 32, None, 1e-6, ""),
        (4096, 32, None, 1e-4, "break"),
    ],
)
def test_usual_learning_rates_depend_on_what_is_trained(
    hidden: int, layers: int, rank: int | None, rate: float, said: str, tmp_path: Path
) -> None:
    values = {
        "pretrain": model_of(tmp_path / "model", hidden, layers),
        "actor_train.training_args.learning_rate": rate,
    }
    found = notes_of(**values, **({"actor_train.model_args.lora_rank": rank} if rank else {}))
    assert len(found) == bool(said) and said in "".join(found)


@pytest.mark.parametrize(("hidden", "layers", "is_said"), [(64, 2, True), (1024, 24, False)])
def test_a_default_learning_rate_is_judged_like_a_set_one(
    hidden: int, layers: int, is_said: bool, tmp_path: Path
) -> None:
    found = notes_of(pretrain=model_of(tmp_path / "model", hidden, layers))
    assert len(found) == is_said
    assert not found or (
        "1e-06, the default" in found[0] and "actor_train.training_args.learning_rate" in found[0]
    )


def test_the_docs_show_the_table_of_learning_rates() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reward_does_not_rise.md").read_text(encoding="utf-8")
    for kind, words in (("full", "all parameters"), ("lora", "a LoRA adapter")):
        for row in TABLE[kind]:
            assert f"| {words} | {row['size']} | {row['low']:g} | {row['high']:g} |" in page


def test_every_row_of_the_table_names_keys_that_exist_and_says_what_happens() -> None:
    known = {leaf.path[-1] for leaf in leaves(AgenticConfig)}
    for row in USUAL:
        assert set(row.keys) <= known
        assert row.below or row.above


def test_fine_tuning_and_the_commands_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = values_of(SFT, **{"training_args.learning_rate": 3.0})
    (note,) = [note for note in parse_config(values, SFTConfig)[1] if "far from" in note]
    assert note.startswith("training_args.learning_rate: 3 is")
    (tmp_path / "own.yaml").write_text(
        "pretrain: models/none\ncustom_envs: {Lake: {env_type: frozen_lake}}\n", encoding="utf-8"
    )
    words = [str(tmp_path / "own.yaml"), "use_kl_loss=true", "kl_loss_coef=1000"]
    assert main(["config", *words, "--strict"]) == 0
    assert mentions(capsys.readouterr().out, "kl_loss_coef", "1000", "note")
    assert main(["train", *words]) == 2, "there is no such model"
    assert mentions(capsys.readouterr().err, "kl_loss_coef", "1000")
