"""Partial training: parameters that keep the values they start with."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate

from torch import nn

from turnwise.errors import ConfigError, nearest

logger = logging.getLogger(__name__)


def frozen_names(model: nn.Module, prefixes: Sequence[str]) -> frozenset[str]:
    """Names of the parameters that start with one of the prefixes, and those of tied ones, which are the same tensor.

    Raises:
        ConfigError: a prefix with which no name starts.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in parameters):
            starts = list(dict.fromkeys(start for name in parameters for start in accumulate(name.split("."), "{}.{}".format)))
            raise ConfigError(
                f"freeze_module_prefix: no parameter's name starts with {prefix!r}; names start with "
                f"{', '.join(sorted(starts, key=len)[:6])}.{nearest(prefix, starts)}"
            )
    named = {name for name in parameters if name.startswith(tuple(prefixes))}
    tensors = {id(parameters[name]) for name in named}
    frozen = frozenset(name for name, parameter in parameters.items() if id(parameter) in tensors)
    for name in sorted(frozen - named):
        logger.warning("freeze_module_prefix also freezes %s: it is tied to a tensor that one of its prefixes names", name)
    return frozen


def freeze(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Takes the parameters whose names start with one of the prefixes out of training.

    Raises:
        ConfigError: a prefix with which no name starts, or nothing is left to train.
    """
    frozen = frozen_names(model, prefixes)
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"freeze_module_prefix: {', '.join(prefixes)} freeze every parameter; leave some to be trained")
