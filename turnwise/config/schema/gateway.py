"""Settings of agents that speak HTTP: what is played, and what the gateway grants them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from turnwise.config.schema.section import (
    Name,
    PositiveCount,
    Seconds,
    Section,
    as_list,
    is_entry_point,
)
from turnwise.errors import nearest
from turnwise.spec import MatchRule

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""The addresses of this machine alone."""


def _entry_point(name: str) -> str:
    if ":" not in name or not is_entry_point(name):
        raise ValueError(f"{name!r} isn't an entry point; name it as module:name")
    return name


def url_of_clients(url: str) -> str:
    """The address, if it is one. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} isn't an address; write http://HOST:PORT")
    return url


EntryPoint = Annotated[Name, AfterValidator(_entry_point)]


class GatewayPlay(Section):
    """What an agent of the gateway plays: keys of `agent`, and of `agent_args` where they win."""

    play: EntryPoint | None = None
    """Your function `module:function` that plays an episode over HTTP; for agent_name: gateway."""
    command: Annotated[list[Name], BeforeValidator(as_list)] | None = None
    """Program and arguments that play an episode over HTTP, in place of `play`."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the command."""
    models: dict[str, Literal["trained", "untrained"]] = Field(default_factory=dict)
    """Names of models, or patterns (`claude-*`), that clients may ask for. The policy answers all of them;
    `untrained` answers are context alone [the name of the policy's folder, trained]."""
    max_processes: PositiveCount | None = None
    """Maximum commands that run at once [4 for each core]."""
    grace_s: Seconds = 5.0
    """Time that a function or command has to end once its episode's time is up, before it is left behind or
    killed."""
    mistakes: Annotated[list[EntryPoint], BeforeValidator(as_list)] = Field(default_factory=list)
    """Exceptions (`module:Class`) of an agent that are mistakes of the model, such as an unknown tool: the
    episode ends and is trained on. Other exceptions fail the episode."""
    mistake_reward: float = 0.0
    """Reward of an episode that ends by one of `mistakes`."""


def gateway_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Checks keys of `GatewayPlay` that win over those of `agent`. Raises ValueError, which names the key,
    for a wrong one.

    >>> gateway_arguments({"grace_s": 2.0})
    {'grace_s': 2.0}
    """
    unknown = [name for name in arguments if name not in GatewayPlay.model_fields]
    if unknown:
        hint = nearest(str(unknown[0]), GatewayPlay.model_fields)
        raise ValueError(f"{unknown[0]!r} isn't a key of an agent of the gateway.{hint}")
    try:
        GatewayPlay.model_validate(arguments)
    except ValidationError as fault:
        [first, *_] = fault.errors(include_url=False)
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {message}") from None
    return dict(arguments)


class GatewayArgs(Section):
    """The HTTP server of agents with agent_name: gateway."""

    host: Name = "127.0.0.1"
    """Address that the server listens on. Others than this machine's need `public_url`."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port that the server listens on; 0 = a free one."""
    public_url: Annotated[Name, AfterValidator(url_of_clients)] | None = None
    """Address under which agents reach the server, such as http://HOST:PORT [that of host and port]."""
    match: MatchRule = "omitted"
    """Whether a client may leave out the thinking, and the text beside tool calls, of a response that it
    sends back (`omitted`), or starts a new context then (`exact`)."""
    strict: bool = False
    """Refuse requests that ask for what can't be enforced (a tool_choice, a response_format), instead of
    serving them without it."""
    client_temperature: bool = False
    """Sample at the temperature that a request asks for; false = at the run's."""
    max_requests: PositiveCount = 16
    """Maximum requests of one episode at once; further ones are told to wait (429)."""
    max_n: PositiveCount = 8
    """Maximum answers to one request (`n`)."""
    max_body_mb: PositiveCount = 16
    """Maximum size of a request in megabytes."""
