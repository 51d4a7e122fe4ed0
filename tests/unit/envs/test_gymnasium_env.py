"""Environments of gymnasium: actions as words, observations as text, and refusals."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from messages import says

from turnwise.envs.gymnasium.env import GymnasiumEnv
from turnwise.envs.hold_out import _say_that_all_are_played, fingerprint, in_split
from turnwise.errors import EnvironmentFault, NotAvailableError
from turnwise.types import Observation

DOOR_KEY = "minigrid:MiniGrid-DoorKey-5x5-v0"


def shortest_way(env: GymnasiumEnv) -> list[str]:
    """The fewest actions to success, by breadth-first search over copies of the environment, one per state
    key."""
    queue: deque[tuple[GymnasiumEnv, list[str]]] = deque([(env, [])])
    seen = {env.state_key()}
    while queue:
        before, way = queue.popleft()
        for word in env.actions:
            after = copy.deepcopy(before)
            _, _, terminated, truncated, info = after.step(word)
            if info["metrics"]["success"]:
                return [*way, word]
            if after.state_key() not in seen and not (terminated or truncated):
                seen.add(after.state_key())
                queue.append((after, [*way, word]))
    raise AssertionError("no way leads to success")


def taxi_way(env: GymnasiumEnv) -> Iterator[str]:
    """The fewest actions to success, by breadth-first search in gymnasium's table of transitions."""
    table = gymnasium.make("Taxi-v4").unwrapped.P
    state = int(str(env.state_key()))
    ways: dict[int, list[str]] = {state: []}
    queue = deque([state])
    while queue:
        at = queue.popleft()
        for number, word in enumerate(env.actions):
            [(_, following, reward, _)] = table[at][number]
            if reward == 20:
                yield from [*ways[at], word]
                return
            if following not in ways:
                ways[following] = [*ways[at], word]
                queue.append(following)


def test_taxi_is_told_in_words_and_won_on_the_shortest_way() -> None:
    taxi = GymnasiumEnv("Taxi-v4")
    text, info = taxi.reset(seed=1)
    assert text == "taxi 2,2 passenger B 4,3 destination R 0,0"
    assert "Actions: south, north, east, west, pickup, dropoff." in info["env_instruction"]
    steps = [taxi.step(word.upper()) for word in taxi_way(taxi)]
    assert sum("passenger in taxi" in str(step[0]) for step in steps) > 1
    assert [step[1] for step in steps] == [-1.0] * (len(steps) - 1) + [20.0]
    assert [step[4]["metrics"]["success"] for step in steps] == [0.0] * (len(steps) - 1) + [1.0]
    assert steps[-1][2:4] == (True, False)


def test_cliff_walking_succeeds_at_its_end_whatever_the_reward() -> None:
    walk = GymnasiumEnv("CliffWalking-v1")
    assert walk.reset(seed=0)[0] == "at 3,0"
    assert walk.step("right")[:3] == ("at 3,0", -100.0, False)
    steps = [walk.step(word) for word in ["up", *["right"] * 11, "down"]]
    assert steps[-1][0] == "at 3,11" and steps[-1][1] == -1.0
    assert (
        steps[-1][2]
        and steps[-1][4]["metrics"]["success"] == 1.0
        and steps[-2][4]["metrics"]["success"] == 0.0
    )


def test_minigrid_shows_the_same_room_whole_and_as_the_agent_sees_it() -> None:
    whole = GymnasiumEnv(DOOR_KEY, renderer="minigrid_full")
    seen = GymnasiumEnv(DOOR_KEY, kwargs={"agent_view_size": 3})
    assert whole.reset(seed=1)[0] == (
        "# # # # #\n# . # . #\n# v ly . #\n# ky # G #\n# # # # #\n"
        "facing south, carrying nothing. Mission: use the key to open the door and then get to the goal"
    )
    assert str(seen.reset(seed=1)[0]).startswith("# # #\n# ky #\nly ^ #\nfacing south, carrying nothing.")
    assert whole.state_key() == seen.state_key()
    for word, told in (
        ("pickup", "carrying yellow key"),
        ("left", "facing east"),
        ("toggle", "od"),
        ("forward", "> ."),
    ):
        observation = str(whole.step(word)[0])
        seen.step(word)
        assert (told.replace("od", "oy")) in observation
        assert whole.state_key() == seen.state_key()


def test_minigrid_is_won_by_a_search_over_its_state_keys() -> None:
    env = GymnasiumEnv(DOOR_KEY, action_names=["left", "right", "forward", "pickup", "toggle"], split="val")
    env.reset(seed=3)
    way = shortest_way(env)
    assert {"pickup", "toggle", "forward"} <= set(way)
    last = [env.step(word) for word in way][-1]
    assert last[1] > 0.9 and last[2] and last[4]["metrics"]["success"] == 1.0


def test_turning_round_is_the_same_state_again() -> None:
    env = GymnasiumEnv(DOOR_KEY)
    env.reset(seed=2)
    keys = [env.state_key(), *(env.step(word) and env.state_key() for word in ["left"] * 4)]
    assert keys[0] == keys[4] and len(set(keys)) == 4


def test_an_action_that_is_none_of_the_words_moves_nothing() -> None:
    taxi = GymnasiumEnv(
        "Taxi-v4", format_penalty=-0.5, env_instruction="Drive.", kwargs={"max_episode_steps": 2}
    )
    text, info = taxi.reset(seed=1)
    assert info["env_instruction"] == "Drive."
    for wrong in ("", "fly", "0"):
        observation, reward, terminated, truncated, told = taxi.step(wrong)
        assert (observation, reward, terminated, truncated) == (text, -0.5, False, False)
        assert told["metrics"] == {"success": 0.0, "action_is_valid": 0.0, "format_penalty": -0.5}
    assert taxi.step("north")[3] is False
    assert taxi.step("north")[2:4] == (False, True), (
        "the time limit cuts from outside, and counts what reached the environment"
    )


def test_training_and_validation_start_in_different_states() -> None:
    starts = {}
    for split in ("train", "val"):
        taxi = GymnasiumEnv("Taxi-v4", split=split)
        starts[split] = {taxi.reset(seed=seed) and taxi.state_key() for seed in range(300)}
        assert all(in_split(int(fingerprint(str(key)), 16), split) for key in starts[split])
    assert len(starts["train"]) > 100 and len(starts["val"]) > 50 and not starts["train"] & starts["val"]


@pytest.mark.parametrize("name", ["CliffWalking-v1", "minigrid:MiniGrid-Empty-5x5-v0"])
def test_an_environment_with_one_start_plays_it_in_both_splits_and_says_so(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    _say_that_all_are_played.cache_clear()
    walks = [GymnasiumEnv(name, split=split) for split in ("train", "val")]
    assert len({walk.reset(seed=seed)[0] for walk in walks for seed in range(3)}) == 1
    assert sum(walk.plays_all for walk in walks) == 1
    [said] = caplog.messages
    assert f"{name} has too few tasks to hold any out" in said


def test_pictures_are_for_people_or_for_the_model() -> None:
    observation, _ = GymnasiumEnv("Taxi-v4", render_mode="rgb_array").reset(seed=1)
    assert isinstance(observation, Observation) and observation.text == "The picture shows the environment."
    assert observation.media[0].data.dtype == np.uint8 and observation.media[0].data.shape[2] == 3
    both = GymnasiumEnv(DOOR_KEY, render_mode="rgb_array", renderer="minigrid").reset(seed=1)[0]
    assert isinstance(both, Observation) and both.text.startswith("?") and both.media
    picture = GymnasiumEnv(DOOR_KEY)
    picture.reset(seed=1)
    assert picture.render() is not None
    drawn = GymnasiumEnv("CliffWalking-v1", renderer="ansi")
    assert str(drawn.reset(seed=0)[0]).splitlines()[-1].split() == ["x", *"CCCCCCCCCC", "T"]
    assert drawn.render() is None


class SpacesEnv(gymnasium.Env[Any, Any]):
    """Observes an element of every space that has a text."""

    observation_space = spaces.Dict(
        {
            "at": spaces.Box(-1, 1, (2, 2)),
            "bits": spaces.MultiBinary(3),
            "pair": spaces.Tuple((spaces.Discrete(5), spaces.Text(9))),
        }
    )
    action_space = spaces.Discrete(2, start=5)

    def __init__(
        self,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
    ) -> None:
        self.observation_space = observation_space or self.observation_space
        self.action_space = action_space or self.action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        at = np.array([[0.123456, 1], [-1, 0]], np.float32)
        return {"at": at, "bits": np.array([1, 0, 1]), "pair": (np.int64(3), "so {it} is")}, {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        is_won = np.bool_(action == 6)
        return self.reset()[0], np.float32(0), is_won, False, {"is_won": is_won}


class SpeedEnv(SpacesEnv):
    """Its attribute `s` isn't its state, unlike that of toy environments."""

    s = 7


@pytest.fixture
def register() -> Iterator[None]:
    gymnasium.register("SpacesTest-v0", entry_point=SpacesEnv)
    gymnasium.register("SpeedTest-v0", entry_point=SpeedEnv)
    yield
    del gymnasium.registry["SpacesTest-v0"], gymnasium.registry["SpeedTest-v0"]


@pytest.mark.usefixtures("register")
def test_an_unknown_environment_is_told_by_its_spaces() -> None:
    env = GymnasiumEnv("SpacesTest-v0", success="info:is_won")
    text, info = env.reset(seed=0)
    assert text == "at: 0.1235 1\n-1 0\nbits: 1 0 1\npair: 3, so {it} is"
    assert info["env_instruction"] == "Actions: 5, 6."
    assert env.render() is None
    assert env.step("5")[4]["metrics"]["success"] == 0.0
    won = env.step("6")
    assert won[2] is True and type(won[1]) is float and won[4]["metrics"]["success"] == 1.0
    named = GymnasiumEnv(
        "SpacesTest-v0", action_names=["stay", "win"], renderer=f"{__name__}:shout", max_observation_chars=8
    )
    assert named.reset(seed=0)[0] == "SO {IT} … (cut at 8 characters)"
    assert named.actions == ("stay", "win") and named.step("Win")[2]


@pytest.mark.usefixtures("register")
def test_a_key_of_info_that_never_comes_is_no_failure_of_the_player() -> None:
    env = GymnasiumEnv("SpacesTest-v0", success="info:is_wn")
    env.reset(seed=0)
    env.step("5")
    with pytest.raises(EnvironmentFault, match=says("success", "is_wn", "'is_won'")):
        env.step("6")
    cut = GymnasiumEnv("SpacesTest-v0", success="info:is_wn", kwargs={"max_episode_steps": 1})
    cut.reset(seed=0)
    with pytest.raises(EnvironmentFault, match="no such key"):
        cut.step("5")


@pytest.mark.usefixtures("register")
def test_a_number_that_happens_to_be_named_s_is_no_state() -> None:
    env = GymnasiumEnv("SpeedTest-v0")
    env.reset(seed=0)
    assert env.state_key() == fingerprint(SpeedEnv().reset()[0])
    taxi = GymnasiumEnv("Taxi-v4")
    taxi.reset(seed=1)
    assert taxi.state_key() == 252


def test_rooms_that_are_rejected_are_not_told_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    baby = GymnasiumEnv("minigrid:BabyAI-PickupLoc-v0")
    for seed in (4, 15):
        baby.reset(seed=seed)
    assert capsys.readouterr() == ("", "")


def shout(observation: Mapping[str, Any], env: Any) -> str:
    return str(observation["pair"][1]).upper()


@pytest.mark.usefixtures("register")
@pytest.mark.parametrize(
    ("spaces_of", "message"),
    [
        ({"action_space": spaces.MultiDiscrete([2, 2])}, says("MultiDiscrete", "Discrete")),
        ({"action_space": spaces.Discrete(10_000)}, says("Discrete(10000)", "256")),
        (
            {"observation_space": spaces.Box(0, 255, (84, 84, 3), np.uint8)},
            r"has Box\(0, 255, \(84, 84, 3\), uint8\).*renderer",
        ),
        (
            {"observation_space": spaces.Tuple([spaces.Sequence(spaces.Discrete(2))])},
            r"has Sequence.*module:function",
        ),
    ],
)
def test_spaces_without_words_are_refused(spaces_of: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        GymnasiumEnv("SpacesTest-v0", kwargs=spaces_of)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": "Taxi-v3"}, says("'Taxi-v3'", "'Taxi-v4'")),
        ({"id": "taxi"}, says("package:id", "minigrid:")),
        ({"id": "Pendulum-v1"}, says("action space", "Box(-2.0, 2.0, (1,), float32)")),
        ({"kwargs": {"is_rany": True}}, "Taxi-v4 with kwargs.*is_rany"),
        ({"kwargs": {"render_mode": "human"}}, says("render_mode", "env_config")),
        (
            {"action_names": ["south", "nort"]},
            says("action_names", "'nort'", "'north'"),
        ),
        ({"action_names": {9: "jump"}}, says("action_names", "9", "0 to 5")),
        ({"action_names": ["a", "b"]}, says("6 actions", "0 to 5")),
        ({"action_names": {0: "go", 1: "Go "}}, "its own word"),
        ({"action_names": ["north", "north"]}, "its own word"),
        ({"action_names": []}, "has 6 actions"),
        ({"action_names": "norths"}, says("action_names", "norths", "mapping")),
        ({"action_names": 6}, says("action_names", "6", "mapping")),
        ({"id": 5}, says("gymnasium", "id", "5")),
        ({"kwargs": 5}, says("gymnasium", "kwargs", "5")),
        ({"max_observation_chars": 0}, says("max_observation_chars", "0", "at least 1")),
        ({"success": "info:"}, says("success", "'info:'", "'reward'")),
        ({"format_penalty": float("nan")}, says("format_penalty", "nan")),
        ({"format_penalty": "-1"}, says("format_penalty", "'-1'")),
        (
            {"renderer": "minigrid"},
            says("renderer", "'minigrid'", "space, ansi, taxi"),
        ),
        ({"renderer": "taxy"}, says("renderer", "'taxy'", "'taxi'")),
        ({"renderer": "json:no_such"}, says("'no_such'", "json")),
        (
            {"renderer": "ansi", "render_mode": "rgb_array"},
            says("ansi", "renderer", "rgb_array", "render_mode"),
        ),
        (
            {"id": "CartPole-v1", "renderer": "ansi"},
            says("rgb_array", "human", "CartPole-v1"),
        ),
        ({"success": "won"}, says("success", "'won'", "'reward'")),
        ({"render_mode": "picture"}, "render_mode 'picture'"),
    ],
)
def test_what_a_config_gets_wrong_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        GymnasiumEnv(**{"id": "Taxi-v4", **arguments})


def test_action_names_may_rename_choose_and_reorder() -> None:
    def names(given: Any) -> tuple[str, ...]:
        return GymnasiumEnv("CliffWalking-v1", action_names=given).actions

    assert names(["left", "Right"]) == ("left", "Right")
    assert names(["hinauf", "rechts", "hinunter", "links"]) == ("hinauf", "rechts", "hinunter", "links")
    env = GymnasiumEnv("CliffWalking-v1", action_names={"3": "west", 0: "north"})
    env.reset(seed=0)
    assert (
        env.actions == ("west", "north")
        and env.step("north")[0] == "at 2,0"
        and env.step("up")[0] == "at 2,0"
    )


def test_missing_packages_name_what_brings_them() -> None:
    with pytest.raises(NotAvailableError, match=says("package", "'no_such_package'")):
        GymnasiumEnv("no_such_package:Env-v0")
    with pytest.raises(NotAvailableError, match=says("LunarLander-v3", "package")):
        GymnasiumEnv("LunarLander-v3")


def test_pictures_without_the_package_that_draws_are_refused_before_an_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)
    for env_id in ("Taxi-v4", "CartPole-v1"):
        with pytest.raises(NotAvailableError, match=says("pygame", "pip install -e '.[gym]'")):
            GymnasiumEnv(env_id, render_mode="rgb_array")
    assert GymnasiumEnv(DOOR_KEY, render_mode="rgb_array").reset(seed=1)
    taxi = GymnasiumEnv("Taxi-v4")
    taxi.reset(seed=1)
    assert taxi.render() is None, "people do without"
