"""The registered tool `calculator`."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from turnwise.errors import ToolError

MAX_CHARACTERS = 1000
MAX_BITS = 4096
"""Maximum bits of a whole number, intermediate results included: larger numbers would take seconds."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: Numbers, parentheses and the operators + - * / // % **.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_CHARACTERS} are read")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return str(_value(tree.body))
    except (SyntaxError, RecursionError, MemoryError) as fault:
        raise ToolError(f"{expression!r} isn't an arithmetic expression") from fault


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)  # 1e999 is infinite
        case ast.UnaryOp(op, operand) if type(op) in _UNARY:
            return _bounded(_UNARY[type(op)](_value(operand)))
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            first = _value(left)
            second = _value(right)
            if isinstance(op, ast.Pow):
                num_bits = max(int(first).bit_length(), 1)
                if abs(second) * num_bits > MAX_BITS:
                    raise ToolError("the power is too large")
            return _bounded(_BINARY[type(op)](first, second))
    raise ToolError(f"{ast.unparse(node)!r} isn't a number, nor one of the operators + - * / // % **")


def _bounded(number: Any) -> Any:
    if isinstance(number, int):
        is_allowed = number.bit_length() <= MAX_BITS
    else:
        is_allowed = isinstance(number, float) and math.isfinite(number)
    if not is_allowed:
        raise ToolError("the result is too large, or no real number")
    return number
