"""The parts of a model that this rank holds, as tensors of the Hugging Face model."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from turnwise.training.megatron.bridge import Place, Whole
from turnwise.training.megatron.groups import (
    copy_rank,
    on_all_stages,
    send_from_stage,
    tensor_parts,
    tensor_rank,
)
from turnwise.training.megatron.model import DecoderPart
from turnwise.training.megatron.startup import Read
from turnwise.training.share_writer import Block


class HeldParameters:
    """The parameters of this rank's `parts` and the tensors that they consist of. All ranks must iterate
    together."""

    def __init__(
        self,
        parts: Sequence[DecoderPart],
        places: Sequence[Place],
        shapes: Mapping[str, torch.Size],
    ) -> None:
        self._shapes = shapes
        self.by_name: dict[str, nn.Parameter] = {}
        for part in parts:
            self.by_name.update(_named(part))
        self._places = list(places)
        for place, parameter in self._held():
            # Megatron's norm of gradients counts what isn't marked so on one tensor-parallel rank alone.
            parameter.tensor_model_parallel = not isinstance(place.cut, Whole)  # type: ignore[attr-defined]
        stages = on_all_stages(set(self.by_name))
        self._stages = {
            place.name: next(number for number, names in enumerate(stages) if place.name in names)
            for place in places
            if any(place.name in names for names in stages)
        }
        """The pipeline stage that has a parameter; the first one of several."""

    @torch.no_grad()
    def fill(self, read: Read) -> None:
        """Sets the weights of this rank. Reads the tensors one parameter at a time."""
        for place, parameter in self._held():
            parameter.copy_(self._part(place, read))

    def parts_of(self, read: Read) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter of this rank that is trained, and its part of the tensors that `read` gives."""
        for place, parameter in self._held():
            if parameter.requires_grad:
                yield parameter, self._part(place, read)

    def whole(
        self,
        value_of: Callable[[nn.Parameter], Tensor],
        is_included: Callable[[Place], bool] = lambda _: True,
    ) -> Iterator[tuple[str, Tensor]]:
        """`(name, tensor)` of the Hugging Face model, on all ranks, put together from `value_of` each
        parameter, which has its shape. Tied tensors come once."""
        for place in self._places:
            if place.name not in self._stages or place.is_copy or not is_included(place):
                continue
            shapes = [self._shapes[name] for name in place.tensors]
            parameter = self.by_name.get(place.name)
            if parameter is None:
                device = next(iter(self.by_name.values())).device
                tensors = [torch.empty(shape, device=device) for shape in shapes]
            else:
                value = value_of(parameter).detach()
                tensors = place.cut.joined(tensor_parts(value), shapes)
            for name, tensor in zip(place.tensors, tensors, strict=True):
                tensor = tensor.contiguous()
                send_from_stage(tensor, self._stages[place.name])
                yield name, tensor

    def blocks(
        self,
        value_of: Callable[[nn.Parameter], Tensor],
        key_of: Callable[[str], str] = str,
        is_included: Callable[[Place], bool] = lambda _: True,
    ) -> Iterator[Block]:
        """What this rank holds of each tensor, as `value_of` its parameter, to be saved as `key_of` its name.
        Copies of the model deal the parameters out among themselves."""
        size, rank = tensor_rank()
        num_copies, copy = copy_rank()
        number = 0
        for place, parameter in self._held():
            if place.is_copy or not is_included(place):
                continue
            number += 1
            value = value_of(parameter).detach()
            shapes = [self._shapes[name] for name in place.tensors]
            blocks = place.cut.blocks(value, shapes, size, rank)
            for name, (offsets, values) in zip(place.tensors, blocks, strict=True):
                if values.numel():
                    shape = tuple(self._shapes[name])
                    yield Block(key_of(name), shape, offsets, values, number % num_copies == copy)

    def _held(self) -> Iterator[tuple[Place, nn.Parameter]]:
        for place in self._places:
            if place.name in self.by_name:
                yield place, self.by_name[place.name]

    def _part(self, place: Place, read: Read) -> Tensor:
        size, rank = tensor_rank()
        return place.cut.part([read(name) for name in place.tensors], size, rank)


def _named(part: DecoderPart) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a part, by names with the number of the layer in the whole model."""
    prefix = "decoder.layers."
    for name, parameter in part.named_parameters():
        if name.startswith(prefix):
            number, rest = name.removeprefix(prefix).split(".", 1)
            name = f"{prefix}{part.decoder.layers[int(number)].layer_number - 1}.{rest}"
        yield name, parameter
