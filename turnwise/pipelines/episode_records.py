"""What a run keeps of the episodes that it has played."""

from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.pipelines.pictures import Pictures
from turnwise.pipelines.token_values import TokenValueRecorder
from turnwise.rollout.journal import Journal
from turnwise.tracking.traces import Traces
from turnwise.types import Group


@dataclass(frozen=True, slots=True)
class EpisodeRecords:
    """The journal, traces, pictures, and the values of tokens that only readers want. Without `traces`
    none are kept."""

    journal: Journal
    traces: Traces | None
    pictures: Pictures
    token_values: TokenValueRecorder

    def note_values(self, groups: Sequence[Group]) -> None:
        """Notes the values of the tokens of these groups, before the update."""
        self.token_values.note(groups)

    def add(self, step: int, groups: Sequence[Group]) -> None:
        """Writes the groups of a training step, rejected ones included."""
        self.journal.append(step, groups)
        if self.traces:
            self.traces.end_step(step, groups)

    def add_validation(self, step: int, groups: Sequence[Group]) -> None:
        """Writes the groups of a validation."""
        self.pictures.write(f"step-{step}", groups)
        self.journal.append_validation(step, groups)
        if self.traces:
            self.traces.end_step(step, groups, is_validation=True)

    def close(self) -> None:
        """Closes the files."""
        self.journal.close()
