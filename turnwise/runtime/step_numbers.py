"""How people count steps. `metrics.jsonl` counts them from 0, and the row of step n has the validation after
n steps too. All that people look at counts from 1, and shows that validation at n: pictures, TensorBoard,
wandb, SwanLab and MLflow ask here."""

from collections.abc import Mapping

_VALIDATIONS = ("val/", "sft/val_loss")


def is_validation(metric: str) -> bool:
    """Whether the metric, given by its name or a pattern of names, is one of validation."""
    return metric.startswith(_VALIDATIONS)


def shown_step(step: float, metric: str) -> float:
    """The number, as people count, of a step that counts from 0.

    >>> shown_step(0, "rollout/score/mean"), shown_step(30, "val/score/mean")
    (1, 30)
    """
    if is_validation(metric):
        return step
    return step + 1


def split_by_step(step: int, metrics: Mapping[str, float]) -> dict[int, dict[str, float]]:
    """The metrics of a row by the step at which people see them: first those of validation, if there are any.

    >>> split_by_step(2, {"a": 1.0, "val/a": 0.5})
    {2: {'val/a': 0.5}, 3: {'a': 1.0}}
    """
    validation = {name: value for name, value in metrics.items() if is_validation(name)}
    training = {name: value for name, value in metrics.items() if name not in validation}
    rows = {step: validation, step + 1: training}
    return {number: row for number, row in rows.items() if row}
