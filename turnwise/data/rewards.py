"""Rewards of whole groups, and their sum. A slow or broken reward delays or fails only its group."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

from turnwise.data.answers import equals_number, gsm8k_score
from turnwise.data.prompts import prompt_of
from turnwise.data.reward_calls import call_reward
from turnwise.data.reward_scores import RewardFault, read_numbers, read_scores
from turnwise.data.truths import given_truths, needs_truth
from turnwise.errors import EnvironmentFault
from turnwise.protocols import Reward, RewardResult
from turnwise.runtime.threads import DaemonPool
from turnwise.runtime.watchdog import Watchdog
from turnwise.types import Group, Message, Trajectory

logger = logging.getLogger(__name__)

DecodeCompletion = Callable[[Trajectory], str]
"""A function that returns a trajectory's final answer, without special tokens."""


def runs_of(group: Group) -> list[list[Trajectory]]:
    """The trajectories of each rollout of the group: siblings in their order, the greedy one last. Rollouts
    that failed are left out."""
    runs: dict[int, list[Trajectory]] = {}
    for trajectory in group.trajectories:
        runs.setdefault(trajectory.sibling, []).append(trajectory)
    in_order = list(runs.values())
    if group.greedy:
        in_order.append([group.greedy])
    return [run for run in in_order if all(trajectory.error is None for trajectory in run)]


def messages_of(trajectory: Trajectory, prompt_key: str) -> list[Message]:
    """The conversation that ends with the final answer, turn by turn, as the model saw it. A system message
    that a later context repeats is left out. A turn without recorded messages becomes its observation (in a
    row's first turn, the prompt) as a user's message, and its text."""
    messages: list[Message] = []
    for number, turn in enumerate(trajectory.answer_path):
        turn_messages = list(turn.messages)
        if not turn_messages:
            columns: Mapping[str, Any] = {prompt_key: turn.observation}
            if number == 0 and trajectory.task.row is not None:
                columns = trajectory.task.payload
            turn_messages = prompt_of(columns, prompt_key)
            turn_messages.append({"role": "assistant", "content": turn.text})
        messages += [
            dict(message)
            for message in turn_messages
            if message["role"] != "system" or message not in messages
        ]
    return messages


@dataclass(slots=True)
class GroupReward:
    """A user's own `Reward`: a function or coroutine function that takes a group. It returns one number for
    each rollout of `runs_of(group)`, or a RewardResult."""

    name: str
    reward: Callable[[Group], Any]
    _pool: DaemonPool = field(default_factory=lambda: DaemonPool("reward"))

    async def __call__(self, group: Group) -> RewardResult:
        returned = await call_reward(
            self.reward,
            self.name,
            group.task.id,
            {"group": group},
            self._pool,
        )
        result = returned if isinstance(returned, RewardResult) else RewardResult(returned)
        runs = runs_of(group)
        scores = read_scores(result.scores, len(runs), self.name)
        if result.turn_rewards is None:
            return RewardResult(scores)
        if not isinstance(result.turn_rewards, Collection) or len(result.turn_rewards) != len(runs):
            raise RewardFault(
                f"data.reward {self.name}: turn_rewards must be a list for each of {len(runs)} runs"
            )
        per_turn = []
        for run, turn_rewards in zip(runs, result.turn_rewards, strict=True):
            num_turns = sum(len(trajectory.turns) for trajectory in run)
            per_turn.append(read_numbers(turn_rewards, num_turns, self.name))
        return RewardResult(scores, per_turn)


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A reward with its weight in the score."""

    name: str
    weight: float
    reward: Reward


@dataclass(frozen=True, slots=True)
class RewardManager:
    """Adds the rewards of a group to its trajectories: weighted to `outcome_rewards`, unweighted to
    `metrics`. A reward that is None for an episode adds nothing to it. If a trajectory of a data set's row
    has no metric `success`, sets this metric: 1 if the first reward that isn't None is more than ½, else
    0."""

    rewards: Sequence[WeightedReward]
    timeout_s: float
    watchdog: Watchdog
    _warned: set[str] = field(default_factory=set)

    async def __call__(self, group: Group) -> list[Trajectory]:
        """Returns the trajectories that fail now because a reward broke: none, or all that hadn't failed
        before."""
        runs = runs_of(group)
        if not runs:
            return []
        try:
            results = await asyncio.gather(*(self._result(weighted, group) for weighted in self.rewards))
            self._check_that_some_apply(results, group, len(runs))
        except EnvironmentFault as fault:
            return self._failed(group, runs, fault)
        for number, run in enumerate(runs):
            for weighted, result in zip(self.rewards, results, strict=True):
                _add(weighted, result, number, run)
            if group.task.row is None:
                continue
            scores = [result.scores[number] for result in results]
            first_score = next((score for score in scores if score is not None), 0.0)
            for trajectory in run:
                trajectory.metrics.setdefault("success", float(first_score > 0.5))
        return []

    def _failed(
        self,
        group: Group,
        runs: Sequence[Sequence[Trajectory]],
        fault: EnvironmentFault,
    ) -> list[Trajectory]:
        kind = str(fault).replace(group.task.id, "…")
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("the episodes of %s fail: %s", group.task.place, fault)
        failed = [trajectory for run in runs for trajectory in run]
        for trajectory in failed:
            trajectory.status = "failed"
            trajectory.error = f"{group.task.place}: {fault}"
        return failed

    def _check_that_some_apply(self, results: Sequence[RewardResult], group: Group, num_runs: int) -> None:
        """Raises RewardFault if no reward applies to an episode of a row. An environment has rewards of its
        own."""
        if group.task.row is None:
            return
        for number in range(num_runs):
            if all(result.scores[number] is None for result in results):
                names = ", ".join(weighted.name for weighted in self.rewards)
                raise RewardFault(
                    f"data.reward {names}: each returned None, so none applies to this row; return a number "
                    "in one of them, or remove the row"
                )

    async def _result(self, weighted: WeightedReward, group: Group) -> RewardResult:
        async with self.watchdog.waiting(
            group.task.id,
            f"data.reward {weighted.name}",
            self.timeout_s,
            "data.reward_timeout_s",
            RewardFault,
        ):
            return await weighted.reward(group)


def _add(weighted: WeightedReward, result: RewardResult, number: int, run: Sequence[Trajectory]) -> None:
    score = result.scores[number]
    if score is None:
        return
    metrics = {} if result.metrics is None else result.metrics[number]
    comments = {} if result.comments is None else result.comments[number]
    for trajectory in run:
        for name, text in comments.items():
            trajectory.comments[f"{weighted.name}/{name}"] = text
        trajectory.outcome_rewards[weighted.name] = weighted.weight * score
        trajectory.metrics[f"reward/{weighted.name}"] = score
        for name, value in metrics.items():
            trajectory.metrics[f"reward/{weighted.name}/{name}"] = value
    if result.turn_rewards is not None:
        turns = [turn for trajectory in run for turn in trajectory.turns]
        for turn, reward in zip(turns, result.turn_rewards[number], strict=True):
            turn.reward += weighted.weight * reward


@needs_truth("answer", "ground_truth")
def exact_match(
    completions: Sequence[str],
    answer: Sequence[Any] | None = None,
    ground_truth: Sequence[Any] | None = None,
) -> list[float]:
    """1 if the completion is the row's `answer` or, without this column, its `ground_truth`, apart from
    spaces around it, else
    0. In a column of numbers `72` is 72.0; texts, such as zip codes, are compared letter by letter.

    >>> exact_match(["4 ", "5", "72", "2134"], ["4", "4", 72.0, "02134"])
    [1.0, 0.0, 1.0, 0.0]
    """
    truths = given_truths(answer, ground_truth)
    return [float(_matches(text, right)) for text, right in zip(completions, truths, strict=True)]


def _matches(text: str, right: object) -> bool:
    if isinstance(right, Number) and not isinstance(right, bool):
        return equals_number(text, right)
    return text.strip() == str(right).strip()


@needs_truth("ground_truth", "answer")
def gsm8k(
    completions: Sequence[str],
    ground_truth: Sequence[Any] | None = None,
    answer: Sequence[Any] | None = None,
) -> list[float]:
    """1 if the last answer that follows `####` is the row's `ground_truth`, also one nested in another
    column, or without it its `answer`; else 0.

    >>> gsm8k(["6 × 12 = 72\\n#### 72", "72"], ["72", 72.0])
    [1.0, 0.0]
    """
    truths = given_truths(ground_truth, answer)
    return [gsm8k_score(text, right) for text, right in zip(completions, truths, strict=True)]
