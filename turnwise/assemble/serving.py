"""Serves a model over HTTP, without training: `turnwise serve`."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

from turnwise.assemble.rollouts import ServedPolicy, open_served_policy, sampling_params
from turnwise.chat.tool_calls import parser_if_asked
from turnwise.chat.tree import ConversationTree
from turnwise.config import AgenticConfig
from turnwise.examine.examined import Examined
from turnwise.gateway.served import RULES, ServedModel
from turnwise.gateway.server import Gateway, GatewaySettings
from turnwise.types import SamplingParams

_FORGET_S = 60.0
"""Seconds between two looks for conversations to forget."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where a model is served, and what its clients are told."""

    name: str
    """The model's name in `/v1/models`."""
    key: str
    gateway: GatewaySettings
    show: Callable[[str], None]
    """Shows a line on the terminal."""


def serve_model(examined: Examined, options: ServeOptions, on_start: Callable[[str], None]) -> None:
    """Serves the config's policy until it is interrupted. `on_start` gets the address when it listens. Raises
    ServerError if it can't listen, or the policy's servers fail."""
    with closing(open_served_policy(examined)) as policy:
        policy.event_loop.run(_serve(examined.config, policy, options, on_start))


async def _serve(
    config: AgenticConfig, policy: ServedPolicy, options: ServeOptions, on_start: Callable[[str], None]
) -> None:
    sampling = _sampling(config)
    parser = parser_if_asked(config.agent.tool_parser, policy.template)

    def open_tree(name: str) -> ConversationTree:
        return ConversationTree(
            policy.template,
            policy.servers,
            name,
            sampling,
            config.sequence_length,
            parser=parser,
            match=config.gateway.match,
        )

    rules = replace(RULES, is_strict=config.gateway.strict)
    served = ServedModel(options.name, options.key, open_tree, options.show, rules=rules)
    gateway = Gateway(served, options.gateway)
    await gateway.start()
    forgetting = asyncio.create_task(_forget_regularly(served))
    try:
        on_start(gateway.url)
        await served.fault
    finally:
        forgetting.cancel()
        # Requests that run end first, so that their connections don't hold the server's end up.
        await served.close()
        await gateway.close()


async def _forget_regularly(served: ServedModel) -> None:
    while True:
        await asyncio.sleep(_FORGET_S)
        await served.forget()


def _sampling(config: AgenticConfig) -> SamplingParams:
    """How responses are sampled if a client says nothing. They may fill the context."""
    sampling = replace(sampling_params(config, "train"), seed=config.seed)
    if config.sampling("train").max_new_tokens is None:
        sampling = replace(sampling, max_new_tokens=config.sequence_length)
    return sampling
