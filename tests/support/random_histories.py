"""Random clients of a conversation tree: they continue, fork, repeat, drop and change messages, change tools,
lose answers and ask several things at once, over templates of twelve shapes. What they got is checked against
what the server saw."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from chat_messages import LLAMA2, assistant, system, tool, user
from toy_words import word_template

from turnwise.batching.samples import build_samples
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import find_parser
from turnwise.chat.tree import ConversationTree
from turnwise.errors import ConfigError, RequestError
from turnwise.models.tokenizer import CHAT_TEMPLATE
from turnwise.protocols.tools import ToolCallParser
from turnwise.testing.fakes import ScriptedServer, SeenRequest, byte_tokenizer
from turnwise.types import CallOptions, Message, SamplingParams, Task, Trajectory

TASK = Task("t", "T", "train", 0)
MAX_NEW_TOKENS = 60
WORDS_OF_USERS = ("go", "again", "sub", "do", "sum")
TOOLS = (
    (),
    (tool("look", "Looks.", x="integer"),),
    (tool("look", "Looks.", x="integer"), tool("find", "Finds.", y="string")),
)
_FOLDER = Path(__file__).parents[1] / "data" / "chat_templates"
_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_DEEPSEEK = [f"<｜{name}｜>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant")]
_DEEPSEEK += ["<think>", "</think>"]
_DEEPSEEK += [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end")]
_OSS = [f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call")]
_PUBLISHED: dict[str, tuple[Sequence[str], str, str | None]] = {
    "qwen2.5-instruct": (_IM, "<|im_end|>", None),
    "qwen3": (_IM, "<|im_end|>", None),
    "qwen3.5": (_IM, "<|im_end|>", None),
    "mistral-nemo-instruct": (("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "<s>"),
    "llama3-control-flow": (_LLAMA3, "<|eot_id|>", _LLAMA3[0]),
    "gemma-control-flow": (_GEMMA, "<end_of_turn>", "<bos>"),
    "gemma3-control-flow": ((*_GEMMA, "<start_of_image>"), "<end_of_turn>", "<bos>"),
    "deepseek-v3.1-tools": (_DEEPSEEK, _DEEPSEEK[1], None),
    "gpt-oss": (_OSS, "<|return|>", None),
}
"""Special tokens, EOS and BOS of each published template."""
SHAPES = ("words", "own", "llama2", *_PUBLISHED)
_TEXTS = ["left right done again go", '{"name": "look", "arguments": {"x": 1}}', "user assistant system"] * 4


@cache
def template_of(shape: str) -> ChatTemplate:
    """A template over a tokenizer with merges, so that many sampled tokens don't survive encoding again."""
    if shape == "words":
        return word_template()
    special, source, eos, bos = _IM, CHAT_TEMPLATE, "<|im_end|>", None
    if shape == "llama2":
        special, source, eos, bos = ("<s>", "</s>"), LLAMA2, "</s>", "<s>"
    elif shape in _PUBLISHED:
        special, eos, bos = _PUBLISHED[shape]
        source = (_FOLDER / f"{shape}.jinja").read_text()
    tokenizer = byte_tokenizer(
        special, source, eos_token=eos, bos_token=bos, training_texts=_TEXTS, vocab_size=330
    )
    options = {"date_string": "26 Jul 2024"} if "date_string" in source else {}
    return ChatTemplate(tokenizer, template_kwargs=options)


@cache
def parser_of(template: ChatTemplate) -> ToolCallParser | None:
    """What reads the calls of a template that shows some."""
    try:
        return find_parser(None, template)
    except ConfigError:
        return None


class Step(NamedTuple):
    """One request of a round."""

    history: int
    """Which of the histories so far it changes."""
    kind: int
    """Continues it (0), drops a message (1), changes one (2), leaves out its answers (3), puts another system
    message in front (4), or repeats a lost request (5)."""
    word: int
    tools: int
    is_lost: bool
    """Whether its client goes away before the answer is written."""


Rounds = Sequence[Sequence[Step]]


class _Said(NamedTuple):
    """What a client has said so far, and with which tools."""

    messages: list[Message]
    tools: int


class RandomClient:
    """Plays rounds of requests; those of a round are sent at once, in an order that `order_seed` draws."""

    def __init__(self, rounds: Rounds, order_seed: int, template: ChatTemplate, max_length: int) -> None:
        self.rounds = rounds
        self.shuffle = random.Random(order_seed)
        self.counts: Counter[str] = Counter()
        self.server = ScriptedServer(lambda request: _response(template, request))
        sampling = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, seed=3)
        self.tree = ConversationTree(
            template, self.server, "t", sampling, max_length, parser=parser_of(template)
        )
        self.lost: set[int] = set()
        self._histories = [_Said([], 0)]
        self._lost_requests: list[_Said] = []

    async def play(self) -> None:
        for steps in self.rounds:
            requests = [self._request(step) for step in steps]
            # Of equal requests nothing says which one is which, so all of them are lost, or none.
            is_lost = {str(request): step.is_lost for request, step in zip(requests, steps, strict=True)}
            order = list(range(len(requests)))
            self.shuffle.shuffle(order)
            answers: dict[int, Any] = {}
            await asyncio.gather(*(self._ask(number, requests[number], answers) for number in order))
            got = sorted(
                (str(requests[number]), answer.message["content"], number, answer)
                for number, answer in answers.items()
            )
            for text, _, number, answer in got:
                if is_lost[text]:
                    self.tree.drop(answer)
                    self.counts["lost"] += 1
                    self._lost_requests.append(requests[number])
                else:
                    self.tree.deliver(answer)
                    self._histories.append(_answered(requests[number], answer.message))

    async def _ask(self, number: int, request: _Said, answers: dict[int, Any]) -> None:
        for _ in range(self.shuffle.randrange(3)):
            await asyncio.sleep(0)
        options = CallOptions(max_new_tokens=8 + 9 * len(request.messages) % 53)
        try:
            answers[number] = await self.tree.answer(request.messages, options, TOOLS[request.tools])
            self.counts["answered"] += 1
        except RequestError as fault:
            self.counts[fault.code] += 1

    def _request(self, step: Step) -> _Said:
        if step.kind == 5 and self._lost_requests:
            return self._lost_requests[step.history % len(self._lost_requests)]
        said, tools = self._histories[step.history % len(self._histories)]
        history = list(said)
        if step.kind == 1 and len(history) > 1:
            del history[len(history) // 2]
        elif step.kind == 2 and history:
            history[step.word % len(history)] = assistant("red blue")
        elif step.kind == 3 and history:
            history = [message for message in history if message["role"] in ("system", "user")]
        elif step.kind == 4:
            history.insert(0, system(WORDS_OF_USERS[step.word]))
        if not history or not history[-1].get("tool_calls"):
            history.append(user(WORDS_OF_USERS[step.word]))
        for call in history[-1].get("tool_calls") or ():
            history.append({"role": "tool", "tool_call_id": call["id"], "content": WORDS_OF_USERS[step.word]})
        if step.tools < len(TOOLS):
            tools = step.tools
        return _Said(history, tools)


def _answered(request: _Said, message: Message) -> _Said:
    return _Said([*request.messages, message], request.tools)


def _response(template: ChatTemplate, request: SeenRequest) -> Sequence[int]:
    """Random tokens, or a call; some responses are cut by the budget. Two responses hardly ever begin alike:
    else a client would send back a response that is still being sampled for another one."""
    rng = random.Random(request.sampling.seed)
    if len(template.tokenizer) < 100:
        token_ids = [rng.randrange(10, 20) for _ in range(rng.randrange(6, 12))]
    elif rng.random() < 0.4:
        call = '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>'
        token_ids = template.tokenizer.encode(f"{rng.randrange(10**9)}{call}", add_special_tokens=False)
    else:
        # Bytes of one character, pieces of words: no text encodes to most of these sequences.
        token_ids = [rng.randrange(60, 320) for _ in range(rng.randrange(4, 12))]
    usual = [token_id for token_id in token_ids if token_id not in template.stop_token_ids]
    return [*usual, template.stop_token_ids[0]][: request.sampling.max_new_tokens]


def played(rounds: Rounds, order_seed: int, template: ChatTemplate, max_length: int = 1200) -> RandomClient:
    client = RandomClient(rounds, order_seed, template, max_length)
    asyncio.run(client.play())
    return client


def checked(client: RandomClient) -> Trajectory:
    """Checks prefixes and masks of all contexts against what the server got, and that what was delivered is
    trained once, and nothing else."""
    tree = client.tree
    tree.verify()
    trajectory = tree.trajectory(TASK, 0)
    asked = {request.prompt_ids for request in client.server.requests}
    trained: list[int] = []
    for sample in build_samples(trajectory):
        ids = sample.token_ids.tolist()
        mask = np.zeros(len(ids), bool)
        for span in sample.turn_spans:
            trained.append(span.turn)
            assert tuple(ids[: span.start]) in asked, "the prompt of a turn is what the server got"
            assert ids[span.start : span.stop] == tree.turns[span.turn].response_ids.tolist()
            mask[span.start : span.stop] = True
        assert (sample.response_mask == mask).all()
    delivered = [turn for turn, turned in enumerate(tree.turns) if turned.is_trained]
    assert sorted(trained) == delivered, "each delivered turn is trained once, and no other"
    return trajectory


def contexts(client: RandomClient) -> list[tuple[Any, ...]]:
    """Prompt and seed of each request that the server got."""
    return sorted((request.prompt_ids, request.sampling.seed) for request in client.server.requests)


def drawn_rounds(rng: random.Random) -> list[list[Step]]:
    """One random history."""

    def step() -> Step:
        kind = rng.choice((0, 0, 0, 0, 1, 2, 3, 4, 5))
        tools = rng.choice((0, 1, 2, 9, 9, 9, 9, 9, 9))
        return Step(rng.randrange(30), kind, rng.randrange(5), tools, rng.random() < 0.15)

    return [[step() for _ in range(rng.randrange(1, 5))] for _ in range(rng.randrange(1, 9))]
