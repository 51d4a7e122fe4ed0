"""Templates written for these tests, with the control flow of published ones that lose something.

Whatever is rendered shows and is the template's own, or it is refused with a sentence.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from chat_messages import LLAMA2, assistant, message, system, tool, user
from hypothesis import given, settings
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from turnwise.chat.demonstration import encode_demonstration
from turnwise.chat.template import ChatTemplate
from turnwise.errors import ChatTemplateError
from turnwise.testing.fakes import CHATML_TEMPLATE, byte_tokenizer

IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_THINKING = (
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = (m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else "
    "'').strip() %}"
)
_TOOLS = "{% if tools %}{{ '<tools>' + (tools | tojson) + '</tools>' }}{% endif %}"


def _thinking(block: str, header: str) -> str:
    """A ChatML template that treats answers by `block`, and opens them with `header`."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        + _THINKING
        + "{{ '<|im_start|>assistant\n' }}"
        + block
        + "{{ said + '<|im_end|>\n' }}{% else %}" + _TURN + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n" + header + "' }}{% endif %}"
    )  # fmt: skip


TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "texts and parts, tools": (
        _TOOLS + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ "
        "m.content }}"
        "{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + _ASK,
        IM,
    ),
    "loops over parts (idefics3)": (
        "{% for m in messages %}{{ m.role.capitalize() + ': ' }}{% for p in m.content %}{% if p.type == "
        "'text' %}{{ p.text }}"
        "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% "
        "endif %}",
        IM,
    ),
    "selects parts (llava_next)": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' }}{% for p in m.content | "
        "selectattr('type', 'equalto', 'text') %}{{ p['text'] }}{% endfor %}{{ ' [/INST]' }}{% elif m.role "
        "== 'assistant' %}{{ ' ' + m.content[0]['text'] + '</s> ' }}{% else %}{{ raise_exception('only users "
        "and assistants') }}{% endif %}{% endfor %}",
        ("<s>", "</s>"),
    ),
    "channels (gpt-oss)": (
        "{{ '<|start|>system<|message|>You answer.<|end|>' }}{% if messages[0].role == 'system' %}{{ "
        "'<|start|>developer<|message|>' + messages[0].content + '<|end|>' }}{% set messages = messages[1:] "
        "%}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}{% if loop.last and not "
        "add_generation_prompt %}{% if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + "
        "m.thinking + '<|end|>' }}{% endif %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content "
        "+ '<|return|>' }}{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + "
        "'<|end|>' }}{% endif %}{% elif m.role == 'tool' %}{{ raise_exception('no call before this result') "
        "}}{% elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% "
        "endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    ),
    "one end for thoughts and answers (Solar)": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.reasoning and loop.last %}"
        "{{ '<|begin|>assistant<|think|>' + m.reasoning + '<|end|>' }}{% endif %}"
        "{{ '<|begin|>assistant<|content|>' + m.content + '<|end|>' }}{% else %}"
        "{{ '<|begin|>' + m.role + '<|content|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|begin|>assistant' }}{% endif %}",
        ("<|begin|>", "<|content|>", "<|think|>", "<|end|>", "<|flush|>"),
    ),
    "wrapped answers (Command R7B)": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<T><A><R>' + m.content + '</R></T>' }}{% "
        "else %}{{ '<T><U>' + m.content + '</T>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ "
        "'<T><A>' }}{% endif %}",
        ("<T>", "<A>", "<U>", "<R>", "</R>", "</T>"),
    ),
    "opens thinking and shows its end (Qwen3.5)": (
        _thinking(
            "{% if loop.last and not add_generation_prompt %}{{ '<think>\n' + thought + '\n</think>\n\n' "
            "}}{% endif %}",
            "<think>\n",
        ),
        IM,
    ),
    "opens thinking and drops it (R1)": (_thinking("", "<think>\n"), IM),
    "an empty think block in every answer (qwen3_training)": (
        _thinking("{{ '<think>\n' + thought + '\n</think>\n\n' }}", ""),
        IM,
    ),
    "drops tool results (Phi-3)": (
        "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
        + _TURN
        + "{% endif %}{% endfor %}"
        + _ASK,
        IM,
    ),
    "only the first system message (DeepSeek)": (
        "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}{% for m in "
        "messages %}"
        "{% if m.role != 'system' %}" + _TURN + "{% endif %}{% endfor %}" + _ASK,
        IM,
    ),
    "all system messages in front (R1)": (
        "{% for m in messages if m.role == 'system' %}{{ m.content + '\n' }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}"
        + _TURN + "{% endfor %}" + _ASK,
        IM,
    ),
    "turns must alternate (Gemma)": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('alternate!') }}{% endif %}"
        + _TURN + "{% endfor %}" + _ASK,
        IM,
    ),
    "needs tools at every render (Hermes 2 Pro)": (
        "{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools>' }}{% for m in "
        "messages %}" + _TURN
        + "{% endfor %}" + _ASK,
        IM,
    ),
    "the next role ends a turn (GLM)": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|endoftext|>"),
    ),
    "end of text behind the last message (Phi-3.5)": (
        "{% for m in messages %}" + _TURN + "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}",
        ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    ),
}  # fmt: skip


def tokenizer_of(name: str, **options) -> PreTrainedTokenizerFast:
    source, special_tokens = TEMPLATES[name]
    return byte_tokenizer(special_tokens, source, bos_token=special_tokens[0], **options)


def legacy_tokenizer() -> PreTrainedTokenizerFast:
    """Llama 2's: a blank is put before every text, and words begin with their blank."""
    symbols = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    letters = [chr(code) for code in range(33, 127)]
    vocab = {symbol: index for index, symbol in enumerate([*symbols, *letters, "▁R", "▁a"])}
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "R"), ("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in ("<s>", "</s>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=LLAMA2
    )


SCHEMA = tool("lookword", "descword", sideword={"type": "string", "description": "whichword"})
TOOL_RESULT = message("tool", "resultword") | {"name": "look", "tool_call_id": "abcdef123"}
ADDED = {
    "a user": ([user("oneword")], ["oneword"]),
    "two users in a row": ([user("oneword"), user("twoword")], ["oneword", "twoword"]),
    "a later system message": ([system("laterword"), user("oneword")], ["laterword", "oneword"]),
    "a tool result with name and id": ([TOOL_RESULT], ["resultword"]),
}
WORD = st.text("abcdefgh", min_size=1, max_size=8)


def of(name):
    return ChatTemplate(tokenizer_of(name))


def text_of(template, ids):
    return template.tokenizer.decode(ids)


def rendered(template, messages):
    return template.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, tools=[]
    )


@settings(max_examples=8)
@pytest.mark.parametrize("kind", ADDED)
@pytest.mark.parametrize("name", TEMPLATES)
@given(is_cut=st.booleans(), asked=WORD, answer=WORD)
def test_what_is_added_shows_and_is_the_template_s_or_is_refused(name, kind, is_cut, asked, answer):
    template, (messages, words) = of(name), ADDED[kind]
    try:
        response = template.respond("</think>" + answer if "opens thinking" in name else answer)
        num_closing = (
            len(response) - response.index(template.stop_token_ids[0])
            if template.stop_token_ids[0] in response
            else 0
        )
        response = response[: len(response) - num_closing] if is_cut else response
        start = template.start([user(asked)])
        tail = template.extend(response, messages)
    except ChatTemplateError as refusal:
        assert kind != "a user"
        assert any(word in str(refusal) for word in ("doesn't show", "refuses", "drops"))
        return
    text = text_of(template, start + response + tail)
    assert all(word in text_of(template, tail) for word in words)
    if not template.rewrites_history and "parts" not in name:
        history = [user(asked), assistant(answer), *messages]
        # What was sampled stays: another end of the turn, or the token of a role that didn't speak next.
        text = text.replace("<|return|>", "<|end|>").replace("<|user|><|", "<|")
        assert text == rendered(template, history)


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_show_with_names_and_descriptions_or_are_refused(name):
    try:
        text = text_of(of(name), of(name).start([user("hey")], [SCHEMA]))
    except ChatTemplateError as refusal:
        assert "doesn't show the schema of a tool" in str(refusal)
        return
    assert all(word in text for word in ("lookword", "descword", "sideword", "whichword"))


@pytest.mark.parametrize("name", ["loops over parts (idefics3)", "selects parts (llava_next)"])
def test_plain_strings_show_in_templates_that_read_parts_only(name):
    template = of(name)
    assert "Where to?" in text_of(template, template.start([user("Where to?")]))
    ids = template.start([user("Where to?")]) + template.respond("Right")
    ids += template.extend(template.respond("Right"), [user("And now?")])
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in
             (user("Where to?"), assistant("Right"), user("And now?"))]  # fmt: skip
    assert text_of(template, ids) == rendered(template, parts)


def test_an_analysis_doesn_t_end_the_answer():
    template = of("channels (gpt-oss)")
    assert template.tokenizer.convert_ids_to_tokens(list(template.stop_token_ids)) == ["<|return|>"]
    call = template.tokenizer.convert_tokens_to_ids("<|call|>")
    more = ChatTemplate(template.tokenizer, eos_token_ids=[call])
    assert template.tokenizer.convert_ids_to_tokens(list(more.stop_token_ids)) == ["<|return|>", "<|call|>"]
    solar = of("one end for thoughts and answers (Solar)")
    assert solar.tokenizer.convert_ids_to_tokens(list(solar.stop_token_ids)) == ["<|flush|>"]


def test_a_channelled_answer_is_taught_with_its_channel_and_closed_once():
    template = of("channels (gpt-oss)")
    messages = [user("Where to?"), assistant("Right"), user("And now?"), assistant("Left")]
    sample = encode_demonstration(template, messages)
    learnt = text_of(template, sample.token_ids[sample.response_mask])
    assert learnt == "".join(f"<|channel|>final<|message|>{text}<|return|>" for text in ("Right", "Left"))
    cut = template.tokenizer.encode("<|channel|>analysis<|message|>hm", add_special_tokens=False)
    assert text_of(template, template.extend(cut, [user("b")])).startswith(
        "<|end|><|start|>user<|message|>b<|end|>"
    )
    whole = [*cut, template.tokenizer.convert_tokens_to_ids("<|return|>")]
    assert text_of(template, template.extend(whole, [user("b")])).startswith("<|start|>user")


def test_answers_close_the_thinking_that_their_header_opens():
    template = of("opens thinking and shows its end (Qwen3.5)")
    for text in ("Right", "<think>\n\n</think>\n\nRight", "\n</think>\n\nRight"):
        ids = template.start([user("a")]) + template.respond(text)
        expected = template.tokenizer.apply_chat_template([user("a"), assistant("Right")], tokenize=False)
        assert text_of(template, ids) == expected.rstrip("\n")
    with pytest.raises(ChatTemplateError, match=r"opens an answer with '<think>'.*enable_thinking"):
        encode_demonstration(of("opens thinking and drops it (R1)"), [user("a"), assistant("Right")])


def test_an_end_token_that_is_not_special_stands_once():
    tokenizer = byte_tokenizer(IM[:2], CHATML_TEMPLATE)
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=False, normalized=False)])
    template = ChatTemplate(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in template.stop_token_ids and template.respond("Right")[-1] == end
    closed = template.extend([65, end], [user("b")])
    assert tokenizer.decode(closed).startswith("\n<|im_start|>user")
    assert template.extend([65], [user("b")]) == [end, *closed]


def test_no_blank_is_added_by_a_legacy_tokenizer():
    tokenizer = legacy_tokenizer()
    template = ChatTemplate(tokenizer)
    history = [user("a"), assistant("Right"), user("a")]
    expected = tokenizer.encode(
        tokenizer.apply_chat_template(history, tokenize=False), add_special_tokens=False
    )
    response = template.respond("Right")
    assert template.start(history[:1]) + response + template.extend(response, history[:1]) == expected
    cut = response[:-2]
    assert template.start(history[:1]) + cut + template.extend(cut, history[:1]) == expected


def test_empty_think_blocks_and_dropped_channels_are_rewritten_history():
    assert of("an empty think block in every answer (qwen3_training)").rewrites_history
    assert of("one end for thoughts and answers (Solar)").rewrites_history
    assert not of("texts and parts, tools").rewrites_history


def test_a_wrapped_answer_ends_where_its_turn_ends():
    template = of("wrapped answers (Command R7B)")
    assert text_of(template, template.respond("go")) == "<R>go</R></T>"
    assert template.stop_token_ids == (template.tokenizer.convert_tokens_to_ids("</T>"),)
    cut = template.respond("go")
    assert text_of(template, template.extend(cut[:-2], [user("b")])).startswith("</R></T><T><U>b")
    assert text_of(template, template.extend(cut[:-1], [user("b")])).startswith("</T><T><U>b")


def test_refusals_say_what_is_lost_and_what_to_do():
    template = of("drops tool results (Phi-3)")
    with pytest.raises(
        ChatTemplateError, match=r"doesn't show a tool message after an answer: put its text into a user's"
    ):
        template.extend([65], [TOOL_RESULT])
    with pytest.raises(
        ChatTemplateError, match=r"doesn't show the schema of a tool \(its name .*\): describe the tools"
    ):
        template.start([user("a")], [SCHEMA])
    nothing = "{% for m in messages %}{{ m.content }}{{ functions | tojson }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match="set a variable that it lacks in template_kwargs"):
        ChatTemplate(byte_tokenizer(chat_template=nothing)).start([user("a")])


def test_text_that_a_template_cuts_out_is_refused():
    cutting = CHATML_TEMPLATE.replace("message.content }}", "message.content.split('---')[0] }}")
    template = ChatTemplate(byte_tokenizer(chat_template=cutting))
    template.start([user("one - two")])
    with pytest.raises(ChatTemplateError, match="doesn't show part of what a user message says"):
        template.start([user("one --- two")])


def test_variables_that_the_template_never_reads_are_refused():
    reading = CHATML_TEMPLATE + "{% if mood %}{{ mood }}{% endif %}"
    tokenizer = byte_tokenizer(chat_template=reading)
    cheerful = ChatTemplate(tokenizer, template_kwargs={"mood": "cheerful"})
    assert text_of(cheerful, cheerful.start([user("a")])).endswith("cheerful")
    with pytest.raises(
        ChatTemplateError, match=r"template_kwargs.moood: .* never reads 'moood'.*Did you mean 'mood'"
    ):
        ChatTemplate(tokenizer, template_kwargs={"moood": "cheerful"})
