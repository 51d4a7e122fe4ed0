"""Chat completions over HTTP against a server of a few lines: what is asked, and what becomes of bad
answers."""

from __future__ import annotations

import asyncio
import errno
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from chat_server import answer

from turnwise.errors import ConfigError, ServerError
from turnwise.inference.http_json import BusyError, HttpJson, NoAnswerError
from turnwise.inference.openai_chat import OpenAIChat
from turnwise.protocols.tools import ToolCall
from turnwise.types import SamplingParams

MESSAGES = [{"role": "user", "content": "Where to?"}]
SAMPLING = SamplingParams(max_new_tokens=7, temperature=0.5, top_p=0.9, seed=2**40 + 3)


def test_it_asks_for_what_is_sampled_and_reads_the_answer(serve):
    server = serve(answer("Right", "length"))
    chat = OpenAIChat(f"{server.base_url}/", "small", api_key=" secret\r\n")
    said = asyncio.run(chat.complete(MESSAGES, SAMPLING))
    assert (said.text, said.finish_reason) == ("Right", "length") and said.generate_s > 0
    [(path, key, content)] = server.asked
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    asked = {
        "model": "small",
        "messages": MESSAGES,
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
    }
    assert content == asked


@pytest.mark.parametrize("key", ["sk-a\nb", "sk-“a”", "sk-\0"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key):
    with pytest.raises(
        ConfigError, match="the key in OPENAI_API_KEY holds a line break or another character"
    ) as refusal:
        OpenAIChat("http://localhost:1/v1", "small", api_key=key)
    assert "sk-" not in str(refusal.value)


def test_any_fault_of_the_connection_is_no_answer(monkeypatch):
    def unreachable(*_, **__):
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr("turnwise.inference.http_json.urlopen", unreachable)
    with pytest.raises(NoAnswerError, match=r"localhost:1/v1 doesn't answer \(.*No route to host\)"):
        HttpJson("http://localhost:1").ask_now("/v1")


def test_without_a_key_none_is_sent_and_greedy_is_temperature_0(serve):
    server = serve(answer(None))
    sampling = SamplingParams(max_new_tokens=7, do_sample=False, stop_strings=("</answer>",))
    assert asyncio.run(OpenAIChat(server.base_url, "small").complete(MESSAGES, sampling)).text == ""
    [(_, key, content)] = server.asked
    assert (key, content["temperature"], content["stop"]) == (None, 0.0, ["</answer>"])


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("no such model", 404, "answered 404 Not Found: no such model"),
        ("who are you", 401, "set OPENAI_API_KEY: who are you"),
        ("<html>", 200, "isn't JSON"),
        ({"error": "busy"}, 200, r"without choices\[0\].message.content: .*busy"),
        ({"choices": []}, 200, "without choices"),
        ([], 200, "without choices"),
        ({"choices": [{"message": {"role": "assistant"}}]}, 200, "without choices"),
        ({"choices": [{"message": "Right"}]}, 200, "without choices"),
    ],
)
def test_an_answer_that_is_none_is_a_sentence(serve, body, status, message):
    chat = OpenAIChat(serve(body, status).base_url, "small")
    with pytest.raises(ServerError, match=message):
        asyncio.run(chat.complete(MESSAGES, SAMPLING))


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_calls_may_be_said_without_content(serve, content):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 6}'}}
    said = {"role": "assistant", "tool_calls": [call], **content}
    server = serve({"choices": [{"message": said, "finish_reason": "tool_calls"}]})
    messages = [*MESSAGES, said, {"role": "tool", "tool_call_id": "c1", "content": "42"}]
    found = asyncio.run(OpenAIChat(server.base_url, "small").complete(messages, SAMPLING))
    assert (found.text, found.tool_calls) == ("", (ToolCall("look", {"x": 6}, "c1"),))


@pytest.mark.parametrize("ends", ["closes", "stalls"])
def test_an_error_whose_text_does_not_come_is_still_that_error(ends):
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer_half():
            client, _ = server.accept()
            client.recv(2**16)
            client.sendall(b"HTTP/1.1 503 Too Busy\r\nContent-Length: 100\r\n\r\nhalf")
            if ends == "closes":
                client.close()
            return client

        client = pool.submit(answer_half)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(BusyError, match=f"{url}/v1 answered 503 Too Busy"):
            HttpJson(url, timeout_s=0.5).ask_now("/v1")
        client.result().close()


def test_nobody_there_no_url_and_pictures_are_sentences():
    for url in ("localhost:8000/v1", "http://[::1/v1"):
        with pytest.raises(ConfigError, match="must be like http://"):
            OpenAIChat(url, "small")
    for url in ("http://127.0.0.1:9/v1", "http://.../v1"):
        chat = OpenAIChat(url, "small")
        with pytest.raises(ServerError, match="is the server up, and the URL right"):
            asyncio.run(chat.complete(MESSAGES, SAMPLING))
    with pytest.raises(ServerError, match="renders text"):
        asyncio.run(chat.complete([{"role": "user", "content": [{"type": "image"}]}], SAMPLING))
