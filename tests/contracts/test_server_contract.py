from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import server_contract as contract
import torch
from server_factories import server_in_a_process
from toy_model import toy_model
from transformers import PreTrainedModel

from turnwise.errors import NotAvailableError
from turnwise.inference import vllm_server
from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.inference.hf_server import HFServer
from turnwise.types import SamplingParams

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3-yarn": {"head_dim": 16, "rope_parameters": YARN},
    "qwen2": {"model_type": "qwen2"},
    "llama-bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 16},
    "gpt2": {"model_type": "gpt2", "tie_word_embeddings": True},
}
COMMON = {
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF_THE_MODEL = (
    contract.greedy_equals_reference,
    contract.logprobs_match_a_forward_pass,
    contract.a_crowd_changes_nothing,
    contract.later_turns_equal_fresh_ones,
    contract.a_shared_prompt_changes_nothing,
    contract.weight_update_takes_effect,
    contract.frozen_requests_go_on,
)
"""What another model may break; the others are of the server alone."""
SERVERS = (EmbeddedServer, HFServer, server_in_a_process)
CASES = [(server_class, "qwen3", check) for server_class in SERVERS for check in contract.CHECKS]
CASES += [(EmbeddedServer, name, check) for name in MODELS if name != "qwen3" for check in OF_THE_MODEL]


def make_model(name: str) -> PreTrainedModel:
    """Random weights large enough that every part of the model shows in the logits."""
    model = toy_model(attn_implementation="sdpa", **COMMON | MODELS[name])
    torch.manual_seed(0)
    for parameter_name, parameter in model.named_parameters():
        is_scale = parameter.ndim == 1 and not parameter_name.endswith("bias")
        torch.nn.init.normal_(parameter, 1.0 if is_scale else 0.0, 0.2)
    return model


@pytest.mark.parametrize(
    ("server_class", "model_name", "check"), CASES, ids=lambda value: getattr(value, "__name__", value)
)
def test_contract(server_class: Callable, model_name: str, check: Callable) -> None:
    asyncio.run(check(server_class, make_model(model_name)))


def test_the_hf_server_ignores_the_sampling_that_a_model_suggests() -> None:
    model = make_model("qwen3")

    async def sampled() -> list[int]:
        return (await HFServer(model).generate([1, 2, 3], SamplingParams(8, seed=5), "c")).token_ids.tolist()

    plain = asyncio.run(sampled())
    for name, value in {
        "temperature": 0.1,
        "top_k": 1,
        "top_p": 0.1,
        "min_p": 0.9,
        "repetition_penalty": 9.0,
    }.items():
        setattr(model.generation_config, name, value)
    assert asyncio.run(sampled()) == plain


@pytest.mark.parametrize(
    ("version", "said"),
    [("0.31.9", "vLLM 0.31.9 is installed; turnwise works with 0.32: "), ("", "can't be imported")],
)
def test_a_vllm_of_another_version_or_none_is_refused(
    version: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version) if version else None)
    monkeypatch.setattr(vllm_server, "_ENVIRONMENT", {})
    with pytest.raises(NotAvailableError, match=said):
        vllm_server.load_vllm()
