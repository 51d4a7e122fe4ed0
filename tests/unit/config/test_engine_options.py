"""Options of vLLM that contradict the model, or that the trainer can't follow, are refused at once."""

from __future__ import annotations

import json

import pytest
from small_configs import config_of

from turnwise.config.own_transfer import own_transfer
from turnwise.config.place import place
from turnwise.errors import ConfigError
from turnwise.runtime.machine import Machine, Node

SIZES = {
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def vllm(**options: object) -> dict[str, object]:
    return {"actor_infer.strategy_args": {"strategy_name": "vllm", "strategy_config": options}}


@pytest.mark.parametrize(("size", "fits"), [(1, True), (2, True), (3, False), (4, True), (8, False)])
def test_heads_are_divided_evenly(tmp_path, size, fits):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    devices = {"actor_infer.device_mapping": list(range(size))}
    keys = {"pretrain": str(tmp_path), "sequence_length": 64, **devices, **vllm(tp_size=size)}
    if fits:
        config_of(**keys)
        return
    with pytest.raises(ConfigError, match=rf"tp_size: {size} devices can't share 4 heads"):
        config_of(**keys)


def engine(name, backend, **options):
    options["weight_transfer_config"] = {"backend": backend}
    strategy = {"strategy_name": name, "strategy_config": options}
    return {"actor_infer.strategy_args": strategy, "cluster.name": "process"}


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("backend", ["gloo", "nccl", "ipc"])
def test_each_transfer_that_the_trainer_can_send_to_is_taken(name, backend):
    served = [1] if backend == "nccl" else [0]
    config = config_of(**engine(name, backend), **{"actor_infer.device_mapping": served})
    assert own_transfer(config.actor_infer) == backend


@pytest.mark.parametrize("transfer", [{"backend": "sharded_rdt"}, {}, "gloo", {"backend": "gloo", "more": 1}])
def test_other_transfers_are_refused(transfer):
    with pytest.raises(ConfigError, match=r"weight_transfer_config: .*backend: nccl.*backend: ipc"):
        config_of(**vllm(weight_transfer_config=transfer), **{"cluster.name": "process"})


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (engine("sglang", "gloo", pp_size=2) | {"actor_infer.device_mapping": [0, 1]}, "pipeline stages"),
        (engine("sglang", "ipc", url="http://there:1"), "not the server at http://there:1"),
    ],
)
def test_a_transfer_that_its_engine_does_not_take_is_refused(keys, says):
    with pytest.raises(ConfigError, match=rf"weight_transfer_config: .*{says}"):
        config_of(**keys)


GPUS = Machine((Node(4, "cuda"),))


@pytest.mark.parametrize(
    ("backend", "trained", "served", "machine", "says"),
    [
        ("gloo", [0], [1], Machine((Node(2),)), None),
        ("nccl", [0], [1], Machine((Node(2),)), "this run has none"),
        ("nccl", [0, 1], [2, 3], GPUS, None),
        ("nccl", [0, 1], [0, 1], GPUS, "shares device 0"),
        ("nccl", [0, 1], [1, 2], GPUS, None),
        ("ipc", [0, 1], [0, 1], GPUS, None),
        ("ipc", [0, 1], [1, 2], GPUS, "no rank of actor_train is on 2"),
        ("ipc", [0, 1], [0, 1], Machine((Node(2),)), None),
    ],
)
def test_a_transfer_fits_the_devices(backend, trained, served, machine, says):
    devices = {"actor_train.device_mapping": trained, "actor_infer.device_mapping": served}
    keys = engine("vllm", backend) | devices
    if says is None:
        place(config_of(**keys), machine)
        return
    with pytest.raises(ConfigError, match=rf"weight_transfer_config: .*{says}"):
        place(config_of(**keys), machine)


def test_a_running_server_gets_weights_over_a_group():
    url = {"url": "http://there:1"}
    place(config_of(**engine("sglang", "gloo", **url)), Machine((Node(2),)))
    place(config_of(**engine("sglang", "nccl", **url)), GPUS)
    with pytest.raises(ConfigError, match="remove mem_fraction_static"):
        config_of(**engine("sglang", "gloo", **url, mem_fraction_static=0.5))


def test_an_option_of_null_is_none():
    config = config_of(**vllm(weight_transfer_config=None))
    assert own_transfer(config.actor_infer) is None


def test_sglang_takes_copies_on_gpus_only():
    config = config_of(**engine("sglang", "ipc"))
    with pytest.raises(ConfigError, match="SGLang takes ipc on GPUs only"):
        place(config, Machine((Node(2),)))


def test_a_transfer_needs_a_trainer_in_its_own_process():
    with pytest.raises(ConfigError, match="a process of its own"):
        config_of(**{**engine("vllm", "gloo"), "cluster.name": "auto"})
