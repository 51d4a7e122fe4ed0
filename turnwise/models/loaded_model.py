"""Describes a loaded model: size, dtype, device and attention, read off the model itself."""

import os

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from turnwise.models.cpu.layers import uses_native_layers
from turnwise.models.load import DTYPES, load_model_config
from turnwise.models.packed_attention import PACKED_ATTENTION
from turnwise.runtime.info import LoadedModel, PolicyInfo

_KERNELS = {
    PACKED_ATTENTION: "packed",
    "flash_attention_2": "flash attention 2, packed",
    "sdpa": "sdpa, padded",
    "eager": "eager, padded",
}


def loaded_model(model: PreTrainedModel) -> LoadedModel:
    """The description of the model as it is now. Tied parameters count once."""
    parameters = list(model.parameters())
    kernel = model.config._attn_implementation
    attention = _KERNELS.get(kernel, kernel)
    if kernel == PACKED_ATTENTION and uses_native_layers(model):
        attention += ", own kernels"
    return LoadedModel(
        architecture=type(model).__name__,
        num_parameters=sum(p.numel() for p in parameters),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        dtype=dtype_name(model.dtype),
        attention=attention,
        device=str(model.device),
        address=(os.getpid(), model.get_input_embeddings().weight.data_ptr()),
    )


def bare_model(policy: PolicyInfo) -> PreTrainedModel:
    """The model of a policy without its weights, on torch's meta device. Raises ModelError if its folder is
    unreadable."""
    config = load_model_config(policy.path, policy.trust)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, trust_remote_code=policy.trust.remote_code
        )
    return model


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in configs, or torch's name if configs have none for it.

    >>> dtype_name(torch.bfloat16)
    'bf16'
    """
    for name, configured in DTYPES.items():
        if configured == dtype:
            return name
    return str(dtype).removeprefix("torch.")
