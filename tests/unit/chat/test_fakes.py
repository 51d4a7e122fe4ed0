"""The fakes keep the contracts that they stand for."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.errors import ServerError
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.types import SamplingParams


def generate(server, **sampling):
    return asyncio.run(server.generate([1, 2], SamplingParams(**sampling), "a"))


def test_stop_tokens_and_budgets_end_a_scripted_response():
    server = ScriptedServer([[7, 8, 9], [7, 8, 9], [7, 8]])
    stopped = generate(server, max_new_tokens=3, stop_token_ids=(8,))
    cut = generate(server, max_new_tokens=1, stop_token_ids=(8,))
    ended = generate(server, max_new_tokens=9)
    assert [(c.token_ids.tolist(), c.finish_reason) for c in (stopped, cut, ended)] == [
        ([7, 8], "stop"),
        ([7], "length"),
        ([7, 8], "length"),
    ]
    with pytest.raises(ServerError, match="no response left"):
        generate(server, max_new_tokens=1)
    with pytest.raises(ServerError, match="at least 1"):
        generate(server, max_new_tokens=0)


def test_a_script_may_be_a_function_of_the_request():
    server = ScriptedServer(lambda request: [*request.prompt_ids, request.sampling.seed])
    assert generate(server, max_new_tokens=9, seed=5).token_ids.tolist() == [1, 2, 5]
    assert server.requests[0].prompt_ids == (1, 2) and server.requests[0].request_id == "a"


def test_a_suspended_server_holds_requests_back_and_resumes_with_the_new_version():
    async def run():
        server = ScriptedServer([[7], [8]])
        await server.suspend()
        held = asyncio.ensure_future(server.generate([1], SamplingParams(max_new_tokens=4), "a"))
        aborted = asyncio.ensure_future(server.generate([1], SamplingParams(max_new_tokens=4), "b"))
        await asyncio.sleep(0)
        assert not held.done() and len(server.requests) == 2
        await server.abort("b")
        await server.resume(version=2)
        return await held, await aborted

    held, aborted = asyncio.run(run())
    assert held.versions[0].version == 2
    assert aborted.finish_reason == "aborted" and len(aborted.token_ids) == 0


def test_a_trained_tokenizer_merges_what_the_byte_tokenizer_keeps_apart():
    plain = byte_tokenizer()
    merging = byte_tokenizer(training_texts=["Right Left"] * 4, vocab_size=290)
    assert len(plain.encode("Right")) == 5 and len(merging.encode("Right")) < 5
    for tokenizer in (plain, merging):
        assert tokenizer.decode(tokenizer.encode("größer ☃\n<|im_end|>")) == "größer ☃\n<|im_end|>"
        assert tokenizer.eos_token == "<|im_end|>"


def test_a_begin_of_text_token_is_added_when_special_tokens_are_asked_for():
    tokenizer = byte_tokenizer(("<s>", "</s>"), bos_token="<s>")
    assert tokenizer.encode("a") == [tokenizer.bos_token_id, *tokenizer.encode("a", add_special_tokens=False)]
