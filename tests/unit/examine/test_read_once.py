"""What a config names is read and made once in a run, and `turnwise config` imports no library of models."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from counted_objects import MADE
from small_runs import LETTERS, small_yaml, training
from toy_tools import TOOL_CHATML

from turnwise.cli.main import main
from turnwise.data import tables
from turnwise.errors import ModelError
from turnwise.model_files.folder import check_folder
from turnwise.models.load import load_model, load_tokenizer, save_model


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each object was made and each file of rows read since the test began."""
    monkeypatch.chdir(tmp_path)
    MADE.clear()
    read = tables.read_row_file

    def counted(path: Path, *others: Any) -> Any:
        MADE[Path(path).name] += 1
        return read(path, *others)

    monkeypatch.setattr(tables, "read_row_file", counted)
    return MADE


def test_rows_tools_and_rewards_of_a_run_with_validation(made: Counter[str], tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = TOOL_CHATML
    save_model(load_model(tiny_model), tokenizer, Path("model"))
    for name in ("train", "val"):
        row = {"prompt": name, "agent_name": "tool_agent"}
        Path(f"{name}.jsonl").write_text(
            "".join(json.dumps({**row, "number": number}) + "\n" for number in range(6))
        )
    Path("tools.yaml").write_text("tools: [{class_name: counted_objects.CountedTool}]\n")
    run = {
        "custom_envs": {},
        "max_steps": 1,
        "eval_steps": 1,
        "val_batch_size": 4,
        "data": {
            "train_files": "train.jsonl",
            "val_files": "val.jsonl",
            "reward": "counted_objects:CountedReward",
        },
        "agent": {"tool_config_path": "tools.yaml", "tool_parser": "hermes"},
        "actor_infer": {"generating_args": {"max_new_tokens": 4}},
        "actor_train": training(),
    }
    Path("run.yaml").write_text(small_yaml("model", **run))
    assert main(["train", "run.yaml", "--quiet"]) == 0
    assert made["train.jsonl"] == made["val.jsonl"] == 1
    assert made["tool"] == made["reward"] == 1
    assert made["tool's episodes"] == 8 + 2 * 4, "a step of eight episodes, and two validations of four"


def test_an_environment_is_made_once_for_its_check_and_once_an_episode(
    made: Counter[str], tiny_model: Path
) -> None:
    env = {**LETTERS, "env_type": "counted_objects:CountedEnv"}
    changes = {
        "max_steps": 1,
        "eval_steps": 1,
        "val_batch_size": 4,
        "custom_envs": {"Letters": env},
        "actor_train": training(),
    }
    Path("run.yaml").write_text(small_yaml(tiny_model, **changes))
    assert main(["config", "run.yaml"]) == 0
    assert made["env"] == 1 and not made["env's episodes"]
    made.clear()
    assert main(["train", "run.yaml", "--quiet"]) == 0
    assert made["env"] == 1 + made["env's episodes"]


MEASURED_CONFIG = """
import sys, time
from collections import Counter
from pathlib import Path
from turnwise.cli.main import main

opened = Counter()

def count(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".json"):
        opened[Path(arguments[0]).name] += 1

sys.addaudithook(count)
code = main(['config', 'run.yaml'])
config_s = time.process_time()
total = 0
for number in range(1_000_000):
    total += number
loop_s = time.process_time() - config_s
modules = sorted({"torch", "transformers"} & set(sys.modules))
print(code, modules, opened["config.json"], opened["tokenizer.json"], config_s / loop_s, file=sys.stderr)
"""
"""`turnwise config` and, measured beside it, a loop: other machines are slower at both."""


def test_config_of_an_environment_is_quick_and_imports_no_library_of_models(
    tmp_path: Path, tiny_model: Path
) -> None:
    lake = {"Lake": {"env_type": "frozen_lake"}}
    (tmp_path / "run.yaml").write_text(small_yaml(tiny_model, custom_envs=lake, actor_train=training()))
    (tmp_path / "measured.py").write_text(MEASURED_CONFIG)
    done = subprocess.run(
        [sys.executable, "measured.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    code_and_modules, _, loops = done.stderr.strip().splitlines()[-1].rpartition(" ")
    assert code_and_modules == "0 [] 2 1", "config.json is read for its sizes, and by the folder's check"
    assert float(loops) < 15, "it takes the CPU time of some five loops of a million additions"


def test_a_folder_is_checked_again_only_after_a_file_has_changed(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    check_folder(folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "vocab_size": -1}))
    for _ in range(2):
        with pytest.raises(ModelError, match="vocab_size"):
            check_folder(folder)
    (folder / "config.json").write_text(json.dumps(content))
    check_folder(folder)
