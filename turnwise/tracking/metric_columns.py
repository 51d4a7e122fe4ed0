"""The metrics that a run shows to people, and their formats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class MetricColumn(NamedTuple):
    """One metric to show: its title, the format of its value, and its name, where `*` stands for any tag."""

    title: str
    form: str
    name: str

    def read(self, metrics: Mapping[str, float]) -> float | None:
        """The mean over the matching metrics, None without a match.

        >>> column = MetricColumn("success", "{:.2f}", "env/*/success")
        >>> column.read({"env/A/success": 1.0, "env/openai/gsm8k/success": 0.5, "env/A/score": 0.0})
        0.75
        """
        values = [value for name, value in metrics.items() if self._fits(name)]
        if not values:
            return None
        return sum(values) / len(values)

    def text(self, value: float) -> str:
        return self.form.format(value)

    def _fits(self, name: str) -> bool:
        start, tag, end = self.name.partition("*")
        if not tag:
            return name == self.name
        return len(name) > len(start + end) and name.startswith(start) and name.endswith(end)


@dataclass(frozen=True, slots=True)
class MetricColumns:
    """The metrics that one pipeline shows: `trends` say how well training goes, `validation` is the same on
    held-out data."""

    trends: tuple[MetricColumn, ...]
    validation: MetricColumn
    details: tuple[MetricColumn, ...]
    times: tuple[MetricColumn, ...]
    is_lower_better: bool = False

    def with_shown(self, names: Sequence[str]) -> "MetricColumns":
        """These columns, and after the trends one for each metric of environments."""
        shown = tuple(MetricColumn(name, "{:.3f}", f"env/*/{name}") for name in names)
        return replace(self, trends=self.trends + shown)

    @property
    def all(self) -> tuple[MetricColumn, ...]:
        return (*self.trends, self.validation, *self.details, *self.times)


AGENTIC_COLUMNS = MetricColumns(
    trends=(
        MetricColumn("score", "{:.3f}", "rollout/score/mean"),
        MetricColumn("success", "{:.3f}", "env/*/success"),
    ),
    validation=MetricColumn("val", "{:.3f}", "val/env/*/success"),
    details=(
        MetricColumn("turns", "{:.1f}", "rollout/num_turns"),
        MetricColumn("entropy", "{:.3f}", "actor/entropy"),
        MetricColumn("kl", "{:.4f}", "critic/kl"),
        MetricColumn("kl_loss", "{:.4f}", "actor/kl_loss"),
        MetricColumn("critic", "{:.3f}", "critic/loss"),
        MetricColumn("grad", "{:.2f}", "actor_train/grad_norm"),
        MetricColumn("lr", "{:.1e}", "actor/lr"),
        MetricColumn("tok/s", "{:,.0f}", "system/tps"),
    ),
    times=(
        MetricColumn("rollout_s", "{:.1f}", "time/step_rollout"),
        MetricColumn("train_s", "{:.1f}", "time/step_train"),
        MetricColumn("total_s", "{:.1f}", "time/step_total"),
    ),
)
SFT_COLUMNS = MetricColumns(
    trends=(MetricColumn("loss", "{:.4f}", "sft/loss"),),
    validation=MetricColumn("val", "{:.4f}", "sft/val_loss"),
    details=(
        MetricColumn("grad", "{:.2f}", "sft/grad_norm"),
        MetricColumn("lr", "{:.1e}", "sft/lr"),
        MetricColumn("tok/s", "{:,.0f}", "system/tps"),
    ),
    times=(),
    is_lower_better=True,
)
