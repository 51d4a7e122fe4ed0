"""How long the calls of an environment take, and what that means for how it is called."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.envs.checks.findings import Finding
from turnwise.envs.checks.session import Clock, Timings

COOPERATIVE_S = 1e-3
"""Seconds of a turn, its share of constructor and reset included, that may be spent between two steps of the sampler."""
TAIL_S = 1e-2
"""Seconds of a step that one in a hundred may take there."""
BLOCK_S = 0.1
"""Seconds of one call, whichever, that may hold up all other episodes."""
NUM_WAITING = 16
"""Calls at once that are suggested for an environment that waits for something else than a processor."""


def times(clock: Clock, mean_steps: float, num_cores: int) -> list[Finding]:
    """The times of `step` and of a start, and whether the environment may be called between two steps of the sampler."""
    step, start = clock.of("step"), _start(clock)
    return [_step(step, start, mean_steps, num_cores), _row("start time", start)]


def duration(seconds: float) -> str:
    """
    >>> duration(2.34e-6), duration(0.0142), duration(3.0), duration(0.0)
    ('2.3 µs', '14 ms', '3.0 s', '0.0 µs')
    """
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("µs", 1e-6))
    count = seconds / size
    return f"{count:.1f} {unit}" if count < 10 else f"{count:.0f} {unit}"


def _step(step: Timings, start: Timings, mean_steps: float, num_cores: int) -> Finding:
    row = _row("step time", step)
    if row.verdict == "skipped":
        return row
    start_s = _median(start.wall_s)
    turn_s = row.figures["mean_s"] + start_s / max(mean_steps, 1.0)
    is_quick = turn_s <= COOPERATIVE_S and row.figures["p99_s"] <= TAIL_S and start_s <= BLOCK_S
    figures = {**row.figures, "turn_s": turn_s, "is_async": step.is_async}
    if step.is_async:
        return Finding(row.check, "ok", f"{row.result}: coroutines", figures={**figures, "is_cooperative": True})
    figures["is_cooperative"] = is_quick
    if is_quick:
        return Finding(row.check, "ok", f"{row.result}: cooperative", figures=figures)
    waits = sum(step.cpu_s) + sum(start.cpu_s) < 0.5 * (sum(step.wall_s) + sum(start.wall_s))
    if waits:
        advice = f"it waits: max_env_num_per_worker: {NUM_WAITING} lets so many wait at once"
    else:
        advice = f"it computes: make it quicker, or max_env_num_per_worker: {num_cores}, which helps outside Python's own lock"
    return Finding(row.check, "warning", f"{row.result}: blocking", advice, figures)


def _start(clock: Clock) -> Timings:
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
