"""The changes in a resumed run's config, and those with which a checkpoint can't be continued."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_REFUSED = {
    "seed": "tasks, tokens and the order of training follow from it",
    "train_env_manager.tags": "the position in the sequence of tasks would mean other tasks",
    "train_files": "the position in the demonstrations would mean other rows",
    "training_args.per_device_train_batch_size": "the position in the demonstrations would mean other rows",
    "training_args.gradient_accumulation_steps": "the position in the demonstrations would mean other rows",
}
"""Settings that must stay, and why. The last ones are of supervised fine-tuning, whose config has no roles."""
_REFUSED_IN_MODELS = ("lora_rank", "lora_alpha", "lora_target", "freeze_module_prefix")
"""Keys of `model_args`, of any role, that say which parameters the checkpoint's optimiser knows and what they mean."""
_WITHOUT_EFFECT = {
    "pretrain": "the weights are the checkpoint's",
    "actor_train.model_args.model_name_or_path": "the weights are the checkpoint's",
    "critic.model_args.model_name_or_path": "the weights are the checkpoint's",
}
"""Settings of the start that the checkpoint has taken over."""
_EXPECTED = ("resume_from_checkpoint", "exp_name", "output_dir")  # settings that say where a run is, not what it does


class Difference(NamedTuple):
    """One setting that differs from the saved run's; None if one of the two has no use for it."""

    key: str
    saved: Any
    now: Any

    @property
    def is_refused(self) -> bool:
        """Whether a resumed run refuses the difference."""
        return bool(self._refusal)

    @property
    def _refusal(self) -> str:
        section, _, key = self.key.rpartition(".")
        if section.endswith("model_args") and key in _REFUSED_IN_MODELS:
            return "other parameters would be trained than those of the checkpoint"
        return _REFUSED.get(self.key, "")

    def __str__(self) -> str:
        reason = self._refusal or _WITHOUT_EFFECT.get(self.key)
        return f"{self.key}: {_show(self.saved)} → {_show(self.now)}" + (f" ({reason})" if reason else "")


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """The settings in which two resolved configs differ (`dump.resolved_values`), in the order of `now`.

    >>> [str(d) for d in differences({"seed": 1, "critic": {"a": 2}}, {"seed": 2, "critic": {"a": 2, "b": True}})]
    ['seed: 1 → 2 (tasks, tokens and the order of training follow from it)', 'critic.b: unset → True']
    """
    before, after = dict(leaves(saved)), dict(leaves(now))
    keys = [key for key in dict.fromkeys([*after, *before]) if key not in _EXPECTED]
    return [Difference(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`(dotted key, value)` of every setting."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def _show(value: Any) -> str:
    return "unset" if value is None else repr(value)
