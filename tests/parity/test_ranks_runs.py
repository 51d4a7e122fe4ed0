"""Three steps of whole runs on two ranks are those of one, at the learning rates of the examples: GRPO, PPO
and fine-tuning. Two ranks repeat themselves to the last bit."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_workers import distance
from safetensors.numpy import load_file
from small_runs import TIMES, run_small, small_config

from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.run import start_run
from turnwise.assemble.sft import build_sft
from turnwise.config import AgenticConfig, SFTConfig, load_any_config, parse_config
from turnwise.examine.examined import examine
from turnwise.tracking.jsonl import read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples" / "frozen_lake"
NUM_STEPS, NUM_SAMPLES = 3, 8
ONE, OTHER, TWO = (8, 1, [0]), (2, 4, [0]), (4, 1, [0, 1])
"""Samples of a micro-batch, micro-batches, devices: all make steps of eight samples."""
SAME = (
    "actor/loss",
    "actor/pg_loss",
    "actor_train/grad_norm",
    "critic/loss",
    "critic/grad_norm",
    "sft/loss",
    "sft/grad_norm",
)


def rates(example: str, role: str = "") -> dict[str, Any]:
    """What an example says of a role's optimiser."""
    config, _ = load_any_config(EXAMPLES / example, [])
    arguments = (config.roles[role] if isinstance(config, AgenticConfig) else config).training_args
    names = ("learning_rate", "adam_beta1", "adam_beta2", "weight_decay")
    return {name: arguments.__dict__[name] for name in names}


def role(arguments: dict[str, Any], cut: tuple[int, int, list[int]], **model: Any) -> dict[str, Any]:
    size, num, devices = cut
    cutting = {"per_device_train_batch_size": size, "gradient_accumulation_steps": num}
    return {"training_args": arguments | cutting, "device_mapping": devices, "model_args": model}


@pytest.fixture(scope="module")
def rollouts(tiny_model, tmp_path_factory) -> Path:
    """What is trained on, the same for all."""
    return run_small(
        small_config(tiny_model, tmp_path_factory.mktemp("played"), max_steps=NUM_STEPS)
    ).folder.rollouts


@pytest.fixture
def make_config(tiny_model, tmp_path) -> Callable[..., AgenticConfig | SFTConfig]:
    def make(
        kind: str, is_adapted: bool, cut: tuple[int, int, list[int]], name: str, **adapter: Any
    ) -> AgenticConfig | SFTConfig:
        folder, adapters = (
            tmp_path / name,
            {"lora_rank": 4, "lora_target": "all", **adapter} if is_adapted else {},
        )
        if kind == "sft":
            rows = [
                [{"role": "user", "content": f"{i} _"}, {"role": "assistant", "content": "Up" * (i + 1)}]
                for i in range(24)
            ]
            (tmp_path / "rows.jsonl").write_text(
                "".join(json.dumps({"messages": row}) + "\n" for row in rows)
            )
            shared = {
                "pretrain": str(tiny_model),
                "output_dir": str(folder),
                "sequence_length": 128,
                "track_with": [],
            }
            files = {"train_files": [str(tmp_path / "rows.jsonl")], "max_steps": NUM_STEPS, "save_steps": 1}
            return parse_config(shared | files | role(rates("sft.yaml"), cut, **adapters), SFTConfig)[0]
        policy = rates("lora.yaml" if is_adapted else "agentic.yaml", "actor_train")
        roles = {"actor_train": role(policy, cut, **adapters)}
        if kind == "gae":
            roles["critic"] = role(rates("ppo.yaml", "critic"), cut, **adapters)
        return small_config(tiny_model, folder, max_steps=NUM_STEPS, adv_estimator=kind, **roles)

    return make


def trained(
    config: AgenticConfig | SFTConfig, rollouts: Path | None = None
) -> tuple[dict[str, np.ndarray], list[dict[str, float]]]:
    """The way of each trained tensor in three steps, and the metrics of the steps."""
    folder = start_run(config)
    is_sft = isinstance(config, SFTConfig)
    pipeline = (
        build_sft(examine(config), folder)
        if is_sft
        else build_agentic(examine(config), folder, rollouts=rollouts)
    )
    start = Path(config.output_dir) / "start"
    with closing(pipeline):
        roles = (
            {"": pipeline.sft}
            if is_sft
            else {"": pipeline.actor_train} | ({"critic": pipeline.critic} if pipeline.critic else {})
        )
        for name, trained_role in roles.items():
            trained_role.workers.call("save", start / name, route="rank0").result()
        pipeline.run()
    end = folder.path / "checkpoints" / f"checkpoint-{NUM_STEPS}"
    ways = {}
    for name in roles:
        [file] = [path.name for path in (start / name).glob("*.safetensors")]
        before, after = (load_file(place / name / file) for place in (start, end))
        ways |= {f"{name}/{tensor}": after[tensor].astype(np.float64) - before[tensor] for tensor in after}
    return ways, read_metrics(folder.metrics)


@pytest.mark.parametrize(("kind", "is_adapted"), [("grpo", False), ("gae", True), ("sft", False)])
def test_two_ranks_go_the_way_of_one(make_config, rollouts, kind, is_adapted):
    """Displacement after three steps within 1e-3, or twice what another micro-batch size makes of it. Losses
    differ by 1e-6 on average and by 1e-4 at most, and norms of gradients by a hundred-thousandth."""
    (one, metrics), (two, shared) = (
        trained(make_config(kind, is_adapted, cut, name), rollouts)
        for name, cut in (("one", ONE), ("two", TWO))
    )
    assert any(way.any() for way in one.values())
    if (apart := distance(one, two)) > 1e-3:
        assert apart <= 2 * distance(one, trained(make_config(kind, is_adapted, OTHER, "other"), rollouts)[0])
    compared = [name for name in SAME if name in metrics[0]]
    assert len(compared) >= 2, sorted(metrics[0])
    for name in compared:
        first, second = ([row[name] for row in rows[:NUM_STEPS] if name in row] for rows in (metrics, shared))
        apart = np.abs(np.subtract(first, second))
        if name.endswith("loss"):
            assert apart.mean() <= 1e-6 and apart.max() <= 1e-4, (
                f"{name}: {first} on one rank, {second} on two"
            )
        else:
            np.testing.assert_allclose(second, first, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "is_adapted"), [pytest.param("gae", True, marks=pytest.mark.extra), ("sft", False)]
)
def test_the_same_two_ranks_repeat_a_whole_run_bit_by_bit(make_config, kind, is_adapted):
    """Its own play included, and what the adapters drop."""
    (one, metrics), (other, repeated) = (
        trained(make_config(kind, is_adapted, TWO, name, lora_dropout=0.2)) for name in ("one", "other")
    )
    assert one.keys() == other.keys() and any(way.any() for way in one.values())
    for name, way in one.items():
        np.testing.assert_array_equal(way, other[name], err_msg=name)
    first, second = (
        [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]
        for rows in (metrics, repeated)
    )
    assert first == second and len(first) >= NUM_STEPS
