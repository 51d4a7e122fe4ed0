"""Descriptions of the models and settings really in use, read from the objects, for the table at the start of
a run."""

from dataclasses import dataclass
from typing import Literal, get_args

from turnwise.model_files.folder import NOTHING, Trust

MemoryKind = Literal["weights", "kv_cache", "optimizer"]
Suspension = Literal["finish", "abort", "keep"]
"""What running requests do when weights change: they finish (`finish`), end at once with their partial tokens
(`abort`), or pause with their KV and continue with the new weights, so that their completions have several
versions (`keep`)."""
EVERY_SUSPENSION: frozenset[Suspension] = frozenset(get_args(Suspension))


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. `dtype` is `fp32`, `bf16` or `fp16`, `attention` describes the kernel, `device` is
    torch's name."""

    architecture: str
    num_parameters: int
    num_trainable: int
    dtype: str
    attention: str
    device: str
    address: tuple[int, int]
    """Process and address of the weights: models with the same address share them."""


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """Description of a policy by its folder, without its weights: what a server in any process needs to load
    it."""

    path: str
    """A model folder or hub name."""
    vocab_size: int
    """Number of rows of the embedding; the token ids of a prompt must be below it."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response according to the model's generation config."""
    max_context: int
    """Maximum tokens per context in this run."""
    dtype: str
    """`fp32`, `bf16` or `fp16`: the policy is sampled in this dtype."""
    attention: str = "auto"
    """The attention kernel, as in `model_args.attn_implementation`."""
    trust: Trust = NOTHING


@dataclass(frozen=True, slots=True)
class StrategyInfo:
    """Description of a strategy's model and settings."""

    model: LoadedModel
    compute_dtype: str
    """Dtype of matrix products."""
    optimizer: str = ""
    """The optimiser with its schedule; empty for a frozen model."""
    recomputes_activations: bool = False
    adapters: str = ""
    """Rank, scale and modules of trained adapters; empty if the model's own parameters are trained."""
    saved_bytes: int = 0
    """Approximate number of bytes that `save` writes."""
    num_updates: int = 0
    """Optimiser steps begun so far, including those that were skipped because the loss or a gradient wasn't
    finite. A step begins just before it changes weights."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Description of an inference server's model and settings."""

    model: LoadedModel
    engine: str
    """The inference engine, in a few words, such as vLLM with its version, or `embedded` with its kind of
    forward pass."""
    max_length: int
    """Maximum tokens per context."""
    max_concurrency: int
    """Maximum requests that are decoded together."""
    cache_bytes: int = 0
    """Maximum bytes of its KV cache; 0 if it keeps no KV between requests."""
    needs_weights: bool = True
    """Whether weights must be sent to it, because its model isn't the trainer's own."""
    sampling_mask: bool = False
    """Whether it can return the candidate ids that top-k, top-p or min-p left for each token
    (`SamplingParams.keeps_ids`)."""
    sleeps: frozenset[MemoryKind] = frozenset({"kv_cache"})
    """The kinds of memory that it can free."""
    suspensions: frozenset[Suspension] = frozenset({"finish", "abort"})
    """What it can do with running requests while its weights change."""
    weight_versions: bool = False
    """Whether a completion that spans a weight update says which weights sampled each token."""
