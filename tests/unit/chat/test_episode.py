"""The contexts of one episode: seeds and request ids of their own, released together."""

from __future__ import annotations

import asyncio

from turnwise.chat.episode import EpisodeContexts
from turnwise.chat.template import ChatTemplate
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.types import SamplingParams

USER = [{"role": "user", "content": "Where to?"}]


def test_each_context_samples_with_its_own_seed_and_is_released():
    template = ChatTemplate(byte_tokenizer())
    server = ScriptedServer([template.respond("Right")] * 3)
    contexts = EpisodeContexts(template, server, max_length=256, episode_id="episode-7")

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
