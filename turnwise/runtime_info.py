"""Describes what is really loaded and run, read off the objects, for the table at the start of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as it lies in memory. Dtypes, attention and device are torch's own words for them."""

    architecture: str
    num_parameters: int
    num_trainable: int
    dtype: str
    attention: str
    device: str
    address: tuple[int, int]
    """Process and place of the weights: models with the same address share them."""


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
    """Bytes that `save` writes, about."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Description of an inference server's model and settings."""

    model: LoadedModel
    engine: str
    """Which forward pass it samples with, in a few words."""
    max_length: int
    """Tokens of a context."""
    max_concurrency: int
    """Requests that are decoded together."""
    cache_bytes: int = 0
    """Bound of its cached keys and values in bytes; 0 if it keeps none between requests."""
