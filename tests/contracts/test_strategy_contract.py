from __future__ import annotations

from collections.abc import Iterable

from strategy_contract import VALUES, StrategyContract
from torch import nn
from toy_model import toy_model, toy_value_model

from turnwise.models.lora import Adapters, LoRASettings, freeze
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.torch_strategy import TorchStrategy

SETTINGS = OptimizerSettings(3e-3, weight_decay=0.1, scheduler="linear", total_steps=50)


class TestTorchStrategy(StrategyContract):
    def make_strategy(self) -> TorchStrategy:
        return TorchStrategy(toy_model(), optimizer=SETTINGS)

    def modules(self, strategy: TorchStrategy) -> Iterable[nn.Module]:
        return strategy.model.modules()


class TestWithGradientCheckpointing(TestTorchStrategy):
    def make_strategy(self) -> TorchStrategy:
        return TorchStrategy(toy_model(), optimizer=SETTINGS, is_gradient_checkpointing=True)


class TestPadded(TestTorchStrategy):
    def make_strategy(self) -> TorchStrategy:
        return TorchStrategy(toy_model(attn_implementation="sdpa"), optimizer=SETTINGS)


class TestLoRA(TestTorchStrategy):
    def make_strategy(self) -> TorchStrategy:
        model = toy_model()
        return TorchStrategy(model, adapters=Adapters(model, LoRASettings(rank=4, alpha=8)), optimizer=SETTINGS)


class TestLoRAPaddedWithGradientCheckpointing(TestTorchStrategy):
    def make_strategy(self) -> TorchStrategy:
        model = toy_model(attn_implementation="sdpa")
        adapters = Adapters(model, LoRASettings(rank=4, alpha=8, targets=("q_proj", "down_proj")))
        return TorchStrategy(model, adapters=adapters, optimizer=SETTINGS, is_gradient_checkpointing=True)


class TestPartlyFrozen(TestTorchStrategy):
    def make_strategy(self) -> TorchStrategy:
        model = toy_model()
        freeze(model, ["model.embed_tokens", "model.layers.0."])
        return TorchStrategy(model, optimizer=SETTINGS)


class TestCritic(TestTorchStrategy):
    outputs = VALUES

    def make_strategy(self) -> TorchStrategy:
        return TorchStrategy(toy_value_model(), optimizer=SETTINGS)


class TestCriticPaddedWithGradientCheckpointing(TestCritic):
    def make_strategy(self) -> TorchStrategy:
        model = toy_value_model(attn_implementation="sdpa")
        return TorchStrategy(model, optimizer=SETTINGS, is_gradient_checkpointing=True)
