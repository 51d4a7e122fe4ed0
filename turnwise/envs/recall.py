"""Facts are told over several turns, between sentences that don't matter, and asked for at the end. A model
whose context holds a single turn has to keep them in a note."""

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

KINDS = MappingProxyType(
    {
        "animal": ("ant", "bee", "cat", "cow", "dog", "fox", "hen", "owl", "pig", "rat"),
        "city": ("Berlin", "Cairo", "Delhi", "Lima", "Madrid", "Oslo", "Paris", "Quito", "Rome", "Tokyo"),
        "colour": ("beige", "black", "blue", "brown", "grey", "pink", "red", "violet", "white", "yellow"),
        "drink": ("beer", "cider", "cocoa", "coffee", "juice", "milk", "soda", "tea", "water", "wine"),
        "fruit": ("apple", "fig", "grape", "kiwi", "lemon", "lime", "mango", "peach", "pear", "plum"),
        "instrument": ("cello", "drum", "flute", "guitar", "harp", "horn", "lute", "organ", "oboe", "piano"),
        "metal": ("cobalt", "copper", "gold", "iron", "lead", "nickel", "silver", "steel", "tin", "zinc"),
        "sport": ("chess", "golf", "hockey", "judo", "polo", "rowing", "rugby", "skiing", "soccer", "squash"),
        "tool": ("axe", "chisel", "drill", "file", "hammer", "pliers", "rake", "saw", "spade", "wrench"),
        "tree": ("ash", "beech", "birch", "cedar", "elm", "larch", "maple", "oak", "pine", "willow"),
    }
)
"""The words that facts are made of. A word says of which kind it is, so a model looks an answer up by what
words mean to it. No blank stands before one anywhere: a tokenizer has two tokens for a word, with a blank and
without, and a small model copies tokens."""
KIND_OF = MappingProxyType({word: kind for kind, words in KINDS.items() for word in words})
MAX_DRAWS = 1000
_ITEM = re.compile(r"[^\s,]+")
_WORD = re.compile(r"\w+")
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
    """`num_facts` turns tell one fact each, a word (`cat`), and no two are of the same kind; then
    `num_questions` turns ask for the word of a kind each (`Which animal?`). The right answers have reward 1
    together, everything else 0. Raises EnvironmentFault if an argument is out of range.

    In a turn that tells, the whole action is the model's new note. It replaces the old note, and the next
    observation shows it. In a turn that asks, the action is the answer: the word as it was told, and a full
    stop behind it does no harm. In mode `step` a model sees nothing else of earlier turns. An empty action is
    invalid: it keeps the old note and costs `format_penalty` (≤ 0).

    Metrics: `success`, whether all answers were right, `recalled`, the share of them that were, and `kept`,
    the share of the facts told that the note holds (last).

    Args:
        num_facts: number of facts, and of the turns that tell them, at most 10, the number of kinds.
        num_distractors: maximum sentences that don't matter in each turn.
        min_distractors: minimum of these sentences: their number is drawn in each turn. None: it is
            `num_distractors` where facts are told, and 0 where one is asked for. Where it varies, a fact
            stands at another place in each prompt, and a model learns to look for words instead of places.
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
    'The boat is far. Remember (Oslo).'
    >>> memory.step("Oslo")[0]
    'Note:\\nOslo\\nThe window is dark. Remember (steel).'
    >>> memory.step("Oslo,steel")[0]
    'Note:\\nOslo,steel\\nWhich metal?'
    >>> memory.step("steel")[1:3]
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
        if num_facts > len(KINDS):
            raise EnvironmentFault(f"recall: got num_facts {num_facts}; it must be at most {len(KINDS)}")
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
        self._facts: list[str] = []
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
        self._questions = [KIND_OF[rng.choice(self._facts)] for _ in range(self._num_questions)]
        self._texts = [self._telling(word, rng) for word in self._facts]
        self._texts += [self._asking(kind, rng) for kind in self._questions]
        self._num_right = 0
        self._turn = 0
        self.note = ""
        return self._observe(), {"env_instruction": self._instruction}

    def step(self, action: str) -> Step:
        if not self._facts:
            raise EnvironmentFault("RecallEnv.step came before reset; call reset(seed=…) first")
        is_valid = _ITEM.search(action) is not None
        kind = self._asked()
        is_right = kind is not None and action.strip().rstrip(".") == _of_kind(self._facts, kind)
        self._num_right += is_right
        if is_valid and self._turn < self._num_facts:
            self.note = ",".join(_ITEM.findall(action)[: self._note_length])
        num_told = min(self._turn + 1, self._num_facts)
        kept = set(_WORD.findall(self.note)) & set(self._facts[:num_told])
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
        """A note of the facts that note and text show; at a question, the word that the note has of that
        kind. A fact that an earlier note lost is lost for the expert too: a demonstration shows nothing that
        can't be seen. It then answers with the first word of the kind. Without a note the expert knows all
        facts."""
        kind = self._asked()
        if kind is None:
            return _note_of(self._visible())
        return _of_kind(self._visible(), kind) or KINDS[kind][0]

    def random_action(self, rng: random.Random) -> str:
        """Some of the facts that note and text show, at least one; at a question, any word of that kind."""
        kind = self._asked()
        if kind is not None:
            return rng.choice(KINDS[kind])
        visible = self._visible()
        if not visible:
            return ""
        chosen = set(rng.sample(visible, rng.randint(1, len(visible))))
        return _note_of([word for word in visible if word in chosen])

    def _asked(self) -> str | None:
        """The kind that is asked for; None if facts are told, or the episode is over."""
        number = self._turn - self._num_facts
        return self._questions[number] if 0 <= number < self._num_questions else None

    def _visible(self) -> list[str]:
        """The facts of the note and the one that is being told. All facts told if notes aren't shown."""
        new = self._facts[self._turn : self._turn + 1]
        if not self._shows_note:
            return self._facts[: self._turn] + new
        noted = dict.fromkeys(word for word in _WORD.findall(self.note) if word in KIND_OF)
        told = {KIND_OF[word] for word in new}
        return [word for word in noted if KIND_OF[word] not in told] + new

    def _observe(self) -> str:
        if self.note and self._shows_note:
            return f"Note:\n{self.note}\n{self._text()}"
        return self._text()

    def _text(self) -> str:
        return self._texts[self._turn] if self._turn < len(self._texts) else "That is all."

    def _telling(self, word: str, rng: random.Random) -> str:
        sentences = self._distractors(self._num_distractors, rng)
        sentences.insert(rng.randint(0, len(sentences)), f"Remember ({word}).")
        return " ".join(sentences)

    def _asking(self, kind: str, rng: random.Random) -> str:
        sentences = self._distractors(0, rng)
        return " ".join([*sentences, f"Which {kind}?"])

    def _distractors(self, fixed_number: int, rng: random.Random) -> list[str]:
        """Sentences that don't matter: `fixed_number` of them, or as many as are drawn."""
        number = fixed_number
        if self._min_distractors is not None:
            number = rng.randint(self._min_distractors, self._num_distractors)
        return [f"The {rng.choice(_THINGS)} is {rng.choice(_STATES)}." for _ in range(number)]

    def _drawn_facts(self) -> list[str]:
        for draw in range(MAX_DRAWS):
            rng = random.Random(derive_seed(self._seed, "facts", draw))
            facts = [rng.choice(KINDS[kind]) for kind in rng.sample(sorted(KINDS), self._num_facts)]
            if in_split(content_hash(_note_of(sorted(facts))), self._split):
                return facts
        raise EnvironmentFault(f"recall: none of {MAX_DRAWS} draws of facts is for {self._split}")


def _note_of(words: list[str]) -> str:
    return ",".join(words)


def _of_kind(words: list[str], kind: str) -> str | None:
    """The first of the words that is of this kind; None if none is."""
    return next((word for word in words if KIND_OF[word] == kind), None)


def _rules(shows_note: bool) -> str:
    rules = "You are told facts, a word each, and asked for some of them at the end: answer with the word."
    if shows_note:
        rules += "\nUntil then, answer with a note for yourself: it replaces the note that you see."
    return rules
