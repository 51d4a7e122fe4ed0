"""The ledger: which ids a server has seen, response by response, and the Turns that hold them. No template or
server is needed.

A context is a path of `Prefix`es, each of which ends with a sampled response and continues the one before it.
Prefixes never change, so several responses may continue the same one: these are branches, and share what
comes before them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from turnwise.errors import RolloutError
from turnwise.types import Completion, Media, Message, SamplingParams, Turn


class Prefix(NamedTuple):
    """The ids of one context up to the end of a response: those of `previous`, then `added_ids`, which
    weren't sampled, then `response_ids`, which were. Ids aren't kept in lists, whose entries the garbage
    collector would scan again and again.

    >>> first = EMPTY.continued(array("q", [2, 11, 5, 3]), array("q", [12, 5]))
    >>> second = first.continued(array("q", [2, 14, 5, 3]), array("q", [13, 5]))
    >>> second.token_ids().tolist(), second.num_tokens
    ([2, 11, 5, 3, 12, 5, 2, 14, 5, 3, 13, 5], 12)
    >>> first.continued(array("q", [2, 16, 5, 3]), array("q", [17, 5])).token_ids().tolist()
    [2, 11, 5, 3, 12, 5, 2, 16, 5, 3, 17, 5]
    """

    previous: Prefix | None
    added_ids: array[int]
    response_ids: array[int]
    num_tokens: int
    """The number of all ids, those of `previous` included."""
    media: tuple[Media, ...]
    """The images of the whole context, in order."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing comes before the next response: it starts a context."""
        return self.previous is None

    def continued(
        self, added_ids: array[int], response_ids: array[int], media: tuple[Media, ...] = ()
    ) -> Prefix:
        """This prefix with more ids, which show `media`, and a response after it."""
        num_tokens = self.num_tokens + len(added_ids) + len(response_ids)
        return Prefix(self, added_ids, response_ids, num_tokens, self.media + media)

    def token_ids(self) -> array[int]:
        """All ids, as a new array."""
        pieces = []
        prefix: Prefix | None = self
        while prefix is not None:
            pieces.append(prefix.response_ids)
            pieces.append(prefix.added_ids)
            prefix = prefix.previous
        pieces.reverse()
        return array("q", b"".join(pieces))


EMPTY = Prefix(None, array("q"), array("q"), 0, ())
"""What comes before the first response of a context: nothing."""


class Prompt(NamedTuple):
    """What is new before a response: ids that follow those of `prefix`, and the images that they show."""

    prefix: Prefix
    added_ids: array[int]
    media: tuple[Media, ...] = ()

    def token_ids(self) -> array[int]:
        """The ids of the whole prompt, as the server sees them."""
        return self.prefix.token_ids() + self.added_ids

    def answered(self, response_ids: Sequence[int]) -> Prefix:
        """The prefix that ends with this response."""
        return self.prefix.continued(self.added_ids, array("q", response_ids), self.media)

    def turn(
        self,
        completion: Completion,
        sampling: SamplingParams,
        text: str,
        observation: str,
    ) -> Turn:
        """The Turn of a response to this prompt. `text` is the decoded response, `observation` the text
        before it."""
        return Turn(
            prompt_ids=np.array(self.added_ids, dtype=np.int64),
            response_ids=completion.token_ids.astype(np.int64),
            logprobs=np.array(completion.logprobs, np.float32),
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=text,
            observation=observation,
            media=self.media,
            starts_context=self.prefix.is_empty,
            is_greedy=sampling.is_greedy,
            generate_s=completion.generate_s,
            kept_ids=completion.kept_ids,
            kept_offsets=completion.kept_offsets,
            sampling=sampling,
        )


class Ledger:
    """The turns of one conversation, each with the prefix that ends with its response. Entries are only
    appended. The turns may be annotated (rewards, actions), but `verify` finds out if somebody changes their
    ids. `name` names the conversation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.turns: list[Turn] = []
        self._prefixes: list[Prefix] = []
        self._messages: list[Message] = []

    def commit(
        self, turn: Turn, prefix: Prefix, parent: int | None = None, messages: Sequence[Message] = ()
    ) -> None:
        """Adds a turn, whose ids are the last ones of `prefix`. `parent` is what `Turn.parent` says.
        `messages` are what a prompt shows if it shows the turn again."""
        turn.parent = parent
        self.turns.append(turn)
        self._prefixes.append(prefix)
        self._messages += messages

    def prefix(self, turn: int) -> Prefix:
        """The prefix that ends with the response of the turn at this index."""
        return self._prefixes[turn]

    def messages(self) -> list[Message]:
        """The messages of all turns, responses included, as a prompt shows them again: a call stands in
        `tool_calls` only, not in the text too."""
        return list(self._messages)

    def verify(self) -> None:
        """Raises RolloutError if the ids of a turn were changed, or a turn was lost or moved: each turn must
        hold the ids that were added to its context and those that the server answered."""
        of_turns = [np.zeros(0, np.int64)]
        for turn in self.turns:
            of_turns += (turn.prompt_ids, turn.response_ids)
        of_server: list[array[int]] = []
        for prefix in self._prefixes:
            of_server += (prefix.added_ids, prefix.response_ids)
        recorded = np.concatenate(of_turns)
        served = np.frombuffer(b"".join(of_server), np.int64)
        if np.array_equal(recorded, served):
            return
        length = min(len(recorded), len(served))
        differing = np.flatnonzero(recorded[:length] != served[:length])
        first = differing[0] if len(differing) else length
        raise RolloutError(
            f"the turns of {self.name!r} hold {len(recorded)} tokens and the server saw {len(served)}; they "
            f"differ from position {first} on: turns may be annotated, their ids never changed"
        )
