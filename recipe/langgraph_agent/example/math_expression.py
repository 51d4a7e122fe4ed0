"""The agent of the maths expressions: a graph whose only tool computes `@`, a @ b = 3a − 2b."""

from __future__ import annotations

from typing import Any

from langchain_core.tools import tool
from recipe.langgraph_agent.react_agent_loop import ReactAgentLoop


@tool(parse_docstring=True)
def calculate(a: int, b: int, operand: str) -> int:
    """Computes a number of two operands.

    Args:
        a: The first operand.
        b: The second operand.
        operand: The operator, which is "@".
    """
    if operand != "@":
        raise ValueError(f"unknown operator {operand!r}; there is only '@'")
    return 3 * a - 2 * b


class MathExpressionReactAgentLoop(ReactAgentLoop):
    """LangChain's agent with the tool `calculate`."""

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, **kwargs: Any) -> None:
        cls.tools = [calculate]
        super().init_class(config, tokenizer)
