"""A harness of verifiers that asks the model once, in this process. Those of verifiers itself fetch programs
over the network."""

from __future__ import annotations

from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["OneAnswer"]


class OneAnswer(vf.Harness[vf.HarnessConfig]):
    """Sends the task's prompt, and ends with the answer."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: Any,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        if isinstance(prompt, str):
            prompt = [vf.UserMessage(content=prompt)]
        shown = [vf.SystemMessage(content=system)] if system else []
        messages = [message_to_wire(message) for message in [*shown, *(prompt or ())]]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(0, "", "")
