"""`turnwise view --text`: runs in the terminal: their steps, their failed episodes, or one episode."""

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.text import Text

from turnwise.cli.view_runs import ViewedRun
from turnwise.errors import ConfigError, DataError, counted
from turnwise.play.recorded_screen import RecordedScreen, episode_title
from turnwise.report.view.source import Episodes
from turnwise.rollout.record import read_record
from turnwise.runtime.console import open_console, printable

if TYPE_CHECKING:
    from rich.console import Console

_MAX_FAILED = 20
_FORM = "STEP/GROUP/SIBLING, such as 12/96/0"


def print_view(runs: list[ViewedRun], options: argparse.Namespace) -> int:
    """Prints the runs, their failed episodes, or one episode."""
    if options.failed and options.trajectory:
        raise ConfigError("--failed lists episodes and --trajectory shows one; name one of them")
    console = open_console(no_color=options.no_color)
    for viewed in runs:
        if options.trajectory:
            _print_episode(console, viewed, options.trajectory)
        elif options.failed:
            _print_failed(console, viewed)
        else:
            _print_run(console, viewed)
    return 0


def _print_run(console: "Console", viewed: ViewedRun) -> None:
    """Prints what the health checks said, and a line for each step."""
    _say(console, viewed.source.name, "bold")
    for sentence in viewed.source.about.get("health", ()):
        _say(console, f"{sentence['key']}: {sentence['text']}", "yellow")
    for episodes in viewed.source.episodes:
        for step in episodes.steps():
            _say(console, _step_line(episodes, step))
    _say(console, "one episode: --trajectory STEP/GROUP/SIBLING; those that failed: --failed", "dim")


def _step_line(episodes: Episodes, step: int) -> str:
    """A step's groups, episodes without greedy baselines, the mean score of those that didn't fail, and how
    many failed or weren't trained on."""
    summary = episodes.read(step, None).summary
    num_episodes = len(summary["score"]) - summary.get("baseline", "").count("1")
    scores = _counted_scores(summary)
    groups = counted(len(summary["index"]), "group")
    numbers = "none"
    if summary["index"]:
        numbers = f"{min(summary['index'])}–{max(summary['index'])}"
    line = f"{_name(episodes, step):<28} {groups} ({numbers}), {counted(num_episodes, 'episode')}, "
    line += f"mean score {sum(scores) / len(scores):.3g}" if scores else "no score"
    num_failed = summary["status"].count("x")
    num_rejected = len(summary["rejected"]) - summary["rejected"].count("0")
    if num_failed:
        line += f", {num_failed} failed"
    if num_rejected:
        line += f", {counted(num_rejected, 'group')} not trained on"
    return line


def _counted_scores(summary: Mapping[str, Any]) -> list[float]:
    """The scores of a step's episodes, without greedy baselines and those that failed."""
    scores = summary["score"]
    baselines = summary.get("baseline", "0" * len(scores))
    rows = zip(scores, summary["status"], baselines, strict=True)
    return [score for score, status, is_baseline in rows if status != "x" and is_baseline == "0"]


def _name(episodes: Episodes, step: int) -> str:
    if episodes.kind == "val":
        return f"validation after step {step}"
    if episodes.kind == "file":
        return f"batch {step}"
    return f"step {step}"


def _print_failed(console: "Console", viewed: ViewedRun) -> None:
    """Prints the failed episodes, the newest first, with the errors that ended them."""
    num_failed = 0
    for episodes, step, record in _failed(viewed):
        num_failed += 1
        if num_failed <= _MAX_FAILED:
            place = f"{step}/{record.get('group')}/{record.get('sibling')}"
            _say(console, f"{_name(episodes, step)}  --trajectory {place}", "bold")
            _say(console, f"  {record['task'].get('id')}: {record.get('error')}", "red")
    if not num_failed:
        _say(console, f"{viewed.source.name}: no episode failed")
    elif num_failed > _MAX_FAILED:
        _say(console, f"and {num_failed - _MAX_FAILED} more; --steps chooses steps", "dim")


def _failed(viewed: ViewedRun) -> Iterator[tuple[Episodes, int, dict[str, Any]]]:
    for episodes in viewed.source.episodes:
        for step in reversed(episodes.steps()):
            records, _ = episodes.file.records(step - episodes.first_step)
            yield from ((episodes, step, record) for record in records if record.get("status") == "failed")


def _print_episode(console: "Console", viewed: ViewedRun, place: str) -> None:
    step, group, sibling = _place(place)
    for episodes in viewed.source.episodes:
        if step not in episodes.steps():
            continue
        for line in episodes.file.lines(step - episodes.first_step):
            try:
                key, trajectory = read_record(line)
            except ValueError:
                continue  # a damaged line is counted when pages are written
            if (key.group, trajectory.sibling) == (group, sibling):
                texts = viewed.source.texts
                screen = RecordedScreen(console, texts.decoder.decode if texts else None)
                screen.show(trajectory, episode_title(trajectory, _name(episodes, step), group))
                return
    raise DataError(_missing(viewed, step, group, sibling))


def _place(text: str) -> tuple[int, int, int]:
    parts = text.split("/")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--trajectory {text}: write {_FORM}")
    step, group, sibling = map(int, parts)
    return step, group, sibling


def _missing(viewed: ViewedRun, step: int, group: int, sibling: int) -> str:
    """Why there is no such episode, and what there is."""
    name = viewed.source.name
    for episodes in viewed.source.episodes:
        if step in episodes.steps():
            indexes = episodes.read(step, None).summary["index"]
            if not indexes:
                return f"{name}, step {step} has no episode that can be read: all its lines are damaged"
            if group not in indexes:
                return f"{name}, step {step} has no group {group}; it has {min(indexes)} to {max(indexes)}"
            return f"{name}, step {step}, group {group} has no sibling {sibling} that can be read"
    steps = [step for episodes in viewed.source.episodes for step in episodes.steps()]
    return f"{name} has no step {step}; it has {min(steps)} to {max(steps)}, counted from 1"


def _say(console: "Console", text: str, style: str = "") -> None:
    console.print(Text(printable(text), style), soft_wrap=True)
