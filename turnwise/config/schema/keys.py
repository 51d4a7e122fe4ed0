"""All keys of one run of reinforcement learning, in one tree, and what follows from them without changing
them."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from turnwise.config.schema.algorithm import AlgorithmKeys
from turnwise.config.schema.environments import Agent, CustomEnv, Data, EnvManager
from turnwise.config.schema.gateway import GatewayArgs, GatewayPlay
from turnwise.config.schema.model_args import ROLES, ActorTrain, GeneratingArgs, Role
from turnwise.config.schema.model_shape import ModelShape
from turnwise.config.schema.running import LimitKeys, RunKeys
from turnwise.config.schema.section import Count, Name, Names, PositiveCount, derived
from turnwise.spec import KV_CACHE_BYTES, OldLogProbs, Split, TokenValue

DEFAULT_MAX_NEW_TOKENS = 128


def _whole(value: Any) -> Any:
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError(f"got {value}; it must be a whole number of batches: 0 (synchronous), 1, 2 …")
        return int(value)
    return value


class AgenticKeys(LimitKeys, AlgorithmKeys, RunKeys):
    """The keys of an `AgenticConfig`, of which those that follow from others may still be unset."""

    max_steps: Count = 200
    """Number of steps, each of which plays a batch and trains on it."""
    show_metrics: Names = Field(default_factory=list)
    """Metrics of the environments (`kept`, `bought` …) that the line of a step and the table of `turnwise
    eval` show too. All metrics stand in metrics.jsonl."""
    render_save_dir: Name | None = None
    """Folder for animated pictures of validation episodes, in its subfolders exp_name/time/step-N; unset = no
    pictures."""
    reward_pretrain: Name = derived()
    """Model of the critic and of the `reward` role [pretrain]."""

    rollout_batch_size: PositiveCount = 64
    """Trajectories per step."""
    val_batch_size: PositiveCount = 128
    """Trajectories per validation."""
    prompt_length: PositiveCount | None = None
    """Together with response_length: sequence_length is the sum of the two, unless it is set itself."""
    response_length: PositiveCount | None = None
    """Together with prompt_length: sequence_length is the sum of the two, unless it is set itself."""
    turn_journal_mb: Count = 0
    """Maximum size in megabytes of turns.jsonl, which records every turn as soon as it is sampled; 0 = no
    such file."""
    record_token_values: list[TokenValue] = Field(default_factory=list)
    """Values of each trained token that rollouts.jsonl gets for `turnwise view`: old (the trainer's log-prob
    before the update), ref (the reference's), entropy. What training doesn't need is computed for it."""
    record_validation: bool = False
    """Write the episodes of validations to val_rollouts.jsonl."""
    async_generation_ratio: Annotated[Count, BeforeValidator(_whole)] = 0
    """Number of batches that may be sampled ahead of training; 0 = synchronous."""

    actor_train: ActorTrain = Field(default_factory=ActorTrain)
    actor_infer: Role = Field(default_factory=Role)
    critic: Role = Field(default_factory=Role)
    reference: Role = Field(default_factory=Role)
    reward: Role = Field(default_factory=Role)

    custom_envs: dict[str, CustomEnv] = Field(default_factory=dict)
    """Environments by tag."""
    train_env_manager: EnvManager = Field(default_factory=EnvManager)
    val_env_manager: EnvManager = Field(default_factory=EnvManager)
    data: Data = Field(default_factory=Data)
    agent: Agent = Field(default_factory=Agent)
    gateway: GatewayArgs = Field(default_factory=GatewayArgs)

    @property
    def roles(self) -> dict[str, Role]:
        """Every role by name, used or not."""
        return {name: self.__dict__[name] for name in ROLES}

    @property
    def active_roles(self) -> dict[str, Role]:
        """The roles that have a model in this run."""
        is_used = {
            "critic": self.needs_critic,
            "reference": self.needs_reference,
            "reward": self.needs_reward_role,
        }
        return {name: role for name, role in self.roles.items() if is_used.get(name, True)}

    @property
    def plays_ahead(self) -> bool:
        """Whether episodes are played while the trainer computes. Samples may then be older than the policy
        that they train."""
        return self.async_generation_ratio > 0

    @property
    def staleness(self) -> str:
        """A text that says by how many steps samples may be older than the policy that they train, with the
        arithmetic."""
        ratio = self.async_generation_ratio
        every = self.actor_train.model_update_frequency
        if every == 1:
            return f"{ratio} steps"
        return f"{ratio + every - 1} steps ({ratio} + model_update_frequency {every} − 1)"

    @property
    def train_sampling(self) -> GeneratingArgs:
        return self.sampling("train")

    @property
    def num_task_versions(self) -> int:
        """Number of curriculum states to keep. A group may still be drawn or restarted with any of these
        newest states."""
        return self.async_generation_ratio + 2

    @property
    def old_log_probs(self) -> OldLogProbs:
        """The source of old log-probs. Samples played ahead need a forward pass unless the sampler's
        log-probs are used."""
        if self.use_rollout_log_probs:
            return "rollouts"
        if self.plays_ahead:
            return "always"
        return "if_needed"

    @property
    def needs_reference(self) -> bool:
        """Whether a KL to the reference is in the reward or in the loss, or its log-probs are recorded."""
        return self.add_token_level_kl or self.use_kl_loss or "ref" in self.record_token_values

    @property
    def is_reference_in_policy(self) -> bool:
        """Whether the policy without its LoRA adapter serves as the reference. Model, dtype and attention
        must be the same."""
        policy = self.actor_train.model_args
        reference = self.reference.model_args
        keys = ("model_name_or_path", "dtype", "attn_implementation")
        is_same = all(policy.__dict__[key] == reference.__dict__[key] for key in keys)
        return policy.has_adapter and is_same

    @property
    def needs_critic(self) -> bool:
        return "values" in self.estimator.needs

    @property
    def needs_reward_model(self) -> bool:
        return any(reward.name == "reward_model" for reward in self.data.reward)

    @property
    def has_own_judge(self) -> bool:
        """Whether a judge without a URL asks the model of the `reward` role."""
        judges = [reward for reward in self.data.reward if reward.name == "judge"]
        return any("base_url" not in judge.args for judge in judges)

    @property
    def needs_reward_role(self) -> bool:
        return self.needs_reward_model or self.has_own_judge

    @property
    def gateway_tags(self) -> list[str]:
        """The environments that agents of the gateway play."""
        return [tag for tag, env in self.custom_envs.items() if env.agent_name == "gateway"]

    @property
    def names_gateway(self) -> bool:
        """Whether environments, or rows that name no agent, are played through the gateway. A row may name
        it too."""
        plays_rows = bool(self.data.train_files) and self.data.default_agent == "gateway"
        return plays_rows or bool(self.gateway_tags)

    @property
    def may_bring_tools(self) -> bool:
        """Whether there may be agents that bring tools of their own."""
        return bool(self.data.train_files or self.gateway_tags)

    def gateway_play(self, arguments: Mapping[str, Any]) -> GatewayPlay:
        """What an agent of the gateway plays: the keys of `agent`, over which `arguments` win."""
        values = {key: self.agent.__dict__[key] for key in GatewayPlay.model_fields}
        return GatewayPlay.model_validate(values | dict(arguments))

    @property
    def uses_validation(self) -> bool:
        return self.eval_steps > 0

    @property
    def is_streamed(self) -> bool:
        """Whether a step trains on each of its groups as soon as the group ends."""
        return self.stream_training and self.plays_ahead

    def env_manager(self, split: Split) -> EnvManager:
        """The section of a split's environments."""
        if split == "train":
            return self.train_env_manager
        return self.val_env_manager

    @property
    def has_unlocked_training(self) -> bool:
        """Whether training plays an environment without `use_thread_lock`."""
        return self._has_unlocked(self.train_env_manager)

    @property
    def has_unlocked_validation(self) -> bool:
        """Whether validation plays an environment without `use_thread_lock`."""
        return self._has_unlocked(self.val_env_manager)

    def _has_unlocked(self, manager: EnvManager) -> bool:
        played = [env for tag, env in self.custom_envs.items() if tag in manager.tags]
        return any(not env.use_thread_lock for env in played)

    @property
    def needs_kept_ids(self) -> bool:
        """Whether servers must return candidate ids: sampling truncates, and sampler's and trainer's
        log-probs are compared."""
        is_compared = self.plays_ahead or self.train_infer_correction or self.use_rollout_log_probs
        return self.train_sampling.keeps_ids and bool(is_compared)

    def sampling(self, split: Split) -> GeneratingArgs:
        """The sampling settings of a split. A key that its environment manager doesn't set comes from
        actor_infer."""
        shared = self.actor_infer.generating_args.model_dump(exclude_unset=True)
        of_split = self.env_manager(split).generating_args.model_dump(exclude_unset=True)
        return GeneratingArgs(**shared | of_split)

    def max_new_tokens(self, split: Split, tag: str) -> int:
        """Maximum response tokens: min(max_new_tokens, max_tokens_per_step); if both are unset, min(128,
        sequence_length)."""
        limits = [self.sampling(split).max_new_tokens]
        if tag in self.custom_envs:
            limits.append(self.custom_envs[tag].max_tokens_per_step)
        default = min(DEFAULT_MAX_NEW_TOKENS, self.sequence_length)
        return min((limit for limit in limits if limit is not None), default=default)

    def num_training_steps(self, role: str) -> int:
        """Pipeline steps in which a role is trained. The policy isn't trained while its critic warms up."""
        if role == "actor_train" and self.needs_critic:
            return max(self.max_steps - self.critic_warmup, 0)
        return self.max_steps

    @property
    def max_samples_per_trajectory(self) -> int:
        """Maximum samples of one training trajectory. A sample is one context: an episode, or in mode step a
        turn."""
        tags = [tag for tag in self.train_env_manager.env_tags if tag in self.custom_envs]
        played = [self.custom_envs[tag] for tag in tags]
        return max((env.max_steps for env in played if env.mode == "step"), default=1)

    def optimizer_steps_per_batch(self, role: str = "actor_train", samples_per_trajectory: int = 1) -> int:
        """A role's optimiser steps per batch. Learning-rate schedules count one sample per trajectory (the
        default)."""
        num_samples = samples_per_trajectory * self.rollout_batch_size
        return self.ppo_epochs * -(-num_samples // self.roles[role].samples_per_optimizer_step)

    @property
    def kv_cache_bytes(self) -> int:
        """Maximum bytes of the embedded server's KV cache."""
        return self.actor_infer.strategy_args.strategy_config.get("kv_cache_bytes", KV_CACHE_BYTES)

    def model_shape(self) -> ModelShape | None:
        """The policy's sizes; None if they can't be read."""
        return self.actor_train.model_args.shape
