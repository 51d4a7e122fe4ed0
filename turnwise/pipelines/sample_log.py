"""Shows the best and the worst episode of a step turn by turn in the run's log, and the best in brief on the
terminal."""

import logging
from collections.abc import Callable, Sequence

from turnwise.protocols import SilentObserver, TurnPlace
from turnwise.report.view.notebook import summary as headline
from turnwise.rollout.observed import retold
from turnwise.types import Group, IntArray, Trajectory, Turn

logger = logging.getLogger(__name__)

MAX_PROMPT = 4000
"""Maximum characters of the first prompt of a shown episode."""
MAX_TEXT = 1000
"""Maximum characters of any other text of it."""
MAX_TURNS = 12
"""Maximum turns of it."""

DecodeArray = Callable[[IntArray], str]


def log_samples(step: int, groups: Sequence[Group], decode: DecodeArray) -> tuple[str, str]:
    """Logs the trajectories with the highest and the lowest score, turn by turn. Returns a few lines about
    the best one, and the whole logged text; both are empty if nothing was played. `decode` should keep
    special tokens."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    played = [trajectory for trajectory in trajectories if trajectory.turns]
    if not played:
        return "", ""
    best = max(played, key=lambda trajectory: trajectory.score)
    worst = min(played, key=lambda trajectory: trajectory.score)
    shown = [("best", best)]
    if worst is not best:
        shown.append(("worst", worst))
    texts = []
    for title, trajectory in shown:
        texts.append(f"step {step + 1}, {title} trajectory\n{describe_trajectory(trajectory, decode)}")
        logger.info("%s", texts[-1])
    return f"best episode of step {step + 1}: {summary(best)}", "\n".join(texts)


def describe_trajectory(trajectory: Trajectory, decode: DecodeArray) -> str:
    """The episode as text: the first prompt, then each turn's observation, answer, action and reward, and the
    turn's mean advantage over tokens if it has been computed. Long texts are clipped; of many turns the
    middle ones are left out."""
    text = _EpisodeText(trajectory, decode)
    retold(trajectory, text)
    return "\n".join(text.lines)


class _EpisodeText(SilentObserver):
    """Writes down the turns of an episode; of many turns, those in the middle are left out."""

    def __init__(self, trajectory: Trajectory, decode: DecodeArray) -> None:
        self._advantages = trajectory.advantages_by_turn
        self._has_actions = trajectory.task.row is None  # a row has no environment that would take an action
        self._left_out = _middle(len(trajectory.turns), MAX_TURNS)
        first_prompt = decode(trajectory.turns[0].prompt_ids)
        self.lines = [headline(trajectory), *_quoted(first_prompt, MAX_PROMPT)]

    def rewarded(self, place: TurnPlace, turn: Turn) -> None:
        number = place.number
        if number in self._left_out:
            if number == self._left_out.start:
                self.lines.append(f"  … {len(self._left_out)} turns are left out")
            return
        self.lines.append(f"  turn {number + 1}")
        if number:
            self.lines += _quoted(turn.observation, MAX_TEXT)
        self.lines.append(f"    → {_clipped(repr(turn.text), MAX_TEXT)}")
        self.lines.append(f"      {self._gained(number, turn)}")

    def _gained(self, number: int, turn: Turn) -> str:
        gained = f"reward {turn.reward:g}"
        if number in self._advantages and self._advantages[number].size:
            gained += f", advantage {self._advantages[number].mean():+.3f}"
        if not self._has_actions:
            return gained
        if turn.action is None:
            return f"no action could be parsed; {gained}"
        return f"action {_clipped(repr(turn.action), MAX_TEXT)}; {gained}"


def summary(trajectory: Trajectory, num_turns: int = 6) -> str:
    """The episode with one line per turn. Of more than `num_turns` turns, those in the middle are left
    out."""
    lines = [headline(trajectory)]
    left_out = _middle(len(trajectory.turns), num_turns)
    for number, turn in enumerate(trajectory.turns):
        if number not in left_out:
            observation = _clipped(" / ".join(turn.observation.split("\n")), 60)
            line = f"  {observation} → {_clipped(repr(turn.text), 60)}"
            if turn.reward:
                line += f"  {turn.reward:+g}"
            lines.append(line)
        elif number == left_out.start:
            lines.append(f"  … {len(left_out)} turns")
    return "\n".join(lines)


def _middle(num_turns: int, max_turns: int) -> range:
    """The numbers of the turns that are left out, so that `max_turns` lines show an episode: none if all fit,
    else all but the first and the last ones, with a line for those between them."""
    if num_turns <= max_turns:
        return range(0)
    num_first = max_turns // 2
    num_last = max_turns - num_first - 1
    return range(num_first, num_turns - num_last)


def _quoted(text: str, max_characters: int) -> list[str]:
    return [f"    | {line}" for line in _clipped(text, max_characters).splitlines()]


def _clipped(text: str, max_characters: int) -> str:
    num_hidden = len(text) - max_characters
    if num_hidden <= 0:
        return text
    return f"{text[:max_characters]}… {num_hidden:,} more characters"
