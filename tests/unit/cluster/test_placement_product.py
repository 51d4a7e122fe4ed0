"""`config` and `train` agree on every placement: over cluster names, strategies, devices, servers, asynchrony
and machines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from small_configs import SFT, config_of, values_of

from turnwise.assemble.prepare import lacking_devices
from turnwise.config import AgenticConfig, SFTConfig, parse_config, require, unavailable
from turnwise.config.demand import contradictions
from turnwise.config.place import place, smallest_machine
from turnwise.errors import ConfigError, NotAvailableError
from turnwise.runtime.machine import Machine, Node

CLUSTERS = ("auto", "local", "process", "launched")
STRATEGIES = (
    ("torch_train", "torch_train"),
    ("deepspeed_train", "torch_train"),
    ("torch_train", "deepspeed_train"),
    ("deepspeed_train", "deepspeed_train"),
)
"""The strategies of the policy and of the critic."""
TRAINED_ON = (None, [0], [0, 1], [2, 3])
CRITIC_ON = (None, [1], [0, 1])
SERVED_ON = (None, [1], [0, 1])
RATIOS = (0, 1)
MACHINES = tuple(
    Machine((Node(num_devices, accelerator),), num_launched)
    for num_devices, accelerator, num_launched in product((1, 2, 4), ("", "cuda"), (1, 2, 3))
)


@dataclass(frozen=True)
class Case:
    """One config of the product."""

    cluster: str
    strategies: tuple[str, str]
    trained_on: list[int] | None
    critic_on: list[int] | None
    served_on: list[int] | None
    ratio: int

    @property
    def keys(self) -> dict[str, Any]:
        return {
            "adv_estimator": "gae",
            "cluster.name": self.cluster,
            "actor_train.strategy_args.strategy_name": self.strategies[0],
            "critic.strategy_args.strategy_name": self.strategies[1],
            "actor_train.device_mapping": self.trained_on,
            "critic.device_mapping": self.critic_on,
            "actor_infer.device_mapping": self.served_on,
            "async_generation_ratio": self.ratio,
        }

    @property
    def has_replicas(self) -> bool:
        return len(self.served_on or ()) > 1

    def devices(self, num_launched: int) -> tuple[set[int], set[int]]:
        """The devices of the policy, and those of the critic."""
        policy = set(self.trained_on or range(num_launched))
        return policy, set(self.critic_on or policy)

    def obstacle(self, machine: Machine) -> str:
        """A word of the reason why the config can't run on the machine; empty if it can."""
        num_launched = machine.num_launched
        policy, critic = self.devices(num_launched)
        devices = policy | critic
        is_apart = self.ratio > 0 or self.strategies[0] == "deepspeed_train" or len(devices) > 1
        fitting = "launched" if num_launched > 1 else "process" if is_apart else "local"
        if max(devices) >= machine.num_devices:
            return "this machine has"
        if self.cluster not in ("auto", fitting) and (self.cluster, fitting) != ("process", "local"):
            return "cluster.name: "
        if fitting == "launched" and len(devices) != num_launched:
            return "one process for each device"
        if fitting == "launched" and self.ratio:
            return "async_generation_ratio"
        if fitting == "launched" and self.has_replicas:
            return "actor_infer.device_mapping"
        are_sharded = self.strategies == ("deepspeed_train", "deepspeed_train")
        if are_sharded and policy & critic and policy != critic:
            return "deepspeed_train shards over one set of devices"
        is_placed = self.has_replicas or is_apart or fitting == "launched" or self.cluster == "process"
        if self.served_on and is_placed and max(self.served_on) >= machine.num_devices:
            return "actor_infer.device_mapping names device"
        return ""


def cases() -> Iterator[Case]:
    parts = (CLUSTERS, STRATEGIES, TRAINED_ON, CRITIC_ON, SERVED_ON, RATIOS)
    return (Case(*values) for values in product(*parts))


LARGE = [Machine((Node(8, "cuda"),), num_launched) for num_launched in range(1, 5)]
"""Every config of the product that isn't wrong runs on one of them."""


def refusal(config: AgenticConfig | SFTConfig, machine: Machine) -> str:
    """With what sentence `train` refuses to place a config; empty if it doesn't."""
    try:
        place(config, machine)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_config_and_train_refuse_the_same_with_the_same_sentence(cluster: str) -> None:
    counts = {"wrong": 0, "lacking": 0, "placed": 0}
    for case in (case for case in cases() if case.cluster == cluster):
        obstacles = [case.obstacle(machine) for machine in LARGE]
        if all(obstacles):
            counts["wrong"] += 1
            assert_wrong(case)
            continue
        config = AgenticConfig.model_validate(values_of(**case.keys))
        assert not any(contradictions(config))
        assert place(config, smallest_machine(config)).table(), "what `config` prints"
        for machine in MACHINES:
            sentence = refusal(config, machine)
            assert list(lacking_devices(config, machine)) == ([sentence] if sentence else [])
            word = case.obstacle(machine)
            assert bool(sentence) == bool(word) and word in sentence, (case, machine)
            counts["lacking" if sentence else "placed"] += 1
    assert all(counts.values()), counts


def assert_wrong(case: Case) -> None:
    """The reading of the config, which `config` and `train` share, refuses it; so does `place`, on every
    machine."""
    with pytest.raises(ConfigError) as caught:
        config_of(**case.keys)
    (line,) = set(str(caught.value).splitlines()[1:2])
    config = AgenticConfig.model_validate(values_of(**case.keys))
    (sentence,) = {refusal(config, machine) for machine in LARGE}
    assert line.strip() == sentence, case
    assert cause(case) in sentence, case


def cause(case: Case) -> str:
    """A word that the refusal of a wrong config has to say."""
    policy, critic = case.devices(1)
    if case.cluster in ("local", "launched") and case.ratio:
        return "async_generation_ratio"
    if case.cluster == "local" and case.strategies[0] == "deepspeed_train":
        return "deepspeed_train"
    if case.cluster == "local" and len(policy | critic) > 1:
        return "devices"
    if case.cluster == "launched" and case.trained_on and len(policy | critic) == 1:
        return "1 device"
    if case.cluster == "launched" and case.has_replicas:
        return "servers"
    return "deepspeed_train shards over one set of devices"


@pytest.mark.parametrize("strategy", ["torch_train", "deepspeed_train"])
def test_fine_tuning_is_refused_alike(strategy: str) -> None:
    for cluster, devices in product(CLUSTERS, TRAINED_ON):
        values = SFT | {
            "cluster": {"name": cluster},
            "strategy_args": {"strategy_name": strategy},
            "device_mapping": devices,
        }
        num_devices = len(devices or ())
        is_wrong = (cluster == "local" and num_devices > 1) or (cluster == "launched" and num_devices == 1)
        if is_wrong:
            with pytest.raises(
                ConfigError,
                match=f"cluster.name: {cluster} can't hold this run: the roles have {num_devices} ",
            ):
                parse_config(values, SFTConfig)
            continue
        config, _ = parse_config(values, SFTConfig)
        assert place(config, smallest_machine(config)).of("sft").size == max(
            num_devices, 1 + (cluster == "launched")
        )
        for machine in MACHINES:
            sentence = refusal(config, machine)
            assert list(lacking_devices(config, machine)) == ([sentence] if sentence else [])
            assert sentence or machine.num_devices > max(devices or [machine.num_launched - 1])


def test_a_missing_engine_is_said_in_the_words_that_refuse_it() -> None:
    config = config_of(
        **{"actor_infer.strategy_args.strategy_name": "vllm", "actor_train.device_mapping": [0, 1]}
    )
    lines = unavailable(config)
    assert any("vllm" in line for line in lines)
    with pytest.raises(NotAvailableError, match=re.escape(lines[0])):
        require(lines)
