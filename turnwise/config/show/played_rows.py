"""What the table says of what is played: environments, rows, sampling, validation."""

from collections.abc import Iterator
from math import gcd

from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.environments import EnvManager
from turnwise.config.show.settings_table import SettingRow
from turnwise.errors import counted
from turnwise.spec import Split


def environments(config: AgenticConfig, split: Split) -> Iterator[SettingRow]:
    """One row for each environment that a split plays."""
    for tag in config.env_manager(split).env_tags:
        env = config.custom_envs[tag]
        limits = f"at most {counted(env.max_steps, 'action')} of {config.max_new_tokens(split, tag)} tokens"
        yield f"env {tag}", f"{env.env_type} by {env.agent_name}, mode {env.mode}, {limits}"


def data_rows(config: AgenticConfig) -> Iterator[SettingRow]:
    """The data rows that are played, and the rewards of every episode."""
    if config.train_env_manager.has_rows:
        order = "in their order"
        if config.data.curriculum:
            order = "drawn by their success (curriculum)"
        elif config.data.shuffle:
            order = "in a new order each epoch"
        if config.data.num_epochs:
            order += f", {counted(config.data.num_epochs, 'epoch')}"
        agent = f"{config.data.default_agent} unless a row's {config.data.agent_name_key} names another"
        yield "data", f"rows of {', '.join(config.data.train_files or ())}, {order}, by {agent}"
    if config.data.reward:
        rewards = " + ".join(f"{reward.weight:g} × {reward.name}" for reward in config.data.reward)
        if config.data.checkers:
            rewards += f"; answers compared by {', '.join(sorted(config.data.checkers))}"
        yield "rewards", rewards


def sampling(config: AgenticConfig, split: Split) -> str:
    """How tokens are drawn when a split is played."""
    arguments = config.sampling(split)
    if arguments.is_greedy:
        return "greedy"
    text = f"temperature {arguments.temperature:g}"
    if arguments.is_truncated:
        text += f", cut to top_p {arguments.top_p:g}, top_k {arguments.top_k}, min_p {arguments.min_p:g}"
        text += f", repetition_penalty {arguments.repetition_penalty:g}"
    return text


def validation(config: AgenticConfig, num_trajectories: int | None = None) -> str:
    """How a run validates. `num_trajectories`, a validation's size, is known once tasks are built; None =
    val_batch_size."""
    if not config.uses_validation:
        return "never (eval_steps 0)"
    manager = config.val_env_manager
    num_groups = config.val_batch_size // manager.group_size
    few_groups = few_groups_note(manager, num_groups, "in validation, always the same ones")
    size = str(num_trajectories or config.val_batch_size)
    if manager.has_rows and not num_trajectories:
        size = f"at most {size}"
    trajectories = f"{size} trajectories from {tags_text(manager)}{few_groups}"
    parts = [f"every {counted(config.eval_steps, 'step')}, {sampling(config, 'val')}, {trajectories}"]
    if config.save_best:
        parts.append(
            f"the model with the best {config.save_best.metric} ({config.save_best.mode}) goes to best"
        )
    if config.early_stopping:
        parts.append(
            f"{counted(config.early_stopping.patience, 'validation')} without a better one end the run"
        )
    return "; ".join(parts)


def _shares(manager: EnvManager) -> dict[str, int]:
    """Tag → its number of groups in `num_groups_partition`, for tags with at least one."""
    shares = zip(manager.tags, manager.num_groups_partition, strict=True)
    return {tag: share for tag, share in shares if share}


def tags_text(manager: EnvManager) -> str:
    """The tags that are played, with the ratio of their groups if there are several."""
    shares = _shares(manager)
    if len(shares) < 2:
        return ", ".join(shares)
    common = gcd(*shares.values())
    ratio = " : ".join(str(share // common) for share in shares.values())
    return f"{', '.join(shares)} (groups {ratio})"


def few_groups_note(manager: EnvManager, num_groups: int, phase: str) -> str:
    """A note if there are fewer groups than tags, empty otherwise."""
    num_tags = len(_shares(manager))
    if num_groups >= num_tags:
        return ""
    return f"; {num_groups} groups hold at most {num_groups} of the {num_tags} tags {phase}"


def gateway_rows(config: AgenticConfig) -> Iterator[SettingRow]:
    """What is played through the gateway, and what its clients may ask for."""
    if not config.names_gateway:
        return
    agent = config.agent
    arguments = config.gateway
    played = agent.play or " ".join(agent.command or ()) or "what the environments and rows say"
    models = ", ".join(f"{name} {use}" for name, use in agent.models.items()) or "the policy's name"
    port = arguments.port or "free"
    parts = [
        f"{played}, at {arguments.public_url or arguments.host}, port {port}, models: {models}",
        f"at most {counted(arguments.max_requests, 'request')} at once, of {arguments.max_body_mb} MB, with "
        f"{counted(arguments.max_n, 'answer')}",
        f"match {arguments.match}, {agent.grace_s:g} s to end",
    ]
    if agent.command:
        parts.append(f"at most {agent.max_processes or '4 × cores'} commands at once")
    if agent.mistakes:
        parts.append(f"reward {agent.mistake_reward:g} for {', '.join(agent.mistakes)}")
    yield "gateway", "; ".join(parts)
