"""Roles in this process: the handles are the objects, and a call runs at once."""

from collections.abc import Callable, Generator
from typing import Any

from turnwise.protocols import Route
from turnwise.runtime.rank import RankContext
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog


class Done:
    """The Pending of a finished call."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self._value


class LocalWorkers:
    """The one worker of a role, so that `split`, `broadcast` and `rank0` all reach it with the arguments as they are.

    Errors are raised by `call` itself."""

    size = dp_size = 1

    def __init__(self, role: str, worker: Any, watchdog: Watchdog, deadline_s: float | None) -> None:
        self.worker = worker
        self._role = role
        self._watchdog = watchdog
        self._deadline_s = deadline_s

    def call(self, method: str, *args: Any, route: Route = "broadcast", **kwargs: Any) -> Done:
        """Raises DeadlineError past the cluster's deadline, naming role and method."""
        with self._watchdog.waiting("the pipeline", f"{self._role}.{method}", self._deadline_s, "deadlines.train_s"):
            return Done(getattr(self.worker, method)(*args, **kwargs))


class LocalCluster:
    """Spawns each role as one object of this process, on `device`. `stopwatch` is the workers'. `watchdog` ends a call after
    `deadline_s`."""

    def __init__(
        self,
        stopwatch: Stopwatch | None = None,
        watchdog: Watchdog | None = None,
        deadline_s: float | None = None,
        device: str = "cpu",
    ) -> None:
        self._stopwatch = stopwatch or Stopwatch()
        self._watchdog = watchdog or Watchdog()
        self._deadline_s = deadline_s
        self._device = device
        self._roles: dict[str, LocalWorkers] = {}

    @property
    def neighbours(self) -> dict[str, Any]:
        """The workers by their roles."""
        return {role: workers.worker for role, workers in self._roles.items()}

    def spawn(self, role: str, factory: Callable[[RankContext], Any]) -> LocalWorkers:
        neighbours = self.neighbours
        worker = factory(RankContext(role, device=self._device, neighbours=neighbours, stopwatch=self._stopwatch))
        self._roles[role] = LocalWorkers(role, worker, self._watchdog, self._deadline_s)
        return self._roles[role]

    def keep_first_ranks(self) -> bool:
        return True

    def shutdown(self) -> None:
        self._roles.clear()
