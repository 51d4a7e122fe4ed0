"""Warns if a run may learn nothing: reports each condition on the metrics of several finished steps once,
with advice."""

from collections.abc import Callable, Iterable, Sequence

from turnwise.tracking.conditions import BROKEN_START, CONDITIONS, PAGE, Condition, Outcomes, random_condition
from turnwise.tracking.history import History, Row
from turnwise.types import Group

MAX_QUOTE = 80
"""Maximum characters of an answer that a sentence quotes."""
RANDOM_SUCCESS = "random_player/success"
"""The metric of the random player's success, in the row of the step after which it played."""
LENGTH_KEY = "max_tokens_per_step"
"""The key that limits a response in an environment."""


class _RandomPlayer:
    """A random player that plays at most once, when its success is needed first."""

    def __init__(self, play: Callable[[], Outcomes | None]) -> None:
        self._play = play
        self._outcomes: Outcomes | None = None
        self._has_played = False
        self._is_new = False

    def outcomes(self) -> Outcomes | None:
        if not self._has_played:
            self._outcomes = self._play()
            self._has_played = True
            self._is_new = True
        return self._outcomes

    def newly_played(self) -> Outcomes | None:
        """The outcomes, once after they were played; else None."""
        if not self._is_new:
            return None
        self._is_new = False
        return self._outcomes


class Health:
    """Reports each condition once. `play_at_random` returns the success of a player with random actions, None
    if unknown. `length_key` is the key of the config that limits a response. `run` is the run's folder, for
    the command that shows its episodes."""

    def __init__(
        self,
        play_at_random: Callable[[], Outcomes | None] = lambda: None,
        length_key: str = LENGTH_KEY,
        run: str = "",
    ) -> None:
        self._length_key = length_key
        self._run = run
        self._random = _RandomPlayer(play_at_random)
        self._conditions = (*CONDITIONS, random_condition(self._random.outcomes))
        self._history = History()
        self._reported: set[str] = set()

    def restore(self, rows: Iterable[Row]) -> None:
        """Adds the rows of the steps before a resume. Conditions that were reported then aren't reported
        again."""
        for row in rows:
            self._history.add(row)
            self._reported |= {name.removeprefix("health/") for name in row if name.startswith("health/")}

    def measured(self) -> dict[str, float]:
        """The metrics that the checks themselves have measured in the step that was seen last."""
        outcomes = self._random.newly_played()
        if outcomes is None:
            return {}
        return {RANDOM_SUCCESS: outcomes.success}

    def see(
        self,
        step: int,
        row: Row,
        groups: Sequence[Group] = (),
    ) -> dict[str, str]:
        """Adds a step's row and returns the sentences now due, by condition. If answers are unparsable, it
        quotes `groups`."""
        self._history.add(row, groups)
        sentences = {}
        for condition in self._conditions:
            if condition.key in self._reported or self._is_explained(condition):
                continue
            sentence = condition.check(self._history)
            if sentence is None:
                continue
            self._reported.add(condition.key)
            quote = _quote(groups) if condition.quotes_answers else ""
            advice = condition.advice(self._length_key)
            sentences[condition.key] = (
                f'after step {step + 1}: {sentence}{quote}. {advice} See {PAGE}, "{condition.heading}"'
            )
            if self._run:
                sentences[condition.key] += (
                    f"; to look: turnwise view {self._run} --text{_episode(step, groups)}"
                )
        return sentences

    def _is_explained(self, condition: Condition) -> bool:
        """Whether the condition follows from the updates that broke the policy, which were reported."""
        is_broken = BROKEN_START in self._reported and self._history.first_updates.is_broken
        return is_broken and condition.follows_broken_start


def _episode(step: int, groups: Sequence[Group]) -> str:
    """The option of `turnwise view` that shows the step's worst episode; "" if nothing was played."""
    played = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    if not played:
        return ""
    group, worst = min(played, key=lambda pair: pair[1].score)
    return f" --trajectory {step + 1}/{group.index}/{worst.sibling}"


def _quote(groups: Sequence[Group]) -> str:
    for group in groups:
        for trajectory in group.trajectories:
            for turn in trajectory.turns:
                is_valid = turn.metrics.get("action_is_valid", 1.0) >= 0.5
                if turn.action is None or not is_valid:
                    ellipsis = "…" if len(turn.text) > MAX_QUOTE else ""
                    return f" (one of them: {turn.text[:MAX_QUOTE]!r}{ellipsis})"
    return ""
