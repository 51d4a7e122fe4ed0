"""What `train` refuses without a model, `config`, `rollout` and `eval` refuse in the same words; no folder is
made."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest
from messages import mentions, says

from turnwise.cli.main import main
from turnwise.config import load_config
from turnwise.errors import ConfigError, install_hint
from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.inference.hf_server import HFServer
from turnwise.spec import STRATEGIES

CONFIG = """\
pretrain: MODEL
output_dir: runs
actor_train: {model_args: {lora_rank: 4}}
custom_envs:
  Lake: {env_type: frozen_lake}
"""
OWN = """\
import time
from turnwise.envs.base import TextEnv

class Env(TextEnv):
    def __init__(self, depth):
        if depth == "hang":
            while True: time.sleep(0.01)
        if depth == "exit":
            raise SystemExit(0)
        if depth < 0:
            raise ValueError("depth is negative")

    def reset(self, *, seed=None): ...

    def step(self, action): ...

class NoEnv: ...

class Agent:
    def __init__(self, make_env): ...

class NoAgent:
    def __init__(self, make_env, settings): ...

class Estimator:
    def __init__(self, settings, kl_ctrl):
        self.needs = frozenset()

class Unready:
    def __init__(self, settings, kl_ctrl):
        raise KeyError("lambda")

def loss(inputs, *, clip): ...

def keep(group, other): ...
"""
ENV, OWN_ENV = "custom_envs.Lake.env_config", "custom_envs.Lake.env_type=own_parts:Env"
QUICK = "{env_step_timeout_s: 0.2}"
FILTERS = [
    (["group_filter=own_parts:Env"], says("group_filter", "'own_parts:Env'", "function 'Env'")),
    (["group_filter=own_parts:keep"], says("group_filter", "'own_parts:keep'", "'other'")),
]
ALGORITHMS = [
    (["pg_variant=nowhere:loss"], says("module 'nowhere'", "path")),
    (
        ["pg_variant=own_parts:los"],
        says("own_parts", "'los'", "'loss'"),
    ),
    (["pg_variant=own_parts:loss"], says("'clip'", "loss(inputs)")),
    (["adv_estimator=own_parts:keep"], says("adv_estimator", "'own_parts:keep'", "class 'keep'")),
    (
        ["adv_estimator=own_parts:Unready"],
        says("adv_estimator", "own_parts:Unready", "KeyError: 'lambda'"),
    ),
    (
        ["adv_estimator=own_parts:Estimator"],
        says("adv_estimator", "own_parts:Estimator", "loss, value_loss, running, credit"),
    ),
]
ENVIRONMENTS = [
    (
        ["custom_envs.Lake.agent_name=own_parts:Agent"],
        says("agent_name", "own_parts:Agent", "constructor"),
    ),
    (
        ["custom_envs.Lake.agent_name=tool_agent"],
        says("agent_name", "tool_agent", "data.train_files"),
    ),
    (
        ["custom_envs.Lake.encode_special_tokens=false", "custom_envs.Lake.agent_name=own_parts:NoAgent"],
        says("agent_name", "own_parts:NoAgent", "`run`"),
    ),
    ([f"{ENV}.size=-4"], "FrozenLake: got size -4"),
    ([f"{ENV}.siz=4"], says("argument", "'siz'")),
    (
        [f"{ENV}.render_mode=rgb_array"],
        says("observations", "pictures"),
    ),
    (
        ["custom_envs.Lake.env_type=own_parts:NoEnv"],
        says("env_type", "NoEnv", "reset, step"),
    ),
    (["custom_envs.Lake.env_type=own_parts:loss"], says("own_parts", "class 'loss'")),
    ([OWN_ENV], says("env_config", "'own_parts:Env'", "'depth'")),
    (
        [OWN_ENV, f"{ENV}.depth=-1"],
        says("env_config", "ValueError", "depth is negative"),
    ),
    ([OWN_ENV, f"{ENV}.depth=exit"], says("env_config", "sys.exit(0)")),
    (
        [OWN_ENV, f"{ENV}.depth=hang", f"train_env_manager={QUICK}", f"val_env_manager={QUICK}"],
        "env_step_timeout_s",
    ),
]
ADAPTERS = [
    (["actor_train.model_args.lora_target='.*proj'"], says("'.*proj'", "module", "list")),
    (
        ["actor_train.model_args.lora_target=[q_proj,lm_head]"],
        says("'lm_head'", "linear module"),
    ),
    (
        ["actor_train.model_args.lora_target=[self_attn.q_pro]"],
        says("'self_attn.q_pro'", "linear module"),
    ),
]
NAMES = [
    (["pg_variant=os:path"], says("pg_variant", "'os:path'", "Python itself")),
    (
        ["custom_envs.Lake.env_type=subprocess:call"],
        says("env_type", "'subprocess:call'", "Python itself"),
    ),
    (["group_filter=os:path"], says("group_filter", "'os:path'", "Python itself")),
    (["adv_estimator=os:path"], says("adv_estimator", "'os:path'", "Python itself")),
]
OPTIONS = [
    (
        ["actor_infer.strategy_args.strategy_config.kv_cache_byte=1"],
        says("embedded", "option", "max_concurrency"),
    ),
]
BATCHES = [NAMES, *zip_longest(FILTERS, ALGORITHMS, ENVIRONMENTS), *zip_longest(ADAPTERS, OPTIONS)]
"""Faults of settings that are judged apart: one config has them all."""


@pytest.fixture
def config(folder, tiny_model):
    (folder / "own_parts.py").write_text(OWN)
    (folder / "own.yaml").write_text(CONFIG.replace("MODEL", str(tiny_model)))
    return "own.yaml"


@pytest.fixture
def both_refuse(refused, folder):
    """`config` and a verb that trains refuse the arguments with these messages, and make no folder."""

    def check(message, *words, verb="train", also=""):
        for name in ("config", verb):
            said = refused(name, *words)
            assert re.search(message, said) and also in said
        assert not (folder / "runs").exists()

    return check


def write_rows(*rows):
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("number", range(len(BATCHES)))
def test_what_train_refuses_config_refuses(number, config, tmp_path, refused):
    faults = [fault for fault in BATCHES[number] if fault]
    words = [override for overrides, _ in faults for override in overrides]
    # The other two read a config as train does: one fault of each kind is enough.
    verbs = (
        ("train", "config", "rollout", "eval") if number in (0, 1, len(BATCHES) - 1) else ("train", "config")
    )
    said = [refused(verb, config, *words).splitlines() for verb in verbs]
    for overrides, message in faults:
        line = next((line for line in said[0] if re.search(message, line)), "")
        assert any(f"override {override!r}: " in line for override in overrides), said[0]
    # A deadline's stack follows: of a call in the verb.
    assert len({tuple(lines[: 1 + len(faults)]) for lines in said}) == 1, said
    assert not (tmp_path / "runs").exists() and not (tmp_path / "rollouts.jsonl").exists()


LACKING = [
    {
        "pretrain=nowhere": says("pretrain", "nowhere", "model folder"),
        "output_dir=taken/runs": says("output_dir", "taken/runs/own", "written"),
        "logging_dir=taken": says("logging_dir", "taken", "written"),
        "actor_train.model_args.attn_implementation=fa2": says("fa2", "flash-attn", "CUDA"),
    },
    {
        "pretrain=org/none-such": says("pretrain", "org/none-such", "HF_HUB_OFFLINE"),
        "output_dir=taken": says("output_dir", "taken/own", "written"),
        "checkpoint_config.output_dir=taken/x": says("checkpoint_config.output_dir", "taken/x", "written"),
        "actor_infer.strategy_args={strategy_name: vllm, strategy_config: {url: u}}": (
            says("vllm", "library")
        ),
    },
    {
        "pretrain=untold": says("pretrain", "untold", "tokenizer.json"),
        "output_dir=/proc/runs": says("output_dir", "/proc/runs/own", "No such file or directory"),
        "render_save_dir=taken/x": says("render_save_dir", "taken/x", "written"),
        "eval_steps=1": "",
    },
    {
        "pretrain=weightless": says("pretrain", "weightless", "model.safetensors"),
        "reference.model_args.model_name_or_path=./x": says("reference.model_args.model_name_or_path", "x"),
        "use_kl_loss=true": "",
    },
    {"resume_from_checkpoint=nowhere": says("resume_from_checkpoint", "nowhere", "no checkpoint")},
    {"cluster.name=launched": says("launcher", "torchrun, accelerate")},
    {"actor_train.device_mapping=[99]": says("actor_train.device_mapping", "device 99")},
    {"actor_infer.device_mapping=[0,99]": says("actor_infer.device_mapping", "device 99")},
    {
        "reference.device_mapping=[99]": says("reference.device_mapping", "device 99"),
        "use_kl_loss=true": "",
    },
]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("faults", LACKING, ids=lambda faults: next(iter(faults)))
def test_what_train_refuses_on_this_machine_config_says(
    faults, config, tmp_path, tiny_model, capsys, refused
):
    (tmp_path / "taken").touch()
    shutil.copytree(tiny_model, tmp_path / "untold", ignore=shutil.ignore_patterns("tokenizer*"))
    shutil.copytree(tiny_model, tmp_path / "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    before = set(tmp_path.iterdir())
    words = [config, "actor_train.model_args.lora_rank=null", *faults]
    assert main(["config", *words]) == 0
    said = capsys.readouterr().out.partition("missing to run this config here:\n")[2]
    of_train = refused("train", *words)
    messages = [message for message in faults.values() if message]
    first = said.splitlines()[: len(messages)]
    for message in messages:
        assert any(re.search(message, line) for line in first) and re.search(message, of_train)
    assert set(tmp_path.iterdir()) - before <= {tmp_path / "runs"} and not list(tmp_path.glob("runs/*/*"))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "deepspeed_train",
            ["cluster.name=local", "actor_train.strategy_args.strategy_name=deepspeed_train"],
        ),
        ("async_generation_ratio", ["cluster.name=local", "async_generation_ratio=1"]),
        ("async_generation_ratio", ["cluster.name=launched", "async_generation_ratio=1"]),
        ("2 devices", ["cluster.name=local", "actor_train.device_mapping=[0,1]"]),
    ],
)
def test_a_placement_that_no_machine_has_is_refused_by_both(message, words, config, both_refuse):
    both_refuse(message, config, *words, also=" problem.\n")


def test_what_a_launcher_cannot_run_config_says(config, monkeypatch, capsys, refused):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    words = [
        config,
        "actor_train.model_args.lora_rank=null",
        "async_generation_ratio=1",
        "num_gpus_per_node=2",
    ]
    assert main(["config", *words]) == 0
    (line,) = capsys.readouterr().out.partition("missing to run this config here:\n  - ")[2].splitlines()[:1]
    assert "async_generation_ratio" in line and line in refused("train", *words)


def test_config_names_files_of_rows_and_tools_that_are_not_there(config, tmp_path, tiny_model, capsys):
    rows = "data={train_files: [none.jsonl], reward: [exact_match]}"
    assert (
        main(["config", config, "~custom_envs", f"++{rows}", "++agent={function_tool_path: tools.py}"]) == 0
    )
    said = capsys.readouterr().out
    assert mentions(said, "data.train_files", "none.jsonl")
    assert mentions(said, "agent.function_tool_path", "tools.py")


@pytest.mark.parametrize(
    "key", ["tool_config_path", "function_tool_path", "interaction_config_path", "agent_config_path"]
)
def test_config_names_a_file_of_agents_that_is_not_where_the_rows_are(key, config, capsys, refused):
    write_rows({"prompt": "1", "answer": "1"})
    words = [
        config,
        "~custom_envs",
        "++data={train_files: [rows.jsonl], reward: [exact_match]}",
        f"++agent={{{key}: none}}",
    ]
    assert main(["config", *words]) == 0
    said = capsys.readouterr().out.partition("missing to run this config here:\n")[2]
    assert mentions(said, f"agent.{key}", "none", "no such file")
    assert f"agent.{key}" in refused("train", *words)


def test_config_says_that_the_library_of_a_rows_agent_is_missing(config, capsys, refused):
    write_rows(
        *({"prompt": "1", "answer": "1", "agent_name": name} for name in ("single_turn_agent", "react_agent"))
    )
    changes = ["~custom_envs", "++data={train_files: [rows.jsonl], reward: [exact_match]}"]
    changes.append("actor_train.model_args.lora_rank=null")
    said = (
        "rows.jsonl, line 2: react_agent needs LangGraph and LangChain, and langgraph isn't installed; "
        f"{install_hint('langgraph')}"
    )
    assert main(["config", config, *changes]) == 0
    assert f"missing to run this config here:\n  - {said}" in capsys.readouterr().out
    assert main(["config", config, *changes, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["missing"] == [said] and said not in shown["notes"]
    assert said in refused("train", config, *changes)


def with_template(model, template):
    """The folder of the model with another chat template."""
    shutil.copytree(model, "model")
    Path("model", "chat_template.jinja").write_text(template)


NO_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor "
    "%}<|im_start|>assistant\n"
)
HERMES = "{% if tools %}{# <tool_call> #}{% endif %}"
OWN_CALLS = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or "
    "'' }}"
    "{% for c in m.tool_calls or [] %}[[{{ c.function.name }}: {{ c.function.arguments | tojson }}]]{% "
    "endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
PARSER = "++agent={{tool_config_path: tools.yaml, tool_parser: 'own_parts:{}'}}"


@pytest.mark.parametrize(
    ("template", "overrides", "message"),
    [
        (
            HERMES + NO_TOOLS,
            [],
            says("schema", "'c'", "system message"),
        ),
        (
            HERMES + NO_TOOLS,
            [PARSER.format("NoEnv")],
            says("agent.tool_parser", "own_parts:NoEnv", "`parse`"),
        ),
        (HERMES + NO_TOOLS, [PARSER.format("Env")], says("tool_parser", "own_parts:Env", "TypeError")),
        (
            "{{ messages[0].content }}",
            ["max_steps=1"],
            says("chat template", "context", "extended"),
        ),
        (OWN_CALLS, [], says("tool calls", "known forms")),
        (
            HERMES + NO_TOOLS,
            ["++template_kwargs={think: false}"],
            says("'think'", "never"),
        ),
    ],
)
def test_what_a_chat_template_can_not_do_is_refused_where_the_model_is(
    template, overrides, message, config, tmp_path, tiny_model, both_refuse
):
    with_template(tiny_model, template)
    schema = (
        "{type: function, function: {name: c, description: d, parameters: {type: object, properties: {}}}}"
    )
    (tmp_path / "tools.yaml").write_text(f"tools: [{{class_name: calculator, tool_schema: {schema}}}]\n")
    write_rows(
        {"prompt": "2 * 3?", "answer": "6", "agent_name": "single_turn_agent" if overrides else "tool_agent"}
    )
    data = ["~custom_envs", "++data={train_files: [rows.jsonl], reward: [exact_match]}"]
    words = [config, *data, *(overrides or ["++agent={tool_config_path: tools.yaml}"])]
    both_refuse(message, *words, "pretrain=model", also=" problem.\n")
    assert main(["config", *words, "pretrain=nowhere"]) == 0
    assert overrides or main(["config", *words]) == 0


ROWS = [
    (
        {"agent_name": "nowhere:Agent"},
        [],
        says("rows.jsonl, line 2", "nowhere:Agent", "'nowhere'"),
    ),
    (
        {"agent_name": "own_parts:loss"},
        [],
        says("rows.jsonl, line 2", "own_parts:loss", "class 'loss'"),
    ),
    (
        {"agent_name": "own_parts:NoEnv"},
        [],
        says("rows.jsonl, line 2", "own_parts:NoEnv", "`run`"),
    ),
    ({"agent_name": "own_parts:Agent"}, [], says("constructor", "make_env", "settings")),
    (
        {"agent_name": "mine"},
        ["++agent={agent_config_path: loops.yaml}"],
        says("line 2", "agent.agent_config_path", "loops.yaml", "most"),
    ),
    (
        {},
        ["++data.max_prompt_length=3"],
        says("2 prompts", "3 tokens", "data.max_prompt_length"),
    ),
]


@pytest.mark.parametrize(("row", "overrides", "message"), ROWS)
def test_rows_that_train_refuses_config_refuses(row, overrides, message, config, tmp_path, both_refuse):
    (tmp_path / "loops.yaml").write_text("- {name: mine, _target_: toy_rewards.AskTwice, most: 3}\n")
    plain = {"prompt": "2 * 3 + 4?", "answer": "6"}
    write_rows(plain, plain | row)
    both_refuse(
        message,
        config,
        "~custom_envs",
        "++data={train_files: [rows.jsonl], reward: [exact_match]}",
        *overrides,
    )


GSM8K_TOOL = "verl.tools.gsm8k_tool.Gsm8kTool"
GSM8K_USER = "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
SEES_TRUTH = "{rubric: short, base_url: 'http://localhost:1/v1', model: m, shows_ground_truth: true}"


@pytest.mark.parametrize(
    ("agent", "reward", "extra", "message"),
    [
        (
            "{tool_config_path: tools.yaml}",
            "exact_match",
            {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "6"}}}},
            says("calc_gsm8k_reward", "extra_info.tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth"),
        ),
        (
            "{interaction_config_path: users.yaml}",
            "exact_match",
            {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "6"}},
            says("extra_info.interaction_kwargs", "'gsm8k'", "'ground_truth'"),
        ),
        (
            "{}",
            f"{{name: judge, args: {SEES_TRUTH}}}",
            {"ground_truth": "6"},
            says("data.reward judge", "column", "ground_truth"),
        ),
    ],
)
def test_rows_without_a_truth_that_something_asks_for_are_refused(
    agent, reward, extra, message, config, tmp_path, both_refuse
):
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [{"class_name": GSM8K_TOOL}]}))
    (tmp_path / "users.yaml").write_text(
        json.dumps({"interaction": [{"name": "gsm8k", "class_name": GSM8K_USER}]})
    )
    whole = {"prompt": "2 * 3?", "answer": "6", "extra_info": extra}
    whole["agent_name"] = "tool_agent" if "tool" in agent else "single_turn_agent"
    lacking = json.loads(json.dumps(whole).replace('"ground_truth": "6"', '"other": "6"'))
    words = [
        config,
        "~custom_envs",
        f"++data={{train_files: [rows.jsonl], reward: [{reward}]}}",
        f"++agent={agent}",
    ]
    write_rows(whole)
    assert main(["config", *words, "pretrain=nowhere"]) == 0, (
        "the tiny model has no room for the tool's schema"
    )
    write_rows(whole, lacking)
    both_refuse(says("rows.jsonl, line 2") + message, *words)


def classifier(start, folder, num_labels):
    """A model of the tiny one's shape that gives labels, with its tokenizer."""
    from transformers import AutoModelForSequenceClassification

    shutil.copytree(start, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForSequenceClassification.from_pretrained(start, num_labels=num_labels).save_pretrained(folder)


def test_a_model_that_can_not_score_is_refused_by_config(config, tmp_path, tiny_model, both_refuse):
    for num_labels in (1, 2):
        classifier(tiny_model, tmp_path / f"labels{num_labels}", num_labels)
    shutil.copytree(tmp_path / "labels1", tmp_path / "refusing")
    (tmp_path / "refusing" / "chat_template.jinja").write_text("{{ raise_exception('no dialogue') }}")
    write_rows({"prompt": "2 * 3?"})
    words = [config, "~custom_envs", "++data={train_files: [rows.jsonl], reward: [reward_model]}"]
    assert main(["config", *words, "reward_pretrain=labels1"]) == 0
    for folder, message in (
        (
            tiny_model,
            says("score head", "sequence classifier"),
        ),
        ("labels2", says("score head", "2 labels")),
        ("refusing", says("chat template", "user → assistant", "no dialogue")),
    ):
        both_refuse(message, *words, f"reward_pretrain={folder}", also="reward_pretrain: ")


TWO_ROLES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + NO_TOOLS


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content }}", says("chat template", "context", "extended")),
        (
            "{{ raise_exception('broken') }}",
            says("chat template", "user → assistant → user", "broken"),
        ),
        ("{% for m in messages %}", says("end of template")),
        ("", "has no chat template"),
        (TWO_ROLES, says("agent_system_template", "system → user", "no system")),
    ],
)
def test_config_renders_the_template_for_environments_too(template, message, config, tiny_model, refused):
    with_template(tiny_model, template)
    words = [config, "pretrain=model", "actor_train.model_args.lora_rank=null"]
    said = refused("config", *words)
    assert re.search(message, said) and " problem.\n" in said
    if template == TWO_ROLES:
        assert main(["config", *words, "++custom_envs.Lake.agent_system_template=''"]) == 0
    fault = re.search(r"raise_exception\('(.*?)'\)", template)
    if fault:
        assert fault[1] in refused("train", *words)


@pytest.mark.parametrize(
    ("template", "overrides", "message"),
    [
        (
            "{{ messages[0].content }}",
            [],
            says("pretrain", "chat template", "extended"),
        ),
        (NO_TOOLS, ["++template_kwargs={think: false}"], "template_kwargs.think: the chat template"),
    ],
)
def test_config_renders_the_template_for_demonstrations(
    template, overrides, message, folder, tiny_model, both_refuse
):
    with_template(tiny_model, template)
    (folder / "sft.yaml").write_text("pretrain: model\noutput_dir: runs\ntrain_files: [rows.jsonl]\n")
    write_rows({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    both_refuse(message, "sft.yaml", *overrides, verb="sft")


def test_a_judge_that_nobody_serves_is_found_before_anything_is_played(config, tmp_path, refused):
    write_rows({"prompt": "2 * 3?"})
    (tmp_path / "users.yaml").write_text(
        "interaction: [{name: ann, class_name: model, config: {base_url: 'http://localhost:1/v1', model: "
        "m}}]\n"
    )
    judge = "{name: judge, args: {rubric: short, base_url: 'http://localhost:1/v1', model: m}}"
    data = [config, "~custom_envs", "++data={train_files: [rows.jsonl], reward: [REWARD]}"]
    for reward, more, message in (
        (judge, [], says("data.reward judge", "http://localhost:1/v1/models")),
        (
            "toy_rewards:length",
            ["++agent={interaction_config_path: users.yaml}"],
            says("interaction ann", "http://localhost:1/v1/models"),
        ),
    ):
        if more:
            write_rows({"prompt": "2 * 3?", "extra_info": {"interaction_kwargs": {"name": "ann"}}})
        words = [word.replace("REWARD", reward) for word in data] + more
        assert main(["config", *words]) == 0, "config asks no network"
        assert re.search(message, refused("train", *words))
        assert not list(tmp_path.glob("runs/*/*"))


def test_what_this_machine_lacks_is_said_without_torch(config, tmp_path, tiny_model):
    code = "import sys; from turnwise.cli.main import main\n"
    code += (
        "for model in sys.argv[1:]: main(['config', 'own.yaml', f'pretrain={model}', "
        "'output_dir=own.yaml/runs'])\n"
    )
    code += "print({'torch', 'transformers', 'ray', 'vllm'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code, "nowhere", tiny_model], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.count("\n  - ") == 2 + 1 and done.stdout.endswith("set()\n"), done.stderr


def test_rows_are_read_before_a_run_has_a_folder(folder, tiny_model, refused, both_refuse, monkeypatch):
    (folder / "sft.yaml").write_text(
        f"pretrain: {tiny_model}\noutput_dir: runs\ntrain_files: [good.jsonl]\nval_files:\n  - bad.jsonl\n"
    )
    good = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    (folder / "good.jsonl").write_text(good)
    assert main(["config", "sft.yaml"]) == 0
    assert mentions(refused("sft", "sft.yaml"), "sft.yaml:5", "val_files[0]", "bad.jsonl")
    (folder / "bad.jsonl").write_text(good + '{"messages": [{"role": "user"}]}\n')
    both_refuse(says("sft.yaml:5", "val_files[0]", "bad.jsonl, line 2", "message 0"), "sft.yaml", verb="sft")
    monkeypatch.setenv("HOME", str(folder))
    of_home = ["sft.yaml", "train_files=['~/good.jsonl']", "val_files=['~/bad.jsonl']"]
    both_refuse(says("val_files[0]", f"{folder}/bad.jsonl, line 2", "message 0"), *of_home, verb="sft")


def test_rows_in_the_home_folder_are_read(config, folder, monkeypatch, both_refuse):
    monkeypatch.setenv("HOME", str(folder))
    write_rows({"text": "1"})
    data = "++data={train_files: ['~/rows.jsonl'], reward: [exact_match]}"
    both_refuse(says("rows.jsonl, line 1", "'prompt'"), config, "pretrain=nowhere", "~custom_envs", data)


BOMB = "[" * 99 + "]" * 99


@pytest.mark.parametrize(
    ("verb", "value", "message"),
    [
        ("check-env", BOMB, says("64", "sections")),
        ("play", "&a [*a]", says("anchor")),
    ],
)
def test_arguments_of_an_environment_are_bounded(verb, value, message, folder, refused):
    said = refused(verb, "frozen_lake", f"size={value}")
    assert re.search(message, said) and "size=" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"exp_name: \xff", "config.yaml:1 isn't UTF-8"), (b"[" * 99, "more than 64"), (b"[]", "no exp_name")],
)
def test_the_config_of_a_replay_is_bounded(text, message, tmp_path, refused):
    (tmp_path / "config.yaml").write_bytes(text)
    assert re.search(message, refused("train", "--replay", tmp_path))


def test_files_on_hydras_search_path_are_bounded(tmp_path, tiny_model):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "shared.yaml").write_text(f"tracker_kwargs: {BOMB}\n")
    head = f"defaults: [shared, _self_]\nhydra: {{searchpath: ['file://{tmp_path}/other']}}\n"
    (tmp_path / "own.yaml").write_text(head + CONFIG.replace("MODEL", str(tiny_model)))
    with pytest.raises(ConfigError, match=says("64", "sections")):
        load_config(tmp_path / "own.yaml")
    (tmp_path / "other" / "shared.yaml").write_text("seed: 7\n")
    assert load_config(tmp_path / "own.yaml")[0].seed == 7


def test_texts_that_are_not_utf8_are_named_with_their_line(folder, refused):
    (folder / "text").write_bytes("Up\nFüße\n".encode("latin-1"))
    for words in (["make-model", "--out", "model", "--text"], ["check-env", "frozen_lake", "--actions-file"]):
        assert mentions(refused(*words, "text"), "line 2", "UTF-8", "0xfc")


def test_a_hub_name_plays(refused):
    assert mentions(refused("play", "frozen_lake", "--policy", "org/none-such"), "hf download org/none-such")


@pytest.mark.parametrize(("name", "server"), [("embedded", EmbeddedServer), ("hf", HFServer)])
def test_options_of_a_strategy_are_those_of_its_server(name, server):
    follow = {"model", "max_length", "decode", "stopwatch", "reads_trainer", "schedule_log"}
    parameters = [parameter for parameter in inspect.signature(server).parameters if parameter not in follow]
    assert STRATEGIES[name].options == tuple(parameters) and STRATEGIES[name].entry.endswith(
        f":{server.__name__}"
    )
