"""`device_mapping` is parsed like Python's lists and ranges, and nothing else is let in."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from messages import says

from turnwise.config.schema.model_args import MAX_DEVICES, Role, parse_devices

SPACES = st.sampled_from(["", " ", "  "])


@given(st.integers(0, 50), st.integers(0, 50), st.integers(-5, 5).filter(bool), SPACES, st.booleans())
def test_ranges_are_those_of_python(start: int, stop: int, step: int, space: str, is_list: bool) -> None:
    text = f"range({space}{start},{space}{stop}{space}, {step})"
    assert parse_devices(f"list({text})" if is_list else text) == list(range(start, stop, step))


@given(st.lists(st.integers(0, 99)), st.lists(st.integers(0, 99)), SPACES)
def test_sums_of_lists(first: list[int], second: list[int], space: str) -> None:
    assert parse_devices(f"{first}{space}+{space}{second}") == first + second


@given(st.text(alphabet="list(range)[], +-0123456789__import__os.", max_size=40))
def test_any_other_text_is_refused_or_gives_ranks(text: str) -> None:
    try:
        ranks = parse_devices(text)
    except ValueError:
        return
    assert all(isinstance(rank, int) for rank in ranks)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8",
        "list(8)",
        "list(range(8)",
        "range(8))",
        "list(range(0, 8, 0))",
        "list(range())",
        "[i for i in range(8)]",
        "__import__('os').getcwd()",
        "[0] * 8",
        "list(range(int(2)))",
        f"list(range({MAX_DEVICES + 1}))",
    ],
)
def test_refused_texts(text: str) -> None:
    with pytest.raises(ValueError, match=r"list of ranks|more than"):
        parse_devices(text)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "names no device"),
        ([0, 0], says("device 0", "twice")),
        ([-1], "start at 0"),
        ([True], says("list", "ranks")),
        (8, says("list", "ranks")),
        ("list(range(0,2)) + [1]", says("device 1", "twice")),
    ],
)
def test_refused_ranks(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Role(device_mapping=value)
