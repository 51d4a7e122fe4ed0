"""How tokens are sampled, and what a server answers. `turnwise.types` exports these too."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnwise.spec import MAX_KEPT

IntArray = NDArray[np.int64]
KeptIds = NDArray[np.int32]
FloatArray = NDArray[np.float32]
FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a server draws tokens. Each request has its own seed, so its tokens don't depend on other requests.
    Sampling is greedy with `temperature` 0 or `do_sample` False. Greedy tokens have log-probs of 0 and are
    never trained on."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    """Excludes tokens whose probability is below `min_p` times that of the likeliest token; 0 = off."""
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    do_sample: bool = True
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0.0

    @property
    def is_truncated(self) -> bool:
        """Whether top-k, top-p, min-p or a penalty changes the distribution of the tokens. If so, and if no
        kept ids are known, exp(old − sampled log-prob) may differ from 1 even if sampler and trainer have the
        same model."""
        drops_ids = self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0
        return drops_ids or self.repetition_penalty != 1.0

    @property
    def keeps_ids(self) -> bool:
        """Whether a server may return candidate ids: it may for sampling with 1 ≤ `top_k` ≤ `MAX_KEPT` and no
        penalty."""
        return 0 < self.top_k <= MAX_KEPT and self.repetition_penalty == 1.0 and not self.is_greedy


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of one `Conversation.generate` call. They replace the context's own options; None keeps the
    context's."""

    max_new_tokens: int | None = None
    """Maximum tokens of this response; more than the context's own limit has no effect."""
    temperature: float | None = None
    """May differ from turn to turn: each token is trained at its sampling temperature. At 0 (greedy), tokens
    aren't trained."""
    stop: tuple[str, ...] | None = None
    """Strings that end the response."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Schemas that the prompt shows. If they change, the whole conversation is rendered again, as a new
    context."""


AS_OPENED = CallOptions()


class VersionRun(NamedTuple):
    """`num_tokens` consecutive tokens that policy `version` sampled."""

    version: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A server's answer: `R` sampled tokens with their log-probs under the distribution they were drawn from.

    The runs of `versions` add up to R; there are several if weights were updated in the middle of the
    response. With `SamplingParams.keeps_ids`, a server that supports it returns the candidate ids that each
    token was drawn from, in `kept_ids` [K]. Those of token t are `kept_ids[kept_offsets[t]:kept_offsets[t +
    1]]`; `kept_offsets` is [R + 1]. A token without kept ids was drawn from the whole vocabulary."""

    token_ids: IntArray
    logprobs: FloatArray
    finish_reason: FinishReason
    versions: tuple[VersionRun, ...]
    generate_s: float = 0.0
    kept_ids: KeptIds | None = None
    kept_offsets: IntArray | None = None

    def __post_init__(self) -> None:
        if self.kept_offsets is not None and len(self.kept_offsets) != len(self.token_ids) + 1:
            raise ValueError(
                f"a completion of {len(self.token_ids)} tokens has {len(self.kept_offsets)} offsets of kept "
                "ids"
            )
        total = sum(run.num_tokens for run in self.versions)
        if not len(self.token_ids) == len(self.logprobs) == total:
            raise ValueError(
                f"a completion of {len(self.token_ids)} tokens has {len(self.logprobs)} log-probs and "
                f"versions for {total}"
            )


def join_kept_ids(
    parts: Iterable[tuple[KeptIds | None, IntArray | None, int]],
) -> tuple[KeptIds | None, IntArray | None]:
    """Joins the kept ids and offsets of parts `(ids, offsets, number of tokens)`; `(None, None)` if no part
    has ids.

    >>> part = (np.array([7, 8, 9], np.int32), np.array([0, 1, 3]), 2)
    >>> ids, offsets = join_kept_ids([(None, None, 2), part])
    >>> ids.tolist(), offsets.tolist()
    ([7, 8, 9], [0, 0, 0, 1, 3])
    """
    all_ids: list[KeptIds] = []
    counts: list[IntArray] = []
    for ids, offsets, size in parts:
        if ids is not None:
            all_ids.append(ids)
        if offsets is None:
            counts.append(np.zeros(size, np.int64))
        else:
            counts.append(np.diff(offsets))
    if not all_ids:
        return None, None
    ends = np.cumsum(np.concatenate(counts))
    return np.concatenate(all_ids), np.concatenate(([0], ends))
