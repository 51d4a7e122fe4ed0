"""The duration of an environment's calls, and the resulting way to call it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turnwise.envs.checks.findings import Finding
from turnwise.envs.checks.session import CallTimes, Timings

COOPERATIVE_S = 1e-3
"""Most seconds of a turn, with its share of constructor and reset, between two steps of the sampler."""
TAIL_S = 1e-2
"""Most seconds of the slowest step in a hundred."""
BLOCK_S = 0.1
"""Seconds of one call, whichever, that may hold up all other episodes."""
NUM_WAITING = 16
"""Calls at once that are suggested for an environment that waits for something else than a processor."""


def times(clock: CallTimes, mean_steps: float, num_cores: int) -> list[Finding]:
    """The times of `step` and of a start, and whether the environment may be called between two steps of the sampler."""
    step, start = clock.of("step"), _start(clock)
    rows = [_row("step time", step), _row("start time", start)]
    return rows if rows[0].verdict == "skipped" else _judged(rows[0], rows[1], step, start, mean_steps, num_cores)


def duration(seconds: float) -> str:
    """
    >>> duration(2.34e-6), duration(0.0142), duration(3.0), duration(0.0)
    ('2.3 µs', '14 ms', '3.0 s', '0.0 µs')
    """
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("µs", 1e-6))
    count = seconds / size
    return f"{count:.1f} {unit}" if count < 10 else f"{count:.0f} {unit}"


def _judged(
    step_row: Finding, start_row: Finding, step: Timings, start: Timings, mean_steps: float, num_cores: int
) -> list[Finding]:
    """The rows with their verdict, which names the blocking part: step or start."""
    start_s = _median(start.wall_s)
    turn_s = step_row.figures["mean_s"] + start_s / max(mean_steps, 1.0)
    is_step_quick = step_row.figures["mean_s"] <= COOPERATIVE_S and step_row.figures["p99_s"] <= TAIL_S
    is_quick = is_step_quick and turn_s <= COOPERATIVE_S and start_s <= BLOCK_S
    figures = {**step_row.figures, "turn_s": turn_s, "is_async": step.is_async, "is_cooperative": is_quick or step.is_async}
    if step.is_async or is_quick:
        how = "coroutines" if step.is_async else "cooperative"
        return [replace(step_row, result=f"{step_row.result}: {how}", figures=figures), start_row]
    slow_row = start_row if is_step_quick else step_row
    if sum(step.cpu_s) + sum(start.cpu_s) < 0.5 * (sum(step.wall_s) + sum(start.wall_s)):
        advice = f"it mostly waits: max_env_num_per_worker: {NUM_WAITING} lets {NUM_WAITING} calls wait at once"
    else:
        advice = f"it mostly computes: make it quicker, or set max_env_num_per_worker: {num_cores} if it releases Python's lock"
    blocking = replace(slow_row, verdict="warning", result=f"{slow_row.result}: blocking", advice=advice)
    if is_step_quick:
        return [replace(step_row, figures=figures), blocking]
    return [replace(blocking, figures=figures), start_row]


def _start(clock: CallTimes) -> Timings:
    """Constructor and reset together, as each episode has them: there is one constructor and at least one reset a session."""
    made, reset = clock.of("the constructor"), clock.of("reset")
    mean_made, mean_cpu = _mean(made.wall_s), _mean(made.cpu_s)
    return Timings([s + mean_made for s in reset.wall_s], [s + mean_cpu for s in reset.cpu_s], reset.is_async)


def _row(check: str, timings: Timings) -> Finding:
    values = sorted(timings.wall_s)
    if not values:
        return Finding(check, "skipped", "never called")
    figures = {
        "num_calls": len(values),
        "mean_s": _mean(values),
        "p50_s": _median(values),
        "p99_s": values[min(int(0.99 * len(values)), len(values) - 1)],
        "max_s": values[-1],
    }
    shown = ", ".join(f"{name} {duration(figures[f'{name}_s'])}" for name in ("mean", "p50", "p99", "max"))
    return Finding(check, "ok", shown, figures=figures)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
