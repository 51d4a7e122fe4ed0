"""Callbacks are objects with at least one method of `EVENTS`. After each step, `Trainer.steps` passes the
StepReport to the methods whose event has happened. If one returns "stop", the run ends with a checkpoint and,
with eval_steps, a validation."""

from collections.abc import Sequence

from turnwise.errors import ConfigError, nearest
from turnwise.pipelines.step_report import StepReport
from turnwise.runtime.foreign import Foreign

EVENTS = ("on_validation", "on_step_end", "on_checkpoint")
STOP = "stop"


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Raises ConfigError if `callbacks` isn't a list or tuple, or if one of them has no method of
    `EVENTS`."""
    if not isinstance(callbacks, list | tuple):
        raise ConfigError(
            f"callbacks: got {callbacks!r}; it is a list of objects, if only of one: callbacks=[…]"
        )
    for callback in callbacks:
        if not any(hasattr(callback, event) for event in EVENTS):
            methods = [name for name in dir(callback) if name.startswith("on_")]
            suggestion = nearest(methods[0], EVENTS) if methods else ""
            raise ConfigError(
                f"callbacks: {callback!r} has none of the methods {', '.join(EVENTS)}.{suggestion}"
            )


def asks_to_stop(callbacks: Sequence[object], report: StepReport) -> bool:
    """Calls the callbacks' methods for the events that have happened. Returns whether a callback asks to end
    the run. Raises EnvironmentFault if a callback raises, ConfigError if it returns anything but None or
    "stop"."""
    has_happened = {
        "on_validation": report.validation is not None,
        "on_step_end": not report.is_final,
        "on_checkpoint": report.checkpoint is not None,
    }
    answers = []
    for event in EVENTS:
        if not has_happened[event]:
            continue
        for callback in callbacks:
            if hasattr(callback, event):
                answers.append(_call(callback, event, report))
    return STOP in answers


def _call(callback: object, event: str, report: StepReport) -> str | None:
    name = f"callback {type(callback).__name__}.{event}"
    with Foreign(name, are_faults=True):
        answer = getattr(callback, event)(report)
    if answer not in (None, STOP):
        raise ConfigError(
            f"{name} returned {answer!r}; it returns nothing, or {STOP!r} to end the run after this step"
        )
    return answer
