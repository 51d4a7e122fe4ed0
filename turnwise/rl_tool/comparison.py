"""What the second training of a pipeline has changed: before and after, on held-out rows and in training."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from turnwise.tracking.jsonl import read_metrics

NUM_STEPS = 5
"""Steps at either end of a training whose mean reward is compared."""
SETTLED = "the 95% intervals don't overlap"
OPEN = "but the 95% intervals overlap: measure more rows (eval.max_samples) to be sure"


def compare_stages(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Compares the model after grpo with that after sft. Returns `verdict` (better, worse or equal),
    `is_significant` (whether the 95% intervals are apart), `held_out` and `training` with `before` and
    `after`, and `sentence`, which says all of it. `training` is None if the run's metrics aren't there.
    Returns {} if one of the evaluations is missing.

    >>> accuracy = {"accuracy_low": 0.0, "accuracy_high": 1.0, "num_samples": 4}
    >>> sft, grpo = {"accuracy": 0.5, **accuracy}, {"accuracy": 0.25, **accuracy}
    >>> results = {"sft_evaluation": sft, "grpo_evaluation": grpo}
    >>> compare_stages(results)["verdict"]
    'worse'
    """
    if not {"sft_evaluation", "grpo_evaluation"} <= results.keys():
        return {}
    sft = _accuracy(results["sft_evaluation"])
    grpo = _accuracy(results["grpo_evaluation"])
    verdict = "equal"
    if grpo["accuracy"] > sft["accuracy"]:
        verdict = "better"
    elif grpo["accuracy"] < sft["accuracy"]:
        verdict = "worse"
    is_significant = grpo["low"] > sft["high"] or grpo["high"] < sft["low"]
    training = _rewards(results.get("grpo_training", {}))
    return {
        "verdict": verdict,
        "is_significant": is_significant,
        "held_out": {
            "before": sft,
            "after": grpo,
            "num_samples": results["grpo_evaluation"]["num_samples"],
        },
        "training": training,
        "sentence": _sentence(verdict, is_significant, sft, grpo, training),
    }


def _accuracy(evaluation: Mapping[str, Any]) -> dict[str, float]:
    return {
        "accuracy": evaluation["accuracy"],
        "low": evaluation["accuracy_low"],
        "high": evaluation["accuracy_high"],
    }


def _rewards(training: Mapping[str, Any]) -> dict[str, float] | None:
    """The mean reward of a run's first and last `NUM_STEPS` steps."""
    file = Path(training.get("run_folder", ""), "metrics.jsonl")
    if not file.is_file():
        return None
    rewards = [row["rollout/score/mean"] for row in read_metrics(file) if "rollout/score/mean" in row]
    if not rewards:
        return None
    return {"before": fmean(rewards[:NUM_STEPS]), "after": fmean(rewards[-NUM_STEPS:])}


def _sentence(
    verdict: str,
    is_significant: bool,
    sft: Mapping[str, float],
    grpo: Mapping[str, float],
    training: Mapping[str, float] | None,
) -> str:
    held_out = f"accuracy on held-out problems {with_interval(sft)} → {with_interval(grpo)}"
    if verdict == "equal":
        text = f"After grpo the model is as good as after sft: {held_out}."
    else:
        certainty = SETTLED if is_significant else OPEN
        text = f"After grpo the model is {verdict} than after sft: {held_out}, {certainty}."
    if training is None:
        return text
    text += f" Mean reward in training {training['before']:.3f} → {training['after']:.3f}."
    if verdict != "better" and training["after"] > training["before"]:
        text += (
            " What training has taught doesn't carry over to held-out problems: train on more different "
            "rows, or for less long."
        )
    return text


def with_interval(measured: Mapping[str, float]) -> str:
    """An accuracy with its 95% interval.

    >>> with_interval({"accuracy": 0.5, "low": 0.4, "high": 0.6})
    '0.500 [0.400, 0.600]'
    """
    return f"{measured['accuracy']:.3f} [{measured['low']:.3f}, {measured['high']:.3f}]"
