"""Findings from the episodes of an examination, as pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from turnwise.envs.checks.call_results import CallResult
from turnwise.envs.contract import reduce_metric
from turnwise.types import Reduction

Verdict = Literal["ok", "warning", "error", "skipped"]
CHARACTERS_PER_TOKEN = 8
"""More than in any usual text."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the verdict."""

    check: str
    verdict: Verdict
    result: str
    advice: str = ""
    """What to change; empty if nothing is wrong."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The numbers behind `result`, for programs."""
    trace: tuple[str, ...] = ()
    """The calls that led to the exception, innermost last."""

    def to_json(self) -> dict[str, Any]:
        row = {"check": self.check, "verdict": self.verdict, "result": self.result, "advice": self.advice}
        return {**row, "figures": dict(self.figures), **({"trace": list(self.trace)} if self.trace else {})}


@dataclass(slots=True)
class CheckedEpisode:
    """One episode as it was seen: the result of `reset`, and one of each action."""

    seed: int
    call_results: list[CallResult] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[CallResult]:
        return self.call_results[1:]

    @property
    def score(self) -> float:
        return sum(step.reward for step in self.steps)

    def is_success(self, reductions: Mapping[str, Reduction]) -> bool:
        """Whether the episode succeeded, as `turnwise eval` counts: by the metric `success`, else by a positive score."""
        values = [dict(step.metrics)["success"] for step in self.steps if "success" in dict(step.metrics)]
        return reduce_metric(values, reductions["success"]) > 0.5 if values else self.score > 0


def starts(call_results: Sequence[CallResult]) -> Finding:
    """Whether other seeds give other starts."""
    distinct = len({content(call_result) for call_result in call_results})
    share = distinct / len(call_results)
    figures = {"num_seeds": len(call_results), "num_distinct": distinct, "share": share}
    result = f"{distinct} of {len(call_results)} starts are distinct ({share:.0%})"
    if distinct == 1 and len(call_results) > 1:
        advice = "draw the start from reset's seed, unless there is one task only"
        return Finding("other seeds", "warning", result, advice, figures)
    return Finding("other seeds", "ok", result, figures=figures)


def splits(
    train: Sequence[CallResult], val: Sequence[CallResult], takes_split: bool, is_given: bool = False, plays_all: bool = False
) -> Finding:
    """Whether validation starts occur among training starts, by content. A `split` that `is_given` is the same for
    both; an environment that `plays_all` has too few tasks to hold any out."""
    known = {content(call_result) for call_result in train}
    num_shared = sum(content(call_result) in known for call_result in val)
    figures = {"takes_split": takes_split, "num_train": len(train), "num_val": len(val), "num_shared": num_shared}
    result = f"{num_shared} of {len(val)} validation starts occur among {len(train)} of training"
    if plays_all:
        advice = "training and validation tasks are the same: success in validation says nothing about new tasks"
        return Finding("train/val", "warning", f"{result}: too few tasks to hold any out", advice, figures)
    if takes_split and is_given:
        advice = "remove `split` from the arguments, if the environment can hold tasks out"
        return Finding("train/val", "warning", f"{result}; `split` is given, so only seeds differ", advice, figures)
    if not takes_split:
        advice = "give the constructor a parameter `split` (train or val) that keeps tasks apart by content"
        return Finding("train/val", "warning", f"{result}; no `split`: only seeds differ", advice, figures)
    if num_shared:
        return Finding("train/val", "error", result, "let `split` decide by a hash of the content, not by seed", figures)
    return Finding("train/val", "ok", result, figures=figures)


def rewards(episodes: Sequence[CheckedEpisode]) -> Finding:
    """Range of the rewards, and how often there is one."""
    values = [step.reward for episode in episodes for step in episode.steps]
    scores = [episode.score for episode in episodes]
    of_steps, of_episodes = _share(value != 0 for value in values), _share(score != 0 for score in scores)
    figures = {
        "min": min(values),
        "max": max(values),
        "nonzero_steps": of_steps,
        "nonzero_episodes": of_episodes,
        "min_score": min(scores),
        "max_score": max(scores),
    }
    spread = f"{min(values):.3g} … {max(values):.3g} a step, {min(scores):.3g} … {max(scores):.3g} an episode"
    result = f"{spread}; not 0 in {of_steps:.1%} of steps, {of_episodes:.0%} of episodes"
    if min(scores) == max(scores) and len(scores) > 1:
        advice = "equal scores teach nothing: use easier tasks, rewards on the way, or a start from demonstrations"
        return Finding("rewards", "warning", result, advice, figures)
    return Finding("rewards", "ok", result, figures=figures)


def unreadable(answers: Sequence[tuple[str, CallResult]], episodes: Sequence[CheckedEpisode]) -> Finding:
    """The reward of text that is no action. It should be less than most actions', or training learns to say such text."""
    told = [f"{name} gets reward {m.reward:.3g}{' and the end' if m.is_over else ''}" for name, m in answers]
    steps, scores = [step.reward for episode in episodes for step in episode.steps], [episode.score for episode in episodes]
    result = ", ".join(told)
    if not steps:
        return Finding("no action", "ok", f"{result}; what actions get wasn't examined")
    for name, call_result in answers:
        # An action that ends the episode also avoids all later penalties.
        what, beside = ("episodes", scores) if call_result.is_over else ("actions", steps)
        worse = _share(call_result.reward > value for value in beside)
        if worse > 0.5:
            result += f"; {name} pays better than {worse:.0%} of {what}, which get {min(beside):.3g} … {max(beside):.3g}"
            advice = f"give it less than {min(beside):.3g}, such as by a format_penalty: training would learn to say nothing"
            return Finding("no action", "warning", result, advice, {"better_than": worse})
    return Finding("no action", "ok", result)


def metrics(episodes: Sequence[CheckedEpisode], reductions: Mapping[str, Reduction]) -> Finding:
    """Which metrics are declared, and which of them are ever reported."""
    reported = {name for episode in episodes for step in episode.steps for name, _ in step.metrics}
    silent = [name for name in reductions if name not in reported]
    figures = {"declared": dict(reductions), "never_reported": silent}
    result = ", ".join(f"{name} ({reduction})" for name, reduction in reductions.items()) or "none"
    if silent:
        advice = "report them in info['metrics'] of step, or take them out of metric_reductions"
        return Finding("metrics", "warning", f"never reported: {', '.join(silent)}", advice, figures)
    if "success" not in reductions:
        advice = "declare `success` (last); until then every positive score counts as one"
        return Finding("metrics", "warning", f"{result}, no `success`", advice, figures)
    return Finding("metrics", "ok", result, figures=figures)


def observations(
    episodes: Sequence[CheckedEpisode], count_tokens: Callable[[str], int] | None = None, budget: int | None = None
) -> Finding:
    """Length of observations: a turn's in characters and tokens, an episode's against the budget of its context."""
    shown = [[" ".join((*m.prompt, m.text)) if i == 0 else m.text for i, m in enumerate(e.call_results)] for e in episodes]
    lengths = [len(text) for texts in shown for text in texts]
    figures: dict[str, Any] = {"mean_characters": _mean(lengths), "max_characters": max(lengths), "budget": budget}
    result = f"{_mean(lengths):.0f} characters a turn, at most {max(lengths)}"
    num_empty = sum(not m.text.strip() and not m.images for e in episodes for m in e.call_results if not m.is_over)
    if count_tokens is not None:
        tokens = [[count_tokens(text) for text in texts] for texts in shown]
        flat, totals = [n for of_episode in tokens for n in of_episode], [sum(of_episode) for of_episode in tokens]
        figures |= {"mean_tokens": _mean(flat), "max_tokens": max(flat), "max_episode_tokens": max(totals)}
        room = f" of {budget}" if budget else ""
        result += f"; {_mean(flat):.0f} tokens, at most {max(flat)}; an episode at most {max(totals)}{room}"
        if budget and max(flat) >= budget:
            advice = "one observation fills the whole context: shorten it, or raise sequence_length"
            return Finding("observations", "error", result, advice, figures)
        if budget and max(totals) > budget:
            advice = "episodes will be cut by sequence_length: shorten observations, raise it, or use mode: step"
            return Finding("observations", "warning", result, advice, figures)
    elif budget and max(lengths) > CHARACTERS_PER_TOKEN * budget:
        advice = f"it hardly fits into a context of {budget} tokens: shorten it, or count them with --tokenizer DIR"
        return Finding("observations", "warning", result, advice, figures)
    if num_empty:
        return Finding("observations", "warning", f"{result}; {num_empty} are empty", "show the model something", figures)
    return Finding("observations", "ok", result, figures=figures)


def lengths(episodes: Sequence[CheckedEpisode], max_steps: int) -> Finding:
    """Length of episodes, and what ends them."""
    counts = [len(episode.actions) for episode in episodes]
    last = [episode.call_results[-1] for episode in episodes]
    ended, cut = _share(m.is_terminated for m in last), _share(m.is_truncated and not m.is_terminated for m in last)
    figures = {"mean": _mean(counts), "max": max(counts), "terminated": ended, "truncated": cut, "cut": 1 - ended - cut}
    rest = max(1 - ended - cut, 0.0)
    result = f"{_mean(counts):.1f} steps, at most {max(counts)}; {ended:.0%} terminated, {cut:.0%} truncated, "
    result += f"{rest:.0%} cut by max_steps {max_steps}"
    if ended + cut == 0:
        advice = "no episode came to its end: raise max_steps (--max-steps here), or check that step ever says terminated"
        return Finding("episodes", "warning", result, advice, figures)
    return Finding("episodes", "ok", result, figures=figures)


def player(check: str, episodes: Sequence[CheckedEpisode], reductions: Mapping[str, Reduction]) -> Finding:
    """How often a player succeeds."""
    num_successes = sum(episode.is_success(reductions) for episode in episodes)
    score = _mean([episode.score for episode in episodes])
    figures = {"num_episodes": len(episodes), "success": num_successes / len(episodes), "mean_score": score}
    result = f"success {num_successes / len(episodes):.2f} ({num_successes} of {len(episodes)}), score {score:.3g} on average"
    return Finding(check, "ok", result, figures=figures)


def expert(
    random: Sequence[CheckedEpisode], scripted: Sequence[CheckedEpisode], reductions: Mapping[str, Reduction]
) -> Finding:
    """How often the scripted player succeeds: more often than the random one, if there was one."""
    found = player("scripted play", scripted, reductions)
    score = found.figures["mean_score"]
    if found.figures["success"] == 0 or (random and score <= _mean([episode.score for episode in random])):
        advice = "it should beat a random player: check rewards, `success`, max_steps and the expert"
        return Finding(found.check, "warning", found.result, advice, found.figures)
    return found


def state_keys(episodes: Sequence[CheckedEpisode]) -> Finding:
    """Whether keys and observations are one to one, over the turns in which an action was chosen."""
    seen = [call_result for episode in episodes for call_result in episode.call_results if not call_result.is_over]
    keys_of: dict[Hashable, set[Hashable]] = defaultdict(set)
    views_of: dict[Hashable, set[Hashable]] = defaultdict(set)
    for call_result in seen:
        view = (call_result.text, call_result.images)
        keys_of[view].add(call_result.state_key)
        views_of[call_result.state_key].add(view)
    if set(views_of) <= {None}:
        result = f"none, so the observation is the key: {len(keys_of)} of them in {len(seen)} turns"
        return Finding("state_key", "skipped", result, figures={"num_observations": len(keys_of)})
    hidden = _share(len(keys_of[(call_result.text, call_result.images)]) > 1 for call_result in seen)
    merged = _share(len(views_of[call_result.state_key]) > 1 for call_result in seen)
    figures = {"num_keys": len(views_of), "num_observations": len(keys_of), "hidden": hidden, "merged": merged}
    result = f"{len(views_of)} keys, {len(keys_of)} observations in {len(seen)} turns"
    if merged:
        advice = "GiGPO would compare different states: put all that the observation shows into the key"
        return Finding(
            "state_key", "warning", f"{result}; {merged:.0%} of turns share a key and look different", advice, figures
        )
    if hidden:
        advice = "the model can't tell these states apart: show more, or accept that it must remember"
        return Finding(
            "state_key",
            "warning",
            f"{result}; {hidden:.0%} of turns look the same but are in different states",
            advice,
            figures,
        )
    return Finding("state_key", "ok", f"{result}, one to one", figures=figures)


def content(call_result: CallResult) -> Hashable:
    """The identity of a start: everything shown, and the true state if it has a name."""
    return call_result.prompt, call_result.text, call_result.images, call_result.state_key


def _share(flags: Iterable[bool]) -> float:
    return _mean([float(flag) for flag in flags])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
