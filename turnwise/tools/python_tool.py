"""The registered tool `python`: runs the model's code in the sandbox."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from turnwise.errors import ConfigError
from turnwise.tools.function_tool import FunctionTool, check_keys
from turnwise.tools.sandbox import Limits, isolation, run_python

logger = logging.getLogger(__name__)


class PythonTool(FunctionTool):
    """Runs each program in a fresh process. If the program fails, the model reads its error as the result.
    The config may have the fields of `sandbox.Limits`. Raises ConfigError if it has another key or a value
    that isn't allowed; NotAvailableError, which says what is missing, if this system can't isolate a
    process."""

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any] | None) -> None:
        names = [field.name for field in fields(Limits)]
        check_keys("tool python", config, names)
        try:
            self._limits = Limits(**config)
        except ConfigError as fault:
            raise ConfigError(f"tool python: config.{fault}") from None
        logger.info("The tool python isolates the model's programs by %s", isolation())
        super().__init__(self.python, tool_schema)

    async def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints. It has the standard library, no network, and
        begins anew each time.

        Args:
            code: The program.
        """
        result = await run_python(code, self._limits)
        return result.text or "The program printed nothing."
