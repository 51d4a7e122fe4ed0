from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
from strategy_contract import VALUES, StrategyContract
from torch import nn
from toy_model import toy_model, toy_value_model

from turnwise.errors import ConfigError
from turnwise.models.lora import Adapters, LoRASettings, freeze
from turnwise.protocols import TrainStrategy
from turnwise.runtime.entry_points import load_class
from turnwise.spec import STRATEGIES
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.settings import StrategySettings


def installed_strategies() -> list[str]:
    """The names of `spec.yaml` that train and whose library is here."""
    trained = {name: spec for name, spec in STRATEGIES.items() if spec.kind == "train" and spec.is_available}
    return [name for name, spec in trained.items() if not spec.extra or find_spec(spec.extra)]


class TestStrategy(StrategyContract):
    model_settings: ClassVar[dict[str, Any]] = {}
    adapters: ClassVar[LoRASettings | None] = None
    frozen: ClassVar[Sequence[str]] = ()
    is_gradient_checkpointing: ClassVar[bool] = False

    @pytest.fixture(autouse=True)
    def leave_groups(self) -> Iterator[None]:
        """Other tests of this process begin without a process group, which a sharding strategy makes."""
        yield
        if dist.is_initialized():
            dist.destroy_process_group()

    @pytest.fixture(autouse=True, params=installed_strategies())
    def choose(self, request: pytest.FixtureRequest) -> None:
        self.spec = STRATEGIES[request.param]
        self.strategy_class = load_class(self.spec.entry, "strategy_name", ConfigError)

    def make_strategy(self) -> TrainStrategy:
        model = (toy_value_model if self.outputs is VALUES else toy_model)(**self.model_settings)
        freeze(model, self.frozen)
        settings = StrategySettings(
            optimizer=OptimizerSettings(3e-3, weight_decay=0.1, scheduler="linear", total_steps=50),
            is_gradient_checkpointing=self.is_gradient_checkpointing,
        )
        return self.strategy_class(
            model,
            settings,
            adapters=Adapters(model, self.adapters) if self.adapters else None,
            **({"options": {}} if self.spec.has_options else {}),
        )

    def modules(self, strategy: Any) -> Iterable[nn.Module]:
        return strategy.model.modules()


class TestLoRA(TestStrategy):
    adapters = LoRASettings(rank=4, alpha=8)


class TestLoRAPaddedWithGradientCheckpointing(TestStrategy):
    model_settings: ClassVar = {"attn_implementation": "sdpa"}
    is_gradient_checkpointing = True
    adapters = LoRASettings(rank=4, alpha=8, targets=("q_proj", "down_proj"))


class TestPartlyFrozen(TestStrategy):
    frozen = ("model.embed_tokens", "model.layers.0.")


class TestCritic(TestStrategy):
    outputs = VALUES


class TestCriticPaddedWithGradientCheckpointing(TestLoRAPaddedWithGradientCheckpointing):
    adapters = None
    outputs = VALUES
