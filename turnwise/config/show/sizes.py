"""Estimates a run's memory and the size of its checkpoints, and finds settings that make its steps faster."""

from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.model_args import ModelArgs, PlacedModel
from turnwise.config.schema.model_shape import ModelShape
from turnwise.config.schema.sft import SFTConfig
from turnwise.costs.model import BYTES, WEIGHT_BYTES, Sampler, TrainedModel, bytes_text, disk_bytes
from turnwise.runtime.placement import Placement
from turnwise.spec import MAX_PACKED_BYTES

_SHORTEST_RESPONSE = 8  # in tokens; a shorter one holds no answer


def smaller_steps(config: AgenticConfig | SFTConfig) -> str:
    """Advice on faster steps: a smaller model and, where this config allows them, overrides that about halve
    a step's time."""
    changes = _smaller_sft(config) if isinstance(config, SFTConfig) else _smaller(config)
    advice = "try"
    if changes:
        advice = f"smaller sizes to try: {' '.join(changes)}, or"
    return f"{advice} a smaller model (docs/how_long.md has measured times)"


def _smaller_sft(config: SFTConfig) -> list[str]:
    for key in ("gradient_accumulation_steps", "per_device_train_batch_size"):
        size = config.training_args.__dict__[key]
        if size > 1:
            return [f"training_args.{key}={size // 2}"]
    return []


def _smaller(config: AgenticConfig) -> list[str]:
    changes: list[str] = []
    manager = config.train_env_manager
    num_groups = config.rollout_batch_size // manager.group_size
    if num_groups > 1:
        changes.append(f"rollout_batch_size={num_groups // 2 * manager.group_size}")
    elif manager.group_size >= 4:
        half = manager.group_size // 2
        changes += [f"rollout_batch_size={half}", f"train_env_manager.group_size={half}"]
    for tag in manager.env_tags:
        env = config.custom_envs[tag]
        response = config.max_new_tokens("train", tag)
        if env.max_steps > 1:
            changes.append(f"custom_envs.{tag}.max_steps={env.max_steps // 2}")
        if response // 2 >= _SHORTEST_RESPONSE:
            changes.append(f"custom_envs.{tag}.max_tokens_per_step={response // 2}")
    return changes


def critic_shape(config: AgenticConfig, policy: ModelShape) -> ModelShape:
    """The critic's sizes, or the policy's if the critic's aren't known."""
    return config.critic.model_args.shape or policy


def trained_model(arguments: ModelArgs, shape: ModelShape, num_parameters: int) -> TrainedModel:
    """A trained model of `num_parameters`, with the number of its adapter's parameters if it has one."""
    if not arguments.has_adapter:
        return TrainedModel(num_parameters)
    num_adapter = shape.num_lora_parameters(arguments.lora_rank or 0, arguments.lora_target or ["all"])
    return TrainedModel(num_parameters, num_adapter)


def checkpoints(config: AgenticConfig, shape: ModelShape) -> str:
    """A text: the size of one checkpoint, and the space on the disk that all kept checkpoints and a new one
    need together. Counts fp32 weights and Adam's two moments, of each trained model or, if it has an adapter,
    of the adapter only."""
    size = trained_model(config.actor_train.model_args, shape, shape.num_parameters).checkpoint_bytes
    if config.needs_critic:
        sizes = critic_shape(config, shape)
        size += trained_model(config.critic.model_args, sizes, sizes.num_parameters).checkpoint_bytes
    limit = config.max_ckpt_to_keep
    total = ", all kept"
    if limit:
        total = f", {bytes_text(disk_bytes(size, limit))} while one is written"
    return f"about {bytes_text(size)} each{total} (max_ckpt_to_keep, save_steps)"


def episodes_at_once(config: AgenticConfig) -> int:
    """Number of training episodes that play at once, including redundant and greedy siblings."""
    manager = config.train_env_manager
    has_greedy = "greedy_sibling" in config.estimator.needs
    num_siblings = manager.group_size + manager.group_size_redundancy + has_greedy
    return manager.num_env_groups * num_siblings


def keeps_weights(config: AgenticConfig, placement: Placement) -> bool:
    """Whether a server has weights of its own. It reads the trainer's instead if it is in the trainer's
    process, can do so in fp32, gets every update, and the policy has no adapter."""
    is_beside = "actor_train" in placement.neighbours("actor_infer")
    is_fp32 = config.actor_infer.model_args.dtype == "fp32"
    reads_trainer = config.actor_infer.strategy_args.spec.reads_trainer and is_fp32 and is_beside
    has_adapter = config.actor_train.model_args.has_adapter
    return not reads_trainer or has_adapter or config.actor_train.model_update_frequency > 1


def memory(config: AgenticConfig, shape: ModelShape, placement: Placement) -> str:
    """A run's estimated memory as a text, without activations."""
    num_servers = placement.num_servers
    are_apart = "actor_train" not in placement.neighbours("actor_infer")
    copy = bytes_text(WEIGHT_BYTES * shape.num_parameters)
    policy = config.actor_train.model_args
    parts = [trained_memory(policy, shape) + _ranks(config, placement, "actor_train")]
    if config.actor_train.strategy_args.strategy_config.get("sync_gradients") == "last":
        gradient = trained_model(policy, shape, shape.num_parameters).gradient_bytes
        parts.append(f"{bytes_text(gradient)} whole gradient on each rank (sync_gradients)")
    if config.needs_critic:
        sizes = critic_shape(config, shape)
        critic = trained_model(config.critic.model_args, sizes, sizes.num_value_parameters)
        parts.append(
            f"{bytes_text(critic.frozen_bytes + critic.trained_bytes)} "
            f"critic{_ranks(config, placement, 'critic')}"
        )
    if config.needs_reference and not config.is_reference_in_policy:
        parts.append(f"{copy} reference{_ranks(config, placement, 'reference')}")
    dtype = config.actor_infer.model_args.dtype
    sampler = Sampler(shape.num_parameters, dtype, num_servers)
    strategy = config.actor_infer.strategy_args.spec
    if keeps_weights(config, placement):
        names = "sampler"
        if num_servers != 1:
            names = f"in {num_servers} samplers"
        parts.append(f"{bytes_text(sampler.weight_bytes)} {names}")
    if are_apart:
        parts.append(f"{copy} on the way between processes")
    parts.append(_cache(config, shape, sampler))
    is_small = BYTES[dtype] * shape.num_parameters <= MAX_PACKED_BYTES
    if strategy.packs_weights and dtype == "fp32" and is_small:
        parts.append(f"on a CPU about {bytes_text(sampler.weight_bytes)} weights packed for its kernels")
    return ", ".join(parts) + " (estimated; activations come on top)"


def cache_bytes(config: AgenticConfig, shape: ModelShape, sampler: Sampler) -> int:
    """Maximum memory of the keys and values of all servers."""
    num_tokens = config.sequence_length * episodes_at_once(config)
    is_limited = config.actor_infer.strategy_args.spec.limits_cache
    limit = config.kv_cache_bytes if is_limited else None
    return sampler.cache_bytes(shape.kv_bytes_per_token(sampler.dtype) * num_tokens, limit)


def _cache(config: AgenticConfig, shape: ModelShape, sampler: Sampler) -> str:
    """A text: the memory of keys and values."""
    episodes = episodes_at_once(config)
    context_bytes = shape.kv_bytes_per_token(sampler.dtype) * config.sequence_length * episodes
    num_bytes = cache_bytes(config, shape, sampler)
    text = f"at most {bytes_text(num_bytes)} keys and values of {episodes} contexts"
    if num_bytes < context_bytes:
        text += f" (kv_cache_bytes; all of them would be {bytes_text(context_bytes)})"
    return text


def shards(role: PlacedModel, size: int) -> int:
    """Among how many of the `size` ranks of a role its model is divided."""
    strategy = role.strategy_args
    if strategy.spec.divides_layers:
        # Ranks that share a sample's tokens have the same weights.
        return role.tensor_parallel_size * role.pipeline_parallel_size
    if not strategy.is_sharded:
        return 1
    return strategy.strategy_config.get("fsdp_size") or size


def _ranks(config: AgenticConfig, placement: Placement, role: str) -> str:
    """A text: how the role's memory is spread over its ranks; empty for one rank."""
    size = placement.of(role).size
    if size < 2:
        return ""
    strategy = config.roles[role].strategy_args
    if strategy.is_sharded:
        num_shards = shards(config.roles[role], size)
        copies = f", {size // num_shards} times" if num_shards < size else ""
        return f" divided among {num_shards} ranks{copies}"
    return f" on each of {size} ranks"


def trained_memory(arguments: ModelArgs, shape: ModelShape) -> str:
    """A text: the estimated memory of a trained language model, without activations."""
    model = trained_model(arguments, shape, shape.num_parameters)
    trained = bytes_text(model.trained_bytes)
    if arguments.has_adapter:
        return f"{bytes_text(model.frozen_bytes)} frozen weights, {trained} adapters to be trained"
    text = f"{trained} weights, gradients, optimiser"
    if arguments.freeze_module_prefix:
        return f"at most {text}"
    return text
