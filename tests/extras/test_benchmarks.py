"""Every benchmark runs at toy size, our side of it where another program is compared, so that none can
rot."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

from turnwise import Trainer
from turnwise.models.make import make_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LAKE = BENCHMARKS.parent / "examples" / "frozen_lake" / "agentic.yaml"
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
ARGUMENTS = {
    "algorithms": "frozen_lake --sft-model MODEL --work WORK --picture PICTURE",
    "async": "MODEL",
    "balance": "",
    "capabilities": "",
    "cluster": "",
    "credit": "",
    "display": "RUN",
    "end_to_end": "--sft-model MODEL",
    "end_to_end_own": None,
    "end_to_end_trl": None,
    "env_workers": "",
    "exchange": "",
    "gateway": "",
    "gateway_training": "",
    "gpu": "",
    "langgraph_calls": "",
    "learning_curves": "--picture PICTURE",
    "openenv_steps": "",
    "overheads": "RUN --name toy",
    "process_arrays": "",
    "quickstart": "--sft-model MODEL --work WORK",
    "ranks": "",
    "lending": "",
    "reach": "",
    "reach_real": "",
    "real_model": "",
    "real_model_own": None,
    "real_model_trl": None,
    "revisions": "ROOT MODEL",
    "rollout": "",
    "rollout_worker": None,
    "rows": "",
    "scale": "",
    "sft": "",
    "soak": "",
    "sokoban": "--sft-model MODEL --work WORK",
    "startup": "",
    "step_credit": "--work WORK",
    "step_reward": "",
    "tool_conversations": "",
    "tool_latency": "",
    "traces": "",
    "train": "",
    "view": "",
    "webshop": "",
    "weights": "",
}
"""What a benchmark needs beside `--toy`. None: the process of another one, which runs it; TRL's side needs
TRL."""
LIBRARIES = {"cluster": "ray", "gateway_training": "openai", "langgraph_calls": "langgraph"}
"""The library of a benchmark that a development environment needn't have."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths that arguments name: a random model that reads the examples, and a run of it."""
    folder = tmp_path_factory.mktemp("benchmarks")
    made = make_model("tiny", folder / "model", [LAKE.read_text(encoding="utf-8")], overrides=SHAPE)
    sizes = {"rollout_batch_size": 8, "val_batch_size": 4, "train_env_manager": {"num_env_groups": 1}}
    ends = {"max_steps": 2, "eval_steps": 1, "output_dir": str(folder / "runs"), "track_with": []}
    Trainer.from_config(LAKE, pretrain=str(made.folder), **sizes, **ends).train()
    run = next((folder / "runs").glob("*/*/metrics.jsonl")).parent
    return {"MODEL": str(made.folder), "RUN": str(run), "ROOT": str(BENCHMARKS.parent)}


@pytest.fixture
def a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a script changes in this process is as before: importing torch in one for each would take
    minutes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(subprocess, "run", run_forked)
    num_threads, modules = torch.get_num_threads(), set(sys.modules)
    yield
    torch.set_num_threads(num_threads)
    for name in set(sys.modules) - modules:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


_run = subprocess.run


def run_forked(command: Sequence[str], check: bool = False, **options: Any) -> Any:
    """Like `subprocess.run`, but scripts of this Python and commands of turnwise are forked off a process
    that has imported torch."""
    python, *words = map(str, command)
    if python != sys.executable or words[0] == "-c":
        return _run(command, check=check, **options)
    is_command = words[:2] == ["-m", "turnwise.cli.main"]
    module = "turnwise.cli.main" if is_command else "script_file"
    captures = options.pop("capture_output", False)
    done = forked.run(words[2:] if is_command else words, capture_output=captures, module=module, **options)
    if check:
        done.check_returncode()
    return done


def test_each_benchmark_is_here() -> None:
    scripts = {
        path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")
    }
    assert scripts == set(ARGUMENTS)


@pytest.mark.parametrize("name", [name for name, arguments in ARGUMENTS.items() if arguments is not None])
@pytest.mark.usefixtures("a_process_of_its_own")
def test_a_benchmark_runs_at_toy_size(
    name: str,
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} isn't installed: {name}.py needs it")
    words = {**places, "WORK": str(tmp_path / "work"), "PICTURE": str(tmp_path / "picture.png")}
    arguments = [words.get(word, word) for word in str(ARGUMENTS[name]).split()]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--toy", *arguments])
    runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    assert capfd.readouterr().out
