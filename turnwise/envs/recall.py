"""Facts are told over several turns, between sentences that don't matter, and one is asked for at the end. A
model whose context holds a single turn has to keep them in a note."""

import random
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, get_args

from turnwise.envs.arguments import check_choice, check_count, check_format_penalty, check_type
from turnwise.envs.base import Step, TextEnv, episode_seed
from turnwise.envs.hold_out import content_hash, in_split
from turnwise.errors import EnvironmentFault
from turnwise.types import Reduction, Split, derive_seed

KEYS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
VALUES = tuple("0123456789")
"""Keys and values are single characters, which a tokenizer keeps whole. No blank stands before one anywhere:
a tokenizer has two tokens for a letter, with a blank and without, and a small model copies tokens."""
MAX_DRAWS = 1000
_PAIR = re.compile(r"\b([A-Z])\s*([0-9])\b")
_ITEM = re.compile(r"[^\s,]+")
_THINGS = (
    "lamp",
    "door",
    "river",
    "clock",
    "garden",
    "letter",
    "bridge",
    "coat",
    "window",
    "road",
    "bell",
    "boat",
)
_STATES = ("old", "green", "open", "quiet", "broken", "new", "dark", "wet", "small", "warm", "empty", "far")


class RecallEnv(TextEnv):
    """`num_facts` turns tell one fact each, a letter and a digit (`D5`); then `num_questions` turns ask for
    the digit of a letter each. An answer is the digit, or letter and digit. The right ones have reward 1
    together, everything else 0. Raises EnvironmentFault if an argument is out of range.

    In a turn that tells, the whole action is the model's new note. It replaces the old note, and the next
    observation shows it. In a turn that asks, the action is the answer. In mode `step` a model sees nothing
    else of earlier turns. An empty action is invalid: it keeps the old note and costs `format_penalty` (≤ 0).

    Metrics: `success`, whether all answers were right, `recalled`, the share of them that were, and `kept`,
    the share of the facts told that the note holds (last).

    Args:
        num_facts: number of facts, and of the turns that tell them, at most 26.
        num_distractors: maximum sentences that don't matter in each turn.
        min_distractors: minimum of these sentences: their number is drawn in each turn. None: it is
            `num_distractors` where facts are told, and 0 where one is asked for. Where it varies, a fact
            stands at another place in each prompt, and a model learns to look for letters instead of places.
        num_questions: number of questions, which may ask for a fact again. More of them teach more of looking
            up: a note has many tokens, an answer one.
        shows_note: whether observations show the note. Without it, in mode `step`, a model can only guess: a
            tenth of its guesses are right.
        note_length: maximum items of a note, which blanks or commas separate; the rest is cut off.
        format_penalty: reward of an empty action.
        split: `train` or `val`: tells only facts that belong to this split. None: tells all.
        env_instruction: replaces the rules that open the first prompt; "" leaves them out.

    >>> memory = RecallEnv(num_facts=2, num_distractors=1)
    >>> memory.reset(seed=1)[0]
    'The boat is far. Remember (D5).'
    >>> memory.step("D5")[0]
    'Note:\\nD5\\nThe window is dark. Remember (M7).'
    >>> memory.step("D5,M7")[0]
    'Note:\\nD5,M7\\nWhat is (M)?'
    >>> memory.step("7")[1:3]
    (1.0, True)
    """

    metric_reductions: ClassVar[Mapping[str, Reduction]] = MappingProxyType(
        {
            "success": "last",
            "recalled": "last",
            "kept": "last",
            "action_is_valid": "mean",
            "format_penalty": "mean",
        }
    )

    def __init__(
        self,
        num_facts: int = 3,
        num_distractors: int = 3,
        min_distractors: int | None = None,
        num_questions: int = 1,
        shows_note: bool = True,
        note_length: int = 12,
        format_penalty: float = 0.0,
        split: Split | None = None,
        env_instruction: str | None = None,
    ) -> None:
        check_count("recall", "num_facts", num_facts)
        check_count("recall", "num_questions", num_questions)
        check_type("recall", "num_distractors", num_distractors, int, "a whole number")
        if min_distractors is not None:
            check_type(
                "recall",
                "min_distractors",
                min_distractors,
                int,
                "a whole number, or null",
            )
        check_type("recall", "shows_note", shows_note, bool, "true or false")
        check_count("recall", "note_length", note_length)
        check_choice("recall", "split", split, (*get_args(Split), None))
        check_format_penalty(format_penalty)
        if num_distractors < 0:
            raise EnvironmentFault(f"recall: got num_distractors {num_distractors}; it must be 0 or more")
        if not 0 <= (min_distractors or 0) <= num_distractors:
            raise EnvironmentFault(
                f"recall: got min_distractors {min_distractors}; it must be 0 to num_distractors, "
                f"{num_distractors}"
            )
        if num_facts > len(KEYS):
            raise EnvironmentFault(f"recall: got num_facts {num_facts}; it must be at most {len(KEYS)}")
        self._num_facts = num_facts
        self._num_distractors = num_distractors
        self._min_distractors = min_distractors
        self._num_questions = num_questions
        self._shows_note = shows_note
        self._note_length = note_length
        self._format_penalty = float(format_penalty)
        self._split = split
        self._instruction = _rules(shows_note) if env_instruction is None else env_instruction
        self._seed = 0
        self._facts: list[tuple[str, str]] = []
        self._questions: list[str] = []
        self._num_right = 0
        self._texts: list[str] = []
        self._turn = 0
        self.note = ""
        """The note of the current episode."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Draws the facts of `seed`. Without a seed, one is derived from the last episode's seed."""
        self._seed = episode_seed(seed, self._seed)
        self._facts = self._drawn_facts()
        rng = random.Random(derive_seed(self._seed, "texts"))
        self._questions = [rng.choice(self._facts)[0] for _ in range(self._num_questions)]
        self._texts = [self._telling(key, value, rng) for key, value in self._facts]
        self._texts += [self._asking(key, rng) for key in self._questions]
        self._num_right = 0
        self._turn = 0
        self.note = ""
        return self._observe(), {"env_instruction": self._instruction}

    def step(self, action: str) -> Step:
        if not self._facts:
            raise EnvironmentFault("RecallEnv.step came before reset; call reset(seed=…) first")
        is_valid = _ITEM.search(action) is not None
        key = self._asked()
        is_right = key is not None and action.strip().removeprefix(key) == dict(self._facts)[key]
        self._num_right += is_right
        if is_valid and self._turn < self._num_facts:
            self.note = ",".join(_ITEM.findall(action)[: self._note_length])
        num_told = min(self._turn + 1, self._num_facts)
        kept = set(_PAIR.findall(self.note)) & set(self._facts[:num_told])
        self._turn += 1
        penalty = 0.0 if is_valid else self._format_penalty
        metrics = {
            "success": float(self._num_right == self._num_questions),
            "recalled": self._num_right / self._num_questions,
            "kept": len(kept) / num_told,
            "action_is_valid": float(is_valid),
            "format_penalty": penalty,
        }
        reward = is_right / self._num_questions + penalty
        is_over = self._turn >= len(self._texts)
        return self._observe(), reward, is_over, False, {"metrics": metrics}

    def state_key(self) -> str:
        """The turn's text and the note, which are all that a model in mode `step` can know."""
        return f"{self._turn}|{self._text()}|{self.note}"

    def expert_action(self) -> str:
        """A note of the facts that note and text show; at a question, the fact that the note has. A fact that
        an earlier note lost is lost for the expert too: a demonstration shows nothing that can't be seen. It
        then answers with the first digit. Without a note the expert knows all facts.

        The facts of a note are in a new order each turn. In the old order, a model would learn to copy by
        places, and never to find the digit of a letter, which the questions need."""
        if self._turn < self._num_facts:
            facts = self._visible()
            random.Random(derive_seed(self._seed, "note", self._turn)).shuffle(facts)
            return _note_of(facts)
        return self._answer(dict(self._visible()).get(self._asked() or "", VALUES[0]))

    def random_action(self, rng: random.Random) -> str:
        """Some of the facts that note and text show, at least one; at a question, any digit."""
        if self._turn >= self._num_facts:
            return self._answer(rng.choice(VALUES))
        visible = self._visible()
        return _note_of(rng.sample(visible, rng.randint(1, len(visible))))

    def _asked(self) -> str | None:
        """The letter that is asked for; None if facts are told, or the episode is over."""
        number = self._turn - self._num_facts
        return self._questions[number] if 0 <= number < self._num_questions else None

    def _answer(self, digit: str) -> str:
        """The digit behind the letter that is asked for, as the note has it: then the token before the digit
        is the same in both, and a small model finds the digit by that."""
        return f"{self._asked() or ''}{digit}"

    def _visible(self) -> list[tuple[str, str]]:
        """The facts of the note and the one that is being told. All facts told if notes aren't shown."""
        new = self._facts[self._turn : self._turn + 1]
        if not self._shows_note:
            return [*self._facts[: self._turn], *new]
        return [*_PAIR.findall(self.note), *new]

    def _observe(self) -> str:
        if self.note and self._shows_note:
            return f"Note:\n{self.note}\n{self._text()}"
        return self._text()

    def _text(self) -> str:
        return self._texts[self._turn] if self._turn < len(self._texts) else "That is all."

    def _telling(self, key: str, value: str, rng: random.Random) -> str:
        sentences = self._distractors(self._num_distractors, rng)
        sentences.insert(rng.randint(0, len(sentences)), f"Remember ({key}{value}).")
        return " ".join(sentences)

    def _asking(self, key: str, rng: random.Random) -> str:
        sentences = self._distractors(0, rng)
        return " ".join([*sentences, f"What is ({key})?"])

    def _distractors(self, fixed_number: int, rng: random.Random) -> list[str]:
        """Sentences that don't matter: `fixed_number` of them, or as many as are drawn."""
        number = fixed_number
        if self._min_distractors is not None:
            number = rng.randint(self._min_distractors, self._num_distractors)
        return [f"The {rng.choice(_THINGS)} is {rng.choice(_STATES)}." for _ in range(number)]

    def _drawn_facts(self) -> list[tuple[str, str]]:
        for draw in range(MAX_DRAWS):
            rng = random.Random(derive_seed(self._seed, "facts", draw))
            facts = [(key, rng.choice(VALUES)) for key in rng.sample(KEYS, self._num_facts)]
            if in_split(content_hash(_note_of(sorted(facts))), self._split):
                return facts
        raise EnvironmentFault(f"recall: none of {MAX_DRAWS} draws of facts is for {self._split}")


def _note_of(facts: list[tuple[str, str]]) -> str:
    return ",".join(f"{key}{value}" for key, value in facts)


def _rules(shows_note: bool) -> str:
    rules = "You are told facts, each a letter and a digit, and asked for one of them at the end."
    if shows_note:
        rules += "\nUntil then, answer with a note for yourself: it replaces the note that you see."
    return rules
