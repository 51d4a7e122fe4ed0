"""One micro-batch, and what a loss gets beside it. `turnwise.types` exports these too."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from turnwise.types.media import Media


class Denominators(NamedTuple):
    """The divisors of the losses of one *optimiser step*, known before its first micro-batch. Summed over the
    samples of all micro-batches and ranks, `num_tokens` = Σ weight·tokens of the loss mask, `num_sequences` =
    Σ weight·share, where share is the sample's share of its episode's tokens (1 unless the episode was cut
    into parts), `num_turns` = Σ weight·turns. Only samples and turns with a token in the loss mask count.
    `max_length` is the constant `sequence_length`."""

    num_tokens: float
    num_sequences: float
    max_length: int
    num_turns: float = 0.0


class TokenAnnotations(NamedTuple):
    """What a loss must know about single tokens and can only learn from the whole optimiser step: arrays [N],
    or None. They are computed before the step is split into micro-batches, so that no result depends on the
    split."""

    keep_mask: Any = None
    """bool: False excludes a token from the loss and its denominators, but not from the ratios of its turn
    and sequence."""
    importance: Any = None
    """float32: constant factors of the tokens' policy losses."""
    selected_mask: Any = None
    """bool: the tokens that clip_cov or kl_cov chose over the whole step; None for other variants."""
    entropy_share: Any = None
    """float32: factors of the entropy bonus, the same for all tokens; None = 1."""


@dataclass(slots=True)
class Batch:
    """`S` samples with `N` tokens in all, packed back to back, as one micro-batch. The arrays are numpy here;
    a strategy turns them into tensors on its device with `map` and passes these to the loss. Optional arrays
    are None until the forward pass or the credit assignment that computes them has run."""

    token_ids: Any  # int64 [N]
    position_ids: Any  # int64 [N], restarting at 0 with each sample
    sequence_id: Any  # int64 [N], 0 … S−1, ascending
    turn_id: Any  # int64 [N], the turn's index in its sample's spans; −1 where the mask is 0
    response_mask: Any  # bool [N]
    weights: Any  # float32 [N], the sample's weight at each token
    lengths: tuple[int, ...]
    """Tokens of each of the S samples."""
    denominators: Denominators
    episode_tokens: Any = None
    """float32 [N]: the number of tokens of the sample's episode that the step's loss counts; None if no
    episode has several samples."""
    kept_ids: Any = None  # int32 [K], and [N + 1], as in `Sample`
    kept_offsets: Any = None
    temperatures: Any = None  # float32 [N], as in `Sample`
    rollout_logprobs: Any = None
    old_logprobs: Any = None
    old_full_logprobs: Any = None
    ref_logprobs: Any = None
    values: Any = None
    advantages: Any = None
    returns: Any = None
    keep_mask: Any = None
    importance: Any = None
    selected_mask: Any = None
    entropy_share: Any = None
    media: tuple[Media, ...] = ()
    media_positions: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def loss_mask(self) -> Any:
        """bool [N]: the trained tokens that the loss and its denominators count."""
        if self.keep_mask is None:
            return self.response_mask
        return self.response_mask & self.keep_mask

    def map(self, convert: Callable[[Any], Any]) -> "Batch":
        """A copy of the batch with `convert` applied to every array."""
        plain = ("lengths", "denominators", "media", "media_positions")
        converted = {name: convert(array) for name, array in _set_fields(self).items() if name not in plain}
        return replace(self, **converted)


@dataclass(frozen=True, slots=True)
class ModelOutputs:
    """A strategy's input to a loss: tensors [N], aligned with the tokens of the batch, 0 outside the response
    mask."""

    logprobs: Any = None
    """Log-probs, normalised over the kept ids of a token that has some, else over the whole vocabulary."""
    full_logprobs: Any = None
    """Log-probs over the whole vocabulary. None if `logprobs` are the same (no kept ids) and the loss doesn't
    ask for these."""
    entropy: Any = None
    values: Any = None
    next_values: Any = None

    def named(self) -> dict[str, Any]:
        """The outputs that were computed, by name."""
        return _set_fields(self)


def _set_fields(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that aren't None, by name."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: value for name, value in values.items() if value is not None}
