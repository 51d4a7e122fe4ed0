"""What a set of weights consists of, before a tensor is sent. This module imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from turnwise.errors import ModelError, WorkerError, counted

_FLOAT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape of a tensor, its dtype by torch's name (`float32`), and its size."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class WeightManifest:
    """The tensors of a set of weights by name, in the order in which they are sent. `tied` holds the groups
    of names that stand for one tensor: a set that has one of them has all.

    >>> sent = WeightManifest({"embed": TensorSpec((5, 2), "float32", 40)})
    >>> tied = WeightManifest({**sent.tensors, "head": sent.tensors["embed"]}, tied=(("embed", "head"),))
    >>> sent.check_fits(tied, "the server")
    >>> sent.num_bytes
    40
    """

    tensors: Mapping[str, TensorSpec]
    tied: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors.values())

    def as_dtype(self, dtype: str) -> "WeightManifest":
        """The tensors as servers of this dtype (torch's name for it) need them: a tensor of a wider floating
        dtype is narrowed. No tensor is widened, since the server's copy does that.

        >>> sent = WeightManifest({"a": TensorSpec((2,), "float32", 8), "b": TensorSpec((2,), "int64", 16)})
        >>> {name: str(spec) for name, spec in sent.as_dtype("bfloat16").tensors.items()}
        {'a': 'bfloat16 [2]', 'b': 'int64 [2]'}
        """
        width = _FLOAT_BYTES[dtype]
        tensors = dict(self.tensors)
        for name, spec in self.tensors.items():
            own_width = _FLOAT_BYTES.get(spec.dtype, 0)
            if own_width > width:
                tensors[name] = TensorSpec(spec.shape, dtype, spec.num_bytes // own_width * width)
        return replace(self, tensors=tensors)

    def check_fits(self, model: "WeightManifest", server: str) -> None:
        """Raises ModelError unless these weights are those of a server's model: each tensor is one of the
        model's and has its shape, and no tensor of the model is missing. Dtypes may differ, since the server
        converts. `server` names the server in the error."""
        for name, spec in self.tensors.items():
            expected = model.tensors.get(name)
            if expected is not None and expected.shape == spec.shape:
                continue
            there = "no tensor of that name" if expected is None else f"the shape {expected.shape} there"
            raise ModelError(
                f"the trainer's tensor {name} {spec.shape} doesn't fit the model that {server} samples from, "
                f"which has {there}; {_ADVICE}"
            )
        missing = self._missing(model)
        if missing:
            raise ModelError(
                f"the trainer gave no values for {counted(len(missing), 'tensor')} of the model that "
                f"{server} samples from, such as {missing[0]}; {_ADVICE}"
            )

    def check_same(self, name: str, spec: TensorSpec) -> None:
        """Raises WorkerError if a tensor that is being sent isn't as the manifest says."""
        expected = self.tensors.get(name)
        if spec != expected:
            first_spec = expected or "unknown"
            raise WorkerError(
                f"{name} is {spec} now, but it was {first_spec} when the tensors were first sent"
            )

    def _missing(self, model: "WeightManifest") -> list[str]:
        sent = set(self.tensors)
        for names in model.tied:
            if not sent.isdisjoint(names):
                sent.update(names)
        return [name for name in model.tensors if name not in sent]


_ADVICE = "give actor_train and actor_infer the same model_args.model_name_or_path"
