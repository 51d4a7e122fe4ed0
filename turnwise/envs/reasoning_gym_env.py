"""Questions of the package reasoning-gym (Stojanovski et al. 2025, arXiv:2505.24760), which also scores the
answers."""

import json
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, get_args

from turnwise.envs.arguments import check_choice, check_count, check_format_penalty, check_type
from turnwise.envs.base import Step
from turnwise.envs.hold_out import HeldOutEnv, fingerprint
from turnwise.envs.packages import alone, known_of, needs
from turnwise.errors import EnvironmentFault, nearest
from turnwise.types import Reduction, Split

NUM_TASKS = 100_000
"""Number of a dataset's tasks, unless `dataset_config` sets `size`."""

RUNS_ANSWERS = frozenset(known_of("reasoning_gym")["runs_answers"])
"""Datasets whose scorers run the model's answer as Python code."""
UNREPEATABLE = frozenset(known_of("reasoning_gym")["unrepeatable"])
"""Datasets whose tasks don't follow from their seed."""
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, SyntaxError, TypeError, ValueError)
"""Exceptions that scorers raise for unexpected answers."""


class ReasoningGymEnv(HeldOutEnv):
    """Asks one question of `dataset`. The package scores each answer in [0, 1].

    The episode ends with a perfect answer or after `num_attempts`. The reward of an attempt is its
    improvement over the best score before it, so an episode's rewards without penalties add up to its best
    score. An answer that couldn't be parsed is an attempt too: its only reward is `format_penalty` (≤ 0).
    Raises EnvironmentFault if the dataset is unknown, `composite`, in `UNREPEATABLE` or not allowed by
    `runs_answers`, or refuses `dataset_config`; NotAvailableError without reasoning-gym.

    Args:
        dataset: a name of `reasoning_gym.factory.DATASETS`.
        dataset_config: arguments of the dataset's own config; `size` is the number of its tasks.
        num_attempts: number of answers that may be given.
        format_penalty: reward of an answer that couldn't be parsed.
        runs_answers: allows the datasets of `RUNS_ANSWERS`.
        env_instruction: opens the first prompt; "" leaves it out.
        split: `train` or `val`: asks only questions whose text hashes into this split, unless none is found.
            None: asks all.
    """

    relays_foreign_text: ClassVar[bool] = True
    metric_reductions: ClassVar[Mapping[str, Reduction]] = MappingProxyType(
        {"success": "last", "best_score": "last", "action_is_valid": "mean", "format_penalty": "mean"}
    )

    def __init__(
        self,
        dataset: str,
        dataset_config: Mapping[str, Any] | None = None,
        num_attempts: int = 1,
        format_penalty: float = 0.0,
        runs_answers: bool = False,
        env_instruction: str = "Answer the question.",
        split: Split | None = None,
    ) -> None:
        check_choice("reasoning_gym", "split", split, (*get_args(Split), None))
        check_format_penalty(format_penalty)
        check_count("reasoning_gym", "num_attempts", num_attempts)
        check_type("reasoning_gym", "dataset", dataset, str, "a string, such as chain_sum")
        check_type(
            "reasoning_gym",
            "dataset_config",
            dataset_config or {},
            Mapping,
            "a mapping of the dataset's arguments",
        )
        check_type("reasoning_gym", "runs_answers", runs_answers, bool, "true or false")
        _check_dataset(dataset, runs_answers)
        self._name = dataset
        # Some datasets take half a second to load, and every episode makes an environment.
        config_json = json.dumps(dict(dataset_config or {}), sort_keys=True, default=str)
        self._dataset = _load_dataset(dataset, config_json)
        self._num_attempts = num_attempts
        self._format_penalty = float(format_penalty)
        self._instruction = env_instruction
        self._split = split
        self._task: dict[str, Any] = {}
        self._num_answers = 0
        self._best = 0.0

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._start(f"reasoning_gym's {self._name}", seed, self._split, self._ask)
        self._num_answers = 0
        self._best = 0.0
        return self._task["question"], {"env_instruction": self._instruction}

    def _ask(self, seed: int) -> str:
        # Some datasets seed numpy's global generator for each question, and some print.
        with alone():
            self._task = self._dataset[seed % len(self._dataset)]
        return str(self._task["question"])

    def step(self, action: str) -> Step:
        if not self._task:
            raise EnvironmentFault("ReasoningGymEnv.step came before reset; call reset(seed=…) first")
        score = 0.0
        penalty = self._format_penalty
        if action:
            score = self._score(action)
            penalty = 0.0
        gain = max(score - self._best, 0.0)
        self._best = max(score, self._best)
        self._num_answers += 1
        num_left = self._num_attempts - self._num_answers
        is_over = self._best >= 1.0 or num_left <= 0
        metrics = {
            "success": float(self._best >= 1.0),
            "best_score": self._best,
            "action_is_valid": float(bool(action)),
            "format_penalty": penalty,
        }
        verdict = "That is right." if score >= 1.0 else f"That is not right. Attempts left: {num_left}."
        return verdict, gain + penalty, is_over, False, {"metrics": metrics}

    def state_key(self) -> str:
        """The hash of the question, and the number of answers given."""
        return f"{fingerprint(self._task.get('question'))}:{self._num_answers}"

    def _score(self, answer: str) -> float:
        try:
            return float(self._dataset.score_answer(answer=answer, entry=self._task))
        except UNREADABLE:
            return 0.0


def _check_dataset(name: str, runs_answers: bool) -> None:
    if name == "composite":
        raise EnvironmentFault("dataset composite mixes others; give each its own environment tag instead")
    if name in UNREPEATABLE:
        raise EnvironmentFault(
            f"dataset {name!r}: in reasoning-gym its tasks don't follow from their seed, so no episode "
            "could be played again"
        )
    if name in RUNS_ANSWERS and not runs_answers:
        raise EnvironmentFault(
            f"dataset {name!r}: reasoning-gym's scorer runs the model's answer as Python code, with all "
            "that this process may do. Where that is acceptable, in a sandbox, set runs_answers: true in "
            "env_config"
        )


@lru_cache(maxsize=32)
def _load_dataset(name: str, config: str) -> Any:
    """The dataset, shared by all environments with its name and config (JSON), so callers mustn't change
    it."""
    with needs("reasoning_gym", "reasoning-gym"):
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    if name not in DATASETS:
        raise EnvironmentFault(
            f"reasoning-gym has no dataset {name!r}; it has "
            f"{', '.join(sorted(DATASETS))}.{nearest(name, DATASETS)}"
        )
    arguments = {"seed": 0, "size": NUM_TASKS, **json.loads(config)}
    check_type("reasoning_gym", "dataset_config.seed", arguments["seed"], int, "a whole number")
    try:
        return reasoning_gym.create_dataset(name, **arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise EnvironmentFault(
            f"reasoning-gym's {name} doesn't take dataset_config {arguments}: {error}"
        ) from error
