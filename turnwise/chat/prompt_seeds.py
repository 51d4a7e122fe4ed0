"""Seeds of the responses in a tree: each depends on its prompt's ids, and on how often they were asked."""

import hashlib
from array import array
from collections import Counter

from turnwise.chat.ledger import Prefix
from turnwise.types import derive_seed


class PromptSeeds:
    """Seeds that depend on prompts alone, not on what arrives when. The hash of a context is kept at the end
    of each of its responses, so that a prompt costs what is new in it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_requests: Counter[bytes] = Counter()
        self._hashes: list[hashlib.blake2b] = []

    def seed(self, prompt_ids: "array[int]", parent: int | None, num_before: int) -> int:
        """The seed of the next response to a prompt. Its first `num_before` ids are those of the context that
        the turn `parent` ends."""
        hashed = self._hash_of(parent)
        hashed.update(memoryview(prompt_ids)[num_before:])
        digest = hashed.digest()
        seed = derive_seed(self._seed, digest.hex(), self._num_requests[digest])
        self._num_requests[digest] += 1
        return seed

    def add(self, parent: int | None, prefix: Prefix) -> None:
        """Adds a turn, whose ids are the last ones of `prefix`."""
        hashed = self._hash_of(parent)
        hashed.update(prefix.added_ids)
        hashed.update(prefix.response_ids)
        self._hashes.append(hashed)

    def _hash_of(self, turn: int | None) -> hashlib.blake2b:
        if turn is None:
            return hashlib.blake2b(digest_size=16)
        return self._hashes[turn].copy()
