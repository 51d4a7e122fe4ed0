"""Finds contradictions and impossible sizes before a model is loaded. Here are the checks that are no single `Rule`."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from typing import Any

from turnwise.config.abilities import lacking_abilities
from turnwise.config.environments import CustomEnv, EnvManager
from turnwise.config.model_shape import PROJECTIONS, read_model_shape
from turnwise.config.place import contradictions
from turnwise.config.problems import Path, Problem
from turnwise.config.resolve import streaming_obstacles
from turnwise.config.roles import ROLES, ModelArgs, PlacedModel, StrategyArgs
from turnwise.config.rules.algorithm import ALGORITHM_RULES, SIBLING_RULES
from turnwise.config.rules.play import PLAY_RULES
from turnwise.config.rules.rule import Rule, refused
from turnwise.config.rules.run import RUN_RULES
from turnwise.config.rules.sft import SFT_RULES
from turnwise.config.schema import AgenticConfig
from turnwise.config.sft import SFTConfig
from turnwise.errors import ModelError, nearest
from turnwise.model_files.folder import check_model
from turnwise.spec import PG_VARIANTS, ROW_AGENTS, ROWS_TAG, STEP_PLACEHOLDERS, STRATEGIES, TRACKERS, TURN_PLACEHOLDERS, Split

AGENTIC_RULES: tuple[Rule[AgenticConfig], ...] = (*PLAY_RULES, *ALGORITHM_RULES, *RUN_RULES)


def find_problems(config: AgenticConfig | SFTConfig) -> list[Problem]:
    """All problems for which the config is refused, except `sibling_problems`."""
    checks = (_environments, _rewards, _sizes, _roles, _cache, _loss, _room, _streaming, _updates, _states)
    shared = [*_models(config), *_trackers(config), *_validations(config)]
    shared += [*contradictions(config), *lacking_abilities(config)]
    if isinstance(config, SFTConfig):
        return [*shared, *refused(SFT_RULES, config), *_placed("", config, ["train"])]
    return [*shared, *refused(AGENTIC_RULES, config), *(problem for check in checks for problem in check(config))]


def named_models(config: AgenticConfig | SFTConfig) -> Iterator[tuple[str, ModelArgs]]:
    """`(key that names the model, model)` for each model of a run. actor_infer is left out: its model is actor_train's."""
    if isinstance(config, SFTConfig):
        roles = {"": config.model_args}
    else:
        roles = {f"{name}.": role.model_args for name, role in config.active_roles.items() if name != "actor_infer"}
    for prefix, model in roles.items():
        is_shared = model.model_name_or_path == config.pretrain
        yield "pretrain" if is_shared else f"{prefix}model_args.model_name_or_path", model


def _models(config: AgenticConfig | SFTConfig) -> Iterator[Problem]:
    """Models that can't be loaded or can't hold a sequence. A missing model is no problem here: it may be downloaded."""
    models = list(named_models(config))
    for key, model in models:
        try:
            check_model(model.model_name_or_path, model.trust)
        except ModelError as error:
            yield Problem.at(key, str(error))
    shape, length = config.model_shape(), config.sequence_length
    if shape and length > shape.context_length:
        most = f"the {shape.context_length} that {models[0][1].model_name_or_path} can hold by its config.json"
        yield Problem.at("sequence_length", f"{length} tokens are {length - shape.context_length} more than {most}")


def _adapters(path: str, model: ModelArgs) -> Iterator[Problem]:
    """LoRA targets that can't have an adapter. If the model's modules aren't known, only the form of names is checked."""
    targets, key = model.lora_target, f"{path}.lora_target"
    if targets == []:
        yield Problem.at(key, "[] leaves nothing to be trained; name linear modules, or leave it out for all")
    elif targets and "all" in targets and len(targets) > 1:
        yield Problem.at(key, f"{', '.join(targets)}: all is every linear module; name it alone")
    for target in targets or ():
        shape = read_model_shape(model.model_name_or_path)
        known = PROJECTIONS if shape and shape.architecture in ("llama", "mistral", "qwen2", "qwen3") else ()
        if not re.fullmatch(r"\w+(\.\w+)*", target):
            yield Problem.at(key, f"{target!r} isn't the name of a module; write a list: [q_proj, v_proj]")
        elif known and target.rpartition(".")[2] not in (*known, "all"):
            names = f"{', '.join(known)}, or all of them (all).{nearest(target, known)}"
            yield Problem.at(key, f"{target!r} isn't a linear module that can get adapters; this model has {names}")


def _trackers(config: AgenticConfig | SFTConfig) -> Iterator[Problem]:
    """Wrong `tracker_kwargs`. They hold arguments by tracker, or directly if only one tracker of `track_with` takes any."""
    takers = [name for name in config.track_with if TRACKERS[name].arguments != {}]
    for key, value in config.tracker_kwargs.items():
        path = ("tracker_kwargs", key)
        if key not in TRACKERS and len(takers) == 1:
            yield from _tracker_argument(takers[0], path, value)
        elif key not in TRACKERS:
            names = " or ".join(takers) or f"no tracker of track_with ({', '.join(config.track_with)})"
            yield Problem(path, f"taken by {names}; write it under its tracker's name, or remove it")
        elif key not in config.track_with:
            yield Problem(path, f"track_with is {', '.join(config.track_with)}; add {key}, or remove this")
        elif not isinstance(value, dict):
            yield Problem(path, f"got {value!r}; the arguments of a tracker are a mapping")
        else:
            for name, argument in value.items():
                yield from _tracker_argument(key, (*path, name), argument)


def _tracker_argument(tracker: str, path: Path, value: object) -> Iterator[Problem]:
    known, name = TRACKERS[tracker].arguments, str(path[-1])
    if known is not None and name not in known:
        yield Problem(path, f"{tracker} takes {', '.join(known) or 'no arguments'}.{nearest(name, known)}")
    elif known is not None and type(value).__name__ != known[name]:
        yield Problem(path, f"got {value!r}; expected a {known[name]}")


def _environments(config: AgenticConfig) -> Iterator[Problem]:
    for tag, env in config.custom_envs.items():
        yield from _templates(tag, env)
    for split in ("train", "val"):
        manager, name = config.env_manager(split), f"{split}_env_manager"
        if split == "train" or manager.is_set("tags"):
            yield from _tags(config, split, manager)
        yield from _partition(manager, name)


def _states(config: AgenticConfig) -> Iterator[Problem]:
    """An estimator that compares states, for rows whose agent sets none."""
    agent = config.data.default_agent
    if config.estimator.needs_state_keys and config.train_env_manager.has_rows and agent in ROW_AGENTS:
        yield Problem.at(
            "adv_estimator",
            f"{config.adv_estimator} compares turns that were taken in the same state, and {agent} sets no Turn.state_key; "
            "take grpo, or name an agent loop of yours that sets it in data.default_agent: module:Class",
        )


def _tags(config: AgenticConfig, split: Split, manager: EnvManager) -> Iterator[Problem]:
    key, known = f"{split}_env_manager.tags", ", ".join(config.custom_envs) or "none"
    if config.custom_envs and not manager.tags:
        yield Problem.at(key, f"[] leaves nothing to play; name some of {known}, or leave it out for all")
    files = config.data.train_files if split == "train" else config.data.val_files
    if manager.has_rows and ROWS_TAG not in config.custom_envs and not files:
        yield Problem.at(key, f"{ROWS_TAG!r} is the tag of rows, and there are no data.{split}_files; name some")
    for tag in manager.env_tags:
        if tag not in config.custom_envs:
            yield Problem.at(key, f"{tag!r} isn't a tag of custom_envs ({known}).{nearest(tag, config.custom_envs)}")


def _rewards(config: AgenticConfig) -> Iterator[Problem]:
    for index, reward in enumerate(config.data.reward):
        if reward.name == "reward_model" and reward.args:
            yield Problem(("data", "reward", index, "args"), "reward_model takes no args; the section `reward` configures it")
    for name, count in Counter(reward.name for reward in config.data.reward).items():
        if count > 1:
            yield Problem.at("data.reward", f"{name} is listed {count} times; give it once, with the sum of its weights")


def _templates(tag: str, env: CustomEnv) -> Iterator[Problem]:
    """Placeholders of `agent_template` that the environment's mode doesn't have, and unpaired braces."""
    path = ("custom_envs", tag, "agent_template")
    allowed = TURN_PLACEHOLDERS if env.mode == "trajectory" else TURN_PLACEHOLDERS + STEP_PLACEHOLDERS
    try:
        names = [name for _, name, _, _ in Formatter().parse(env.agent_template) if name is not None]
    except ValueError as error:
        yield Problem(path, f"{error}; write a brace that is part of the text twice")
        return
    for name in names:
        if name not in allowed:
            known = " ".join(f"{{{placeholder}}}" for placeholder in allowed)
            hint = f" {{{name}}} needs mode: step." if name in STEP_PLACEHOLDERS else nearest(name, allowed)
            yield Problem(path, f"{{{name}}} isn't a placeholder of mode {env.mode}; it has {known}.{hint}")


def _partition(manager: EnvManager, name: str) -> Iterator[Problem]:
    parts, tags, key = manager.num_groups_partition, manager.tags, f"{name}.num_groups_partition"
    if tags and len(parts) != len(tags):
        yield Problem.at(key, f"{len(parts)} numbers for {len(tags)} tags: {tags}")
    elif tags and sum(parts) != manager.num_env_groups:
        total = " + ".join(str(part) for part in parts)
        yield Problem.at(key, f"{total} = {sum(parts)}, but num_env_groups is {manager.num_env_groups}; make them equal")


def _sizes(config: AgenticConfig) -> Iterator[Problem]:
    keys: dict[Split, str] = {"train": "rollout_batch_size", "val": "val_batch_size"}
    for split, key in keys.items():
        batch = config.__dict__[key]
        if split == "val" and not config.uses_validation and not config.is_set("val_batch_size"):
            continue
        size = config.env_manager(split).group_size
        if batch % size:
            groups, rest = divmod(batch, size)
            near = f"{groups * size} or {(groups + 1) * size}" if groups else str(size)
            message = f"{batch} trajectories don't split into groups of {size} ({batch} = {groups} × {size} + {rest})"
            yield Problem.at(key, f"{message}; use {near}, or another {split}_env_manager.group_size")
    if not config.is_set("sequence_length") and (config.prompt_length is None) != (config.response_length is None):
        given, missing = ("prompt_length", "response_length") if config.prompt_length else ("response_length", "prompt_length")
        yield Problem.at(given, f"sequence_length is prompt_length + response_length; set {missing} too, or sequence_length")


def _roles(config: AgenticConfig) -> Iterator[Problem]:
    for name, role in config.roles.items():
        yield from _placed(f"{name}.", role, ROLES[name]["kinds"], name in config.active_roles)
    trained, sampled = (role.model_args.model_name_or_path for role in (config.actor_train, config.actor_infer))
    if sampled != trained:
        yield Problem.at(
            "actor_infer.model_args.model_name_or_path",
            f"{sampled} isn't the model that is trained, actor_train.model_args.model_name_or_path {trained}; actor_infer "
            "samples from the trained weights, so remove it here",
        )
    if config.needs_critic and config.critic_warmup >= max(config.max_steps, 1):
        message = f"the first {config.critic_warmup} steps train only the critic, and max_steps is {config.max_steps}"
        yield Problem.at("critic_warmup", f"{message}: the actor would never be trained; use at most {config.max_steps - 1}")


def _placed(prefix: str, role: PlacedModel, kinds: Sequence[str], is_active: bool = True) -> Iterator[Problem]:
    """Problems of one role. Its strategy must be of one of the `kinds`."""
    strategy = role.strategy_args.strategy_name
    if STRATEGIES[strategy].kind not in kinds:
        allowed = ", ".join(name for name, spec in STRATEGIES.items() if spec.kind in kinds)
        message = f"{strategy} can't do this role's work; use one of {allowed}"
        yield Problem.at(f"{prefix}strategy_args.strategy_name", message)
    yield from _options(f"{prefix}strategy_args", role.strategy_args, is_active)
    if is_active and "train" in kinds:
        yield from _adapters(f"{prefix}model_args", role.model_args)
        rate = role.training_args.learning_rate
        if role.training_args.lr_scheduler_type == "polynomial" and rate <= 1e-7:
            message = f"{rate:g} isn't above 1e-07, where lr_scheduler_type polynomial ends; raise it, or take linear"
            yield Problem.at(f"{prefix}training_args.learning_rate", message)
    if role.device_mapping is not None and len(role.device_mapping) % role.model_parallel_size:
        yield Problem.at(
            f"{prefix}device_mapping",
            f"{len(role.device_mapping)} devices don't hold whole copies of the model on tensor × pipeline parallel "
            f"{role.model_parallel_size} devices each",
        )


def _options(path: str, strategy_args: StrategyArgs, is_active: bool) -> Iterator[Problem]:
    name, section = strategy_args.strategy_name, f"{path}.strategy_config"
    known, elsewhere = STRATEGIES[name].options, STRATEGIES[name].set_elsewhere
    for option in strategy_args.strategy_config:
        if option in elsewhere:
            message = f"{name} gets it from the run's other settings (model, dtype, batch, length, …); leave it out"
            yield Problem.at(f"{section}.{option}", message)
        if known is not None and option not in known and is_active:
            message = f"{name} has no such option (it has: {', '.join(known) or 'none'}).{nearest(option, known)}"
            yield Problem.at(f"{section}.{option}", message)
    given = strategy_args.strategy_config if name == "sglang" else {}
    if "url" in given and not re.match(r"https?://[^/\s]", str(given["url"])):
        yield Problem.at(f"{section}.url", f"got {given['url']!r}; it must be like http://localhost:30000")
    if "url" in given and len(given) > 1:
        others = ", ".join(given.keys() - {"url"})
        yield Problem.at(f"{section}.url", f"that server has its options already; leave out {others}")
    if "port" in given and (type(given["port"]) is not int or not 0 < given["port"] < 2**16):
        yield Problem.at(f"{section}.port", f"got {given['port']!r}; a port is a whole number from 1 to 65,535")


def _cache(config: AgenticConfig) -> Iterator[Problem]:
    strategy, shape = config.actor_infer.strategy_args, config.model_shape()
    if not strategy.spec.limits_cache or shape is None:
        return
    token, length = shape.kv_bytes_per_token(config.actor_infer.model_args.dtype), config.sequence_length
    if config.kv_cache_bytes < token * length:
        yield Problem.at(
            "actor_infer.strategy_args.strategy_config.kv_cache_bytes",
            f"{config.kv_cache_bytes:,} can't hold one sequence: {token:,} bytes per token × sequence_length {length:,} = "
            f"{token * length:,}; raise it, or lower sequence_length",
        )


def sibling_problems(config: AgenticConfig | SFTConfig) -> Iterator[Problem]:
    """Settings that compare siblings, if training groups have one episode. A config with such settings can only be played."""
    if isinstance(config, SFTConfig) or config.train_env_manager.group_size > 1:
        return
    normalization, estimator = config.reward_normalization, config.estimator
    centres_groups = normalization.grouping == "traj_group_id" and "group" in normalization.statistics
    if estimator.compares_siblings and (estimator.normalization == "own" or centres_groups):
        message = f"1 leaves every advantage of {config.adv_estimator} at 0, since it compares siblings; use at least 2"
        if estimator.has_step_returns:
            message = f"1 leaves {config.adv_estimator} no siblings with whose turns a turn could be compared; use at least 2"
        yield Problem.at("train_env_manager.group_size", message)
    yield from refused(SIBLING_RULES, config)


def _loss(config: AgenticConfig) -> Iterator[Problem]:
    allowed = config.variant.parameters
    if config.pg_variant in PG_VARIANTS:
        for name in config.pg_args:
            if name not in allowed:
                known = ", ".join(allowed) or "none"
                message = f"pg_variant {config.pg_variant} has no such parameter (it has: {known}).{nearest(name, allowed)}"
                yield Problem(("pg_args", name), message)
            elif message := _wrong_parameter(name, config.pg_args):
                yield Problem(("pg_args", name), message)
    if refusal := config.variant.ratio_refusal(config.pg_variant, config.ratio_type):
        yield Problem.at("ratio_type", f"{config.ratio_type}: {refusal}")
    correction = config.train_infer_correction
    for index, band in enumerate(correction.filters if correction else ()):
        if band.ratio_low >= band.ratio_high:
            path = ("train_infer_correction", "filters", index)
            yield Problem(path, f"ratio_low {band.ratio_low} isn't below ratio_high {band.ratio_high}")


def _wrong_parameter(name: str, given: Mapping[str, Any]) -> str:
    """Why a built-in loss can't take the value that the parameter `name` has in `given`; empty if it can."""
    value = given[name]
    if name == "dual_clip" and value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        return f"got {value!r}; expected a number that isn't negative"
    if name.startswith("tau_") and value == 0:
        return "0 isn't a temperature, since it divides the loss"
    if name == "dual_clip" and value <= 1:
        return f"{value} would bound losses that no ratio has moved yet; use more than 1 (3 is usual), or dual_clip_loss: false"
    if name == "fraction" and value > 1:
        return f"{value} isn't a share of the tokens; use at most 1"
    if name == "cap" and value == 0:
        return "0 takes the weight, and with it the loss, from every token"
    if name == "covariance_low" and not _wrong_parameter("covariance_high", given) and value >= given["covariance_high"]:
        return f"{value} isn't below covariance_high {given['covariance_high']}, so that no token could be chosen"
    return ""


def _room(config: AgenticConfig) -> Iterator[Problem]:
    """Limits of responses, set by the user, that leave no room for a prompt in the context."""
    for tag in config.train_env_manager.env_tags:
        if tag in config.custom_envs and (limit := config.max_new_tokens("train", tag)) >= config.sequence_length:
            message = f"{limit} tokens of one response leave no room for a prompt in a sequence_length of"
            of_tag = config.custom_envs[tag].max_tokens_per_step == limit
            keys = [f"{role}.generating_args.max_new_tokens" for role in ("train_env_manager", "actor_infer")]
            path: list[Path] = [("custom_envs", tag, "max_tokens_per_step")] if of_tag else []
            path += [tuple(key.split(".")) for key in keys if config.is_set(key)]
            if path:
                yield Problem(path[0], f"{message} {config.sequence_length}")


def _streaming(config: AgenticConfig) -> Iterator[Problem]:
    for obstacle in streaming_obstacles(config) if config.is_streamed else ():
        yield Problem.at("stream_training", f"true trains on the groups of a step as they end, but {obstacle}; leave it out")


def _validations(config: AgenticConfig | SFTConfig) -> Iterator[Problem]:
    """Metrics of `save_best` and `early_stopping` that no validation measures."""
    start, known = "val/", "those begin with val/, such as val/score/mean"
    if isinstance(config, SFTConfig):
        start, known = "sft/val_loss", "fine-tuning has one, sft/val_loss"
    for key, section in (("save_best", config.save_best), ("early_stopping", config.early_stopping)):
        if section is not None and not section.metric.startswith(start):
            yield Problem.at(f"{key}.metric", f"{section.metric!r} isn't a validation metric; {known}")


def _updates(config: AgenticConfig) -> Iterator[Problem]:
    """Refuses `save_best` if validations fall between weight updates, `deterministic` if checkpoints do or threads are used."""
    every, updated = config.eval_steps, config.actor_train.model_update_frequency
    if config.save_best is not None and every % updated:
        yield Problem.at(
            "save_best",
            f"validations every eval_steps {every} play older weights than the trainer's, which are sent every "
            f"model_update_frequency {updated} steps; make eval_steps a multiple of that",
        )
    if config.deterministic and config.save_steps % updated:
        message = f"{config.save_steps} isn't a multiple of actor_train.model_update_frequency {updated}"
        yield Problem.at("save_steps", f"{message}: a resumed run would sample from other weights (deterministic: true)")
    for tag, env in config.custom_envs.items():
        if config.deterministic and env.use_thread_lock:
            message = "threads answer in any order, which deterministic: true forbids; leave it out"
            yield Problem(("custom_envs", tag, "use_thread_lock"), message)
