"""Builds the tasks of a split from its environments and rows."""

import json
import logging
from dataclasses import replace

from turnwise.chat.template import ChatTemplate
from turnwise.examine.examined import Examined
from turnwise.examine.prompts import PromptLimit, warn_of_turn_tokens
from turnwise.examine.rows import SPLITS, splits_with_rows
from turnwise.rollout.tasks import CurriculumTasks, DataRow, RowTasks, SeededTasks, TaskSource
from turnwise.spec import ROWS_TAG
from turnwise.types import Split, Task

logger = logging.getLogger(__name__)


def build_tasks(examined: Examined, split: Split, template: ChatTemplate) -> TaskSource:
    """The tasks of a split in playing order. Rows whose prompts are too long are left out, and a warning says
    how many."""
    config = examined.config
    manager = config.env_manager(split)
    is_training = split == "train"
    agents = {tag: config.custom_envs[tag].agent_name for tag in manager.env_tags}
    rows = None
    if manager.has_rows:
        fitting = _fitting(examined, split, template)
        if is_training:
            rows = RowTasks(
                config.seed,
                split,
                fitting,
                config.data.shuffle,
                config.data.num_epochs,
            )
        else:
            rows = RowTasks(config.seed, split, fitting, shuffle=False, num_epochs=1)
    if config.data.curriculum and is_training:
        return CurriculumTasks(
            config.seed,
            split,
            manager.tags,
            agents,
            rows,
            ROWS_TAG,
            config.num_task_versions,
        )
    if rows is not None and not manager.env_tags:
        return rows
    return SeededTasks(
        config.seed,
        split,
        tuple(manager.tags),
        tuple(manager.num_groups_partition),
        agents,
        rows,
        ROWS_TAG,
    )


def _fitting(examined: Examined, split: Split, template: ChatTemplate) -> list[DataRow]:
    rows = examined.rows(split)
    rows.say_left_out()
    warn_of_turn_tokens(rows.rows, examined.config.data.prompt_key, template, rows.files)
    limit = PromptLimit.of(examined.config, split, template, examined.tools.schemas)
    return limit.fitting(rows.rows)


def row_tasks(examined: Examined, split: Split) -> list[Task]:
    """A task for each row in the order of the files. Rows with too long prompts are included."""
    rows = [row for _, row in examined.rows(split).rows]
    source = RowTasks(examined.config.seed, split, rows, shuffle=False)
    return [replace(source.task(number), id=f"{split}/row-{number}") for number in range(len(rows))]


def say_shared_prompts(examined: Examined) -> None:
    """Warns if validation prompts are also prompts of training."""
    if splits_with_rows(examined.config) != [*SPLITS]:
        return
    train_prompts = _prompts(examined, "train")
    val_prompts = _prompts(examined, "val")
    num_shared = len(train_prompts & val_prompts)
    if num_shared:
        logger.warning(
            "data.val_files: %d of %d prompts are in data.train_files too", num_shared, len(val_prompts)
        )


def _prompts(examined: Examined, split: Split) -> set[str]:
    """The prompts of a split's rows as JSON."""
    key = examined.config.data.prompt_key
    return {json.dumps(row.payload[key]) for _, row in examined.rows(split).rows}
