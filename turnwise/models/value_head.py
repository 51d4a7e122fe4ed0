"""Value models: a decoder's backbone with a scalar head, V = w·h + b at every token with hidden state h. On
disk a value model is a Hugging Face folder for token classification with one label
(`AutoModelForTokenClassification`)."""

import logging
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForTokenClassification

from turnwise.errors import ModelError
from turnwise.model_files.folder import NOTHING, Trust, base_of_adapter, check_adapter, weight_shapes
from turnwise.models.adapter_merge import NOT_MERGED, is_value_adapter, merge_adapter
from turnwise.models.file_tensors import require_weights
from turnwise.models.load import (
    load_model,
    load_model_config,
    load_pretrained,
    told_as_one_sentence,
    trusted_already,
)

logger = logging.getLogger(__name__)


def load_value_model(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    attn_implementation: str = "auto",
    trust: Trust = NOTHING,
) -> PreTrainedModel:
    """A value model in evaluation mode with fp32 weights, from a folder or the hub.

    A causal language model has no value head: its backbone gets a new head of zeros, so that all values are
    0. The scalar head of a reward model is kept. An adapter is merged into its base; a critic's adapter
    brings its own head. Raises ModelError if the folder is missing, isn't a decoder, needs its own Python
    code, has a head of several labels, or lacks weights."""
    folder = trust.folder(path)
    base = base_of_adapter(folder)
    if base is not None:
        check_adapter(folder)
        model = load_value_model(
            base,
            device=device,
            attn_implementation=attn_implementation,
            trust=trust,
        )
        if is_value_adapter(folder):
            with told_as_one_sentence(folder, NOT_MERGED):
                merge_adapter(model, folder)
        else:
            model.base_model.load_state_dict(
                load_model(folder, device=device, trust=trust).base_model.state_dict()
            )
        return model
    config = load_model_config(folder, trust)
    if trusted_already(config).remote_code:
        raise ModelError(
            f"{path} is a model of its own Python code (trust_remote_code), which gets no value head here; "
            "name another one as reward_pretrain"
        )
    config.num_labels = 1
    model, missing, unexpected = load_pretrained(
        value_model_class(config),
        folder,
        config,
        device=device,
        attn_implementation=attn_implementation,
        trust=trust,
    )
    if unexpected:
        replaced = text_head(config)
        unexpected = [name for name in unexpected if name not in replaced]
    require_weights(
        path,
        [name for name in missing if name.startswith(f"{model.base_model_prefix}.")],
        unexpected,
    )
    for name in missing:
        nn.init.zeros_(model.get_parameter(name))
    if missing:
        logger.info("%s has no value head (%s): a new one starts at 0", path, ", ".join(missing))
    return model


def text_head(config: PreTrainedConfig) -> set[str]:
    """Names of the tensors of a causal language model outside its body, in place of which a value model has
    its head."""
    with torch.device("meta"):
        decoder: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    body = f"{decoder.base_model_prefix}."
    return {name for name in decoder.state_dict() if not name.startswith(body)}


def num_labels_here(path: str | Path, trust: Trust = NOTHING) -> int | None:
    """Number of labels of the head that `load_value_model` would find, read from the headers of the weight
    files; 0 without a head, None if the headers don't tell. Raises ModelError if the model isn't a
    decoder."""
    folder = trust.folder(path)
    base = base_of_adapter(folder)
    if base is not None:
        return 1 if is_value_adapter(folder) else num_labels_here(base, trust)
    shapes = weight_shapes(folder)
    if not shapes:
        return None
    config = load_model_config(folder, trust)
    if trusted_already(config).remote_code:
        return None
    with torch.device("meta"):
        model = value_model_class(config)(config)
    outer = [name for name, _ in model.named_children() if name != model.base_model_prefix]
    return next((shapes[f"{name}.weight"][0] for name in outer if f"{name}.weight" in shapes), 0)


def value_model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """transformers' token classifier of this architecture, else a class made here. Raises ModelError for a
    non-decoder."""
    decoders = AutoModelForCausalLM._model_mapping
    classifiers = AutoModelForTokenClassification._model_mapping
    if type(config) not in decoders:
        raise ModelError(
            f"a {config.model_type} model isn't a decoder: its values would depend on later tokens; use a "
            "causal model"
        )
    if type(config) in classifiers:
        return classifiers[type(config)]
    decoder = decoders[type(config)]
    base = next(parent for parent in decoder.__mro__[1:] if issubclass(parent, PreTrainedModel))
    name = decoder.__name__.replace("ForCausalLM", "ForTokenClassification")
    return type(name, (GenericForTokenClassification, base), {"base_model_prefix": base.base_model_prefix})


def value_head(model: PreTrainedModel) -> nn.Linear | None:
    """The scalar head of a value model, None for a policy."""
    for name, module in model.named_children():
        if name != model.base_model_prefix and isinstance(module, nn.Linear) and module.out_features == 1:
            return module
    return None
