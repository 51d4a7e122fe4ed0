"""What the keys of an `AgenticConfig` need in order to have an effect."""

from turnwise.config.checks.rules.cluster import OF_CLUSTER, WITHOUT_RAY, may_use_ray
from turnwise.config.checks.rules.rule import Requirement
from turnwise.config.place import follows
from turnwise.config.schema.agentic import AgenticConfig

_LOCKED = "its environments have use_thread_lock, which allows one call at a time"


def _disables_weights(config: AgenticConfig) -> bool:
    correction = config.train_infer_correction
    if correction is None or correction.is_weight is None:
        return False
    return not correction.is_weight.enabled


def _has_tools(config: AgenticConfig) -> bool:
    agent = config.agent
    return bool(agent.tools or agent.tool_config_path or agent.function_tool_path)


def _may_play_graphs(config: AgenticConfig) -> bool:
    """Whether an agent of rows may be a graph, or a loop of the user's own."""
    agent = config.data.default_agent
    return (
        bool(config.agent.graph or config.agent.agent_config_path) or agent == "react_agent" or ":" in agent
    )


def _may_call_tools(config: AgenticConfig) -> bool:
    """Whether an agent of rows may call tools: those of the config, or its own."""
    return _has_tools(config) or _may_play_graphs(config)


def _may_play_gateway(config: AgenticConfig) -> bool:
    """Whether something is played through the gateway, or a row or an entry of a file may name it."""
    return config.names_gateway or bool(config.data.train_files)


def _has_own_play(config: AgenticConfig) -> bool:
    """Whether an environment or an entry of a file says itself what the gateway's agent plays."""
    has_own = any(config.custom_envs[tag].agent_args for tag in config.gateway_tags)
    return has_own or bool(config.agent.agent_config_path)


def _has_play(config: AgenticConfig) -> bool:
    return bool(config.agent.play or config.agent.command) or _has_own_play(config)


def _has_users(config: AgenticConfig) -> bool:
    return bool(config.agent.interaction_config_path)


REQUIREMENTS: tuple[Requirement[AgenticConfig], ...] = (
    *OF_CLUSTER,
    Requirement(("deadlines.node_s",), needs=may_use_ray, reason=WITHOUT_RAY),
    Requirement(
        ("pg_clip_low", "pg_clip_high"),
        needs=lambda c: c.use_pg_clip_range,
        reason="needs use_pg_clip_range: true",
    ),
    Requirement(
        ("pg_clip",),
        needs=lambda c: not (c.use_pg_clip_range and c.pg_clip_low and c.pg_clip_high),
        reason="use_pg_clip_range takes pg_clip_low and pg_clip_high instead",
    ),
    Requirement(
        ("pg_clip", "use_pg_clip_range"),
        needs=lambda c: "clip_low" in c.variant.parameters,
        reason="this pg_variant has no such clip; its parameters are in pg_args",
    ),
    Requirement(
        ("dual_clip_loss",),
        needs=lambda c: "dual_clip" in c.variant.parameters,
        reason="this pg_variant has no dual clip; its parameters are in pg_args",
    ),
    Requirement(
        (
            "train_infer_correction.is_weight.weight_type",
            "train_infer_correction.is_weight.upper_bound",
        ),
        needs=lambda c: not _disables_weights(c),
        reason="train_infer_correction.is_weight.enabled is false",
    ),
    Requirement(
        ("lambd", "gae_granularity", "bootstrap_on_truncation"),
        needs=lambda c: c.estimator.has_td_errors,
        reason="this adv_estimator takes no temporal differences; gae does",
    ),
    Requirement(
        ("value_clip", "critic_warmup", "critic"),
        needs=lambda c: c.needs_critic or c.estimator.is_own,
        reason="this adv_estimator has no critic",
    ),
    Requirement(
        ("reward_pretrain",),
        needs=lambda c: c.needs_critic or c.estimator.is_own or c.needs_reward_role,
        reason="it is the model of the critic and of the reward role, and there is neither",
    ),
    Requirement(
        ("gamma",),
        needs=lambda c: c.estimator.discounts,
        reason="this adv_estimator discounts nothing by gamma",
    ),
    Requirement(
        ("step_reward_gamma",),
        needs=lambda c: c.estimator.has_step_returns,
        reason="this adv_estimator has no step returns",
    ),
    Requirement(
        ("step_reward_gamma",),
        needs=lambda c: c.step_reward_weight or not c.estimator.mixes_step_advantages or c.estimator.is_own,
        reason="step_reward_weight is 0",
    ),
    Requirement(
        ("whiten_advantages",),
        needs=lambda c: not c.estimator.whitens_advantages,
        reason="this adv_estimator always whitens advantages",
    ),
    Requirement(
        ("episode_reward_weight", "step_reward_weight"),
        needs=lambda c: c.estimator.mixes_step_advantages,
        reason="this adv_estimator adds no step advantages to the episode's; gigpo does",
    ),
    Requirement(
        ("reward_normalization.grouping",),
        needs=lambda c: "group" in c.reward_normalization.statistics or c.estimator.is_own,
        reason="neither mean nor deviation is taken over groups",
    ),
    Requirement(
        ("reward_placement", "whiten_rewards"),
        needs=lambda c: c.estimator.reward_placement != "score" or c.estimator.is_own,
        reason="this adv_estimator works on whole scores",
    ),
    Requirement(
        ("init_kl_coef", "kl_penalty"),
        needs=lambda c: c.add_token_level_kl,
        reason="the KL is in the reward with add_token_level_kl",
    ),
    Requirement(
        ("target_kl",),
        needs=lambda c: c.add_token_level_kl,
        reason="it adapts init_kl_coef, which add_token_level_kl uses",
    ),
    Requirement(
        ("kl_horizon",),
        needs=lambda c: c.target_kl,
        reason="needs target_kl",
    ),
    Requirement(
        ("target_entropy",),
        needs=lambda c: c.entropy_loss_coef,
        reason="it scales the bonus of entropy_loss_coef, which is 0",
    ),
    Requirement(
        ("kl_loss_coef", "kl_loss_type"),
        needs=lambda c: c.use_kl_loss,
        reason="needs use_kl_loss: true",
    ),
    Requirement(
        ("reference",),
        needs=lambda c: c.needs_reference,
        reason="no KL to it is taken; set use_kl_loss, add_token_level_kl or record_token_values: [ref]",
    ),
    Requirement(
        ("record_validation",),
        needs=lambda c: c.uses_validation,
        reason="nothing is validated; set eval_steps",
    ),
    Requirement(
        ("max_refill_factor",),
        needs=lambda c: c.group_filter,
        reason="needs group_filter",
    ),
    Requirement(
        ("prompt_length", "response_length"),
        needs=lambda c: not c.departs("sequence_length"),
        reason="sequence_length is set",
    ),
    Requirement(
        (
            "stale_groups",
            "stream_training",
            "on_weight_update",
            "cpu_split",
        ),
        needs=lambda c: c.plays_ahead,
        reason="training is synchronous",
    ),
    Requirement(
        (
            "data.val_files",
            "data.format",
            "data.on_bad_row",
            "data.prompt_key",
            "data.agent_name_key",
            "data.default_agent",
            "data.max_prompt_length",
            "data.shuffle",
        ),
        needs=lambda c: c.data.train_files,
        reason="there are no data.train_files",
    ),
    Requirement(
        (
            "agent.tools",
            "agent.tool_config_path",
            "agent.function_tool_path",
            "agent.interaction_config_path",
            "agent.agent_config_path",
            "agent.graph",
            "agent.max_parallel_calls",
            "agent.max_tool_response_length",
            "agent.tool_response_truncate_side",
            "agent.tool_timeout_s",
            "agent.max_user_turns",
        ),
        needs=lambda c: c.data.train_files,
        reason="there are no data.train_files, whose rows agents play",
    ),
    Requirement(
        ("agent.tool_parser", "agent.max_assistant_turns", "agent.play", "agent.command"),
        needs=_may_play_gateway,
        reason="there are no data.train_files, whose rows agents play, and no agent_name is gateway",
    ),
    Requirement(
        (
            "agent.environment",
            "agent.max_processes",
        ),
        needs=lambda c: c.agent.command or _has_own_play(c),
        reason="there is no agent.command",
    ),
    Requirement(
        (
            "agent.models",
            "agent.grace_s",
            "gateway.host",
            "gateway.port",
            "gateway.public_url",
            "gateway.max_requests",
            "gateway.max_n",
            "gateway.max_body_mb",
        ),
        needs=lambda c: _may_play_gateway(c) and _has_play(c),
        reason="nothing is played through the gateway; agent.play or agent.command says what",
    ),
    Requirement(
        (
            "agent.mistakes",
            "agent.mistake_reward",
            "gateway.match",
            "gateway.strict",
            "gateway.client_temperature",
        ),
        needs=lambda c: _may_play_gateway(c) and (_has_play(c) or _may_play_graphs(c)),
        reason="nothing is played through the gateway (agent.play, agent.command), and nothing names a graph",
    ),
    Requirement(
        ("agent.tool_parser",),
        needs=lambda c: not c.data.train_files or _may_call_tools(c) or _has_play(c),
        reason="nothing names tools",
    ),
    Requirement(
        (
            "agent.max_parallel_calls",
            "agent.max_tool_response_length",
            "agent.tool_response_truncate_side",
        ),
        needs=lambda c: not c.data.train_files or _may_call_tools(c),
        reason="nothing names tools",
    ),
    Requirement(
        ("agent.tool_timeout_s",),
        needs=lambda c: not c.data.train_files or _may_call_tools(c) or _has_users(c),
        reason="nothing names tools or simulated users",
    ),
    Requirement(
        ("agent.max_assistant_turns",),
        needs=lambda c: not c.data.train_files or _may_call_tools(c) or _has_users(c) or _has_play(c),
        reason="nothing names tools or simulated users",
    ),
    Requirement(
        ("agent.max_user_turns",),
        needs=lambda c: not c.data.train_files or _has_users(c),
        reason="no file names simulated users",
    ),
    Requirement(
        ("data.shuffle",),
        needs=lambda c: not c.data.curriculum,
        reason="data.curriculum draws the rows",
    ),
    Requirement(
        ("train_env_manager.num_groups_partition",),
        needs=lambda c: not c.data.curriculum,
        reason="data.curriculum draws the tags",
    ),
    Requirement(
        ("data.curriculum",),
        needs=lambda c: c.data.train_files or len(c.train_env_manager.tags) > 1,
        reason="a single environment has no other task to prefer",
    ),
    Requirement(
        ("data.reward_timeout_s",),
        needs=lambda c: c.data.reward,
        reason="there is no data.reward",
    ),
    Requirement(
        ("data.checker",),
        needs=lambda c: c.data.checkers,
        reason="no reward of data.reward compares mathematical answers",
    ),
    Requirement(
        ("reward",),
        needs=lambda c: c.needs_reward_role,
        reason="data.reward names no reward_model, and no judge without base_url",
    ),
    Requirement(
        ("trace.token2text", "trace.max_samples_per_step", "trace.max_mb", "trace.max_pending_mb"),
        needs=lambda c: c.trace.backend,
        reason="needs trace.backend",
    ),
    Requirement(
        ("trace.max_mb",),
        needs=lambda c: c.trace.backend != "mlflow",
        reason="it bounds traces.jsonl, and trace.backend is mlflow",
    ),
    Requirement(
        ("train_env_manager.max_env_num_per_worker",),
        needs=lambda c: c.has_unlocked_training,
        reason=_LOCKED,
    ),
    Requirement(
        ("val_env_manager.max_env_num_per_worker",),
        needs=lambda c: c.has_unlocked_validation,
        reason=_LOCKED,
    ),
    Requirement(
        ("actor_infer.device_mapping",),
        needs=lambda c: follows(c, "actor_infer.device_mapping"),
        reason="the servers are on the first training device",
    ),
    Requirement(
        ("reference.device_mapping",),
        needs=lambda c: not c.is_reference_in_policy,
        reason="the reference is in the policy",
    ),
    Requirement(
        ("reward.device_mapping",),
        needs=lambda c: may_use_ray(c) or len(c.reward.device_mapping or ()) > 1,
        reason="without Ray it is on the device of a server in this process",
    ),
    Requirement(
        ("num_gpus_per_node",),
        needs=lambda c: follows(c, "num_gpus_per_node"),
        reason="no device_mapping names a slot",
    ),
)
