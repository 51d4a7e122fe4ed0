"""Are the tokens of conversations with tools kept exactly? `python benchmarks/tool_conversations.py
[--conversations N]`

Each conversation has a chat template of one of twelve shapes, random tokens that don't survive being decoded
and encoded again, calls (several at once, some unreadable) and results. Responses end by themselves, are cut
at their budget or aborted. Counted are

- prefix violations: a request that doesn't begin with the one before and its response;
- mask errors: a token that was sampled and isn't trained on, or the other way round;
- lost messages: a result or a schema that doesn't show in the ids that were added for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe_machine
from toy import parse_arguments

from turnwise.batching.samples import build_samples
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import HermesParser
from turnwise.testing.fakes import byte_tokenizer
from turnwise.types import Completion, SamplingParams, Task, Trajectory, VersionRun

HERE = Path(__file__).parent
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
SCHEMA = {
    "type": "function",
    "function": {"name": "look", "description": "Looks a thing up.", "parameters": {"type": "object"}},
}
HEADS = (
    ("<|im_start|>{}\n", "<|im_end|>\n"),
    ("<|im_start|>{}: ", "<|im_end|>"),
    ("[{}] ", "<|endoftext|>\n"),
)
RESULTS = (
    "HEAD(tool){{ m.content }}END",
    "HEAD(user)<tool_response>\n{{ m.content }}\n</tool_response>END",
    'HEAD(tool){"name": {{ m.name | tojson }}, "content": {{ m.content | tojson }}}END',
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}HEAD(user){% endif %}"
    "<r>{{ m.tool_call_id }}: {{ m.content }}</r>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}END{% endif %}",
)


def templates() -> list[str]:
    """Jinja texts of twelve shapes: three ways to write a turn, four to write a result."""
    texts = []
    for (head, end), result in product(HEADS, RESULTS):
        text = (
            "{% if tools %}HEAD(system){% for tool in tools %}{{ tool | tojson }}{% endfor %}END{% endif %}"
            "{% for m in messages %}{% if m.role == 'tool' %}"
            + result
            + "{% elif m.role == 'assistant' %}HEAD(assistant)"
            "{{ m.content }}END{% else %}HEAD(user){{ m.content }}END{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}HEAD(assistant){% endif %}"
        )
        for role in ("system", "user", "assistant", "tool"):
            text = text.replace(f"HEAD({role})", "{{ '" + head.format(role).replace("\n", "\\n") + "' }}")
        texts.append(text.replace("END", "{{ '" + end.replace("\n", "\\n") + "' }}"))
    return texts


def shapes() -> list[ChatTemplate]:
    """The twelve templates over one tokenizer with merges."""
    tokenizer = byte_tokenizer(
        SPECIAL, training_texts=['the value of {"name": "look", "arguments": {"x": 0.5}}'] * 9
    )
    return [ChatTemplate(tokenizer, text) for text in templates()]


class RandomServer:
    """Answers with random tokens and calls, and keeps what it was asked."""

    def __init__(self, template: ChatTemplate, source: random.Random) -> None:
        self.template, self.source = template, source
        self.seen: list[list[int]] = []

    async def generate(
        self, prompt_ids: Any, sampling: SamplingParams, request_id: str, media: Any = ()
    ) -> Completion:
        source, tokenizer = self.source, self.template.tokenizer
        ids = [source.randrange(len(tokenizer) - len(SPECIAL)) for _ in range(source.randrange(12))]
        for _ in range(source.choice((0, 1, 1, 2, 3))):
            call = json.dumps({"name": "look", "arguments": {"x": source.random()}})[
                : source.choice((None, None, None, 9))
            ]
            # Byte by byte, as no tokenizer would write it.
            ids += tokenizer.convert_tokens_to_ids(["<tool_call>"])
            ids += [token for letter in call for token in tokenizer(letter)["input_ids"]]
            ids += tokenizer.convert_tokens_to_ids(["</tool_call>"])
        ids += [self.template.stop_token_ids[0]]
        cut = source.choice((len(ids), len(ids), source.randrange(len(ids) + 1)))
        reason = "stop" if cut == len(ids) else source.choice(("length", "aborted"))
        if cut > sampling.max_new_tokens:
            cut, reason = sampling.max_new_tokens, "length"
        self.seen += [list(prompt_ids), ids[:cut]]
        versions = (VersionRun(0, cut),) if cut else ()
        return Completion(np.array(ids[:cut], np.int64), np.full(cut, -0.5, np.float32), reason, versions)

    async def release(self, request_id: str) -> None:
        pass


async def converse(template: ChatTemplate, number: int) -> tuple[int, ...]:
    """Turns, those whose text is encoded otherwise than it was sampled, prefix violations, mask errors and
    lost messages of one conversation."""
    source = random.Random(number)
    server = RandomServer(template, source)
    contexts = TokenContexts(template, server, source.choice((400, 4000)), f"c{number}", HermesParser())  # type: ignore[arg-type]
    conversation = contexts(SamplingParams(max_new_tokens=300), tools=[SCHEMA], encode_special_tokens=False)
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"<|im_end|> {source.random()} née\n"}]
    lost = wrong = 0
    for _ in range(source.randrange(1, 7)):
        reply = await conversation.generate(messages)
        if reply is None:
            break
        added = template.decode(conversation.turns[-1].prompt_ids.tolist(), skips_turn_tokens=False)
        schemas = ["Looks a thing up."] if len(conversation.turns) == 1 else []
        lost += sum(
            text not in added for text in [*(message["content"].strip() for message in messages), *schemas]
        )
        said = reply["tool_calls"] + reply["call_errors"]
        answers = [(f"value {source.random()}", f"t{index:08d}") for index in range(len(said))]
        messages = [
            {"role": "tool", "name": "look", "tool_call_id": call, "content": text} for text, call in answers
        ]
        messages = messages or [{"role": "user", "content": f"go on {source.random()}"}]
    contexts.verify()
    context, prefix = list[int](), 0
    for prompt, response in zip(server.seen[::2], server.seen[1::2], strict=True):
        prefix += prompt[: len(context)] != context
        context = [*prompt, *response]
    turns = [turn for turn in conversation.turns if len(turn.response_ids)]
    if turns:
        task = Task(id=str(number), tag="", split="train", seed=number)
        samples = build_samples(Trajectory(task=task, sibling=0, turns=conversation.turns, status="finished"))
        ids = np.concatenate([sample.token_ids for sample in samples])
        sampled = np.concatenate([sample.token_ids[sample.response_mask] for sample in samples])
        wrong += not np.array_equal(sampled, np.concatenate([turn.response_ids for turn in turns]))
        wrong += not np.array_equal(ids, context[: len(ids)])
    texts = [template.decode(ids, skips_turn_tokens=False) for ids in server.seen[1::2]]
    changed = sum(
        template.tokenizer(text)["input_ids"] != ids
        for text, ids in zip(texts, server.seen[1::2], strict=True)
    )
    return len(conversation.turns), changed, prefix, wrong, lost


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "tool_conversations.json")
    options = parse_arguments(parser, conversations=24)
    kinds = shapes()

    async def everything() -> list[tuple[int, ...]]:
        return [await converse(kinds[number % len(kinds)], number) for number in range(options.conversations)]

    found = np.array(asyncio.run(everything())).sum(0).tolist()
    names = ("turns", "not_reencodable", "prefix_violations", "mask_errors", "lost_messages")
    result = {
        "machine": describe_machine(),
        "conversations": options.conversations,
        **dict(zip(names, found, strict=True)),
    }
    print(json.dumps(result, indent=2))
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
