"""What `turnwise view` costs on a large run, and what recording for it costs a run.

    python benchmarks/view.py [--steps N] [--episodes N] [--work DIR]

It writes a rollouts.jsonl of N steps with N episodes each (200 × 256: 0.3 GB), makes its pages, and lets a
browser show one step if there is one. CPU seconds are of this process. Recording: the seconds of the journal
for one step, with and without messages and values of tokens.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import describe_machine
from toy import parse_arguments

from turnwise.models.token_decoder import TokenDecoder
from turnwise.report.view.folder import write_folder
from turnwise.report.view.rollouts_file import RolloutsFile
from turnwise.report.view.source import Episodes, RunSource
from turnwise.report.view.token_texts import TokenTexts
from turnwise.rollout.journal import write_group
from turnwise.types import Group

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from browser import Browser, browser_here
from viewed_run import Writer

SIBLINGS = 8
TURNS = 3
WORDS = "I walk there step by step, the goal is near: <answer>Right</answer>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--work", type=Path, help="keep the files here")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "view.json"))
    options = parse_arguments(parser, steps=3, episodes=16)
    work = options.work or Path(tempfile.mkdtemp(prefix="view-"))
    try:
        result = measured(work, options.steps, options.episodes)
    finally:
        if options.work is None:
            shutil.rmtree(work)
    text = json.dumps(result | {"machine": describe_machine()}, indent=2)
    print(text)
    Path(options.out).write_text(text + "\n", encoding="utf-8")


def measured(work: Path, num_steps: int, num_episodes: int) -> dict[str, Any]:
    writer = Writer()
    groups = [large_group(writer, index) for index in range(num_episodes // SIBLINGS)]
    recording = recording_seconds(groups)
    work.mkdir(parents=True, exist_ok=True)
    path = work / "rollouts.jsonl"
    write_rollouts(path, groups, num_steps)
    tokenizer = work / "tokenizer"
    writer.tokenizer.save_pretrained(tokenizer)
    num_bytes = path.stat().st_size
    pages = work / "pages"
    started = time.process_time()
    file = RolloutsFile(path)
    file.scan()
    source = RunSource("large", str(path), [Episodes("file", file, 1)], TokenTexts(TokenDecoder(tokenizer)))
    write_folder(pages, [source])
    cpu_s = time.process_time() - started
    made = sum(file.stat().st_size for file in pages.rglob("*") if file.is_file())
    return {
        "rollouts_mb": round(num_bytes / 1e6, 1),
        "cpu_s": round(cpu_s, 2),
        "mb_per_cpu_s": round(num_bytes / 1e6 / cpu_s, 1),
        "pages_mb": round(made / 1e6, 1),
        "index_mb": round((pages / "data" / "index.js").stat().st_size / 1e6, 3),
        "step_shown_s": shown_seconds(pages, num_steps),
        "recording": recording,
    }


def large_group(writer: Writer, index: int) -> Group:
    """A group of episodes of several turns, each with some twenty sampled tokens."""
    turns_of = []
    for _ in range(SIBLINGS):
        turns = []
        for number in range(TURNS):
            messages = [{"role": "user", "content": f"P{number},0 G3,3 O1,2 O2,1 of map {index}"}]
            turn = writer.turn(messages, WORDS, action="Right", state_key=f"{index}:{number}")
            turn.starts_context = number == 0
            turns.append(turn)
        turns_of.append(turns)
    return writer.group(index, turns_of)


def write_rollouts(path: Path, groups: Sequence[Group], num_steps: int) -> None:
    lines = [line.removeprefix('{"step":0,') for group in groups for line in write_group(0, group)]
    with path.open("w", encoding="utf-8") as file:
        for step in range(num_steps):
            file.writelines(f'{{"step":{step},{line}\n' for line in lines)


def recording_seconds(groups: Sequence[Group]) -> dict[str, float]:
    """CPU seconds and megabytes of the journal for one step: as it was before, with messages, and with values
    of tokens too."""
    result = {}
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    kept = [(turn.messages, turn.token_values) for turn in turns]
    for name, has_messages, has_values in (("before", 0, 0), ("messages", 1, 0), ("values", 1, 1)):
        for turn, (messages, values) in zip(turns, kept, strict=True):
            turn.messages = messages if has_messages else ()
            turn.token_values = values if has_values else {}
        times = []
        for _ in range(5):
            started = time.process_time()
            size = sum(len(line.encode()) + 1 for group in groups for line in write_group(0, group))
            times.append(time.process_time() - started)
        result[f"{name}_s"] = round(min(times), 4)
        result[f"{name}_mb"] = round(size / 1e6, 3)
    return result


def shown_seconds(pages: Path, num_steps: int) -> float | None:
    """Seconds from the click on a step to its rows; None without a browser."""
    if browser_here() is None:
        return None
    browser = Browser()
    try:
        browser.open((pages / "index.html").as_uri())
        browser.wait("document.body && document.body.dataset.shown")
        link = f"#/0/file/{num_steps // 2 + 1}"
        started = time.perf_counter()
        browser.run(f"location.hash = {link!r}")
        browser.wait(f"document.body.dataset.shown === {link!r}")
        return round(time.perf_counter() - started, 3)
    finally:
        browser.close()


if __name__ == "__main__":
    main()
