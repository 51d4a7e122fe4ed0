"""Rewards of whole groups: functions of completions and columns. A slow or broken reward delays or fails only its group."""

import asyncio
import inspect
import logging
import math
import re
import reprlib
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.data.prompts import prompt_of as prompt_of
from turnwise.data.tables import TableRow, Wanted, leaves
from turnwise.errors import ConfigError, DataError, EnvironmentFault
from turnwise.protocols import ChecksRows, Reward, RewardResult
from turnwise.runtime.foreign import Foreign
from turnwise.runtime.threads import DaemonPool
from turnwise.runtime.watchdog import Watchdog
from turnwise.types import Group, Message, Trajectory

logger = logging.getLogger(__name__)

GIVEN = ("completions", "messages", "prompts")
"""Arguments of a reward function that come from the run, not from columns. Each has one value per rollout (`runs_of`)."""
DecodeCompletion = Callable[[Trajectory], str]
"""A function that decodes a trajectory's last response, without special tokens."""


class RewardFault(EnvironmentFault):
    """A reward raised, hung, or returned something that isn't a reward."""


def runs_of(group: Group) -> list[list[Trajectory]]:
    """The trajectories of each rollout of the group: siblings in their order, the greedy one last. Rollouts that failed are
    left out."""
    runs: dict[int, list[Trajectory]] = {}
    for trajectory in group.trajectories:
        runs.setdefault(trajectory.sibling, []).append(trajectory)
    greedy = [[group.greedy]] if group.greedy else []
    return [run for run in [*runs.values(), *greedy] if all(trajectory.error is None for trajectory in run)]


def messages_of(trajectory: Trajectory, prompt_key: str) -> list[Message]:
    """The conversation, turn by turn, as the model saw it. A system message that a later context repeats is left out. A turn
    without recorded messages becomes its observation (in a row's first turn, the prompt) as a user's message, and its text."""
    messages: list[Message] = []
    for number, turn in enumerate(trajectory.turns):
        said = list(turn.messages)
        if not said:
            is_prompt = number == 0 and trajectory.task.row is not None
            said = prompt_of(trajectory.task.payload if is_prompt else {prompt_key: turn.observation}, prompt_key)
            said.append({"role": "assistant", "content": turn.text})
        messages += [dict(message) for message in said if message["role"] != "system" or message not in messages]
    return messages


@dataclass(slots=True)
class FunctionReward:
    """A function `(completions, **columns) -> list[float]`, one number per completion. A coroutine function is awaited;
    any other function runs in a thread, so that only its group waits for it."""

    name: str
    function: Callable[..., Any]
    completion: DecodeCompletion
    prompt_key: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the config gives as `args` of the reward."""
    _pool: DaemonPool = field(default_factory=lambda: DaemonPool("reward"))
    wanted: Wanted = field(init=False)
    _given: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.function).parameters
        if "completions" not in parameters:
            form = "(completions, **columns)"
            raise ConfigError(f"data.reward {self.name}: it has no parameter `completions`; a reward is called as {form}")
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for name in self.arguments:
            if name not in parameters and not takes_all:
                raise ConfigError(f"data.reward {self.name}: args.{name} isn't a parameter; it has {', '.join(parameters)}")
        self.wanted = Wanted.by(self.function, [*GIVEN, *self.arguments])
        self._given = tuple(name for name in GIVEN if name in parameters or takes_all)

    def check(self, rows: Sequence[TableRow]) -> None:
        """Raises DataError if a row lacks a required column, `function.check_row` refuses it, or an argument hides a column."""
        self.wanted.check(rows, f"data.reward {self.name}")
        function: object = self.function
        if isinstance(function, ChecksRows):
            for row in rows:
                row.check(f"data.reward {self.name}", function, self.wanted.choose(row.columns))
        named = {name: "from the run" for name in inspect.signature(self.function).parameters if name in GIVEN}
        named.pop(self.prompt_key, None)
        named |= dict.fromkeys(self.arguments, "from its args in the config")
        for row in rows:
            for path in (path for path, _ in leaves(row.columns) if path[-1] in named):
                raise DataError(
                    f"{row.place}: data.reward {self.name} gets `{path[-1]}` {named[path[-1]]}, which would hide the column "
                    f"{'.'.join(path)!r}; rename the column, or the function's parameter"
                )

    async def __call__(self, group: Group) -> RewardResult:
        runs = runs_of(group)
        columns = self.wanted.choose(group.task.payload)
        columns = {name: value for name, value in columns.items() if name not in (*GIVEN, *self.arguments)}
        arguments = {name: [value] * len(runs) for name, value in columns.items()} | dict(self.arguments)
        if "completions" in self._given:
            arguments["completions"] = [self.completion(run[-1]) for run in runs]
        if "messages" in self._given:
            arguments["messages"] = [messages_of(run[-1], self.prompt_key) for run in runs]
        if "prompts" in self._given:
            arguments["prompts"] = [group.task.payload.get(self.prompt_key, run[0].turns[0].observation) for run in runs]
        values = await _called(self.function, self.name, group.task.id, arguments, self._pool)
        return RewardResult(_numbers(values, len(runs), self.name))


@dataclass(slots=True)
class GroupReward:
    """A user's own `Reward`: a function or coroutine function that takes a group. It returns one number for each rollout of
    `runs_of(group)`, or a RewardResult."""

    name: str
    reward: Callable[[Group], Any]
    _pool: DaemonPool = field(default_factory=lambda: DaemonPool("reward"))

    async def __call__(self, group: Group) -> RewardResult:
        found = await _called(self.reward, self.name, group.task.id, {"group": group}, self._pool)
        result = found if isinstance(found, RewardResult) else RewardResult(found)
        num_runs = len(runs_of(group))
        scores = _numbers(result.scores, num_runs, self.name)
        if result.turn_rewards is None:
            return RewardResult(scores)
        if not isinstance(result.turn_rewards, Collection) or len(result.turn_rewards) != num_runs:
            raise RewardFault(f"data.reward {self.name}: turn_rewards must be a list for each of {num_runs} runs")
        turns = [sum(len(t.turns) for t in run) for run in runs_of(group)]
        per_turn = [_numbers(of_run, n, self.name) for of_run, n in zip(result.turn_rewards, turns, strict=True)]
        return RewardResult(scores, per_turn)


async def _called(function: Callable[..., Any], name: str, task_id: str, arguments: Mapping[str, Any], pool: DaemonPool) -> Any:
    """The function's result. A function that isn't a coroutine function runs in a thread."""
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    def call() -> Any:
        with Foreign(f"data.reward {name}", task_id):
            return function(**arguments)

    try:
        if is_async:
            with Foreign(f"data.reward {name}", task_id):
                return await function(**arguments)
        result = await pool.call(call)
        return await result if inspect.isawaitable(result) else result
    except (EnvironmentFault, asyncio.CancelledError):
        raise
    except Exception as fault:  # boundary: a reward may raise anything
        place = traceback.extract_tb(fault.__traceback__)[-1]
        what = "".join(traceback.format_exception_only(fault)).strip()
        raise RewardFault(f"data.reward {name} raised {what} ({place.filename}, line {place.lineno}); fix it there") from fault


def _numbers(values: Any, num_wanted: int, name: str) -> list[float]:
    form = f"return one finite number for each of the {num_wanted} completions"
    if isinstance(values, str | Mapping) or not isinstance(values, Collection):
        raise RewardFault(f"data.reward {name} returned a {type(values).__name__}; {form}")
    if len(values) != num_wanted:
        raise RewardFault(f"data.reward {name} returned {len(values)} values; {form}")
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError) as fault:
        raise RewardFault(f"data.reward {name} returned {reprlib.repr(values)}; {form}") from fault
    for number in numbers:
        if not math.isfinite(number):
            raise RewardFault(f"data.reward {name} returned {number}; {form}")
    return numbers


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A reward with its weight in the score."""

    name: str
    weight: float
    reward: Reward


@dataclass(frozen=True, slots=True)
class RewardManager:
    """Adds the rewards of a group to its trajectories: weighted to `outcome_rewards`, unweighted to `metrics`. If a trajectory
    of a data set's row has no metric `success`, sets this metric: 1 if the first reward is more than ½, else 0."""

    rewards: Sequence[WeightedReward]
    timeout_s: float
    watchdog: Watchdog
    _warned: set[str] = field(default_factory=set)

    async def __call__(self, group: Group) -> list[Trajectory]:
        """Returns the trajectories that fail now because a reward broke: none, or all that hadn't failed before."""
        runs = runs_of(group)
        if not runs:
            return []
        try:
            results = await asyncio.gather(*(self._result(weighted, group) for weighted in self.rewards))
        except EnvironmentFault as fault:
            failed = [trajectory for run in runs for trajectory in run]
            if (kind := str(fault).replace(group.task.id, "…")) not in self._warned:
                self._warned.add(kind)
                logger.warning("the episodes of %s fail: %s", group.task.id, fault)
            for trajectory in failed:
                trajectory.status, trajectory.error = "failed", str(fault)
            return failed
        for number, run in enumerate(runs):
            for weighted, result in zip(self.rewards, results, strict=True):
                _add(weighted, result, number, run)
            for trajectory in run if group.task.row is not None else ():
                trajectory.metrics.setdefault("success", float(results[0].scores[number] > 0.5))
        return []

    async def _result(self, weighted: WeightedReward, group: Group) -> RewardResult:
        what = f"data.reward {weighted.name}"
        async with self.watchdog.waiting(group.task.id, what, self.timeout_s, "data.reward_timeout_s", RewardFault):
            return await weighted.reward(group)


def _add(weighted: WeightedReward, result: RewardResult, number: int, run: Sequence[Trajectory]) -> None:
    score = result.scores[number]
    for trajectory in run:
        trajectory.outcome_rewards[weighted.name] = weighted.weight * score
        trajectory.metrics[f"reward/{weighted.name}"] = score
    if result.turn_rewards is not None:
        turns = [turn for trajectory in run for turn in trajectory.turns]
        for turn, reward in zip(turns, result.turn_rewards[number], strict=True):
            turn.reward += weighted.weight * reward


_GSM8K_ANSWER = re.compile(r"#### *(\$?-?\$?[0-9.,]+)")


def exact_match(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 if the completion is the row's `answer`, apart from spaces around it, else 0.

    >>> exact_match(["4 ", "5"], ["4", "4"])
    [1.0, 0.0]
    """
    return [float(text.strip() == str(right).strip()) for text, right in zip(completions, answer, strict=True)]


def gsm8k(completions: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    """1 if the last number that follows `####` is the row's `ground_truth`, also one nested in another column; else 0.

    >>> gsm8k(["6 × 12 = 72\\n#### 72", "72"], ["72", "72"])
    [1.0, 0.0]
    """
    return [gsm8k_score(text, str(right)) for text, right in zip(completions, ground_truth, strict=True)]


def gsm8k_score(text: str, ground_truth: str) -> float:
    """1 if a text's last answer in GSM8K's form, `#### 1,234`, is the true one, apart from commas, dollar signs and a final
    point; else 0.

    >>> gsm8k_score("#### $1,234.", "1234")
    1.0
    """
    found = _GSM8K_ANSWER.findall(text)
    return float(bool(found) and _plain_number(found[-1]) == _plain_number(ground_truth))


def _plain_number(text: str) -> str:
    return text.replace(",", "").replace("$", "").strip().rstrip(".")
