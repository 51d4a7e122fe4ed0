"""The pages in a real browser, opened from disk: that clicks and keys do what they say, and that no text is
markup."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, browser_here
from viewed_run import HOSTILE, Writer, groups_of, write_run

from turnwise.cli.main import main
from turnwise.report.view.rollouts_file import RolloutsFile
from turnwise.report.view.server import LiveRuns, ViewServer
from turnwise.report.view.source import Episodes, RunSource
from turnwise.rollout.journal import Journal

pytestmark = pytest.mark.skipif(
    browser_here() is None, reason="no chromium is here; apt-get install chromium"
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    run = write_run(folder / "run")
    assert main(["view", str(run), "--out", str(folder / "pages")]) == 0
    return folder / "pages"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def go(pages, browser) -> Iterator:
    """Opens a link of the pages, and returns the browser. No page may complain, load from elsewhere, or run
    code of a text."""
    browser.errors.clear()
    browser.requests.clear()

    def go(link: str) -> Browser:
        browser.open("about:blank")
        browser.open(f"{(pages / 'index.html').as_uri()}{link}")
        browser.wait("document.body && document.body.dataset.shown")
        return browser

    yield go
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "about:"))] == []
    assert browser.run("window.hacked") is None


def count(browser: Browser, selector: str) -> int:
    number: int = browser.run(f"document.querySelectorAll({selector!r}).length")
    return number


def shown(browser: Browser, link: str) -> None:
    browser.wait(f"document.body.dataset.shown === {link!r}")


def test_one_clicks_from_the_run_to_a_token(go):
    browser = go("")
    assert (
        browser.run("document.title") and browser.run("document.querySelectorAll('.chart .line').length") == 1
    )
    browser.click(".panel .rows tr td a")
    shown(browser, "#/0/train/3")
    assert browser.run("document.querySelectorAll('.rows tr[data-href]').length") == 5
    browser.click(".rows tr td:nth-child(3)", 3)  # on the row, not on a link
    browser.wait("location.hash.startsWith('#/0/train/3/23')")
    browser.run("location.hash = '#/0/train/3/20'")
    shown(browser, "#/0/train/3/20")
    browser.click(".rows tr td a")
    shown(browser, "#/0/train/3/20/0")
    browser.point(".sampled .tok", 1)
    facts = browser.wait("!info.hidden && info.textContent")
    for name in ("log-prob", "entropy", "advantage", "version", "mask", "trainer"):
        assert name in facts


def test_each_colour_paints_or_says_what_records_it(go):
    browser = go("#/0/train/3/20/0")
    painted = (
        "[...document.querySelectorAll('.sampled .tok')].filter((cell) => cell.style.backgroundColor).length"
    )
    for value in ("logprob", "old", "difference", "entropy", "advantage", "mask", "version"):
        browser.run(f"(color.value = {value!r}, color.dispatchEvent(new Event('change')))")
        assert browser.run(painted) > 0, value
    for value, reason in {"ref": "record_token_values: [ref]", "kept": "top_k"}.items():
        browser.run(f"(color.value = {value!r}, color.dispatchEvent(new Event('change')))")
        assert browser.run(painted) == 0 and reason in browser.run(
            "document.querySelector('.legend').textContent"
        )
    browser.run("(color.value = 'logprob', color.dispatchEvent(new Event('change')))")


def test_two_siblings_stand_side_by_side_with_their_first_difference(go):
    browser = go("#/0/train/3/20/0")
    browser.key("b")
    browser.wait(
        "location.hash === '#/0/train/3/20/0?with=1' && document.querySelectorAll('.column').length === 2"
    )
    marked = browser.wait("[...document.querySelectorAll('.first-difference')].map((cell) => cell.token.t)")
    assert len(marked) == 2 and marked[0] == marked[1]
    browser.key("f")


def test_branches_have_lanes_and_long_prompts_are_folded(go):
    browser = go("#/0/train/3/23/0/3")
    assert browser.wait("document.querySelector('.turn.selected').dataset.turn") == "2"
    assert browser.run("document.querySelectorAll('.gutter .branch').length") == 1
    browser = go("#/0/train/3/22/0")
    height = "document.querySelector('.foldable .text').clientHeight"
    folded = browser.run(height)
    browser.click(".unfold")
    assert browser.wait(f"{height} > {folded}")
    assert browser.run("document.querySelector('.call b').textContent") == "search"


def test_spans_of_a_trace_stand_under_their_turn(go):
    browser = go("#/0/train/1/2/1")
    names = (
        "[...document.querySelectorAll('.turn[data-turn=\\'1\\'] .span-name')].map((one) => one.textContent)"
    )
    assert browser.wait(names) == ["chat", "server_wait", "execute_tool search"]
    assert browser.run("document.querySelectorAll('.column > .spans-of .span-line').length") == 1
    browser.click(".turn .spans-of summary")
    assert browser.wait("document.querySelector('.turn .span-bar').clientWidth > 2")
    browser = go("#/0/train/2/12/1")
    assert count(browser, ".span-line") == 0, "the second step has no traces"


def test_keys_move_and_search_finds(go):
    browser = go("#/0/train/2")
    browser.key("j")
    browser.key("j")
    assert browser.wait("document.querySelectorAll('.selected').length") == 1
    browser.key("Enter")
    shown(browser, "#/0/train/2/11")
    browser.key("l")
    shown(browser, "#/0/train/2/12")
    browser.key("u")
    shown(browser, "#/0/train/2")
    browser.key("?")
    assert browser.wait("document.getElementById('help') !== null")
    browser.key("Escape")
    browser.key("/")
    browser.type("sea step:<3")
    browser.key("Enter")
    assert browser.wait("document.querySelectorAll('.rows tr').length === 4")
    browser.run("location.hash = '#/search?q=status:failed'")
    browser.wait("document.querySelectorAll('.rows .badge.failed').length === 6")
    browser.key("t")
    assert browser.run("document.documentElement.dataset.theme") in ("dark", "light")


def test_texts_are_never_markup(go):
    for link in (
        "",
        "#/0/train/3",
        "#/0/train/3/24",
        "#/0/train/3/24/0",
        "#/0/train/3/24/0?with=1",
        "#/0/train/1/4/0",
        "#/0/timeline",
    ):
        browser = go(link)
        tags = (
            "document.querySelectorAll('main script, main img, main b b, main .text b, main iframe').length"
        )
        assert browser.run(tags) == 0
        bidi = "/[\\u202a-\\u202e\\u2066-\\u2069]/.test(document.body.textContent)"
        assert not browser.run(bidi), f"{link}: a control of direction is in the page"
    browser = go("#/0/train/3/24/0")
    assert "<script>" in browser.run("document.querySelector('.message .text').textContent")
    browser = go(f"#/{HOSTILE.replace(' ', '%20')}/x/1")
    assert "shown" in browser.run("page.textContent")


def test_what_is_copied(go):
    browser = go("#/0/train/3/22/0")
    browser.click(".copies button", 2)
    copied = browser.wait("turnwise.copied")
    assert copied.startswith("turnwise rollout ") and "--replay" in copied
    browser.click(".copies button", 0)
    assert browser.run("turnwise.copied").startswith("<|im_start|>system\nRule 1:")


def test_a_new_step_appears_and_the_place_stays(browser, tmp_path):
    run = write_run(tmp_path / "live", num_steps=1)
    source = RunSource("live", str(run), [Episodes("train", RolloutsFile(run / "rollouts.jsonl"), 1)], None)
    server = ViewServer(0, LiveRuns([source], lambda source: None))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        browser.open("about:blank")
        browser.open(f"{server.url}#/0/train/1/0/0")
        browser.wait("document.body && document.body.dataset.shown && turnwise.seen")
        journal = Journal(run / "rollouts.jsonl")
        journal.append(1, groups_of(Writer(), 1))
        journal.close()
        browser.wait("turnwise.runs[0].kinds[0].steps.length === 2")
        assert browser.run("location.hash") == "#/0/train/1/0/0" and count(browser, ".turn") == 3
        browser.run("location.hash = '#/'")
        browser.wait("document.querySelectorAll('.rows tr').length === 2")
        browser.open("about:blank")
    finally:
        server.close()
        thread.join(60)
    browser.errors.clear()


def test_the_timeline_and_the_other_pages_open(go):
    browser = go("#/0/timeline")
    assert browser.wait("document.querySelectorAll('.chart').length") == 3
    assert browser.run("document.querySelector('canvas').clientHeight") > 40
    browser = go("#/0/train/99")
    assert "can't be" in browser.run("page.textContent")
