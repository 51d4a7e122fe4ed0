"""Models whose weights are read from safetensors files slice by slice, so that no process holds them all."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from turnwise.model_files.folder import NOTHING, Trust, base_of_adapter, tensor_files, weight_headers
from turnwise.models.load import load_model_config, resolved_attention, told_as_one_sentence
from turnwise.models.lora import fingerprint_of_tensors
from turnwise.models.packed_attention import PACKED_ATTENTION, supports_packing
from turnwise.models.value_head import text_head, value_model_class

_META = torch.device("meta")


@dataclass(slots=True)
class SlicedModel:
    """A model in evaluation mode whose parameters are on torch's meta device, and where in its files each of
    them is. Tied parameters are one tensor, buffers are real."""

    model: PreTrainedModel
    files: dict[str, Path]
    """The file of each tensor."""
    names: dict[str, str]
    """The tensor of each parameter, by the parameter's name; empty for one that starts at 0."""
    places: list[tuple[nn.Module, str, str]] = field(init=False)
    """Module, attribute and tensor of each parameter that has to be read."""

    def __post_init__(self) -> None:
        self.places = []
        for module_name, module in self.model.named_modules():
            for name in module._parameters:
                full_name = f"{module_name}.{name}" if module_name else name
                if full_name in self.names:
                    self.places.append((module, name, self.names[full_name]))

    def rows(
        self,
        tensor: str,
        start: int,
        stop: int,
        shape: Sequence[int],
    ) -> Tensor:
        """Rows `start` to `stop` of a tensor of this shape, in fp32."""
        if not tensor:
            return torch.zeros(stop - start, *shape[1:])
        with safe_open(self.files[tensor], "pt") as opened:
            rows: Tensor = opened.get_slice(tensor)[start:stop]
        return rows.float()

    def fingerprint(self) -> str:
        """`lora.fingerprint_of` the model with its weights. Reads a few pages of each tensor."""
        return fingerprint_of_tensors(self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            tensor = self.names[name]
            if not tensor:
                yield name, torch.zeros(parameter.shape)
                continue
            with safe_open(self.files[tensor], "pt") as opened:
                yield name, opened.get_tensor(tensor)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """In this context parameters are on the CPU, so that adapters can be put beside them: zeros that take
        no memory, except for those of one row, such as a value head, which are read."""
        self._replace(self._stand_in)
        try:
            yield
        finally:
            self._replace(lambda parameter, _: torch.empty_like(parameter, device=_META))

    @contextmanager
    def read_in_turn(self) -> Iterator[None]:
        """In this context the model can be called on the CPU without gradients. Each module's own weights are
        read when it is called and forgotten afterwards, so a call costs the time of reading all files."""
        weights: dict[nn.Module, list[tuple[str, str]]] = {}
        for module, name, tensor in self.places:
            weights.setdefault(module, []).append((name, tensor))
        empty = {module: dict(module._parameters) for module in weights}

        def read(module: nn.Module, _: object) -> None:
            for name, tensor in weights[module]:
                parameter = module._parameters[name]
                assert parameter is not None, "a place is that of a parameter"
                shape = parameter.shape
                module._parameters[name] = nn.Parameter(
                    self.rows(
                        tensor,
                        0,
                        shape[0],
                        shape,
                    ),
                    False,
                )

        def forget(module: nn.Module, *_: object) -> None:
            module._parameters.update(empty[module])

        hooks = [module.register_forward_pre_hook(read) for module in weights]
        hooks += [module.register_forward_hook(forget, always_call=True) for module in weights]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _stand_in(self, parameter: Tensor, tensor: str) -> Tensor:
        if len(parameter) == 1:
            return self.rows(tensor, 0, 1, parameter.shape)
        return torch.zeros(()).expand(parameter.shape)

    def _replace(self, make: Callable[[Tensor, str], Tensor]) -> None:
        made: dict[int, nn.Parameter] = {}
        for module, name, tensor in self.places:
            old = module._parameters[name]
            assert old is not None, "a place is that of a parameter"
            if id(old) not in made:
                made[id(old)] = nn.Parameter(make(old.detach(), tensor), old.requires_grad)
            module._parameters[name] = made[id(old)]


def open_slices(
    path: str,
    has_value_head: bool,
    attention: str = "auto",
    trust: Trust = NOTHING,
) -> SlicedModel | None:
    """The model of a folder or the hub, as `load_model` or `load_value_model` would load it. None if its
    tensors can only be read as a whole: of adapters, pickles, quantised weights, a model of its own Python
    code, or names or shapes that transformers converts. Raises ModelError if the config can't be used."""
    folder = trust.folder(path)
    if base_of_adapter(folder) is not None or trust.remote_code:
        return None
    headers = weight_headers(folder)
    config = load_model_config(folder, trust)
    if not headers or config.to_dict().get("quantization_config") is not None:
        return None
    if has_value_head:
        config.num_labels = 1
    model = _bare(folder, config, has_value_head, attention)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if model.state_dict().keys() - parameters.keys():
        return None  # buffers that the files hold
    aliases: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        aliases.setdefault(id(parameter), []).append(name)
    names: dict[str, str] = {}
    body = f"{model.base_model_prefix}."
    unread = set(headers) - (text_head(config) if has_value_head else set())
    for name, parameter in parameters.items():
        of_files = [*aliases[id(parameter)], *(a.removeprefix(body) for a in aliases[id(parameter)])]
        unread.difference_update(of_files)
        found = [file_name for file_name in of_files if file_name in headers]
        starts_at_zero = has_value_head and not name.startswith(body) and not found
        if not found and not starts_at_zero:
            return None
        names[name] = found[0] if found else ""
        if found and (headers[found[0]].shape != tuple(parameter.shape) or not headers[found[0]].is_float):
            return None
    if unread:
        return None
    return SlicedModel(model, tensor_files(folder), names)


def _bare(
    folder: Path,
    config: PreTrainedConfig,
    has_value_head: bool,
    attention: str,
) -> PreTrainedModel:
    """The model without weights: parameters go to the meta device as soon as they are made, so that buffers,
    which are computed, are real."""
    implementation = resolved_attention(attention)
    # torch's annotation leaves out that a hook may return another parameter.
    hook = register_module_parameter_registration_hook(_to_meta)  # type: ignore[arg-type]
    try:
        with told_as_one_sentence(folder, "can't be made"):
            kind = value_model_class(config) if has_value_head else AutoModelForCausalLM
            make = kind._from_config if has_value_head else kind.from_config
            model: PreTrainedModel = make(config, dtype=torch.float32, attn_implementation=implementation)
    finally:
        hook.remove()
    if (folder / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    if attention == "auto" and supports_packing(model):
        model.set_attn_implementation(PACKED_ATTENTION)
    return model.eval()


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or parameter.device == _META:
        return None  # it is registered as it is
    return nn.Parameter(parameter.detach().to(_META), parameter.requires_grad)
