"""What a filter keeps, and how a user's own is found and fails."""

from __future__ import annotations

import pytest

from turnwise.errors import ConfigError, RolloutError
from turnwise.rollout.group_filter import GroupFilter, load_group_filter
from turnwise.types import Group, Task, Trajectory

TASK = Task(id="train/A/0", tag="A", split="train", seed=0)


def group(*scores):
    return Group(
        TASK,
        [Trajectory(TASK, sibling, outcome_rewards={"r": score}) for sibling, score in enumerate(scores)],
    )


@pytest.mark.parametrize(
    ("scores", "is_kept"),
    [((1, 1, 1), False), ((0, 1), True), ((0.1 + 0.2, 0.3), False), ((5,), False), ((-1, -1.1), True)],
)
def test_non_zero_variance_keeps_groups_that_differ(scores, is_kept):
    assert load_group_filter("non_zero_variance")(group(*scores)) is is_kept


def test_no_filter_is_none():
    assert load_group_filter(None) is None


def test_a_filter_of_ones_own_comes_as_module_and_function(tmp_path, monkeypatch):
    (tmp_path / "own_filters.py").write_text(
        "def keep(group):\n    return group.trajectories[0].score > 0\n\n\nclass Keep:\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = load_group_filter("own_filters:keep")
    assert found.name == "own_filters:keep" and found(group(1, 0)) and not found(group(0, 1))
    with pytest.raises(
        ConfigError, match=r"group_filter .* no function 'Keep'; its functions are keep.*'keep'"
    ):
        load_group_filter("own_filters:Keep")
    with pytest.raises(ConfigError, match="must be 'module:function'"):
        load_group_filter("own_filters:")


@pytest.mark.parametrize("returned", [None, 1, "no", [True]])
def test_what_is_no_bool_is_refused(returned):
    with pytest.raises(RolloutError, match=r"group_filter odd returned .* train/A/0; a filter returns True"):
        GroupFilter("odd", lambda group: returned)(group(1))


def test_a_filter_that_raises_is_named_with_its_line():
    with pytest.raises(
        RolloutError, match=r"group_filter odd raised KeyError: 'x' \(.*test_group_filter.py, line \d+\)"
    ):
        GroupFilter("odd", lambda group: {}["x"])(group(1))
