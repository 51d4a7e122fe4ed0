"""What the pages count and how they name episodes, in a real browser: a greedy baseline, siblings whose
numbers have gaps, and groups that nothing was trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, browser_here

from turnwise.cli.main import main

pytestmark = pytest.mark.skipif(
    browser_here() is None, reason="no chromium is here; apt-get install chromium"
)
TURN = {"prompt_ids": [1], "response_ids": [2, 3], "logprobs": [-0.5, -0.25], "text": "sea"}


def line(group: int, sibling: int, score: float, **fields: Any) -> str:
    record: dict[str, Any] = {"step": 0, "group": group, "sibling": sibling, "score": score}
    record |= {"task": {"id": f"task {group}"}, "status": "finished", "turns": [TURN]}
    return json.dumps(record | fields) + "\n"


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("numbers") / "run"
    run.mkdir()
    (run / "config.yaml").write_text("exp_name: numbers\n")
    of_group = [line(0, 0, 0.0), line(0, 2, 0.0), line(0, 3, 0.5), line(0, 4, 1.0, is_baseline=True)]
    filtered = [line(1, sibling, 0.0, rejected="filtered") for sibling in range(2)]
    (run / "rollouts.jsonl").write_text("".join([*of_group, *filtered]))
    no_cost = {"outcome_rewards": {"cost": -0.0}}
    measured = [line(0, sibling, 1.0, metrics={"success": float(sibling)}, **no_cost) for sibling in range(2)]
    (run / "val_rollouts.jsonl").write_text("".join(measured))
    assert main(["view", str(run), "--out", str(run / "pages")]) == 0
    return run / "pages"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def go(pages, browser) -> Iterator:
    browser.errors.clear()

    def go(link: str) -> Browser:
        browser.open("about:blank")
        browser.open(f"{(pages / 'index.html').as_uri()}{link}")
        browser.wait("document.body && document.body.dataset.shown")
        return browser

    yield go
    assert browser.errors == []


FACTS = "Object.fromEntries([...document.querySelectorAll('.facts div')].map((fact) => \
[fact.querySelector('dt').textContent, fact.querySelector('dd').textContent]))"
CRUMB = "[...document.querySelectorAll('nav.crumbs a')].at(-1).textContent"
TIPS = "[...document.querySelectorAll('.dot title')].map((title) => title.textContent.split(':')[0])"
PAINTED = (
    "[...document.querySelectorAll('.sampled .tok')].filter((cell) => cell.style.backgroundColor).length"
)


def test_a_step_counts_siblings_and_says_success_only_where_it_is_measured(go):
    facts = go("#/0/train/1").run(FACTS)
    assert facts["episodes"] == "5" and facts["mean score"] == "0.1" and "success" not in facts
    assert go("#/0/val/0").run(FACTS)["success"] == "50%"
    cells = go("").run(
        "[...document.querySelector('.rows tr').children].map((cell) => cell.textContent.trim())"
    )
    assert cells[2] == "0.1"


def test_no_number_is_minus_nothing(go):
    assert go("#/0/val/0/0/0").run(FACTS)["rewards"] == "cost 0"


def test_an_episode_has_its_own_number_wherever_it_is_named(go):
    assert go("#/0/train/1").run(TIPS)[:3] == ["sibling 0", "sibling 2", "sibling 3"]
    browser = go("#/0/train/1/0/1")
    assert browser.run(CRUMB) == "sibling 2" and browser.run("document.title").startswith("sibling 2")
    assert browser.run("document.querySelector('h1').textContent").endswith("sibling 2")
    assert go("#/0/train/1/0/3").run(CRUMB) == "greedy baseline"
    assert go("#/0/train/1/0/9").run(CRUMB) == "episode"
    browser = go("#/search?q=task:0")
    column = "[...document.querySelectorAll('.rows tr td:nth-child(3)')].map((cell) => cell.textContent)"
    browser.wait(f"{column}.length === 6")
    assert browser.run(column)[:4] == ["0", "2", "3", "greedy baseline"]
    assert TIPS and go("#/0/val/0/0").run(TIPS) == ["sibling 0", "sibling 2", "sibling 3"]


@pytest.mark.parametrize(
    ("link", "is_trained"),
    [
        ("#/0/train/1/0/0", True),
        ("#/0/train/1/0/3", False),
        ("#/0/train/1/1/0", False),
        ("#/0/val/0/0/0", False),
    ],
)
def test_the_loss_mask_is_on_what_was_trained_on(go, link, is_trained):
    browser = go(link)
    browser.run("(color.value = 'mask', color.dispatchEvent(new Event('change')))")
    assert (browser.run(PAINTED) > 0) == is_trained
    legend = browser.run("document.querySelector('.legend').textContent")
    assert ("nothing was trained" in legend) != is_trained
    browser.point(".sampled .tok", 0)
    facts = browser.wait("!info.hidden && info.textContent")
    assert f"mask {int(is_trained)}" in facts
    browser.run("(color.value = 'logprob', color.dispatchEvent(new Event('change')))")
