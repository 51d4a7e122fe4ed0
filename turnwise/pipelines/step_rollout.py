"""The rollouts of one training step, in parts."""

from collections.abc import Iterator

from turnwise.algorithms.correction import staleness_metrics
from turnwise.config import AgenticConfig
from turnwise.rollout.measure import rollout_metrics, system_metrics
from turnwise.rollout.source import Part, RolloutSource
from turnwise.tracking.run_log import RunLog
from turnwise.types import Group, Metric, samples_of


class StepRollout:
    """Iterates over the parts of a step's batch: one, or several where training is streamed.

    Waiting for a part is timed as the phase `rollout`; the phase `total` lasts until the last part is trained on.
    """

    def __init__(self, source: RolloutSource, log: RunLog, config: AgenticConfig) -> None:
        self.groups: list[Group] = []
        """Groups of the parts so far."""
        self.elapsed_s = 0.0
        """Seconds from the first wait to the end of training on the last part."""
        self.source = source
        self._log = log
        self._parts = source.parts(config.rollout_batch_size, config.is_streamed)

    def __iter__(self) -> Iterator[Part]:
        is_last = False
        with self._log.phase("total") as clock:
            while not is_last:
                with self._log.phase("rollout"):
                    part = next(self._parts)
                is_last = part.is_last
                self.groups += part.groups
                yield part
            self._parts.close()
        self.elapsed_s = clock.elapsed_s

    def measure(self, step: int) -> list[Metric]:
        """Metrics of the batch that was played for this step."""
        samples = samples_of(self.groups)
        return [
            *rollout_metrics(self.groups, self.source.rejected),
            *staleness_metrics(samples, version=step),
            *system_metrics(samples, self.elapsed_s, num_trajectories=self.source.num_episodes),
        ]
