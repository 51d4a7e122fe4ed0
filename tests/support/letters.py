"""A model whose tokens are letters, with its tokenizer: `server_contract` reads them with `decode_letters`."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 61


def letter_model(folder: Path) -> PreTrainedModel:
    """A random Qwen3 in fp32 with tied embeddings, saved in `folder`."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # The smallest that vLLM has a CPU kernel for.
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(folder)
    # Several ids have the same letter, and a vocabulary holds a text once: numbers tell them apart and aren't decoded.
    tokenizer = Tokenizer(models.WordLevel({f"{chr(ord('a') + i % 26)}{i}": i for i in range(VOCABULARY)}, unk_token="a0"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("[0-9]+"), ""), decoders.Fuse()])
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template).save_pretrained(folder)
    return model
