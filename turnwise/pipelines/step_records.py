"""What is written of the episodes of a step: rollouts.jsonl, and traces."""

from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.rollout.journal import Journal
from turnwise.tracking.traces import Traces
from turnwise.types import Group


@dataclass(frozen=True, slots=True)
class StepRecords:
    """The files and stores that get the groups of each step. `traces` is None if nothing is traced."""

    journal: Journal
    traces: Traces | None = None

    def append(self, step: int, groups: Sequence[Group], is_validation: bool = False) -> None:
        """Writes the groups of a step, or of the validation before it."""
        if not is_validation:
            self.journal.append(step, groups)
        if self.traces is not None:
            self.traces.end_step(step, groups, is_validation)

    def close(self) -> None:
        """Closes the journal. Traces end with the run's log."""
        self.journal.close()
