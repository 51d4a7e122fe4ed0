"""How many tokens a model was given and how many it had to compute."""

from __future__ import annotations

from typing import NamedTuple


class TokenCounts(NamedTuple):
    """Counts of tokens that went through a model.

    >>> TokenCounts(given=100, distinct=60, computed=80).padding_share
    0.25
    """

    given: int = 0
    """Tokens of samples."""
    distinct: int = 0
    """Tokens that no other sample of the same micro-batch has computed: shared prefixes count once."""
    computed: int = 0
    """Positions of the model's input, padding among them."""

    @property
    def padding_share(self) -> float:
        return 1 - self.distinct / self.computed

    @property
    def merged_share(self) -> float:
        return 1 - self.distinct / self.given

    def plus(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(*(a - b for a, b in zip(self, other, strict=True)))
