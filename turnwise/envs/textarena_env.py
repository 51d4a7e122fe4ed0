"""Single-player games of the package textarena (Guertler et al. 2025, arXiv:2504.11442) that need no
download."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, get_args

from turnwise.envs.arguments import check_choice, check_format_penalty, check_type
from turnwise.envs.base import Step
from turnwise.envs.hold_out import HeldOutEnv, fingerprint
from turnwise.envs.packages import alone, known_of, needs
from turnwise.errors import EnvironmentFault, nearest
from turnwise.types import Reduction, Split

GAMES: list[str] = known_of("textarena")["games"]
REFUSED: Mapping[str, str] = known_of("textarena")["refused"]


class TextArenaEnv(HeldOutEnv):
    """A game of `GAMES`. An action is any text. It is put in brackets if the game requires brackets and the
    text has none.

    The reward comes at the end of the game, as the game reports it: usually 1 for a win, else the share
    completed. An empty action (the response held none) doesn't reach the game: it costs `format_penalty` (≤
    0), the observation is repeated, and the episode continues. After an invalid move the game asks again. A
    second invalid move in a row ends the game. Raises EnvironmentFault if there is no such game, it isn't
    among `GAMES`, or it doesn't take `kwargs`; NotAvailableError if textarena isn't installed.

    Args:
        id: the game with its version and variant, such as `GuessTheNumber-v0-hardcore`.
        kwargs: arguments of the game's own constructor.
        format_penalty: reward of an empty action.
        env_instruction: replaces the game's rules, which open the first prompt; "" leaves them out.
        split: `train` or `val`: plays only starts that hash into this split, unless none is found. None:
            plays all starts.
    """

    relays_foreign_text: ClassVar[bool] = True
    metric_reductions: ClassVar[Mapping[str, Reduction]] = MappingProxyType(
        {"success": "last", "action_is_valid": "mean", "format_penalty": "mean"}
    )

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        format_penalty: float = 0.0,
        env_instruction: str | None = None,
        split: Split | None = None,
    ) -> None:
        check_choice("textarena", "split", split, (*get_args(Split), None))
        check_format_penalty(format_penalty)
        check_type("textarena", "id", id, str, "a string, such as GuessTheNumber-v0")
        check_type(
            "textarena",
            "kwargs",
            kwargs or {},
            Mapping,
            "a mapping of the constructor's arguments",
        )
        with needs("textarena", "textarena"):
            import textarena
            from textarena.envs.registration import ENV_REGISTRY
        _check_game(id, ENV_REGISTRY)
        self._id = id
        self._kwargs = dict(kwargs or {})
        self._random = random.getstate()
        with self._alone(), _start_errors(id, self._kwargs):
            game = textarena.make(id, **self._kwargs)
        is_wrapped = isinstance(game, textarena.Wrapper)
        self._wants_brackets = is_wrapped and game.is_wrapped_with(textarena.wrappers.ActionFormattingWrapper)
        # The wrappers repeat the whole history at every turn; here a turn shows only its new part.
        while isinstance(game, textarena.Wrapper):
            game = game.env
        self._game = game
        self._kinds = textarena.ObservationType
        self._format_penalty = float(format_penalty)
        self._instruction = env_instruction
        self._split = split
        self._path: list[str] | None = None
        self._shown = ""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._start(f"textarena's {self._id}", seed, self._split, self._begin)
        rules, news = self._news()
        self._shown = news or "The game begins."
        if self._instruction is not None:
            rules = self._instruction
        return self._shown, {"env_instruction": rules}

    def _begin(self, seed: int) -> str:
        with self._alone(), _start_errors(self._id, self._kwargs):
            self._game.reset(num_players=1, seed=seed)
        self._path = [fingerprint(self._game.state.game_state)]
        return self._path[0]

    def step(self, action: str) -> Step:
        if self._path is None:
            raise EnvironmentFault("TextArenaEnv.step came before reset; call reset(seed=…) first")
        if not action:
            metrics = {"success": 0.0, "action_is_valid": 0.0, "format_penalty": self._format_penalty}
            return self._shown, self._format_penalty, False, False, {"metrics": metrics}
        move = action
        if self._wants_brackets and "[" not in action and "]" not in action:
            move = f"[{action}]"
        with self._alone():
            is_over, _ = self._game.step(move)
        self._path.append(action)
        state = self._game.state
        _, news = self._news()
        reward = 0.0
        is_valid = not state.error_count
        if is_over:
            ending = state.game_info[0]
            reason = ending.get("reason") or "The game is over."
            news = f"{news}\n{reason}".strip()
            reward = float(state.rewards[0])
            is_valid = not ending["invalid_move"]
        self._shown = news
        metrics = {
            "success": float(is_over and reward >= 1.0),
            "action_is_valid": float(is_valid),
            "format_penalty": 0.0,
        }
        return news, reward, bool(is_over), False, {"metrics": metrics}

    def state_key(self) -> str:
        """A hash of the start and all actions since, because games hide part of their state."""
        return fingerprint(self._path)

    def _news(self) -> tuple[str, str]:
        """The rules and the game's other messages since the last call, without the player's actions."""
        _, messages = self._game.get_observation()
        rules = [text for _, text, kind in messages if kind is self._kinds.PROMPT]
        repeated = (self._kinds.PROMPT, self._kinds.PLAYER_ACTION)
        news = [text for _, text, kind in messages if kind not in repeated]
        return "\n".join(rules).strip(), "\n".join(news).strip()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Surrounds a call of the game: Python's global random generator continues from the state that the
        last call left."""
        with alone():
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()


@contextmanager
def _start_errors(env_id: str, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Surrounds calls that start a game. An error means that the game doesn't take `kwargs`, and becomes
    EnvironmentFault."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise EnvironmentFault(
            f"textarena can't start {env_id} with kwargs {dict(kwargs)!r}: {error}"
        ) from error


def _check_game(env_id: str, registry: Mapping[str, Any]) -> None:
    game = env_id.partition("-v")[0]
    if env_id in registry and game in GAMES:
        return
    if game in REFUSED:
        reason = f"textarena's {game} can't be played: it {REFUSED[game]}"
    elif env_id in registry:
        reason = f"textarena's {env_id} has several players, and an agent plays alone"
    else:
        ids = [name for name in registry if name.partition("-v")[0] in GAMES]
        reason = f"textarena has no game {env_id!r}.{nearest(env_id, ids)}"
    if not reason.endswith("?"):
        reason += "."
    raise EnvironmentFault(f"{reason} Games that can be: {', '.join(GAMES)}, each with -v0")
