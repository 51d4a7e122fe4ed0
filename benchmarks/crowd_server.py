"""A server that answers a whole crowd at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from turnwise.testing.fakes import Script, ScriptedServer, SeenRequest
from turnwise.types import Completion, Media, SamplingParams


class CrowdServer(ScriptedServer):
    """A ScriptedServer that answers when nobody brings another request, and then everybody: as an engine does
    that steps with the largest batch that is ready. It records nothing but `largest_crowd`, the most requests
    that it ever held, and its script sees no prompts."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self._waiting: list[asyncio.Future[None]] = []
        self._driver: asyncio.Task[None] | None = None
        self.largest_crowd = 0

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
    ) -> Completion:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[None] = loop.create_future()
        self._waiting.append(answered)
        if self._driver is None:
            self._driver = loop.create_task(self._answer_all())
        await answered
        return self._respond(SeenRequest((), sampling, request_id))

    async def release(self, request_id: str) -> None:
        pass

    async def _answer_all(self) -> None:
        num_waiting = 0
        while num_waiting < len(self._waiting):
            num_waiting = len(self._waiting)
            await asyncio.sleep(0)
        self.largest_crowd = max(self.largest_crowd, num_waiting)
        crowd, self._waiting, self._driver = self._waiting, [], None
        for answered in crowd:
            if not answered.done():
                answered.set_result(None)
