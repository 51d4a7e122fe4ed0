"""Which of a run's metrics people look at, and how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Column(NamedTuple):
    """One figure: its title, the format of its value, and the metric; in the name `*` stands for any one part."""

    title: str
    form: str
    name: str

    def read(self, metrics: Mapping[str, float]) -> float | None:
        """The mean over the metrics that fit, None where there is none.

        >>> Column("success", "{:.2f}", "env/*/success").read({"env/A/success": 1.0, "env/B/success": 0.5, "env/A/score": 0.0})
        0.75
        """
        values = [value for name, value in metrics.items() if self._fits(name)]
        return sum(values) / len(values) if values else None

    def text(self, value: float) -> str:
        return self.form.format(value)

    def _fits(self, name: str) -> bool:
        if "*" not in self.name:
            return name == self.name
        parts, wanted = name.split("/"), self.name.split("/")
        return len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))


@dataclass(frozen=True, slots=True)
class Columns:
    """The figures of one pipeline.

    `trends` are what the run is about, `validation` is the same on held-out data.
    """

    trends: tuple[Column, ...]
    validation: Column
    details: tuple[Column, ...]
    times: tuple[Column, ...]
    is_lower_better: bool = False

    @property
    def all(self) -> tuple[Column, ...]:
        return (*self.trends, self.validation, *self.details, *self.times)


AGENTIC_COLUMNS = Columns(
    trends=(Column("score", "{:.3f}", "rollout/score/mean"), Column("success", "{:.3f}", "env/*/success")),
    validation=Column("val", "{:.3f}", "val/env/*/success"),
    details=(
        Column("turns", "{:.1f}", "rollout/num_turns"),
        Column("entropy", "{:.3f}", "actor/entropy"),
        Column("kl", "{:.4f}", "critic/kl"),
        Column("kl_loss", "{:.4f}", "actor/kl_loss"),
        Column("critic", "{:.3f}", "critic/loss"),
        Column("grad", "{:.2f}", "actor_train/grad_norm"),
        Column("lr", "{:.1e}", "actor/lr"),
        Column("tok/s", "{:,.0f}", "system/tps"),
    ),
    times=(
        Column("rollout_s", "{:.1f}", "time/step_rollout"),
        Column("train_s", "{:.1f}", "time/step_train"),
        Column("total_s", "{:.1f}", "time/step_total"),
    ),
)
SFT_COLUMNS = Columns(
    trends=(Column("loss", "{:.4f}", "sft/loss"),),
    validation=Column("val", "{:.4f}", "sft/val_loss"),
    details=(
        Column("grad", "{:.2f}", "sft/grad_norm"),
        Column("lr", "{:.1e}", "sft/lr"),
        Column("tok/s", "{:,.0f}", "system/tps"),
    ),
    times=(),
    is_lower_better=True,
)
