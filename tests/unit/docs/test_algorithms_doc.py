"""docs/algorithms.md names every estimator with its paper and defaults, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from small_configs import config_of

from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.batching.samples import build_samples
from turnwise.config import ineffective
from turnwise.errors import ConfigError
from turnwise.runtime.entry_points import load_class
from turnwise.spec import ESTIMATORS
from turnwise.types import Group, Task, Trajectory, Turn

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "spec"), ESTIMATORS.items(), ids=ESTIMATORS)
def test_every_estimator_has_a_section_with_its_paper(name, spec):
    section = PAGE.split(f"\n### `{name}`\n")[1].split("\n#")[0]
    papers = re.findall(r"arXiv:\S+\d", spec.paper)
    assert all(paper in section for paper in papers), f"{name} doesn't name {papers}"


@pytest.mark.parametrize(("name", "spec"), ESTIMATORS.items(), ids=ESTIMATORS)
def test_the_table_has_the_defaults(name, spec):
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    _, _, placement, normalization, reads, needs = (cell.strip() for cell in line.strip("|").split("|"))
    assert placement == ("" if spec.reward_placement == "score" else spec.reward_placement)
    grouping = {"traj_group_id": "siblings", "batch": "batch"}
    expected = (
        "its own"
        if spec.normalization == "own"
        else f"{grouping[spec.normalization[0]]}, {spec.normalization[1]}"
    )
    assert normalization == expected
    keys = {
        "gamma": spec.discounts,
        "lambd": spec.has_td_errors,
        "step_reward_gamma": spec.has_step_returns,
        "step_reward_weight": spec.mixes_step_advantages,
    }
    assert {key for key in keys if f"`{key}`" in reads} == {key for key, is_read in keys.items() if is_read}
    assert ("siblings" in needs) == spec.compares_siblings and ("critic" in needs) == ("values" in spec.needs)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_section_says_in_plain_words_what_it_does_before_its_equation(name):
    first = PAGE.split(f"\n### `{name}`\n")[1].strip().split("\n\n")[0]
    assert first.endswith((".", "?")) and not set("=Σγλδ−₊") & set(first), first


def test_the_conventions_that_others_have_otherwise_are_said():
    section = PAGE.split("### Where implementations differ")[1].split("\n## ")[0]
    for said in ("Groups of one", "exp(old − samp)", "reciprocal", "±20"):
        assert said in section


def test_the_example_is_short_and_runs(tmp_path, monkeypatch):
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(code.splitlines()) <= 30
    [(module, name)] = re.findall(r"adv_estimator=(\w+):(\w+)", PAGE)
    (tmp_path / f"{module}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = AlgorithmSettings(adv_estimator=f"{module}:{name}")
    algorithm = load_class(settings.adv_estimator, "adv_estimator", ConfigError)(settings)
    task = Task(id="t", tag="T", split="train", seed=0)
    groups = []
    for scores in ((0.0, 1.0, 9.0), (5.0, 5.0, 7.0)):
        groups.append(Group(task, []))
        for sibling, score in enumerate(scores):
            turn = Turn(np.array([1]), np.array([2, 3]), np.zeros(2, np.float32), reward=score)
            trajectory = Trajectory(task, sibling, turns=[turn])
            trajectory.samples = build_samples(trajectory)
            groups[-1].trajectories.append(trajectory)
    algorithm.credit(groups)
    found = [[t.samples[0].advantages.tolist() for t in group.trajectories] for group in groups]
    assert found == [[[0, -1, -1], [0, 0, 0], [0, 8, 8]], [[0, 0, 0], [0, 0, 0], [0, 2, 2]]]


def test_the_example_is_taken_by_a_config():
    assert ineffective(config_of(adv_estimator="median_credit:MedianCredit")) == []
