"""The class of an `env_type`, built in or a user's own, and its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from messages import says
from toy_envs import BanditEnv

from turnwise.envs import registry
from turnwise.envs.frozen_lake.env import FrozenLakeEnv
from turnwise.envs.frozen_lake.map import map_hash
from turnwise.envs.hold_out import in_split
from turnwise.errors import EnvironmentFault

TOYS = "toy_envs"


def test_a_built_in_name_and_module_class_give_the_class() -> None:
    assert registry.env_class("frozen_lake") is FrozenLakeEnv
    assert registry.env_class(f"{TOYS}:BanditEnv") is BanditEnv


def test_a_name_can_be_registered_again_with_the_same_class_only() -> None:
    registry.register("registry_test_toy", f"{TOYS}:BanditEnv")
    registry.register("registry_test_toy", f"{TOYS}:BanditEnv")
    assert registry.env_class("registry_test_toy") is BanditEnv
    for name in ("registry_test_toy", "frozen_lake"):
        with pytest.raises(EnvironmentFault, match="already"):
            registry.register(name, f"{TOYS}:IdentityEnv")


def test_a_registered_name_is_imported_only_when_used() -> None:
    registry.register("registry_test_lazy", "no_such_module_anywhere:Env")
    with pytest.raises(EnvironmentFault, match=r"no module 'no_such_module_anywhere'.*PYTHONPATH=\."):
        registry.env_class("registry_test_lazy")


@pytest.mark.parametrize(
    ("env_type", "message"),
    [
        ("FrozenLake", says("'frozen_lake'", "FrozenLake")),
        ("frozenlake", says("'frozen_lake'", "frozenlake")),
        (f"{TOYS}:Bandit", says("'BanditEnv'", "toy_envs:Bandit")),
        (f"{TOYS}:", "module:Class"),
        ("turnwise.testing.no_toys:Bandit", "no module 'turnwise.testing.no_toys'"),
    ],
)
def test_unknown_names_get_a_hint(env_type: str, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        registry.env_class(env_type)


def test_the_split_is_passed_where_it_is_taken_and_the_config_may_override_it() -> None:
    assert registry.takes_split("frozen_lake") and not registry.takes_split(f"{TOYS}:BanditEnv")
    for split in ("train", "val"):
        env = registry.make_env("frozen_lake", {"size": 5}, split)
        env.reset(seed=11)
        assert isinstance(env, FrozenLakeEnv) and len(env.rows) == 5 and in_split(map_hash(env.rows), split)
    assert isinstance(registry.make_env(f"{TOYS}:BanditEnv", {"best": "c"}, "val"), BanditEnv)
    free = registry.make_env("frozen_lake", {"split": None}, "val")
    assert isinstance(free, FrozenLakeEnv)
    maps = [free.reset(seed=seed) and free.rows for seed in range(20)]
    assert {in_split(map_hash(rows), "val") for rows in maps} == {True, False}


def test_a_wrong_argument_names_the_allowed_ones() -> None:
    with pytest.raises(EnvironmentFault, match=says("is_slipery", "'is_slippery'")):
        registry.make_env("frozen_lake", {"is_slipery": False}, "train")


class SmallLakeEnv(FrozenLakeEnv):
    """Passes unknown arguments on to its base class."""

    def __init__(self, note: str = "", **options: Any) -> None:
        super().__init__(size=3, **options)
        self.note = note


class StillSmallerLakeEnv(SmallLakeEnv):
    def __init__(self, *, p: float = 1.0, **options: Any) -> None:
        super().__init__(p=p, **options)


class PlainLakeEnv(FrozenLakeEnv):
    def __init__(self, size: int = 3) -> None:
        super().__init__(size=size)


class AnythingEnv(BanditEnv):
    """Takes any arguments, and passes none on."""

    def __init__(self, **options: Any) -> None:
        self.options = options


@pytest.mark.parametrize("name", ["SmallLakeEnv", "StillSmallerLakeEnv"])
def test_the_split_reaches_a_class_above_through_starred_options(name: str) -> None:
    registry.register(f"registry_test_{name}", f"{__name__}:{name}")
    assert registry.takes_split(f"registry_test_{name}")
    for split in ("train", "val"):
        env = registry.make_env(f"registry_test_{name}", {"note": "n", "p": 0.9}, split)
        env.reset(seed=11)
        assert isinstance(env, SmallLakeEnv) and env.note == "n" and in_split(map_hash(env.rows), split)


def test_a_class_that_names_its_arguments_passes_no_others_on() -> None:
    registry.register("registry_test_plain", f"{__name__}:PlainLakeEnv")
    assert not registry.takes_split("registry_test_plain")
    assert isinstance(registry.make_env("registry_test_plain", {"size": 5}, "val"), FrozenLakeEnv)
    with pytest.raises(EnvironmentFault, match=says("siz", "PlainLakeEnv", "'size'")):
        registry.make_env("registry_test_plain", {"siz": 5}, "val")


def test_options_that_nobody_above_takes_are_left_alone() -> None:
    registry.register("registry_test_anything", f"{__name__}:AnythingEnv")
    assert registry.takes_split("registry_test_anything") is False
    env = registry.make_env("registry_test_anything", {"colour": "red"}, "train")
    assert isinstance(env, AnythingEnv) and env.options == {"colour": "red"}


def test_a_module_that_fails_when_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking_env.py").write_text("import something_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        EnvironmentFault, match=r"importing lacking_env failed.*something_that_is_not_installed.*line 1"
    ):
        registry.env_class("lacking_env:Env")
