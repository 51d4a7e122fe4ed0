"""The contracts between those who send weights and those who receive them. `turnwise.protocols` exports them
too."""

from collections.abc import Awaitable, Iterable, Iterator
from typing import Any, Literal, Protocol, runtime_checkable

from turnwise.runtime.info import ServerInfo
from turnwise.transfer.manifest import WeightManifest
from turnwise.types import Metric

NamedTensors = Iterable[tuple[str, Any]]
"""`(Hugging Face name, tensor)` pairs."""
OnWeightUpdate = Literal["finish", "abort_continue", "abort_restart", "keep"]


class WeightSource(Protocol):
    """One version of the weights, as a server reads it. Its class is the form in which they travel."""

    @property
    def manifest(self) -> WeightManifest: ...

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """`(Hugging Face name, tensor)` in the order of the manifest. Raises WorkerError if a tensor isn't as
        it says."""

    def on(self, node: str) -> "WeightSource":
        """The same weights, where a process of this node (`RankContext.node`) reads them."""


@runtime_checkable
class DescribesWeights(Protocol):
    """A strategy that knows its weights without iterating over them."""

    def weight_manifest(self) -> WeightManifest:
        """What its `weights` iterates over."""


class SendsWeights(Protocol):
    """The trainer's side of a transfer: one sender, or those of several ranks."""

    def manifest(self) -> Awaitable[WeightManifest]:
        """What `publish` sends. It is the same for all versions."""

    def publish(self) -> Awaitable[WeightSource]:
        """The trainer's weights as they are now. A later call may overwrite what an earlier one returned."""

    def publish_again(self, server: Any = None, is_lost: bool = False) -> Awaitable[WeightSource]:
        """The weights of the last `publish`, also for `server`, which is new, or has lost them. The trainer
        may have changed its own since then. `is_lost`: what was returned last is gone on a node."""


class SendAgain(Protocol):
    """`SendsWeights.publish_again`, for a server that has lost the weights."""

    def __call__(self, server: Any, *, is_lost: bool) -> Awaitable[WeightSource]: ...


class UpdatesWeights(Protocol):
    """The steps of a weight update on one server: `begin_update`, `receive`, and then the server's
    `resume`."""

    async def begin_update(self, manifest: WeightManifest) -> None:
        """Prepares for weights of this manifest. Called before the weights are sent. Raises ModelError if
        they don't fit the server's model or a tensor is missing."""

    async def receive(self, weights: WeightSource) -> int:
        """Writes new values into its own weights, after `begin_update` and between `suspend` and `resume`.
        Returns the number of bytes written. Called only if `info().needs_weights`. Raises LostWeightsError,
        with nothing written, if the weights are gone."""


class JoiningServer(UpdatesWeights, Protocol):
    """A server that gets the weights of the last update before its first request."""

    async def suspend(self) -> None: ...

    async def resume(self, version: int) -> None: ...

    def info(self) -> ServerInfo: ...


class ReceivesWeights(UpdatesWeights, Protocol):
    """All servers of a run as one, which a `WeightTransfer` updates."""

    async def suspend(self, on_weight_update: OnWeightUpdate = "finish") -> None: ...

    async def receive(self, weights: WeightSource, send_again: SendAgain | None = None) -> int:
        """See `UpdatesWeights`. Servers that have lost the weights get those that `send_again` returns."""

    async def resume(self, version: int) -> None: ...

    def join(self, server: Any) -> None:
        """Adds a server, which has the weights of the others."""

    def info(self) -> ServerInfo: ...


class WeightTransfer(Protocol):
    """Moves the policy from the trainer's ranks into the servers' replicas: suspends the servers, copies the
    weights, raises the version, and resumes the servers. It is a contract of its own, since trainer and
    servers both take part."""

    async def update(self, version: int) -> list[Metric]: ...

    def describe(self) -> str:
        """The form in which the weights travel, for the table of a run; empty if the server reads the
        trainer's own."""
