"""The endpoints of the gateway: a protocol is served if it stands here."""

from collections.abc import Mapping

from turnwise.gateway.chat_completions import ChatCompletions
from turnwise.gateway.dialect import Dialect, TokenCounter

_DIALECTS: tuple[Dialect, ...] = (ChatCompletions(),)
_COUNTERS: tuple[TokenCounter, ...] = ()

DIALECTS: Mapping[str, Dialect] = {dialect.path: dialect for dialect in _DIALECTS}
"""Path → the dialect of the requests that are answered there."""
COUNTERS: Mapping[str, TokenCounter] = {counter.path: counter for counter in _COUNTERS}
"""Path → the dialect of the requests whose prompts are counted there."""
