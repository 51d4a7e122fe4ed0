"""Decides which groups may be admitted and which groups each step trains on. It reads no clock and knows no
tasks."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.rollout.settings import SchedulerSettings
from turnwise.rollout.source import Rejection


class GroupBuffer:
    """Keeps groups from their admission until a step trains on them. `docs/design/asynchronous.md` proves the
    bounds below.

    A group's index is the number of groups admitted before it. While a step of G groups is collected, the
    buffer has at most (1 + ratio)·G groups, and during training at most ratio·G, where ratio is
    `async_generation_ratio`. The last step of a group admitted in step s is s + ratio: no later step may
    train on it. At most `num_tasks` groups are admitted (None = no limit).

    >>> settings = SchedulerSettings(group_size=4, max_concurrent_groups=8, async_generation_ratio=1)
    >>> buffer = GroupBuffer(settings)
    >>> buffer.begin(num_groups=2)
    >>> list(iter(buffer.admit, None))
    [0, 1, 2, 3]
    >>> for index in (3, 1, 0):
    ...     buffer.finish(index)
    >>> buffer.select(), buffer.selected
    (True, [3, 1])
    >>> buffer.close_step(), list(iter(buffer.admit, None))
    ([], [])
    >>> buffer.begin(num_groups=2)
    >>> buffer.select(), list(iter(buffer.admit, None))
    (False, [4, 5])
    """

    def __init__(self, settings: SchedulerSettings, num_tasks: int | None = None) -> None:
        self.settings = settings
        self._num_tasks = math.inf if num_tasks is None else num_tasks
        self.step = -1
        """The step that is being collected or, after `close_step`, trained on."""
        self.next_index = 0
        self.num_groups = 0
        """Number of groups that `begin` asked for."""
        self._is_collecting = False
        self._num_filtered = 0  # groups filtered since the last `close_step`
        self._playing: dict[int, int] = {}  # index of each playing group → the last step that may take it
        self._finished: dict[int, int] = {}  # the same for finished groups, in the order of finishing
        self._interrupted: list[int] = []  # playing groups that must be started again, before any new one
        self.selected: list[int] = []
        """Finished groups selected for this step, in selection order."""
        # Finished groups that aren't selected yet, and the last step of each.
        self._unselected: dict[int, int] = {}
        # Last step → number of groups, playing or finished, that aren't selected yet.
        self._num_due: Counter[int] = Counter()

    def begin(self, num_groups: int) -> None:
        """Begins the next step, which collects `num_groups` groups."""
        self.step += 1
        self.num_groups = num_groups
        self._is_collecting = True
        self.selected = []

    def admit(self) -> int | None:
        """Admits the next group to play and returns its index; None while there is no room, or if no task is
        left."""
        if self.num_running >= self.settings.max_concurrent_groups:
            return None
        if self._interrupted:
            return self._interrupted.pop(0)
        if len(self) >= self._room or not self._num_tasks_left:
            return None
        last_step = self.step + self.settings.async_generation_ratio
        self._playing[self.next_index] = last_step
        self._num_due[last_step] += 1
        self.next_index += 1
        return self.next_index - 1

    def finish(self, index: int, rejected: Rejection | None = None) -> None:
        """Notes that a group has ended. A rejected group leaves the buffer."""
        last_step = self._playing.pop(index)
        if rejected is None:
            self._finished[index] = self._unselected[index] = last_step
        else:
            self._num_due[last_step] -= 1
        self._num_filtered += rejected == "filtered"

    def select(self) -> bool:
        """Selects finished groups for the step; returns whether the step is complete. Selected groups stay
        selected, so they may be trained on before the others end. Groups are selected in order of finishing,
        unless another group would then miss its last step. With `is_ordered`, the lowest indices are
        selected, with `drops_stale` the earliest last steps."""
        num_required = self._num_required
        candidates = list(self._unselected)
        if self.settings.is_ordered:
            # A quicker group of a higher index waits, though it has finished: the batch must not depend on
            # which group was quickest. A playing group holds its place by being among the lowest.
            indices = sorted((*self._playing, *self._finished))
            lowest = set(indices[:num_required])
            candidates = [index for index in candidates if index in lowest]
        elif self.settings.drops_stale:
            candidates.sort(key=self._unselected.__getitem__)
        # Only the order of finishing can give a place to a group while one that is due earlier needs it. With
        # `is_ordered` the lowest indices are those with the earliest last steps, and with `drops_stale` the
        # earliest last steps come first; what still misses its last step is dropped on purpose.
        is_free = self.settings.is_ordered or self.settings.drops_stale
        refused: set[int] = set()  # last steps
        for index in candidates:
            last_step = self._unselected[index]
            if len(self.selected) == num_required:
                break
            if last_step in refused:
                # The answer is the same for all groups with this last step, and stays the same: each
                # selection since then took one place, and at most one of the groups that are due.
                continue
            num_places_after = num_required - len(self.selected) - 1
            if is_free or self._are_in_time(num_places_after, last_step):
                self._select(index)
            else:
                refused.add(last_step)
        return len(self.selected) >= num_required

    def select_recorded(self, indices: Sequence[int]) -> bool:
        """Selects the groups of `indices` if all of them have finished; returns whether they have."""
        if not self._finished.keys() >= set(indices):
            return False
        for index in indices:
            self._select(index)
        return True

    def _select(self, index: int) -> None:
        self._num_due[self._unselected.pop(index)] -= 1
        self.selected.append(index)

    def _are_in_time(self, num_places: int, last_step: int) -> bool:
        """Whether no group would miss its last step if this step selects a group with `last_step`, then
        `num_places` others."""
        # The groups whose last step is `due` or earlier, playing ones too, fit into the places up to then:
        # what this step has left, and whole later steps. If that holds for each `due`, they can all be
        # trained on in the order of their last steps. From `last_step` on it holds as before: the selected
        # group is due there itself, so there is one place less and one group less that needs a place.
        num_due = 0
        for due in sorted(step for step in self._num_due if step < last_step):
            num_due += self._num_due[due]
            num_later_steps = max(0, due - self.step)
            if num_due > num_places + num_later_steps * self.num_groups:
                return False
        return True

    def close_step(self) -> list[int]:
        """Removes the selected groups, which the step trains on, and stale groups, which no later step may
        train on. Returns the indices of stale groups. Without `drops_stale`, only a run that was resumed with
        smaller batches has any."""
        for index in self.selected:
            del self._finished[index]
        last_steps = self._playing | self._finished
        stale = [index for index, last_step in last_steps.items() if last_step <= self.step]
        for index in stale:
            self._playing.pop(index, None)
            self._finished.pop(index, None)
            self._unselected.pop(index, None)
        self._num_due = Counter(
            {last_step: num for last_step, num in self._num_due.items() if last_step > self.step}
        )
        self._interrupted = [index for index in self._interrupted if index in self._playing]
        self._is_collecting = False
        self._num_filtered = 0
        return stale

    @property
    def num_missing(self) -> int:
        """Number of groups that the step still lacks."""
        return max(0, self._num_required - len(self.selected))

    @property
    def num_running(self) -> int:
        return len(self._playing) - len(self._interrupted)

    def __len__(self) -> int:
        """Number of groups in the buffer: admitted, and not yet trained on, rejected or dropped."""
        return len(self._playing) + len(self._finished)

    def __contains__(self, index: int) -> bool:
        return index in self._playing or index in self._finished

    def is_gone(self, index: int) -> bool:
        """Whether the group was admitted and has left the buffer: trained on, rejected or dropped."""
        return index < self.next_index and index not in self

    def has_finished(self, index: int) -> bool:
        """Whether the group has finished and is still in the buffer."""
        return index in self._finished

    def restart(self, index: int) -> None:
        """Lets a finished group be played again, with the same last step."""
        self._playing[index] = self._finished.pop(index)
        del self._unselected[index]
        self._interrupted = sorted([*self._interrupted, index])

    def state_dict(self) -> dict[str, Any]:
        """The state between two steps, for `load_state_dict`."""
        return {
            "step": self.step,
            "next_index": self.next_index,
            "num_filtered": self._num_filtered,
            "playing": list(self._playing.items()),
            "finished": list(self._finished.items()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state. Groups that were playing at the time of saving start again, with the same last
        steps."""
        self.step = state["step"]
        self.next_index = state["next_index"]
        self._num_filtered = state["num_filtered"]
        self._playing = dict(state["playing"])
        self._finished = dict(state["finished"])
        self._unselected = dict(self._finished)
        last_steps = self._playing | self._finished
        self._num_due = Counter(last_steps.values())
        self.selected = []
        self._interrupted = sorted(self._playing)

    @property
    def is_exhausted(self) -> bool:
        """Whether every task has been admitted and the buffer is empty."""
        return not self._num_tasks_left and not len(self)

    @property
    def _num_tasks_left(self) -> float:
        return max(0, self._num_tasks - self.next_index)

    @property
    def _num_required(self) -> int:
        """`num_groups`, or fewer if the tasks or the allowed refills run out."""
        num_available = len(self) + self._num_tasks_left
        return int(min(self.num_groups, self._room, num_available))

    @property
    def _room(self) -> int:
        settings = self.settings
        num_ahead = settings.async_generation_ratio
        if settings.num_batches is not None:
            num_left = settings.num_batches - 1 - self.step
            num_ahead = max(0, min(num_ahead, num_left))
        # Rounded first, since 0.29 × 100 is a little less than 29 in binary.
        num_refills = int(round(settings.max_refill_factor * self.num_groups, 6))
        num_unreplaced = max(0, self._num_filtered - num_refills)
        return max(0, (self._is_collecting + num_ahead) * self.num_groups - num_unreplaced)
