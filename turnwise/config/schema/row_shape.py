"""How rows of data sets are read, for reinforcement learning and for supervised fine-tuning."""

from typing import Literal

from turnwise.config.schema.section import Section


class RowShape(Section):
    """The form of the rows, and what happens to those of another form."""

    format: Literal["sharegpt", "alpaca", "question_answer", "prompt_completion"] | None = None
    """Columns of the rows: conversations; instruction, input, output; question, answer; prompt, completion
    [`messages` for SFT, `prompt_key` for RL]."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Rows of the wrong shape end the run before it starts, or are left out with a warning that counts
    them."""
