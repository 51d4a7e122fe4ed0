"""The registered tool `python`: the model's code in the sandbox."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from turnwise.errors import ConfigError, nearest
from turnwise.tools.sandbox import Limits, isolation, run_python
from turnwise.types import Task

log = logging.getLogger(__name__)

SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a Python program and returns what it prints. Only the standard library is there, and no network; "
        "each call begins anew.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}


class PythonTool:
    """Runs each call in a fresh process. What goes wrong in the code is the result, which the model reads.

    Its config has the keys of `sandbox.Limits`.

    Raises:
        ConfigError: the config has another key, or a value that isn't allowed.
        NotAvailableError: this system can't isolate a process; the message says what it lacks.
    """

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any] | None) -> None:
        self.schema = tool_schema or SCHEMA
        names = [field.name for field in fields(Limits)]
        for key in config:
            if key not in names:
                raise ConfigError(f"tool python: config has no key {key!r}; it has {', '.join(names)}.{nearest(key, names)}")
        try:
            self._limits = Limits(**config)
        except ConfigError as fault:
            raise ConfigError(f"tool python: config.{fault}") from None
        log.info("The tool python isolates the model's programs by %s", isolation())

    async def create(self, task: Task) -> None: ...

    async def execute(self, state: None, arguments: Mapping[str, Any]) -> str:
        result = await run_python(arguments["code"], self._limits)
        return result.text or "The program printed nothing."

    async def calc_reward(self, state: None) -> float:
        return 0.0

    async def release(self, state: None) -> None: ...
