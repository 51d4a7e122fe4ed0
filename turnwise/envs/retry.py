"""A question, a first answer, a message about what was wrong with it, and a second answer: whether a model
can repair what it did."""

import random
from collections.abc import Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

from turnwise.envs.arguments import check_choice, check_count, check_format_penalty, check_type
from turnwise.envs.base import Step, TextEnv, episode_seed
from turnwise.envs.hold_out import content_hash, in_split
from turnwise.errors import EnvironmentFault
from turnwise.types import Reduction, Split, derive_seed

MessageKind = Literal["fault", "neutral"]

MAX_DIGITS = 9
MAX_DRAWS = 1000
NEAR_SHARE = 0.7
"""Share of random answers whose wrong digit is off by one."""
NEUTRAL = "Wrong. Answer again."
_RULES = (
    "Add two numbers. An answer is the sum alone, as digits. If it is wrong, you are told what is wrong with "
    "it and may answer once more."
)


class RetryEnv(TextEnv):
    """A sum of two numbers, and two attempts. A right answer ends the episode, with reward 1 at the first
    attempt and `second_reward` at the second. Raises EnvironmentFault if an argument is out of range.

    After a wrong first answer a message follows, which never tells the sum. With `message: fault` it says for
    each digit of the answer whether it is right, low or high; with `neutral` only that the answer is
    wrong, as a control. An answer that isn't a number of at most 9 digits is wrong and costs
    `format_penalty` (≤ 0) as well.

    Metrics: `success` (right in the end), `first_right`, and `repaired`, which only episodes with a wrong
    first answer report: whether the second one was right.

    Args:
        num_digits: maximum digits of the two numbers, 1 to 8.
        message: what is said after a wrong first answer, `fault` or `neutral`.
        second_reward: reward of a right second answer, at most 1 in size.
        format_penalty: reward of an answer that isn't a number.
        split: `train` or `val`: asks only pairs of numbers that belong to this split, in both orders alike.
            None: asks all.
        env_instruction: replaces the rules that open the first prompt; "" leaves them out.

    >>> sums = RetryEnv(num_digits=2)
    >>> sums.reset(seed=4)[0]
    '50+97='
    >>> sums.step("137")[:3], sums.step("147")[1:3]
    (('1 right\\n3 low\\n7 right\\nAnswer again.', 0.0, False), (0.5, True))
    """

    metric_reductions: ClassVar[Mapping[str, Reduction]] = MappingProxyType(
        {
            "success": "last",
            "first_right": "max",
            "repaired": "last",
            "action_is_valid": "mean",
            "format_penalty": "mean",
        }
    )

    def __init__(
        self,
        num_digits: int = 2,
        message: MessageKind = "fault",
        second_reward: float = 0.5,
        format_penalty: float = 0.0,
        split: Split | None = None,
        env_instruction: str | None = None,
    ) -> None:
        check_count("retry", "num_digits", num_digits)
        check_choice("retry", "message", message, get_args(MessageKind))
        check_choice("retry", "split", split, (*get_args(Split), None))
        check_format_penalty(format_penalty)
        check_type("retry", "second_reward", second_reward, Real, "a number")
        if num_digits >= MAX_DIGITS or abs(second_reward) > 1:
            raise EnvironmentFault(
                f"retry: got num_digits {num_digits} and second_reward {second_reward}; num_digits must be "
                f"at most {MAX_DIGITS - 1}, and second_reward at most 1 in size"
            )
        self._num_digits = num_digits
        self._message: MessageKind = message
        self._second_reward = float(second_reward)
        self._format_penalty = float(format_penalty)
        self._split = split
        self._instruction = _RULES if env_instruction is None else env_instruction
        self._seed = 0
        self._terms: tuple[int, int] | None = None
        self._answers: list[str] = []
        self._is_over = False

    @property
    def solution(self) -> str:
        """The sum of the current episode."""
        if self._terms is None:
            raise EnvironmentFault("RetryEnv was used before reset; call reset(seed=…) first")
        return str(sum(self._terms))

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Draws the numbers of `seed`. Without a seed, one is derived from the last episode's seed."""
        self._seed = episode_seed(seed, self._seed)
        self._terms = self._drawn_terms()
        self._answers = []
        self._is_over = False
        return self._question(), {"env_instruction": self._instruction}

    def step(self, action: str) -> Step:
        solution = self.solution
        answer = action.strip()
        is_valid = answer.isascii() and answer.isdigit() and len(answer) <= MAX_DIGITS
        is_first = not self._answers
        was_over = self._is_over
        is_right = is_valid and int(answer) == int(solution)
        self._answers.append(answer)
        self._is_over = was_over or is_right or not is_first
        reward = 0.0
        if is_right and not was_over:
            reward = 1.0 if is_first else self._second_reward
        penalty = 0.0 if is_valid else self._format_penalty
        metrics = {
            "success": float(is_right),
            "first_right": float(is_right and is_first),
            "action_is_valid": float(is_valid),
            "format_penalty": penalty,
        }
        if not is_first:
            metrics["repaired"] = float(is_right)
        observation = "That is right." if is_right else "That is wrong."
        if not self._is_over:
            observation = self._message_about(answer if is_valid else "")
        return observation, reward + penalty, self._is_over, False, {"metrics": metrics}

    def state_key(self) -> str:
        """The question and the answers."""
        return "|".join([self._question(), *self._answers])

    def expert_action(self) -> str:
        """The sum."""
        return self.solution

    def random_action(self, rng: random.Random) -> str:
        """The sum with one wrong digit, mostly off by one, as of somebody who adds carelessly."""
        digits = list(self.solution)
        place = rng.randrange(len(digits))
        right = int(digits[place])
        off = 1 if rng.random() < NEAR_SHARE else rng.randint(2, 9)
        wrong = (right + rng.choice((-off, off))) % 10
        if wrong == right or (place == 0 and wrong == 0):
            wrong = 1 + right % 9
        digits[place] = str(wrong)
        return "".join(digits)

    def _question(self) -> str:
        first, second = self._terms or (0, 0)
        return f"{first}+{second}="

    def _drawn_terms(self) -> tuple[int, int]:
        for draw in range(MAX_DRAWS):
            rng = random.Random(derive_seed(self._seed, "terms", draw))
            first = rng.randrange(10**self._num_digits)
            second = rng.randrange(10**self._num_digits)
            low, high = sorted((first, second))
            if in_split(content_hash(f"{low}+{high}"), self._split):
                return first, second
        raise EnvironmentFault(
            f"retry: none of {MAX_DRAWS} sums is for {self._split}; raise num_digits, or set split: null in "
            "env_config"
        )

    def _message_about(self, answer: str) -> str:
        if self._message == "neutral" or not answer:
            return NEUTRAL
        solution = self.solution
        if len(answer) != len(solution):
            length = "few" if len(answer) < len(solution) else "many"
            return f"Too {length} digits. Answer again."
        # A line for each digit: no blank stands before it, so that it is the same token as in the answer.
        # Each verdict is one word: lines are equally long, and a small model finds the line of a digit.
        lines = [f"{digit} {_verdict(digit, right)}" for digit, right in zip(answer, solution, strict=True)]
        return "\n".join([*lines, "Answer again."])


def _verdict(digit: str, right: str) -> str:
    if digit == right:
        return "right"
    return "low" if digit < right else "high"
