"""Translates the keys of other systems' configs into ours, or answers them with one sentence. "Published
files" are configs of ROLL. The second system is verl; only a few of its keys are translated."""

from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from turnwise.config.problems import Problem
from turnwise.config.published.coming_from import Retired, retired_keys, vocabulary
from turnwise.config.published.second_system import answer_second_system
from turnwise.config.schema.model_args import ROLES, Role
from turnwise.spec import ENVS

MANAGERS = ("train_env_manager", "val_env_manager")
_KINDS = dict.fromkeys(ROLES, "<role>") | dict.fromkeys(MANAGERS, "<manager>")
_VERBATIM = ("env_config", "strategy_config", "pg_args", "tracker_kwargs")


@dataclass
class Translation:
    """A config in our vocabulary, with notes on its translation."""

    raw: dict[str, Any]
    """The config, as yet unvalidated. The translation changes it in place."""
    notes: list[str] = field(default_factory=list)
    """Notes on translated keys."""
    ineffective: list[Problem] = field(default_factory=list)
    """A problem for each known key that has no effect here; a warning, or an error under `--strict`."""
    problems: list[Problem] = field(default_factory=list)
    is_published: bool = False
    """Whether a key occurs that only published files have."""
    unplayed: frozenset[str] = frozenset()
    """Tags of environments that neither manager plays."""

    def refusing(self, problems: list[Problem]) -> list[Problem]:
        """The problems for which the config is refused. A faulty environment that is never played is removed,
        with a note."""
        refusing = []
        for problem in problems:
            tag = str(problem.path[1]) if len(problem.path) > 1 else ""
            if problem.path[:1] == ("custom_envs",) and tag in self.unplayed:
                self.notes.append(
                    f"{problem.key}: {problem.message} It is left out, since no manager's tags name it."
                )
                self.section("custom_envs").pop(tag, None)
            else:
                refusing.append(problem)
        return refusing

    def section(self, *path: str) -> dict[str, Any]:
        """The mapping at a path; if there is none, a new empty one that isn't part of the config."""
        value = self.raw
        for part in path:
            inner = value.get(part)
            if not isinstance(inner, dict):
                return {}
            value = inner
        return value

    def move(self, source: tuple[str, ...], target: tuple[str, ...], value: Any = None) -> None:
        """Moves the source key's value, or `value`, to the target key. Adds a problem if the target has
        another value. The value is lost if a section of the target isn't a mapping, which validation
        refuses."""
        *sections, key = source
        theirs = self.section(*sections).pop(key)
        if value is None:
            value = theirs
        place = self.raw
        for part in target[:-1]:
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
            if not isinstance(place, dict):
                return
        ours = ".".join(target)
        current = place.get(target[-1], value)
        if current != value:
            message = f"says {value!r} and {ours} says {current!r}; keep one of them"
            self.problems.append(Problem(source, message))
        else:
            place[target[-1]] = value
            self.notes.append(f"{'.'.join(source)} is read as {ours}: {value!r}")


def translate(raw: dict[str, Any], top_level: frozenset[str], interpolated: frozenset[str]) -> Translation:
    """Translates a raw config in place. `top_level` are the schema's top-level keys, `interpolated` keys that
    values refer to."""
    translation = Translation(raw)
    translation.unplayed = _unplayed(translation)
    _drop_variables(translation, top_level, interpolated)
    answer_second_system(translation)
    _rename_values(translation)
    _move_keys(translation)
    for manager in MANAGERS:
        _translate_manager(translation, manager)
    for path in _places(translation, "<env>"):
        _translate_env(translation, path)
    _translate_correction(translation)
    _retire(translation, raw, (), "")
    if translation.is_published:
        _answer_idle_sections(translation)
        _read_grpo_of_plain_scores(translation)
    translation.problems = translation.refusing(translation.problems)
    return translation


def _places(translation: Translation, key: str) -> list[tuple[str, ...]]:
    """The paths that a key stands for: `<role>` is every role, and `<env>` every environment whose tag is a
    string."""
    first, *parts = key.split(".")
    heads: list[tuple[str, ...]] = [(first,)]
    if first == "<role>":
        heads = [(role,) for role in ROLES]
    elif first == "<env>":
        tags = [tag for tag in translation.section("custom_envs") if isinstance(tag, str)]
        heads = [("custom_envs", tag) for tag in tags]
    return [(*head, *parts) for head in heads]


def _rename_values(translation: Translation) -> None:
    for key, names in vocabulary()["values"].items():
        for path in _places(translation, key):
            section = translation.section(*path[:-1])
            theirs = section.get(path[-1])
            if isinstance(theirs, str) and theirs in names:
                section[path[-1]] = names[theirs]
                translation.notes.append(f"{'.'.join(path)} {theirs} is read as {names[theirs]}")
    for role in ROLES:
        model = translation.section(role, "model_args")
        for key in ("lora_target", "freeze_module_prefix"):
            names = model.get(key)
            if isinstance(names, str):
                model[key] = [name.strip() for name in names.split(",")]


def _move_keys(translation: Translation) -> None:
    for theirs, ours in vocabulary()["moves"].items():
        targets = cycle(_places(translation, ours))
        for source, target in zip(_places(translation, theirs), targets, strict=False):
            *sections, key = source
            section = translation.section(*sections)
            if section.get(key) is not None:
                translation.move(source, target)
            else:
                section.pop(key, None)  # null means unset


def _unplayed(translation: Translation) -> frozenset[str]:
    train_tags, val_tags = (_tags(translation, manager) for manager in MANAGERS)
    if train_tags is None:
        return frozenset()
    played = {*train_tags, *(val_tags or ())}
    return frozenset(translation.section("custom_envs").keys() - played)


def _tags(translation: Translation, manager: str) -> list[str] | None:
    """The tags that a manager names. None if `tags` is missing, or is neither a name nor a list, which
    validation refuses."""
    names = translation.section(manager).get("tags")
    if isinstance(names, str):
        return [names]
    if not isinstance(names, list):
        return None
    return [name for name in names if isinstance(name, str)]


def _answer_idle_sections(translation: Translation) -> None:
    """Removes settings that published files have even where they do nothing, and notes each: `reference` if
    no KL to it is taken, and a manager's `max_env_num_per_worker` if all its environments have
    `use_thread_lock`."""
    raw = translation.raw
    if "reference" in raw and not raw.get("use_kl_loss") and not raw.get("add_token_level_kl"):
        del raw["reference"]
        translation.notes.append("reference: nothing to do here: no KL is taken to it.")
    tags = list(translation.section("custom_envs"))
    for manager in MANAGERS:
        section = translation.section(manager)
        tags = _tags(translation, manager) or tags
        are_locked = all(translation.section("custom_envs", tag).get("use_thread_lock") for tag in tags)
        if "max_env_num_per_worker" in section and are_locked:
            del section["max_env_num_per_worker"]
            message = (
                "nothing to do here: use_thread_lock lets its environments be called one after the other."
            )
            translation.notes.append(f"{manager}.max_env_num_per_worker: {message}")


def _read_grpo_of_plain_scores(translation: Translation) -> None:
    """Reads `grpo` without normalisation as `reinforce`. In published configs only the normalisation compares
    siblings."""
    normalization = translation.section("reward_normalization")
    is_plain = normalization.get("method") == "identity"
    if normalization.get("norm_mean_type") or normalization.get("norm_std_type"):
        is_plain = False
    if is_plain and translation.raw.get("adv_estimator") == "grpo":
        translation.raw |= {"adv_estimator": "reinforce", "reward_placement": "final"}
        translation.notes.append(
            "adv_estimator grpo with reward_normalization.method identity is read as reinforce with "
            "reward_placement final: scores as they are, on every token"
        )


def _drop_variables(
    translation: Translation,
    top_level: frozenset[str],
    interpolated: frozenset[str],
) -> None:
    for key in list(translation.raw):
        if key in top_level or key in retired_keys():
            continue
        if key in interpolated:
            del translation.raw[key]
        elif key in vocabulary()["variables"]:
            del translation.raw[key]
            translation.notes.append(
                f"{key}: nothing to do here: a variable of the published files that nothing refers to."
            )


def _translate_manager(translation: Translation, manager: str) -> None:
    section = translation.section(manager)
    filter_class = section.get("group_filter_cls")
    if isinstance(filter_class, str):
        if filter_class.startswith("roll."):
            del section["group_filter_cls"]  # ROLL's own class keeps every group
        else:
            module, _, name = filter_class.rpartition(".")
            translation.move((manager, "group_filter_cls"), ("group_filter",), f"{module}:{name}")
    if "max_traj_per_env" in section:
        _check_trajectories(translation, manager, section.pop("max_traj_per_env"))
    for key in Role.model_fields.keys() - {"generating_args"}:
        if key in section:
            del section[key]
            translation.ineffective.append(
                Problem((manager, key), "environments run no model, so this has no effect.")
            )


def _check_trajectories(translation: Translation, manager: str, num_traj: Any) -> None:
    """Adds a problem if the environments of a manager with this `max_traj_per_env` can't fill a batch."""
    section = translation.section(manager)
    batch_key = "rollout_batch_size" if manager == "train_env_manager" else "val_batch_size"
    batch = translation.raw.get(batch_key)
    if not isinstance(num_traj, int) or not isinstance(batch, int) or num_traj <= 0:
        return
    num_envs = 1
    for key in ("num_env_groups", "group_size"):
        size = section.get(key)
        num_envs *= size if isinstance(size, int) else 8
    total = num_traj * num_envs
    if total < batch:
        message = (
            f"{num_envs} environments × {num_traj} = {total} trajectories are less than {batch_key} {batch}; "
            "remove it, environments play as often as the batch needs"
        )
        translation.problems.append(Problem((manager, "max_traj_per_env"), message))


def _translate_env(translation: Translation, path: tuple[str, ...]) -> None:
    env = translation.section(*path)
    manager = env.get("env_manager_cls")
    if isinstance(manager, str):
        translation.is_published = True
        name = manager.rpartition(".")[2]
        managers = vocabulary()["managers"]
        mode, lacking = managers.get(name) or managers[""]
        if lacking:
            translation.problems.append(Problem((*path, "env_manager_cls"), f"{name}: {lacking}"))
            del env["env_manager_cls"]
            if mode:
                env["mode"] = mode
        else:
            translation.move((*path, "env_manager_cls"), (*path, "mode"), mode)
    config = translation.section(*path, "env_config")
    if "action_pattern" in config:
        if "action_pattern" in env:
            del config["action_pattern"]  # the tag's own pattern parses actions
        else:
            translation.move((*path, "env_config", "action_pattern"), (*path, "action_pattern"))
    if str(env.get("env_type")) in ENVS:
        _translate_built_in(translation, path, env, config)


def _translate_built_in(
    translation: Translation, path: tuple[str, ...], env: dict[str, Any], config: dict[str, Any]
) -> None:
    """Drops `env_config` keys that the framework decides on. The smaller of `env_config.max_steps` and
    `max_steps` applies."""
    for key, reason in vocabulary()["built_in_env_config"].items():
        if config.pop(key, None) is not None:
            translation.ineffective.append(Problem((*path, "env_config", key), f"has no effect: {reason}"))
    limit = config.get("max_steps")
    if not isinstance(limit, int):
        return
    del config["max_steps"]
    max_steps = env.get("max_steps", limit)
    if isinstance(max_steps, int):
        env["max_steps"] = min(limit, max_steps)
    if max_steps != limit:
        message = f"max_steps is {max_steps} and env_config.max_steps {limit}; the smaller one holds"
        translation.notes.append(f"{'.'.join(path)}: {message}")


def _translate_correction(translation: Translation) -> None:
    """Refuses importance weights without an upper bound, and translates the filters."""
    path = ("train_infer_correction",)
    section = translation.section(*path)
    weight = translation.section(*path, "is_weight")
    if "upper_bound" in weight and weight["upper_bound"] is None and weight.get("enabled", True):
        message = (
            "null leaves the weights without a bound, and the variance of the loss too; give a "
            "number, such as 2.0"
        )
        translation.problems.append(Problem((*path, "is_weight", "upper_bound"), message))
    bands = section.get("filters")
    if not isinstance(bands, list):
        return
    for index, band in enumerate(bands):
        if isinstance(band, dict):
            _translate_filter(translation, (*path, "filters", index), band)


def _translate_filter(translation: Translation, path: tuple[str | int, ...], band: dict[str, Any]) -> None:
    """Translates a filter. A published one bounds ratios, differences of probabilities, or both; ours bounds
    only ratios."""
    published = {
        key: band.pop(key, None) for key in ("ratio_enabled", "diff_enabled", "diff_low", "diff_high")
    }
    if published["diff_enabled"] and band.get("enabled", True):
        message = (
            "a filter that bounds exp(old) − exp(sampled) isn't supported yet; use ratio_low and ratio_high"
        )
        translation.problems.append(Problem((*path, "diff_enabled"), message))
        return
    for key in ("diff_low", "diff_high"):
        if published[key] is not None:
            translation.ineffective.append(Problem((*path, key), "has no effect: diff_enabled is false."))
    if published["ratio_enabled"] is False:
        band["enabled"] = False
        key = Problem(path, "").key
        translation.notes.append(f"{key}.ratio_enabled is read as {key}.enabled: False")


def _retire(translation: Translation, section: dict[str, Any], path: tuple[str, ...], kind: str) -> None:
    """Removes the retired keys in and below a section, and answers each."""
    for key in list(section):
        here = (*path, key)
        name = f"{kind}.{key}" if kind else key
        value = section[key]
        retired = retired_keys().get(name) or retired_keys().get(f"anywhere.{key}")
        if retired is not None:
            del section[key]
            _answer(translation, retired, here, value)
        elif isinstance(value, dict) and key not in _VERBATIM:
            inner = "<env>" if kind == "custom_envs" else _KINDS.get(key, name)
            _retire(translation, value, here, inner)


def _answer(translation: Translation, retired: Retired, path: tuple[str, ...], value: Any) -> None:
    answer = retired.answer_to(value)
    translation.is_published |= answer != ""
    if answer == "refuse":
        translation.problems.append(Problem(path, retired.reason))
    elif answer == "nothing to do":
        translation.notes.append(f"{Problem(path, '').key}: nothing to do here: {retired.reason}")
    elif answer == "warn":
        translation.ineffective.append(Problem(path, f"has no effect: {retired.reason}"))
