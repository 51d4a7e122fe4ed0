"""An index of texts in memory, searched by BM25 (Robertson & Zaragoza 2009, in Lucene's form), by the package
bm25s."""

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import NotAvailableError, install_hint

_WORD = re.compile(r"\b\w+\b")


class WordIndex:
    """Texts by number, from 0. Case doesn't matter, and every word counts. `user` and `extra` are for the
    message if bm25s isn't installed: who needs it, and the extra that installs it. Raises NotAvailableError
    then.

    >>> index = WordIndex(["red lamp", "red tent", "blue tent"], "the doctest", "tools")
    >>> index.best("a tent, red", 2).tolist(), index.best("cup", 2).tolist()
    ([1, 0], [])
    """

    def __init__(self, texts: Iterable[str], user: str, extra: str) -> None:
        library = _library(user, extra)
        words = [words_of(text) for text in texts]
        self.has_words = any(words)
        """Whether any text holds a word. Without words, nothing is found."""
        self._index: Any = None
        if self.has_words:
            self._index = library.BM25()
            self._index.index(words, show_progress=False)

    def best(self, query: str, num_best: int) -> NDArray[np.int64]:
        """The numbers of the texts that share a word with the query, best first, at most `num_best`. Equal
        texts come in the order of their numbers."""
        words = words_of(query)
        if not words or not self.has_words:
            return np.zeros(0, np.int64)
        scores = self._index.get_scores(words)
        if len(scores) > num_best:
            # A partial sort leaves ties in any order, so it only finds the score that is good enough.
            lowest = np.partition(scores, -num_best)[-num_best]
            matching = np.flatnonzero((scores > 0) & (scores >= lowest))
        else:
            matching = np.flatnonzero(scores)
        order = np.argsort(-scores[matching], kind="stable")
        return matching[order][:num_best]


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return _WORD.findall(text.lower())


def _library(user: str, extra: str) -> Any:
    try:
        import bm25s
    except ImportError as fault:
        raise NotAvailableError(
            f"{user} needs bm25s, which isn't installed; {install_hint(extra)}"
        ) from fault
    return bm25s
