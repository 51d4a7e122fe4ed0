"""GGUF files of a tiny model, written by gguf's own writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

NUM_HEADS, NUM_KV_HEADS = 4, 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "th e")
TOKENS = (*SPECIAL_TOKENS, *bytes_to_unicode().values(), "th", "the")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers.0.input_layernorm": "blk.0.attn_norm",
    "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
    "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
    "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
    "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
    "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
    "model.layers.0.mlp.up_proj": "blk.0.ffn_up",
    "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
}
"""Modules of transformers' Llama, and what GGUF calls them."""


SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}


def tiny_llama() -> LlamaForCausalLM:
    """One layer, and one row of the tied embedding for each token."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def tiny_qwen2() -> Qwen2ForCausalLM:
    """The same sizes, with biases of queries, keys and values."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    return model


def tensors_of(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The model's tensors by GGUF's names. A llama's rows of queries and keys are in GGUF's order."""
    tensors = {}
    for full_name, parameter in model.named_parameters():
        module, _, kind = full_name.rpartition(".")
        values = parameter.detach().numpy()
        if model.config.model_type == "llama" and "q_proj" in module:
            values = _interleaved(values, NUM_HEADS)
        if model.config.model_type == "llama" and "k_proj" in module:
            values = _interleaved(values, NUM_KV_HEADS)
        tensors[f"{NAMES[module]}.{kind}"] = values
    return tensors


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The two halves of each head row by row, since GGUF rotates neighbours and transformers halves."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    file: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    architecture: str = "llama",
    has_tokenizer: bool = True,
    template: str | None = TEMPLATE,
    end_token: str = "<|im_end|>",
    end_of_turn: str | None = None,
    quantized: str = "",
) -> Path:
    """Writes a model of these sizes; the tensor `quantized` in blocks of 8 bits."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(TOKENS))
    if has_tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(TOKENS)
        types = [
            gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in TOKENS
        ]
        writer.add_token_types(types)
        writer.add_token_merges(MERGES)
        writer.add_eos_token_id(TOKENS.index(end_token))
        writer.add_pad_token_id(TOKENS.index("<|endoftext|>"))
    if end_of_turn is not None:
        writer.add_eot_token_id(TOKENS.index(end_of_turn))
    if template is not None:
        writer.add_chat_template(template)
    for name, values in tensors.items():
        if name == quantized:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
