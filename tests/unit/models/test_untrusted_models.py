"""Folders of strangers: nothing in them runs, and whatever is in them ends in one sentence."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_model import toy_model

from turnwise.config import parse_config
from turnwise.errors import ConfigError, ModelError, TurnwiseError
from turnwise.models.load import load_model, load_tokenizer
from turnwise.training.torch_strategy import TorchStrategy

LAKE = {"Lake": {"env_type": "frozen_lake"}}
ROLLOUT = """
pretrain: model
sequence_length: 500
rollout_batch_size: 2
custom_envs:
  Lake:
    {env_type: frozen_lake, max_steps: 1, max_tokens_per_step: 2, agent_system_template: "",
     agent_template: "{observation}"}
train_env_manager: {num_env_groups: 1, group_size: 2}
"""


class Evil:
    """A pickle that leaves a mark when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.marker), "w"))


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def with_own_code(folder: Path, marker: Path) -> None:
    """Config, model and tokenizer by Python files of the folder, which leave a mark."""
    (folder / "own.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM\n"
        "class OwnConfig(Qwen3Config):\n    model_type = 'own'\n"
        "class OwnModel(Qwen3ForCausalLM):\n    config_class = OwnConfig\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit(folder / "config.json", model_type="own", auto_map=classes)
    tokenizer = {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}, "tokenizer_class": "OwnTokenizer"}
    edit(folder / "tokenizer_config.json", **tokenizer)


def turnwise(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, with a `y` for whoever asks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(place / "cache")}
    return forked.run(words, input="y\n" * 5, env=environment, cwd=place)


def test_code_of_a_folder_runs_only_where_a_setting_says_so(
    folder: Path, marker: Path, tmp_path: Path
) -> None:
    with_own_code(folder, marker)
    (tmp_path / "lake.yaml").write_text(ROLLOUT)
    words = ("rollout", "lake.yaml", "--out", "out.jsonl")
    refused = turnwise(tmp_path, *words)
    assert not marker.exists() and refused.returncode == 2
    assert "model_args.trust_remote_code: true" in refused.stderr and "Traceback" not in refused.stderr
    trusted = turnwise(tmp_path, *words, "actor_train.model_args.trust_remote_code=true")
    assert marker.exists() and trusted.returncode == 0, trusted.stderr
    assert (
        "its own Python code runs here (trust_remote_code: true): own.py" in trusted.stdout + trusted.stderr
    )

    train = ("train", "lake.yaml", "actor_train.model_args.trust_remote_code=true")
    begun = turnwise(tmp_path, *train, "max_steps=1")
    assert begun.returncode == 0, begun.stderr
    went_on = turnwise(tmp_path, *train, "max_steps=2", "resume_from_checkpoint=true")
    assert went_on.returncode == 0 and "step 2/2" in went_on.stdout, went_on.stderr


def test_pickled_weights_are_read_where_a_setting_says_so_and_never_run(
    folder: Path, marker: Path, tmp_path: Path
) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin is a pickle.*allow_pickle: true"):
        load_model(folder)
    values: dict[str, Any] = {"pretrain": str(folder), "custom_envs": LAKE}
    with pytest.raises(ConfigError, match=r"pretrain: .*allow_pickle: true"):
        parse_config(values)
    trust = parse_config(values | {"actor_train": {"model_args": {"allow_pickle": True}}})[
        0
    ].actor_train.model_args.trust
    loaded = load_model(folder, trust=trust).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())

    torch.save({**weights, "evil": Evil(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(
        ModelError, match="their pickle asks for other objects or code, which is never run"
    ) as raised:
        load_model(folder, trust=trust)
    assert not marker.exists() and "weights_only" not in str(raised.value)


def test_training_states_and_adapters_are_never_run(marker: Path, tmp_path: Path, folder: Path) -> None:
    strategy = TorchStrategy(toy_model())
    strategy.save(tmp_path / "state")
    torch.save(Evil(marker), tmp_path / "state" / "trainer_state.pt")
    with pytest.raises(
        ModelError, match=r"trainer_state.pt isn't a training state that turnwise wrote"
    ) as raised:
        strategy.load(tmp_path / "state")
    assert "weights_only" not in str(raised.value)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(folder)})
    )
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(ModelError, match=r"adapter_model.bin is a pickle, which isn't read"):
        load_model(adapter)
    assert not marker.exists()


def test_an_adapter_that_is_its_own_base(folder: Path, tmp_path: Path) -> None:
    for name, base in (("a", "b"), ("b", "a"), ("self", "self")):
        (tmp_path / name).mkdir()
        named = json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / base)})
        (tmp_path / name / "adapter_config.json").write_text(named)
        (tmp_path / name / "adapter_model.safetensors").write_bytes(b"")
    for name in ("a", "self"):
        for load in (load_model, load_tokenizer):
            with pytest.raises(ModelError, match=r"leads back to .*base_model_name_or_path"):
                load(tmp_path / name)
        with pytest.raises(ConfigError, match=r"pretrain: .*leads back to"):
            parse_config({"pretrain": str(tmp_path / name), "custom_envs": LAKE})


def config_of(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **changes)


def cut(name: str, num_bytes: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:num_bytes]) and None


def text(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def indexed(file: str) -> Callable[[Path], None]:
    """Weights in parts, the only one of which is `file`."""

    def move(folder: Path) -> None:
        weights = folder / "model.safetensors"
        index = {"weight_map": dict.fromkeys(load_file(weights), file)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder.parent / "other").mkdir()
        weights.rename(folder.parent / "other" / weights.name)

    return move


def typed(dtype: torch.dtype) -> Callable[[Path], None]:
    """One matrix of another type."""

    def convert(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].to(dtype)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return convert


def piped(name: str) -> Callable[[Path], None]:
    """A pipe in the place of a file: whoever opens it waits."""

    def put(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return put


KNOWN_TO_CONFIG = [
    (config_of(num_hidden_layers=-1), r"config.json: num_hidden_layers is -1"),
    (
        config_of(num_hidden_layers=99),
        r"config.json: num_hidden_layers is 99, and the weights beside it have 2",
    ),
    (config_of(num_hidden_layers=10**9), r"config.json: num_hidden_layers is 1000000000"),
    (config_of(num_attention_heads=0), r"config.json: num_attention_heads is 0"),
    (config_of(num_attention_heads=3, num_key_value_heads=2), r"can't share 2 key-value heads"),
    (config_of(hidden_size="32"), r"config.json: hidden_size is '32'"),
    (
        config_of(hidden_size=64),
        r"config.json: hidden_size is 64, and model.embed_tokens.weight beside it is .*set it to 32",
    ),
    (config_of(vocab_size=300), r"config.json: vocab_size is 300"),
    (cut("model.safetensors", 1000), r"model.safetensors is cut"),
    (cut("model.safetensors", -1), r"model.safetensors is cut"),
    (text("config.json", b"\xff\xfe{"), r"config.json isn't UTF-8 text"),
    (text("config.json", b"\0"), r"config.json isn't readable JSON.*line 1"),
    (text("config.json", b"[" * 10**5), r"config.json isn't readable JSON"),
    (text("config.json", b"[]"), r"config.json holds a list"),
    (text("tokenizer.json", b"{"), r"tokenizer.json isn't readable JSON"),
    (text("tokenizer_config.json", b"\xff"), r"tokenizer_config.json isn't UTF-8"),
    (piped("config.json"), r"config.json (is a folder, pipe or device|isn't a file)|has no config.json"),
    (lambda folder: (folder / "config.json").unlink(), r"has no config.json"),
    (config_of(eos_token_id=9999), r"config.json: eos_token_id is 9999; .*vocab_size"),
    (config_of(eos_token_id=[0, "1"]), r"config.json: eos_token_id is \[0, '1'\]"),
    (
        text("generation_config.json", b'{"eos_token_id": [0, 9999]}'),
        r"generation_config.json: eos_token_id is \[0, 9999\]",
    ),
    (config_of(rope_parameters={}), r"config.json: rope_parameters is \{\} and names no rope_theta"),
    (config_of(rope_parameters={"rope_type": "default"}), r"rope_parameters is .* names no rope_theta"),
    (config_of(rope_parameters="x"), r"config.json: rope_parameters is 'x'"),
    (
        text("tokenizer_config.json", b'{"model_max_length": "x"}'),
        r"tokenizer_config.json: model_max_length is 'x'",
    ),
    (indexed("../other/model.safetensors"), r"index.json names '../other/model.safetensors', .*outside"),
    (indexed("/model.safetensors"), r"index.json names '/model.safetensors', .*outside"),
    (typed(torch.int32), r"up_proj.weight \(I32\).*real numbers"),
    (typed(torch.bool), r"up_proj.weight \(BOOL\)"),
    (typed(torch.complex64), r"up_proj.weight \(C64\)"),
]


@pytest.mark.parametrize(
    ("break_it", "expected"), KNOWN_TO_CONFIG, ids=[expected for _, expected in KNOWN_TO_CONFIG]
)
def test_config_knows_without_loading(break_it: Callable[[Path], None], expected: str, folder: Path) -> None:
    break_it(folder)
    with pytest.raises(ConfigError, match=f"pretrain: .*{expected}"):
        parse_config({"pretrain": str(folder), "custom_envs": LAKE})
    for load in (load_model, load_tokenizer):
        with pytest.raises(ModelError, match=expected):
            load(folder)


def test_shapes_that_only_loading_finds(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 5)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"mlp.up_proj.weight is 3 × 5 in the weights and 64 × 32 by config.json"
    ) as raised:
        load_model(folder)
    assert "ignore_mismatched_sizes" not in str(raised.value)


def test_a_path_that_is_no_model_folder(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints/checkpoint-7").mkdir(parents=True)
    (tmp_path / "run/checkpoints/checkpoint-7/config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ConfigError, match=r"model.safetensors is a file; name the folder that it is in"):
        parse_config({"pretrain": str(tmp_path / "model.safetensors"), "custom_envs": LAKE})
    with pytest.raises(ConfigError, match=r"name one of its checkpoints, such as .*checkpoints/checkpoint-7"):
        parse_config({"pretrain": str(tmp_path / "run"), "custom_envs": LAKE})


def test_an_empty_name() -> None:
    for name in ("", " ", "a\0b"):
        with pytest.raises(ConfigError, match="pretrain"):
            parse_config({"pretrain": name, "custom_envs": LAKE})


def test_a_vocabulary_smaller_than_the_tokenizer_and_a_much_larger_one(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wide = tmp_path / "wide"
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    toy_model(vocab_size=3 * rows).save_pretrained(wide)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, wide)
    load_tokenizer(wide)
    assert f"of {3 * rows} ids of its vocabulary have no token" in caplog.text

    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    last = tokenizer["model"]["vocab"]["more"] = rows + 100
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    expected = rf"vocab_size of config.json is {rows}, and its tokenizer has ids up to {last}"
    with pytest.raises(ConfigError, match=expected):
        parse_config({"pretrain": str(folder), "custom_envs": LAKE})
    with pytest.raises(ModelError, match=expected):
        load_tokenizer(folder)


STRANGE: tuple[Any, ...] = (
    None,
    -1,
    0,
    10**12,
    1.5,
    "x",
    "\ud800",
    True,
    [],
    [1],
    {},
    {"a": 1},
    "../../etc/passwd",
)
MUTANTS: list[tuple[str, tuple[str, ...], Any]] = [
    ("config.json", ("head_dim",), "x"),
    ("config.json", ("max_position_embeddings",), []),
    ("tokenizer.json", ("model", "continuing_subword_prefix"), "../../etc/passwd"),
]
"""Values that once ended in another exception."""


def mutants(model: Path) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Every value of the small files, replaced by strange ones in turn."""
    yield from MUTANTS
    for name in ("config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"):
        content = json.loads((model / name).read_text())
        paths: list[tuple[str, ...]] = [(key,) for key in content]
        paths += [("model", key) for key in content["model"]] if name == "tokenizer.json" else []
        for index, path in enumerate(paths):
            for step in range(2 if name == "config.json" else 1):
                yield name, path, STRANGE[(5 * index + step) % len(STRANGE)]


# What quotes a surrogate, a warning or a log record, can't be sent from a worker of pytest-xdist.
@pytest.mark.filterwarnings("ignore")
def test_no_mutation_of_a_folder_ends_in_another_exception(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    uses = (
        lambda model: parse_config({"pretrain": str(model), "custom_envs": LAKE}),
        load_tokenizer,
        load_model,
    )
    num_refused = 0
    for name, path, value in mutants(tiny_model):
        folder = tmp_path / "mutant"
        shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
        content = json.loads((folder / name).read_text())
        place = content["model"] if len(path) > 1 else content
        place[path[-1]] = value
        (folder / name).write_text(json.dumps(content))
        for use in uses:
            try:
                use(folder)
            except TurnwiseError as error:
                num_refused += 1
                assert isinstance(error, ConfigError) or str(folder) in str(error), (name, path, value)
            except BaseException as error:
                raise AssertionError(f"{name} {path} = {value!r}: {error!r}") from error
    assert num_refused > 30
