"""Counts the ended episodes of the batch that a scheduler collects."""

from functools import partial

from turnwise.rollout.buffer import GroupBuffer
from turnwise.rollout.settings import SchedulerSettings
from turnwise.runtime.stopwatch import Work


class BatchProgress:
    """`work` is the current batch as a piece of work, in episodes."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.work = Work("episodes", 0)
        self._group_size = settings.group_size + settings.has_greedy_sibling
        self._is_ordered = settings.is_ordered
        self._num_ended: dict[int, int] = {}  # index of each playing group → number of its ended episodes

    def begin(self, buffer: GroupBuffer) -> None:
        """Begins a batch of the groups that `buffer` lacks."""
        num_episodes = buffer.num_missing * self._group_size
        self.work = Work("episodes", num_episodes, count=partial(self._num_done, buffer))

    def end(self) -> None:
        """Counts the batch as complete."""
        self.work.finished = self.work.total
        self.work.count = None

    def begin_group(self, index: int) -> None:
        self._num_ended[index] = 0

    def end_episode(self, index: int) -> None:
        self._num_ended[index] += 1

    def end_group(self, index: int) -> None:
        del self._num_ended[index]

    def _num_done(self, buffer: GroupBuffer) -> int:
        """Number of ended episodes in the selected groups, and in as many playing groups as the batch lacks.
        Groups of later batches play too, so a count of all episodes wouldn't tell when the batch is
        complete."""
        num_missing = buffer.num_missing
        num_ended_of_playing = [min(num, self._group_size) for num in self._num_ended.values()]
        if not self._is_ordered:
            num_ended_of_playing.sort(reverse=True)
        num_ended = len(buffer.selected) * self._group_size + sum(num_ended_of_playing[:num_missing])
        return min(num_ended, self.work.total - (num_missing > 0))
