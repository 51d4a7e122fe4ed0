"""Turns YAML files and overrides into one plain dictionary by Hydra's compose. Hydra is imported only when a
file is read."""

import re
import warnings
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.config.read.yaml_text import (
    display,
    load_yaml,
    read_yaml,
    require_bounded,
    require_bounded_references,
)
from turnwise.errors import ConfigError, nearest

_REFERENCE = re.compile(r"(?<!\\)\$\{\s*([A-Za-z_][\w-]*)(?=[.\[}\s])")
_LETTER, _NUMBER = re.compile(r"[\u0080-\ud7ff\ue000-\U0010ffff]"), re.compile(r"letter_([0-9a-f]{2,6})_")


@dataclass(frozen=True, slots=True)
class Composed:
    """A config whose defaults lists are merged, overrides applied and interpolations (`${key}`) resolved."""

    values: dict[str, Any]
    interpolated: frozenset[str]
    """Top-level keys that a value refers to."""
    files: tuple[Path, ...] = ()
    """The files that the config file includes at its top level, then the config file."""


def compose(path: Path, overrides: Sequence[str] = ()) -> Composed:
    """Reads a YAML file with Hydra's defaults lists, interpolations and overrides. Unlike in Hydra,
    `key=value` also sets a key that the file leaves out. Raises ConfigError if there is no such file, or it
    can't be composed."""
    if not path.is_file():
        raise ConfigError(_missing_file(path))
    if path.suffix != ".yaml":
        raise ConfigError(f"{path}: a config's file name ends in .yaml (Hydra composes nothing else)")
    from hydra import compose as hydra_compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    folder = path.resolve().parent
    files = _readable_files(path, folder, overrides)
    of_hydra = [override for override in overrides if _shapes_the_defaults(override, folder)]
    try:
        with warnings.catch_warnings():
            # Silences Hydra's notice that `_self_` is missing: it is meant to be last, as in every published
            # file.
            warnings.filterwarnings("ignore", message=r"(?s).*Defaults list is missing `_self_`")
            with initialize_config_dir(str(folder), version_base="1.3"):
                tree = hydra_compose(path.stem, overrides=of_hydra)
        for override in overrides:
            if override not in of_hydra:
                _assign(tree, override)
        written = OmegaConf.to_container(tree, resolve=False)
        require_bounded_references(written, str(path))
        values = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except ConfigError:
        raise
    except (
        HydraException,
        OmegaConfBaseException,
        YAMLError,
        ValueError,
        TypeError,
        RecursionError,
        OSError,
    ) as error:
        cause = str(error) or str(error.__cause__ or type(error).__name__)
        if isinstance(error, RecursionError):
            cause = "its defaults or references lead back to themselves; name each file once"
        elif isinstance(error, OSError):  # OmegaConf's error for a file that holds a single number or a yes
            cause = f"{cause}; a config is a mapping of keys"
        raise ConfigError(f"{display(path)} can't be read: {_in_one_line(cause)}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds a {type(values).__name__} at its top level; a config is a mapping of keys"
        )
    return Composed(
        {str(key): value for key, value in values.items()}, frozenset(_REFERENCE.findall(str(written))), files
    )


def find_config(config_path: str, config_name: str, script_folder: Path | None = None) -> Path:
    """The YAML file of a folder and a name, the two arguments of ROLL's start scripts. A relative folder is
    looked for in the working directory, then in the script's folder, since shell scripts give only the last
    part of the folder's path. Raises ConfigError, which names the places that were tried, if there is no such
    file."""
    name = config_name if config_name.endswith(".yaml") else f"{config_name}.yaml"
    bases = [Path.cwd()] if script_folder is None else [Path.cwd(), script_folder]
    places = [base / config_path / name for base in bases]
    for place in places:
        if place.is_file():
            return place
    tried = " and ".join(str(place) for place in dict.fromkeys(places))
    raise ConfigError(f"there is no config {config_name!r} in {config_path!r}; looked for {tried}")


def _readable_files(path: Path, folder: Path, overrides: Sequence[str]) -> tuple[Path, ...]:
    """Checks every file that Hydra will read: Hydra limits no sizes, and its errors name no lines. Returns
    `Composed.files`."""
    waiting, seen, folders, outermost = [path], set(), {folder}, {path: None}
    for override in overrides:
        key, separator, value = override.lstrip("+~").partition("=")
        if not all(key.split(".")) or not (separator or override.startswith("~")):
            raise ConfigError(
                f"override {override!r} names no key; it is written key=value, or section.key=value"
            )
        if _shapes_the_defaults(override, folder):
            waiting.append(folder / key.partition("@")[0] / f"{value}.yaml")
    while waiting:
        file = waiting.pop()
        if file in seen or (file != path and not file.is_file()):
            continue
        seen.add(file)
        text, name = read_yaml(file, display(file)), display(file)
        if text.lstrip().startswith(("- ", "[")):
            raise ConfigError(f"{name} holds a list at its top level; a config is a mapping of keys")
        if "defaults" not in text and "searchpath" not in text:
            require_bounded(text, name)
            continue
        content = load_yaml(text, name)
        if file == path:
            folders |= _searched(content)
        for group, option in _included(content.get("defaults") if isinstance(content, dict) else None):
            found = [(base / group / f"{option}.yaml").resolve() for base in {file.parent, *folders}]
            waiting += found
            if not group and file in outermost:
                outermost |= dict.fromkeys(filter(Path.is_file, found))
    return tuple(reversed(outermost))


def _searched(content: Any) -> set[Path]:
    """The folders of a config's `hydra.searchpath`, where Hydra also looks for files."""
    hydra = content.get("hydra") if isinstance(content, dict) else None
    names = hydra.get("searchpath") if isinstance(hydra, dict) else None
    return {Path(str(name).removeprefix("file://")) for name in names} if isinstance(names, list) else set()


def _included(defaults: Any) -> Iterator[tuple[str, str]]:
    """`(group, option)` for each entry of a defaults list; the group of a plain name is empty."""
    for item in defaults if isinstance(defaults, list) else ():
        for group, options in item.items() if isinstance(item, dict) else [("", item)]:
            for option in options if isinstance(options, list) else [options]:
                plain = [
                    re.sub(r"^((optional|override) )*/?|@.*$", "", str(name)) for name in (group, option)
                ]
                yield plain[0], plain[1]


def _shapes_the_defaults(override: str, folder: Path) -> bool:
    """Whether an override deletes a key (`~key`) or chooses a file of a config group. Only Hydra's compose
    can do these."""
    key = override.partition("=")[0].lstrip("+")
    return key.startswith("~") or "/" in key or "@" in key or (folder / key).is_dir()


def _assign(tree: Any, override: str) -> None:
    """Parses an override by Hydra's grammar, and sets its value in the composed tree. If a section around the
    key is an interpolation, a copy of its target replaces it first. Hydra's own override would leave only
    this key in the section."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    try:
        parsed = OverridesParser.create().parse_override(
            _LETTER.sub(lambda letter: f"letter_{ord(letter[0]):x}_", override)
        )
    except HydraException as error:
        hint = "an override is key=value; quote a value that holds brackets or commas: 'key=\"value\"'"
        raise ConfigError(
            f"override {override!r} can't be read ({_in_one_line(str(error))}); {hint}"
        ) from None
    if parsed.is_sweep_override():
        raise ConfigError(
            f"override {override!r} holds several values; a run takes one (a list is written key=[1,2])"
        )
    key, value = _with_letters(parsed.key_or_group), _with_letters(parsed.value())
    section: Any = tree
    for part in key.split(".")[:-1]:
        if not OmegaConf.is_dict(section) or part not in section:
            break
        if OmegaConf.is_interpolation(section, part):
            OmegaConf.update(section, part, deepcopy(section[part]), merge=False)
        section = section[part]
    if value == {} and OmegaConf.select(tree, key):
        raise ConfigError(
            f"override {override!r} adds nothing to the section that is there; '~{key}' removes it"
        )
    OmegaConf.update(tree, key, value, force_add=True)


def _with_letters(value: Any) -> Any:
    """Puts back the non-ASCII letters that `_assign` has replaced by code points, since Hydra's grammar
    refuses them."""
    if isinstance(value, dict):
        return {_with_letters(key): _with_letters(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_letters(item) for item in value]
    return _NUMBER.sub(lambda number: chr(int(number[1], 16)), value) if isinstance(value, str) else value


def _missing_file(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a folder; name a config file in it"
    if "=" in path.name:
        return f"there is no config file {path}; KEY=VALUE comes after FILE"
    siblings = sorted(file.name for file in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    return f"there is no config file {path}.{nearest(path.name, siblings)}"


def _in_one_line(message: str) -> str:
    return " ".join(line.strip() for line in message.splitlines()[:6] if line.strip())
