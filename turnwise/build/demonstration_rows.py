"""Reads the demonstrations of supervised fine-tuning, and encodes those that have the right shape and fit."""

import logging
from collections.abc import Iterable

from turnwise.build.prompt_check import warn_of_turn_tokens_in
from turnwise.chat.demonstration import TooLongError, check_demonstration, check_row_flags, encode_demonstration
from turnwise.chat.template import ChatTemplate
from turnwise.config import SFTConfig
from turnwise.data.bad_rows import SKIP_HINT, BadRows
from turnwise.data.demonstrations import DemonstrationRow, read_rows
from turnwise.errors import ChatTemplateError, DataError, counted
from turnwise.types import Sample

logger = logging.getLogger(__name__)


def check_source(config: SFTConfig, key: str, name: str) -> None:
    """Reads one source of `train_files` or `val_files`. Raises DataError if it can't be read, if it holds rows of the wrong
    shape that aren't skipped, or if no row is left."""
    bad = BadRows()
    rows = _checked(config, key, [name], bad)
    if config.data.on_bad_row == "error":
        bad.refuse()
    elif not rows:
        bad.leave_out(f"{key} {name}", len(bad.sentences))


def read_samples(config: SFTConfig, template: ChatTemplate, key: str) -> list[Sample]:
    """The rows of `train_files` or `val_files` as training samples. Rows that are too long are left out with a warning, and so
    are those of the wrong shape under `data.on_bad_row: skip`. Raises DataError if those aren't skipped, or none is left."""
    names = (config.train_files if key == "train_files" else config.val_files) or []
    if not names:
        return []
    bad = BadRows()
    rows = _checked(config, key, names, bad)
    num_rows = len(rows) + len(bad.sentences)
    samples = encode_demonstrations(template, rows, config.sequence_length, key, bad)
    warn_of_turn_tokens_in([(row.place, row.messages) for row in rows], template, key)
    if config.data.on_bad_row == "error":
        bad.refuse()
    bad.leave_out(key, num_rows)
    return samples


def _checked(config: SFTConfig, key: str, names: list[str], bad: BadRows) -> list[DemonstrationRow]:
    rows = []
    for row in read_rows(names, key, config.data.format, bad):
        try:
            check_row_flags(row.columns)
            check_demonstration(row.messages)
        except DataError as error:
            bad.add(f"{row.place}: {error}")
        else:
            rows.append(row)
    return rows


def encode_demonstrations(
    template: ChatTemplate,
    rows: Iterable[DemonstrationRow],
    max_length: int,
    key: str = "train_files",
    bad: BadRows | None = None,
) -> list[Sample]:
    """The rows as training samples. Rows of more than `max_length` tokens are left out, and a warning says how many; another
    warning counts empty answers. Rows that can't be rendered are added to `bad`. Raises DataError if all rows are too long,
    or, without `bad`, if one can't be rendered."""
    refused = BadRows() if bad is None else bad
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
            refused.add(f"{place}: {error}")
    if bad is None:
        refused.refuse(SKIP_HINT)
    if too_long and not samples and len(too_long) == num_rows:
        raise DataError(
            f"{key}: no row fits; raise sequence_length or shorten the rows. The first of {num_rows}: {too_long[0]}"
        )
    if too_long:
        logger.warning(
            "%s: %d of %d rows are left out, since they have more tokens than sequence_length %d (the first: %s); raise it or "
            "shorten the rows",
            key,
            len(too_long),
            num_rows,
            max_length,
            too_long[0],
        )
    if empty:
        logger.warning(
            "%s: %s would teach an empty answer, without text or call (the first: %s); mark it as context (weight: 0) "
            "or remove it",
            key,
            counted(len(empty), "row"),
            empty[0],
        )
    return samples
