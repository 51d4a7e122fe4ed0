"""LoRA adapters: what they train, what is left without them, what they merge to, and what lies in their
folder."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from toy_model import add_noise, toy_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from turnwise.errors import ConfigError, ModelError, NotAvailableError
from turnwise.models.load import base_of_adapter, load_model, load_tokenizer, save_model
from turnwise.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_FINGERPRINT, Adapters, LoRASettings
from turnwise.models.value_head import load_value_model, value_head
from turnwise.runtime.rank import RankContext
from turnwise.testing.fakes import byte_tokenizer
from turnwise.training.model_source import plain_base

SETTINGS = LoRASettings(rank=2, alpha=6)
IDS = torch.arange(20)[None] % 97


def trained(adapters: Adapters) -> Adapters:
    add_noise(adapters.model)
    return adapters


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_model(toy_model(vocab_size=260), byte_tokenizer(), tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """The folder of trained adapters, without a tokenizer."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    trained(Adapters(load_model(base), SETTINGS, base=str(base))).save(folder)
    return folder


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


# In memory


def test_the_adapters_alone_are_trained() -> None:
    adapters = Adapters(toy_model(), SETTINGS)
    trainable = {name: p.numel() for name, p in adapters.model.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in trainable)
    ends = {
        "q_proj": 64,
        "k_proj": 48,
        "v_proj": 48,
        "o_proj": 64,
        "gate_proj": 80,
        "up_proj": 80,
        "down_proj": 80,
    }
    assert sum(trainable.values()) == 2 * SETTINGS.rank * sum(ends.values())
    assert (
        adapters.describe() == f"LoRA of rank 2, alpha 6, dropout 0, in 14 modules: {', '.join(sorted(ends))}"
    )


def test_new_adapters_change_nothing_and_the_base_is_left_without_them() -> None:
    expected = logits(toy_model())
    adapters = Adapters(toy_model(), SETTINGS)
    assert torch.equal(logits(adapters.model), expected)
    trained(adapters)
    assert (logits(adapters.model) - expected).abs().max() > 0.1
    with adapters.off():
        assert torch.equal(logits(adapters.model), expected)
    assert (logits(adapters.model) - expected).abs().max() > 0.1
    assert any(parameter.requires_grad for parameter in adapters.model.parameters())


def test_merged_weights_have_the_plain_names_and_compute_the_same() -> None:
    adapters = trained(Adapters(toy_model(), SETTINGS))
    plain = toy_model()
    merged = dict(adapters.merged_weights())
    assert list(merged) == [name for name, _ in plain.named_parameters()]
    changed = {
        name for name, parameter in plain.named_parameters() if not torch.equal(parameter, merged[name])
    }
    assert changed == {name for name in merged if name.endswith("_proj.weight")}
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logits(plain), logits(adapters.model), rtol=1e-4, atol=1e-4)


def test_merging_again_and_again_adds_nothing_up() -> None:
    adapters = trained(Adapters(toy_model(), SETTINGS))
    first = dict(adapters.merged_weights())
    for _ in range(50):
        last = dict(adapters.merged_weights())
    assert all(torch.equal(first[name], last[name]) for name in first)
    with adapters.off():
        assert torch.equal(logits(adapters.model), logits(toy_model()))


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("q_proj",), 2),
        (("self_attn.q_proj", "mlp.up_proj"), 4),
        (("model.layers.1.self_attn.v_proj",), 1),
        (("all",), 14),
    ],
)
def test_targets_are_names_or_their_ends(targets: tuple[str, ...], expected: int) -> None:
    adapters = Adapters(toy_model(), LoRASettings(2, 4, targets=targets))
    assert (
        sum(name.endswith("lora_A.default.weight") for name, _ in adapters.model.named_parameters())
        == expected
    )


@pytest.mark.parametrize("target", ["q_prj", "lm_head", "embed_tokens", "self_attn", "proj"])
def test_a_target_that_cannot_get_adapters_is_refused_with_those_that_can(target: str) -> None:
    with pytest.raises(
        ConfigError, match=f"lora_target: '{target}'.*down_proj, gate_proj, k_proj.*or all"
    ) as caught:
        Adapters(toy_model(tie_word_embeddings=False), LoRASettings(2, 4, targets=("v_proj", target)))
    assert ("Did you mean 'q_proj'" in str(caught.value)) is (target == "q_prj")


def test_frozen_modules_get_no_adapters() -> None:
    adapters = Adapters(toy_model(), LoRASettings(2, 4, frozen=("model.layers.0.", "model.layers.1.mlp")))
    assert adapters.describe().endswith("in 4 modules: k_proj, o_proj, q_proj, v_proj")
    with pytest.raises(ConfigError, match=r"freeze_module_prefix: model.layers leave no module"):
        Adapters(toy_model(), LoRASettings(2, 4, frozen=("model.layers",)))
    with pytest.raises(ConfigError, match=r"'model.leyers'.*Did you mean 'model.layers"):
        Adapters(toy_model(), LoRASettings(2, 4, frozen=("model.leyers",)))


def test_a_seed_draws_the_adapters_and_nothing_else() -> None:
    before = torch.get_rng_state()
    first, same, other = (
        [
            p
            for p in Adapters(toy_model(), LoRASettings(2, 4, seed=seed)).model.parameters()
            if p.requires_grad
        ]
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_follows_from_the_seed_and_the_place_in_the_run() -> None:
    adapters = trained(Adapters(toy_model(), LoRASettings(2, 4, dropout=0.5, seed=3)))
    plain, before = logits(adapters.model), torch.get_rng_state()

    def dropped(position: float) -> torch.Tensor:
        with adapters.dropping(position):
            return logits(adapters.model)

    assert torch.equal(dropped(1.0), dropped(1.0)) and not torch.equal(dropped(1.0), dropped(2.0))
    assert not torch.equal(dropped(1.0), plain) and torch.equal(logits(adapters.model), plain)
    with pytest.raises(ArithmeticError), adapters.dropping(1.0):
        raise ArithmeticError
    assert not any(module.training for module in adapters.model.modules())
    assert torch.equal(torch.get_rng_state(), before)


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(NotAvailableError, match=r"\.\[rl\]"):
        Adapters(toy_model(), SETTINGS)


# On disk


def test_peft_loads_and_merges_the_folder_to_the_engine_s_weights(base: Path, tmp_path: Path) -> None:
    adapters = trained(Adapters(load_model(base), LoRASettings(2, 6, dropout=0.1), base=str(base)))
    adapters.save(tmp_path)
    assert json.loads((tmp_path / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] == str(base)
    theirs = (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)
        .merge_and_unload()
        .state_dict()
    )
    for name, tensor in adapters.merged_weights():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-6)


def test_equal_adapters_give_equal_bytes(base: Path, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        Adapters(load_model(base), SETTINGS, base=str(base)).save(tmp_path / name)
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_FINGERPRINT):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_saved_adapters_are_loaded_in_place(adapter: Path, base: Path) -> None:
    fresh = Adapters(load_model(base), LoRASettings(2, 6, seed=9), base=str(base))
    places = [parameter.data_ptr() for parameter in fresh.model.parameters()]
    fresh.load(adapter)
    assert [parameter.data_ptr() for parameter in fresh.model.parameters()] == places
    expected = dict(load_model(adapter).named_parameters())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in fresh.merged_weights())
    with pytest.raises(ModelError, match="another rank or of other modules"):
        Adapters(load_model(base), LoRASettings(3, 6)).load(adapter)
    with pytest.raises(ModelError, match="no adapters"):
        fresh.load(base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_folder_loads_as_a_plain_model(adapter: Path, base: Path, dtype: torch.dtype) -> None:
    model, exact = load_model(adapter, dtype=dtype), load_model(adapter)
    assert type(model) is type(load_model(base)) and model.dtype == dtype
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert all(parameter.requires_grad for parameter in model.parameters())
    for (name, parameter), merged in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert torch.equal(parameter, merged.to(dtype)) and "lora" not in name
    assert not torch.equal(logits(exact), logits(load_model(base)))


def test_a_tokenizer_comes_from_the_adapter_or_from_its_base(adapter: Path, base: Path) -> None:
    assert load_tokenizer(adapter).get_vocab() == load_tokenizer(base).get_vocab()
    byte_tokenizer(chat_template="{{ messages[0].content }}").save_pretrained(adapter)
    assert load_tokenizer(adapter).chat_template == "{{ messages[0].content }}"


def test_ranks_that_arrive_together_write_one_merged_base(adapter: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(adapter), byte_tokenizer()
    barrier = threading.Barrier(2)
    for number in range(3):
        merged = tmp_path / f"run-{number}" / "base_model"

        def begin(rank: int, merged: Path = merged) -> str:
            barrier.wait()
            return plain_base(str(adapter), model, tokenizer, merged, RankContext("actor_train", rank, 2))

        with ThreadPoolExecutor(2) as ranks:
            assert set(ranks.map(begin, range(2))) == {str(merged)}
        assert torch.equal(logits(load_model(merged)), logits(model))
        assert [path.name for path in merged.parent.iterdir()] == ["base_model"]


def test_a_critic_can_start_from_an_adapter_of_the_policy(adapter: Path) -> None:
    critic, policy = load_value_model(adapter), load_model(adapter)
    assert not value_head(critic).weight.any()
    for ours, theirs in zip(critic.base_model.parameters(), policy.base_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_faults_of_adapter_folders(adapter: Path, base: Path, tmp_path: Path) -> None:
    assert base_of_adapter(adapter) == str(base) and base_of_adapter(base) is None
    broken = shutil.copytree(adapter, tmp_path / "broken")
    (broken / ADAPTER_WEIGHTS).write_bytes(b"cut")
    with pytest.raises(ModelError, match=rf"broken/{ADAPTER_WEIGHTS} is cut off"):
        load_model(broken)
    (broken / ADAPTER_WEIGHTS).unlink()
    with pytest.raises(ModelError, match=rf"an incomplete adapter: it has no {ADAPTER_WEIGHTS}"):
        load_model(broken)
    (broken / ADAPTER_CONFIG).write_text("{}")
    with pytest.raises(ModelError, match=r"adapter_config.json names no base_model_name_or_path"):
        load_model(broken)
    other = toy_model(intermediate_size=64, vocab_size=260)
    shutil.rmtree(base)
    for load in (load_model, load_tokenizer, load_value_model):
        with pytest.raises(
            ModelError, match=rf"its base model {base} isn't there.*base_model_name_or_path of"
        ):
            load(adapter)
    save_model(other, byte_tokenizer(), base)
    (adapter / BASE_FINGERPRINT).unlink()
    with pytest.raises(ModelError, match=r"adapter: can't be merged into its base model"):
        load_model(adapter)


def test_an_adapter_is_not_merged_into_a_base_that_was_replaced(adapter: Path, base: Path) -> None:
    save_model(toy_model(seed=5, vocab_size=260), byte_tokenizer(), base)
    with pytest.raises(
        ModelError, match=r"aren't those that the adapter was trained on.*base_model_name_or_path"
    ):
        load_model(adapter)
    save_model(toy_model(vocab_size=260), byte_tokenizer(), base)
    (adapter / BASE_FINGERPRINT).unlink()
    load_model(adapter)
