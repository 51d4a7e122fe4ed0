"""Each documented parameter of each action, shown by what it changes in the resolved config, the answer or a
file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise import RLTrainingTool
from turnwise.data.gsm8k import generate_problems
from turnwise.data.math_rewards import FORMULAS
from turnwise.rl_tool.parameters import ACTIONS, Train, parse
from turnwise.rl_tool.training import rl_config

DOCS = (Path(__file__).parents[3] / "docs" / "rl_tool.md").read_text(encoding="utf-8")
ROWS = generate_problems(3)
TEXTS = ["one\ntwo\nFinal Answer: 7", "one\ntwo\nthree\nfour" + " word" * 40 + "\nFinal Answer: 8"]
"""A right answer with two steps, and a longer wrong one with four."""
SHORT, LONG = map(len, TEXTS)
BASE: dict[str, dict[str, Any]] = {
    "train": {
        "algorithm": "grpo",
        "model_name": "MODEL",
        "dataset": "generated",
        "max_samples": 2,
        "num_epochs": 1,
    }
    | {"batch_size": 2, "num_generations": 2, "max_new_tokens": 2, "use_tensorboard": False},
    "load_dataset": {"dataset": "generated", "max_samples": 2},
    "create_reward": {},
    "evaluate": {"model_path": "MODEL", "dataset": "generated", "max_samples": 2, "max_new_tokens": 4},
    "export": {"model_path": "ADAPTER", "output_dir": "exported"},
}
"""What both sides of a comparison are told; MODEL and ADAPTER stand for folders."""
ABSENT, DIFFERENT = "ABSENT", object()


class Effect(NamedTuple):
    """`parameter` = `value` makes `seen` the `expected`; without it, `seen` is something else. Both are told
    `under`."""

    action: str
    parameter: str
    value: Any
    seen: str
    expected: Any
    under: Mapping[str, Any] = {}
    beside: Mapping[str, Any] = {}
    """Given in the run with `parameter`, left out of the run without it."""


def of(action: str, *effects: tuple[Any, ...]) -> list[Effect]:
    return [Effect(action, *effect) for effect in effects]


def together(
    action: str, *effects: tuple[Any, ...], under: Mapping[str, Any] = MappingProxyType({})
) -> list[Effect]:
    """Effects that one run with all these parameters shows."""
    told = {parameter: value for parameter, value, *_ in effects}
    return [Effect(action, *effect, under, told) for effect in effects]


def of_a_model(section: str) -> list[tuple[Any, ...]]:
    """Effects that both kinds of training have, each in another section of the config."""
    arguments = {"lora_rank": 4, "dtype": "bf16"}
    training = {
        "learning_rate": 0.02,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0.5,
        "weight_decay": 0.1,
    }
    kinds = {f"{section}.model_args": arguments, f"{section}.training_args": training}
    return [
        (name, value, f"{path}.{name}", value)
        for path, values in kinds.items()
        for name, value in values.items()
    ]


def sampled(completions):
    return [2.0] * len(completions)


LONGER, STEP = {"reward_type": "length_penalty"}, {"reward_type": "step"}
IMITATION = {"algorithm": "sft"}
ALL_ROWS = IMITATION | {"dataset": "ROWS", "max_samples": ABSENT, "batch_size": 12}
SEVERAL = {"k": 2, "return_details": True}
EFFECTS = [
    *of(
        "train",
        ("algorithm", "sft", "answer.effective_batch_size", 2),
        ("preset", "quick", "answer.dataset_size", 10, ALL_ROWS),
        # The library isn't installed here; tests/engines/train_deepspeed.py trains with it.
        ("deepspeed", {"zero_optimization": {"stage": 2}}, "answer.code", "not_available"),
        ("custom_reward", sampled, "answer.metrics.rollout/reward/sampled", 2.0),
    ),
    *together(
        "train",
        ("split", "test", "prompts", {row["question"] for row in generate_problems(2, "test")}),
        ("num_epochs", 2, "config.max_steps", 4),
        ("batch_size", 1, "config.train_env_manager.num_env_groups", 1),
        ("output_dir", "other", "answer.output_dir", "other"),
        *of_a_model("config.actor_train"),
        ("lora_alpha", 3.0, "config.actor_train.model_args.lora_alpha", 3.0),
        ("lora_target_modules", ["q_proj"], "config.actor_train.model_args.lora_target", ["q_proj"]),
        ("num_generations", 3, "config.train_env_manager.group_size", 3),
        ("kl_coef", 0.7, "config.kl_loss_coef", 0.7),
        ("clip_range", 0.3, "config.pg_clip", 0.3),
        ("max_new_tokens", 5, "config.actor_infer.generating_args.max_new_tokens", 5),
        ("temperature", 0.8, "config.actor_infer.generating_args.temperature", 0.8),
        ("reward_type", "step", "rewards.1.0", "step"),
        ("reward_config", {"step_bonus": 0.4}, "rewards.1", ("step", 1.0, {"step_bonus": 0.4})),
        ("use_tensorboard", True, "events", 1),
        ("use_wandb", True, "wandb.project", "run"),
        ("seed", 7, "config.seed", 7),
    ),
    *together(
        "train",
        ("algorithm", "ppo", "config.adv_estimator", "gae"),
        ("model_name", "ADAPTER", "config.pretrain", "ADAPTER"),
        ("dataset", "ROWS", "answer.dataset", "rows.jsonl"),
        ("max_samples", 1, "answer.dataset_size", 1),
        ("use_lora", False, "config.actor_train.model_args.lora_rank", ABSENT),
        ("critic_learning_rate", 0.5, "config.critic.training_args.learning_rate", 0.5),
        ("kl_coef", 0.0, "config.use_kl_loss", False),
        (
            "reward_type",
            {"format": 0.5, "accuracy": 2.0},
            "rewards",
            [("accuracy", 2.0, {}), ("format", 0.5, {})],
        ),
        ("use_wandb", True, "wandb.project", "sums"),
        ("wandb_project", "sums", "wandb.project", "sums"),
    ),
    *together(
        "train",
        ("num_epochs", 2, "answer.num_steps", 4),
        ("batch_size", 1, "answer.num_steps", 4),
        *of_a_model("config"),
        ("seed", 7, "config.seed", 7),
        under=IMITATION,
    ),
    *of(
        "load_dataset",
        ("dataset", "ROWS", "answer.dataset", "rows.jsonl"),
        ("split", "test", "answer.split", "test"),
        ("split", "test", "answer.samples", DIFFERENT),
        ("max_samples", 1, "answer.dataset_size", 1),
        ("format", "rl", "answer.dataset_object.0.ground_truth", ROWS[0]["answer"].rpartition("#### ")[2]),
        (
            "model_name",
            "MODEL",
            "answer.quality.over_long",
            1,
            {"dataset": [{"prompt": "☃" * 3000, "completion": "7"}]},
        ),
    ),
    *of(
        "create_reward",
        ("reward_type", "format", "rewarded", [1.0, 1.0]),
        ("penalty_weight", 0.01, "rewarded", [1.0, -0.01 * (LONG - 100)], LONGER | {"max_length": 100}),
        ("max_length", 20, "rewarded", [1 - 0.001 * (SHORT - 20), -0.001 * (LONG - 20)], LONGER),
        ("length_unit", "tokens", "rewarded", DIFFERENT, LONGER | {"max_length": 9, "tokenizer": "MODEL"}),
        ("tokenizer", "MODEL", "rewarded", DIFFERENT, LONGER | {"max_length": 9, "length_unit": "tokens"}),
        ("step_bonus", 0.5, "rewarded", [2.0, 2.0], STEP),
        ("max_steps", 1, "rewarded", [1.1, 0.1], STEP),
        ("only_if_correct", True, "rewarded", [1.2, 0.0], STEP),
        ("floor", 0.5, "rewarded", [1.2, 0.5], STEP),
        ("weights", {"format": 2.0}, "rewarded", [2.0, 2.0], {"reward_type": "combined"}),
    ),
    *of(
        "evaluate",
        ("model_path", "ADAPTER", "answer.uses_lora", True),
        ("use_lora", False, "answer.uses_lora", False, {"model_path": "ADAPTER"}),
        ("dataset", "ROWS", "answer.dataset", "rows.jsonl"),
        ("split", "train", "questions", {row["question"] for row in generate_problems(2)}),
        ("max_samples", 1, "answer.num_samples", 1),
        ("k", 2, "answer.pass_at_k", DIFFERENT),
        ("temperature", 0.1, "answer.details", DIFFERENT, SEVERAL),
        ("max_new_tokens", 2, "answer.average_length_tokens", 2.0),
        ("return_details", True, "answer.details", DIFFERENT),
        ("output_dir", "worst", "answer.worst_samples", "worst/worst_samples.jsonl"),
        ("seed", 7, "answer.details", DIFFERENT, SEVERAL),
    ),
    *of(
        "export",
        ("model_path", "MODEL", "answer.merged_into", None),
        ("output_dir", "other", "answer.output_dir", "other"),
        ("dtype", "bf16", "dtype", {torch.bfloat16}),
    ),
]
SHOWN = {(effect.action, effect.parameter) for effect in EFFECTS}
SHOWN |= {("train", "resume"), ("train", "overwrite"), ("train", "checker"), ("evaluate", "checker")}
"""The last four have tests of their own below."""


@pytest.fixture(scope="module")
def folders(word_model, tmp_path_factory):
    """By the names that stand for them: a model, an adapter of it that a training left, and a file of
    rows."""
    folder = tmp_path_factory.mktemp("every_parameter")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in generate_problems(12)))
    asked = {
        "algorithm": "sft",
        "model_name": word_model,
        "max_samples": 2,
        "num_epochs": 3,
        "learning_rate": 0.05,
    }
    answer = RLTrainingTool().run_dict({"action": "train", "output_dir": str(folder / "trained"), **asked})
    assert answer["status"] == "success", answer
    return {"MODEL": word_model, "ADAPTER": answer["output_dir"], "ROWS": str(folder / "rows.jsonl")}


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the library, which keeps what a run was begun with."""
    begun: dict[str, Any] = {}

    def init(**arguments):
        begun.update(arguments)
        return SimpleNamespace(url="", dir="wandb/files", log=lambda *_, **__: None, finish=lambda: None)

    module = ModuleType("wandb")
    module.__dict__.update(init=init, setup=lambda settings: None, Settings=dict, Html=str)
    module.__spec__ = SimpleNamespace(name="wandb", loader=None)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return begun


@pytest.fixture(scope="module")
def known_outcomes():
    return {}


@pytest.fixture
def outcome_of(folders, wandb, tmp_path, monkeypatch, known_outcomes):
    """What comes of an action in an empty folder; the same question is answered once."""

    def outcome(action: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        key = f"{action} {asked}"
        if key not in known_outcomes:
            empty = tmp_path / str(len(known_outcomes))
            empty.mkdir()
            monkeypatch.chdir(empty)
            wandb.clear()
            answer = RLTrainingTool().run_dict({"action": action, **_told(asked, folders)})
            known_outcomes[key] = _outcome(answer, wandb, folders)
        return known_outcomes[key]

    return outcome


def test_the_checker_reaches_the_config_and_its_package_is_asked_for_before_anything_is_loaded(monkeypatch):
    asked = parse(Train, BASE["train"] | {"model_name": "none", "checker": "math_verify"})
    assert rl_config(asked, 2, {})["data"]["checker"] == "math_verify"
    monkeypatch.setattr("turnwise.data.checkers.find_spec", lambda name: None)
    for action in (
        {"action": "evaluate", "model_path": "none", "checker": "math_verify"},
        {"action": "create_reward", "reward_type": "step", "checker": "math_verify"},
    ):
        answer = RLTrainingTool().run_dict(action)
        assert answer["status"] == "error" and "[math]" in json.dumps(answer), answer


def test_formulas_are_the_same_in_code_and_docs():
    assert [name for name, formula in FORMULAS.items() if f"| `{name}` | {formula} |" not in DOCS] == []


def test_the_table_has_every_documented_parameter():
    fields = {(action, name) for action, kind in ACTIONS.items() for name in kind.model_fields}
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", DOCS.partition("## Data")[0], re.M)
    of_train = {name for row in rows for name in re.findall(r"\w+", row)}
    last_cells = re.findall(r"^\| `\w+` \| r = .* \| (.*) \|$", DOCS, re.M)
    of_rewards = {name for cell in last_cells for name in re.findall(r"`(\w+)`", cell)}
    documented = (
        fields | {("train", name) for name in of_train} | {("create_reward", name) for name in of_rewards}
    )
    assert documented == SHOWN
    sections = {
        action: DOCS.partition(f"\n## {title}\n")[2].partition("\n## ")[0] for action, title in TITLES.items()
    }
    assert [(action, name) for action, name in sorted(documented) if f"`{name}" not in sections[action]] == []


TITLES = {
    "train": "train",
    "load_dataset": "Data",
    "create_reward": "Rewards",
    "evaluate": "evaluate",
    "export": "export",
}


@pytest.mark.extra
def test_a_training_that_was_stopped_goes_on_and_ends_as_the_one_that_was_not(folders, fragile, capsys):
    asked = {
        "action": "train",
        **_told(BASE["train"], folders),
        "dataset": ROWS,
        "max_samples": 2,
        "batch_size": 1,
    }
    asked |= {"learning_rate": 0.01, "num_epochs": 2, "custom_reward": fragile}
    whole = RLTrainingTool().run_dict({**asked, "output_dir": "whole"})
    fragile.calls_left = 1
    stopped = RLTrainingTool().run_dict({**asked, "output_dir": "stopped"})
    assert stopped["status"] == "error" and "the disk is full" in stopped["message"], stopped
    told = capsys.readouterr().err
    assert "continue with resume=true" in told and "resume_from_checkpoint" not in told, (
        "the tool has no such parameter"
    )
    assert not Path("stopped/adapter_config.json").exists(), "a stopped training has no result"
    assert RLTrainingTool().run_dict({**asked, "output_dir": "stopped"})["code"] == "exists"
    fragile.calls_left = 3
    resumed = RLTrainingTool().run_dict({**asked, "output_dir": "stopped", "resume": True})
    assert resumed["status"] == "success" and resumed["num_steps"] == whole["num_steps"] == 4
    assert len([*Path("stopped/run").glob("*/checkpoints")]) == 1, "it went on in the same run"
    weights = [load_file(Path(folder) / "adapter_model.safetensors") for folder in ("whole", "stopped")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_overwrite_replaces_the_result_and_nothing_else_does(folders):
    asked = {"action": "train", **_told(BASE["train"], folders), "learning_rate": 0.01, "output_dir": "out"}
    whole = RLTrainingTool().run_dict({**asked, "algorithm": "ppo", "use_lora": False})
    assert whole["trainable_parameters"] == whole["total_parameters"], whole
    before = Path("out/model.safetensors").read_bytes()
    assert RLTrainingTool().run_dict({**asked, "seed": 7})["code"] == "exists"
    assert Path("out/model.safetensors").read_bytes() == before
    assert RLTrainingTool().run_dict({**asked, "lora_rank": 4, "overwrite": True})["status"] == "success"
    assert not Path("out/config.json").exists() and not Path("out/model.safetensors").exists()
    adapter = load_file("out/adapter_model.safetensors")
    assert adapter["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape[0] == 4


def test_log_probs_of_an_export_equal_the_adapter_s(folders):
    answer = RLTrainingTool().run_dict(
        {"action": "export", "model_path": folders["ADAPTER"], "output_dir": "exported"}
    )
    assert answer["status"] == "success" and answer["merged_into"] == folders["MODEL"]
    encoded = [
        AutoTokenizer.from_pretrained(folder)(ROWS[0]["question"])
        for folder in (folders["MODEL"], "exported")
    ]
    assert encoded[0]["input_ids"] == encoded[1]["input_ids"]
    ids = torch.tensor([encoded[0]["input_ids"]])
    base = AutoModelForCausalLM.from_pretrained(folders["MODEL"])
    with torch.no_grad():
        unadapted = base(ids).logits.log_softmax(-1)
        adapted = PeftModel.from_pretrained(base, folders["ADAPTER"])(ids).logits.log_softmax(-1)
        exported = AutoModelForCausalLM.from_pretrained("exported")(ids).logits.log_softmax(-1)
    assert (adapted - unadapted).abs().max() > 0.1, "the adapter does something"
    torch.testing.assert_close(exported, adapted, rtol=0, atol=1e-4)
    assert float((exported - adapted).abs().mean()) < 1e-6


@pytest.mark.parametrize(
    "effect", EFFECTS, ids=lambda effect: f"{effect.action}-{effect.parameter}-{effect.value!s:.12}"
)
def test_it_has_an_effect(effect, folders, outcome_of):
    base = {**BASE[effect.action], **effect.under}
    asked = (base, base | effect.beside | {effect.parameter: effect.value})
    before, after = (_at(outcome_of(effect.action, told), effect.seen) for told in asked)
    assert before != after
    if effect.expected is not DIFFERENT:
        assert after == (pytest.approx(effect.expected) if effect.seen == "rewarded" else effect.expected)


def _told(asked: Mapping[str, Any], folders: Mapping[str, str]) -> dict[str, Any]:
    return {
        key: folders.get(v, v) if isinstance(v, str) else v for key, v in asked.items() if v is not ABSENT
    }


def _outcome(answer: dict[str, Any], wandb: Mapping[str, Any], folders: Mapping[str, str]) -> dict[str, Any]:
    """Everything that can be seen of an action."""
    seen: dict[str, Any] = {"answer": answer, "wandb": dict(wandb)}
    if "run_folder" in answer:
        run = Path(answer["run_folder"])
        names = {folder: name for name, folder in folders.items()}
        seen["config"] = yaml.safe_load((run / "config.yaml").read_text())
        seen["config"]["pretrain"] = names.get(seen["config"]["pretrain"])
        rewards = seen["config"].get("data", {}).get("reward", [])
        seen["rewards"] = [(reward["name"], reward["weight"], reward.get("args", {})) for reward in rewards]
        seen["events"] = len([*run.rglob("events.*")])
        if (run / "rollouts.jsonl").is_file():
            texts = (run / "rollouts.jsonl").read_text()
            seen["prompts"] = {
                row["question"] for split in ("train", "test") for row in generate_problems(9, split)
            } & {json.loads(f'"{text}"') for text in re.findall(r"Question: (.*?)\\n", texts)}
    if "reward_function" in answer:
        try:
            seen["rewarded"] = answer["reward_function"](TEXTS, ground_truth=["7", "7"])
        except Exception as error:
            seen["rewarded"] = str(error)
    if "worst_samples" in answer:
        lines = Path(answer["worst_samples"]).read_text().splitlines()
        seen["questions"] = {json.loads(line)["question"] for line in lines}
    if answer["action"] == "export" and answer["status"] == "success":
        weights = load_file(Path(answer["output_dir"]) / "model.safetensors")
        seen["dtype"] = {tensor.dtype for tensor in weights.values()}
    return seen


def _at(seen: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(seen, Mapping):
            seen = seen.get(part, ABSENT)
        elif seen is not ABSENT:
            seen = seen[int(part)] if part.isdigit() and int(part) < len(seen) else ABSENT
    return seen


NAMES = sorted(SHOWN - {("create_reward", "reward_type")})


@pytest.mark.parametrize(("action", "parameter"), NAMES)
def test_a_misspelt_one_is_refused_with_the_nearest_name(action, parameter, folders):
    wrong = f"{parameter}x"
    of_reward = {"reward_type": "combined"} if action == "create_reward" else {}
    answer = RLTrainingTool().run_dict(
        {"action": action, **_told(BASE[action], folders), **of_reward, wrong: 1}
    )
    assert answer["status"] == "error" and answer["code"] == "config", answer
    assert answer["message"].startswith(wrong) and f"Did you mean {parameter!r}?" in answer["message"], answer


OF_ANSWERS = {
    "num_generations": 2,
    "kl_coef": 1.0,
    "clip_range": 0.1,
    "max_new_tokens": 2,
    "temperature": 2.0,
}
OF_REWARDS = {"reward_type": "step", "reward_config": {}, "custom_reward": sampled}
OF_ADAPTERS = {
    "critic_learning_rate": 0.5,
    "lora_rank": 2,
    "lora_alpha": 2,
    "lora_target_modules": ["q_proj"],
}


@pytest.mark.parametrize(
    ("action", "asked", "unread"),
    [
        (
            "train",
            IMITATION | OF_ANSWERS | OF_REWARDS | {"seed": 1},
            ["reward_type", *OF_ANSWERS, "reward_config", "custom_reward"],
        ),
        (
            "train",
            OF_ADAPTERS | OF_REWARDS | {"use_lora": False, "wandb_project": "sums"},
            ["reward_type", *OF_ADAPTERS, "wandb_project"],
        ),
        ("evaluate", {"temperature": 0.5}, ["temperature"]),
        ("train", {}, []),
    ],
)
def test_the_answer_names_what_had_no_effect(action, asked, unread, outcome_of):
    answer = outcome_of(action, BASE[action] | asked)["answer"]
    assert answer["status"] == "success", answer
    assert [line.partition(": ")[0] for line in answer.get("without_effect", [])] == unread
