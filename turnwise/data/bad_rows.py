"""Collects the rows of the wrong shape, so that one message counts them all."""

import logging
from dataclasses import dataclass, field

from turnwise.errors import DataError, counted

logger = logging.getLogger(__name__)

MOST_SHOWN = 10
SKIP_HINT = "data.on_bad_row=skip removes such rows"


@dataclass(slots=True)
class BadRows:
    """The rows that were refused, each as a sentence that begins with the row's place."""

    sentences: list[str] = field(default_factory=list)

    def add(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def refuse(self, hint: str = SKIP_HINT) -> None:
        """Raises DataError if there is any, with their number and at most `MOST_SHOWN` of them."""
        if self.sentences:
            number = counted(len(self.sentences), "row")
            raise DataError(self._message(f"{number} of the wrong shape ({hint})"))

    def leave_out(self, source: str, num_rows: int) -> None:
        """Warns that the rows are left out of the `num_rows` rows of `source`. Raises DataError if none would
        be left."""
        if not self.sentences:
            return
        number = len(self.sentences)
        if number >= num_rows:
            raise DataError(
                self._message(f"{source}: none of {counted(num_rows, 'row')} has the right shape")
            )
        head = f"{source}: {number} of {num_rows} rows are left out, since they have the wrong shape"
        logger.warning("%s", self._message(head))

    def _message(self, head: str) -> str:
        if len(self.sentences) == 1:
            return f"{self.sentences[0]} [{head}]"
        shown = self.sentences[:MOST_SHOWN]
        lines = [f"{head}:", *shown]
        num_hidden = len(self.sentences) - len(shown)
        if num_hidden:
            lines.append(f"and {num_hidden} more")
        return "\n  ".join(lines)
