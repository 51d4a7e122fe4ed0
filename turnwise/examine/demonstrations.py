"""Reads the demonstrations of supervised fine-tuning, and encodes those that have the right shape and fit."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from turnwise.chat.demonstration import (
    TooLongError,
    check_demonstration,
    check_row_flags,
    encode_demonstration,
)
from turnwise.chat.template import ChatTemplate
from turnwise.config import SFTConfig
from turnwise.data.bad_rows import SKIP_HINT, BadRows
from turnwise.data.demonstrations import DemonstrationRow, read_rows
from turnwise.errors import ChatTemplateError, DataError, counted
from turnwise.examine.prompts import warn_of_turn_tokens_in
from turnwise.types import Sample

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Demonstrations:
    """Rows of demonstrations, and those that are left out because they have the wrong shape."""

    rows: list[DemonstrationRow] = field(default_factory=list)
    bad: BadRows = field(default_factory=BadRows)

    def extend(self, source: "Demonstrations") -> None:
        """Adds the rows of another source at the end."""
        self.rows += source.rows
        for sentence in source.bad.sentences:
            self.bad.add(sentence)


def read_demonstrations(config: SFTConfig, key: str, name: str) -> Demonstrations:
    """Reads one source of `train_files` or `val_files`. Raises DataError if it can't be read, if it holds
    rows of the wrong shape that aren't skipped, or if no row is left."""
    read = Demonstrations()
    for row in read_rows([name], key, config.data.format, read.bad):
        try:
            check_row_flags(row.columns)
            check_demonstration(row.messages)
        except DataError as error:
            read.bad.add(f"{row.place}: {error}")
        else:
            read.rows.append(row)
    if config.data.on_bad_row == "error":
        read.bad.refuse()
    elif not read.rows:
        read.bad.leave_out(f"{key} {name}", len(read.bad.sentences))
    return read


def encode_all(config: SFTConfig, template: ChatTemplate, key: str, read: Demonstrations) -> list[Sample]:
    """The demonstrations of `key` as training samples. Rows that are too long are left out with a warning,
    and so are those of the wrong shape under `data.on_bad_row: skip`. Raises DataError if those aren't
    skipped, or none is left."""
    if not read.rows and not read.bad.sentences:
        return []
    num_rows = len(read.rows) + len(read.bad.sentences)
    samples = encode_demonstrations(template, read.rows, config.sequence_length, key, read.bad)
    conversations = [(row.place, row.messages) for row in read.rows]
    warn_of_turn_tokens_in(conversations, template, key)
    if config.data.on_bad_row == "error":
        read.bad.refuse()
    read.bad.leave_out(key, num_rows)
    return samples


def encode_demonstrations(
    template: ChatTemplate,
    rows: Iterable[DemonstrationRow],
    max_length: int,
    key: str = "train_files",
    bad: BadRows | None = None,
) -> list[Sample]:
    """The rows as training samples. Rows of more than `max_length` tokens are left out, and a warning says
    how many; another warning counts empty answers. Rows that can't be rendered are added to `bad`. Raises
    DataError if all rows are too long, or, without `bad`, if one can't be rendered."""
    unrendered = BadRows() if bad is None else bad
    samples: list[Sample] = []
    too_long: list[str] = []
    empty: list[str] = []
    num_rows = 0
    for place, messages, tools, _ in rows:
        num_rows += 1
        try:
            samples.append(encode_demonstration(template, messages, tools, max_length))
            if not check_demonstration(messages):
                empty.append(place)
        except TooLongError as error:
            too_long.append(f"{place} {str(error).removeprefix('the conversation ')}")
        except (DataError, ChatTemplateError) as error:
            unrendered.add(f"{place}: {error}")
    if bad is None:
        unrendered.refuse(SKIP_HINT)
    if too_long and not samples and len(too_long) == num_rows:
        raise DataError(
            f"{key}: no row fits; raise sequence_length or shorten the rows. The first of {num_rows}: "
            f"{too_long[0]}"
        )
    if too_long:
        logger.warning(
            "%s: %d of %d rows are left out, since they have more tokens than sequence_length %d (the first: "
            "%s); raise it or shorten the rows",
            key,
            len(too_long),
            num_rows,
            max_length,
            too_long[0],
        )
    if empty:
        logger.warning(
            "%s: %s would teach an empty answer, without text or call (the first: %s); mark it as context "
            "(weight: 0) or remove it",
            key,
            counted(len(empty), "row"),
            empty[0],
        )
    return samples
