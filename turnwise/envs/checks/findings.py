"""Pure functions from the episodes of an examination to findings."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
"""Number of concurrent calls suggested for an environment that waits for something other than a processor."""


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
        values = [value for step in self.steps for name, value in step.metrics if name == "success"]
        return reduce_metric(values, reductions["success"]) > 0.5 if values else self.score > 0


def starts(call_results: Sequence[CallResult]) -> Finding:
    """Whether different seeds give different starts."""
    distinct = len({call_result.content for call_result in call_results})
    result = f"{distinct} of {len(call_results)} starts are distinct ({distinct / len(call_results):.0%})"
    advice = ""
    if distinct == 1 and len(call_results) > 1:
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
    states, contents = {start.state for start in train}, {start.content for start in train}
    num_shared = sum(start.state in states for start in val)
    num_alike = sum(start.content in contents for start in val)
    are_keyed = have_keys([*train, *val])
    compared = "by state_key" if are_keyed else "by what they show, as there is no state_key"
    result = f"{num_shared} of {len(val)} validation starts occur among {len(train)} of training, {compared}"
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
        return judged(
            "train/val",
            f"{result}; they look different",
            f"{advice}, or put all that tells tasks apart into state_key()",
        )
    if num_shared:
        advice = (
            f"if they differ in what isn't shown, add state_key(), by which starts are compared; if "
            f"not, {advice}"
        )
        return judged("train/val", result, advice)
    return judged("train/val", result)


def rewards(episodes: Sequence[CheckedEpisode]) -> Finding:
    """The range of rewards and scores, and how often they aren't 0."""
    values, scores = [step.reward for e in episodes for step in e.steps], [e.score for e in episodes]
    spread = f"{min(values):.3g} … {max(values):.3g} a step, {min(scores):.3g} … {max(scores):.3g} an episode"
    result = (
        f"{spread}; not 0 in {_share(map(bool, values)):.1%} of steps, {_share(map(bool, scores)):.0%} "
        f"of episodes"
    )
    is_equal = min(scores) == max(scores) and len(scores) > 1
    advice = (
        "equal scores teach nothing: use easier tasks, rewards on the way, or a start from demonstrations"
    )
    return judged("rewards", result, advice if is_equal else "")


def unreadable(answers: Sequence[tuple[str, CallResult]], episodes: Sequence[CheckedEpisode]) -> Finding:
    """Whether a text that is no action earns more than most actions, so that models learn it. `answers`: (its
    name, result)."""
    result = ", ".join(
        f"{name} gets reward {m.reward:.3g}{' and the end' if m.is_over else ''}" for name, m in answers
    )
    if not episodes:
        return judged("no action", f"{result}; what actions get wasn't examined")
    steps, scores = [step.reward for e in episodes for step in e.steps], [e.score for e in episodes]
    for name, call_result in answers:
        # An action that ends the episode also avoids all later penalties.
        what, beside = ("episodes", scores) if call_result.is_over else ("actions", steps)
        worse = _share(call_result.reward > value for value in beside)
        if worse > 0.5:
            result += (
                f"; {name} pays better than {worse:.0%} of {what}, which get {min(beside):.3g} … "
                f"{max(beside):.3g}"
            )
            advice = (
                f"give it less than {min(beside):.3g}, such as by a format_penalty: training would "
                f"learn to say nothing"
            )
            return judged("no action", result, advice)
    return judged("no action", result)


def metrics(episodes: Sequence[CheckedEpisode], reductions: Mapping[str, Reduction]) -> Finding:
    """Lists the declared metrics. Warns if one of them is never reported, or if `success` isn't declared."""
    reported = {name for episode in episodes for step in episode.steps for name, _ in step.metrics}
    result = ", ".join(f"{name} ({reduction})" for name, reduction in reductions.items()) or "none"
    if silent := [name for name in reductions if name not in reported]:
        advice = "report them in info['metrics'] of step, or take them out of metric_reductions"
        return judged("metrics", f"never reported: {', '.join(silent)}", advice)
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
    shown = [
        [" ".join((*m.prompt, m.text)) if i == 0 else m.text for i, m in enumerate(e.call_results)]
        for e in episodes
    ]
    lengths = [len(text) for texts in shown for text in texts]
    result = f"{fmean(lengths):.0f} characters a turn, at most {max(lengths)}"
    if count_tokens is not None:
        tokens = [[count_tokens(text) for text in texts] for texts in shown]
        flat, longest = [n for of_episode in tokens for n in of_episode], max(map(sum, tokens))
        result += f"; {fmean(flat):.0f} tokens, at most {max(flat)}; an episode at most {longest}"
        result += f" of {budget}" if budget else ""
        if budget and max(flat) >= budget:
            advice = "one observation fills the whole context: shorten it, or raise sequence_length"
            return Finding("observations", "error", result, advice)
        if budget and longest > budget:
            advice = (
                "episodes will be cut by sequence_length: shorten observations, raise it, or use mode: step"
            )
            return judged("observations", result, advice)
    elif budget and max(lengths) > CHARACTERS_PER_TOKEN * budget:
        advice = (
            f"it hardly fits into a context of {budget} tokens: shorten it, or count them with "
            f"--tokenizer DIR"
        )
        return judged("observations", result, advice)
    num_empty = sum(
        not m.text.strip() and not m.images for e in episodes for m in e.call_results if not m.is_over
    )
    if num_empty:
        return judged("observations", f"{result}; {num_empty} are empty", "show the model something")
    return judged("observations", result)


def lengths(episodes: Sequence[CheckedEpisode], max_steps: int) -> Finding:
    """Lengths of episodes, and what ends them."""
    counts, last = (
        [len(episode.actions) for episode in episodes],
        [episode.call_results[-1] for episode in episodes],
    )
    ended, cut = (
        _share(m.is_terminated for m in last),
        _share(m.is_truncated and not m.is_terminated for m in last),
    )
    result = (
        f"{fmean(counts):.1f} steps, at most {max(counts)}; {ended:.0%} terminated, {cut:.0%} truncated, "
    )
    result += f"{max(1 - ended - cut, 0.0):.0%} cut by max_steps {max_steps}"
    advice = (
        "no episode came to its end: raise max_steps (--max-steps here), or check that step ever says "
        "terminated"
    )
    return judged("episodes", result, "" if ended + cut else advice)


def player(
    check: str,
    episodes: Sequence[CheckedEpisode],
    reductions: Mapping[str, Reduction],
    beaten: Sequence[CheckedEpisode] | None = None,
) -> Finding:
    """How often a player succeeds, and its mean score. `beaten`, for experts only, holds episodes of a random
    player: the finding is a warning if the expert never succeeds, or its mean score doesn't exceed the random
    player's."""
    num_successes, score = sum(e.is_success(reductions) for e in episodes), fmean(e.score for e in episodes)
    result = (
        f"success {num_successes / len(episodes):.2f} ({num_successes} of {len(episodes)}), score "
        f"{score:.3g} on average"
    )
    is_weak = beaten is not None and (
        not num_successes or (beaten and score <= fmean(e.score for e in beaten))
    )
    advice = "it should beat a random player: check rewards, `success`, max_steps and the expert"
    return judged(check, result, advice if is_weak else "")


def state_keys(episodes: Sequence[CheckedEpisode]) -> Finding:
    """Whether state keys and observations correspond one to one, among the observations before an action."""
    seen = [((m.text, m.images), m.state_key) for e in episodes for m in e.call_results if not m.is_over]
    keys_of: dict[Hashable, set[Hashable]] = defaultdict(set)
    views_of: dict[Hashable, set[Hashable]] = defaultdict(set)
    for view, key in seen:
        keys_of[view].add(key)
        views_of[key].add(view)
    if set(views_of) <= {None}:
        result = f"none, so the observation is the key: {len(keys_of)} of them in {len(seen)} turns"
        return Finding("state_key", "skipped", result)
    result = f"{len(views_of)} keys, {len(keys_of)} observations in {len(seen)} turns"
    if merged := _share(len(views_of[key]) > 1 for _, key in seen):
        advice = "GiGPO would compare different states: put all that the observation shows into the key"
        return judged("state_key", f"{result}; {merged:.0%} of turns share a key and look different", advice)
    if hidden := _share(len(keys_of[view]) > 1 for view, _ in seen):
        advice = "the model can't tell these states apart: show more, or accept that it must remember"
        return judged(
            "state_key", f"{result}; {hidden:.0%} of turns look the same but are in different states", advice
        )
    return judged("state_key", f"{result}, one to one")


def times(clock: CallTimes, mean_steps: float, num_cores: int) -> Finding:
    """The seconds of `step` and of a start (constructor and `reset`), and whether calls may run on the event
    loop."""
    step, reset, made = clock["step"], clock["reset"], clock["the constructor"]
    ordered = sorted(step.wall_s)
    if not ordered:
        return Finding("step time", "skipped", "never called")
    mean_s, p99_s = fmean(ordered), ordered[int(0.99 * len(ordered))]
    start_s = median_high(reset.wall_s) + fmean(made.wall_s)
    result = f"mean {_time(mean_s)}, p99 {_time(p99_s)}, max {_time(ordered[-1])}; a start {_time(start_s)}"
    if step.is_async:
        return judged("step time", f"{result}: coroutines")
    if mean_s + start_s / max(mean_steps, 1.0) <= COOPERATIVE_S and p99_s <= TAIL_S and start_s <= BLOCK_S:
        return judged("step time", f"{result}: cooperative")
    if sum(step.cpu_s) + sum(reset.cpu_s) < 0.5 * (sum(step.wall_s) + sum(reset.wall_s)):
        advice = (
            f"it mostly waits: max_env_num_per_worker: {NUM_WAITING} lets {NUM_WAITING} calls wait at once"
        )
    else:
        advice = (
            f"it mostly computes: make it quicker, or set max_env_num_per_worker: {num_cores} if it "
            f"releases Python's lock"
        )
    return judged("step time", f"{result}: blocking", advice)


def _time(seconds: float) -> str:
    """A time in µs, ms or s.

    >>> _time(2.34e-6), _time(0.0142), _time(3.0), _time(0.0)
    ('2.3 µs', '14 ms', '3.0 s', '0.0 µs')
    """
    unit, size = next(
        ((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("µs", 1e-6)
    )
    count = seconds / size
    return f"{count:.1f} {unit}" if count < 10 else f"{count:.0f} {unit}"


def _share(flags: Iterable[bool]) -> float:
    return fmean(map(float, flags))
