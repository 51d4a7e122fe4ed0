"""Why sampler and trainer disagree: every known fault is tried on the tokens at hand.

Each fault predicts what the server must have answered if it were the cause. The one whose prediction is the server's answer is
named, with what to do about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig

from turnwise.chat.template import ChatTemplate
from turnwise.errors import TurnwiseError
from turnwise.models.load import load_model, load_tokenizer, parse_dtype, trusted_already
from turnwise.models.plain import logprobs_at, plain_logits, plain_model
from turnwise.pipelines.parity_probe import CheckedConversation, Prompts, Scored
from turnwise.types import FloatArray, Sample

Score = Callable[[Sequence[Sample]], list[FloatArray]]
"""Log-probs [N] of each sample's tokens, as `ModelRole.forward` gives them."""

_SAME_TEMPERATURE = 0.01
"""Relative difference up to which two temperatures are one."""
_NEGLIGIBLE = 1e-5
"""Nats between which no difference is made: fp32 on two ways of computing the same."""
_ROUNDING_SPREAD = 3.0
"""Two ways of computing the same in one dtype round differently; their errors differ in size by this factor at most."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """What a server can be compared with.

    `weights` are the trainer's `(Hugging Face name, tensor)` pairs. `folders` are the model folders of the config, with a
    setting that names each; training started from the first. `without_adapter` scores like `score`, with a LoRA adapter off.
    """

    score: Score
    weights: Callable[[], Iterable[tuple[str, Tensor]]]
    model_config: PreTrainedConfig
    template: ChatTemplate
    temperature: float
    trainer_dtype: str
    sampler_dtype: str
    folders: Mapping[str, str]
    without_adapter: Score | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """The conversations in which sampler and trainer disagree about policy `version`.

    `ask_afresh` has last turns answered again with nothing cached, and returns the mean difference of the worst conversation.
    `change_since` is `(version, distance)`: how far the server's answers to the fixed questions are from those that it gave
    as an earlier version; None where it gave none, or other tokens.
    """

    version: int
    played: Sequence[CheckedConversation]
    scored: Scored
    max_diff: float
    ask_afresh: Callable[[], float]
    change_since: tuple[int, float] | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A fault that was tried: the mean difference that is left if it is the cause (NaN: not tried), and what to do then."""

    cause: str
    rest: float
    advice: str
    is_proven: bool


def diagnose(evidence: Evidence, suspects: Suspects) -> str:
    """The message of a ParityError: how much, why, what to do, and what was tried."""
    scored = evidence.scored
    findings = list(_Trial(evidence, suspects).findings())
    proven = [finding for finding in findings if finding.is_proven]
    if proven:
        # One fault may look like another: the first of those that leave about as little as any.
        least = min(finding.rest for finding in proven)
        cause = next(finding for finding in proven if finding.rest <= 2 * least + _NEGLIGIBLE)
        verdict = f"Cause: {cause.cause}. {cause.advice}."
    else:
        verdict = "Cause: none of those below. Raise parity_max_logprob_diff only if you can explain the difference."
    return "\n".join(
        [
            f"sampler and trainer differ by {scored.difference:.2g} nats a token in the mean, {scored.largest_difference:.2g} "
            f"at most, over {len(scored.sampled)} tokens of policy version {evidence.version}; parity_max_logprob_diff is "
            f"{evidence.max_diff:g}.",
            verdict,
            "What would be left of the mean difference, were the cause",
            *(f"  {finding.rest:<8.2g} {finding.cause}" for finding in findings),
        ]
    )


class _Trial:
    """Tries one fault after another, the surest test first."""

    def __init__(self, evidence: Evidence, suspects: Suspects) -> None:
        self._evidence = evidence
        self._scored = evidence.scored
        self._suspects = suspects
        self._samples = [conversation.sample() for conversation in evidence.played]

    def findings(self) -> Iterator[Diagnosis]:
        folders = self._suspects.folders
        tests: dict[str, Callable[[], Iterator[Diagnosis]]] = {
            "stale prefix": self._stale_prefix,
            "weights not transferred": self._stale_weights,
            "adapter not loaded": self._adapter,
            "temperature": self._temperature,
            "template, other tokens": self._other_tokens,
            **{f"template of {folder}": partial(self._template, folder) for folder in folders},
            **{f"model of {folder}": partial(self._folder, folder) for folder in folders},
            "trainer": self._trainer,
            "dtype": self._rounding,
        }
        for name, test in tests.items():
            try:
                yield from test()
            except TurnwiseError as error:
                yield Diagnosis(f"{name}, which can't be tried: {str(error).splitlines()[0]}", math.nan, "", is_proven=False)

    def _finding(self, cause: str, rest: float, advice: str) -> Diagnosis:
        difference = self._scored.difference
        is_almost_all = rest <= difference / 10
        is_within_bound = rest <= self._evidence.max_diff and rest <= difference / 3
        return Diagnosis(cause, rest, advice, is_proven=is_almost_all or is_within_bound)

    def _stale_prefix(self) -> Iterator[Diagnosis]:
        yield self._finding(
            "stale prefix",
            self._evidence.ask_afresh(),
            "With emptied caches and new request ids the server agrees: it answers from keys and values of older weights or of "
            "other tokens. Its `resume` must drop every cached prefix; until it does, turn its prefix cache off in "
            "actor_infer.strategy_args.strategy_config",
        )

    def _stale_weights(self) -> Iterator[Diagnosis]:
        if self._evidence.change_since is not None:
            version, distance = self._evidence.change_since
            yield self._finding(
                f"weights not transferred since version {version}",
                distance,
                "The server answers the same questions as it did then, and the trainer has moved on. The weight update didn't "
                "reach it; actor_infer.strategy_args.strategy_name: embedded reads the trainer's own weights",
            )

    def _adapter(self) -> Iterator[Diagnosis]:
        if self._suspects.without_adapter is not None:
            yield self._finding(
                "adapter not loaded",
                self._distance_by(self._suspects.without_adapter, self._samples),
                "The server agrees with the base model, without the LoRA adapter that is trained "
                "(actor_train.model_args.lora_rank): it must load the adapter, or be given merged weights",
            )

    def _temperature(self) -> Iterator[Diagnosis]:
        ours = self._suspects.temperature
        fitted = self._fitted_temperature()
        if abs(math.log(fitted / ours)) > _SAME_TEMPERATURE:
            yield self._finding(
                f"temperature {fitted:.3g}",
                self._distance_plain(self._logits, fitted),
                f"The server's log-probs are those of this temperature, the trainer's of {ours:g} "
                "(actor_infer.generating_args.temperature, train_env_manager's before it). A server must return log-probs of "
                "what it samples from, after the temperature; for vLLM that is logprobs_mode: processed_logprobs",
            )

    def _other_tokens(self) -> Iterator[Diagnosis]:
        """A server that puts a token before the prompt, or takes one away, where the template has written all there is."""
        tokenizer = self._suspects.template.tokenizer
        ours = [played.prompts for played in self._evidence.played]
        added = [tokenizer.bos_token_id, *tokenizer.encode("")[:1], ours[0][0][0]]
        for token_id in dict.fromkeys(token_id for token_id in added if token_id is not None):
            yield self._finding(
                f"template, {tokenizer.convert_ids_to_tokens(token_id)} put before the prompt",
                self._distance_after([[[token_id, *first], *others] for first, *others in ours]),
                "The ids that a server gets are the whole prompt: turn off that it adds special tokens (add_special_tokens)",
            )
        yield self._finding(
            "template, the prompt without its first token",
            self._distance_after([[first[1:], *others] for first, *others in ours]),
            "The ids that a server is given are the whole prompt: turn off that it removes a token",
        )

    def _template(self, folder: str) -> Iterator[Diagnosis]:
        template = ChatTemplate(load_tokenizer(folder, trusted_already(self._suspects.model_config)))
        prompts = [played.written_by(template) for played in self._evidence.played]
        highest = max(token_id for written in prompts for ids in written for token_id in ids)
        is_other = prompts != [played.prompts for played in self._evidence.played]
        if is_other and highest < self._suspects.model_config.vocab_size:
            yield self._finding(
                f"template of {self._suspects.folders[folder]} {folder}",
                self._distance_after(prompts),
                "The server sees prompts as the tokenizer and chat template of this folder write them: it must take the ids "
                "that it is given, and all roles should name one folder",
            )

    def _folder(self, folder: str) -> Iterator[Diagnosis]:
        setting, start = self._suspects.folders[folder], next(iter(self._suspects.folders))
        dtype, trust = parse_dtype(self._suspects.sampler_dtype), trusted_already(self._suspects.model_config)
        model = load_model(folder, dtype=dtype, attn_implementation="sdpa", trust=trust)
        rest = self._distance_plain(plain_logits(model, self._samples), self._suspects.temperature)
        if folder == start:
            advice = "The server has the weights that training started from: no weight update has reached it"
            yield self._finding(f"weights not transferred, still those of {setting} {folder}", rest, advice)
        else:
            advice = f"The server samples from this model, and training started from {start}: name one folder for both"
            yield self._finding(f"wrong folder, {setting} {folder}", rest, advice)

    def _trainer(self) -> Iterator[Diagnosis]:
        ours, theirs = self._suspects.trainer_dtype, self._suspects.sampler_dtype
        rest = self._distance_plain(self._logits, self._suspects.temperature)
        advice = "The server agrees with transformers' plain forward pass over the trainer's weights, and the trainer doesn't: "
        if ours == theirs:
            advice += "try actor_train.model_args.attn_implementation: sdpa, and report it"
            yield self._finding("trainer's forward pass", rest, advice)
        else:
            advice += "set actor_train.model_args.dtype to the server's, or raise parity_max_logprob_diff"
            yield self._finding(f"dtype, {ours} of the trainer", rest, advice)

    def _rounding(self) -> Iterator[Diagnosis]:
        for dtype in dict.fromkeys((self._suspects.sampler_dtype, "bf16", "fp16")):
            if dtype == "fp32":
                continue
            predicted = logprobs_at(self._plain_logits(dtype), self._samples, self._suspects.temperature)
            rounding = float(np.abs(predicted - self._scored.trained).mean())
            yield Diagnosis(
                f"dtype, {dtype} of the server",
                self._scored.distance(predicted),
                f"The difference is of the size that computing in {dtype} makes on these tokens, {rounding:.2g}. The trainer "
                f"computes in {self._suspects.trainer_dtype} (actor_train.model_args.dtype), the server is to compute in "
                f"{self._suspects.sampler_dtype} (actor_infer.model_args.dtype): make both the same, or raise "
                "parity_max_logprob_diff",
                is_proven=rounding / _ROUNDING_SPREAD <= self._scored.difference <= rounding * _ROUNDING_SPREAD,
            )

    @cached_property
    def _logits(self) -> list[Tensor]:
        """Logits of the trainer's weights, as the server should compute them."""
        return self._plain_logits(self._suspects.sampler_dtype)

    def _plain_logits(self, dtype: str) -> list[Tensor]:
        model = plain_model(self._suspects.model_config, self._suspects.weights(), parse_dtype(dtype))
        return plain_logits(model, self._samples)

    def _distance_plain(self, logits: Sequence[Tensor], temperature: float) -> float:
        return self._scored.distance(logprobs_at(logits, self._samples, temperature))

    def _distance_after(self, prompts: Sequence[Prompts]) -> float:
        """To the trainer's log-probs of the same tokens after other prompts."""
        pairs = zip(self._evidence.played, prompts, strict=True)
        return self._distance_by(self._suspects.score, [played.sample(written) for played, written in pairs])

    def _distance_by(self, score: Score, samples: Sequence[Sample]) -> float:
        return self._scored.distance(Scored.of(samples, score(samples)).trained)

    def _fitted_temperature(self) -> float:
        """The one at which the plain log-probs come nearest to the server's."""
        low, high = 0.05, 20.0
        for _ in range(5):
            grid = np.geomspace(low, high, 17)
            best = int(np.argmin([self._distance_plain(self._logits, t) for t in grid.tolist()]))
            low, high = grid[max(best - 1, 0)], grid[min(best + 1, 16)]
        return float(grid[best])
