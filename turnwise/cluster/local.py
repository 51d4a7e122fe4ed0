"""Roles in this process: workers are plain objects, and a call runs at once."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from turnwise.cluster.ranks import require_rank
from turnwise.protocols import Route
from turnwise.runtime.placement import Placement
from turnwise.runtime.rank import RankContext
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a finished call, as a `protocols.Pending`."""

    value: Any

    def result(self) -> Any:
        return self.value

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self.value


@dataclass
class LocalWorkers:
    """The one worker of a role. Every route passes arguments unchanged. Errors are raised by `call`, not by
    its result."""

    role: str
    worker: Any
    watchdog: Watchdog
    deadline_s: float | None
    size = dp_size = 1

    def call(self, method: str, *args: Any, route: Route = "broadcast", **kwargs: Any) -> Done:
        """Calls the worker and waits. Past the cluster's deadline, raises a DeadlineError that names role and
        method."""
        with self.watchdog.waiting(
            "the pipeline", f"{self.role}.{method}", self.deadline_s, "deadlines.train_s"
        ):
            return Done(getattr(self.worker, method)(*args, **kwargs))

    def at(self, rank: int) -> "LocalRank":
        require_rank(self.role, self.size, rank)
        return LocalRank(self)


@dataclass(frozen=True, slots=True)
class LocalRank:
    """The one rank of a role, as a `protocols.RankCalls`."""

    workers: LocalWorkers

    def call(self, method: str, *args: Any, **kwargs: Any) -> Done:
        return self.workers.call(method, *args, **kwargs)


@dataclass
class LocalCluster:
    """Spawns roles as objects on the devices of `placement`. Workers report to `stopwatch`. A call may last
    `deadline_s` (None = no limit)."""

    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    watchdog: Watchdog = field(default_factory=Watchdog)
    deadline_s: float | None = None
    placement: Placement = field(default_factory=lambda: Placement("local"))
    _roles: dict[str, LocalWorkers] = field(init=False, default_factory=dict)

    @property
    def neighbours(self) -> dict[str, Any]:
        return {role: workers.worker for role, workers in self._roles.items()}

    def spawn(self, role: str, factory: Callable[[RankContext], Any], *, beside: str = "") -> LocalWorkers:
        device = self.placement.device_of(beside or role)
        worker = factory(
            RankContext(role, device=device, neighbours=self.neighbours, stopwatch=self.stopwatch)
        )
        self._roles[role] = LocalWorkers(role, worker, self.watchdog, self.deadline_s)
        return self._roles[role]

    def keep_first_ranks(self) -> bool:
        return True

    def shutdown(self) -> None:
        self._roles.clear()
