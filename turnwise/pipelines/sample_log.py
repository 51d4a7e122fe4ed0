"""A readable sample of a step's episodes in the run's log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from turnwise.types import Group, Trajectory

logger = logging.getLogger(__name__)


def log_samples(step: int, groups: Sequence[Group]) -> None:
    """Logs the best and the worst trajectory of the step, turn by turn."""
    played = [t for g in groups for t in g.trajectories if t.turns]
    if not played:
        return
    best, worst = max(played, key=lambda t: t.score), min(played, key=lambda t: t.score)
    for title, trajectory in (("best", best), ("worst", worst))[: 1 if best is worst else 2]:
        logger.info("step %d, %s trajectory\n%s", step, title, describe(trajectory))


def describe(trajectory: Trajectory) -> str:
    """The episode as text: what the model saw, what it answered, what it got."""
    lines = [f"{trajectory.task.id} sibling {trajectory.sibling}: score {trajectory.score:g}, {trajectory.status}"]
    if trajectory.limit:
        lines[0] += f" by {trajectory.limit}"
    for number, turn in enumerate(trajectory.turns, start=1):
        lines.append(f"  turn {number}")
        lines += [f"    | {line}" for line in turn.observation.splitlines()]
        lines.append(f"    → {turn.text!r} (action {turn.action!r}, reward {turn.reward:g})")
    return "\n".join(lines)
