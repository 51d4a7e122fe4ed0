"""The published templates, each with a byte tokenizer and a tokenizer that has merges, holding its special
tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from turnwise.chat.template import ChatTemplate
from turnwise.testing.fakes import byte_tokenizer

FOLDER = Path(__file__).parents[2] / "data" / "chat_templates"
CORPUS = [
    "the answer is Right, then go Left or Down",
    "<answer>Right</answer> user assistant system",
    "P _ O G X",
] * 4


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


IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_AS_GEMMA = ("<eos>", "<end_of_turn>", "\n", "<bos>")
_FAMILIES = [
    *(
        Family(name, IM, "<|im_end|>", "<|im_end|>", "\n", other_stop=IM[0])
        for name in ("qwen2.5-instruct", "qwen3")
    ),
    Family("mistral-nemo-instruct", ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "</s>", "", "<s>"),
    Family("llama3-control-flow", LLAMA3, LLAMA3[1], "<|eot_id|>", "", LLAMA3[0], other_stop=LLAMA3[1]),
    Family("gemma-control-flow", GEMMA, *_AS_GEMMA, takes_system=False, other_stop="<eos>"),
    Family("gemma3-control-flow", (*GEMMA, "<start_of_image>"), *_AS_GEMMA, other_stop="<eos>"),
]
FAMILIES = {family.name: family for family in _FAMILIES}


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
    return ChatTemplate(
        tokenizer, template_kwargs={"date_string": "26 Jul 2024"} if "date_string" in source else {}
    )


@pytest.fixture(scope="session")
def chatml() -> ChatTemplate:
    return ChatTemplate(byte_tokenizer())


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(params=["bytes", "merges"])
def template(request: pytest.FixtureRequest, family: Family) -> ChatTemplate:
    return make_template(family.name, request.param == "merges")
