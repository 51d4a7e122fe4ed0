"""Finds out why servers and trainer disagree about the log-probs of the same tokens: measures how well each
known fault explains the difference. ParityError's message names the fault that explains it best, if any, and
what to do about it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig

from turnwise.errors import TurnwiseError
from turnwise.models.load import load_model, parse_dtype, trusted_already
from turnwise.models.plain import plain_logprobs, plain_model
from turnwise.types import FloatArray, Sample

ScoreSamples = Callable[[Sequence[Sample]], list[FloatArray]]
"""A function that computes the log-probs [N] of each sample's tokens, in the form of `ModelRole.forward`."""

_NEGLIGIBLE = 1e-5  # nats by which two ways of computing the same log-probs in fp32 may differ
_ROUNDING_SPREAD = 3.0
"""The sizes of two rounding errors of the same dtype are taken as equal if they differ by at most this
factor."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """The models and settings that a server can be compared with. `score` computes the trainer's log-probs;
    `without_adapter` computes them with the LoRA adapter off (None = no adapter). `weights` returns the
    trainer's `(Hugging Face name, tensor)` pairs. `folders` maps the config's model folders to the settings
    that name them. Training started from the first folder."""

    score: ScoreSamples
    weights: Callable[[], Iterable[tuple[str, Tensor]]]
    model_config: PreTrainedConfig
    temperature: float
    trainer_dtype: str
    sampler_dtype: str
    folders: Mapping[str, str]
    without_adapter: ScoreSamples | None = None

    @property
    def may_round(self) -> bool:
        """Whether a side computes in 16 bits, so that rounding is as large as a small fault."""
        return {self.trainer_dtype, self.sampler_dtype} != {"fp32"}

    def score_plainly(self, samples: Sequence[Sample], temperature: float, dtype: str) -> list[FloatArray]:
        """Log-probs by transformers' own forward pass with the trainer's weights."""
        model = plain_model(self.model_config, self.weights(), parse_dtype(dtype))
        return plain_logprobs(model, samples, temperature)

    def score_folder(self, samples: Sequence[Sample], folder: str) -> list[FloatArray]:
        """Log-probs by transformers' own forward pass with the weights of a folder."""
        dtype = parse_dtype(self.sampler_dtype)
        trust = trusted_already(self.model_config)
        model = load_model(folder, dtype=dtype, attn_implementation="sdpa", trust=trust)
        return plain_logprobs(model, samples, self.temperature)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The conversations in which sampler and trainer disagree about policy `version`.

    `max_diff` is the largest mean difference allowed. `ask_afresh` drops the server's caches, requests the
    last turns again, and returns the mean difference of the worst conversation. `change_since` is `(version,
    distance)`: the policy version of the last check, and the mean change of the server's log-probs since
    then; None without an earlier check, or if the server sampled other tokens then."""

    version: int
    samples: Sequence[Sample]
    max_diff: float
    ask_afresh: Callable[[], float]
    change_since: tuple[int, float] | None


class Fault(NamedTuple):
    """A possible cause. `distance()` returns the mean difference between the log-probs that the cause
    predicts and the server's. If given, `rounding()` decides instead: it returns a dtype's mean rounding
    error, since single errors can't be predicted."""

    cause: str
    distance: Callable[[], float]
    advice: str
    rounding: Callable[[], float] | None = None


def diagnose(evidence: Evidence, suspects: Suspects) -> str:
    """The message of a ParityError: how far sampler and trainer differ, why, what to do, and what was
    tried."""
    differences = logprob_differences(evidence.samples, suspects.score(evidence.samples))
    mean = float(differences.mean())
    max_distance = max(mean / 10, min(mean / 3, evidence.max_diff))
    proven: list[tuple[float, Fault]] = []
    tried: list[str] = []
    for fault in _faults(evidence, suspects):
        try:
            distance = fault.distance()
            rounding = None
            if fault.rounding:
                rounding = fault.rounding()
        except TurnwiseError as error:
            reason = str(error).splitlines()[0]
            tried.append(f"  {math.nan:<8.2g} {fault.cause}, which can't be tried: {reason}")
            continue
        tried.append(f"  {distance:<8.2g} {fault.cause}")
        is_proven = distance <= max_distance
        if rounding is not None:
            is_proven = rounding / _ROUNDING_SPREAD <= mean <= rounding * _ROUNDING_SPREAD
        if is_proven:
            proven.append((distance, fault))
    return "\n".join(
        [
            f"sampler and trainer differ by {mean:.2g} nats per token in the mean, {differences.max():.2g} "
            f"at most, over {len(differences)} tokens of policy version {evidence.version}; "
            f"parity_max_logprob_diff is {evidence.max_diff:g}.",
            _verdict(proven),
            "Mean difference that would be left if the cause were",
            *tried,
        ]
    )


def _verdict(proven: Sequence[tuple[float, Fault]]) -> str:
    """The sentences on the cause, of faults that explain the difference, each with the mean difference that
    it leaves."""
    if not proven:
        return (
            "Cause: none of those below. Raise parity_max_logprob_diff only if you can explain the "
            "difference."
        )
    # One fault may look like another. The first of those with about the smallest distance is named.
    smallest = min(distance for distance, _ in proven)
    fault = next(fault for distance, fault in proven if distance <= 2 * smallest + _NEGLIGIBLE)
    return f"Cause: {fault.cause}. {fault.advice}."


def _faults(evidence: Evidence, suspects: Suspects) -> Iterator[Fault]:
    """The possible causes. If several match about equally well, `diagnose` names the first of them."""
    samples = evidence.samples
    yield from _server_faults(evidence)
    if suspects.without_adapter is not None:
        yield Fault(
            cause="adapter not loaded",
            distance=partial(_distance, samples, suspects.without_adapter),
            advice="The server agrees with the model without the LoRA adapter that is trained: it must load "
            "the adapter, or be given merged weights",
        )
    if suspects.temperature != 1.0:
        yield Fault(
            cause="temperature 1",
            distance=partial(_plain_distance, suspects, samples, 1.0, suspects.sampler_dtype),
            advice="The server's log-probs are those of this temperature, the trainer's of "
            f"{suspects.temperature:g} (actor_infer.generating_args.temperature, train_env_manager's before "
            "it). A server must return log-probs after the temperature; for vLLM that is logprobs_mode: "
            "processed_logprobs",
        )
    yield from _folder_faults(suspects, samples)
    yield _trainer_fault(suspects, samples)
    for dtype in sorted({suspects.sampler_dtype, "bf16", "fp16"} - {"fp32"}):
        yield _server_dtype_fault(suspects, samples, dtype)


def _server_faults(evidence: Evidence) -> Iterator[Fault]:
    """Faults of a server that another request, or an earlier check, shows."""
    yield Fault(
        cause="stale prefix",
        distance=evidence.ask_afresh,
        advice="With emptied caches the server agrees: its `resume` must drop every cached prefix; "
        "until it does, turn its prefix cache off in actor_infer.strategy_args.strategy_config",
    )
    if evidence.change_since is None:
        return
    version, change = evidence.change_since
    yield Fault(
        cause=f"weights not transferred since version {version}",
        distance=lambda: change,
        advice="The server answers as it did then, so the weight update didn't reach it; "
        "actor_infer.strategy_args.strategy_name: embedded reads the trainer's own weights",
    )


def _folder_faults(suspects: Suspects, samples: Sequence[Sample]) -> Iterator[Fault]:
    """Folders whose weights the server may still have, or was started with by mistake."""
    start = next(iter(suspects.folders), "")
    for folder, setting in suspects.folders.items():
        distance = partial(_distance, samples, partial(suspects.score_folder, folder=folder))
        if folder == start:
            yield Fault(
                cause=f"weights not transferred, still those of {setting} {folder}",
                distance=distance,
                advice="No weight update has reached the server",
            )
        else:
            yield Fault(
                cause=f"wrong folder, {setting} {folder}",
                distance=distance,
                advice=f"The server samples from this model, and training started from {start}: "
                "name one folder for both",
            )


def _trainer_fault(suspects: Suspects, samples: Sequence[Sample]) -> Fault:
    """A trainer whose forward pass, or its dtype, isn't that of transformers."""
    distance = partial(
        _plain_distance,
        suspects,
        samples,
        suspects.temperature,
        suspects.sampler_dtype,
    )
    if suspects.trainer_dtype == suspects.sampler_dtype:
        return Fault(
            cause="trainer's forward pass",
            distance=distance,
            advice="Try actor_train.model_args.attn_implementation: sdpa, and report it",
        )
    return Fault(
        cause=f"dtype, {suspects.trainer_dtype} of the trainer",
        distance=distance,
        advice="Set actor_train.model_args.dtype to the server's, or raise parity_max_logprob_diff",
    )


def _server_dtype_fault(suspects: Suspects, samples: Sequence[Sample], dtype: str) -> Fault:
    if suspects.trainer_dtype == suspects.sampler_dtype == dtype:
        advice = (
            f"Trainer and server both compute in {dtype}, each by its own kernels, and the difference is of "
            "the size that this makes: raise parity_max_logprob_diff, or set actor_train.model_args.dtype "
            "to fp32"
        )
    else:
        advice = (
            f"The difference is of the size that computing in {dtype} makes. The trainer computes in "
            f"{suspects.trainer_dtype} (actor_train.model_args.dtype), the server is to compute in "
            f"{suspects.sampler_dtype} (actor_infer.model_args.dtype): make both the same, or raise "
            "parity_max_logprob_diff"
        )
    return Fault(
        cause=f"dtype, {dtype} of the server",
        distance=partial(_plain_distance, suspects, samples, suspects.temperature, dtype),
        advice=advice,
        rounding=partial(_rounding, suspects, samples, dtype),
    )


def _distance(samples: Sequence[Sample], score: ScoreSamples) -> float:
    """The mean |Δ log-prob| between the server and what `score` computes, over the sampled tokens."""
    return float(logprob_differences(samples, score(samples)).mean())


def _plain_distance(
    suspects: Suspects,
    samples: Sequence[Sample],
    temperature: float,
    dtype: str,
) -> float:
    """`_distance` to transformers' own forward pass with the trainer's weights."""
    return _distance(samples, partial(suspects.score_plainly, temperature=temperature, dtype=dtype))


def _rounding(suspects: Suspects, samples: Sequence[Sample], dtype: str) -> float:
    """The mean |Δ log-prob| between the trainer's own forward pass and transformers' in `dtype`, over the
    sampled tokens."""
    trained = suspects.score(samples)
    rounded = suspects.score_plainly(samples, suspects.temperature, dtype)
    triples = zip(samples, trained, rounded, strict=True)
    masked = [abs(ours - plain)[sample.response_mask] for sample, ours, plain in triples]
    return float(sum(part.sum() for part in masked) / sum(map(len, masked)))


def logprob_differences(samples: Sequence[Sample], logprobs: Sequence[FloatArray]) -> FloatArray:
    """|Δ log-prob| [R] between the server and `logprobs` (an array [N] per sample) at the R sampled tokens of
    all samples."""
    differences = []
    for sample, of_sample in zip(samples, logprobs, strict=True):
        difference = np.abs(sample.rollout_logprobs - of_sample)
        differences.append(difference[sample.response_mask])
    return np.concatenate(differences)
