"""Estimates a run's memory and the size of its checkpoints, and finds settings that make its steps faster."""

from turnwise.config.model_shape import BYTES, ModelShape, read_model_shape
from turnwise.config.roles import ModelArgs
from turnwise.config.schema import AgenticConfig
from turnwise.config.sft import SFTConfig
from turnwise.runtime.placement import Placement
from turnwise.spec import MAX_PACKED_BYTES

TRAINED_BYTES = 16
"""Bytes per trained parameter: fp32 weight, gradient and the two moments of Adam."""
_SHORTEST_RESPONSE = 8  # in tokens; a shorter one holds no answer


def smaller_steps(config: AgenticConfig | SFTConfig) -> str:
    """Advice on faster steps: a smaller model and, where this config allows them, overrides that about halve a step's time."""
    changes = _smaller_sft(config) if isinstance(config, SFTConfig) else _smaller(config)
    tried = f"smaller sizes to try: {' '.join(changes)}, or" if changes else "try"
    return f"{tried} a smaller model (docs/how_long.md has measured times)"


def _smaller_sft(config: SFTConfig) -> list[str]:
    sizes, keys = config.training_args.__dict__, ("gradient_accumulation_steps", "per_device_train_batch_size")
    return [f"training_args.{key}={sizes[key] // 2}" for key in keys if sizes[key] > 1][:1]


def _smaller(config: AgenticConfig) -> list[str]:
    manager, changes = config.train_env_manager, []
    num_groups = config.rollout_batch_size // manager.group_size
    if num_groups > 1:
        changes.append(f"rollout_batch_size={num_groups // 2 * manager.group_size}")
    elif manager.group_size >= 4:
        half = manager.group_size // 2
        changes += [f"rollout_batch_size={half}", f"train_env_manager.group_size={half}"]
    for tag in manager.env_tags:
        env, response = config.custom_envs[tag], config.max_new_tokens("train", tag)
        if env.max_steps > 1:
            changes.append(f"custom_envs.{tag}.max_steps={env.max_steps // 2}")
        if response // 2 >= _SHORTEST_RESPONSE:
            changes.append(f"custom_envs.{tag}.max_tokens_per_step={response // 2}")
    return changes


def _critic_shape(config: AgenticConfig, policy: ModelShape) -> ModelShape:
    """The critic's sizes, or the policy's if the critic's aren't known."""
    return read_model_shape(config.critic.model_args.model_name_or_path) or policy


def _num_adapter(arguments: ModelArgs, shape: ModelShape) -> int:
    """Number of parameters of a model's LoRA adapter; 0 without one."""
    return shape.num_lora_parameters(arguments.lora_rank or 0, arguments.lora_target or ["all"])


def checkpoints(config: AgenticConfig, shape: ModelShape) -> str:
    """A text: the size of one checkpoint, and the space on the disk that all kept checkpoints and a new one need together.
    Counts fp32 weights and Adam's two moments, of each trained model or, if it has an adapter, of the adapter only."""
    saved = [(config.actor_train.model_args, shape)]
    if config.needs_critic:
        saved.append((config.critic.model_args, _critic_shape(config, shape)))
    size = 12 * sum(_num_adapter(model, shape) if model.has_adapter else shape.num_parameters for model, shape in saved)
    limit = config.max_ckpt_to_keep
    # A new checkpoint is written before the oldest is deleted.
    total = f", {bytes_text((limit + 1) * size)} while one is written" if limit else ", all kept"
    return f"about {bytes_text(size)} each{total} (max_ckpt_to_keep, save_steps)"


def episodes_at_once(config: AgenticConfig) -> int:
    """Number of training episodes that play at once, including redundant and greedy siblings."""
    manager, has_greedy = config.train_env_manager, "greedy_sibling" in config.estimator.needs
    return manager.num_env_groups * (manager.group_size + manager.group_size_redundancy + has_greedy)


def memory(config: AgenticConfig, shape: ModelShape, placement: Placement) -> str:
    """A run's estimated memory as a text, without activations. A server reads the trainer's weights instead of keeping a copy
    if it is in the trainer's process, is `embedded` or `hf` in fp32, gets every update, and the policy has no adapter."""
    num = shape.num_parameters
    num_servers = placement.num_servers
    policy = config.actor_train.model_args
    parts = [trained_memory(policy, shape) + _ranks(config, placement, "actor_train")]
    if config.needs_critic:
        critic, arguments = _critic_shape(config, shape).num_value_parameters, config.critic.model_args
        adapter = _num_adapter(arguments, _critic_shape(config, shape))
        size = 4 * critic + TRAINED_BYTES * adapter if arguments.has_adapter else TRAINED_BYTES * critic
        parts.append(f"{bytes_text(size)} critic{_ranks(config, placement, 'critic')}")
    if config.needs_reference and not config.is_reference_in_policy:
        parts.append(f"{bytes_text(4 * num)} reference{_ranks(config, placement, 'reference')}")
    dtype, sampler = config.actor_infer.model_args.dtype, config.actor_infer.strategy_args.strategy_name
    are_apart = "actor_train" not in placement.neighbours("actor_infer")
    reads_trainer = sampler in ("embedded", "hf") and dtype == "fp32" and not are_apart and not policy.has_adapter
    if not reads_trainer or config.actor_train.model_update_frequency > 1:
        samplers = "sampler" if num_servers == 1 else f"in {num_servers} samplers"
        parts.append(f"{bytes_text(num_servers * BYTES[dtype] * num)} {samplers}")
    if are_apart:
        parts.append(f"{bytes_text(4 * num)} on the way between processes")
    episodes = episodes_at_once(config)
    kv = shape.kv_bytes_per_token(dtype) * config.sequence_length * episodes
    bound = num_servers * config.kv_cache_bytes if sampler == "embedded" else kv
    parts.append(f"at most {bytes_text(min(kv, bound))} keys and values of {episodes} contexts")
    if bound < kv:
        parts[-1] += f" (kv_cache_bytes; all of them would be {bytes_text(kv)})"
    if sampler == "embedded" and dtype == "fp32" and BYTES[dtype] * num <= MAX_PACKED_BYTES:
        parts.append(f"on a CPU about {bytes_text(num_servers * BYTES[dtype] * num)} weights packed for its kernels")
    return ", ".join(parts) + " (estimated; activations come on top)"


def _ranks(config: AgenticConfig, placement: Placement, role: str) -> str:
    """A text: how the role's memory is spread over its ranks; empty for one rank."""
    size = placement.of(role).size
    is_sharded = config.roles[role].strategy_args.is_sharded
    return "" if size < 2 else f" divided among {size} ranks" if is_sharded else f" on each of {size} ranks"


def trained_memory(arguments: ModelArgs, shape: ModelShape) -> str:
    """A text: the estimated memory of a trained language model, without activations."""
    num, adapter = shape.num_parameters, _num_adapter(arguments, shape)
    if arguments.has_adapter:
        return f"{bytes_text(4 * num)} frozen weights, {bytes_text(TRAINED_BYTES * adapter)} adapters to be trained"
    most = "at most " if arguments.freeze_module_prefix else ""
    return f"{most}{bytes_text(TRAINED_BYTES * num)} weights, gradients, optimiser"


def bytes_text(number: int) -> str:
    """A number of bytes in MB or GB.

    >>> bytes_text(1_500_000), bytes_text(8_000_000_000)
    ('1.5 MB', '8.0 GB')
    """
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
