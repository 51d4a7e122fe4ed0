"""The one model of a run's costs, as pure functions of counts: `turnwise config` shows its bytes, a strategy
the size of its checkpoint, the display of a run its time left, and `turnwise tool` its estimate. Nothing here
reads a clock or a file."""

from collections.abc import Sequence
from dataclasses import dataclass

WEIGHT_BYTES = 4
"""Bytes of a weight in memory: fp32, also where matrix products are in another dtype."""
NUM_MOMENTS = 2
"""AdamW's moments of a trained parameter, each as large as the parameter."""
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number by dtype."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model by its number of parameters. With `num_adapter` only that many parameters of adapters are
    trained."""

    num_parameters: int
    num_adapter: int | None = None

    @property
    def num_trained(self) -> int:
        if self.num_adapter is None:
            return self.num_parameters
        return self.num_adapter

    @property
    def frozen_bytes(self) -> int:
        """Memory of the weights that aren't trained."""
        if self.num_adapter is None:
            return 0
        return WEIGHT_BYTES * self.num_parameters

    @property
    def trained_bytes(self) -> int:
        """Memory of what is trained: weights, gradients and moments. Activations come on top."""
        return (2 + NUM_MOMENTS) * WEIGHT_BYTES * self.num_trained

    @property
    def gradient_bytes(self) -> int:
        """Memory of the whole gradient."""
        return WEIGHT_BYTES * self.num_trained

    @property
    def checkpoint_bytes(self) -> int:
        """Size of its checkpoint, which holds what is trained."""
        trained = WEIGHT_BYTES * self.num_trained
        return checkpoint_bytes(trained, trained)


def checkpoint_bytes(saved: int, trained: int) -> int:
    """Size of a checkpoint with `saved` bytes of weights, of which the moments belong to `trained` bytes.

    >>> checkpoint_bytes(saved=400, trained=100)
    600
    """
    return saved + NUM_MOMENTS * trained


def disk_bytes(checkpoint: int, num_kept: int) -> int:
    """Space that kept checkpoints need: a new one is written before the oldest is deleted."""
    return (num_kept + 1) * checkpoint


@dataclass(frozen=True, slots=True)
class Sampler:
    """The servers that sample from a model of `num_parameters`, each with its own weights."""

    num_parameters: int
    dtype: str
    num_servers: int

    @property
    def weight_bytes(self) -> int:
        return self.num_servers * BYTES[self.dtype] * self.num_parameters

    def cache_bytes(self, context_bytes: int, limit: int | None) -> int:
        """Maximum memory of keys and values. `context_bytes` are those of all contexts, `limit` is that of
        one server."""
        if limit is None:
            return context_bytes
        return min(context_bytes, self.num_servers * limit)


@dataclass(frozen=True, slots=True)
class TokenWork:
    """What is computed for each token of a training. A parameter costs 6 operations a token to train, forward
    and backward, and 2 in any other pass."""

    is_sampled: bool
    has_reference: bool = False
    has_critic: bool = False
    """Whether a critic as large as the policy is trained, which also gives values before."""

    @property
    def operations(self) -> int:
        """Operations per parameter and token.

        >>> TokenWork(is_sampled=True, has_critic=True).operations
        16
        """
        training = 6
        forward = 2
        total = training
        if self.is_sampled:
            total += forward
        if self.has_reference:
            total += forward
        if self.has_critic:
            total += training + forward
        return total


MATRIX_SHARE = 1 / 3
"""Share of the speed of a matrix product that a training reaches."""


def matrix_speed(size: int, product_s: float) -> float:
    """Operations per second of a product of two square matrices that took `product_s` seconds."""
    return 2 * size**3 / product_s


def training_seconds(work: TokenWork, num_parameters: int, num_tokens: int, operations_per_s: float) -> float:
    """Seconds of a training on a machine whose matrix products make `operations_per_s`."""
    return work.operations * num_parameters * num_tokens / (MATRIX_SHARE * operations_per_s)


def share_done(num_done: int, total: int, num_tokens: int = 0, most_tokens: int = 0) -> float:
    """The share of a work that is done, by its units or its tokens, whichever is further. 0 where totals are
    unknown."""
    shares = [0.0]
    if total:
        shares.append(num_done / total)
    if most_tokens:
        shares.append(num_tokens / most_tokens)
    return max(shares)


def work_left_s(elapsed_s: float, share: float) -> float:
    """Seconds left of a work of which a `share` above 0 took `elapsed_s`."""
    return elapsed_s * max(1 / share - 1, 0.0)


def steps_left_s(ends: Sequence[float], num_left: int, time_s: float) -> float:
    """Seconds left of `num_left` steps at `time_s`, from the mean interval between the `ends` of two or more
    recent ones."""
    mean_s = (ends[-1] - ends[0]) / (len(ends) - 1)
    elapsed_s = time_s - ends[-1]
    return max(mean_s * num_left - elapsed_s, 0.0)


def bytes_text(number: int) -> str:
    """A number of bytes in MB or GB.

    >>> bytes_text(1_500_000), bytes_text(8_000_000_000)
    ('1.5 MB', '8.0 GB')
    """
    if number >= 1e9:
        return f"{number / 1e9:.1f} GB"
    return f"{number / 1e6:.1f} MB"
