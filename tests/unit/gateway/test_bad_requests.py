"""Requests that can't be answered: each gets a sentence in the dialect's form, and touches nobody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from scripted_gateway import CHAT, RULES, SETTINGS, Scripted, scripted_gateway, scripted_tree

from turnwise.errors import ConfigError
from turnwise.gateway.server import Gateway, GatewaySettings
from turnwise.gateway.sessions import Sessions

USER = {"role": "user", "content": "go"}
REPLY = {"role": "assistant", "content": "left"}
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "1"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [USER], **fields}


def function(name: Any, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


BAD: list[tuple[Any, int, str]] = [
    (body(messages=[]), 400, "messages"),
    (body(messages="go"), 400, "messages"),
    (body(messages=[USER, REPLY]), 400, "last message"),
    (body(messages=[USER, RESULT]), 400, "tool_call_id"),
    (body(messages=[USER, CALLED, RESULT, RESULT]), 400, "second result"),
    (body(messages=[{"role": "robot", "content": "x"}]), 400, "role"),
    (
        body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        400,
        "image_url",
    ),
    ({"messages": [USER]}, 400, "model"),
    (body(model="gpt-4o"), 404, "agent.models"),
    (body(temprature=1), 400, "temperature"),
    (body(n=0), 400, "`n`"),
    (body(n=9), 400, "gateway.max_n"),
    (body(n=True), 400, "`n`"),
    (body(max_tokens=0), 400, "max_tokens"),
    (body(max_completion_tokens=-1), 400, "max_completion_tokens"),
    (body(temperature=9), 400, "temperature"),
    (body(top_logprobs=3), 400, "top_logprobs"),
    (body(stop=[""]), 400, "stop"),
    (body(stream="yes"), 400, "stream"),
    (body(tools=[function("f", "no schema")]), 400, "JSON schema"),
    (body(tools=[function(3)]), 400, "name"),
    (body(tools=[function("f"), function("f")]), 400, "two tools"),
    (body(tool_choice="always"), 400, "tool_choice"),
    (body(functions=[{"name": "f"}]), 400, "tools"),
    (b"{", 400, "JSON"),
    (b"[1]", 400, "object"),
    (b'{"model": NaN}', 400, "NaN"),
    (b"\xff\xfe", 400, "JSON"),
    (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "nested"),
    (b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}", 400, "nested"),
    (b'{"a": "' + b"x" * 2**20 + b'"}', 413, "max_body_mb"),
]


@pytest.fixture(scope="module")
def answers() -> list[tuple[int, Any]]:
    """Status and answer of each bad request, all in one session."""

    async def play() -> list[tuple[int, Any]]:
        settings = GatewaySettings(max_body_bytes=2**20)
        async with scripted_gateway(["left"], settings) as scripted:
            got = [await scripted.post(content) for content, _, _ in BAD]
            status, _ = await scripted.chat("go")
            assert status == 200 and scripted.trained_turns() == [0]
            assert scripted.session.counts["refused"] == len(BAD)
            return got

    return asyncio.run(play())


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_request_is_refused_with_a_sentence(answers: list[tuple[int, Any]], number: int) -> None:
    _, expected_status, word = BAD[number]
    status, answer = answers[number]
    error = answer["error"]
    assert status == expected_status and word in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def asked(ask: Any, settings: GatewaySettings = SETTINGS, **rules: Any) -> Any:
    async def play() -> Any:
        async with scripted_gateway(["left"], settings, **rules) as scripted:
            return await ask(scripted)

    return asyncio.run(play())


async def status_of(
    scripted: Scripted,
    headers: Mapping[str, str],
    path: str = CHAT,
    method: str = "POST",
    content: Any = None,
) -> tuple[int, Mapping[str, str], str]:
    content = json.dumps(body()).encode() if content is None else content
    headers = {"Content-Type": "application/json", **headers}
    url = scripted.gateway.url + path
    async with scripted.http.request(method, url, data=content, headers=headers) as response:
        return response.status, dict(response.headers), await response.text()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic abc"}, 401),
        ({"x-api-key": "wrong"}, 401),
    ],
)
def test_a_wrong_or_missing_key(headers: dict[str, str], status: int) -> None:
    got, answered, text = asked(lambda scripted: status_of(scripted, headers))
    assert got == status and answered["x-should-retry"] == "false"
    assert "invalid_api_key" in text


def test_a_wrong_key_is_said_once_in_the_run_s_log_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    async def ask(scripted: Scripted) -> list[int]:
        wrong = {"Authorization": "Bearer 0123456789"}
        return [(await status_of(scripted, wrong))[0] for _ in range(3)]

    assert asked(ask) == [401, 401, 401]
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and CHAT in said[0] and "0123456789" not in caplog.text


def test_the_key_may_stand_in_either_header_or_in_the_url() -> None:
    async def ask(scripted: Scripted) -> list[int]:
        key = scripted.session.key
        ways = [
            ({"x-api-key": key}, CHAT),
            ({}, f"/s/{key}{CHAT}"),
            ({"Authorization": "Bearer fixed"}, f"/s/{key}{CHAT}"),
        ]
        return [(await status_of(scripted, headers, path))[0] for headers, path in ways]

    async def play() -> list[int]:
        async with scripted_gateway(lambda number: "x") as scripted:
            return await ask(scripted)

    assert asyncio.run(play()) == [200, 200, 200]


def test_the_keys_of_two_sessions_in_one_request() -> None:
    async def ask(scripted: Scripted) -> Any:
        other = scripted.sessions.open(scripted_tree(scripted.server, "f"), RULES, "f")
        headers = {"Authorization": f"Bearer {other.key}"}
        status, _, text = await status_of(scripted, headers, f"/s/{scripted.session.key}{CHAT}")
        await scripted.sessions.end(other)
        return status, text, other.tree.turns, scripted.tree.turns

    status, text, *turns = asked(ask)
    assert status == 401 and "two sessions" in text and turns == [[], []]


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({"Content-Type": "text/plain"}, None, 415),
        ({"Content-Encoding": "gzip"}, b"\x1f\x8b", 415),
        ({"Host": "evil.example"}, None, 403),
    ],
)
def test_what_is_refused_before_the_body_is_read(
    headers: dict[str, str], content: bytes | None, status: int
) -> None:
    got, _, text = asked(lambda s: status_of(s, {**s.headers, **headers}, content=content))
    assert got == status and json.loads(text)["error"]["message"]


def test_unknown_paths_and_methods_say_what_there_is() -> None:
    status, _, text = asked(lambda s: status_of(s, s.headers, "/v1/completions"))
    assert status == 404 and CHAT in text and "/v1/models" in text
    status, headers, _ = asked(lambda s: status_of(s, s.headers, CHAT, "GET"))
    assert status == 405 and headers["Allow"] == "POST"


def test_models_and_health() -> None:
    _, _, text = asked(lambda s: status_of(s, s.headers, "/v1/models", "GET"))
    assert [model["id"] for model in json.loads(text)["data"]] == ["policy", "titles"]
    assert asked(lambda s: status_of(s, {}, "/health", "GET"))[0] == 200


def test_strict_refuses_what_can_not_be_enforced() -> None:
    async def ask(scripted: Scripted) -> Any:
        return await scripted.post(body(response_format={"type": "json_object"}))

    status, answer = asked(ask, is_strict=True)
    assert status == 400 and "gateway.strict" in answer["error"]["message"]


def test_a_body_that_never_ends_is_cut_off() -> None:
    async def endless() -> Any:
        while True:
            yield b"x" * 2**16

    async def ask(scripted: Scripted) -> int:
        url = scripted.gateway.url + CHAT
        headers = {"Content-Type": "application/json", **scripted.headers}
        async with scripted.http.post(url, data=endless(), headers=headers) as response:
            return response.status

    assert asked(ask, GatewaySettings(max_body_bytes=2**18)) == 413


def test_a_body_that_stops_in_the_middle_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.gateway.incoming._BODY_S", 0.1)

    async def ask(scripted: Scripted) -> bytes:
        host, _, port = scripted.gateway.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        lines = [f"POST {CHAT} HTTP/1.1", f"Host: {host}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in scripted.headers.items()]
        lines += ["Content-Length: 1000", "", '{"model": ']
        writer.write("\r\n".join(lines).encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        body = await asyncio.wait_for(reader.readuntil(b"}}"), 60)
        writer.close()
        return head + body

    answer = asked(ask)
    assert answer.startswith(b"HTTP/1.1 408") and b"request_timeout" in answer
    assert b"connection: close" in answer.lower()


def test_a_port_in_use() -> None:
    async def play() -> None:
        first = Gateway(Sessions(), GatewaySettings())
        await first.start()
        second = Gateway(Sessions(), GatewaySettings(port=int(first.url.rpartition(":")[2])))
        try:
            await second.start()
        finally:
            await first.close()

    with pytest.raises(ConfigError, match=r"gateway\.port"):
        asyncio.run(play())


def test_a_host_may_be_an_address_of_ipv6() -> None:
    async def play() -> list[int]:
        settings = replace(SETTINGS, public_url="http://[fd00::5]:8000")
        async with scripted_gateway(["hi"], settings) as scripted:
            url = f"http://127.0.0.1:{scripted.gateway._port}/v1/models"
            statuses = []
            for host in ("[fd00::5]:8000", "[::1]:8000", "[fd00::6]:8000", ""):
                async with scripted.http.get(url, headers={**scripted.headers, "Host": host}) as answer:
                    statuses.append(answer.status)
            return statuses

    assert asyncio.run(play()) == [200, 200, 403, 403]


@pytest.mark.parametrize("fault", [ConnectionResetError("gone"), TimeoutError(), RuntimeError("boom")])
def test_a_fault_of_a_server_is_no_lost_client(fault: Exception) -> None:
    async def play() -> tuple[int, Any]:
        async with scripted_gateway(["hi"]) as scripted:
            scripted.server.fault = fault
            return await scripted.post(body())

    status, answer = asyncio.run(play())
    assert status == 500 and answer["error"]["code"] == "server_error"


def test_a_prompt_of_megabytes_is_not_encoded_to_be_counted() -> None:
    async def play() -> tuple[int, Any]:
        async with scripted_gateway(["hi"]) as scripted:
            long = {"role": "user", "content": "go " * 500_000}
            return await scripted.post(body(messages=[long]), "/v1/messages/count_tokens")

    status, answer = asyncio.run(play())
    assert status == 400 and "sequence_length" in answer["error"]["message"]


def test_a_tool_of_the_server_in_a_namespace_is_dropped() -> None:
    async def play() -> int:
        function = {"type": "function", "name": "f", "parameters": {}}
        tools = [{"type": "namespace", "name": "ns", "tools": [{"type": "web_search"}, function]}]
        async with scripted_gateway(["hi"]) as scripted:
            status, _ = await scripted.post(
                {"model": "policy", "input": "go", "tools": tools}, "/v1/responses"
            )
            assert scripted.trained_turns() == [0]
            return status

    assert asyncio.run(play()) == 200


def test_a_base_url_may_end_with_a_slash() -> None:
    async def play() -> list[int]:
        async with scripted_gateway(["left", "right"]) as scripted:
            paths = ("//v1/chat/completions", f"//s/{scripted.session.key}//v1/chat/completions")
            return [(await scripted.post(body(), path))[0] for path in paths]

    assert asyncio.run(play()) == [200, 200]
