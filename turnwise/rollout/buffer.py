"""Which groups may be admitted, which a step must wait for and which it takes: numbers only, no clock and no task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.rollout.source import Rejection


@dataclass(frozen=True, slots=True)
class BufferSettings:
    """How far groups may be ahead of training, in batches (`ratio`; 0 = synchronous), and how many play at once.

    `max_refill_factor` times the groups of a batch are admitted in place of filtered ones. `is_ordered` takes groups by index
    instead of as they finish. `drops_stale` gives up those that would have to be waited for. Nothing is admitted for a step
    beyond `num_steps`.
    """

    max_running: int
    ratio: int = 0
    max_refill_factor: float = 0.0
    is_ordered: bool = False
    drops_stale: bool = False
    num_steps: int | None = None


class GroupBuffer:
    """Groups between their admission and the step that takes them. `docs/design/asynchronous.md` proves the bound.

    Groups are numbered by admission. While a step of G groups is collected at most (1 + ratio)·G of them are here, and while it
    is trained on ratio·G. One that was admitted in step s is taken in step s + ratio at the latest.

    >>> buffer = GroupBuffer(BufferSettings(max_running=8, ratio=1))
    >>> buffer.begin(num_groups=2)
    >>> list(iter(buffer.admit, None))
    [0, 1, 2, 3]
    >>> for index in (3, 1, 0):
    ...     buffer.finish(index)
    >>> buffer.settle(), buffer.settled
    (True, [3, 1])
    >>> buffer.take(), list(iter(buffer.admit, None))
    ([], [])
    >>> buffer.begin(num_groups=2)
    >>> buffer.settle(), list(iter(buffer.admit, None))
    (False, [4, 5])
    """

    def __init__(self, settings: BufferSettings) -> None:
        self.settings = settings
        self.step = -1
        """The step that is collected or, after `take`, trained on."""
        self.next_index = 0
        self.num_groups = 0
        """That the step asked for."""
        self._is_collecting = False
        self._num_filtered = 0
        """Since the last `take`."""
        self._playing: dict[int, int] = {}
        """Index of each admitted group that plays → the last step that may train on it."""
        self._finished: dict[int, int] = {}
        """The same of those that wait for their step, in the order in which they finished."""
        self._interrupted: list[int] = []
        """Of those that play, the ones to be started again before any new one is."""
        self.settled: list[int] = []
        """Of the finished ones, those that have a place of the step, in the order in which they got it."""

    def begin(self, num_groups: int) -> None:
        """The next step, of `num_groups` groups, is collected from now on."""
        self.step += 1
        self.num_groups = num_groups
        self._is_collecting = True
        self.settled = []

    def admit(self) -> int | None:
        """Index of the next group to play; None while there is no room for one."""
        if self.num_running >= self.settings.max_running:
            return None
        if self._interrupted:
            return self._interrupted.pop(0)
        if len(self) >= self._room:
            return None
        index = self.next_index
        self._playing[index] = self.step + self.settings.ratio
        self.next_index += 1
        return index

    def finish(self, index: int, rejected: Rejection | None = None) -> None:
        """A group has come to its end."""
        last_step = self._playing.pop(index)
        if rejected is None:
            self._finished[index] = last_step
        self._num_filtered += rejected == "filtered"

    def settle(self) -> bool:
        """Gives places of the step to groups that have finished, and says whether all are given. A group that has one keeps it,
        so that it may be trained on before the others end. Quick groups come first, as long as no group can be late for it."""
        oldest_first = sorted(self._finished, key=self._finished.__getitem__) if self.settings.drops_stale else self._finished
        for index in oldest_first:
            if len(self.settled) < self._num_wanted and index not in self.settled and self._may_settle(index):
                self.settled.append(index)
        return len(self.settled) >= self._num_wanted

    def settle_as(self, wanted: Sequence[int]) -> bool:
        """Gives the next places to these groups, if all of them have finished."""
        is_there = self._finished.keys() >= set(wanted)
        self.settled += wanted if is_there else ()
        return is_there

    def _may_settle(self, index: int) -> bool:
        """Whether all groups can still be in time when this one has a place of the step."""
        if self.settings.is_ordered:
            return index in sorted((*self._playing, *self._finished))[: self._num_wanted]
        if self.settings.drops_stale:
            return True
        others = [last_step for other, last_step in self._all() if other != index and other not in self.settled]
        num_places = self._num_wanted - len(self.settled) - 1
        return all(
            sum(last_step <= self.step + ahead for last_step in others) <= num_places + ahead * self.num_groups
            for ahead in range(self._finished[index] - self.step)
        )

    def take(self) -> list[int]:
        """The settled groups leave: the step trains on them. Returns those that leave with them since no later step may have
        them, playing or finished. Unless stale groups are dropped, only a run resumed with smaller batches has any."""
        for index in self.settled:
            del self._finished[index]
        stale = [index for index, last_step in self._all() if last_step <= self.step]
        for index in stale:
            self._playing.pop(index, None)
            self._finished.pop(index, None)
        self._interrupted = [index for index in self._interrupted if index in self._playing]
        self._is_collecting = False
        self._num_filtered = 0
        return stale

    @property
    def num_running(self) -> int:
        return len(self._playing) - len(self._interrupted)

    def __len__(self) -> int:
        """Groups that are admitted and neither taken nor rejected."""
        return len(self._playing) + len(self._finished)

    def __contains__(self, index: int) -> bool:
        return index in self._playing or index in self._finished

    def has_finished(self, index: int) -> bool:
        """Whether the group waits for its step."""
        return index in self._finished

    def restart(self, index: int) -> None:
        """A finished group is played again, for the step that it was meant for."""
        self._playing[index] = self._finished.pop(index)
        self._interrupted = sorted([*self._interrupted, index])

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs, between two steps."""
        return {
            "step": self.step,
            "next_index": self.next_index,
            "num_filtered": self._num_filtered,
            "playing": list(self._playing.items()),
            "finished": list(self._finished.items()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing plays afterwards: groups that did are started again, for the steps that they were meant for."""
        self.step, self.next_index, self._num_filtered = state["step"], state["next_index"], state["num_filtered"]
        self._playing, self._finished = dict(state["playing"]), dict(state["finished"])
        self._interrupted = sorted(self._playing)

    @property
    def _num_wanted(self) -> int:
        """Groups that the step takes."""
        return min(self.num_groups, self._room)

    @property
    def _room(self) -> int:
        """Places that there are."""
        settings, size = self.settings, self.num_groups
        num_ahead = settings.ratio
        if settings.num_steps is not None:
            num_ahead = max(0, min(num_ahead, settings.num_steps - 1 - self.step))
        # Rounded first, since 0.29 × 100 is a little less than 29 in binary.
        num_refills = int(round(settings.max_refill_factor * size, 6))
        return max(0, (self._is_collecting + num_ahead) * size - max(0, self._num_filtered - num_refills))

    def _all(self) -> list[tuple[int, int]]:
        return [*self._playing.items(), *self._finished.items()]
