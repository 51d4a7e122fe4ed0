"""Training tokens/s on the quickstart's rollouts: this library against transformers' `Trainer`.

    pip install -c constraints.txt -e '.[bench]'
    python benchmarks/train.py [--rounds N] [--journal runs/…/rollouts.jsonl]

Everybody trains the same model (the `tiny` preset, random weights) on the same 1,024 samples with the same
objective, cross entropy on the trained tokens, in fp32 with fused AdamW and clipping: 8 optimiser steps of
128 samples. Only tokens of samples count, never padding. The contenders run in turn, round after round, and
medians are quoted.

- *turnwise*: what `turnwise train` does with a batch: plan micro-batches, pack, one `train_step`. The logits
of trained tokens
  alone; prefixes that samples of a micro-batch share are computed once.
- *turnwise, nothing shared*: the same lengths and masks over random tokens, so that no prefix is shared.
- *turnwise, GRPO*: the rollouts with the quickstart's policy loss, its entropy bonus included. It has no peer
here.
- *Trainer*: dynamic padding, with length grouping or in random order. All logits, as its loss has them. Its
micro-batch size is
  the fastest of those tried. Timed from the start of its first step; no logging, saving or evaluation.

Samples are stored in data/quickstart_rollouts.npz: token ids and masks of the first context of all episodes
of steps 0, 10, …, 70 of a quickstart run. `--journal` takes them from another run's journal, and stores
those.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe_machine, gemm_gflops
from toy import parse_arguments
from train_peer import build_trainer, run_trainer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from turnwise.algorithms.losses import PolicyLoss
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.batching.pack import pack
from turnwise.batching.plan import denominators
from turnwise.batching.samples import build_samples
from turnwise.models.cpu.prefix_tree import merge_prefixes
from turnwise.models.packed_attention import PACKED_ATTENTION
from turnwise.models.presets import preset
from turnwise.pipelines.model_role import BatchPlan
from turnwise.protocols import Loss
from turnwise.rollout.journal import read_journal
from turnwise.training.cross_entropy import CrossEntropy
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import Sample, TurnSpan

DATA = Path(__file__).parent / "data" / "quickstart_rollouts.npz"
STEPS = range(0, 80, 10)
SAMPLES_PER_STEP = 128
LEARNING_RATE = 1e-4
PLAN = BatchPlan(samples_per_step=SAMPLES_PER_STEP, max_length=512, seed=0, max_tokens_train=4096)
"""The quickstart's."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trainer-micro-batches", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "train.json"))
    parser.add_argument("--samples", type=int, help="the first so many; default: all")
    parser.add_argument(
        "--gemm-size", type=int, default=2048, help="of the matrices that give the machine's rate"
    )
    options = parse_arguments(
        parser, rounds=1, threads=1, trainer_micro_batches=[4], samples=8, gemm_size=128
    )
    torch.set_num_threads(options.threads)
    if options.journal:
        store(samples_of_journal(options.journal))
    samples = load()[: options.samples]
    model = make_model(max(int(sample.token_ids.max()) for sample in samples) + 1)
    num_tokens = sum(sample.num_tokens for sample in samples)

    contenders: dict[str, Callable[[], float]] = {
        "turnwise": own(model, samples, CrossEntropy()),
        "turnwise, nothing shared": own(model, nothing_shared(samples), CrossEntropy()),
        "turnwise, GRPO": own(
            model, with_advantages(samples), PolicyLoss(AlgorithmSettings(entropy_loss_coef=0.005))
        ),
    }
    fastest = {}
    for name, sampling in {
        "Trainer, length grouping": "group_by_length",
        "Trainer, random order": "random",
    }.items():
        tried = {size: peer(model, samples, sampling, size)() for size in options.trainer_micro_batches}
        fastest[name] = {"micro_batch": min(tried, key=tried.__getitem__), "tried": rates(tried, num_tokens)}
        contenders[name] = peer(model, samples, sampling, fastest[name]["micro_batch"])
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(options.rounds):
        for name, run in contenders.items():
            times[name].append(run())
        print(
            f"round {number}:",
            rates({name: runs[-1] for name, runs in times.items()}, num_tokens),
            flush=True,
        )

    result = {
        "tokens_per_s": rates({name: statistics.median(runs) for name, runs in times.items()}, num_tokens),
        "ratios": {
            f"{name} / {other}": round(
                statistics.median(b / a for a, b in zip(times[name], times[other], strict=True)), 2
            )
            for name in ("turnwise", "turnwise, nothing shared")
            for other in fastest
        },
        **efficiency(model, samples, times, num_tokens, gemm_gflops(options.gemm_size)),
        "loss_of_the_same_128_samples": losses(model, samples[:SAMPLES_PER_STEP]),
        "trainer_micro_batches": fastest,
        "samples": len(samples),
        "tokens": num_tokens,
        "trained_tokens": sum(sample.num_trained for sample in samples),
        "rounds": options.rounds,
        "machine": describe_machine(),
    }
    Path(options.out).parent.mkdir(exist_ok=True)
    Path(options.out).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def own(model: PreTrainedModel, samples: Sequence[Sample], loss: Loss) -> Callable[[], float]:
    """Seconds of one pass over the samples."""
    strategy = make_strategy(model)

    def run() -> float:
        started = time.perf_counter()
        for start in range(0, len(samples), SAMPLES_PER_STEP):
            train_step(strategy, samples[start : start + SAMPLES_PER_STEP], loss)
        return time.perf_counter() - started

    run()
    return run


def peer(
    model: PreTrainedModel, samples: Sequence[Sample], sampling: str, micro_batch: int
) -> Callable[[], float]:
    """Seconds of one pass over the samples."""

    def run() -> float:
        accumulation = min(SAMPLES_PER_STEP, len(samples)) // micro_batch
        return run_trainer(
            build_trainer(copy.deepcopy(model), samples, sampling, micro_batch, accumulation, LEARNING_RATE)
        )[0]

    return run


def make_strategy(model: PreTrainedModel) -> TorchStrategy:
    model = copy.deepcopy(model)
    model.set_attn_implementation(PACKED_ATTENTION)
    return TorchStrategy(model, optimizer=OptimizerSettings(LEARNING_RATE))


def train_step(strategy: TorchStrategy, samples: Sequence[Sample], loss: Loss) -> list[Any]:
    divisors = denominators(samples, PLAN.max_length)
    cuts = PLAN.cut(samples, PLAN.max_tokens_train)
    return strategy.train_step([pack([samples[i] for i in cut], divisors) for cut in cuts], loss)


def losses(model: PreTrainedModel, samples: Sequence[Sample]) -> dict[str, float]:
    """Everybody's loss of one optimiser step on the same samples, before it."""
    metrics = train_step(make_strategy(model), samples, CrossEntropy())
    trainer = build_trainer(
        copy.deepcopy(model), samples, "sequential", *micro_batches(len(samples)), LEARNING_RATE
    )
    return {
        "turnwise": sum(float(metric.value) for metric in metrics if metric.name == "loss"),
        "Trainer": run_trainer(trainer)[1],
    }


def micro_batches(num_samples: int) -> tuple[int, int]:
    """Samples of a micro-batch, and how many of those are a step of all samples."""
    size = min(16, num_samples)
    return size, num_samples // size


def efficiency(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    times: dict[str, list[float]],
    num_tokens: int,
    gemm: float,
) -> dict[str, Any]:
    """Floating-point operations that the task needs, and the share of the machine's GEMM rate that each
    contender reaches.

    Forward and backward: 6 for each parameter that multiplies a token, the head's on trained tokens only, and
    12·heads·head_dim a layer for each pair of a query and a key that it sees. Padding, its logits and masked
    pairs are no use and don't count. With shared prefixes, only distinct tokens count: the share says how
    busy the machine was, not how much was saved.
    """
    whole = sum(
        work(model, [(s.num_tokens, s.num_tokens) for s in samples], sum(s.num_trained for s in samples))
    )
    merged = 0.0
    branches = num_distinct = 0
    for start in range(0, len(samples), SAMPLES_PER_STEP):
        step = samples[start : start + SAMPLES_PER_STEP]
        for cut in PLAN.cut(step, PLAN.max_tokens_train):
            chosen = [step[i] for i in cut]
            tree = merge_prefixes(
                torch.tensor(np.concatenate([s.token_ids for s in chosen])), [s.num_tokens for s in chosen]
            )
            pairs = [(s.num_tokens, s.num_tokens) for s in chosen]
            if tree is not None:
                pairs = list(zip(tree.branch_lengths, tree.path_lengths, strict=True))
            merged += sum(work(model, pairs, sum(s.num_trained for s in chosen)))
            branches += len(pairs)
            num_distinct += sum(length for length, _ in pairs)
    needed = {name: merged if name in ("turnwise", "turnwise, GRPO") else whole for name in times}
    return {
        "gemm_gflops_fp32": round(gemm),
        "mflop_per_token": round(whole / num_tokens / 1e6, 2),
        "distinct_tokens_share": round(num_distinct / num_tokens, 3),
        "share_of_gemm_rate": {
            name: round(needed[name] / statistics.median(runs) / 1e9 / gemm, 3)
            for name, runs in times.items()
        },
    }


def work(
    model: PreTrainedModel, pairs: Sequence[tuple[int, int]], num_trained: int
) -> tuple[float, float, float]:
    """Operations in layers, attention and head, for sequences of (queries, keys), the queries being the last
    of the keys."""
    config = model.config
    layers = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2)
    seen = sum(queries * (keys - queries) + queries * (queries + 1) / 2 for queries, keys in pairs)
    return (
        6.0 * layers * sum(queries for queries, _ in pairs),
        12.0 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * seen,
        6.0 * config.vocab_size * config.hidden_size * num_trained,
    )


def rates(times: dict[Any, float], num_tokens: int) -> dict[Any, int]:
    return {name: round(num_tokens / seconds) for name, seconds in times.items()}


def make_model(vocab_size: int) -> PreTrainedModel:
    shape = preset("tiny")
    config = AutoConfig.for_model(
        shape.model_type, **shape.config, vocab_size=vocab_size, bos_token_id=None, pad_token_id=0
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def nothing_shared(samples: Sequence[Sample]) -> list[Sample]:
    rng = np.random.default_rng(0)
    vocab_size = max(int(sample.token_ids.max()) for sample in samples) + 1
    return [replace(sample, token_ids=rng.integers(0, vocab_size, sample.num_tokens)) for sample in samples]


def with_advantages(samples: Sequence[Sample]) -> list[Sample]:
    rng = np.random.default_rng(0)
    return [replace(s, advantages=np.full(s.num_tokens, rng.normal(), np.float32)) for s in samples]


def samples_of_journal(journal: Path) -> list[Sample]:
    return [build_samples(trajectory)[0] for step, trajectory in read_journal(journal) if step in STEPS]


def store(samples: Sequence[Sample]) -> None:
    DATA.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        DATA,
        token_ids=np.concatenate([sample.token_ids for sample in samples]).astype(np.uint16),
        is_trained=np.concatenate([sample.response_mask for sample in samples]),
        lengths=np.array([sample.num_tokens for sample in samples], np.uint16),
    )


def load() -> list[Sample]:
    with np.load(DATA) as stored:
        ends = np.cumsum(stored["lengths"].astype(np.int64))[:-1]
        parts = (np.split(stored[name], ends) for name in ("token_ids", "is_trained"))
        return [make_sample(ids.astype(np.int64), mask) for ids, mask in zip(*parts, strict=True)]


def make_sample(token_ids: Any, mask: Any) -> Sample:
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    spans = tuple(TurnSpan(i, *edge) for i, edge in enumerate(zip(edges[::2], edges[1::2], strict=True)))
    return Sample(token_ids, mask, np.zeros(len(token_ids), np.float32), spans)


if __name__ == "__main__":
    main()
