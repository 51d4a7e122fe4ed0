"""How the tensors of a Hugging Face model lie in Megatron's, where each rank holds a part of each layer, or
some of the layers. This module doesn't import Megatron."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from turnwise.errors import ConfigError

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
VALUE_HEAD = "value_head"
_BODY = "model."


PlacedBlock = tuple[tuple[int, ...], Tensor]
"""Offsets of a block in a tensor, and its values."""


def _rows_at(start: int, rows: Tensor) -> PlacedBlock:
    return (start, *(0 for _ in rows.shape[1:])), rows


class Cut(Protocol):
    """How whole tensors become the part of one tensor-parallel rank, and back."""

    def part(self, tensors: Sequence[Tensor], size: int, rank: int) -> Tensor:
        """The part of rank `rank` of `size`."""
        ...

    def joined(self, parts: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
        """The whole tensors, of these shapes, given the parts of all ranks."""
        ...

    def blocks(self, part: Tensor, shapes: Sequence[torch.Size], size: int, rank: int) -> list[PlacedBlock]:
        """What the part of rank `rank` of `size` holds of each tensor, and where it begins there. No other
        rank's part holds it."""
        ...


class Whole:
    """Every rank has all of the tensor."""

    def part(self, tensors: Sequence[Tensor], size: int, rank: int) -> Tensor:
        return tensors[0]

    def joined(self, parts: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
        return [parts[0]]

    def blocks(self, part: Tensor, shapes: Sequence[torch.Size], size: int, rank: int) -> list[PlacedBlock]:
        """The first rank's."""
        is_first = rank == 0
        return [_rows_at(0, part if is_first else part[:0])]


class Rows:
    """Each rank has as many consecutive rows; rows of zeros make them as many on the last ranks.

    >>> Rows().part([torch.arange(3)[:, None]], 2, 1).flatten().tolist()
    [2, 0]
    """

    def part(self, tensors: Sequence[Tensor], size: int, rank: int) -> Tensor:
        [tensor] = tensors
        each = -(-len(tensor) // size)
        rows = tensor[rank * each : (rank + 1) * each]
        padding = tensor.new_zeros(each - len(rows), *tensor.shape[1:])
        return torch.cat([rows, padding])

    def joined(self, parts: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
        return [torch.cat([*parts])[: shapes[0][0]]]

    def blocks(self, part: Tensor, shapes: Sequence[torch.Size], size: int, rank: int) -> list[PlacedBlock]:
        start = min(rank * len(part), shapes[0][0])
        return [_rows_at(start, part[: shapes[0][0] - start])]


class Columns:
    """Each rank has as many consecutive columns."""

    def part(self, tensors: Sequence[Tensor], size: int, rank: int) -> Tensor:
        return tensors[0].chunk(size, 1)[rank]

    def joined(self, parts: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
        return [torch.cat([*parts], 1)]

    def blocks(self, part: Tensor, shapes: Sequence[torch.Size], size: int, rank: int) -> list[PlacedBlock]:
        return [((0, rank * part.shape[1]), part)]


class Stacked:
    """Each rank has its rows of the first tensor, then those of the second.

    >>> gate, up = torch.tensor([[1], [2]]), torch.tensor([[3], [4]])
    >>> Stacked().part([gate, up], 2, 0).flatten().tolist()
    [1, 3]
    """

    def part(self, tensors: Sequence[Tensor], size: int, rank: int) -> Tensor:
        return torch.cat([tensor.chunk(size)[rank] for tensor in tensors])

    def joined(self, parts: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
        of_ranks = [part.chunk(len(shapes)) for part in parts]
        return [torch.cat([*of_tensor]) for of_tensor in zip(*of_ranks, strict=True)]

    def blocks(self, part: Tensor, shapes: Sequence[torch.Size], size: int, rank: int) -> list[PlacedBlock]:
        return [_rows_at(rank * len(rows), rows) for rows in part.chunk(len(shapes))]


@dataclass(frozen=True, slots=True)
class Grouped:
    """Queries, keys and values: the rows of one key-value head and of the queries that read it lie together,
    and each rank has as many of these groups.

    >>> q, k = torch.tensor([[1], [2], [3], [4]]), torch.tensor([[5], [6]])
    >>> cut = Grouped(num_groups=2)
    >>> part = cut.part([q, k], 2, 1)
    >>> part.flatten().tolist()
    [3, 4, 6]
    >>> [(offsets, rows.flatten().tolist()) for offsets, rows in cut.blocks(part, [q.shape, k.shape], 2, 1)]
    [((2, 0), [3, 4]), ((1, 0), [6])]
    """

    num_groups: int

    def part(self, tensors: Sequence[Tensor], size: int, rank: int) -> Tensor:
        groups = [tensor.unflatten(0, (self.num_groups, -1)) for tensor in tensors]
        return torch.cat(groups, 1).chunk(size)[rank].flatten(0, 1)

    def joined(self, parts: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
        groups = torch.cat([*parts]).unflatten(0, (self.num_groups, -1))
        sizes = [shape[0] // self.num_groups for shape in shapes]
        return [tensor.flatten(0, 1) for tensor in groups.split(sizes, 1)]

    def blocks(self, part: Tensor, shapes: Sequence[torch.Size], size: int, rank: int) -> list[PlacedBlock]:
        groups = part.unflatten(0, (self.num_groups // size, -1))
        sizes = [shape[0] // self.num_groups for shape in shapes]
        of_tensors = [tensor.flatten(0, 1) for tensor in groups.split(sizes, 1)]
        return [_rows_at(rank * len(rows), rows) for rows in of_tensors]


@dataclass(frozen=True, slots=True)
class Place:
    """One parameter of Megatron's and the tensors that it consists of."""

    name: str
    """Megatron's name, with the number of the layer in the whole model."""
    tensors: tuple[str, ...]
    """The parameter names of the Hugging Face model."""
    cut: Cut
    is_copy: bool = False
    """Whether its tensors are in another place too: a tied head on another pipeline stage than the
    embedding."""


def places_of(config: PreTrainedConfig, names: Iterable[str]) -> list[Place]:
    """Where the parameters of a Hugging Face model, by their names, lie in Megatron's. Raises ConfigError for
    names without a place."""
    names = list(names)
    known = set(names)
    places = [
        Place(EMBEDDING, (f"{_BODY}embed_tokens.weight",), Rows()),
        Place("decoder.final_layernorm.weight", (f"{_BODY}norm.weight",), Whole()),
        Place(f"{VALUE_HEAD}.weight", ("score.weight",), Whole()),
        Place(f"{VALUE_HEAD}.bias", ("score.bias",), Whole()),
        Place(HEAD, ("lm_head.weight",), Rows()),
    ]
    for number in range(config.num_hidden_layers):
        places += _layer(number, config.num_key_value_heads)
    present = [place for place in places if known.issuperset(place.tensors)]
    placed = {name for place in present for name in place.tensors}
    if known - placed:
        raise ConfigError(
            f"Megatron's model of a {config.model_type} has no place for the weights "
            f"{', '.join(sorted(known - placed)[:3])}; use fsdp2_train or deepspeed_train"
        )
    is_policy = "score.weight" not in known
    if is_policy and "lm_head.weight" not in known:
        present.append(Place(HEAD, (f"{_BODY}embed_tokens.weight",), Rows(), is_copy=True))
    return present


def _layer(number: int, num_groups: int) -> Iterator[Place]:
    theirs = f"{_BODY}layers.{number}."
    ours = f"decoder.layers.{number}."
    attention = f"{theirs}self_attn."
    yield Place(f"{ours}input_layernorm.weight", (f"{theirs}input_layernorm.weight",), Whole())
    yield Place(f"{ours}pre_mlp_layernorm.weight", (f"{theirs}post_attention_layernorm.weight",), Whole())
    for kind in ("weight", "bias"):
        projections = tuple(f"{attention}{name}_proj.{kind}" for name in "qkv")
        yield Place(f"{ours}self_attention.linear_qkv.{kind}", projections, Grouped(num_groups))
    yield Place(f"{ours}self_attention.linear_proj.weight", (f"{attention}o_proj.weight",), Columns())
    for name in "qk":
        norm = f"{attention}{name}_norm.weight"
        yield Place(f"{ours}self_attention.{name}_layernorm.weight", (norm,), Whole())
    gate_and_up = (f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight")
    yield Place(f"{ours}mlp.linear_fc1.weight", gate_and_up, Stacked())
    yield Place(f"{ours}mlp.linear_fc2.weight", (f"{theirs}mlp.down_proj.weight",), Columns())


def trained_places(places: Sequence[Place], is_trained: Mapping[str, bool]) -> set[str]:
    """Megatron's names of what is trained, given which tensors are. Raises ConfigError if only a part of what
    Megatron keeps together is frozen."""
    trained: set[str] = set()
    for place in places:
        flags = {is_trained[name] for name in place.tensors}
        if len(flags) > 1:
            names = ", ".join(place.tensors)
            raise ConfigError(
                f"model_args.freeze_module_prefix: Megatron keeps {names} as one tensor, so they are frozen "
                "together or not at all"
            )
        if flags == {True}:
            trained.add(place.name)
    return trained
