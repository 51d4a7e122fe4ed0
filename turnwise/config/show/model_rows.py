"""What the table says of a model, its role and its optimiser."""

from collections.abc import Sequence

from turnwise.config.schema.model_args import Role, TrainingArgs
from turnwise.config.schema.model_shape import ModelShape
from turnwise.model_files.folder import base_of_adapter, folder_here
from turnwise.model_files.hub import looks_like_hub_name
from turnwise.runtime.placement import Placement
from turnwise.spec import STRATEGIES

IN_POLICY = "the policy's own weights with the adapter off"


def start_of(path: str) -> str:
    """A model's folder or hub name; for an adapter also its base model."""
    base = base_of_adapter(path)
    return path if base is None else f"{path}, an adapter merged into {base}"


def model_text(path: str, shape: ModelShape | None) -> str:
    if shape is None:
        found = "not a folder here, so its size isn't known"
        if folder_here(path):
            found = "a shape that this table doesn't know"
        elif looks_like_hub_name(path):
            found = "not on this machine: train downloads it from the hub"
        return f"{path} ({found})"
    size = shape.num_parameters
    shown = f"{size / 1e9:.2f} B" if size >= 1e9 else f"{size / 1e6:.2f} M"
    return f"{start_of(path)}: {shape.architecture}, {shown} parameters, context {shape.context_length}"


def role_place(name: str, role: Role, placement: Placement) -> str:
    """The devices of a role that names some, else its process."""
    if not role.device_mapping or f"{name}.device_mapping" in placement.unused_keys:
        is_apart = placement.trains_apart and name in placement.roles
        return "in the trainer's process" if is_apart else "in this process"
    placed = placement.of(name)
    numbers = _numbers(placed.devices)
    if len(placed.devices) == 1:
        return f"device {numbers}"
    if name in placement.roles:
        return f"a process for each of devices {numbers}"
    if placed.size == len(placed.devices):
        return f"a server for each of devices {numbers}"
    groups = (", ".join(map(str, devices)) for devices in placed.ranks)
    return f"a server on devices {' and one on '.join(groups)}"


def _numbers(devices: Sequence[int]) -> str:
    """A text: `0–7` for a run of three or more."""
    is_run = [*devices] == [*range(devices[0], devices[-1] + 1)] and len(devices) > 2
    return f"{devices[0]}–{devices[-1]}" if is_run else ", ".join(map(str, devices))


def role_text(role: Role, where: str) -> str:
    kind = STRATEGIES[role.strategy_args.strategy_name].kind
    arguments = role.model_args
    parts = [
        role.strategy_args.strategy_name,
        where,
        arguments.dtype,
        f"attention {arguments.attn_implementation}",
    ]
    if kind == "train" and arguments.lora_rank is not None:
        parts.append(f"LoRA rank {arguments.lora_rank}")
    if kind == "train" and arguments.freeze_module_prefix:
        parts.append(f"frozen: {', '.join(arguments.freeze_module_prefix)}")
    return ", ".join(parts)


def optimizer_text(arguments: TrainingArgs, max_grad_norm: float) -> str:
    is_share = arguments.warmup_ratio and not arguments.warmup_steps
    warmup = f"{arguments.warmup_ratio:.0%} of all" if is_share else str(arguments.warmup_steps)
    return (
        f"AdamW at {arguments.learning_rate:g}, {arguments.lr_scheduler_type}, warm-up {warmup} steps, "
        f"weight decay {arguments.weight_decay:g}, gradients clipped to norm {max_grad_norm:g}"
    )
