"""One line a step on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

Column = tuple[str, str, str]
"""`(title, format of the value, metric name)`; in the name `*` stands for any one part."""

AGENTIC_COLUMNS: tuple[Column, ...] = (
    ("score", "{:.3f}", "rollout/score/mean"),
    ("success", "{:.3f}", "env/*/success"),
    ("val", "{:.3f}", "val/env/*/success"),
    ("turns", "{:.1f}", "rollout/num_turns"),
    ("entropy", "{:.3f}", "actor/entropy"),
    ("kl", "{:.4f}", "critic/kl"),
    ("kl_loss", "{:.4f}", "actor/kl_loss"),
    ("grad", "{:.2f}", "actor_train/grad_norm"),
    ("lr", "{:.1e}", "actor/lr"),
    ("tok/s", "{:.0f}", "system/tps"),
    ("rollout_s", "{:.1f}", "time/step_rollout"),
    ("train_s", "{:.1f}", "time/step_train"),
    ("total_s", "{:.1f}", "time/step_total"),
)
SFT_COLUMNS: tuple[Column, ...] = (
    ("loss", "{:.4f}", "sft/loss"),
    ("val", "{:.4f}", "sft/val_loss"),
    ("grad", "{:.2f}", "sft/grad_norm"),
    ("lr", "{:.1e}", "sft/lr"),
    ("tok/s", "{:.0f}", "system/tps"),
)


class TerminalTracker:
    """Prints the columns that the step has, every `every` steps and whenever something was validated."""

    def __init__(
        self, columns: Sequence[Column], num_steps: int, every: int = 1, file: TextIO | None = None, label: str = "step"
    ) -> None:
        self._columns = columns
        self._num_steps = num_steps
        self._every = max(every, 1)
        self._file = file
        self._label = label

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        is_validation = any(name.startswith("val/") for name in metrics)
        if step % self._every and not is_validation and step != self._num_steps - 1:
            return
        width = len(str(self._num_steps))
        # What is measured after the last step has that step's number plus one.
        cells = [f"{self._label} {step + 1:>{width}}/{self._num_steps}" if step < self._num_steps else "final"]
        for title, form, pattern in self._columns:
            values = [value for name, value in metrics.items() if _fits(name, pattern)]
            if values:
                cells.append(f"{title} {form.format(sum(values) / len(values))}")
        print("  ".join(cells), file=self._file or sys.stdout, flush=True)

    def close(self) -> None:
        pass


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))
