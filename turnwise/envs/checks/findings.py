"""Pure functions from the episodes of an examination to findings."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean, median_high
from typing import Literal

from turnwise.envs.checks.checked_env import CallResult, CallTimes
from turnwise.envs.contract import reduce_metric
from turnwise.types import Reduction

Verdict = Literal["ok", "warning", "error", "skipped"]
CHARACTERS_PER_TOKEN = 8
"""More characters per token than any usual text has."""
COOPERATIVE_S = 1e-3
"""Maximum mean seconds of a step on the event loop, with constructor and `reset` spread over the steps."""
TAIL_S = 1e-2
"""Maximum 99th percentile of the seconds of a step on the event loop."""
BLOCK_S = 0.1
"""Maximum seconds of constructor and `reset` together on the event loop, where they hold up all other
episodes."""
NUM_WAITING = 16
"""Maximum number of environments in a worker suggested for those that wait for something other than a
processor."""
_MIN_CPU_S = 1e-6  # avoids a division by 0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    verdict: Verdict
    result: str
    advice: str = ""
    """What to change; empty if nothing is wrong."""
    trace: tuple[str, ...] = ()
    """The calls that led to the exception, innermost last."""


def judged(check: str, result: str, advice: str = "") -> Finding:
    """A finding that is a warning if there is advice, else `ok`."""
    return Finding(check, "warning" if advice else "ok", result, advice)


@dataclass(slots=True)
class CheckedEpisode:
    """One episode of an examination."""

    seed: int
    call_results: list[CallResult]
    """The result of `reset`, then one result per action."""
    actions: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[CallResult]:
        return self.call_results[1:]

    @property
    def score(self) -> float:
        return sum(step.reward for step in self.steps)

    def is_success(self, reductions: Mapping[str, Reduction]) -> bool:
        """Whether `success` is above ½ or, without this metric, the score is above 0. `turnwise eval` counts
        this way."""
        values = reported_successes(self.steps)
        if not values:
            return self.score > 0
        return reduce_metric(values, reductions["success"]) > 0.5


def reported_successes(steps: Iterable[CallResult]) -> list[float]:
    """The values of the metric `success`, in the order of the steps."""
    metrics = chain.from_iterable(step.metrics for step in steps)
    return [value for name, value in metrics if name == "success"]


def starts(call_results: Sequence[CallResult]) -> Finding:
    """Whether different seeds give different starts."""
    num_starts = len(call_results)
    num_distinct = len({call_result.content for call_result in call_results})
    result = f"{num_distinct} of {num_starts} starts are distinct ({num_distinct / num_starts:.0%})"
    advice = ""
    if num_distinct == 1 and num_starts > 1:
        advice = "draw the start from reset's seed, unless there is one task only"
        if not have_keys(call_results):
            advice += "; if a hidden part differs, state_key() can tell"
    return judged("other seeds", result, advice)


def have_keys(call_results: Iterable[CallResult]) -> bool:
    return any(call_result.state_key is not None for call_result in call_results)


def splits(
    train: Sequence[CallResult],
    val: Sequence[CallResult],
    takes_split: bool,
    is_given: bool = False,
    plays_all: bool = False,
) -> Finding:
    """Whether any start of validation has the same state as a start of training: the same state key or,
    without keys, the same look. `is_given`: the arguments fix one `split` for both. `plays_all`: the
    environment has too few tasks to hold any out."""
    states = {start.state for start in train}
    contents = {start.content for start in train}
    num_shared = sum(start.state in states for start in val)
    num_alike = sum(start.content in contents for start in val)
    are_keyed = have_keys([*train, *val])
    criterion = "by state_key" if are_keyed else "by what they show, as there is no state_key"
    result = f"{num_shared} of {len(val)} validation starts occur among {len(train)} of training, {criterion}"
    if plays_all:
        advice = (
            "training and validation tasks are the same: success in validation says nothing about new tasks"
        )
        return judged("train/val", f"{result}: too few tasks to hold any out", advice)
    if takes_split and is_given:
        advice = "remove `split` from the arguments, if the environment can hold tasks out"
        return judged("train/val", f"{result}; `split` is given, so only seeds differ", advice)
    if not takes_split:
        advice = "give the constructor a parameter `split` (train or val) that keeps tasks apart by content"
        return judged("train/val", f"{result}; no `split`: only seeds differ", advice)
    advice = "let `split` decide by a hash of the content, not by seed"
    if are_keyed and num_alike:
        return Finding("train/val", "error", result, advice)
    if are_keyed and num_shared:
        advice = f"{advice}, or put all that tells tasks apart into state_key()"
        return judged("train/val", f"{result}; they look different", advice)
    if num_shared:
        advice = (
            "if they differ in what isn't shown, add state_key(), by which starts are compared; if "
            f"not, {advice}"
        )
        return judged("train/val", result, advice)
    return judged("train/val", result)


def rewards(episodes: Sequence[CheckedEpisode]) -> Finding:
    """The range of rewards and scores, and how often they aren't 0."""
    values = _step_rewards(episodes)
    scores = [episode.score for episode in episodes]
    share_of_steps = _share(map(bool, values))
    share_of_episodes = _share(map(bool, scores))
    result = (
        f"{_range(values)} a step, {_range(scores)} an episode; "
        f"not 0 in {share_of_steps:.1%} of steps, {share_of_episodes:.0%} of episodes"
    )
    advice = ""
    if min(scores) == max(scores) and len(scores) > 1:
        advice = (
            "equal scores teach nothing: use easier tasks, rewards on the way, or a start from demonstrations"
        )
    return judged("rewards", result, advice)


def unreadable(answers: Sequence[tuple[str, CallResult]], episodes: Sequence[CheckedEpisode]) -> Finding:
    """Whether a text that is no action earns more than most actions, so that models learn it. `answers`: (its
    name, result)."""
    effects = []
    for name, answer in answers:
        end = " and the end" if answer.is_over else ""
        effects.append(f"{name} gets reward {answer.reward:.3g}{end}")
    result = ", ".join(effects)
    if not episodes:
        return judged("no action", f"{result}; what actions get wasn't examined")
    rewards_of = {
        "actions": _step_rewards(episodes),
        "episodes": [episode.score for episode in episodes],
    }
    for name, answer in answers:
        # An action that ends the episode also avoids all later penalties.
        rivals = "episodes" if answer.is_over else "actions"
        rival_rewards = rewards_of[rivals]
        worse = _share(answer.reward > reward for reward in rival_rewards)
        if worse > 0.5:
            result += f"; {name} pays better than {worse:.0%} of {rivals}, which get {_range(rival_rewards)}"
            advice = (
                f"give it less than {min(rival_rewards):.3g}, such as by a format_penalty: training would "
                "learn to say nothing"
            )
            return judged("no action", result, advice)
    return judged("no action", result)


def metrics(episodes: Sequence[CheckedEpisode], reductions: Mapping[str, Reduction]) -> Finding:
    """Lists the declared metrics. Warns if one of them is never reported, or if `success` isn't declared."""
    steps = chain.from_iterable(episode.steps for episode in episodes)
    reported = {name for name, _ in chain.from_iterable(step.metrics for step in steps)}
    unreported = [name for name in reductions if name not in reported]
    if unreported:
        advice = "report them in info['metrics'] of step, or remove them from metric_reductions"
        return judged("metrics", f"never reported: {', '.join(unreported)}", advice)
    result = ", ".join(f"{name} ({reduction})" for name, reduction in reductions.items()) or "none"
    if "success" in reductions:
        return judged("metrics", result)
    advice = "declare `success` (last); until then every positive score counts as one"
    return judged("metrics", f"{result}, no `success`", advice)


def observations(
    episodes: Sequence[CheckedEpisode],
    count_tokens: Callable[[str], int] | None = None,
    budget: int | None = None,
) -> Finding:
    """The lengths of observations in characters and tokens, compared with `budget`, the maximum tokens of a
    context."""
    texts_by_episode = [_shown_texts(episode) for episode in episodes]
    lengths = [len(text) for text in chain.from_iterable(texts_by_episode)]
    result = f"{fmean(lengths):.0f} characters a turn, at most {max(lengths)}"
    if count_tokens is not None:
        counts_by_episode = [[count_tokens(text) for text in texts] for texts in texts_by_episode]
        counts = list(chain.from_iterable(counts_by_episode))
        longest_episode = max(map(sum, counts_by_episode))
        result += f"; {fmean(counts):.0f} tokens, at most {max(counts)}; an episode at most {longest_episode}"
        if budget:
            result += f" of {budget}"
        if budget and max(counts) >= budget:
            advice = "one observation fills the whole context: shorten it, or raise sequence_length"
            return Finding("observations", "error", result, advice)
        if budget and longest_episode > budget:
            advice = (
                "episodes will be cut by sequence_length: shorten observations, raise it, or use mode: step"
            )
            return judged("observations", result, advice)
    elif budget and max(lengths) > CHARACTERS_PER_TOKEN * budget:
        advice = (
            f"it hardly fits into a context of {budget} tokens: shorten it, or count them with --tokenizer "
            "DIR"
        )
        return judged("observations", result, advice)
    num_empty = sum(not view.text.strip() and not view.images for view in _views(episodes))
    if num_empty:
        return judged("observations", f"{result}; {num_empty} are empty", "show the model something")
    return judged("observations", result)


def lengths(episodes: Sequence[CheckedEpisode], max_steps: int) -> Finding:
    """Lengths of episodes, and what ends them."""
    counts = [len(episode.actions) for episode in episodes]
    last_steps = [episode.call_results[-1] for episode in episodes]
    terminated = _share(step.is_terminated for step in last_steps)
    truncated = _share(step.is_truncated and not step.is_terminated for step in last_steps)
    unended = max(1 - terminated - truncated, 0.0)
    result = (
        f"{fmean(counts):.1f} steps, at most {max(counts)}; {terminated:.0%} terminated, "
        f"{truncated:.0%} truncated, {unended:.0%} cut by max_steps {max_steps}"
    )
    advice = ""
    if not terminated and not truncated:
        advice = (
            "no episode came to its end: raise max_steps (--max-steps here), or check that step ever says "
            "terminated"
        )
    return judged("episodes", result, advice)


def player(
    check: str,
    episodes: Sequence[CheckedEpisode],
    reductions: Mapping[str, Reduction],
    beaten: Sequence[CheckedEpisode] | None = None,
) -> Finding:
    """How often a player succeeds, and its mean score. `beaten`, for experts only, holds episodes of a random
    player: the finding is a warning if the expert never succeeds, or its mean score doesn't exceed the random
    player's."""
    num_episodes = len(episodes)
    num_successes = sum(episode.is_success(reductions) for episode in episodes)
    score = fmean(episode.score for episode in episodes)
    result = (
        f"success {num_successes / num_episodes:.2f} ({num_successes} of {num_episodes}), score {score:.3g} "
        "on average"
    )
    is_weak = beaten is not None and not num_successes
    if beaten:
        is_weak |= score <= fmean(episode.score for episode in beaten)
    advice = "it should beat a random player: check rewards, `success`, max_steps and the expert"
    return judged(check, result, advice if is_weak else "")


def state_keys(episodes: Sequence[CheckedEpisode]) -> Finding:
    """Whether state keys and observations correspond one to one, among the observations before an action."""
    turns = [((view.text, view.images), view.state_key) for view in _views(episodes)]
    keys_of: dict[Hashable, set[Hashable]] = defaultdict(set)
    looks_of: dict[Hashable, set[Hashable]] = defaultdict(set)
    for look, key in turns:
        keys_of[look].add(key)
        looks_of[key].add(look)
    if set(looks_of) <= {None}:
        result = f"none, so the observation is the key: {len(keys_of)} of them in {len(turns)} turns"
        return Finding("state_key", "skipped", result)
    result = f"{len(looks_of)} keys, {len(keys_of)} observations in {len(turns)} turns"
    merged = _share(len(looks_of[key]) > 1 for _, key in turns)
    if merged:
        advice = "GiGPO would compare different states: put all that the observation shows into the key"
        return judged("state_key", f"{result}; {merged:.0%} of turns share a key and look different", advice)
    hidden = _share(len(keys_of[look]) > 1 for look, _ in turns)
    if hidden:
        result = f"{result}; {hidden:.0%} of turns look the same but are in different states"
        advice = "the model can't tell these states apart: show more, or accept that it must remember"
        return judged("state_key", result, advice)
    return judged("state_key", f"{result}, one to one")


def times(clock: CallTimes, mean_steps: float, num_cores: int) -> Finding:
    """The seconds of `step` and of a start (constructor and `reset`), and whether calls may run on the event
    loop."""
    step = clock["step"]
    reset = clock["reset"]
    constructor = clock["the constructor"]
    ordered = sorted(step.wall_s)
    if not ordered:
        return Finding("step time", "skipped", "never called")
    mean_s = fmean(ordered)
    p99_s = ordered[int(0.99 * len(ordered))]
    start_s = median_high(reset.wall_s) + fmean(constructor.wall_s)
    result = f"mean {_time(mean_s)}, p99 {_time(p99_s)}, max {_time(ordered[-1])}; a start {_time(start_s)}"
    computing_s = fmean(step.cpu_s)
    if step.is_async and computing_s <= COOPERATIVE_S:
        return judged("step time", f"{result}: coroutines")
    spread_s = mean_s + start_s / max(mean_steps, 1.0)
    if not step.is_async and spread_s <= COOPERATIVE_S and p99_s <= TAIL_S and start_s <= BLOCK_S:
        return judged("step time", f"{result}: cooperative")
    cpu_s = sum(step.cpu_s) + sum(reset.cpu_s)
    wall_s = sum(step.wall_s) + sum(reset.wall_s)
    if cpu_s < 0.5 * wall_s:
        # More environments than keep one core busy would only wait for each other.
        num_each = min(NUM_WAITING, int(wall_s / max(cpu_s, _MIN_CPU_S)))
        advice = (
            f"it mostly waits: max_env_num_per_worker: {num_each} puts {num_each} environments into each "
            "worker process, where their calls wait at once"
        )
    else:
        advice = (
            "it mostly computes: make it quicker, or put it into worker processes, one a core: "
            f"max_env_num_per_worker = num_env_groups × group_size / {num_cores}"
        )
    result = f"{result}; a step computes for {_time(computing_s)}"
    return judged("step time", f"{result}: blocking", advice)


def _time(seconds: float) -> str:
    """A time in µs, ms or s.

    >>> _time(2.34e-6), _time(0.0142), _time(3.0), _time(0.0)
    ('2.3 µs', '14 ms', '3.0 s', '0.0 µs')
    """
    units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    unit = next((unit for unit, size in units.items() if seconds >= size), "µs")
    count = seconds / units[unit]
    num_decimals = 1 if count < 10 else 0
    return f"{count:.{num_decimals}f} {unit}"


def _step_rewards(episodes: Iterable[CheckedEpisode]) -> list[float]:
    steps = chain.from_iterable(episode.steps for episode in episodes)
    return [step.reward for step in steps]


def _views(episodes: Iterable[CheckedEpisode]) -> list[CallResult]:
    """What was shown before an action."""
    call_results = chain.from_iterable(episode.call_results for episode in episodes)
    return [call_result for call_result in call_results if not call_result.is_over]


def _shown_texts(episode: CheckedEpisode) -> list[str]:
    """The text of each turn, the first with what opens the prompt."""
    start, *steps = episode.call_results
    opening = " ".join((*start.prompt, start.text))
    return [opening, *(step.text for step in steps)]


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3g} … {max(values):.3g}"


def _share(flags: Iterable[bool]) -> float:
    return fmean(map(float, flags))
