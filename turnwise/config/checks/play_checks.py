"""Checks of what is played: environments, rows and their rewards, and the sizes of groups and responses."""

from collections import Counter
from collections.abc import Iterator
from string import Formatter

from turnwise.config.problems import Path, Problem
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.environments import CustomEnv, EnvManager
from turnwise.errors import nearest
from turnwise.spec import ROW_AGENTS, ROWS_TAG, STEP_PLACEHOLDERS, TURN_PLACEHOLDERS, Split


def environment_problems(config: AgenticConfig) -> Iterator[Problem]:
    for tag, env in config.custom_envs.items():
        yield from _templates(tag, env)
        yield from _gateway(tag, env)
    for split in ("train", "val"):
        manager = config.env_manager(split)
        if split == "train" or manager.is_set("tags"):
            yield from _tags(config, split, manager)
        yield from _partition(manager, f"{split}_env_manager")


def _tags(config: AgenticConfig, split: Split, manager: EnvManager) -> Iterator[Problem]:
    key = f"{split}_env_manager.tags"
    tags = ", ".join(config.custom_envs) or "none"
    if config.custom_envs and not manager.tags:
        yield Problem.at(key, f"[] leaves nothing to play; name some of {tags}, or remove it for all")
    files = config.data.train_files
    if split == "val":
        files = config.data.val_files
    if manager.has_rows and ROWS_TAG not in config.custom_envs and not files:
        yield Problem.at(
            key, f"{ROWS_TAG!r} is the tag of rows, and there are no data.{split}_files; name some"
        )
    for tag in manager.env_tags:
        if tag not in config.custom_envs:
            yield Problem.at(
                key, f"{tag!r} isn't a tag of custom_envs ({tags}).{nearest(tag, config.custom_envs)}"
            )


def _templates(tag: str, env: CustomEnv) -> Iterator[Problem]:
    """Placeholders of `agent_template` that the environment's mode doesn't have, and unpaired braces."""
    path = ("custom_envs", tag, "agent_template")
    allowed: tuple[str, ...] = TURN_PLACEHOLDERS
    if env.mode != "trajectory":
        allowed = TURN_PLACEHOLDERS + STEP_PLACEHOLDERS
    try:
        fields = list(Formatter().parse(env.agent_template))
    except ValueError as error:
        yield Problem(path, f"{error}; write a brace that is part of the text twice")
        return
    for _, name, format_spec, conversion in fields:
        if name is None:
            continue
        if name in allowed and (format_spec or conversion):
            yield Problem(path, f"{{{name}}} has a format; write the placeholder without one")
        if name not in allowed:
            placeholders = " ".join(f"{{{placeholder}}}" for placeholder in allowed)
            hint = nearest(name, allowed)
            if name in STEP_PLACEHOLDERS:
                hint = f" {{{name}}} needs mode: step."
            yield Problem(
                path, f"{{{name}}} isn't a placeholder of mode {env.mode}; it has {placeholders}.{hint}"
            )


def _gateway(tag: str, env: CustomEnv) -> Iterator[Problem]:
    """Keys of an environment that contradict its agent."""
    if env.agent_name != "gateway":
        if env.agent_args:
            message = f"{env.agent_name} takes none; they are for agent_name: gateway"
            yield Problem(("custom_envs", tag, "agent_args"), message)
    elif env.mode == "step":
        yield Problem(
            ("custom_envs", tag, "mode"),
            "step isn't for agent_name: gateway, whose agent makes its own prompts; use trajectory",
        )


def _partition(manager: EnvManager, name: str) -> Iterator[Problem]:
    parts = manager.num_groups_partition
    tags = manager.tags
    key = f"{name}.num_groups_partition"
    if tags and len(parts) != len(tags):
        yield Problem.at(key, f"{len(parts)} numbers for {len(tags)} tags: {tags}")
    elif tags and sum(parts) != manager.num_env_groups:
        total = " + ".join(str(part) for part in parts)
        yield Problem.at(
            key, f"{total} = {sum(parts)}, but num_env_groups is {manager.num_env_groups}; make them equal"
        )


def reward_problems(config: AgenticConfig) -> Iterator[Problem]:
    for index, reward in enumerate(config.data.reward):
        if reward.name == "reward_model" and reward.args:
            yield Problem(
                ("data", "reward", index, "args"),
                "reward_model takes no args; the section `reward` configures it",
            )
    for name, count in Counter(reward.name for reward in config.data.reward).items():
        if count > 1:
            yield Problem.at(
                "data.reward", f"{name} is listed {count} times; give it once, with the sum of its weights"
            )


def state_problems(config: AgenticConfig) -> Iterator[Problem]:
    """An estimator that compares states, for rows whose agent sets none."""
    agent = config.data.default_agent
    if config.estimator.needs_state_keys and config.names_gateway:
        yield Problem.at(
            "adv_estimator",
            f"{config.adv_estimator} compares turns that were taken in the same state, and agents of the "
            "gateway show none; use grpo",
        )
    elif config.estimator.needs_state_keys and config.train_env_manager.has_rows and agent in ROW_AGENTS:
        yield Problem.at(
            "adv_estimator",
            f"{config.adv_estimator} compares turns that were taken in the same state, and {agent} sets no "
            "Turn.state_key; use grpo, or name an agent loop of yours that sets it in data.default_agent: "
            "module:Class",
        )


def size_problems(config: AgenticConfig) -> Iterator[Problem]:
    """Batches that don't split into groups, and half of a sequence length."""
    keys: dict[Split, str] = {"train": "rollout_batch_size", "val": "val_batch_size"}
    for split, key in keys.items():
        batch = config.__dict__[key]
        if split == "val" and not config.uses_validation and not config.is_set("val_batch_size"):
            continue
        size = config.env_manager(split).group_size
        if batch % size == 0:
            continue
        groups, remainder = divmod(batch, size)
        near = str(size)
        if groups:
            near = f"{groups * size} or {(groups + 1) * size}"
        message = (
            f"{batch} trajectories don't split into groups of {size} ({batch} = {groups} × {size} + "
            f"{remainder})"
        )
        yield Problem.at(key, f"{message}; use {near}, or another {split}_env_manager.group_size")
    if config.is_set("sequence_length"):
        return
    if config.prompt_length and not config.response_length:
        yield _half_length("prompt_length", "response_length")
    if config.response_length and not config.prompt_length:
        yield _half_length("response_length", "prompt_length")


def _half_length(key: str, missing: str) -> Problem:
    return Problem.at(
        key, f"sequence_length is prompt_length + response_length; set {missing} too, or sequence_length"
    )


def room_problems(config: AgenticConfig) -> Iterator[Problem]:
    """Limits of responses, set by the user, that leave no room for a prompt in the context."""
    for tag in config.train_env_manager.env_tags:
        if tag not in config.custom_envs:
            continue
        limit = config.max_new_tokens("train", tag)
        if limit < config.sequence_length:
            continue
        path = next(_paths_of_limit(config, tag, limit), None)
        if path is not None:
            message = f"{limit} tokens of one response leave no room for a prompt in a sequence_length of"
            yield Problem(path, f"{message} {config.sequence_length}")


def _paths_of_limit(config: AgenticConfig, tag: str, limit: int) -> Iterator[Path]:
    """Where the user has set the limit of an environment's responses."""
    if config.custom_envs[tag].max_tokens_per_step == limit:
        yield ("custom_envs", tag, "max_tokens_per_step")
    for role in ("train_env_manager", "actor_infer"):
        key = f"{role}.generating_args.max_new_tokens"
        if config.is_set(key):
            yield tuple(key.split("."))
