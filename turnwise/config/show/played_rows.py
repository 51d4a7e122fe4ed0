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
        order = "in a new order each epoch" if config.data.shuffle else "in their order"
        order = "drawn by their success (curriculum)" if config.data.curriculum else order
        often = f", {counted(config.data.num_epochs, 'epoch')}" if config.data.num_epochs else ""
        agent = f"{config.data.default_agent} unless a row's {config.data.agent_name_key} names another"
        yield "data", f"rows of {', '.join(config.data.train_files or ())}, {order}{often}, by {agent}"
    if config.data.reward:
        rewards = " + ".join(f"{reward.weight:g} × {reward.name}" for reward in config.data.reward)
        checkers = ", ".join(sorted(config.data.checkers))
        yield "rewards", f"{rewards}; answers compared by {checkers}" if checkers else rewards


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
    few = few_groups_note(
        manager, config.val_batch_size // manager.group_size, "in validation, always the same ones"
    )
    most = f"{'at most ' * manager.has_rows}{config.val_batch_size}"
    trajectories = f"{num_trajectories or most} trajectories from {tags_text(manager)}{few}"
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
    return {
        tag: share for tag, share in zip(manager.tags, manager.num_groups_partition, strict=True) if share
    }


def tags_text(manager: EnvManager) -> str:
    """The tags that are played, with the ratio of their groups if there are several."""
    shares = _shares(manager)
    if len(shares) < 2:
        return ", ".join(shares)
    common = gcd(*shares.values())
    return f"{', '.join(shares)} (groups {' : '.join(str(share // common) for share in shares.values())})"


def few_groups_note(manager: EnvManager, num_groups: int, where: str) -> str:
    """A note if there are fewer groups than tags, empty otherwise."""
    num_tags = len(_shares(manager))
    return (
        f"; {num_groups} groups hold at most {num_groups} of the {num_tags} tags {where}"
        if num_groups < num_tags
        else ""
    )
