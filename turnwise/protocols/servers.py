"""The contracts of inference servers. `turnwise.protocols` exports them too."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from turnwise.runtime.info import MemoryKind, PolicyInfo, ServerInfo, Suspension
from turnwise.runtime.rank import RankContext
from turnwise.transfer.contracts import UpdatesWeights
from turnwise.types import Completion, Media, SamplingParams


class PolicyServer(Protocol):
    """Samples from the policy: token ids in, token ids out. It is one replica, or the manager of several."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
    ) -> Completion:
        """Samples a response to `prompt_ids`, the *whole* context. `request_id` names the conversation: a
        server keeps the context's KV under this id and reuses it for the next request that extends the
        context. Raises ServerError if this request can't be served (too long, bad token); others are not
        affected."""

    async def abort(self, request_id: str) -> None:
        """Ends a running request. Its `generate` returns the tokens so far with finish reason `aborted`."""

    async def release(self, request_id: str) -> None:
        """Drops the KV of a conversation that has ended."""

    async def suspend(self) -> None:
        """Holds back new requests, finishes the running ones, and returns when none is left."""

    async def resume(self, version: int) -> None:
        """Drops all cached prefixes, and admits requests again. `version` is the new version of the
        weights."""

    async def sleep(self, kinds: Iterable[MemoryKind]) -> None: ...

    async def wake(self, kinds: Iterable[MemoryKind]) -> None: ...

    async def close(self) -> None: ...

    def info(self) -> ServerInfo:
        """What the server really runs, which may differ from the config."""


class InferenceServer(PolicyServer, UpdatesWeights, Protocol):
    """One data-parallel replica. The manager sends it requests, and continues those that were interrupted."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
        partial_ids: Sequence[int] = (),
    ) -> Completion:
        """See `PolicyServer`. `partial_ids` are the response's tokens from before an interruption. They count
        towards `max_new_tokens` and stop strings; the completion holds only the tokens after them. The server
        mustn't reuse the random numbers of the partial tokens. A server that draws one random number per
        token continues with the next one."""

    async def suspend(self, suspension: Suspension = "finish") -> None:
        """Holds back new requests. Running requests are finished, or ended with finish reason `aborted`,
        before this returns; with `keep` they are paused. `info().suspensions` lists the ways that this server
        supports."""


class ServerFactory(Protocol):
    """Makes a replica and loads its model, in the process that calls the factory. Nothing else loads models
    for servers."""

    def __call__(self, rank: RankContext, policy: PolicyInfo, **options: Any) -> InferenceServer: ...
