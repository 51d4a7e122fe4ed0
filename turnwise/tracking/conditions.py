"""The conditions under which a run may learn nothing: how several finished steps show each, and what to do
about it."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import NamedTuple

from turnwise.tracking.history import BLOCK, SOME, Figures, History

PAGE = "docs/reward_does_not_rise.md"
BROKEN_START = "broken_start"
FEW = 3
"""Number of consecutive steps that are looked at for a yes-or-no fact."""
MOSTLY = 0.9
"""At least this share of the answers counts as nearly all."""
MIN_NATS = 0.1
"""Below this entropy, in nats per response, siblings are nearly always the same."""
BLOWN_FACTOR = 3.0
BLOWN_NATS = 1.0
"""Entropy has blown up above max(BLOWN_FACTOR × lowest, lowest + BLOWN_NATS) per token. Mere exploration
doesn't triple it."""
NUM_ERRORS = 5.0
"""Standard errors that a fall of success must exceed, since the best of hundreds of steps is high by chance
too."""
NUM_RISE_ERRORS = 2.0
"""Standard errors that a rise of success must exceed."""
LOST_SHARE = 0.25
LOST_SUCCESS = 0.1
"""Success counts as lost only if it fell by more than LOST_SHARE × its best value, and by more than
LOST_SUCCESS."""
FELL_BY = 0.05
"""Held-out success must fall by more than this, however narrow its confidence interval."""
DRIFT_NATS = 0.1
"""Importance ratios are noise above this mean log-prob gap (nats per token)."""
DRIFT_ESS = 0.5
"""Importance ratios are noise below this share of effective samples (ESS)."""
CUT = 0.5
"""There is a warning if at least this share of the responses ends at the length limit."""
RANDOM_AFTER = 20
"""Steps before success is compared with a random player's."""
RANDOM_MARGIN = 0.05
"""The margin by which success must be better than a random player's."""
RISE_MARGIN = 0.03
"""The rise that must be ruled out before the comparison: a run that learns slowly begins at a random player's
success, too."""


class Outcomes(NamedTuple):
    """The success rate of some episodes, and their number."""

    success: float
    num_episodes: int


Check = Callable[[History], str | None]
"""A check for one problem: returns a sentence if the run has the problem, else None."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A problem that a run may have: its `key` in metrics, the check for it, the heading of `PAGE` that
    explains it, and `advice` that is given the key of the config that limits a response."""

    key: str
    check: Check
    heading: str
    advice: Callable[[str], str]
    follows_broken_start: bool = False
    """Whether the condition follows from `broken_start`. Its advice is wrong for a policy that the first
    updates broke."""
    quotes_answers: bool = False
    """Whether the sentence quotes an answer."""


def broken_start(history: History) -> str | None:
    return history.first_updates.problem()


def groups_alike(history: History) -> str | None:
    # If groups differed before, or nearly all succeed, they may be alike by chance for a while.
    may_be_chance = history.has_differed or history.is_solved(FEW)
    points = history.last(BLOCK if may_be_chance else FEW)
    if not points or not all(point["alike"] for point in points):
        return None
    score = _mean(points, "rollout/score/mean")
    if points[-1]["is_critic"]:
        every = f"in {len(points)} steps every episode scored {score:g}"
        return f"{every}, so that all the critic can pass on is its own error"
    alike = f"in each group all episodes scored alike (mean score {score:g})"
    sentence = f"in {len(points)} steps no token had an advantage: {alike}"
    if all(point["actor/updates_left_out"] > 0 for point in points):
        return f"{sentence}; the updates were left out"
    return f"{sentence}; what moves the weights is only the KL or entropy term of the loss"


def answers_unparsable(history: History) -> str | None:
    points = history.last(FEW - 1)
    if not points or not all(point["usable"] < 1 - MOSTLY for point in points):
        return None
    share = 1 - _mean(points, "usable")
    sentence = f"in {len(points)} steps {share:.0%} of the answers held no valid action"
    if history.most_usable > MOSTLY:
        return f"{sentence}; earlier they did, so an update broke them: lower the learning rate"
    return sentence


def entropy_collapsed(history: History) -> str | None:
    points = history.last(SOME)
    if not points or history.is_solved(SOME):
        return None
    # The entropy may be that of rollouts, since an update that is left out measures none. NaN compares as
    # false.
    if all(point["entropy"] * point["rollout/response_length/mean"] < MIN_NATS for point in points):
        return f"the entropy is {_mean(points, 'entropy'):.4f} nats per token: siblings answer alike"
    return None


def entropy_blown_up(history: History) -> str | None:
    points = history.last(SOME)
    low = history.lowest_entropy
    bound = max(BLOWN_FACTOR * low, low + BLOWN_NATS)
    if not points or not all(point["entropy"] > bound for point in points):
        return None
    high = points[-1]["entropy"]
    return f"the entropy rose from {low:.2f} to {high:.2f} nats per token: the policy is turning into noise"


def success_lost(history: History) -> str | None:
    recent = history.successes(-BLOCK)
    if len(recent) < BLOCK or not history.best:
        return None
    best_mean = fmean(history.best)
    recent_mean = fmean(recent)
    fall = best_mean - recent_mean
    least_fall = max(LOST_SUCCESS, LOST_SHARE * best_mean)
    if fall > least_fall and fall > NUM_ERRORS * history.error():
        return f"success fell from {best_mean:.2f} to {recent_mean:.2f} (means of {BLOCK} steps)"
    return None


def gradient(history: History) -> str | None:
    points = history.last(FEW)
    if not points or any(not point["actor/backward_steps"] for point in points):
        return None
    if all(point["actor/skipped_steps"] >= point["actor/backward_steps"] for point in points):
        return f"in {len(points)} steps no gradient was finite, and every optimiser step was left out"
    if all(point["actor_train/grad_norm"] == 0 and not point["alike"] for point in points):
        return f"in {len(points)} steps the gradient was 0 though tokens had advantages"
    return None


def log_probs_drift(history: History) -> str | None:
    points = history.last(SOME)
    if not points or not all(map(_drifts, points)):
        return None
    nats = _mean(points, "actor/train_infer_diff_token_mean")
    ess = _mean(points, "actor/train_infer_ess")
    sentence = f"sampler and trainer differ by {nats:.3f} nats per token (ESS {ess:.2f})"
    ages = [point["actor/staleness_mean"] for point in points if point["actor/staleness_mean"] > 0]
    if ages:
        return f"{sentence}; the tokens are {fmean(ages):.1f} policy versions old"
    return sentence


def _drifts(point: Figures) -> bool:
    is_far = point["actor/train_infer_diff_token_mean"] > DRIFT_NATS
    return is_far or point["actor/train_infer_ess"] < DRIFT_ESS


def responses_cut(history: History) -> str | None:
    points = history.last(SOME)
    if not points or not all(point["rollout/length_limited"] >= CUT for point in points):
        return None
    if history.is_solved(SOME):
        return None
    share = _mean(points, "rollout/length_limited")
    return f"{share:.0%} of the responses end at their length limit instead of an end token"


def validation_falls(history: History) -> str | None:
    if len(history.validations) < 3:
        return None
    *earlier, previous, last = history.validations
    best = max(earlier, key=lambda validation: validation.success)
    # Two validations in a row must be lower, since the best of many is high by chance.
    fall = min(best.success - previous.success, best.success - last.success)
    pooled = fmean((best.success, previous.success, last.success))
    inverses = _inverse(best.num_episodes) + _inverse(last.num_episodes)
    error = math.sqrt(max(pooled * (1 - pooled), 0.0) * inverses)
    if fall <= max(FELL_BY, 2 * error):
        return None
    # The training steps before the best validation, and those before the last one.
    at_best = history.successes(max(best.num_steps - BLOCK, 0), best.num_steps or BLOCK)
    at_last = history.successes(-BLOCK)
    if min(len(at_best), len(at_last)) < SOME:
        return None
    if fmean(at_last) - fmean(at_best) <= NUM_RISE_ERRORS * history.error():
        return None
    validation = f"validation success fell from {best.success:.2f} to {last.success:.2f}"
    return f"{validation} while training success rose from {fmean(at_best):.2f} to {fmean(at_last):.2f}"


def _inverse(num_episodes: float) -> float:
    return 1 / max(num_episodes, 1)


def no_better_than_random(play_at_random: Callable[[], Outcomes | None], history: History) -> str | None:
    """The check against a random player, who plays when a rise by `RISE_MARGIN` is ruled out."""
    half = history.num_steps // 2
    first = history.successes(0, half)
    last = history.successes(-half)
    if history.num_steps < RANDOM_AFTER or len(first) < half or len(last) < half:
        return None
    if fmean(last) - fmean(first) + NUM_RISE_ERRORS * history.error(half) > RISE_MARGIN:
        return None
    random = play_at_random()
    if random is None or fmean(last) > random.success + RANDOM_MARGIN:
        return None
    return (
        f"so far success hasn't risen: it is {fmean(last):.2f} after {history.num_steps} steps, and a "
        f"player that draws its actions at random has {random.success:.2f} ({random.num_episodes} episodes); "
        "it may rise yet, but nothing shows skill until then"
    )


def _mean(points: Iterable[Figures], name: str) -> float:
    return fmean(point[name] for point in points)


CONDITIONS = (
    Condition(
        BROKEN_START,
        check=broken_start,
        heading="The first updates broke the model",
        advice=lambda length_key: (
            "Start again from the model before with a smaller learning rate, a tenth or less; this run "
            "can't recover."
        ),
    ),
    Condition(
        "answers_unparsable",
        check=answers_unparsable,
        heading="Nearly all answers are unparsable",
        advice=lambda length_key: (
            "Teach the format first (turnwise sft), or change action_pattern and the prompt; `turnwise "
            "play` shows an episode."
        ),
        follows_broken_start=True,
        quotes_answers=True,
    ),
    Condition(
        "groups_alike",
        check=groups_alike,
        heading="All groups score alike",
        advice=lambda length_key: (
            "Start from a model that sometimes succeeds, or use other tasks, larger groups, or rewards for "
            "part of the way."
        ),
        follows_broken_start=True,
    ),
    Condition(
        "entropy_collapsed",
        check=entropy_collapsed,
        heading="The entropy collapsed",
        advice=lambda length_key: (
            "Lower the learning rate or raise entropy_loss_coef, and go back to a checkpoint from before."
        ),
        follows_broken_start=True,
    ),
    Condition(
        "entropy_blown_up",
        check=entropy_blown_up,
        heading="The entropy blew up",
        advice=lambda length_key: (
            "Lower entropy_loss_coef to a quarter (or the learning rate), and go back to a checkpoint from "
            "before."
        ),
        follows_broken_start=True,
    ),
    Condition(
        "success_lost",
        check=success_lost,
        heading="Success was lost again",
        advice=lambda length_key: (
            "Go back to an earlier checkpoint with a lower learning rate or a KL to the reference "
            "(use_kl_loss)."
        ),
        follows_broken_start=True,
    ),
    Condition(
        "gradient",
        check=gradient,
        heading="The gradient is 0 or not finite",
        advice=lambda length_key: (
            "Look at frozen parameters and clipping where it is 0, at the learning rate, dtype and "
            "rewards where it isn't finite."
        ),
    ),
    Condition(
        "log_probs_drift",
        check=log_probs_drift,
        heading="Sampler and trainer drift apart",
        advice=lambda length_key: (
            "Lower async_generation_ratio or the learning rate, use train_infer_correction, or sample in "
            "the trainer's dtype."
        ),
    ),
    Condition(
        "responses_cut",
        check=responses_cut,
        heading="Responses end at their length limit",
        advice=lambda length_key: (
            f"Raise {length_key} (and sequence_length), or teach shorter answers that end with the end token."
        ),
        follows_broken_start=True,
    ),
    Condition(
        "validation_falls",
        check=validation_falls,
        heading="Validation falls while training rises",
        advice=lambda length_key: (
            "Train on more different tasks, for fewer steps, or keep the best checkpoint (save_steps, "
            "max_ckpt_to_keep)."
        ),
    ),
)


def random_condition(play_at_random: Callable[[], Outcomes | None]) -> Condition:
    """The condition that compares the run with a player whose actions are random."""
    return Condition(
        "no_better_than_random",
        check=partial(no_better_than_random, play_at_random),
        heading="A random player does as well",
        advice=lambda length_key: (
            "Look at what the model is shown and rewarded for (`turnwise play`), or begin with `turnwise "
            "sft`."
        ),
        follows_broken_start=True,
    )
