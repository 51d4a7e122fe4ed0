"""Freezes parameters, and adds LoRA (Hu et al. 2021, arXiv:2106.09685) by peft: W x + (alpha / rank) · B A x,
with W frozen. Only this module imports peft, and only if adapters are used, because the import takes
seconds."""

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from turnwise.errors import ConfigError, ModelError, NotAvailableError, first_line, install_hint, nearest
from turnwise.model_files.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from turnwise.runtime.disk import writing
from turnwise.types import derive_seed

logger = logging.getLogger(__name__)


def frozen_names(model: nn.Module, prefixes: Sequence[str]) -> frozenset[str]:
    """Names of the parameters that start with one of the prefixes, and of parameters that are tied to them.
    Raises ConfigError for a prefix with which no name starts."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in parameters):
            starts = _starts(parameters)
            raise ConfigError(
                f"freeze_module_prefix: no parameter's name starts with {prefix!r}; names start with "
                f"{', '.join(sorted(starts, key=len)[:6])}.{nearest(prefix, starts)}"
            )
    with_prefix = {name for name in parameters if name.startswith(tuple(prefixes))}
    tensors = {id(parameters[name]) for name in with_prefix}
    frozen = frozenset(name for name, parameter in parameters.items() if id(parameter) in tensors)
    for name in sorted(frozen - with_prefix):
        logger.warning(
            "freeze_module_prefix also freezes %s: it is tied to a tensor that one of its prefixes names",
            name,
        )
    return frozen


def _starts(names: Iterable[str]) -> list[str]:
    """Every name and every part of one up to a dot, each once, in the order in which they appear."""
    starts: dict[str, None] = {}
    for name in names:
        starts.update(dict.fromkeys(accumulate(name.split("."), "{}.{}".format)))
    return list(starts)


def freeze(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Excludes the parameters in `frozen_names` from training. Raises ConfigError for a prefix with which no
    name starts, or if nothing is left to train."""
    frozen = frozen_names(model, prefixes)
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"freeze_module_prefix: {', '.join(prefixes)} freeze every parameter; leave some to be trained"
        )


BASE_FINGERPRINT = "base_fingerprint.txt"
"""File in an adapter's folder with a hash of the base weights that the adapter was trained on."""
ALL_LINEAR = "all"
_NAME = "default"  # peft's name of the one adapter of a model
VALUE_TASK = "TOKEN_CLS"  # peft's name of the task of a value model
_FINGERPRINT_VALUES = 64
Gathered = Callable[[Sequence[Tensor]], AbstractContextManager[Any]]
"""Makes a context in which the given parameters, which a strategy may have split over ranks, are complete on
each rank."""


@dataclass(frozen=True, slots=True)
class LoRASettings:
    """`targets` are names of linear modules or endings of names, or `all`. The vocabulary projection and
    modules whose weight has a name that starts with one of `frozen` get no adapters. `seed` decides the
    initial A (B is 0) and the dropout masks."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    frozen: tuple[str, ...] = ()
    seed: int = 0


class Adapters:
    """Adapters in a model, which is changed in place. The model's own parameters are frozen, except for the
    `head` of a value model: it is saved with the adapters, and trained unless the settings freeze it.

    `base` is the path of the model without adapters; it is written into the adapter's folder. `fingerprint`
    is that of the model without adapters, to be given if its weights aren't there yet. Raises
    ConfigError if a target isn't a linear module, or no module is left for adapters; NotAvailableError if
    peft isn't installed."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: LoRASettings,
        base: str = "",
        head: nn.Linear | None = None,
        fingerprint: str = "",
    ) -> None:
        peft = import_peft()
        self.model = model
        self._base_fingerprint = fingerprint or fingerprint_of(model)
        frozen = frozen_names(model, settings.frozen)
        targets, adapted_names, left_out = _adapted_modules(model, settings, frozen, head)
        config = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=int(settings.alpha) if settings.alpha % 1 == 0 else settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=targets,
            exclude_modules=left_out or None,
            # For a value model's task type, peft would replace the head by a copy.
            task_type="CAUSAL_LM" if head is None else None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed("lora", settings.seed))
            self._peft = peft.get_peft_model(model, config)
        config.base_model_name_or_path = base
        self._config = config
        self._settings = settings
        self._layers: dict[str, Any] = {name: model.get_submodule(name) for name in adapted_names}
        self._head_name = next((name for name, module in model.named_modules() if module is head), "")
        # By name, since a strategy may replace the parameters themselves.
        self._head: tuple[str, ...] = ()
        if head is not None:
            self._head = tuple(name for name, _ in head.named_parameters(prefix=self._head_name))
        for name in self._head:
            model.get_parameter(name).requires_grad_(name not in frozen)
        model.eval()

    @property
    def parameters(self) -> list[Tensor]:
        """All trained parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def merged_weights(self, gathered: Gathered = nullcontext) -> Iterator[tuple[str, Tensor]]:
        """`(Hugging Face name, tensor)` of every parameter of the model with the adapters added, W + (alpha /
        rank) · B A. The sums are computed at each call; base and adapters stay as they are. Parameters are
        read inside `gathered(…)`."""
        adapted = {id(layer.get_base_layer().weight): layer for layer in self._layers.values()}
        with torch.no_grad():
            for name, parameter in self.base_parameters():
                layer = adapted.get(id(parameter))
                if layer is None:
                    with gathered([parameter]):
                        yield name, parameter.detach()
                else:
                    with gathered(list(layer.parameters())):
                        # read here, since a strategy may have replaced it by the whole one
                        yield name, layer.get_base_layer().weight + layer.get_delta_weight(_NAME)

    @contextmanager
    def off(self) -> Iterator[None]:
        """In this context, the model is exactly the model without adapters."""
        self._peft.base_model.disable_adapter_layers()
        try:
            yield
        finally:
            self._peft.base_model.enable_adapter_layers()

    @contextmanager
    def dropping(self, position: float, part: int = 0, rank: int = 0) -> Iterator[None]:
        """In this context the adapters' dropout is on. Its masks follow from the seed, the `position` in
        training, the `part` of the step and the `rank`."""
        if not self._settings.dropout:
            yield
            return
        device = self.model.device
        dropouts = [layer.lora_dropout[_NAME] for layer in self._layers.values()]
        numbers: list[str | int] = []
        if part:
            numbers.append(part)
        if rank:
            numbers.append(f"rank {rank}")
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            torch.manual_seed(
                derive_seed(
                    "lora_dropout",
                    self._settings.seed,
                    str(position),
                    *numbers,
                )
            )
            for dropout in dropouts:
                dropout.train()
            try:
                yield
            finally:
                for dropout in dropouts:
                    dropout.eval()

    def save(self, folder: Path) -> None:
        """Writes a peft adapter folder with the fingerprint of the base. Raises OSError if it can't be
        written."""
        values = self._config.to_dict()
        for key, value in values.items():
            if isinstance(value, set):
                values[key] = sorted(value)
        if self._head:
            values["task_type"] = VALUE_TASK
            values["modules_to_save"] = [self._head_name]
        text = json.dumps({**values, "inference_mode": True}, indent=2, sort_keys=True)
        (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
        (folder / BASE_FINGERPRINT).write_text(self._base_fingerprint + "\n", encoding="utf-8")
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in self._tensors().items()}
        with writing(folder):
            try:
                save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"{folder}: {first_line(error)}") from error

    def load(self, folder: Path) -> None:
        """Sets the adapters to those saved in `folder`. Raises ModelError if it has none, or they don't fit
        the model."""
        if not (folder / ADAPTER_WEIGHTS).is_file():
            raise ModelError(
                f"{folder} holds all parameters of a model and no adapters; continue with it without "
                "lora_rank"
            )
        if not may_be_base(folder, self._base_fingerprint):
            raise ModelError(
                f"{folder}: its adapters were trained on another base model; set pretrain to the one that "
                "the run began with"
            )
        saved = load_file(folder / ADAPTER_WEIGHTS)
        live = self._tensors()
        if _shapes(saved) != _shapes(live):
            raise ModelError(
                f"{folder} holds adapters of another rank or of other modules; set lora_rank and lora_target "
                "so"
            )
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(saved[name])

    def describe(self) -> str:
        """One line, such as `LoRA of rank 2, alpha 4, dropout 0, in 4 modules: q_proj, v_proj`."""
        endings = ", ".join(sorted({_ending(name) for name in self._layers}))
        settings = self._settings
        sizes = f"rank {settings.rank}, alpha {settings.alpha:g}, dropout {settings.dropout:g}"
        description = f"LoRA of {sizes}, in {len(self._layers)} modules: {endings}"
        if any(self.model.get_parameter(name).requires_grad for name in self._head):
            return f"{description}; and the value head"
        return description

    def base_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """`(Hugging Face name, parameter)` of the model without its adapters."""
        prefix = self._peft.base_model.prefix
        for name, parameter in self.model.named_parameters():
            if not any(part.startswith(prefix) for part in name.split(".")):
                yield name.replace(".base_layer.", "."), parameter

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = import_peft().get_peft_model_state_dict(
            self._peft, save_embedding_layers=False
        )
        head = {f"base_model.model.{name}": self.model.get_parameter(name) for name in self._head}
        return tensors | head


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def import_peft() -> ModuleType:
    """peft. Raises NotAvailableError if it isn't installed."""
    try:
        import peft
    except ImportError as error:
        raise NotAvailableError(f"LoRA needs peft, which isn't installed; {install_hint('rl')}") from error
    module: ModuleType = peft
    return module


def _adapted_modules(
    model: PreTrainedModel,
    settings: LoRASettings,
    frozen: Collection[str],
    head: nn.Linear | None,
) -> tuple[list[str], list[str], list[str]]:
    """The targets (`all` replaced by names), the targeted modules that get adapters, and those that are
    `frozen`."""
    heads = (head, model.get_output_embeddings())
    linear = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module not in heads:
            linear.append(name)
    endings = sorted({_ending(name) for name in linear})
    targets = endings if ALL_LINEAR in settings.targets else list(settings.targets)
    for target in targets:
        if not any(_is_of(name, target) for name in linear):
            raise ConfigError(
                f"lora_target: {target!r} isn't a linear module that can get adapters; this model has "
                f"{', '.join(endings)}, or "
                f"{ALL_LINEAR} for all of them.{nearest(target, [*endings, ALL_LINEAR])}"
            )
    targeted = [name for name in linear if any(_is_of(name, target) for target in targets)]
    adapted_names = [name for name in targeted if f"{name}.weight" not in frozen]
    if not adapted_names:
        raise ConfigError(
            f"freeze_module_prefix: {', '.join(settings.frozen)} leave no module of lora_target to get "
            "adapters"
        )
    frozen_modules = [name for name in targeted if name not in adapted_names]
    return targets, adapted_names, frozen_modules


def _is_of(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _ending(name: str) -> str:
    return name.rpartition(".")[2]


def may_be_base(folder: Path, fingerprint: str) -> bool:
    """Whether a folder's adapters may belong to the model with this `fingerprint`: the folder has the same
    one or none."""
    file = folder / BASE_FINGERPRINT
    return not file.is_file() or file.read_text(encoding="utf-8").strip() == fingerprint


def fingerprint_of(model: PreTrainedModel) -> str:
    """A hash of some values of every parameter."""
    return fingerprint_of_tensors(model.named_parameters())


def fingerprint_of_tensors(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """The fingerprint of a model with these parameters, each once."""
    digest = hashlib.sha256()
    for name, parameter in parameters:
        values = parameter.detach().flatten()
        stride = max(1, len(values) // _FINGERPRINT_VALUES)
        selected = values[::stride].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(selected.numpy().tobytes())
    return digest.hexdigest()
