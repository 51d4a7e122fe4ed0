"""The examination of an environment by `turnwise check-env`: its checks, in order."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

from turnwise.envs.checks import faults, findings
from turnwise.envs.checks.checked_env import (
    BrokenCall,
    CallResult,
    CallTimes,
    CheckedEnv,
    Timings,
    first_difference,
    play,
)
from turnwise.envs.checks.findings import CheckedEpisode, Finding, Verdict
from turnwise.envs.hold_out import HeldOutEnv
from turnwise.envs.players import ExpertPlayer, RandomPlayer
from turnwise.protocols import Env, HasExpert
from turnwise.types import Reduction, Split, derive_seed

T = TypeVar("T")

NUM_REPLAYED = 8
"""Maximum episodes that are played again, to see whether they come out the same."""
NUM_SIBLINGS = 4
"""Number of environments that play one episode side by side."""
UNREADABLE = {"": "unparsed text", "no such action {%√\n": "an unknown action"}
"""Two texts that are no action, and what findings call them."""


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """How an environment is examined."""

    num_episodes: int = 64
    """Maximum episodes of each player (random and scripted), and maximum starts in each split."""
    max_steps: int = 10
    """Maximum actions per episode."""
    timeout_s: float = 20.0
    """Maximum seconds of one call. A longer call counts as hanging."""
    play_s: float = 30.0
    """Seconds after which a check begins no further episode. Each check begins at least two."""
    actions: tuple[str, ...] = ()
    """The random player's actions; empty = those of the environment's `random_action` or `actions`."""
    count_tokens: Callable[[str], int] | None = None
    """Counts the tokens of a text; None = only characters are counted."""
    token_budget: int | None = None
    """Maximum tokens per context; None = unknown."""
    is_split_given: bool = False
    """Whether the environment's arguments fix one `split` for training and validation."""


@dataclass(frozen=True, slots=True)
class Report:
    """The findings on one environment."""

    env: str
    findings: tuple[Finding, ...]
    is_played: bool = True
    """Whether an episode was played, by the random player (needs known actions) or by the expert (if there is
    one)."""

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the findings. If none is an error and nobody has played: `skipped`."""
        verdicts = {finding.verdict for finding in self.findings}
        if "error" in verdicts:
            return "error"
        if not self.is_played:
            return "skipped"
        if "warning" in verdicts:
            return "warning"
        return "ok"

    def to_json(self) -> dict[str, Any]:
        return {
            "env": self.env,
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
        }


def check_env(
    make_env: Callable[[Split], Env],
    takes_split: bool,
    settings: CheckSettings,
) -> Report:
    """Plays an environment and returns the findings. A call that hangs, or any fault in the first check, ends
    the examination; other faults end their check. `takes_split` says whether the constructor takes a split.

    >>> from turnwise.envs.frozen_lake.env import FrozenLakeEnv
    >>> report = check_env(lambda split: FrozenLakeEnv(split=split), True, CheckSettings(num_episodes=4))
    >>> report.env, [finding.check for finding in report.findings if finding.verdict == "error"]
    ('FrozenLakeEnv', [])
    """
    examination = _Examination(make_env, takes_split, settings)
    rows: list[Finding] = []
    for check in examination.checks:
        try:
            rows += check()  # keeps the findings before a broken call
        except BrokenCall as broken:
            if not any(row.result == broken.problem for row in rows):
                rows.append(faults.broken_call(broken))
            if broken.hangs or check == examination.checks[0]:
                break
    if not any(row.verdict == "error" for row in rows):
        num_calls = sum(len(examination.clock[method].wall_s) for method in ("reset", "step"))
        result = f"{num_calls:,} calls of reset and step return what they should"
        rows.insert(0, Finding("returns", "ok", result))
    return Report(examination.name, tuple(rows), bool(examination.played))


class _Examination:
    """The checks of one environment. Each yields its findings, and may keep episodes for later checks."""

    def __init__(
        self,
        make_env: Callable[[Split], Env],
        takes_split: bool,
        settings: CheckSettings,
    ) -> None:
        self.name = "the environment"
        self.checks = (
            self._starts,
            self._random_play,
            self._scripted_play,
            self._same_again,
            self._side_by_side,
            self._unreadable_actions,
            self._readings,
            self._render,
            self._close,
            self._times,
        )
        self._make_env = make_env
        self._takes_split = takes_split
        self._settings = settings
        self._reductions: dict[str, Reduction] = {}
        self.clock = CallTimes(Timings)
        self._random: list[CheckedEpisode] = []
        self._scripted: list[CheckedEpisode] = []

    @property
    def played(self) -> list[CheckedEpisode]:
        """The episodes of both players; empty if neither could play."""
        return [*self._random, *self._scripted]

    def _starts(self) -> Iterator[Finding]:
        # The first constructor also imports modules, so its time is left out of the measurements.
        with self._opened(clock=CallTimes(Timings)) as first:
            self.name = first.name
            self._reductions = first.reductions
        starts: dict[Split, list[CallResult]] = {"train": [], "val": []}
        plays_all = False
        for split, call_results in starts.items():
            with self._opened(split) as env:
                call_results += (env.reset(seed) for seed in self._seeds(split))
                plays_all |= isinstance(env.env, HeldOutEnv) and env.env.plays_all
        yield findings.starts(starts["train"])
        yield findings.splits(
            starts["train"],
            starts["val"],
            self._takes_split,
            self._settings.is_split_given,
            plays_all,
        )

    def _random_play(self) -> Iterator[Finding]:
        def choose(env: CheckedEnv, seed: int) -> Callable[[], str] | None:
            player_seed = derive_seed(seed, "random player")
            make = partial(RandomPlayer, env.env, player_seed, self._settings.actions)
            player: RandomPlayer = env.call("actions", make)
            return partial(env.call, "random_action", player.act) if player.draw else None

        unknown = Finding(
            "random play",
            "skipped",
            result="not examined: nobody says which actions there are",
            advice="name them with --actions a,b,c or --actions-file FILE, or give the environment an "
            "attribute `actions` or a method `random_action(rng)`",
        )
        return self._play("random play", choose, self._random, unknown)

    def _scripted_play(self) -> Iterator[Finding]:
        def choose(env: CheckedEnv, seed: int) -> Callable[[], str] | None:
            if not isinstance(env.env, HasExpert):
                return None
            player: ExpertPlayer = env.call("actions", partial(ExpertPlayer, env.env))
            return partial(env.call, "expert_action", player.act)

        unknown = Finding("scripted play", "skipped", "the environment has no expert_action()")
        return self._play("scripted play", choose, self._scripted, unknown, beaten=self._random)

    def _same_again(self) -> Iterator[Finding]:
        num_replayed = 0
        with self._opened() as used:
            for episode in self._in_time(self._replayable()):
                with self._opened() as new:
                    for occasion, env in (("in a new environment", new), ("after a reset", used)):
                        [replayed] = play([env], episode.seed, episode.actions)
                        difference = first_difference(episode.call_results, replayed)
                        if difference is not None:
                            yield faults.different_episodes(
                                "same seed",
                                f"another episode {occasion}",
                                difference,
                                "draw everything from reset's seed, by a generator of the environment's own",
                            )
                            return
                num_replayed += 1
        result = f"{num_replayed} episodes come out the same, in new environments and after a reset"
        yield Finding("same seed", "ok", result)

    def _side_by_side(self) -> Iterator[Finding]:
        num_groups = 0
        for episode in self._in_time(self._replayable()):
            with ExitStack() as opened:
                envs = [opened.enter_context(self._opened()) for _ in range(NUM_SIBLINGS)]
                siblings = play(envs, episode.seed, episode.actions)
                differences = [first_difference(episode.call_results, sibling) for sibling in siblings]
                difference = next(filter(None, differences), None)
                if difference is not None:
                    is_at_start = any(sibling[0] != episode.call_results[0] for sibling in siblings)
                    yield _disturbed_siblings(difference, is_at_start)
                    return
            num_groups += 1
        result = f"{NUM_SIBLINGS} side by side start the same and stay the same, under {num_groups} seeds"
        yield Finding("siblings", "ok", result)

    def _unreadable_actions(self) -> Iterator[Finding]:
        answers = []
        for action, name in UNREADABLE.items():
            with self._opened() as env:
                env.reset(_seed("train"))
                try:
                    answers.append((name, env.step(action)))
                except BrokenCall as broken:
                    if broken.hangs or not self.played:
                        raise
                    yield Finding(
                        "no action",
                        "error",
                        f"{broken.problem} (action {action!r})",
                        "what can't be understood moves nothing, or costs a penalty; an exception fails the "
                        "episode",
                        broken.trace,
                    )
                    return
        yield findings.unreadable(answers, self.played)

    def _readings(self) -> Iterator[Finding]:
        played = self.played or self._replayable()
        settings = self._settings
        if self.played:
            yield findings.rewards(played)
            yield findings.metrics(played, self._reductions)
            yield findings.lengths(played, settings.max_steps)
        else:
            for check in ("rewards", "metrics", "episodes"):
                yield Finding(check, "skipped", "not examined: nobody played")
        finding = findings.observations(played, settings.count_tokens, settings.token_budget)
        if not self.played and finding.verdict == "ok":
            result = f"{finding.result}; those after an action weren't examined"
            finding = replace(finding, verdict="skipped", result=result)
        yield finding
        yield findings.state_keys(played)

    def _render(self) -> Iterator[Finding]:
        with self._opened() as env:
            env.reset(_seed("train"))
            try:
                yield faults.picture(env.call("render", lambda: env.env.render()))
            except BrokenCall as broken:
                if broken.hangs:
                    raise
                if isinstance(broken.__cause__, NotImplementedError):
                    yield faults.picture(None)
                else:
                    advice = "return None where there is nothing to draw"
                    yield Finding("render", "warning", broken.problem, advice, broken.trace)

    def _close(self) -> Iterator[Finding]:
        with self._opened() as env:
            env.reset(_seed("train"))
            env.close()
        yield Finding("close", "ok", "may be called twice")

    def _times(self) -> Iterator[Finding]:
        counts = [len(episode.actions) for episode in self.played] or [1]
        yield findings.times(self.clock, sum(counts) / len(counts), os.cpu_count() or 1)

    def _play(
        self,
        check: str,
        choose: Callable[[CheckedEnv, int], Callable[[], str] | None],
        episodes: list[CheckedEpisode],
        unknown: Finding,
        beaten: Sequence[CheckedEpisode] | None = None,
    ) -> Iterator[Finding]:
        """Adds one episode per seed to `episodes`, each in its own environment. Then yields the finding on
        them, even if a call raises midway. `choose` returns a player's `act`, or None to play no more; if
        nothing was played, yields `unknown`."""
        try:
            for seed in self._seeds("train"):
                with self._opened() as env:
                    episode = CheckedEpisode(seed, [env.reset(seed)])
                    act = choose(env, seed)
                    if act is None:
                        if not episodes:
                            yield unknown
                        return
                    for _ in range(self._settings.max_steps):
                        if episode.call_results[-1].is_over:
                            break
                        action = act()
                        episode.actions.append(action)
                        episode.call_results.append(env.step(action))
                    episodes.append(episode)
        finally:
            if episodes:
                yield findings.player(check, episodes, self._reductions, beaten=beaten)

    def _replayable(self) -> list[CheckedEpisode]:
        """Up to `NUM_REPLAYED` episodes of one player. If nobody has played, new episodes of one step, with
        the action ""."""
        if not self.played:
            with self._opened() as env:
                seeds = [_seed("train", index) for index in range(NUM_REPLAYED)]
                return [CheckedEpisode(seed, [env.reset(seed), env.step("")], [""]) for seed in seeds]
        episodes = self._random or self._scripted
        return episodes[:NUM_REPLAYED]

    def _seeds(self, split: Split) -> Iterator[int]:
        seeds = [_seed(split, index) for index in range(self._settings.num_episodes)]
        yield from self._in_time(seeds)

    def _in_time(self, items: Sequence[T]) -> Iterator[T]:
        """Yields items until `play_s` seconds are over, but at least two."""
        deadline = time.monotonic() + self._settings.play_s
        for index, item in enumerate(items):
            if index >= 2 and time.monotonic() > deadline:
                return
            yield item

    @contextmanager
    def _opened(self, split: Split = "train", clock: CallTimes | None = None) -> Iterator[CheckedEnv]:
        """A new environment, which is closed at the end unless a call breaks."""
        if clock is None:
            clock = self.clock
        with CheckedEnv(partial(self._make_env, split), self._settings.timeout_s, clock) as env:
            yield env
            env.close()


def _seed(split: Split, index: int = 0) -> int:
    return derive_seed("check-env", split, index)


def _disturbed_siblings(difference: tuple[str, str], is_at_start: bool) -> Finding:
    if is_at_start:
        problem = "siblings start differently"
        advice = "make reset's seed determine the whole start: group statistics mean nothing otherwise"
    else:
        problem = "siblings disturb each other"
        advice = "keep generator and state in the instance: environments side by side can't share any"
    return faults.different_episodes("siblings", problem, difference, advice)
