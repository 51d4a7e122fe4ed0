"""What a run keeps of the episodes that it has played."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from turnwise.pipelines.pictures import Pictures
from turnwise.pipelines.token_values import TokenValueRecorder
from turnwise.rollout.journal import Journal
from turnwise.tracking.traces import Traces
from turnwise.types import Group


@dataclass(frozen=True, slots=True)
class EpisodeRecords:
    """`rollouts.jsonl`, with validations `val_rollouts.jsonl`, traces, pictures, and the values of tokens
    that only readers want. What is None isn't kept."""

    journal: Journal
    val_journal: Journal | None
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
        if self.traces:
            self.traces.end_step(step, groups, is_validation=True)
        if self.val_journal:
            self.val_journal.append(step, groups)

    def close(self) -> None:
        """Closes the files, each even if another fails."""
        with ExitStack() as stack:
            stack.callback(self.journal.close)
            if self.val_journal:
                stack.callback(self.val_journal.close)
