"""Settings of a rollout scheduler."""

from dataclasses import dataclass

from turnwise.errors import counted


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How many episodes run at once, how far they run ahead of training, and how failed episodes and filtered
    groups are replaced. If more than the share `max_failed_fraction` of a batch's episodes fail after
    `max_env_retries` retries, the run ends with the most frequent error. At most `max_refill_factor` ×
    (groups of a batch) filtered groups are replaced."""

    group_size: int
    max_concurrent_groups: int
    max_env_retries: int = 2
    max_failed_fraction: float = 0.2
    episode_timeout_s: float | None = None
    max_refill_factor: float = 3.0
    has_greedy_sibling: bool = False
    """Whether each group has one more episode, played greedily, as a baseline."""
    group_size_redundancy: int = 0
    """Extra siblings that start with each group. The first `group_size` to end without failure make up the
    group."""
    async_generation_ratio: int = 0
    """Number of batches that may be played ahead of training; 0 = synchronous."""
    drops_stale: bool = False
    """Whether a group is dropped if it ends too late for the last step that may train on it. Otherwise that
    step waits."""
    is_ordered: bool = False
    """Whether batches are filled with groups in the order of their indices instead of the order in which they
    end."""
    num_batches: int | None = None
    """Number of batches of the run; nothing is played for batches beyond it. None = no limit."""

    @property
    def num_concurrent_episodes(self) -> int:
        return self.max_concurrent_groups * (
            self.group_size + self.group_size_redundancy + self.has_greedy_sibling
        )

    def describe(self, group_filter: str = "") -> str:
        """These settings in a few words; `group_filter` is the filter's name, "" if there is none."""
        parts = [f"{counted(self.num_concurrent_episodes, 'episode')} at once"]
        if self.group_size_redundancy:
            parts.append(
                f"the first {self.group_size} of {self.group_size + self.group_size_redundancy} to end"
            )
        if self.has_greedy_sibling:
            parts.append("one of each group greedy")
        if group_filter:
            parts.append(
                f"groups filtered by {group_filter}, at most {self.max_refill_factor:g} × the batch refilled"
            )
        if self.async_generation_ratio:
            order = "by index" if self.is_ordered else "as they end"
            late = "dropped" if self.drops_stale else "waited for"
            parts.append(
                f"up to {self.async_generation_ratio} batches ahead of training, taken {order}, the oldest "
                f"{late}"
            )
        return ", ".join(parts)
