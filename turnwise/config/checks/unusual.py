"""Finds values that are allowed but far outside the range in which training works."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from turnwise.config.problems import Path, Problem
from turnwise.config.schema.section import Section


@dataclass(frozen=True, slots=True)
class Usual:
    """Bounds of the absolute value of some keys, far beyond published runs, and what happens below and above
    them."""

    keys: tuple[str, ...]
    range: str
    """The usual range, in words."""
    low: float = 0
    high: float = math.inf
    below: str = ""
    above: str = ""

    def consequence(self, value: float) -> str | None:
        """What happens at this value; None if it lies within the bounds."""
        if abs(value) < self.low:
            return self.below
        if abs(value) > self.high:
            return self.above
        return None


USUAL = (
    Usual(
        ("weight_decay",),
        range="0 to 0.1",
        high=1,
        above="the weights shrink faster than they learn",
    ),
    Usual(
        ("max_grad_norm",),
        range="0.1 to 10",
        low=1e-6,
        below="hardly anything is left of a gradient",
    ),
    Usual(
        ("entropy_loss_coef",),
        range="0 to 0.01",
        high=0.1,
        above="the entropy outweighs the reward",
    ),
    Usual(
        ("target_entropy",),
        range="0.1 to 1",
        high=5,
        above="a policy with so much entropy no longer writes text",
    ),
    Usual(
        ("kl_loss_coef", "init_kl_coef"),
        range="0.001 to 0.1",
        high=10,
        above="the KL outweighs the reward, and the policy stays as it is",
    ),
    Usual(
        ("target_kl",),
        range="0.001 to 0.1",
        high=10,
        above="a policy so far from its reference no longer writes text",
    ),
    Usual(
        ("ppo_epochs",),
        range="1 to 4",
        low=1,
        high=20,
        above="most of its passes train on ratios that are clipped already",
    ),
    Usual(
        ("pg_clip", "pg_clip_low"),
        range="0.1 to 0.3",
        high=1,
        above="no ratio is so small, so nothing is clipped on that side",
    ),
    Usual(
        ("pg_clip_high",),
        range="0.2 to 5",
        high=100,
        above="hardly any ratio is so large, so nothing is clipped on that side",
    ),
    Usual(
        ("reward_clip", "advantage_clip"),
        range="1 to 10",
        low=0.001,
        below="hardly anything is left of a reward",
    ),
    Usual(
        ("episode_reward_weight", "step_reward_weight"),
        range="0 to 1",
        high=100,
        above="the size of every step comes from clipping alone",
    ),
    Usual(
        ("async_generation_ratio",),
        range="1 to 4",
        high=64,
        above="samples are trained on by a policy that has long changed",
    ),
    Usual(
        ("temperature",),
        range="0.6 to 1.2",
        low=0.01,
        high=5,
        below="siblings answer alike",
        above="what is sampled is nearly noise",
    ),
    Usual(
        ("repetition_penalty",),
        range="1 to 1.2",
        low=0.2,
        high=5,
        below="responses repeat themselves",
        above="what is sampled is nearly noise",
    ),
    Usual(
        ("top_p",),
        range="0.8 to 1",
        low=0.05,
        high=1,
        below="siblings answer alike",
    ),
    Usual(
        ("lora_alpha",),
        range="1 to 4 × lora_rank",
        high=10_000,
        above="the first steps throw the model off",
    ),
)
_OF_KEY = {key: row for row in USUAL for key in row.keys}


def unusual(section: Section, idle: Collection[Path], path: Path = ()) -> Iterator[Problem]:
    """A problem for each setting that the user set outside its usual bounds, in a section at `path` and the
    sections in it. Settings in `idle`, which have no effect, and values of 0 (off) are never reported."""
    for key in type(section).model_fields:
        value = section.__dict__[key]
        key_path = (*path, key)
        if key_path in idle or key not in section.model_fields_set:
            continue
        if isinstance(value, Section):
            yield from unusual(value, idle, key_path)
            continue
        row = _OF_KEY.get(key)
        if row is None or not value:
            continue
        consequence = row.consequence(value)
        if consequence is not None:
            yield Problem(key_path, f"{value:g} is far from the usual {row.range}: {consequence}.")
