"""A model whose tokens are letters, with its tokenizer: `server_contract` reads them with
`decode_letters`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 61


def small_qwen3(**sizes: Any) -> Qwen3Config:
    """With tied embeddings, and the smallest heads that vLLM has a CPU kernel for."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    fixed = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    return Qwen3Config(**heads, **fixed, **sizes)


def letter_model(folder: Path) -> PreTrainedModel:
    """A random Qwen3 in fp32, saved in `folder`."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "intermediate_size": 96, "bos_token_id": 1, "eos_token_id": 2}
    model = Qwen3ForCausalLM(small_qwen3(**sizes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(folder)
    # Several ids have the same letter, and a vocabulary holds a text once: numbers tell them apart and aren't
    # decoded.
    tokenizer = Tokenizer(
        models.WordLevel({f"{chr(ord('a') + i % 26)}{i}": i for i in range(VOCABULARY)}, unk_token="a0")
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("[0-9]+"), ""), decoders.Fuse()])
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template).save_pretrained(folder)
    return model
