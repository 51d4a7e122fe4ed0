from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from strategy_contract import VALUES, StrategyContract
from torch import nn
from toy_model import toy_model, toy_value_model

from turnwise.models.lora import Adapters, LoRASettings, freeze
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.torch_strategy import TorchStrategy


class TestTorchStrategy(StrategyContract):
    model_settings: ClassVar[dict[str, Any]] = {}
    adapters: ClassVar[LoRASettings | None] = None
    frozen: ClassVar[Sequence[str]] = ()
    is_gradient_checkpointing: ClassVar[bool] = False

    def make_strategy(self) -> TorchStrategy:
        model = (toy_value_model if self.outputs is VALUES else toy_model)(**self.model_settings)
        freeze(model, self.frozen)
        return TorchStrategy(
            model,
            adapters=Adapters(model, self.adapters) if self.adapters else None,
            optimizer=OptimizerSettings(3e-3, weight_decay=0.1, scheduler="linear", total_steps=50),
            is_gradient_checkpointing=self.is_gradient_checkpointing,
        )

    def modules(self, strategy: TorchStrategy) -> Iterable[nn.Module]:
        return strategy.model.modules()


class TestLoRA(TestTorchStrategy):
    adapters = LoRASettings(rank=4, alpha=8)


class TestLoRAPaddedWithGradientCheckpointing(TestTorchStrategy):
    model_settings: ClassVar = {"attn_implementation": "sdpa"}
    is_gradient_checkpointing = True
    adapters = LoRASettings(rank=4, alpha=8, targets=("q_proj", "down_proj"))


class TestPartlyFrozen(TestTorchStrategy):
    frozen = ("model.embed_tokens", "model.layers.0.")


class TestCritic(TestTorchStrategy):
    outputs = VALUES


class TestCriticPaddedWithGradientCheckpointing(TestLoRAPaddedWithGradientCheckpointing):
    adapters = None
    outputs = VALUES
