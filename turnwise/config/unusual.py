"""Values that are allowed and far from anything that trains: a sentence each, which refuses nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

from turnwise.config.problems import Path, Problem
from turnwise.config.section import Section


class Usual(NamedTuple):
    """Bounds of a setting's size, whatever its sign; published runs stay far inside. The texts say what happens beyond."""

    keys: str
    low: float
    high: float
    usual: str
    below: str
    above: str


_USUAL = (
    Usual(
        "learning_rate",
        *(1e-10, 0.05, "1e-6 to 1e-4, and up to 3e-3 for tiny models"),
        below="the weights hardly move",
        above="each step moves every weight by about so much, and the model falls apart",
    ),
    Usual("weight_decay", 0, 1, "0 to 0.1", "", "the weights shrink faster than they learn"),
    Usual("max_grad_norm", 1e-6, math.inf, "0.1 to 10", "hardly anything is left of a gradient", ""),
    Usual("entropy_loss_coef", 0, 0.1, "0 to 0.01", "", "the entropy outweighs the reward"),
    Usual("kl_loss_coef init_kl_coef", 0, 10, "0.001 to 0.1", "", "the KL outweighs the reward, and the policy stays as it is"),
    Usual("target_kl", 0, 10, "0.001 to 0.1", "", "no policy that still writes text is so far from its reference"),
    Usual("ppo_epochs", 1, 20, "1 to 4", "", "most of its passes train on ratios that are clipped already"),
    Usual("pg_clip pg_clip_low", 0, 1, "0.1 to 0.3", "", "no ratio is so small, so nothing is clipped on that side"),
    Usual("pg_clip_high", 0, 100, "0.2 to 5", "", "hardly any ratio is so large, so nothing is clipped on that side"),
    Usual("reward_clip advantage_clip", 1e-3, math.inf, "1 to 10", "hardly anything is left of a reward", ""),
    Usual("episode_reward_weight step_reward_weight", 0, 100, "0 to 1", "", "the size of every step comes from clipping alone"),
    Usual("async_generation_ratio", 0, 64, "1 to 4", "", "samples are trained on by a policy that has long changed"),
    Usual("temperature", 0.01, 5, "0.6 to 1.2", "siblings answer alike", "what is sampled is nearly noise"),
    Usual("repetition_penalty", 0.2, 5, "1 to 1.2", "responses repeat themselves", "what is sampled is nearly noise"),
    Usual("top_p", 0.05, 1, "0.8 to 1", "siblings answer alike", ""),
    Usual("lora_alpha", 0, 1e4, "1 to 4 × lora_rank", "", "the first steps throw the model off"),
)
_OF_KEY = {key: row for row in _USUAL for key in row.keys.split()}


def unusual(section: Section, idle: Collection[Path], path: Path = ()) -> Iterator[Problem]:
    """Settings of a section and of those in it that the user set beyond the bounds, without those that are `idle`; 0 is off."""
    for key in type(section).model_fields:
        value, here = section.__dict__[key], (*path, key)
        if here in idle or key not in section.model_fields_set:
            continue
        if isinstance(value, Section):
            yield from unusual(value, idle, here)
        elif (row := _OF_KEY.get(key)) and value and not row.low <= abs(value) <= row.high:
            happens = row.below if abs(value) < row.low else row.above
            yield Problem(here, f"{value:g} is far from the usual {row.usual}: {happens}.")
