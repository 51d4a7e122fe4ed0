"""Functions as users write them: what of their signature the model reads, and what they are called with."""

from __future__ import annotations

import dataclasses
import enum
from datetime import date
from functools import lru_cache, partial, wraps
from typing import Any, Literal, Optional

import numpy as np
import pydantic
import pytest
from messages import says
from toy_tools import called

from turnwise.errors import ConfigError
from turnwise.tools.calculator import calculator
from turnwise.tools.function_tool import FunctionTool
from turnwise.tools.tool_box import OfferedTool, ToolBox


class Unit(enum.Enum):
    CELSIUS = "c"
    KELVIN = "k"


@dataclasses.dataclass
class Point:
    x: int
    title: str = "none"


class Order(pydantic.BaseModel):
    lines: list[Point]


class Tree(pydantic.BaseModel):
    branches: list[Tree] = []


class Box:
    def __init__(self, size: int) -> None:
        self.size = size

    def grown(self, by: int) -> int:
        return self.size + by

    async def __call__(self, by: int) -> int:
        return self.size * by


class Unnamed:
    def __call__(self, *words: str) -> str:
        return ""


def described(function: Any, *names: str) -> Any:
    parameters = "".join(f"    {name}: The {name}.\n" for name in names)
    function.__doc__ = f"Does it.\n\nArgs:\n{parameters}"
    return function


def of_type(hint: Any) -> Any:
    def own(a):
        return a

    own.__annotations__ = {"a": hint}
    return described(own, "a")


for method in (Box.grown, Box.__call__):
    described(method, "by")


def in_parentheses(a: int, b: int = 2) -> int:
    """Adds (carefully): that is all.

    Args:
        a (int): The first,
            over two lines.
        b (int, optional): The second.

    Returns:
        int: The sum.
    """
    return a + b


def sliced(a: int, /, b: int = 4, **others: Any) -> list[int]:
    return [a, b]


async def slow(a: int) -> int:
    return a + 1


@wraps(described(slow, "a"))
def wrapped(*arguments: Any, **named: Any) -> Any:
    return slow(*arguments, **named)


described(sliced, "a", "b")


def box_of(function: Any) -> ToolBox:
    return ToolBox([OfferedTool(FunctionTool(function))])


@pytest.mark.parametrize(
    ("function", "name", "arguments", "text"),
    [
        (in_parentheses, "in_parentheses", {"a": 1}, "3"),
        (sliced, "sliced", {"a": 1}, "[1, 4]"),
        (partial(sliced, b=7), "sliced", {"a": 1}, "[1, 7]"),
        (partial(in_parentheses, 5), "in_parentheses", {"b": 1}, "6"),
        (lru_cache(in_parentheses), "in_parentheses", {"a": 1}, "3"),
        (Box(3).grown, "grown", {"by": 2}, "5"),
        (Box(3), "Box", {"by": 2}, "6"),
        (partial(Box(3)), "Box", {"by": 2}, "6"),
        (slow, "slow", {"a": 1}, "2"),
        (wrapped, "slow", {"a": 1}, "2"),
        (of_type(Unit), "own", {"a": "k"}, '"k"'),
        (of_type(Optional[Unit]), "own", {"a": None}, "null"),  # noqa: UP045
        (of_type(Point), "own", {"a": {"x": 1}}, '{"x": 1, "title": "none"}'),
        (of_type(Order), "own", {"a": {"lines": [{"x": 2}]}}, '{"lines": [{"x": 2, "title": "none"}]}'),
        (of_type(list[Literal["a", "b"]]), "own", {"a": ["a"]}, '["a"]'),
        (of_type(tuple[int, ...]), "own", {"a": [1, 2]}, "[1, 2]"),
        (of_type(Any), "own", {"a": {"é": [None]}}, '{"é": [null]}'),
    ],
)
def test_functions_are_called_as_they_are_written(function, name, arguments, text):
    box = box_of(function)
    assert box.names == [name]
    assert called(box, name, **arguments)[0].text == text


def test_the_model_reads_what_it_may_give():
    def properties(function):
        return FunctionTool(function).schema["function"]["parameters"]["properties"]

    assert properties(in_parentheses)["a"] == {"type": "integer", "description": "The first, over two lines."}
    assert set(properties(partial(in_parentheses, b=7))) == {"a"}
    assert properties(of_type(Unit))["a"] == {"type": "string", "enum": ["c", "k"], "description": "The a."}
    point = properties(of_type(Point))["a"]
    assert point["required"] == ["x"] and set(point["properties"]) == {"x", "title"}
    order = properties(of_type(Order))["a"]
    assert set(order["properties"]["lines"]["items"]["properties"]) == {"x", "title"}, "without references"
    assert properties(of_type(date))["a"]["format"] == "date"


@pytest.mark.parametrize(
    ("hint", "argument", "said"),
    [
        (Unit, "x", "'x' is not one of"),
        (date, "the 3rd", "Error executing 'own': a: Input should be a valid date"),
        (Point, {}, "'x' is a required property"),
    ],
)
def test_arguments_that_are_not_of_their_type_are_the_model_s_mistake(hint, argument, said):
    result, _ = called(box_of(of_type(hint)), "own", a=argument)
    assert result.is_error and said in result.text


def yielding(a: int):
    yield a


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (described(yielding, "a"), "yields"),
        (Unnamed(), says("*words", "parameters")),
        (Box.grown, says("grown", "Box(…).grown")),
        (of_type(np.ndarray), says("JSON", "a", "pydantic")),
        (of_type(Tree), says("type of a", "itself")),
        (of_type("Nowhere"), "Nowhere.*type hints"),
        (lambda a: a, "Args:"),
        (len, says("len", "type hint")),
    ],
)
def test_what_is_no_tool_is_refused_by_name(function, words):
    with pytest.raises(ConfigError, match=words):
        FunctionTool(function)


@pytest.mark.parametrize(
    ("result", "text"),
    [(np.float32(1.5), "1.5"), (np.arange(2), "[0, 1]"), ({"u": Unit.KELVIN}, '{"u": "k"}'), ("a", "a")],
)
def test_results_of_usual_types_are_shown_as_json(result, text):
    def own(a: int) -> Any:
        return result

    assert called(box_of(described(own, "a")), "own", a=1)[0].text == text


@pytest.mark.parametrize("expression", ["1e308 * 10", "1e999", "1e999 - 1e999", "-1e999", "(-8) ** 0.5"])
def test_the_calculator_has_no_infinite_or_complex_results(expression):
    result, _ = called(box_of(calculator), "calculator", expression=expression)
    assert result.is_error and "too large" in result.text


@pytest.mark.parametrize(("error", "text"), [(ValueError(), "ValueError"), (ValueError("a\ud800"), "a?")])
def test_an_error_is_a_text_that_a_tokenizer_reads(error, text):
    def own(a: int) -> None:
        raise error

    result, _ = called(box_of(described(own, "a")), "own", a=1)
    assert result.text == f"Error executing 'own': {text}"
