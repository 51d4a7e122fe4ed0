"""`deepspeed_train` is `torch_train` with shared state: the contract of strategies, two ranks against plain
torch in one process, checkpoints that either can go on from, and the presets of accelerate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import deepspeed
import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "parity"))
from rank_workers import InfiniteOnce, Kind, distance
from ranked_roles import ask, make_role, make_roles, runner, steps  # noqa: F401
from strategy_contract import VALUES, StrategyContract, WeightedLoss, weights_of
from toy_model import toy_batches, toy_model, toy_samples, toy_value_model

from turnwise.errors import ConfigError
from turnwise.models.lora import Adapters, LoRASettings
from turnwise.models.make import make_model
from turnwise.runtime.rank import RankContext
from turnwise.training.deepspeed_group import join_role
from turnwise.training.deepspeed_strategy import DeepSpeedStrategy
from turnwise.training.fsdp2_strategy import Fsdp2Strategy
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.settings import StrategySettings

SETTINGS = OptimizerSettings(1e-2, scheduler="linear", total_steps=20)
EPS = 1e-4
"""Adam's ε. With the usual 1e-8 the first steps of parameters without a gradient follow the sign of rounding
errors."""
KINDS = [Kind(stage=stage, rank=rank, eps=EPS) for stage in (1, 2, 3) for rank in (None, 4)]
KINDS += [Kind("value", stage=3, outputs=VALUES, eps=EPS)]


def name_of(kind: Kind) -> str:
    return (
        f"zero{kind.stage}-{'critic' if kind.model == 'value' else 'full' if kind.rank is None else 'lora'}"
    )


def options(stage: int) -> dict:
    return {"options": {"zero_optimization": {"stage": stage}}}


class TestZero1(StrategyContract):
    stage = 1

    def make_strategy(self):
        model = self.model()
        return DeepSpeedStrategy(
            model, StrategySettings(SETTINGS), adapters=self.adapters(model), **options(self.stage)
        )

    def model(self):
        return toy_model()

    def adapters(self, model):
        return None

    def modules(self, strategy):
        return strategy.model.modules()


class TestZero3(TestZero1):
    stage = 3


class TestZero2WithAdapters(TestZero1):
    stage = 2

    def adapters(self, model):
        return Adapters(model, LoRASettings(rank=4, alpha=8, seed=1))


class TestZero3WithAdapters(TestZero2WithAdapters):
    stage = 3


class TestZero3WithValues(TestZero3):
    outputs = VALUES

    def model(self):
        return toy_value_model()


def whole(role) -> dict[str, np.ndarray]:
    """The weights as the inference servers get them."""
    return {name: tensor.float().numpy().copy() for name, tensor in role.sent_weights()}


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_two_ranks_make_the_steps_of_plain_torch(make_role, kind):  # noqa: F811
    """Eleven samples in micro-batches of three: some are empty."""
    plain = Kind(kind.model, rank=kind.rank, outputs=kind.outputs, eps=EPS)
    roles, loss = [make_role(plain, 1), make_role(kind, 2)], WeightedLoss(outputs=kind.outputs)
    starts = [whole(role) for role in roles]
    np.testing.assert_equal(*starts)
    samples = toy_samples(11)
    for output in sorted(kind.outputs):
        alone, shared = (role.forward(samples, output) for role in roles)
        differences = np.concatenate([abs(a - b) for a, b in zip(alone, shared, strict=True)])
        assert differences.mean() <= 1e-6 and differences.max() <= 1e-4
    measured = [steps(role, loss) for role in roles]
    for one, two in zip(*measured, strict=True):
        assert one.keys() == two.keys()
        for name in (
            "actor/loss",
            "actor_train/grad_norm",
            "actor/lr",
            "actor/skipped_steps",
            "actor/backward_steps",
        ):
            np.testing.assert_allclose(two[name], one[name], rtol=1e-4 if "norm" in name else 1e-5)
    moved = [
        {n: v - start[n] for n, v in whole(role).items()} for role, start in zip(roles, starts, strict=True)
    ]
    assert distance(*moved) <= 1e-3


@pytest.mark.parametrize("stage", [1, 3])
def test_one_sample_for_two_ranks(make_role, stage):  # noqa: F811
    roles = [make_role(Kind(eps=EPS), 1), make_role(Kind(stage=stage, eps=EPS), 2)]
    one, two = (role.optimizer_step(toy_samples(1), WeightedLoss(), position=0) for role in roles)
    norms = [
        [metric.value for metric in metrics if metric.name == "actor_train/grad_norm"]
        for metrics in (one, two)
    ]
    np.testing.assert_allclose(*norms, rtol=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_of_all(make_role, stage):  # noqa: F811
    role = make_role(Kind(stage=stage), 2)
    start = whole(role)
    metrics = role.optimizer_step(
        toy_samples(8), InfiniteOnce(role.workers._processes[1].process.life.process_id), position=0
    )
    assert [metric.value for metric in metrics if metric.name == "actor/skipped_steps"] == [1.0]
    np.testing.assert_equal(whole(role), start)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_a_checkpoint_of_two_ranks_goes_on_anywhere(make_role, tmp_path, kind):  # noqa: F811
    """Bit by bit on as many ranks of the stage, and up to rounding on one, on another stage, and by plain
    torch."""
    loss = WeightedLoss(outputs=kind.outputs)
    role = make_role(kind, 2)
    steps(role, loss, 2)
    role.workers.call("save", tmp_path / "state").result()
    at_save = whole(role)
    steps(role, loss, 2)
    expected = {name: value - at_save[name] for name, value in whole(role).items()}
    other = Kind(kind.model, rank=kind.rank, outputs=kind.outputs, stage=kind.stage % 3 + 1, eps=EPS)
    plain = Kind(kind.model, rank=kind.rank, outputs=kind.outputs, eps=EPS)
    for number, (again, num_ranks) in enumerate([(kind, 2), (other, 1), (plain, 2)]):
        resumed = make_role(again, num_ranks)
        resumed.workers.call("load", tmp_path / "state").result()
        np.testing.assert_equal(whole(resumed), at_save)
        steps(resumed, loss, 2)
        moved = {name: value - at_save[name] for name, value in whole(resumed).items()}
        assert distance(expected, moved) <= (0 if number == 0 else 1e-3), again


def test_a_checkpoint_of_plain_torch_goes_on(make_role, tmp_path):  # noqa: F811
    plain, sharded = make_role(Kind(eps=EPS), 1), make_role(Kind(stage=3, eps=EPS), 2)
    steps(plain, WeightedLoss(), 2)
    plain.workers.call("save", tmp_path / "state").result()
    sharded.workers.call("load", tmp_path / "state").result()
    start = whole(plain)
    np.testing.assert_equal(whole(sharded), start)
    moved = []
    for role in (plain, sharded):
        steps(role, WeightedLoss(), 2)
        moved.append({name: value - start[name] for name, value in whole(role).items()})
    assert distance(*moved) <= 1e-3


@pytest.mark.parametrize("stage", [2, 3])
def test_goes_on_from_the_shares_of_fsdp2_and_that_from_it(tmp_path, stage):
    """The weights are the same bit by bit, the next step up to rounding."""
    settings = StrategySettings(OptimizerSettings(1e-3, eps=EPS))
    batches = toy_batches(toy_samples(4))
    shares = Fsdp2Strategy(toy_model(), settings, options={})
    shares.train_step(batches, WeightedLoss())
    shares.save(tmp_path / "shares")
    at_save = weights_of(shares)
    zero = DeepSpeedStrategy(toy_model(), settings, **options(stage))
    zero.load(tmp_path / "shares")
    for name, tensor in weights_of(zero).items():
        assert torch.equal(tensor, at_save[name]), name
    for strategy in (shares, zero):
        strategy.train_step(batches, WeightedLoss(), 1.0)
    for name, tensor in weights_of(zero).items():
        np.testing.assert_allclose(tensor, weights_of(shares)[name], atol=1e-6)
    zero.save(tmp_path / "whole")
    shares.load(tmp_path / "whole")
    for name, tensor in weights_of(zero).items():
        assert torch.equal(tensor, weights_of(shares)[name]), name


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_computes_in_half_precision(half):
    batches, losses = toy_batches(toy_samples(4)), {}
    for dtype in (torch.float32, half):
        strategy = DeepSpeedStrategy(toy_model(), StrategySettings(SETTINGS, dtype=dtype), **options(3))
        metrics = strategy.train_step(batches, WeightedLoss())
        losses[dtype] = sum(float(metric.value) for metric in metrics if metric.name == "loss")
        assert all(tensor.dtype == torch.float32 for _, tensor in strategy.weights())
    assert losses[torch.float32] != losses[half]
    np.testing.assert_allclose(*losses.values(), rtol=0.02)


@pytest.mark.parametrize("stage", [0, 4])
def test_refuses_other_stages(stage):
    with pytest.raises(ConfigError, match="isn't 1, 2 or 3"):
        DeepSpeedStrategy(toy_model(), StrategySettings(SETTINGS), **options(stage))


def test_says_what_deepspeed_refuses():
    zero = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "large"}}
    with pytest.raises(ConfigError, match=r"DeepSpeed .* says: .*reduce_bucket_size"):
        DeepSpeedStrategy(toy_model(), StrategySettings(SETTINGS), options=zero)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_roles_on_other_devices_train_as_if_alone(make_role, make_roles, tmp_path, stage):  # noqa: F811
    """Four processes, a role on each two: its ranks are neither the whole world nor, for the second, those
    that torch numbers from 0, and stand in another order. A checkpoint goes on in the other role."""
    alone = make_role(Kind(eps=EPS), 1)
    start = whole(alone)
    steps(alone, WeightedLoss())
    expected = {name: value - start[name] for name, value in whole(alone).items()}
    roles = make_roles(Kind(stage=stage, eps=EPS), {"actor_train": [0, 1], "critic": [3, 2]})
    for role in roles:
        steps(role, WeightedLoss())
        assert distance(expected, {n: v - start[n] for n, v in whole(role).items()}) <= 1e-3
    first, second = roles
    first.workers.call("save", tmp_path / "state").result()
    second.workers.call("load", tmp_path / "state").result()
    np.testing.assert_equal(whole(second), whole(first))
    for role in (alone, second):
        steps(role, WeightedLoss(), 1)
    moved = [{n: v - start[n] for n, v in whole(role).items()} for role in (alone, second)]
    assert distance(*moved) <= 1e-3


def test_refuses_a_role_on_other_processes_beside_one():
    strategy = DeepSpeedStrategy(toy_model(), StrategySettings(SETTINGS), **options(1))
    assert "ZeRO 1 shards its state over 1 rank" in strategy.info().optimizer
    context = RankContext("critic", world_size=2, peers=(0, 1))
    with pytest.raises(ConfigError, match=r"critic: .* \[0\] here already, and this one is on \[0, 1\]"):
        join_role(deepspeed, torch.device("cpu"), context)


def test_its_launcher_starts_a_training(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": f"{n}"}]}
        for n in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_model("tiny", tmp_path / "model", ["0 1 2 3"])
    settings = {"pretrain": "model", "train_files": ["rows.jsonl"], "output_dir": "runs"}
    settings["training_args"] = {"learning_rate": 1e-3, "per_device_train_batch_size": 2}
    (tmp_path / "sft.yaml").write_text(json.dumps(settings))
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [launcher, "--num_gpus", "2", "--module", "turnwise.cli.main", "sft", "sft.yaml"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "sft on slots 0, 1 (the launcher's processes)" in ended.stdout
    assert list(tmp_path.glob("runs/sft/*/checkpoints/checkpoint-1/model.safetensors"))


if __name__ == "__main__":
    runs = [[__file__, "--noconftest", *sys.argv[1:]]]
    if not sys.argv[1:]:
        runs.append([str(Path(__file__).parents[1] / "parity" / "test_accelerate.py"), "-k", "zero"])
    status = max(
        pytest.main([*run, "-q", "-p", "no:cacheprovider", "-W", "ignore::FutureWarning"]) for run in runs
    )
    print(f"deepspeed: {' and '.join(Path(run[0]).name for run in runs)} ended with status {status}")
    raise SystemExit(status)
