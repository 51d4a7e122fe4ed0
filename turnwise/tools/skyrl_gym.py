"""Environments of skyrl-gym as simulated users: they answer each of the model's answers, and score it."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.errors import EnvironmentFault, NotAvailableError, nearest
from turnwise.types import Message

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Played:
    """An environment of skyrl-gym in one conversation."""

    env: Any
    env_class: str
    is_begun: bool = False
    score: float = 0.0


class SkyRLGym:
    """Plays the environment that the row's `extra_info.interaction_kwargs` names: `env_class`, and what it
    needs (`reward_spec` and others, the `extras` of `skyrl_gym.make`). Each step's reward is that of the
    model's turn. Raises NotAvailableError if skyrl-gym isn't installed."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        try:
            import skyrl_gym
        except ImportError as error:
            raise NotAvailableError(
                "the interaction SkyRLGym needs the package skyrl-gym, which isn't installed"
            ) from error
        self._gym = skyrl_gym
        self._has_warned = False

    async def start_interaction(self, instance_id: str, env_class: str, **extras: Any) -> Played:
        if env_class not in self._gym.envs.registration.registry:
            names = sorted(self._gym.envs.registration.registry)
            raise EnvironmentFault(
                f"extra_info.interaction_kwargs.env_class is {env_class!r}; skyrl-gym has {', '.join(names)}."
                f"{nearest(env_class, names)}"
            )
        try:
            env = await asyncio.to_thread(self._gym.make, env_class, extras=extras)
        except (AssertionError, KeyError) as fault:
            raise EnvironmentFault(
                f"skyrl-gym's {env_class} needs more of extra_info.interaction_kwargs than "
                f"{', '.join(extras) or 'nothing'}: {fault}"
            ) from fault
        return Played(env, env_class)

    async def generate_response(
        self, state: Played, messages: Sequence[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        if not state.is_begun:
            await self._begin(state, messages[:-1])
        step = await asyncio.to_thread(state.env.step, str(messages[-1]["content"]))
        if step.get("postprocessed_action") is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "skyrl-gym's %s changes the model's answers (postprocessed_action): the model reads what it "
                "sampled",
                state.env_class,
            )
        reward = float(step["reward"])
        state.score += reward
        metrics = dict(step.get("metadata") or {})
        if step["done"]:
            metrics |= state.env.get_metrics()
        text = "\n".join(str(observation["content"]) for observation in step["observations"])
        return bool(step["done"]), text, reward, metrics

    async def calculate_score(self, state: Played) -> float:
        return state.score

    async def finalize_interaction(self, state: Played) -> None:
        await asyncio.to_thread(state.env.close)

    async def _begin(self, state: Played, prompt: Sequence[Message]) -> None:
        """Lets the environment see the first prompt, which the model has read already."""
        state.is_begun = True
        shown = [{"role": message["role"], "content": message["content"]} for message in prompt]
        changed, _ = await asyncio.to_thread(state.env.init, list(shown))
        if list(changed) != shown:
            raise EnvironmentFault(
                f"skyrl-gym's {state.env_class} changes the first prompt, which the model has read by then: "
                "write the prompt into the row as the environment wants it"
            )
