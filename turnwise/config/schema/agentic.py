"""`AgenticConfig`: all settings of one run of reinforcement learning, with every default filled in."""

from typing import Self

from pydantic import model_validator

from turnwise.config.schema.keys import AgenticKeys
from turnwise.config.schema.resolve import resolve


class AgenticConfig(AgenticKeys):
    """One YAML of `turnwise train`, validated and with every default filled in. Contradictions between its
    keys aren't found here but by `parse_config` and `load_config`.

    >>> lake = {"custom_envs": {"Lake": {"env_type": "frozen_lake"}}}
    >>> config = AgenticConfig.model_validate({"pretrain": "models/tiny", **lake})
    >>> config.reward_normalization.method, config.train_env_manager.tags,
    config.actor_infer.strategy_args.strategy_name ('mean_std', ['Lake'], 'embedded')
    """

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        resolve(self)
        return self
