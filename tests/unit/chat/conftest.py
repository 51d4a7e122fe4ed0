"""The published templates, each with a byte tokenizer and a tokenizer that has merges, holding its special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from turnwise.chat.template import ChatTemplate
from turnwise.testing.fakes import byte_tokenizer

FOLDER = Path(__file__).parents[2] / "data" / "chat_templates"
CORPUS = ["the answer is Right, then go Left or Down", "<answer>Right</answer> user assistant system", "P _ O G X"] * 4


@dataclass(frozen=True)
class Family:
    """One published template with what is known of it from its documentation, not from our code."""

    name: str
    special_tokens: tuple[str, ...]
    eos_token: str
    end_of_turn: str
    separator: str
    """What the template writes between the end of a response's turn and the next user's header."""
    bos_token: str | None = None
    takes_system: bool = True
    other_stop: str | None = None
    """A stop token of the model that is not the template's end of turn."""


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "qwen2.5-instruct",
            ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            "<|im_end|>",
            "<|im_end|>",
            "\n",
            other_stop="<|endoftext|>",
        ),
        Family(
            "qwen3",
            ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            "<|im_end|>",
            "<|im_end|>",
            "\n",
            other_stop="<|endoftext|>",
        ),
        Family("mistral-nemo-instruct", ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "</s>", "", bos_token="<s>"),
        Family(
            "llama3-control-flow",
            ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            "<|end_of_text|>",
            "<|eot_id|>",
            "",
            bos_token="<|begin_of_text|>",
            other_stop="<|end_of_text|>",
        ),
        Family(
            "gemma-control-flow",
            ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
            "<eos>",
            "<end_of_turn>",
            "\n",
            bos_token="<bos>",
            takes_system=False,
            other_stop="<eos>",
        ),
        Family(
            "gemma3-control-flow",
            ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
            "<eos>",
            "<end_of_turn>",
            "\n",
            bos_token="<bos>",
            other_stop="<eos>",
        ),
    )
}


@cache
def make_template(name: str, has_merges: bool) -> ChatTemplate:
    family = FAMILIES[name]
    source = (FOLDER / f"{name}.jinja").read_text()
    tokenizer = byte_tokenizer(
        family.special_tokens,
        source,
        eos_token=family.eos_token,
        bos_token=family.bos_token,
        training_texts=CORPUS if has_merges else (),
        vocab_size=330,
    )
    return ChatTemplate(tokenizer, template_kwargs={"date_string": "26 Jul 2024"} if "date_string" in source else {})


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(params=["bytes", "merges"])
def template(request: pytest.FixtureRequest, family: Family) -> ChatTemplate:
    return make_template(family.name, request.param == "merges")
