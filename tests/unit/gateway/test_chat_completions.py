"""Chat completions over real HTTP on loopback."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from scripted_gateway import scripted_gateway

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_an_answer_has_text_calls_thinking_and_usage() -> None:
    async def play() -> Any:
        async with scripted_gateway([f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}"]) as scripted:
            status, answer = await scripted.chat("go", tools=[TOOL], user="u", metadata={}, store=False)
            return status, answer, scripted.tree.turns[0], scripted.trained_turns()

    status, answer, turn, trained = asyncio.run(play())
    assert status == 200
    [choice] = answer["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "hm"
    assert message["content"].strip() == "Let me see."
    [call] = message["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "add", "arguments": '{"a": 1}'})
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens"] == len(turn.response_ids)
    assert answer["usage"]["prompt_tokens"] == len(turn.prompt_ids)
    assert trained == [0]


def test_a_conversation_that_is_sent_again_is_one_context() -> None:
    async def play() -> Any:
        async with scripted_gateway(["left", "right"]) as scripted:
            _, first = await scripted.chat("go")
            messages = [
                {"role": "user", "content": "go"},
                first["choices"][0]["message"],
                {"role": "user", "content": "again"},
            ]
            _, second = await scripted.post({"model": "policy", "messages": messages})
            return second, scripted.trajectory()

    second, trajectory = asyncio.run(play())
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert len(trajectory.samples) == 1
    assert [turn.parent for turn in trajectory.turns] == [None, 0]


def test_a_stream_is_comments_then_the_finished_answer() -> None:
    async def play() -> tuple[str, list[int]]:
        async with scripted_gateway([f"<think>hm</think>see {CALL}"]) as scripted:
            scripted.server.gate.clear()
            body = {"model": "policy", "messages": [{"role": "user", "content": "go"}], "tools": [TOOL]}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            url = scripted.gateway.url + "/v1/chat/completions"
            async with scripted.http.post(url, json=body, headers=scripted.headers) as response:
                first = await response.content.readuntil(b"\n\n")
                scripted.server.gate.set()
                rest = await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            return first.decode() + rest, scripted.trained_turns()

    text, trained = asyncio.run(play())
    events = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert text.startswith(": keep-alive\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == "see"
    assert any("tool_calls" in delta for delta in deltas)
    assert any(delta.get("reasoning_content") == "hm" for delta in deltas)
    assert chunks[-1]["usage"]["completion_tokens"] > 0 and chunks[-1]["choices"] == []
    assert trained == [0]


def test_a_stream_that_fails_ends_with_an_error_event_and_no_end() -> None:
    async def play() -> str:
        async with scripted_gateway([]) as scripted:
            scripted.server.gate.clear()
            body = {"model": "policy", "messages": [{"role": "user", "content": "go"}], "stream": True}
            url = scripted.gateway.url + "/v1/chat/completions"
            async with scripted.http.post(url, json=body, headers=scripted.headers) as response:
                await response.content.readuntil(b"\n\n")
                await scripted.sessions.end(scripted.session)
                return await response.text()

    text = asyncio.run(play())
    assert "session_ended" in text and "[DONE]" not in text


def test_several_choices_are_siblings_with_logprobs() -> None:
    async def play() -> Any:
        async with scripted_gateway(lambda number: "abc"[number]) as scripted:
            _, answer = await scripted.chat("go", n=3, logprobs=True, top_logprobs=0)
            return answer, scripted.trained_turns()

    answer, trained = asyncio.run(play())
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert sorted(texts) == ["a", "b", "c"]
    for text, choice in zip(texts, answer["choices"], strict=True):
        [token] = choice["logprobs"]["content"]
        assert token["token"] == text and token["bytes"] == list(text.encode())
    assert trained == [0, 1, 2]


def test_the_bytes_of_parts_of_characters_are_exact() -> None:
    async def play() -> Any:
        async with scripted_gateway(["é✓"]) as scripted:
            _, answer = await scripted.chat("go", logprobs=True)
            return answer["choices"][0]["logprobs"]["content"]

    tokens = asyncio.run(play())
    assert len(tokens) == 5, "each byte is a token"
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == "é✓"


def test_a_stop_string_is_cut_from_the_text_and_stays_in_the_ledger() -> None:
    async def play() -> Any:
        async with scripted_gateway(["so Observation: no", "ok"]) as scripted:
            _, first = await scripted.chat("go", stop=["Observation:"])
            messages = [{"role": "user", "content": "go"}, first["choices"][0]["message"]]
            messages.append({"role": "user", "content": "again"})
            await scripted.post({"model": "policy", "messages": messages, "stop": ["Observation:"]})
            return first, scripted.tree.turns

    first, turns = asyncio.run(play())
    assert first["choices"][0]["message"]["content"] == "so "
    assert "Observation:" in turns[0].text and turns[1].parent == 0


def test_the_client_s_sampling_is_ignored_said_once_and_counted(caplog: Any) -> None:
    async def play() -> Any:
        async with scripted_gateway(["a", "b"]) as scripted:
            for text in "xy":
                await scripted.chat(text, temperature=0.2, top_p=0.5, seed=1, tool_choice="required")
            return scripted.session.counts, scripted.tree.turns[0].sampling

    counts, sampling = asyncio.run(play())
    assert counts["ignored/temperature"] == counts["ignored/top_p"] == counts["ignored/seed"] == 2
    assert counts["unenforced/tool_choice required"] == 2
    assert sampling.temperature == 1.0
    warnings = [record for record in caplog.records if "top_p" in record.getMessage()]
    assert len(warnings) == 1


def test_the_client_s_temperature_counts_if_the_run_says_so() -> None:
    async def play() -> Any:
        async with scripted_gateway(["a"], takes_temperature=True) as scripted:
            await scripted.chat("go", temperature=0.5)
            return scripted.tree.turns[0].sampling.temperature, dict(scripted.session.counts)

    temperature, counts = asyncio.run(play())
    assert temperature == 0.5 and "ignored/temperature" not in counts


def test_an_untrained_model_answers_as_context_alone() -> None:
    async def play() -> Any:
        async with scripted_gateway(["a", "b"]) as scripted:
            await scripted.chat("title?", model="titles")
            await scripted.chat("go", model="claude-x")
            return scripted.trained_turns()

    assert asyncio.run(play()) == [1]
