"""docs/metrics.md names every metric that runs write, and none that they don't."""

from __future__ import annotations

import itertools
import re
from contextlib import closing
from pathlib import Path

import pytest
from small_runs import LETTERS, training, write_demonstrations

from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.run import start_run
from turnwise.assemble.sft import build_sft
from turnwise.config import AgenticConfig, SFTConfig, parse_config
from turnwise.examine.examined import examine
from turnwise.tracking.health import RANDOM_SUCCESS
from turnwise.tracking.jsonl import read_metrics

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"

PLAIN = {
    "max_steps": 2,
    "eval_steps": 1,
    "save_steps": 0,
    "rollout_batch_size": 4,
    "val_batch_size": 2,
    "sequence_length": 128,
    "track_with": [],
    "train_env_manager": {"num_env_groups": 2, "group_size": 2},
    "val_env_manager": {"num_env_groups": 2},
    "custom_envs": {"Letters": {**LETTERS, "max_steps": 3}},
}
KL = {"use_kl_loss": True, "add_token_level_kl": True, "init_kl_coef": 0.1, "ppo_epochs": 2}
CORRECTION = {"train_infer_correction": {"is_weight": {}, "filters": [{}]}}
CLIPS = {"adv_estimator": "remax", "reward_clip": 0.5, "advantage_clip": 0.5, "save_steps": 1, **CORRECTION}
CRITIC = {"save_best": {}, "adv_estimator": "gae", "reward_clip": 0.5, "value_clip": 0.2}
BANDIT = {
    "env_type": "toy_envs:BanditEnv",
    "env_config": {"arms": ["yes"], "best": "no"},
    "agent_template": "{observation}",
    "max_tokens_per_step": 2,
}
FILTERED = {"group_filter": "non_zero_variance", "custom_envs": {**PLAIN["custom_envs"], "Bandit": BANDIT}}
UNPARSABLE = {
    "max_steps": 3,
    "custom_envs": {"Letters": LETTERS | {"max_steps": 3, "action_pattern": "<answer>(.*)</answer>"}},
}
COPIED = {"actor_infer": {"model_args": {"dtype": "bf16"}}, "parity_max_logprob_diff": 1.0}
STEPS = {"adv_estimator": "gigpo", "reward_clip": 0.5, "entropy_loss_coef": 0.01, "target_entropy": 9.0}


def documented() -> tuple[set[str], set[str]]:
    """Names of rows that are always there and of rows that need a setting, `{…,…}` expanded and `{tag}`
    left."""
    always, only = set(), set()
    for names, meaning in re.findall(r"(?m)^\| (`.*?`) \|.*\| ([^|]*) \|$", PAGE.read_text(encoding="utf-8")):
        (only if meaning.startswith(("only with", "only after")) else always).update(
            name for pattern in re.findall(r"`([^`]*)`", names) for name in expanded(pattern)
        )
    return always, only


def expanded(pattern: str) -> list[str]:
    parts = re.split(r"\{([^}]*,[^}]*)\}", pattern)
    return ["".join(choice) for choice in itertools.product(*(part.split(",") for part in parts))]


def fits(name: str, pattern: str) -> bool:
    return re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(pattern)), name) is not None


def run(values, kind, build) -> set[str]:
    config, _ = parse_config(values, kind)
    folder = start_run(config)
    with closing(build(examine(config), folder)) as pipeline:
        pipeline.run()
    return {name for row in read_metrics(folder.metrics) for name in row if name != "step"}


@pytest.fixture(scope="module")
def metrics(tiny_model, tmp_path_factory) -> dict[str, set[str]]:
    """What runs of each kind write."""
    folder = tmp_path_factory.mktemp("runs")
    rows = write_demonstrations(folder / "rows.jsonl", 4)
    base = {"pretrain": str(tiny_model), "output_dir": str(folder)}
    sft = {
        "sequence_length": 64,
        "track_with": [],
        "train_files": rows,
        "val_files": rows,
        **training(batch_size=2),
    }
    runs = {
        "plain": {},
        "kl": KL,
        "clips": CLIPS,
        "critic": CRITIC,
        "steps": STEPS,
        "filtered": FILTERED,
        "health": UNPARSABLE,
        "copied": COPIED,
    }
    return {
        **{name: run(base | PLAIN | changes, AgenticConfig, build_agentic) for name, changes in runs.items()},
        "sft": run(base | sft, SFTConfig, build_sft),
    }


def test_every_metric_that_is_written_is_documented(metrics):
    always, only = documented()
    for name in set().union(*metrics.values()):
        assert any(fits(name, pattern) for pattern in always | only), f"{name} isn't in docs/metrics.md"


def test_every_documented_metric_is_written(metrics):
    always, only = documented()
    # Only a run of many steps writes the first one (tests/unit/tracking/test_health.py), and only runs with
    # replicas the others (tests/parity/test_replicas.py).
    of_replicas = {"system/replica_restarts", "time/lent_s", "system/device_idle/0"}
    names = set().union(*metrics.values()) | {RANDOM_SUCCESS} | of_replicas
    assert [
        pattern for pattern in sorted(always | only) if not any(fits(name, pattern) for name in names)
    ] == []


def test_what_needs_no_setting_is_always_there(metrics):
    always, _ = documented()
    agentic = {pattern for pattern in always if not pattern.startswith("sft/")}
    assert [p for p in sorted(agentic) if not any(fits(name, p) for name in metrics["plain"])] == []


def test_what_needs_a_setting_is_not_there_without_it(metrics):
    _, only = documented()
    assert [name for name in sorted(metrics["plain"]) if any(fits(name, pattern) for pattern in only)] == []
