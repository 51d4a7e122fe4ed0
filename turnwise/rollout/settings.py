"""Settings of the scheduler of rollouts."""

from dataclasses import dataclass

from turnwise.errors import counted


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How many episodes run at once, how far they run ahead of training, and how failures and filtered groups are replaced.
    `max_failed_fraction` is a share of the trajectories of one batch. Beyond it the run stops with the most frequent error. At
    most `max_refill_factor` × (groups of a batch) filtered groups are replaced by new ones."""

    group_size: int
    max_concurrent_groups: int
    max_env_retries: int = 2
    max_failed_fraction: float = 0.2
    episode_timeout_s: float | None = None
    max_refill_factor: float = 3.0
    has_greedy_sibling: bool = False
    """Whether each group has one more episode, played greedily, as a baseline."""
    group_size_redundancy: int = 0
    """Extra siblings that start beyond the group's size; the first to end fill the group."""
    async_generation_ratio: int = 0
    """Batches that may be played ahead of training; 0 = synchronous."""
    drops_stale: bool = False
    """Whether groups that training would have to wait for are dropped instead."""
    is_ordered: bool = False
    """Whether groups are taken in the order of their index instead of as they end."""
    num_batches: int | None = None
    """Number of batches of the run, after which nothing is played ahead."""

    @property
    def num_concurrent_episodes(self) -> int:
        return self.max_concurrent_groups * (self.group_size + self.group_size_redundancy + self.has_greedy_sibling)

    def describe(self, group_filter: str = "") -> str:
        """How groups are played, in a few words; `group_filter` is the filter's name."""
        parts = [f"{counted(self.num_concurrent_episodes, 'episode')} at once"]
        if self.group_size_redundancy:
            parts.append(f"the first {self.group_size} of {self.group_size + self.group_size_redundancy} to end")
        parts += ["one of each group greedy"] if self.has_greedy_sibling else []
        if group_filter:
            parts.append(f"groups filtered by {group_filter}, at most {self.max_refill_factor:g} × the batch refilled")
        if self.async_generation_ratio:
            order = "by index" if self.is_ordered else "as they end"
            late = "dropped" if self.drops_stale else "waited for"
            parts.append(f"up to {self.async_generation_ratio} batches ahead of training, taken {order}, the oldest {late}")
        return ", ".join(parts)
