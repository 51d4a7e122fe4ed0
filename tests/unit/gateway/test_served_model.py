"""A served model: which requests share a tree, which trees are forgotten, and what the terminal shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest
from chat_messages import system, tool, user
from scripted_gateway import HeldReplies, scripted_tree

from turnwise.errors import ReplicasDeadError
from turnwise.gateway.chat_completions import ChatCompletions
from turnwise.gateway.dialect import GatewayError
from turnwise.gateway.served import ServedModel
from turnwise.gateway.sessions import Answered
from turnwise.types import Message


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A served model over a script, and the lines that it shows."""

    def __init__(self, replies: Sequence[str], **options: Any) -> None:
        self.server = HeldReplies(replies)
        self.clock = Clock()
        self.lines: list[str] = []
        self.model = ServedModel(
            "small",
            "KEY",
            lambda name: scripted_tree(self.server, name),
            self.lines.append,
            clock=self.clock,
            **options,
        )

    async def ask(self, *messages: Message, **fields: Any) -> Answered:
        """Asks, and gets the answer delivered."""
        body: Mapping[str, Any] = {"model": "any", "messages": list(messages), **fields}
        answered = await self.model.answer(ChatCompletions().read(body), is_retry=False)
        self.model.deliver(answered)
        return answered


def played(
    replies: Sequence[str], play: Callable[[Bench], Coroutine[Any, Any, Any]], **options: Any
) -> tuple[Any, Bench]:
    async def run() -> tuple[Any, Bench]:
        bench = Bench(replies, **options)
        result = await play(bench)
        await bench.model.close()
        return result, bench

    return asyncio.run(run())


def reused(*answers: Answered) -> list[bool]:
    return [answer.choices[0].usage.reused > 0 for answer in answers]


GO = (system("Be brief."), user("go"))


def test_a_conversation_is_continued_and_ids_are_unique_over_conversations() -> None:
    async def play(bench: Bench) -> Any:
        first = await bench.ask(*GO)
        other = await bench.ask(user("elsewhere"))
        second = await bench.ask(*GO, first.choices[0].message, user("again"))
        return first, other, second

    answers, bench = played(["left", "far", "right"], play)
    assert reused(*answers) == [False, False, True]
    assert len({answer.name for answer in answers}) == 3
    assert len(bench.lines) == 3 and "any" in bench.lines[0] and "stop" in bench.lines[0]


def test_other_tools_are_another_conversation_and_their_order_is_too() -> None:
    tools = [tool("add", "Adds.", a="integer"), tool("find", "Finds.", x="string")]

    async def play(bench: Bench) -> Any:
        first = await bench.ask(*GO, tools=tools)
        await bench.ask(*GO, first.choices[0].message, user("again"), tools=tools[::-1])
        return await bench.ask(*GO, first.choices[0].message, user("again"), tools=tools)

    third, _ = played(["left", "right", "done"], play)
    assert reused(third) == [True]


def test_a_conversation_is_forgotten_an_hour_after_its_last_request() -> None:
    async def play(bench: Bench) -> Any:
        first = await bench.ask(*GO)
        bench.clock.now = 3000.0
        second = await bench.ask(*GO, first.choices[0].message, user("again"))
        bench.clock.now = 6500.0
        third = await bench.ask(*GO, first.choices[0].message, user("then"))
        bench.clock.now = 10_200.0
        released = len(bench.server.released)
        fourth = await bench.ask(*GO, first.choices[0].message, user("and"))
        return reused(first, second, third, fourth), released, len(bench.server.released)

    (were_reused, before, after), _ = played(["left", "right", "done", "end"], play)
    assert were_reused == [False, True, True, False]
    assert before == 0 < after, "the server forgets its contexts too"


def test_the_longest_unused_go_first_when_all_take_too_much_memory() -> None:
    async def play(bench: Bench) -> Any:
        for name in ("a", "b", "a", "c"):
            await bench.ask(user(name * 1000))
        answers = [await bench.ask(user(name * 1000)) for name in ("a", "b")]
        return [answer.answers[0].node for answer in answers]

    nodes, _ = played(["x"] * 6, play, max_bytes=110_000)
    assert nodes == [2, 0], "a's tree has its turns, b's was forgotten"


def test_a_conversation_with_a_running_request_is_kept() -> None:
    async def play(bench: Bench) -> Any:
        bench.server.gate.clear()
        asking = asyncio.create_task(bench.ask(*GO))
        while not bench.server.num_waiting:
            await asyncio.sleep(0)
        bench.clock.now = 1e6
        await bench.model.forget()
        bench.server.gate.set()
        return await asking

    answer, _ = played(["left"], play, max_bytes=0)
    assert answer.choices[0].message["content"] == "left"


def test_a_lost_client_is_shown_and_its_retry_gets_the_answer() -> None:
    async def play(bench: Bench) -> Any:
        request = ChatCompletions().read({"model": "m", "messages": list(GO)})
        bench.model.drop(await bench.model.answer(request, is_retry=False))
        again = await bench.model.answer(request, is_retry=True)
        bench.model.deliver(again)
        return again

    again, bench = played(["left"], play)
    assert again.choices[0].message["content"] == "left" and len(bench.server.requests) == 1
    assert "lost" in bench.lines[0] and "stop" in bench.lines[1]


def test_the_client_s_temperature_counts_and_a_count_is_no_turn() -> None:
    async def play(bench: Bench) -> Any:
        request = ChatCompletions().read({"model": "m", "messages": list(GO), "temperature": 0.25})
        num_tokens = bench.model.num_prompt_tokens(request)
        answer = await bench.model.answer(request, is_retry=False)
        bench.model.deliver(answer)
        return num_tokens, answer

    (num_tokens, answer), bench = played(["left"], play)
    assert num_tokens == answer.choices[0].usage.prompt
    assert [request.sampling.temperature for request in bench.server.requests] == [0.25]


def test_only_the_server_s_key_finds_it_and_refusals_are_shown() -> None:
    async def play(bench: Bench) -> Any:
        assert bench.model.find("KEY") is bench.model
        with pytest.raises(GatewayError) as fault:
            bench.model.find("other")
        assert fault.value.status == 401
        with pytest.raises(GatewayError):
            await bench.ask({"role": "judge", "content": ""})
        bench.model.note_refusal(fault.value)

    _, bench = played([], play)
    assert "401" in bench.lines[0]


def test_what_ends_the_servers_ends_the_command() -> None:
    class Dead(HeldReplies):
        async def generate(self, *args: Any, **options: Any) -> Any:
            raise ReplicasDeadError("all replicas are dead")

    async def play(bench: Bench) -> Any:
        bench.server.__class__ = Dead
        with pytest.raises(ReplicasDeadError):
            await bench.ask(*GO)
        with pytest.raises(ReplicasDeadError):
            await asyncio.wait_for(bench.model.fault, 60)

    played([], play)


def test_a_model_s_name_is_shown_in_one_line_without_what_a_terminal_obeys() -> None:
    async def play(bench: Bench) -> None:
        body = {"model": "m\x1b]0;x\x07\nanother", "messages": list(GO)}
        bench.model.deliver(await bench.model.answer(ChatCompletions().read(body), is_retry=False))

    _, bench = played(["left"], play)
    [line] = bench.lines
    assert "\x1b" not in line and "\n" not in line and "another" in line


def test_requests_that_forget_at_the_same_time_hinder_nobody() -> None:
    async def play(bench: Bench) -> None:
        await bench.ask(*GO)
        await bench.ask(user("elsewhere"))
        bench.clock.now = 1e6
        ending = asyncio.Event()
        release = bench.server.release

        async def slow_release(request_id: str) -> None:
            await ending.wait()
            await release(request_id)

        bench.server.release = slow_release  # type: ignore[method-assign]
        both = asyncio.gather(bench.model.forget(), bench.model.forget())
        await asyncio.sleep(0)
        ending.set()
        await both

    played(["left", "right"], play)
