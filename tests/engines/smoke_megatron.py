"""Megatron works here: on two tensor-parallel processes it gives the log-probs of the Hugging Face model
whose weights it has.

Megatron expects CUDA. What it takes to run it on a CPU stands in `on_a_cpu`.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version

import torch
from common import run_ranks, toy_model, toy_tokens

NUM_RANKS = 2
TOLERANCE = 1e-4


def on_a_cpu() -> None:
    """Replaces the calls to CUDA that Megatron makes whatever the device. Load Hugging Face models before."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.nn.Module.cuda = lambda module, *_, **__: module
    for name in ("empty", "zeros", "ones", "arange", "tensor", "full"):
        setattr(torch, name, partial(_on_cpu, getattr(torch, name)))


def _on_cpu(make, *arguments, **settings):
    if "cuda" in str(settings.get("device")):
        settings["device"] = "cpu"
    return make(*arguments, **settings)


def run_rank() -> None:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import TransformerConfig

    tokens, reference = toy_tokens(), toy_model()
    with torch.no_grad():
        expected = torch.log_softmax(reference(tokens).logits, -1)
    on_a_cpu()
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # Without dropout nothing is drawn.
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=NUM_RANKS)
    hf = reference.config
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=hf.head_dim,
        ffn_hidden_size=hf.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=NUM_RANKS,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        hf.vocab_size,
        hf.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=int(hf.rope_parameters["rope_theta"]),
        share_embeddings_and_output_weights=True,
        parallel_output=False,
    ).eval()
    rank = torch.distributed.get_rank()
    missing = model.load_state_dict(rank_weights(reference.state_dict(), hf, rank), strict=False).missing_keys
    assert not [name for name in missing if not name.endswith("_extra_state")], (
        f"weights without a source: {missing}"
    )
    positions = torch.arange(tokens.shape[1])[None].expand_as(tokens)
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
    with torch.no_grad():
        logits = model(tokens, positions, mask)
    difference = float((torch.log_softmax(logits, -1) - expected).abs().max())
    assert difference <= TOLERANCE, f"log-probs are {difference:.2e} off those of the Hugging Face model"
    if rank == 0:
        print(
            f"megatron-core {version('megatron-core')}, tensor parallel: log-probs {difference:.1e} off at "
            "most"
        )
    torch.distributed.destroy_process_group()


def rank_weights(weights: dict[str, torch.Tensor], hf, rank: int) -> dict[str, torch.Tensor]:
    """The part of a Qwen3's weights that a tensor-parallel rank holds, under Megatron's names.

    Megatron keeps q, k and v of one key-value group together, and gate and up of one rank.
    """

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(NUM_RANKS, 0)[rank]

    def columns(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(NUM_RANKS, 1)[rank]

    groups = hf.num_key_value_heads
    named = {
        "embedding.word_embeddings.weight": rows(weights["model.embed_tokens.weight"]),
        "output_layer.weight": rows(weights["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    for layer in range(hf.num_hidden_layers):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        qkv = [weights[f"{theirs}self_attn.{name}_proj.weight"].unflatten(0, (groups, -1)) for name in "qkv"]
        gate_up = [rows(weights[f"{theirs}mlp.{name}_proj.weight"]) for name in ("gate", "up")]
        named |= {
            f"{ours}input_layernorm.weight": weights[f"{theirs}input_layernorm.weight"],
            f"{ours}pre_mlp_layernorm.weight": weights[f"{theirs}post_attention_layernorm.weight"],
            f"{ours}self_attention.linear_qkv.weight": rows(torch.cat(qkv, 1).flatten(0, 1)),
            f"{ours}self_attention.linear_proj.weight": columns(weights[f"{theirs}self_attn.o_proj.weight"]),
            f"{ours}self_attention.q_layernorm.weight": weights[f"{theirs}self_attn.q_norm.weight"],
            f"{ours}self_attention.k_layernorm.weight": weights[f"{theirs}self_attn.k_norm.weight"],
            f"{ours}mlp.linear_fc1.weight": torch.cat(gate_up),
            f"{ours}mlp.linear_fc2.weight": columns(weights[f"{theirs}mlp.down_proj.weight"]),
        }
    return named


if __name__ == "__main__":
    run_rank() if sys.argv[1:] == ["rank"] else run_ranks(__file__, NUM_RANKS)
