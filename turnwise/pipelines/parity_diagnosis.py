"""Finds out why servers and trainer disagree about the log-probs of the same tokens: measures how well each known fault
explains the difference. ParityError's message names the fault that explains it best, if any, and what to do about it."""

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
from turnwise.spec.package_tables import read_table
from turnwise.types import FloatArray, Sample

ScoreSamples = Callable[[Sequence[Sample]], list[FloatArray]]
"""A function that computes the log-probs [N] of each sample's tokens, in the form of `ModelRole.forward`."""

_CAUSES = read_table(__file__, "parity_diagnosis.yaml")
_NEGLIGIBLE = 1e-5  # nats by which two ways of computing the same log-probs in fp32 may differ
_ROUNDING_SPREAD = 3.0
"""The sizes of two rounding errors of the same dtype are taken as equal if they differ by at most this factor."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """The models and settings that a server can be compared with. `score` computes the trainer's log-probs; `without_adapter`
    computes them with the LoRA adapter off (None = no adapter). `weights` returns the trainer's `(Hugging Face name, tensor)`
    pairs. `folders` maps the config's model folders to the settings that name them. Training started from the first folder."""

    score: ScoreSamples
    weights: Callable[[], Iterable[tuple[str, Tensor]]]
    model_config: PreTrainedConfig
    temperature: float
    trainer_dtype: str
    sampler_dtype: str
    folders: Mapping[str, str]
    without_adapter: ScoreSamples | None = None

    def score_plainly(self, samples: Sequence[Sample], temperature: float, dtype: str) -> list[FloatArray]:
        """Log-probs by transformers' own forward pass with the trainer's weights."""
        return plain_logprobs(plain_model(self.model_config, self.weights(), parse_dtype(dtype)), samples, temperature)

    def score_folder(self, samples: Sequence[Sample], folder: str) -> list[FloatArray]:
        """Log-probs by transformers' own forward pass with the weights of a folder."""
        dtype, trust = parse_dtype(self.sampler_dtype), trusted_already(self.model_config)
        model = load_model(folder, dtype=dtype, attn_implementation="sdpa", trust=trust)
        return plain_logprobs(model, samples, self.temperature)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The conversations in which sampler and trainer disagree about policy `version`.

    `max_diff` is the largest mean difference allowed. `ask_afresh` drops the server's caches, requests the last turns again,
    and returns the mean difference of the worst conversation. `change_since` is `(version, distance)`: the policy version of
    the last check, and the mean change of the server's log-probs since then; None without an earlier check, or if the server
    sampled other tokens then."""

    version: int
    samples: Sequence[Sample]
    max_diff: float
    ask_afresh: Callable[[], float]
    change_since: tuple[int, float] | None


class Fault(NamedTuple):
    """A possible cause. `rest()` returns the mean difference between the log-probs that the cause predicts and the server's.
    If given, `rounding()` decides instead: it returns a dtype's mean rounding error, since single errors can't be predicted."""

    cause: str
    rest: Callable[[], float]
    advice: str
    rounding: Callable[[], float] | None = None


def diagnose(evidence: Evidence, suspects: Suspects) -> str:
    """The message of a ParityError: how far sampler and trainer differ, why, what to do, and what was tried."""
    found = logprob_differences(evidence.samples, suspects.score(evidence.samples))
    difference = float(found.mean())
    most = max(difference / 10, min(difference / 3, evidence.max_diff))
    proven: list[tuple[float, Fault]] = []
    tried: list[str] = []
    for fault in _faults(evidence, suspects):
        try:
            rest, size = fault.rest(), fault.rounding() if fault.rounding else None
        except TurnwiseError as error:
            tried.append(f"  {math.nan:<8.2g} {fault.cause}, which can't be tried: {str(error).splitlines()[0]}")
            continue
        tried.append(f"  {rest:<8.2g} {fault.cause}")
        if rest <= most if size is None else size / _ROUNDING_SPREAD <= difference <= size * _ROUNDING_SPREAD:
            proven.append((rest, fault))
    verdict = "Cause: none of those below. Raise parity_max_logprob_diff only if you can explain the difference."
    if proven:
        # One fault may look like another. The first of those with about the least rest is named.
        least = min(rest for rest, _ in proven)
        fault = next(fault for rest, fault in proven if rest <= 2 * least + _NEGLIGIBLE)
        verdict = f"Cause: {fault.cause}. {fault.advice}."
    return "\n".join(
        [
            f"sampler and trainer differ by {difference:.2g} nats per token in the mean, {found.max():.2g} at most, over "
            f"{len(found)} tokens of policy version {evidence.version}; parity_max_logprob_diff is {evidence.max_diff:g}.",
            verdict,
            "Mean difference that would be left if the cause were",
            *tried,
        ]
    )


def _faults(evidence: Evidence, suspects: Suspects) -> Iterator[Fault]:
    """The possible causes. If several match about equally well, `diagnose` names the first of them."""
    samples, ours, theirs = evidence.samples, suspects.trainer_dtype, suspects.sampler_dtype

    def distance(score: ScoreSamples) -> float:
        return float(logprob_differences(samples, score(samples)).mean())

    def plain(temperature: float, dtype: str) -> float:
        return distance(partial(suspects.score_plainly, temperature=temperature, dtype=dtype))

    yield _fault("stale_prefix", evidence.ask_afresh)
    if evidence.change_since is not None:
        version, change = evidence.change_since
        yield _fault("not_transferred_since", lambda: change, version=version)
    if suspects.without_adapter is not None:
        yield _fault("without_adapter", partial(distance, suspects.without_adapter))
    if suspects.temperature != 1.0:
        yield _fault("temperature", partial(plain, 1.0, theirs), temperature=suspects.temperature)
    start = next(iter(suspects.folders), "")
    for folder, setting in suspects.folders.items():
        cause = "not_transferred" if folder == start else "wrong_folder"
        score = partial(suspects.score_folder, folder=folder)
        yield _fault(cause, partial(distance, score), folder=folder, setting=setting, start=start)
    cause = "trainer_pass" if ours == theirs else "trainer_dtype"
    yield _fault(cause, partial(plain, suspects.temperature, theirs), ours=ours)
    for dtype in sorted({theirs, "bf16", "fp16"} - {"fp32"}):
        rounding = partial(_rounding, suspects, samples, dtype)
        rest = partial(plain, suspects.temperature, dtype)
        yield _fault("server_dtype", rest, rounding, dtype=dtype, ours=ours, theirs=theirs)


def _fault(name: str, rest: Callable[[], float], rounding: Callable[[], float] | None = None, **values: str | float) -> Fault:
    told = _CAUSES[name]
    return Fault(told["cause"].format(**values), rest, told["advice"].format(**values), rounding)


def _rounding(suspects: Suspects, samples: Sequence[Sample], dtype: str) -> float:
    """The mean |Δ log-prob| between the trainer's own forward pass and transformers' in `dtype`, over the sampled tokens."""
    trained, rounded = suspects.score(samples), suspects.score_plainly(samples, suspects.temperature, dtype)
    masked = [abs(a - b)[s.response_mask] for s, a, b in zip(samples, trained, rounded, strict=True)]
    return float(sum(part.sum() for part in masked) / sum(map(len, masked)))


def logprob_differences(samples: Sequence[Sample], logprobs: Sequence[FloatArray]) -> FloatArray:
    """|Δ log-prob| [R] between the server and `logprobs` (an array [N] per sample) at the R sampled tokens of all samples."""
    pairs = zip(samples, logprobs, strict=True)
    return np.concatenate([np.abs(s.rollout_logprobs - other)[s.response_mask] for s, other in pairs])
