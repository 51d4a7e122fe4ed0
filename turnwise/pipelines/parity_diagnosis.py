"""Why sampler and trainer disagree: every known fault is tried on the tokens at hand.

Each fault predicts what the server must have answered if it were the cause. The one whose prediction is the server's answer is
named, with what to do about it.
"""

from __future__ import annotations

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
from turnwise.pipelines.parity_probe import differences
from turnwise.types import FloatArray, Sample

ScoreSamples = Callable[[Sequence[Sample]], list[FloatArray]]
"""Log-probs [N] of each sample's tokens, as `ModelRole.forward` gives them."""

_NEGLIGIBLE = 1e-5
"""Nats between which no difference is made: fp32 on two ways of computing the same."""
_ROUNDING_SPREAD = 3.0
"""Two ways of computing the same in one dtype round differently; their errors differ in size by this factor at most."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """The models and settings that a server can be compared with.

    `weights` are the trainer's `(Hugging Face name, tensor)` pairs. `folders` are the model folders of the config, with a
    setting that names each; training started from the first. `without_adapter` scores like `score`, with a LoRA adapter off.
    """

    score: ScoreSamples
    weights: Callable[[], Iterable[tuple[str, Tensor]]]
    model_config: PreTrainedConfig
    temperature: float
    trainer_dtype: str
    sampler_dtype: str
    folders: Mapping[str, str]
    without_adapter: ScoreSamples | None = None

    def score_plainly(self, samples: Sequence[Sample], temperature: float, dtype: str) -> list[FloatArray]:
        """The result of transformers' own forward pass over the trainer's weights."""
        model = plain_model(self.model_config, self.weights(), parse_dtype(dtype))
        return plain_logprobs(model, samples, temperature)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The conversations in which sampler and trainer disagree about policy `version`.

    `ask_afresh` has last turns answered again with nothing cached, and returns the mean difference of the worst conversation.
    `change_since` is `(version, distance)`: how far the server's answers to the fixed questions are from those that it gave
    as an earlier version; None where it gave none, or other tokens.
    """

    version: int
    samples: Sequence[Sample]
    max_diff: float
    ask_afresh: Callable[[], float]
    change_since: tuple[int, float] | None


class Fault(NamedTuple):
    """A fault that was tried: the mean difference that is left if it is the cause (NaN: not tried), and what to do then."""

    cause: str
    rest: float
    advice: str
    is_proven: bool | None = None
    """None if `rest` decides."""


Trial = Callable[[], Iterator[Fault]]


def diagnose(evidence: Evidence, suspects: Suspects) -> str:
    """The message of a ParityError: how much, why, what to do, and what was tried."""
    samples = evidence.samples
    found = differences(samples, suspects.score(samples))
    faults: list[Fault] = []
    for name, trial in _trials(evidence, suspects, samples):
        try:
            faults += trial()
        except TurnwiseError as error:
            faults.append(Fault(f"{name}, which can't be tried: {str(error).splitlines()[0]}", math.nan, ""))
    difference = float(found.mean())
    most = max(difference / 10, min(difference / 3, evidence.max_diff))
    proven = [fault for fault in faults if fault.is_proven or (fault.is_proven is None and fault.rest <= most)]
    verdict = "Cause: none of those below. Raise parity_max_logprob_diff only if you can explain the difference."
    if proven:
        # One fault may look like another: the first of those that leave about as little as any.
        least = min(fault.rest for fault in proven)
        cause = next(fault for fault in proven if fault.rest <= 2 * least + _NEGLIGIBLE)
        verdict = f"Cause: {cause.cause}. {cause.advice}."
    return "\n".join(
        [
            f"sampler and trainer differ by {difference:.2g} nats a token in the mean, {found.max():.2g} at most, over "
            f"{len(found)} tokens of policy version {evidence.version}; parity_max_logprob_diff is {evidence.max_diff:g}.",
            verdict,
            "Mean difference that would be left if the cause were",
            *(f"  {fault.rest:<8.2g} {fault.cause}" for fault in faults),
        ]
    )


def _trials(evidence: Evidence, suspects: Suspects, samples: Sequence[Sample]) -> Iterator[tuple[str, Trial]]:
    """The faults by name, the surest test first."""
    yield "stale prefix", partial(_stale_prefix, evidence)
    yield "weights not transferred", partial(_stale_weights, evidence)
    yield "adapter not loaded", partial(_adapter, suspects, samples)
    yield "temperature", partial(_temperature, suspects, samples)
    for folder in suspects.folders:
        yield f"model of {folder}", partial(_folder, suspects, samples, folder)
    yield "trainer", partial(_trainer, suspects, samples)
    yield "dtype", partial(_rounding, suspects, samples)


def _stale_prefix(evidence: Evidence) -> Iterator[Fault]:
    advice = (
        "With emptied caches and new request ids the server agrees: it answers from keys and values of older weights or of "
        "other tokens. Its `resume` must drop every cached prefix; until it does, turn its prefix cache off in "
        "actor_infer.strategy_args.strategy_config"
    )
    yield Fault("stale prefix", evidence.ask_afresh(), advice)


def _stale_weights(evidence: Evidence) -> Iterator[Fault]:
    if evidence.change_since is not None:
        version, distance = evidence.change_since
        advice = (
            "The server answers the same questions as it did then, and the trainer has moved on. The weight update didn't "
            "reach it; actor_infer.strategy_args.strategy_name: embedded reads the trainer's own weights"
        )
        yield Fault(f"weights not transferred since version {version}", distance, advice)


def _adapter(suspects: Suspects, samples: Sequence[Sample]) -> Iterator[Fault]:
    if suspects.without_adapter is not None:
        advice = (
            "The server agrees with the base model, without the LoRA adapter that is trained "
            "(actor_train.model_args.lora_rank): it must load the adapter, or be given merged weights"
        )
        yield Fault("adapter not loaded", _distance(samples, suspects.without_adapter(samples)), advice)


def _temperature(suspects: Suspects, samples: Sequence[Sample]) -> Iterator[Fault]:
    """Log-probs before the temperature, or a server that doesn't read it: both are those of temperature 1."""
    if suspects.temperature != 1.0:
        advice = (
            f"The server's log-probs are those of this temperature, the trainer's of {suspects.temperature:g} "
            "(actor_infer.generating_args.temperature, train_env_manager's before it). A server must return log-probs of "
            "what it samples from, after the temperature; for vLLM that is logprobs_mode: processed_logprobs"
        )
        plain = suspects.score_plainly(samples, 1.0, suspects.sampler_dtype)
        yield Fault("temperature 1", _distance(samples, plain), advice)


def _folder(suspects: Suspects, samples: Sequence[Sample], folder: str) -> Iterator[Fault]:
    setting, start = suspects.folders[folder], next(iter(suspects.folders))
    dtype, trust = parse_dtype(suspects.sampler_dtype), trusted_already(suspects.model_config)
    model = load_model(folder, dtype=dtype, attn_implementation="sdpa", trust=trust)
    rest = _distance(samples, plain_logprobs(model, samples, suspects.temperature))
    if folder == start:
        advice = "The server has the weights that training started from: no weight update has reached it"
        yield Fault(f"weights not transferred, still those of {setting} {folder}", rest, advice)
    else:
        advice = f"The server samples from this model, and training started from {start}: name one folder for both"
        yield Fault(f"wrong folder, {setting} {folder}", rest, advice)


def _trainer(suspects: Suspects, samples: Sequence[Sample]) -> Iterator[Fault]:
    ours, theirs = suspects.trainer_dtype, suspects.sampler_dtype
    cause, advice = "trainer's forward pass", "try actor_train.model_args.attn_implementation: sdpa, and report it"
    if ours != theirs:
        cause = f"dtype, {ours} of the trainer"
        advice = "set actor_train.model_args.dtype to the server's, or raise parity_max_logprob_diff"
    rest = _distance(samples, suspects.score_plainly(samples, suspects.temperature, theirs))
    start = "The server agrees with transformers' plain forward pass over the trainer's weights, and the trainer doesn't: "
    yield Fault(cause, rest, start + advice)


def _rounding(suspects: Suspects, samples: Sequence[Sample]) -> Iterator[Fault]:
    trained = suspects.score(samples)
    difference = _distance(samples, trained)
    for dtype in sorted({suspects.sampler_dtype, "bf16", "fp16"} - {"fp32"}):
        predicted = suspects.score_plainly(samples, suspects.temperature, dtype)
        pairs = zip(samples, trained, predicted, strict=True)
        rounding = float(np.concatenate([np.abs(a - b)[sample.response_mask] for sample, a, b in pairs]).mean())
        advice = (
            f"The difference is of the size that computing in {dtype} makes on these tokens, {rounding:.2g}. The trainer "
            f"computes in {suspects.trainer_dtype} (actor_train.model_args.dtype), the server is to compute in "
            f"{suspects.sampler_dtype} (actor_infer.model_args.dtype): make both the same, or raise parity_max_logprob_diff"
        )
        is_proven = rounding / _ROUNDING_SPREAD <= difference <= rounding * _ROUNDING_SPREAD
        yield Fault(f"dtype, {dtype} of the server", _distance(samples, predicted), advice, is_proven)


def _distance(samples: Sequence[Sample], logprobs: Sequence[FloatArray]) -> float:
    return float(differences(samples, logprobs).mean())
