"""Any gymnasium environment with discrete actions (Towers et al. 2024, arXiv:2407.17032) as a text
environment."""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, ClassVar, get_args

import numpy as np
from numpy.typing import NDArray

from turnwise.envs.arguments import check_choice, check_count, check_format_penalty, check_type
from turnwise.envs.base import Step
from turnwise.envs.grid import RenderMode
from turnwise.envs.gymnasium.actions import action_words
from turnwise.envs.gymnasium.known import Known, known_class
from turnwise.envs.hold_out import HeldOutEnv, fingerprint
from turnwise.envs.packages import needs, silenced
from turnwise.errors import EnvironmentFault, nearest
from turnwise.runtime.entry_points import load_function
from turnwise.types import Media, Observation, Reduction, Split

OUTCOMES = ("reward", "terminated", "truncated")
_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)


class GymnasiumEnv(HeldOutEnv):
    """The environment `id` of gymnasium's registry, with its own dynamics and rewards, and actions and
    observations as text.

    An action that isn't one of the words (case doesn't matter) doesn't reach the environment. It costs
    `format_penalty` (≤ 0), the observation is repeated, and the episode continues. Raises EnvironmentFault if
    there is no such environment, an argument isn't allowed, or the environment's spaces can't be text;
    NotAvailableError if gymnasium, or a package that the environment needs, isn't installed.

    Args:
        id: a name in gymnasium's registry, with its version; `package:id` if another package registers the
            environment.
        kwargs: arguments of the environment's own constructor.
        action_names: the words of actions. A mapping number → word, or a list of names that turnwise knows
            for this environment, allows these actions only. A list of other words names all actions in the
            order of their numbers. None: the known names, else the numbers.
        renderer: how an observation becomes text: `space` (by the observation space), `ansi` (the
            environment's own drawing in text, with coloured parts in brackets), a name that turnwise knows
            for this environment, or `module:function` of `(observation, env)`. None: the first known name,
            else `space`.
        max_observation_chars: a longer text is cut at this length, and says so.
        render_mode: what is observed: `text`, or a picture (`rgb_array`), with the text of the `renderer` if
            one is given.
        success: what counts as success: `reward` (the last reward is above 0), `terminated`, `truncated`, or
            `info:KEY` (the value of this key, which the last info must have, is true). None: what turnwise
            knows, else `reward`.
        format_penalty: reward of an invalid action.
        env_instruction: replaces the rules that open the first prompt; "" leaves them out.
        split: `train` or `val`: plays only starts whose state hashes into this split, unless none is found.
            None: plays all.
    """

    metric_reductions: ClassVar[Mapping[str, Reduction]] = MappingProxyType(
        {"success": "last", "action_is_valid": "mean", "format_penalty": "mean"}
    )

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        action_names: Sequence[str] | Mapping[Any, str] | None = None,
        renderer: str | None = None,
        max_observation_chars: int = 4000,
        render_mode: RenderMode = "text",
        success: str | None = None,
        format_penalty: float = 0.0,
        env_instruction: str | None = None,
        split: Split | None = None,
    ) -> None:
        check_choice("gymnasium", "split", split, (*get_args(Split), None))
        check_format_penalty(format_penalty)
        check_count("gymnasium", "max_observation_chars", max_observation_chars)
        check_type("gymnasium", "id", id, str, "a string, such as Taxi-v4")
        if not re.fullmatch("info:.+", str(success)):
            check_choice("gymnasium", "success", success, (*OUTCOMES, "info:KEY", None))
        _check_drawing(kwargs or {}, renderer, render_mode)
        with needs("gymnasium", "gym"):
            from turnwise.envs.gymnasium import make, spaces

        self._id = id
        self._name = f"gymnasium's {id}"
        self._max_chars = max_observation_chars
        self._format_penalty = float(format_penalty)
        self._split = split
        self._shows_text = render_mode == "text" or renderer is not None
        self.shows_pictures = render_mode == "rgb_array"
        self._observation: Any = None
        self._shown: str | Observation | None = None
        drawing: make.Drawing = "ansi" if renderer == "ansi" else "rgb_array"
        self._env, draws = make.make_gymnasium(id, kwargs or {}, drawing)
        self._draw = make.draw if draws and drawing == "rgb_array" else None
        if not draws and (drawing == "ansi" or self.shows_pictures):
            raise self._cannot_draw()
        if self.shows_pictures:
            make.check_pictures(self._env)
        facts = known_class(self._env)
        numbers = spaces.action_numbers(self._env.action_space, self._name)
        self._words = action_words(id, action_names, numbers, facts.actions)
        self._numbers = {word.lower(): number for number, word in self._words.items()}
        self.actions = tuple(self._words.values())
        """The words of the actions that may be taken."""
        text = _renderer(id, renderer, facts.renderers)
        if text is None and self._shows_text:
            spaces.check_observations(self._env.observation_space, self._name)
        self._text = text or (lambda observation, env: spaces.as_text(env.observation_space, observation))
        self._sees_number = spaces.is_number(self._env.observation_space)
        self._success = success or facts.success
        self._use(facts)
        if env_instruction is not None:
            self._instruction = env_instruction

    def _use(self, facts: Known) -> None:
        self._instruction = f"Actions: {', '.join(self.actions)}."
        if facts.rules:
            self._instruction = f"{facts.rules}\n{self._instruction}"
        self._key: Callable[[Any], Hashable] | None = None
        if facts.state_key:
            self._key = load_function(facts.state_key, "state_key", EnvironmentFault, ["env"])
        self._quiet: Callable[[], AbstractContextManager[None]] = nullcontext
        if facts.prints:
            self._quiet = silenced

    def _cannot_draw(self) -> EnvironmentFault:
        modes = self._env.metadata.get("render_modes", [])
        return EnvironmentFault(
            f"{self._name} can't draw as asked; its render modes are {', '.join(modes) or 'none'}"
        )

    def reset(self, *, seed: int | None = None) -> tuple[str | Observation, dict[str, Any]]:
        self._start(self._name, seed, self._split, self._begin)
        self._shown = self._observe()
        return self._shown, {"env_instruction": self._instruction}

    def _begin(self, seed: int) -> str:
        with self._quiet():
            self._observation, _ = self._env.reset(seed=seed)
        return str(self.state_key())

    def step(self, action: str) -> Step:
        if self._shown is None:
            raise EnvironmentFault("GymnasiumEnv.step came before reset; call reset(seed=…) first")
        number = self._numbers.get(action.strip().lower())
        if number is None:
            metrics = {"success": 0.0, "action_is_valid": 0.0, "format_penalty": self._format_penalty}
            return self._shown, self._format_penalty, False, False, {"metrics": metrics, "action": None}
        self._observation, reward, terminated, truncated, info = self._env.step(number)
        self._shown = self._observe()
        is_success = self._is_success(float(reward), bool(terminated), bool(truncated), info)
        metrics = {"success": float(is_success), "action_is_valid": 1.0, "format_penalty": 0.0}
        step_info = {"metrics": metrics, "action": self._words[number]}
        return self._shown, float(reward), bool(terminated), bool(truncated), step_info

    def state_key(self) -> Hashable:
        """The key from `Known.state_key`; if that is empty, the observation, hashed unless it is a whole
        number."""
        if self._key is not None:
            return self._key(self._env)
        if self._sees_number:
            return int(self._observation)
        return fingerprint(self._observation)

    def render(self) -> NDArray[np.uint8] | None:
        if self._draw is None:
            return None
        return self._draw(self._env)

    def close(self) -> None:
        self._env.close()

    def _is_success(
        self,
        reward: float,
        terminated: bool,
        truncated: bool,
        info: Mapping[str, Any],
    ) -> bool:
        is_over = terminated or truncated
        match self._success:
            case "reward":
                return is_over and reward > 0
            case "terminated":
                return terminated
            case "truncated":
                return truncated
        name = self._success.removeprefix("info:")
        if is_over and name not in info:
            keys = [str(key) for key in info]
            raise EnvironmentFault(
                f"{self._name}: success is info:{name}, and the info that ended the episode has no such key; "
                f"it has {', '.join(keys) or 'none at all'}. Set success to info:KEY of these, or to one of "
                f"{', '.join(OUTCOMES)}.{nearest(name, keys)}"
            )
        return bool(info.get(name))

    def _observe(self) -> str | Observation:
        text = "The picture shows the environment."
        if self._shows_text:
            text = self._text(self._observation, self._env)
        if len(text) > self._max_chars:
            text = f"{text[: self._max_chars]}… (cut at {self._max_chars} characters)"
        if not self.shows_pictures:
            return text
        picture = self.render()
        if picture is None:
            raise EnvironmentFault(
                f"{self._name} draws with a package that isn't installed; set render_mode: text"
            )
        return Observation(text, (Media("image", picture),))


def _check_drawing(kwargs: Mapping[str, Any], renderer: str | None, render_mode: RenderMode) -> None:
    check_choice("gymnasium", "render_mode", render_mode, get_args(RenderMode))
    check_type("gymnasium", "kwargs", kwargs, Mapping, "a mapping of the constructor's arguments")
    check_type("gymnasium", "renderer", renderer or "", str, "a string, such as space")
    if renderer == "ansi" and render_mode == "rgb_array":
        raise EnvironmentFault(
            "gymnasium draws in one way: renderer: ansi is text and render_mode: rgb_array a picture"
        )
    if "render_mode" in kwargs:
        raise EnvironmentFault(
            "render_mode is a key of env_config itself, text or rgb_array; remove it from kwargs"
        )


def _renderer(
    env_id: str,
    name: str | None,
    usual_renderers: Mapping[str, str],
) -> Callable[[Any, Any], str] | None:
    """The function of `(observation, env)` that the argument `renderer` names; None for `space`."""
    if name is None:
        name = next(iter(usual_renderers), "space")
    if name == "space":
        return None
    if name == "ansi":
        return lambda observation, env: _COLOURED.sub(r"[\1]", str(env.render())).strip("\n")
    entry = usual_renderers.get(name, name)
    if ":" in entry:
        return load_function(entry, "renderer", EnvironmentFault, ["observation", "env"])
    names = ("space", "ansi", *usual_renderers)
    raise EnvironmentFault(
        f"unknown renderer {name!r} for gymnasium's {env_id}; it is one of {', '.join(names)}, or "
        f"module:function.{nearest(name, names)}"
    )
