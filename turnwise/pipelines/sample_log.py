"""Shows the best and the worst episode of a step turn by turn in the run's log, and the best in brief on the terminal."""

import logging
from collections.abc import Callable, Sequence

from turnwise.trajectory_view import summary as headline
from turnwise.types import Group, IntArray, Trajectory, Turn

logger = logging.getLogger(__name__)

MAX_PROMPT, MAX_TEXT, MAX_TURNS = 4000, 1000, 12
"""Limits of a shown episode: characters of the first prompt, characters of any other text, and turns."""

DecodeArray = Callable[[IntArray], str]


def log_samples(step: int, groups: Sequence[Group], decode: DecodeArray) -> tuple[str, str]:
    """Logs the trajectories with the highest and the lowest score, turn by turn. Returns a few lines about the best one, and
    the whole logged text; both are empty if nothing was played. `decode` should keep special tokens."""
    played = [t for g in groups for t in g.trajectories if t.turns]
    if not played:
        return "", ""
    best, worst = max(played, key=lambda t: t.score), min(played, key=lambda t: t.score)
    texts = []
    for title, trajectory in (("best", best), ("worst", worst))[: 1 if best is worst else 2]:
        texts.append(f"step {step + 1}, {title} trajectory\n{describe_trajectory(trajectory, decode)}")
        logger.info("%s", texts[-1])
    return f"best episode of step {step + 1}: {summary(best)}", "\n".join(texts)


def describe_trajectory(trajectory: Trajectory, decode: DecodeArray) -> str:
    """The episode as text: the first prompt, then each turn's observation, answer, action and reward, and the turn's mean
    advantage over tokens if it has been computed. Long texts are clipped; of many turns the middle ones are left out."""
    first = trajectory.turns[0]
    advantages = trajectory.advantages_by_turn
    lines = [headline(trajectory), *_quoted(decode(first.prompt_ids), MAX_PROMPT)]
    for number, turn in _shortened(list(enumerate(trajectory.turns)), MAX_TURNS):
        if turn is None:
            lines.append(f"  … {number} turns are left out")
            continue
        gained = f"reward {turn.reward:g}"
        if number in advantages and advantages[number].size:
            gained += f", advantage {advantages[number].mean():+.3f}"
        lines.append(f"  turn {number + 1}")
        lines += [] if turn is first else _quoted(turn.observation, MAX_TEXT)
        lines.append(f"    → {_clipped(repr(turn.text), MAX_TEXT)}")
        if trajectory.task.row is None:  # a row has no environment that would take an action
            action = "no action could be parsed" if turn.action is None else f"action {_clipped(repr(turn.action), MAX_TEXT)}"
            gained = f"{action}; {gained}"
        lines.append(f"      {gained}")
    return "\n".join(lines)


def summary(trajectory: Trajectory, num_turns: int = 6) -> str:
    """The episode with one line per turn. Of more than `num_turns` turns, those in the middle are left out."""
    lines = [headline(trajectory)]
    for number, turn in _shortened(list(enumerate(trajectory.turns)), num_turns):
        if turn is None:
            lines.append(f"  … {number} turns")
        else:
            seen = _clipped(" / ".join(turn.observation.split("\n")), 60)
            lines.append(f"  {seen} → {_clipped(repr(turn.text), 60)}" + (f"  {turn.reward:+g}" if turn.reward else ""))
    return "\n".join(lines)


def _shortened(turns: Sequence[tuple[int, Turn]], max_turns: int) -> list[tuple[int, Turn | None]]:
    """At most `max_turns` entries: all turns, or the first and last ones with `(number left out, None)` between them."""
    if len(turns) <= max_turns:
        return list(turns)
    head = max_turns // 2
    tail = max_turns - head - 1
    return [*turns[:head], (len(turns) - head - tail, None), *turns[len(turns) - tail :]]


def _quoted(text: str, max_characters: int) -> list[str]:
    return [f"    | {line}" for line in _clipped(text, max_characters).splitlines()]


def _clipped(text: str, max_characters: int) -> str:
    left_out = len(text) - max_characters
    return text if left_out <= 0 else f"{text[:max_characters]}… {left_out:,} more characters"
