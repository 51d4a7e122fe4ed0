"""Warns if a run may learn nothing: checks conditions on metrics of several finished steps, and reports each once, with advice.
A change of training success only counts if it exceeds several standard errors. These are estimated from how neighbouring steps
differ: steps play different tasks, so a binomial error would be too small."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from turnwise.spec.package_tables import read_table
from turnwise.tracking.first_updates import FirstUpdates
from turnwise.types import Group

PAGE = "docs/reward_does_not_rise.md"
MAX_QUOTE = 80
"""Maximum characters of an answer that a sentence quotes."""

FEW, SOME, BLOCK = 3, 5, 10
"""Numbers of consecutive steps that are looked at for a yes-or-no fact, for a level, and for a mean."""
IS_SOLVED = 0.9
"""From this success rate on, the tasks count as solved, and low entropy and equal scores are no problem."""
MOSTLY = 0.9
"""At least this share of the answers counts as nearly all."""
MIN_NATS = 0.1
"""Below this entropy, in nats per response, siblings are nearly always the same."""
BLOWN_FACTOR, BLOWN_NATS = 3.0, 1.0
"""Entropy has blown up above max(BLOWN_FACTOR × lowest, lowest + BLOWN_NATS) per token. Mere exploration doesn't triple it."""
NUM_ERRORS, NUM_RISE_ERRORS, NUM_FOR_NOISE = 5.0, 2.0, 50
"""Standard errors that a fall of success must exceed (the best of hundreds of steps is high by chance too), those that a rise
must exceed, and the number of recent steps that a standard error is estimated from."""
LOST_SHARE, LOST_SUCCESS = 0.25, 0.1
"""Success counts as lost only if it fell by more than LOST_SHARE × its best value, and by more than LOST_SUCCESS."""
FELL_BY = 0.05
"""Held-out success must fall by more than this, however narrow its confidence interval."""
DRIFT_NATS, DRIFT_ESS = 0.1, 0.5
"""Importance ratios are noise above this mean log-prob gap (nats per token), or below this share of effective samples (ESS)."""
CUT = 0.5
"""There is a warning if at least this share of the responses ends at the length limit."""
RANDOM_AFTER, RANDOM_MARGIN, RISE_MARGIN = 20, 0.05, 0.03
"""Steps before success is compared with a random player's, the margin by which it must be better, and the rise that must be
ruled out before the comparison: a run that learns slowly begins at a random player's success, too."""

RANDOM_SUCCESS = "random_player/success"
"""The metric of the random player's success, in the row of the step after which it played."""
Row = Mapping[str, float]
Figures = defaultdict[str, float]
"""A step's metrics. A metric that wasn't measured reads as NaN, so every comparison with it is false."""
TEXTS = read_table(__file__, "health.yaml")


class Outcomes(NamedTuple):
    """The success rate of some episodes, and their number."""

    success: float
    num_episodes: int


class Validation(NamedTuple):
    """Held-out success, and how many training steps came before."""

    num_steps: int
    success: float
    num_episodes: float


class History:
    """What the conditions look at: the metrics of the last `BLOCK` steps, and summaries of all steps so far."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.points: deque[Figures] = deque(maxlen=BLOCK)
        self.success: list[float] = []
        """The success rate of every step; NaN if it wasn't measured."""
        self.validations: list[Validation] = []
        self.has_differed = False
        """Whether any step so far had a group whose episodes scored differently."""
        self.most_usable, self.lowest_entropy = 0.0, math.inf
        self.first_updates = FirstUpdates()
        self.best: Sequence[float] = ()
        """The successes of the `BLOCK` consecutive steps with the highest mean."""

    def add(self, row: Row, groups: Sequence[Group] = ()) -> None:
        if (held_out := _mean_of(row, "val/env/", "/success")) == held_out:
            self.validations.append(Validation(self.num_steps, held_out, row.get("val/num_episodes", 0.0)))
        if not any(name.startswith("rollout/") for name in row):
            return
        self.num_steps += 1
        self.points.append(_figures(row))
        self.first_updates.add(self.points[-1], groups)
        self.success.append(self.points[-1]["success"])
        self.has_differed = self.has_differed or not self.points[-1]["alike"]
        self.most_usable = max(self.most_usable, self.points[-1]["usable"])
        recent = [point["entropy"] for point in self.last(SOME)]
        if len(recent) == SOME and all(map(math.isfinite, recent)):
            self.lowest_entropy = min(self.lowest_entropy, fmean(recent))
        block = self.successes(-BLOCK)
        if len(block) == BLOCK and (not self.best or fmean(block) > fmean(self.best)):
            self.best = block

    def last(self, number: int) -> Sequence[Figures]:
        """The last `number` steps (at most `BLOCK`), or nothing if fewer steps have ended."""
        return list(self.points)[-number:] if len(self.points) >= number else ()

    def successes(self, start: int | None = None, stop: int | None = None) -> Sequence[float]:
        """The known successes of a slice of the steps."""
        return [success for success in self.success[start:stop] if math.isfinite(success)]

    def error(self, num_steps: int = BLOCK) -> float:
        """Standard error of the difference between two means of `num_steps` success rates each; inf if fewer than two are
        known. It is estimated from differences of neighbouring steps, so that no trend inflates it."""
        recent = self.successes(-NUM_FOR_NOISE)
        return math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(recent)) / num_steps) if len(recent) > 1 else math.inf

    def is_solved(self, number: int) -> bool:
        """Whether nearly all episodes of the last `number` steps succeeded; False if no success of these steps is known."""
        known = self.successes(-number)
        return bool(known) and fmean(known) >= IS_SOLVED


Check = Callable[[History], str | None]
"""A check for one problem: returns a sentence if the run has the problem, else None. `health.yaml` has heading and advice."""


def broken_start(history: History) -> str | None:
    return history.first_updates.problem()


def groups_alike(history: History) -> str | None:
    # If groups differed before, or nearly all succeed, they may be alike by chance for a while.
    last = history.last(BLOCK if history.has_differed or history.is_solved(FEW) else FEW)
    if not last or not all(point["alike"] for point in last):
        return None
    score = _mean(last, "rollout/score/mean")
    if last[-1]["is_critic"]:
        return f"in {len(last)} steps every episode scored {score:g}, so that all the critic can pass on is its own error"
    seen = f"in {len(last)} steps no token had an advantage: in each group all episodes scored alike (mean score {score:g})"
    if all(point["actor/updates_left_out"] > 0 for point in last):
        return f"{seen}; the updates were left out"
    return f"{seen}; what moves the weights is only the KL or entropy term of the loss"


def answers_unparsable(history: History) -> str | None:
    last = history.last(FEW - 1)
    if last and all(point["usable"] < 1 - MOSTLY for point in last):
        was = "; earlier they did, so an update broke them: lower the learning rate" if history.most_usable > MOSTLY else ""
        return f"in {len(last)} steps {1 - _mean(last, 'usable'):.0%} of the answers held no valid action{was}"
    return None


def entropy_collapsed(history: History) -> str | None:
    last = history.last(SOME)
    if not last or history.is_solved(SOME):
        return None
    # The entropy may be that of rollouts, since an update that is left out measures none. NaN compares as false.
    if all(point["entropy"] * point["rollout/response_length/mean"] < MIN_NATS for point in last):
        return f"the entropy is {_mean(last, 'entropy'):.4f} nats per token: siblings answer alike"
    return None


def entropy_blown_up(history: History) -> str | None:
    last, low = history.last(SOME), history.lowest_entropy
    bound = max(BLOWN_FACTOR * low, low + BLOWN_NATS)
    if last and all(point["entropy"] > bound for point in last):
        return f"the entropy rose from {low:.2f} to {last[-1]['entropy']:.2f} nats per token: the policy is turning into noise"
    return None


def success_lost(history: History) -> str | None:
    now, best = history.successes(-BLOCK), history.best
    if len(now) < BLOCK or not best:
        return None
    lost = fmean(best) - fmean(now)
    if lost > max(LOST_SUCCESS, LOST_SHARE * fmean(best)) and lost > NUM_ERRORS * history.error():
        return f"success fell from {fmean(best):.2f} to {fmean(now):.2f} (means of {BLOCK} steps)"
    return None


def gradient(history: History) -> str | None:
    last = history.last(FEW)
    if not last or any(not point["actor/backward_steps"] for point in last):
        return None
    if all(point["actor/skipped_steps"] >= point["actor/backward_steps"] for point in last):
        return f"in {len(last)} steps no gradient was finite, and every optimiser step was left out"
    if all(point["actor_train/grad_norm"] == 0 and not point["alike"] for point in last):
        return f"in {len(last)} steps the gradient was 0 though tokens had advantages"
    return None


def log_probs_drift(history: History) -> str | None:
    last = history.last(SOME)
    if not last or not all(
        point["actor/train_infer_diff_token_mean"] > DRIFT_NATS or point["actor/train_infer_ess"] < DRIFT_ESS for point in last
    ):
        return None
    ages = [point["actor/staleness_mean"] for point in last if point["actor/staleness_mean"] > 0]
    old = f"; the tokens are {fmean(ages):.1f} policy versions old" if ages else ""
    seen = _mean(last, "actor/train_infer_diff_token_mean")
    return f"sampler and trainer differ by {seen:.3f} nats per token (ESS {_mean(last, 'actor/train_infer_ess'):.2f}){old}"


def responses_cut(history: History) -> str | None:
    last = history.last(SOME)
    if last and all(point["rollout/length_limited"] >= CUT for point in last) and not history.is_solved(SOME):
        return f"{_mean(last, 'rollout/length_limited'):.0%} of the responses end at their length limit instead of an end token"
    return None


def validation_falls(history: History) -> str | None:
    if len(history.validations) < 3:
        return None
    *earlier, before, now = history.validations
    best = max(earlier, key=lambda validation: validation.success)
    # Two validations in a row must be lower, since the best of many is high by chance.
    fell = min(best.success - before.success, best.success - now.success)
    pooled = fmean((best.success, before.success, now.success))
    error = math.sqrt(max(pooled * (1 - pooled), 0.0) * (1 / max(best.num_episodes, 1) + 1 / max(now.num_episodes, 1)))
    then, lately = history.successes(max(best.num_steps - BLOCK, 0), best.num_steps or BLOCK), history.successes(-BLOCK)
    if fell <= max(FELL_BY, 2 * error) or min(len(then), len(lately)) < SOME:
        return None
    if fmean(lately) - fmean(then) <= NUM_RISE_ERRORS * history.error():
        return None
    validation = f"validation success fell from {best.success:.2f} to {now.success:.2f}"
    return f"{validation} while training success rose from {fmean(then):.2f} to {fmean(lately):.2f}"


class _RandomPlayer:
    """A random player that plays at most once, when its success is needed first."""

    def __init__(self, play: Callable[[], Outcomes | None]) -> None:
        self._play = play
        self._outcomes: Outcomes | None = None
        self._has_played = self._is_new = False

    def outcomes(self) -> Outcomes | None:
        if not self._has_played:
            self._outcomes = self._play()
            self._has_played = self._is_new = True
        return self._outcomes

    def newly_played(self) -> Outcomes | None:
        """The outcomes, once after they were played; else None."""
        is_new, self._is_new = self._is_new, False
        return self._outcomes if is_new else None


def _no_better_than(player: _RandomPlayer) -> Check:
    """Makes the check against a random player, who plays when a rise by `RISE_MARGIN` is ruled out."""

    def no_better_than_random(history: History) -> str | None:
        half = history.num_steps // 2
        known, now = history.successes(0, half), history.successes(-half)
        if history.num_steps < RANDOM_AFTER or len(known) < half or len(now) < half:
            return None
        if fmean(now) - fmean(known) + NUM_RISE_ERRORS * history.error(half) > RISE_MARGIN:
            return None
        random = player.outcomes()
        if random is None or fmean(now) > random.success + RANDOM_MARGIN:
            return None
        own = f"so far success hasn't risen: it is {fmean(now):.2f} after {history.num_steps} steps, and a player that draws"
        drawn = f"its actions at random has {random.success:.2f} ({random.num_episodes} episodes)"
        return f"{own} {drawn}; it may rise yet, but nothing shows skill until then"

    return no_better_than_random


CHECKS: tuple[Check, ...] = (
    broken_start,
    answers_unparsable,
    groups_alike,
    entropy_collapsed,
    entropy_blown_up,
    success_lost,
    gradient,
    log_probs_drift,
    responses_cut,
    validation_falls,
)

CONSEQUENCES = (
    "answers_unparsable",
    "groups_alike",
    "entropy_collapsed",
    "entropy_blown_up",
    "success_lost",
    "responses_cut",
    "no_better_than_random",
)
"""Conditions that follow from `broken_start`. Their advice is wrong for a policy that was broken by its first updates."""
LENGTH_KEY = "max_tokens_per_step"
"""The key that limits a response in an environment."""


class Health:
    """Reports each condition once. `play_at_random` returns the success of a player with random actions, None if unknown.
    `length_key` is the key of the config that limits a response."""

    def __init__(self, play_at_random: Callable[[], Outcomes | None] = lambda: None, length_key: str = LENGTH_KEY) -> None:
        self._length_key = length_key
        self._random = _RandomPlayer(play_at_random)
        self._checks = (*CHECKS, _no_better_than(self._random))
        self._history = History()
        self._said: set[str] = set()

    def replay(self, rows: Iterable[Row]) -> None:
        """Adds the rows of the steps before a resume. Conditions that were reported then aren't reported again."""
        for row in rows:
            self._history.add(row)
            self._said |= {name.removeprefix("health/") for name in row if name.startswith("health/")}

    def measured(self) -> dict[str, float]:
        """The metrics that the checks themselves have measured in the step that was seen last."""
        outcomes = self._random.newly_played()
        return {RANDOM_SUCCESS: outcomes.success} if outcomes is not None else {}

    def see(self, step: int, row: Row, groups: Sequence[Group] = ()) -> dict[str, str]:
        """Adds a step's row and returns the sentences now due, by condition. If answers are unparsable, it quotes `groups`."""
        self._history.add(row, groups)
        sentences = {}
        for check in self._checks:
            name = check.__name__
            if name in CONSEQUENCES and broken_start.__name__ in self._said and self._history.first_updates.is_broken:
                continue
            if name in self._said or (seen := check(self._history)) is None:
                continue
            self._said.add(name)
            shown = _quote(groups) if check is answers_unparsable else ""
            heading, advice = TEXTS[name]["heading"], TEXTS[name]["advice"]
            advice = advice.format(length_key=self._length_key)
            sentences[name] = f'after step {step + 1}: {seen}{shown}. {advice} See {PAGE}, "{heading}"'
        return sentences


def _figures(row: Row) -> Figures:
    """The row, with NaN for missing metrics and with added figures: `is_critic`; `alike` (whether all advantages are 0, or with
    a critic all scores equal, or the filter left no group); `usable` (share of valid answers); `success` (mean over tags);
    `entropy` (−mean log-prob if not measured). A missing mean score is replaced by the mean score before the group filter."""
    figures: Figures = defaultdict(lambda: math.nan, row)
    figures.setdefault("rollout/score/mean", figures["rollout/unfiltered_score/mean"])
    # The advantages of a critic are never all 0: its errors are in them.
    figures["is_critic"] = "critic/values/mean" in row
    spread = "rollout/score" if figures["is_critic"] else "critic/advantages"
    low, high = figures[f"{spread}/min"], figures[f"{spread}/max"]
    # If a filter has left nothing, all groups were rejected.
    is_empty = row.get("rollout/filtered", 0) > 0 and "rollout/score/mean" not in row
    figures["alike"] = is_empty or (low == high and (bool(figures["is_critic"]) or low == 0))
    usable = (figures["rollout/parsed"], _mean_of(row, "env/", "/action_is_valid"))
    figures["usable"] = min((share for share in usable if math.isfinite(share)), default=math.nan)
    figures["success"] = _mean_of(row, "env/", "/success")
    # An update that is left out measures no entropy.
    figures["entropy"] = row.get("actor/entropy", -figures["rollout/log_prob/mean"])
    return figures


def _mean(points: Iterable[Figures], name: str) -> float:
    return fmean(point[name] for point in points)


def _mean_of(row: Row, start: str, end: str) -> float:
    values = [value for name, value in row.items() if name.startswith(start) and name.endswith(end)]
    return fmean(values) if values else math.nan


def _quote(groups: Sequence[Group]) -> str:
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    failed = [turn for turn in turns if turn.action is None or turn.metrics.get("action_is_valid", 1.0) < 0.5]
    if not failed:
        return ""
    text = failed[0].text
    return f" (one of them: {text[:MAX_QUOTE]!r}{'…' if len(text) > MAX_QUOTE else ''})"
