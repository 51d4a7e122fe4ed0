"""Files and overrides that nobody means: each ends in one sentence with its file and line, and none takes
long."""

from __future__ import annotations

import re

import forked
import pytest
import yaml
from messages import mentions, says

from turnwise.cli.main import main
from turnwise.config import load_any_config, load_config, parse_config
from turnwise.config.read.yaml_text import load_yaml
from turnwise.errors import ConfigError

LAKE = "pretrain: model\ncustom_envs:\n  Lake: {env_type: frozen_lake}\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
REFERENCES = f"pretrain: m\na0: {'x' * 100}\n" + "".join(
    f"a{i}: '{f'${{a{i - 1}}}' * 9}'\n" for i in range(1, 10)
)


def config_command(*arguments):
    """In a process that can be ended: what isn't bounded takes minutes and gigabytes."""
    return forked.run(["config", *arguments], timeout=60)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BOMB, says("own.yaml:6", "100,000", "anchors")),
        (REFERENCES, says("own.yaml", "a5", "100,000")),
        ("pretrain: m\na: &a {b: *a}\n", says("own.yaml:2", "*a", "anchor")),
        ("pretrain: m\na: " + "[" * 5000, says("own.yaml:2", "64")),
        ("\n".join(" " * level + "a:" for level in range(500)), says("own.yaml:65", "64")),
        ("pretrain: m\nexp_name: é\n".encode("latin-1"), says("own.yaml:2", "UTF-8", "0xe9")),
        (LAKE.encode("utf-16"), says("own.yaml:1", "UTF-8", "0xff")),
        (b"pretrain: m\nexp_name: \0\n", says("own.yaml:2", "#x0000")),
        (b"\x7fELF\x02\x01\x01" + bytes(range(256)), "own.yaml:2 isn't UTF-8|own.yaml:1 can't be read"),
        (f"{LAKE}exp_name: {'x' * 2**20}\n", says("own.yaml", "1,048,576 bytes")),
        ("a:\n\tb: 1\n", says("own.yaml:2", "character")),
        (f"{LAKE}seed: {'1' * 6000}\n", says("own.yaml", "limit")),
        (f"{LAKE}output_dir: !!set {{a, b}}\n", says("own.yaml", "supported primitive type")),
        (f"{LAKE}null: 3\n", says("own.yaml", "key type")),
        (f'{LAKE}output_dir: "a\\0b"\n', says("own.yaml:4", "output_dir", "'a\\x00b'", "NUL")),
        (f'{LAKE}output_dir: "\\ud800"\n', says("own.yaml:4", "Unicode")),
        (f"defaults: [own, "
        f"_self_]\n{LAKE}", says("own.yaml", "defaults", "references")),
        ("- a\n- b\n", says("own.yaml", "list", "mapping")),
        ("3\n", says("own.yaml", "mapping")),
    ],
    ids=[
        "bomb", "references", "recursive", "deep", "deep blocks", "latin-1", "utf-16", "nul byte", "binary",
        "long", "tab", "digits", "set", "null key", "nul", "surrogate", "circle", "list", "number",
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_says_where_and_why(content, message, tmp_path, capsys):
    file = tmp_path / "own.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert content not in (BOMB, REFERENCES) or config_command(file).returncode == 2
    assert main(["config", str(file)]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said) and "Traceback" not in said, said[-1000:]


@pytest.mark.parametrize(
    ("defaults", "overrides"),
    [
        ("[big, _self_]", []),
        ("[{env: big}, _self_]", []),
        ("[optional big, _self_]", []),
        ("[_self_]", ["+env=big"]),
    ],
)
def test_files_of_the_defaults_list_and_those_that_overrides_choose_are_bounded_too(
    defaults, overrides, tmp_path
):
    (tmp_path / "env").mkdir()
    for file in (tmp_path / "big.yaml", tmp_path / "env" / "big.yaml"):
        file.write_text(BOMB)
    (tmp_path / "own.yaml").write_text(f"defaults: {defaults}\n{LAKE}")
    done = config_command(tmp_path / "own.yaml", *overrides)
    assert done.returncode == 2 and mentions(done.stderr, "big.yaml:6", "100,000")


def test_anchors_and_references_of_an_ordinary_file_stay(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(
        "pretrain: model\ncustom_envs:\n  A: &lake {env_type: frozen_lake, max_steps: 3}\n  B: *lake\n  "
        "C:\n    <<: *lake\n"
        "    max_steps: ${max_steps}\nmax_steps: 7\n"
    )
    config, _ = load_config(file)
    assert [config.custom_envs[tag].max_steps for tag in "ABC"] == [3, 3, 7]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("=3", says("override '=3'", "key=value")),
        ("=", says("override '='", "key=value")),
        ("seed", says("override 'seed'", "key=value")),
        ("a..b=1", says("override 'a..b=1'", "key=value")),
        (".seed=1", says("override '.seed=1'", "key=value")),
        ("+=x", says("override '+=x'", "key=value")),
        ("~", says("override '~'", "key=value")),
        ("custom_envs={}", says("custom_envs={}", "'~custom_envs'")),
        ("custom_envs.Lake={}", says("custom_envs.Lake={}", "'~custom_envs.Lake'")),
        ("pretrain=", "pretrain: is empty"),
        ("custom_envs.Lake.env_type=", "env_type: is empty"),
        (
            "custom_envs.Lake.env_type=:",
            says("env_type", "':'", "module:Class"),
        ),
        ("custom_envs.Lake.env_type='a b:C'", says("env_type", "'a b:C'", "registry")),
        ("custom_envs.Lake.agent_name='::'", says("agent_name", "'::'", "module:Class")),
        ("pg_variant=':'", says("pg_variant", "':'", "ppo")),
        ("adv_estimator='a:'", says("adv_estimator", "'a:'", "module:Class")),
        (
            "group_filter=':b'",
            says("group_filter", "':b'", "module:function"),
        ),
        ("output_dir=", "output_dir: is empty"),
        ("output_dir=\ud800", r"override 'output_dir=\\ud800' can't be read"),
    ],
)
def test_an_override_that_means_nothing_is_named(override, message, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(LAKE)
    with pytest.raises(ConfigError, match=message):
        load_config(file, [override])


def test_an_override_takes_letters_of_any_alphabet(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(LAKE)
    config, _ = load_config(
        file, ["output_dir=Füße/3é", "exp_name='Wörter, 漢字'", "custom_envs.Über={env_type: frozen_lake}"]
    )
    assert (config.output_dir, config.exp_name) == (
        "Füße/3é",
        "Wörter, 漢字",
    ) and "Über" in config.custom_envs


def test_no_files_are_nothing_to_train_on(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("pretrain: model\ntrain_files: []\n")
    with pytest.raises(ConfigError, match=says("own.yaml:2", "train_files", "[]")):
        load_any_config(file)


@pytest.mark.parametrize(
    "text",
    ["a: !!timestamp 2001-99-99", "a: !!int x", "a: !!binary é", "a: *none", "{[a]: 1}", f"a: {'1' * 6000}"],
)
def test_a_value_that_is_not_what_it_promises_is_a_config_error(text):
    with pytest.raises(ConfigError, match=r"own.yaml can't be read|own.yaml:1"):
        load_yaml(text, "own.yaml")


@pytest.mark.parametrize("loader", [yaml.SafeLoader, yaml.CSafeLoader])
@pytest.mark.parametrize(
    ("text", "line"),
    [("# 漢字\n" * 5 + "a: \0", 6), ("a: 1\nb: [5", 2), ("a: 1\rb: [5\r", 2), ("a: 1\nb: \ud800", 2)],
    ids=ascii,
)
def test_a_fault_has_its_line_with_libyaml_and_without(monkeypatch, loader, text, line):
    monkeypatch.setattr("turnwise.config.read.yaml_text.YAML_LOADER", loader)
    with pytest.raises(ConfigError, match=rf"^own.yaml:{line} can't be read"):
        load_yaml(text, "own.yaml")


@pytest.mark.parametrize("values", [{"output_dir": "\ud800"}, {"\ud800": 1}], ids=["value", "key"])
def test_half_a_surrogate_pair_in_python_is_a_config_error(values):
    with pytest.raises(ConfigError, match=says("NUL", "surrogate")):
        parse_config({"pretrain": "model", **values})


def test_a_folder_and_a_setting_are_no_config(tmp_path):
    (tmp_path / "own.yaml").mkdir()
    with pytest.raises(ConfigError, match=says("own.yaml", "folder", "config file")):
        load_config(tmp_path / "own.yaml")
    with pytest.raises(ConfigError, match=says("KEY=VALUE", "FILE")):
        load_config("seed=3")
