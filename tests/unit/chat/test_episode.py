"""The contexts of one episode: seeds and request ids of their own, released together."""

from __future__ import annotations

import asyncio

import pytest
from chat_messages import user

from turnwise.chat.contexts import TokenContexts
from turnwise.errors import RolloutError
from turnwise.testing.fakes import ScriptedServer
from turnwise.types import SamplingParams

USER = [user("Where to?")]


def test_each_context_samples_with_its_own_seed_and_is_released(chatml):
    server = ScriptedServer([chatml.respond("Right")] * 3)
    contexts = TokenContexts(chatml, server, max_length=256, episode_id="episode-7")

    async def play():
        for _ in range(3):
            await contexts(SamplingParams(max_new_tokens=16, seed=5)).generate(USER)
        contexts.verify()
        await contexts.close()

    asyncio.run(play())
    assert len({request.sampling.seed for request in server.requests}) == 3
    ids = [request.request_id for request in server.requests]
    assert len(set(ids)) == 3 and all(name.startswith("episode-7/") for name in ids)
    assert sorted(server.released) == sorted(ids)


def test_contexts_that_their_agent_has_closed_are_still_verified_and_not_released_again(chatml):
    server = ScriptedServer(lambda request: chatml.respond("Right"))
    contexts = TokenContexts(chatml, server, max_length=256, episode_id="episode-7")

    async def play():
        conversation = contexts(SamplingParams(max_new_tokens=16))
        await conversation.generate(USER)
        await conversation.close()
        assert server.released == ["episode-7/0"]
        contexts.verify()
        conversation.turns[0].response_ids[0] += 1
        with pytest.raises(RolloutError, match="their ids never changed"):
            contexts.verify()
        await contexts.close()

    asyncio.run(play())
    assert server.released == ["episode-7/0"]


def test_only_the_first_context_of_an_episode_must_have_room_for_its_prompt(chatml):
    contexts = TokenContexts(chatml, ScriptedServer([]), max_length=8, episode_id="episode-7")
    with pytest.raises(RolloutError, match="the first prompt of 'episode-7/0'"):
        asyncio.run(contexts(SamplingParams(max_new_tokens=16)).generate(USER))
    assert asyncio.run(contexts(SamplingParams(max_new_tokens=16)).generate(USER)) is None
