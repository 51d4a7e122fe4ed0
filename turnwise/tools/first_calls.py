"""Notices a tool all of whose first calls raise, which is seldom the model's mistake."""

import logging

logger = logging.getLogger(__name__)

NUM_FIRST = 10
"""The number of calls that must all raise for a warning."""


class FirstCalls:
    """Counts the first calls of one tool, until one returns. Warns once if `NUM_FIRST` have raised."""

    def __init__(self, tool: str) -> None:
        self._tool = tool
        self._num_raised: int | None = 0

    def returned(self) -> None:
        """A call returned a result: the tool works."""
        self._num_raised = None

    def raised(self, error: Exception) -> None:
        """A call raised an error that counts as the model's mistake."""
        if self._num_raised is None:
            return
        self._num_raised += 1
        if self._num_raised == NUM_FIRST:
            self._num_raised = None
            logger.warning(
                "all of the first %d calls of the tool %s raised an error, the last one %s: %s. The model "
                "reads it as its own mistake. If it is the tool's, correct the tool",
                NUM_FIRST,
                self._tool,
                type(error).__name__,
                error,
            )
