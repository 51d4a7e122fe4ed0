"""`megatron_train` is `torch_train` with a divided model: the contract of strategies, ranks of each kind of
parallelism against plain torch in one process, checkpoints that other strategies can go on from, and whole
runs."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "parity"))
from megatron_cpu import on_a_cpu
from megatron_strategies import recorded
from rank_workers import InfiniteOnce, Kind, distance
from ranked_roles import STEPS, in_two_parts, make_role, make_roles, runner, steps  # noqa: F401
from small_runs import measured, played, run_small, small_config, training
from strategy_contract import VALUES, StrategyContract, WeightedLoss
from toy_model import TINY, toy_batches, toy_model, toy_samples, toy_value_model, with_kept_ids

from turnwise.cluster.fork_server import prepare_processes
from turnwise.errors import ConfigError, ModelError
from turnwise.models.make import make_model
from turnwise.protocols import StepPart
from turnwise.runtime.rank import RankContext
from turnwise.spec.megatron_options import PASSED
from turnwise.training.model_source import ModelSource
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.settings import StrategySettings
from turnwise.training.torch_strategy import TorchStrategy

SITE = Path(__file__).parents[1] / "support" / "megatron_site"
# Processes that the tests start run Megatron on a CPU too; they are forked off one that has imported it.
os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), os.environ["PYTHONPATH"]])
prepare_processes(["turnwise.assemble.strategies", "turnwise.training.megatron.strategy"])

EPS = 1e-4
"""Adam's ε. With the usual 1e-8 the first steps of parameters without a gradient follow the sign of rounding
errors."""
SETTINGS = StrategySettings(OptimizerSettings(1e-2, scheduler="linear", total_steps=20))
UNTIED = {"tie_word_embeddings": False}
KINDS: dict[str, tuple[int, Kind]] = {
    "tp2": (2, Kind(megatron={"tensor_model_parallel_size": 2})),
    "pp2": (2, Kind(megatron={"pipeline_model_parallel_size": 2})),
    "dp2": (2, Kind(megatron={})),
    "dp2_plain_optimizer": (2, Kind(megatron={"use_distributed_optimizer": False}, max_grad_norm=0.1)),
    "tp2_pp2": (4, Kind(megatron={"tp_size": 2, "pp_size": 2})),
    "tp2_dp2": (4, Kind(megatron={"tp_size": 2})),
    "sequence_parallel": (2, Kind(megatron={"tp_size": 2, "sequence_parallel": True})),
    "interleaved": (
        3,
        Kind(
            megatron={"pp_size": 3, "virtual_pipeline_model_parallel_size": 2},
            config={"num_hidden_layers": 6},
        ),
    ),
    "cp2": (2, Kind(megatron={"context_parallel_size": 2})),
    "cp2_dp2": (4, Kind(megatron={"context_parallel_size": 2})),
    "cp2_tp2": (4, Kind(megatron={"cp_size": 2, "tp_size": 2, "sequence_parallel": True})),
    "value_cp2_pp2": (4, Kind("value", megatron={"cp_size": 2, "pp_size": 2}, outputs=VALUES)),
    "llama": (2, Kind(megatron={"tp_size": 2}, config={"model_type": "llama", **UNTIED})),
    "qwen2": (2, Kind(megatron={"pp_size": 2}, config={"model_type": "qwen2", **UNTIED})),
    "value_tp2": (2, Kind("value", megatron={"tp_size": 2}, outputs=VALUES)),
    "value_pp2": (2, Kind("value", megatron={"pp_size": 2}, outputs=VALUES)),
    "checkpointing": (2, Kind(megatron={"tp_size": 2}, is_gradient_checkpointing=True)),
    "clipped": (2, Kind(megatron={"tp_size": 2}, max_grad_norm=0.1)),
}


def named(*names: str) -> Any:
    return [pytest.param(*KINDS[name], id=name) for name in names or KINDS]


def pair(make_role: Any, num_ranks: int, kind: Kind) -> tuple[Any, Any]:  # noqa: F811
    """The kind in plain torch on one rank, and divided."""
    one = replace(kind, megatron=None, averages=False, eps=EPS)
    return make_role(one, 1), make_role(replace(kind, eps=EPS), num_ranks)


def ask(role: Any, method: str, *arguments: Any) -> Any:
    """What the rank that speaks answers where all are asked."""
    return role.workers.call(method, *arguments, route="broadcast").result()


def moved(role: Any, start: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value - start[name] for name, value in ask(role, "parameters").items()}


@pytest.mark.parametrize(("num_ranks", "kind"), named())
def test_ranks_make_the_steps_of_plain_torch(make_role, num_ranks, kind):  # noqa: F811
    """Log-probs 1e-6 in the mean, gradients and their norm 1e-5, displacement after three steps and one in
    two parts 1e-3. AdamW hides a gradient of a wrong scale, so gradients are compared."""
    loss = WeightedLoss(outputs=kind.outputs)
    roles = pair(make_role, num_ranks, kind)
    starts = [ask(role, "parameters") for role in roles]
    np.testing.assert_equal(*starts)
    samples = toy_samples(11)
    for output in sorted(kind.outputs):
        alone, divided = (role.forward(samples, output) for role in roles)
        differences = np.concatenate([abs(a - b) for a, b in zip(alone, divided, strict=True)])
        assert differences.mean() <= 1e-6 and differences.max() <= 1e-4
    first = [steps(role, loss, 1)[0] for role in roles]
    assert distance(*(ask(role, "last_gradient") for role in roles)) <= 1e-5
    assert first[0].keys() == first[1].keys()
    for name in ("actor/loss", "actor_train/grad_norm", "actor/lr", "actor/skipped_steps"):
        np.testing.assert_allclose(first[1][name], first[0][name], rtol=1e-5)
    for role in roles:
        steps(role, loss, STEPS - 1)
        in_two_parts(role, loss)
    assert distance(*(ask(role, "last_gradient") for role in roles)) <= 1e-5
    displaced = [moved(role, start) for role, start in zip(roles, starts, strict=True)]
    assert distance(*displaced) <= 1e-3


def test_what_megatron_averages_would_show(make_role):  # noqa: F811
    """Its schedule divides by the number of micro-batches, and its copies of the model take the mean, unless
    they are told not to."""
    num_ranks, kind = KINDS["dp2"]
    plain, divided = pair(make_role, num_ranks, replace(kind, averages=True))
    for role in (plain, divided):
        role.optimizer_step(toy_samples(11), WeightedLoss(), position=0)
    assert distance(*(ask(role, "last_gradient") for role in (plain, divided))) >= 0.5


@pytest.mark.parametrize(("num_ranks", "kind"), named("dp2", "tp2_dp2"))
def test_one_sample_for_two_copies(make_role, num_ranks, kind):  # noqa: F811
    """The other copy passes over a batch that counts nothing."""
    roles = pair(make_role, num_ranks, kind)
    for role in roles:
        role.optimizer_step(toy_samples(1), WeightedLoss(), position=0)
    assert distance(*(ask(role, "last_gradient") for role in roles)) <= 1e-5


@pytest.mark.parametrize(("num_ranks", "kind"), named("dp2", "pp2"))
def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_of_all(make_role, num_ranks, kind):  # noqa: F811
    role = make_role(kind, num_ranks)
    start = ask(role, "parameters")
    process = role.workers._processes[1].process.life.process_id
    metrics = role.optimizer_step(toy_samples(8), InfiniteOnce(process), position=0)
    assert [metric.value for metric in metrics if metric.name == "actor/skipped_steps"] == [1.0]
    np.testing.assert_equal(ask(role, "parameters"), start)


@pytest.mark.parametrize(
    ("num_ranks", "kind"), named("tp2", "pp2", "dp2", "value_tp2", "dp2_plain_optimizer", "tp2_dp2", "cp2")
)
def test_a_checkpoint_goes_on_anywhere(make_role, tmp_path, num_ranks, kind):  # noqa: F811
    """Bit by bit on the same ranks; up to rounding in plain torch, from which Megatron can go on too."""
    loss = WeightedLoss(outputs=kind.outputs)
    _, divided = pair(make_role, num_ranks, kind)
    steps(divided, loss, 2)
    divided.workers.call("save", tmp_path / "divided").result()
    at_save = ask(divided, "parameters")
    steps(divided, loss, 1)
    expected = moved(divided, at_save)
    plain, again = pair(make_role, num_ranks, kind)
    for role in (plain, again):
        role.workers.call("load", tmp_path / "divided").result()
        np.testing.assert_equal(ask(role, "parameters"), at_save)
    plain.workers.call("save", tmp_path / "plain").result()
    steps(again, loss, 1)
    np.testing.assert_equal(moved(again, at_save), expected)
    divided.workers.call("load", tmp_path / "plain").result()
    for role in (divided, plain):
        steps(role, loss, 1)
        assert distance(expected, moved(role, at_save)) <= 1e-3


def test_fsdp2_goes_on_by_megatron_and_that_by_plain_torch(make_role, tmp_path):  # noqa: F811
    kinds = [(Kind(fsdp2={}, eps=EPS), 2), (Kind(megatron={"tp_size": 2}, eps=EPS), 2), (Kind(eps=EPS), 1)]
    loss = WeightedLoss()
    alone = make_role(Kind(eps=EPS), 1)
    start = ask(alone, "parameters")
    for number in range(3):
        alone.optimizer_step(toy_samples(11, seed=number), loss, position=number)
    folder = None
    for number, (kind, num_ranks) in enumerate(kinds):
        role = make_role(kind, num_ranks)
        if folder is not None:
            role.workers.call("load", folder).result()
        role.optimizer_step(toy_samples(11, seed=number), loss, position=number)
        folder = tmp_path / str(number)
        role.workers.call("save", folder).result()
    assert distance(moved(alone, start), moved(role, start)) <= 1e-3


@pytest.mark.parametrize(("num_ranks", "kind"), named("tp2", "pp2"))
def test_what_is_sent_is_the_model_of_plain_torch(make_role, num_ranks, kind):  # noqa: F811
    roles = pair(make_role, num_ranks, kind)
    alone, divided = (dict(role.sent_weights()) for role in roles)
    assert alone.keys() == divided.keys()
    assert all(torch.equal(alone[name], divided[name]) for name in alone)


def test_fp16_scales_the_loss_alike_on_all_ranks(make_role):  # noqa: F811
    """Plain torch adds up the gradients of q, k and v in fp32, Megatron in fp16, so it may skip other
    steps."""
    num_ranks, kind = KINDS["tp2"]
    plain, divided = pair(make_role, num_ranks, replace(kind, dtype=torch.float16))
    alone, here = (steps(role, WeightedLoss(), 2 * STEPS) for role in (plain, divided))
    assert alone[0]["actor/loss"] == pytest.approx(here[0]["actor/loss"], rel=1e-3)
    scales = [divided.workers.at(rank).call("loss_scale").result() for rank in range(num_ranks)]
    num_skipped = sum(step["actor/skipped_steps"] for step in here)
    assert scales == [2.0 ** (16 - num_skipped)] * num_ranks and num_skipped < len(here)


SAME = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor_train/grad_norm", "critic/grad_norm")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model("tiny", folder, ["abcdefghij"], overrides={**TINY, "num_key_value_heads": 2})
    return folder


def make_config(model: Path, folder: Path, engine: str, sizes: dict[str, Any], **changes: Any) -> Any:
    strategy = {"strategy_config": sizes} if engine == "megatron" else {}
    trained = {
        **training(5e-3, 4),
        "device_mapping": [0, 1],
        "strategy_args": {"strategy_name": f"{engine}_train", **strategy},
    }
    if "tensor_model_parallel_size" in sizes or "pipeline_model_parallel_size" in sizes:
        # As many samples in a step, though one copy computes what two did.
        number = 2 if engine == "megatron" else 1
        trained["training_args"]["gradient_accumulation_steps"] = number
    return small_config(
        model,
        folder / "runs",
        exp_name=engine,
        num_gpus_per_node=2,
        actor_train=trained,
        critic=trained,
        reference={"strategy_args": {"strategy_name": f"{engine}_infer", **strategy}},
        **{"max_steps": 3, **changes},
    )


RUNS = {
    "tp2_reference": ({"tensor_model_parallel_size": 2}, {"use_kl_loss": True}),
    "pp2_critic": ({"pipeline_model_parallel_size": 2}, {"adv_estimator": "gae"}),
    "dp2_streamed": ({}, {"use_kl_loss": True}),
}


@pytest.mark.parametrize(("sizes", "changes"), RUNS.values(), ids=RUNS)
def test_a_run_with_megatron_is_one_with_plain_torch(tiny_model, tmp_path, sizes, changes):
    """The same rollouts, losses and gradient norms; the embedded server gets what is trained (the parity
    gate)."""
    configs = [
        make_config(tiny_model, tmp_path, engine, sizes, **changes) for engine in ("torch", "megatron")
    ]
    folders = [run_small(config).folder for config in configs]
    tokens = [[[turn["response_ids"] for turn in row["turns"]] for row in played(f)] for f in folders]
    assert tokens[0] == tokens[1]
    for whole, divided in zip(*map(measured, folders), strict=True):
        assert whole.keys() == divided.keys()
        for name in SAME:
            if name in whole:
                np.testing.assert_allclose(divided[name], whole[name], rtol=1e-4, atol=1e-6)
        assert divided["actor/skipped_steps"] == 0


# From here on Megatron runs in this process, so that runs above wouldn't find its torch as it was.


def test_computes_in_half_precision():
    batches = toy_batches(toy_samples(4))
    losses: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        settings = replace(SETTINGS, dtype=dtype)
        strategy = recorded(toy_model(), settings, {}, RankContext("actor_train"))
        metrics = strategy.train_step(batches, WeightedLoss())
        losses[dtype] = sum(float(metric.value) for metric in metrics if metric.name == "loss")
        assert all(tensor.dtype == torch.float32 for _, tensor in strategy.weights())
    assert losses[torch.float32] != losses[torch.bfloat16]
    np.testing.assert_allclose(*losses.values(), rtol=0.02)


def test_log_probs_over_kept_ids_are_those_of_plain_torch():
    batches = toy_batches(with_kept_ids(toy_samples(4), 3))
    outputs = frozenset({"logprobs", "full_logprobs"})
    divided = recorded(toy_model(), SETTINGS, {}, RankContext("actor_train")).forward(batches, outputs)
    plain = TorchStrategy(toy_model(), SETTINGS).forward(batches, outputs)
    for name in outputs:
        np.testing.assert_allclose(divided[0][name], plain[0][name], atol=1e-5)
    assert abs(divided[0]["logprobs"] - divided[0]["full_logprobs"]).max() > 0.1


@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": False}], ids=["distributed", "plain"])
def test_memory_that_was_in_host_memory_is_as_before(options):
    """A server may have the device between two parts of a step, and between steps."""
    strategies = [recorded(toy_model(), SETTINGS, options, RankContext("actor_train")) for _ in range(2)]
    moved, still = strategies
    for number in range(2):
        batches = toy_batches(toy_samples(4, seed=number))
        for part in (StepPart(0, None), StepPart(1, 2.0)):
            moved._offload(frozenset({"weights", "optimizer"}))
            held = [*moved._weight_tensors(), *moved._adam.tensors()]
            assert not sum(tensor.untyped_storage().nbytes() for tensor in held)
            moved._onload(frozenset({"weights"}))
            moved._onload(frozenset({"optimizer"}))
            for strategy in strategies:
                strategy.train_step(batches, WeightedLoss(), float(number), part)
        np.testing.assert_equal(moved.last_gradient(), still.last_gradient())
    np.testing.assert_equal(moved.parameters(), still.parameters())


class TestOneRank(StrategyContract):
    options: dict[str, Any] = {}  # noqa: RUF012

    def make_strategy(self):
        return recorded(self.model(), SETTINGS, self.options, RankContext("actor_train"))

    def model(self):
        return toy_model()

    def modules(self, strategy):
        return [module for part in strategy._parts for module in part.modules()]


class TestOneRankPlainOptimizer(TestOneRank):
    options = {"use_distributed_optimizer": False}  # noqa: RUF012


class TestOneRankWithValues(TestOneRank):
    outputs = VALUES

    def model(self):
        return toy_value_model()


def other_base(frequencies: torch.Tensor) -> torch.Tensor:
    return frequencies**1.1


def other_norm(config: Any) -> Any:
    return replace(config, layernorm_epsilon=0.1)


MISTAKES = {
    "positions": ("rotary_frequencies", other_base, "token 2.*rope_parameters"),
    "norm": ("transformer_config", other_norm, "token 1.*norms"),
}


@pytest.mark.parametrize("make", [toy_model, toy_value_model], ids=["logits", "states"])
@pytest.mark.parametrize(("name", "mistake", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_model_that_is_not_that_of_transformers_is_refused(
    tmp_path, monkeypatch, make, name, mistake, words
):
    on_a_cpu()
    from turnwise.training.megatron import startup
    from turnwise.training.megatron.strategy import MegatronStrategy

    make().save_pretrained(tmp_path)
    source = ModelSource(str(tmp_path), has_value_head=make is toy_value_model)
    arguments = (source, RankContext("actor_train"), {}, SETTINGS)
    MegatronStrategy.for_role(*arguments)
    right = getattr(startup, name)
    monkeypatch.setattr(startup, name, lambda *given: mistake(right(*given)))
    with pytest.raises(ModelError, match=rf"actor_train: .*fp32\. .*{words}"):
        MegatronStrategy.for_role(*arguments)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "gemma", "head_dim": 8}, "bridge"),
        ({"model_type": "qwen3_moe"}, "mixture"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_refuses_what_the_layers_cannot_compute(changes, word):
    with pytest.raises(ConfigError, match=word):
        recorded(toy_model(**changes), SETTINGS, {}, RankContext("actor_train"))


def test_refuses_a_role_that_is_not_on_all_processes_in_their_order():
    recorded(toy_model(), SETTINGS, {}, RankContext("actor_train"))
    with pytest.raises(ConfigError, match="in their order"):
        recorded(toy_model(), SETTINGS, {}, RankContext("critic", peers=(1,)))


def test_options_that_are_passed_on_are_megatrons():
    from megatron.core.transformer import TransformerConfig

    assert set(PASSED) <= set(TransformerConfig.__dataclass_fields__)


if __name__ == "__main__":
    run = [__file__, "--noconftest", *sys.argv[1:]]
    status = pytest.main([*run, "-q", "-p", "no:cacheprovider", "-W", "ignore"])
    print(f"megatron: {Path(__file__).name} ended with status {status}")
    raise SystemExit(status)
