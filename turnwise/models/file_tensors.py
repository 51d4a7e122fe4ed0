"""Compares the tensors of a folder's weight files with those of the model that was loaded from them. Without
a word, transformers leaves out tensors that the model doesn't have and converts every type: the model would
be another one."""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from turnwise.errors import ModelError, listed
from turnwise.model_files.folder import TensorHeader, require_floats, weight_headers

logger = logging.getLogger(__name__)

_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Tensors of older files that models compute today."""


def require_weights(path: str | Path, missing: Sequence[str], unexpected: Sequence[str] = ()) -> None:
    """Raises ModelError if the weights at `path` lack tensors of the model (`missing`), or have tensors that
    the model lacks (`unexpected`)."""
    if missing:
        raise ModelError(f"{path}: the weights lack {len(missing)} tensors of the model ({listed(missing)})")
    if unexpected:
        raise ModelError(
            f"{path}: the weights hold {len(unexpected)} tensors that the model doesn't have "
            f"({listed(unexpected)}); without them it would be another model; set model_type and the sizes "
            "of config.json to those of the weights, or use files without these tensors"
        )


def unexpected_tensors(model: PreTrainedModel, reported: Collection[str]) -> list[str]:
    """The tensors that transformers has `reported` as unexpected and that the model doesn't compute by
    itself, sorted. GPT-2's files hold the causal mask of each layer, for example."""
    computed = _computed_buffers(model)
    return sorted(name for name in reported if not _names_here(model, name) & computed)


def check_tensor_types(path: str | Path, folder: Path, model: PreTrainedModel) -> None:
    """Raises ModelError if a tensor of the files that the model takes doesn't hold real numbers, and the
    model's does. Logs which tensors the model doesn't take. Tensors of quantised weights have types of their
    own and aren't checked."""
    headers = weight_headers(folder)
    left_out = _left_out(model, headers)
    if left_out:
        logger.info(
            "%s: %d tensors of its files are no weights of this model and are left out, as transformers "
            "lists them: %s",
            path,
            len(left_out),
            listed(left_out),
        )
    if model.config.to_dict().get("quantization_config") is not None:
        return
    whole_numbers = {name for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}
    floats = []
    for name in headers:
        if name not in left_out and not _names_here(model, name) & whole_numbers:
            floats.append(name)
    require_floats(folder, headers, floats)


def _left_out(model: PreTrainedModel, headers: Mapping[str, TensorHeader]) -> list[str]:
    listed_patterns = model._keys_to_ignore_on_load_unexpected or ()
    pattern = re.compile("|".join(f"({one})" for one in (*listed_patterns, *_COMPUTED)))
    computed = _computed_buffers(model)
    model_names = model.state_dict().keys()
    left_out = []
    for name in headers:
        names_here = _names_here(model, name)
        is_listed = pattern.search(name) or names_here & computed
        if is_listed and not names_here & model_names:
            left_out.append(name)
    return left_out


def _computed_buffers(model: PreTrainedModel) -> set[str]:
    """Names of the buffers that a model's files don't hold."""
    return {name for name, _ in model.named_buffers()} - model.state_dict().keys()


def _names_here(model: PreTrainedModel, name: str) -> set[str]:
    """The names in the model that a tensor of its files may have: files of a model's body lack the body's own
    name."""
    return {name, f"{model.base_model_prefix}.{name}"}
