"""The Python blocks of the docs run: the first as printed, and it learns; the others with steps and tokens
cut by one patch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from turnwise import RLTrainingTool, Trainer
from turnwise.models.make import make_model
from turnwise.play.tokenizer_text import environment_text
from turnwise.report.intervals import wilson_interval
from turnwise.tracking.jsonl import read_metrics

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FEW = {
    "max_steps": 1,
    "eval_steps": 0,
    "save_steps": 0,
    "rollout_batch_size": 4,
    "val_batch_size": 2,
    "sequence_length": 128,
}
MANAGERS = {
    "train_env_manager": {"num_env_groups": 2, "group_size": 2},
    "val_env_manager": {"num_env_groups": 2},
}
TOKENS = {"actor_infer": {"generating_args": {"max_new_tokens": 4}}}
DEFINES = ["algorithms", "data", "losses", "prompts", "rollouts", "tools"]
"""Pages whose blocks define functions and classes, and train nothing."""


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def first_that_trains(page: Path) -> str:
    return next(block for block in blocks(page) if "Trainer(" in block)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of all blocks, with the models and the environment that they name."""
    place = tmp_path_factory.mktemp("blocks")
    text = [*environment_text(), "It is one of 1 2 3 4 5 6 7 8 9. Question: Tom has 3 apples. Final Answer:"]
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    for name in ("runs/model", "models/base"):
        make_model("tiny", place / name, text, overrides=sizes)
    [guess] = [block for block in blocks(ROOT / "README.md") if block.startswith("# guess.py")]
    (place / "guess.py").write_text(guess, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(str(place))
        yield place


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers take one step of four short episodes, the tool two rows of a few tokens."""
    plain, fine_tune, run = Trainer.__init__, Trainer.sft, RLTrainingTool.run

    def smaller(self: Trainer, *args: Any, **settings: Any) -> None:
        own = {"eval_steps": 1} if settings.get("eval_steps") or settings.get("callbacks") else {}
        settings.pop("actor_train", None)
        plain(self, *args, **{**settings, **FEW, **MANAGERS, **TOKENS, **own})

    def shorter(model: Any, messages: Any, is_quiet: bool = False, **settings: Any) -> Path:
        return fine_tune(model, messages, is_quiet, **{**settings, "max_steps": 1})

    def quicker(self: RLTrainingTool, parameters: dict[str, Any]) -> str:
        sizes = {"train": {"max_samples": 2, "num_epochs": 1}, "evaluate": {"max_samples": 2}}
        tokens = (
            {"max_new_tokens": 4}
            if parameters.get("algorithm") == "grpo" or parameters["action"] == "evaluate"
            else {}
        )
        return run(self, {**parameters, **sizes.get(parameters["action"], {}), **tokens})

    monkeypatch.setattr(Trainer, "__init__", smaller)
    monkeypatch.setattr(Trainer, "sft", staticmethod(shorter))
    monkeypatch.setattr(RLTrainingTool, "run", quicker)


def test_the_first_block_runs_as_printed_and_learns(folder: Path) -> None:
    printed = first_that_trains(ROOT / "README.md")
    assert (
        printed
        == first_that_trains(DOCS / "python.md")
        == blocks(ROOT / "README.md")[0]
        == blocks(DOCS / "python.md")[0]
    )
    namespace: dict[str, Any] = {"__name__": "readme"}
    exec(printed, namespace)
    rows = read_metrics(namespace["trainer"].run_folder / "metrics.jsonl")
    scores = [row["rollout/score/mean"] for row in rows if "rollout/score/mean" in row]
    first, last = fmean(scores[:5]), fmean(scores[-5:])
    _, high = wilson_interval(first * 5 * 256, 5 * 256)
    assert len(scores) == 60 and last > high, scores
    assert (folder / "out" / "model.safetensors").is_file()


def test_the_blocks_on_python_run(folder: Path, cut: None, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "python"}
    for index, block in enumerate(blocks(DOCS / "python.md")):
        block = block.replace('Path("runs/sums")', 'Path("runs/cut_sums")').replace('"out"', '"cut_out"')
        exec(block, namespace)
        if index == 1:
            namespace["trainer"] = Trainer(model="runs/model", env=namespace["GuessEnv"], eval_steps=1)
    assert "rollout/score" not in capsys.readouterr().err


def test_the_block_on_the_tool_runs(folder: Path, cut: None, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(DOCS / "rl_tool.md"):
        exec(block, {"__name__": "tool"})
    assert '"status": "success"' in capsys.readouterr().out
    assert (folder / "out" / "exported" / "model.safetensors").is_file()


def test_the_call_beside_trls_is_taken(folder: Path, cut: None) -> None:
    def multiply(a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: the first
            b: the second
        """
        return a * b

    def score(completions: list[str], **columns: Any) -> list[float]:
        return [float("6" in text) for text in completions]

    [block] = blocks(DOCS / "coming_from.md")
    exec(
        block,
        {"Trainer": Trainer, "f": score, "multiply": multiply, "rows": [{"prompt": "What is 2 * 3?"}] * 4},
    )


@pytest.mark.parametrize("name", DEFINES)
def test_blocks_that_define_something_define_it(name: str) -> None:
    found = blocks(DOCS / f"{name}.md")
    namespace: dict[str, Any] = {"__name__": name}
    exec("from turnwise.envs.base import TextEnv", namespace)
    for block in found:
        exec(block, namespace)
    assert found


def test_no_page_has_blocks_that_are_not_run() -> None:
    elsewhere = {
        "environments": "the README's guess.py",
        "gateway": "needs OpenAI's client and Codex: tests/engines/clients_gateway.py has such functions",
        "langgraph": "tests/engines/graphs_langgraph.py",
        "lora": "needs a run of its own",
    }
    pages = {page.stem for page in DOCS.glob("*.md") if blocks(page)}
    assert pages == {"python", "rl_tool", "coming_from", *DEFINES, *elsewhere}
