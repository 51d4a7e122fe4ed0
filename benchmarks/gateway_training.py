"""Steps per second of an agent that speaks HTTP, beside `tool_agent` at the same task.

    python benchmarks/gateway_training.py [--preset small] [--sft-steps N] [--steps N] [--work DIR]

Both train on the products of examples/products from the same model: examples/gateway/openai.yaml, with
OpenAI's client, and examples/products/grpo.yaml. They run by turns, in the same minutes. Rollouts, training
and weights are in the time of a step; validations aren't. Then each plays batches without training, which
tells apart the CPU time of the engine, of the rest of the run's own thread (the gateway, the tree and the
scheduler), and of other threads (the client and the user's function; 0 for `tool_agent`). With `--work` a
fine-tuned model of the preset that lies in DIR is used again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from machine import describe_machine
from toy import parse_arguments

from turnwise.cli.main import main as turnwise
from turnwise.inference.embedded.engine import Engine
from turnwise.models.make import make_model

ROOT = Path(__file__).resolve().parent.parent
PRODUCTS = ROOT / "examples" / "products"
CONFIGS = {
    "tool_agent": PRODUCTS / "grpo.yaml",
    "openai": ROOT / "examples" / "gateway" / "openai.yaml",
}
OWN_WORDS = {"tool_agent": [f"agent.tool_config_path={PRODUCTS / 'tools.yaml'}"], "openai": []}
"""Settings of one of them alone. The path in the file is seen from the repository's folder."""
NUM_ROWS = 4_000

sys.path[:0] = [str(PRODUCTS), str(ROOT / "examples" / "gateway")]
import products  # noqa: E402


def start_model(folder: Path, preset: str, num_steps: int, batch: int) -> Path:
    """A model that has seen how the calculator is called, and files of rows beside it. What an earlier call
    has left in the folder is used."""
    saved = "sft/*/*/checkpoints/checkpoint-*"
    if made_before := sorted(folder.glob(saved)):
        return made_before[-1]
    folder.mkdir(parents=True, exist_ok=True)
    drawn = products.pairs(42)[:NUM_ROWS]
    rows = [products.row(a, b, index, True) for index, (a, b) in enumerate(drawn)]
    products.write(folder / "train.jsonl", rows)
    rng = random.Random(42)
    shown = [products.demonstration(a, b, rng, True) for a, b in drawn]
    products.write(folder / "demonstrations.jsonl", shown)
    texts = [json.dumps(products.SCHEMA) * 50, *map(json.dumps, shown[:2000])]
    made = make_model(preset, folder / "model", texts, seed=42)
    arguments = [
        f"pretrain={made.folder}",
        f"output_dir={folder / 'sft'}",
        f"train_files=[{folder / 'demonstrations.jsonl'}]",
        f"max_steps={num_steps}",
        f"training_args.per_device_train_batch_size={batch}",
        "track_with=[]",
    ]
    assert turnwise(["sft", str(PRODUCTS / "sft.yaml"), *arguments]) == 0
    [*_, model] = sorted(folder.glob(saved))
    return model


class EngineClock:
    """CPU seconds from the engine's first step to its newest: its own, those of the thread that it runs in,
    and those of the whole process."""

    def __init__(self) -> None:
        self.engine_s = 0.0
        self.thread_s = 0.0
        self.process_s = 0.0

    def timed(self, step: Any) -> Any:
        """The method `Engine.step`, timed."""
        starts: list[tuple[float, float]] = []

        def timed_step(engine: Engine) -> Any:
            started = time.thread_time()
            if not starts:
                starts.append((started, time.process_time()))
            finished = step(engine)
            ended = time.thread_time()
            self.engine_s += ended - started
            self.thread_s = ended - starts[0][0]
            self.process_s = time.process_time() - starts[0][1]
            return finished

        return timed_step


def cpu_of_episodes(name: str, folder: Path, model: Path, words: list[str]) -> dict[str, float]:
    """CPU milliseconds of an episode by who used them, over three batches that are played alone, and what
    these episodes were like: the mean number of turns, and of the score."""
    clock = EngineClock()
    step = Engine.step
    Engine.step = clock.timed(step)  # type: ignore[method-assign]
    out = Path(tempfile.mkdtemp(dir=folder)) / "rollouts.jsonl"
    arguments = arguments_of(name, folder, out.parent, model, words)
    try:
        command = ["rollout", str(CONFIGS[name]), "--out", str(out), "--batches", "3", *arguments]
        assert turnwise(command) == 0
    finally:
        Engine.step = step  # type: ignore[method-assign]
    episodes = [json.loads(line) for line in out.read_text().splitlines()]
    parts = {
        "engine": clock.engine_s,
        "rest_of_its_thread": clock.thread_s - clock.engine_s,
        "other_threads": clock.process_s - clock.thread_s,
    }
    result = {part: round(1e3 * seconds / len(episodes), 2) for part, seconds in parts.items()}
    result["turns"] = round(statistics.fmean(len(episode["turns"]) for episode in episodes), 3)
    result["score"] = round(statistics.fmean(episode["score"] for episode in episodes), 3)
    return result


def arguments_of(name: str, folder: Path, output: Path, model: Path, words: list[str]) -> list[str]:
    return [
        f"pretrain={model}",
        f"output_dir={output}",
        f"data.train_files={folder / 'train.jsonl'}",
        "data.val_files=[]",
        "eval_steps=0",
        "track_with=[]",
        *OWN_WORDS[name],
        *words,
    ]


def steps_of(name: str, folder: Path, model: Path, words: list[str]) -> list[dict[str, Any]]:
    """What was measured of each step, without the first."""
    output = Path(tempfile.mkdtemp(dir=folder))
    arguments = arguments_of(name, folder, output, model, words)
    assert turnwise(["train", str(CONFIGS[name]), "--quiet", *arguments]) == 0
    [metrics] = output.glob("*/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if "time/step_total" in row]
    return steps[1:] or steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=("tiny", "small"), default="small")
    parser.add_argument("--sft-steps", type=int, default=100)
    parser.add_argument("--sft-batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="a folder for what is made [one that is removed]")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gateway_training.json")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="settings of both runs")
    options = parse_arguments(parser, preset="tiny", sft_steps=2, steps=1, rounds=1)
    words = [f"max_steps={options.steps}", *options.words]
    if options.toy:
        words += ["rollout_batch_size=8", "train_env_manager.num_env_groups=1"]
        words += ["actor_train.training_args.per_device_train_batch_size=8"]
    seconds: dict[str, list[float]] = {name: [] for name in CONFIGS}
    parity: dict[str, float] = {}
    with ExitStack() as removed:
        folder = options.work or Path(removed.enter_context(tempfile.TemporaryDirectory()))
        work = folder / options.preset
        model = start_model(work, options.preset, options.sft_steps, options.sft_batch)
        for _ in range(options.rounds):
            for name in CONFIGS:
                steps = steps_of(name, work, model, words)
                seconds[name].append(statistics.median(step["time/step_total"] for step in steps))
                parity[name] = max(step.get("parity/logprob_diff_max", 0.0) for step in steps)
        cpu = {name: cpu_of_episodes(name, work, model, words) for name in CONFIGS}
    ratios = [own / others for own, others in zip(seconds["tool_agent"], seconds["openai"], strict=True)]
    result = {
        "machine": describe_machine(),
        "preset": options.preset,
        "step_s": {name: round(statistics.median(of), 3) for name, of in seconds.items()},
        "steps_per_s_of_tool_agent": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "an_episode_and_its_cpu_ms": cpu,
        "logprob_diff_max": parity,
    }
    print(json.dumps(result, indent=2))
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
