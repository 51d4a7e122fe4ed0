"""The report of a finished step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.types import Group


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report of one step of a run. `step` counts from 1: it is the number of steps done."""

    step: int
    metrics: Mapping[str, float]
    """All metrics, by the names of `docs/metrics.md`."""
    groups: Sequence[Group]
    """The groups that the step trained on; empty in the final report."""
    checkpoint: Path | None
    """The folder of the checkpoint that was saved after this step, if any."""
    is_final: bool = False
    """Whether this is the final report: after the last step, with the final validation if the run
    validates."""

    @property
    def validation(self) -> dict[str, float] | None:
        """The metrics (`val/…`) of the validation before this step, or of the final one; None if there was
        none."""
        return {name: value for name, value in self.metrics.items() if name.startswith("val/")} or None
