"""An environment of one's own: find a hidden number; each answer says whether it is higher or lower.

python examples/own_environment/guess.py plays one episode.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar


class GuessEnv:
    """A number from 1 to `largest` is hidden. A guess that finds it gives reward 1 and ends the episode; an
    answer that isn't a number costs 0.1."""

    metric_reductions: ClassVar[dict[str, str]] = {"success": "last", "action_is_valid": "mean"}

    def __init__(self, largest: int = 100) -> None:
        self.largest = largest
        self.secret = 1

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.secret = random.Random(seed).randint(1, self.largest)
        return f"I think of a number from 1 to {self.largest}. What is it?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if not action.strip().isdecimal():
            metrics = {"success": False, "action_is_valid": False}
            return "That isn't a number.", -0.1, False, False, {"metrics": metrics}
        guess = int(action)
        metrics = {"success": guess == self.secret, "action_is_valid": True}
        if guess == self.secret:
            return "That is it.", 1.0, True, False, {"metrics": metrics}
        answer = "higher" if guess < self.secret else "lower"
        return f"It is {answer} than {guess}.", 0.0, False, False, {"metrics": metrics}

    def close(self) -> None:
        pass


def main() -> None:
    """Plays one episode by halving the interval, to show what a model sees."""
    env = GuessEnv()
    observation, _ = env.reset(seed=2)
    low, high = 1, env.largest
    is_over = False
    while not is_over:
        guess = (low + high) // 2
        print(f"{observation}\n> {guess}")
        observation, _, is_over, _, _ = env.step(str(guess))
        if "higher" in observation:
            low = guess + 1
        else:
            high = guess - 1
    print(observation)


if __name__ == "__main__":
    main()
