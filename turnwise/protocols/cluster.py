"""The contracts of where roles run: workers of a role, and the cluster that starts them."""

from collections.abc import Callable, Generator, Mapping
from typing import Any, Literal, Protocol

from turnwise.runtime.placement import Placement
from turnwise.runtime.rank import RankContext

Route = Literal["split", "broadcast", "rank0"]


class Pending(Protocol):
    """The future result of a call."""

    def result(self) -> Any:
        """Waits for the result. Past the cluster's deadline, raises a DeadlineError that names role and
        method."""

    def __await__(self) -> Generator[Any, None, Any]: ...


class Workers(Protocol):
    """The `size` ranks of one role, in `dp_size` data-parallel replicas, each of one or several ranks. Calls
    don't block."""

    size: int
    dp_size: int

    def call(self, method: str, *args: Any, route: Route = "broadcast", **kwargs: Any) -> Pending:
        """Calls a method of the ranks. The route `split` cuts every positional argument, a list, into equal
        shares for the replicas: the ranks of one replica get the same share. All ranks get the keyword
        arguments. The lists of the ranks that answer for their replica are joined in order (see `Layout`).
        `broadcast` gives all ranks the same and returns the answer of the rank that speaks for all. `rank0`
        calls rank 0 only."""

    def at(self, rank: int) -> "RankCalls":
        """One rank, to be called alone. Raises WorkerError if the role has no such rank."""


class RankCalls(Protocol):
    """One rank of a role."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Calls a method of this rank alone. Calls of one rank run one after the other, whoever made them."""


class Cluster(Protocol):
    """Spawns roles, in this process or in others."""

    @property
    def placement(self) -> Placement:
        """Where the roles of the run are."""

    @property
    def neighbours(self) -> Mapping[str, Any]:
        """The workers in this process, by role."""

    def spawn(self, role: str, factory: Callable[[RankContext], Any], *, beside: str = "") -> Workers:
        """Starts a role. Each rank calls `factory` with its context, whose stopwatch reports to the run's
        stopwatch. With `beside`, the ranks are those of another role, which has been spawned, and its workers
        are their neighbours."""

    def keep_first_ranks(self) -> bool:
        """After a failure, ends the processes that host no role's first rank. Returns whether the first ranks
        can still be called to save their state: they can't while they wait for an all-reduce with the ended
        ranks."""

    def shutdown(self) -> None: ...
