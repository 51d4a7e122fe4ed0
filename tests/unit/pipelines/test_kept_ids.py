"""Training on tokens that were sampled under top-k, top-p and min-p: over the ids that were kept."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions, says
from small_runs import assert_same_weights, measured, played, run_small, small_config, training
from toy_model import toy_model

from turnwise.algorithms.correction import token_mismatch
from turnwise.algorithms.kl import KLController, k3, penalize_kl
from turnwise.algorithms.losses import PolicyLoss
from turnwise.algorithms.response_tokens import ResponseTokens
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.assemble.servers import require_abilities
from turnwise.batching.pack import blank, pack, unpack
from turnwise.batching.plan import denominators
from turnwise.batching.samples import build_samples
from turnwise.errors import NotAvailableError
from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.inference.server_manager import LLMServerManager
from turnwise.lifecycle.checkpoint_files import all_checkpoints
from turnwise.models.forward import make_forward
from turnwise.pipelines.agentic import AgenticPipeline
from turnwise.testing.fakes import ScriptedServer
from turnwise.tracking.jsonl import read_metrics
from turnwise.types import Batch, ModelOutputs, Sample, SamplingParams, Task, Trajectory, Turn, TurnSpan

PROMPT, MAX_LENGTH = [3, 1, 4, 1, 5], 32
SAMPLING = SamplingParams(1, temperature=0.8, top_k=20, top_p=0.7)


def sample_of(kept_ids: np.ndarray, token: int, logprob: float, weight: float = 1.0) -> Sample:
    """The prompt and one token, drawn from `kept_ids`."""
    length = len(PROMPT) + 1
    return Sample(
        token_ids=np.array([*PROMPT, token]),
        response_mask=np.arange(length) == length - 1,
        rollout_logprobs=np.array([0] * (length - 1) + [logprob], np.float32),
        turn_spans=(TurnSpan(0, length - 1, length),),
        weight=weight,
        kept_ids=kept_ids,
        kept_offsets=np.array([0] * length + [len(kept_ids)]),
    )


def drift(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def probabilities(model: torch.nn.Module) -> np.ndarray:
    logits = model(torch.tensor([PROMPT])).logits[0, -1].double() / SAMPLING.temperature
    return torch.softmax(logits, -1).numpy()


def every_kept_token(model: torch.nn.Module) -> tuple[list[Sample], np.ndarray]:
    """A sample for each token that the server may draw, weighed by its probability, and the ids of these
    tokens."""
    completion = asyncio.run(EmbeddedServer(model, max_length=MAX_LENGTH).generate(PROMPT, SAMPLING, "a"))
    kept = completion.kept_ids
    assert len(kept) > 3 and completion.kept_offsets.tolist() == [0, len(kept)]
    probs = probabilities(model)[kept]
    probs /= probs.sum()
    return [
        sample_of(kept, int(token), float(np.log(p)), float(p)) for token, p in zip(kept, probs, strict=True)
    ], kept


def tensors_of(samples: list[Sample]) -> Batch:
    return pack(samples, denominators(samples, MAX_LENGTH)).map(torch.as_tensor)


def test_the_mean_ratio_is_1_over_kept_ids_and_the_kept_mass_without() -> None:
    model = toy_model(0)
    samples, kept = every_kept_token(model)
    drift(model)
    batch = tensors_of(samples)
    with torch.no_grad():
        outputs = make_forward(model, SAMPLING.temperature)(batch, frozenset({"logprobs"}))
    mask, weights = batch.response_mask, batch.weights[batch.response_mask]

    def mean_ratio(logprobs: torch.Tensor) -> float:
        return float((weights * torch.exp(logprobs - batch.rollout_logprobs)[mask]).sum())

    kept_mass = probabilities(model)[kept].sum()
    assert abs(kept_mass - 0.7) > 0.05, "the trainer has drifted"
    assert mean_ratio(outputs.logprobs) == pytest.approx(1.0, abs=1e-5)
    assert mean_ratio(outputs.full_logprobs) == pytest.approx(kept_mass, abs=1e-5)
    assert {m.name for m in token_mismatch(outputs.logprobs, batch.rollout_logprobs, mask)} >= {
        "actor/train_infer_kl"
    }


@pytest.mark.parametrize("is_fresh", [True, False])
def test_the_expected_policy_gradient_of_a_constant_advantage_is_0_over_kept_ids(is_fresh: bool) -> None:
    """Σ p ∇log p = 0 over what can be drawn, if the gradient goes through the normaliser; so it is where the
    ratio is 1."""
    model = toy_model(0)
    samples, _ = every_kept_token(model)
    for sample in samples:
        sample.advantages = sample.response_mask.astype(np.float32)
        sample.old_logprobs = None if is_fresh else sample.rollout_logprobs
    loss = PolicyLoss(AlgorithmSettings())

    def gradient(chosen: list[Sample]) -> float:
        batch = tensors_of(chosen)
        model.zero_grad()
        value, _ = loss(make_forward(model, SAMPLING.temperature)(batch, loss.outputs), batch)
        value.backward()
        return float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())

    of_all = [replace(sample, kept_ids=None, kept_offsets=None) for sample in samples]
    assert gradient(samples) < 1e-5
    assert gradient(of_all) > 0.01


def test_kl_uses_the_whole_vocabulary_and_the_ratio_the_kept_ids() -> None:
    sample = every_kept_token(toy_model(0))[0][0]
    for name in ("old_logprobs", "ref_logprobs", "advantages"):
        setattr(sample, name, np.where(sample.response_mask, -1.5, 0).astype(np.float32))
    batch = tensors_of([sample])
    kept, full = (torch.where(batch.response_mask, value, 0.0) for value in (-1.0, -2.5))
    loss = PolicyLoss(AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.0))
    _, metrics = loss(ModelOutputs(logprobs=kept, full_logprobs=full, entropy=full), batch)
    values = {metric.name: float(metric.value) for metric in metrics}
    assert values["actor/ratio_mean"] == pytest.approx(np.exp(0.5))
    assert values["actor/kl_loss"] == pytest.approx(float(k3(torch.tensor(-1.0))))


def test_the_kl_of_the_reward_is_over_the_whole_vocabulary_too() -> None:
    task = Task(id="t", tag="T", split="train", seed=0)
    trajectory = Trajectory(
        task, 0, turns=[Turn(np.array(PROMPT), np.array([7]), np.full(1, -0.5, np.float32))]
    )
    trajectory.samples = build_samples(trajectory)
    [sample] = trajectory.samples
    for name, value in (("old_logprobs", -0.5), ("old_full_logprobs", -1.5), ("ref_logprobs", -2.5)):
        setattr(sample, name, np.where(sample.response_mask, value, 0).astype(np.float32))
    settings = AlgorithmSettings(add_token_level_kl=True, kl_penalty="k1")
    penalties, _ = penalize_kl(ResponseTokens.of([trajectory]), settings, KLController(0.5))
    assert penalties.tolist() == [0.5]


def test_packing_keeps_each_token_s_ids_beside_samples_without() -> None:
    model = toy_model(0)
    samples, kept = every_kept_token(model)
    plain = replace(samples[1], kept_ids=None, kept_offsets=None)
    mixed = [plain, samples[0], blank(samples[0]), samples[2]]
    batch = tensors_of(mixed)
    assert batch.kept_offsets.diff().nonzero().flatten().tolist() == [11, 19] and len(
        batch.kept_ids
    ) == 2 * len(kept)
    forward = make_forward(model, SAMPLING.temperature)
    with torch.no_grad():
        together = forward(batch, frozenset({"logprobs"}))
        alone = [forward(tensors_of([sample]), frozenset({"logprobs"})) for sample in mixed]
    for part, own in zip(unpack(together.logprobs.numpy(), batch.lengths), alone, strict=True):
        np.testing.assert_allclose(part, own.logprobs.numpy(), atol=1e-6)
    assert alone[0].full_logprobs is None, "a batch without kept ids costs nothing"
    without = tensors_of([plain])
    assert without.kept_ids is None and without.kept_offsets is None


def test_a_response_that_a_weight_update_cut_keeps_the_ids_of_all_its_tokens() -> None:
    async def main() -> None:
        manager = LLMServerManager([EmbeddedServer(toy_model(0), max_length=MAX_LENGTH)])
        asked = asyncio.ensure_future(manager.generate(PROMPT, replace(SAMPLING, max_new_tokens=20), "a"))
        for _ in range(12):
            await asyncio.sleep(0)
        await manager.suspend("abort_continue")
        await manager.resume(1)
        completion = await asked
        assert len(completion.versions) == 2
        kept = np.split(completion.kept_ids, completion.kept_offsets[1:-1])
        assert len(kept) == 20
        assert all(token in ids for token, ids in zip(completion.token_ids, kept, strict=True))

    asyncio.run(main())


CUT = {"actor_infer": {"generating_args": {"top_p": 0.99, "top_k": 100, "temperature": 0.99}}}


def test_a_server_that_returns_no_kept_ids_is_refused_where_they_are_needed(
    tiny_model, tmp_path, caplog
) -> None:
    server = ScriptedServer([]).info()
    with pytest.raises(NotAvailableError, match=says("top_k, top_p", "min_p")):
        require_abilities(small_config(tiny_model, tmp_path, async_generation_ratio=1, **CUT), server)
    require_abilities(small_config(tiny_model, tmp_path, **CUT), server)
    assert mentions(caplog.text, "policy loss", "truncation")
    require_abilities(small_config(tiny_model, tmp_path, async_generation_ratio=1), server)


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        (
            {"suspensions": frozenset({"finish", "abort"})},
            says("server", "embedded", "pause"),
        ),
        (
            {"weight_versions": False},
            says("weights", "finish", "abort_continue"),
        ),
    ],
)
def test_a_server_that_can_not_keep_responses_is_refused_before_the_run(
    tiny_model, tmp_path, monkeypatch, lacks, said
) -> None:
    info = EmbeddedServer.info
    monkeypatch.setattr(EmbeddedServer, "info", lambda self: replace(info(self), **lacks))
    with pytest.raises(
        NotAvailableError, match=f"on_weight_update is keep, and {said}" if "server" in said else said
    ):
        run_small(small_config(tiny_model, tmp_path, async_generation_ratio=1, on_weight_update="keep"))


def test_asynchronous_runs_train_under_the_published_cut(tiny_model, tmp_path) -> None:
    """They sample with top_p 0.99 and top_k 100. Sampler and trainer agree about tokens of the same
    weights."""
    changes = {
        "exp_name": "cut",
        "max_steps": 3,
        "async_generation_ratio": 1,
        "actor_train": training(batch_size=8),
        **CUT,
    }
    changes |= {"add_token_level_kl": True, "init_kl_coef": 0.01, "train_infer_correction": {"is_weight": {}}}
    pipeline = run_small(small_config(tiny_model, tmp_path / "runs", **changes))
    rows = [
        row for row in read_metrics(pipeline.folder.metrics) if "actor/train_infer_diff_token_mean" in row
    ]
    assert len(rows) == 3
    assert (
        rows[0]["actor/train_infer_diff_token_mean"] < 1e-6
        and rows[0]["actor/train_infer_diff_token_max"] < 1e-4
    )
    assert rows[0]["critic/kl"] == pytest.approx(0.0, abs=1e-6), "old and reference are the same weights"
    assert all(row["actor/train_infer_ratio_token_mean"] == pytest.approx(1.0, abs=0.05) for row in rows)
    again = small_config(
        tiny_model, tmp_path / "again", **changes | {"async_generation_ratio": 0, "save_steps": 0}
    )
    first = next(iter(read_metrics(run_small(again, rollouts=pipeline.folder.rollouts).folder.metrics)))
    assert first["actor/train_infer_diff_token_mean"] < 1e-6


def test_what_a_checkpoint_holds_is_trained_on_over_its_kept_ids(tiny_model, tmp_path) -> None:
    """Before each checkpoint all groups that may be ahead are played to their end: it then holds the whole
    next batch, and the run that goes on makes of it what the uninterrupted one makes, bit by bit."""

    def plays_to_the_end(pipeline: AgenticPipeline) -> None:
        source = pipeline.train_rollout_scheduler
        state_dict = source.state_dict

        async def end() -> None:
            while source._running:
                await asyncio.sleep(0.001)

        def of_ended() -> dict[str, Any]:
            pipeline.event_loop.run(end())
            return state_dict()

        source.state_dict = of_ended

    changes = {
        "max_steps": 2,
        "async_generation_ratio": 1,
        "stream_training": False,
        "actor_train": training(batch_size=8),
    }
    changes |= CUT | {"train_infer_correction": {"is_weight": {}}}
    whole = run_small(small_config(tiny_model, tmp_path / "whole", **changes), plays_to_the_end)
    first, last = all_checkpoints(whole.checkpoints.path)
    resumed = run_small(
        small_config(tiny_model, tmp_path / "resumed", resume_from_checkpoint=str(first), **changes)
    )
    rows = [row for row in played(whole.folder) if row["step"] == 1]
    assert len(rows) == 8 and all(
        len(ids) > 1 for row in rows for turn in row["turns"] for ids in turn["kept_ids"]
    )
    assert [row for row in played(resumed.folder) if row["step"] == 1] == rows
    ours, theirs = (
        [row for row in measured(run.folder) if "actor/pg_loss" in row][-1] for run in (resumed, whole)
    )
    assert theirs["actor/staleness_max"] == 1 and abs(theirs["actor/train_infer_ratio_token_mean"] - 1) < 0.05
    assert all(ours[name] == theirs[name] for name in theirs if name.startswith("actor/"))
    assert_same_weights(resumed.checkpoints.newest, last)
