"""What credit costs for each estimator: 1,024 trajectories of 20 turns of 64 sampled tokens, in groups of 8.

    python benchmarks/credit.py [--runs 5] [--mode trajectory step] python benchmarks/credit.py --step      #
    minutes: the step that the credit is a share of, added to the results

`trajectory` is one context an episode, `step` one a turn. Medians of `--runs`, in processor time, which
doesn't depend on what else the machine does; with a KL in the reward, so that every estimator reads log-probs
too.

`--step` plays and trains such a batch once, with the `tiny` model in one context an episode: the embedded
server samples every token, turn by turn, and one optimiser step is taken on them. Environments and everything
else of a step are left out, so that the share that is printed is an upper bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

import numpy as np
from machine import describe_machine
from toy import parse_arguments
from train import make_model, make_strategy, train_step, with_advantages

from turnwise.algorithms.losses import PolicyLoss
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.batching.samples import build_samples
from turnwise.errors import ConfigError
from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.runtime.entry_points import load_class
from turnwise.spec import ESTIMATORS
from turnwise.types import Group, SamplingParams, Task, Trajectory, Turn, samples_of

GROUP_SIZE, NUM_TURNS, NUM_TOKENS, NUM_PROMPT, NUM_STATES = 8, 20, 64, 16, 30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mode", nargs="+", default=["trajectory", "step"], choices=["trajectory", "step"])
    parser.add_argument("--estimators", nargs="+", default=list(ESTIMATORS), choices=list(ESTIMATORS))
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "credit.json")
    options = parse_arguments(parser, runs=1, groups=1)
    if options.step:
        add_step(options.out, options.groups)
        return
    milliseconds: dict[str, dict[str, float]] = {}
    for mode in options.mode:
        groups = play(options.groups, is_stepwise=mode == "step")
        for name in options.estimators:
            milliseconds.setdefault(name, {})[mode] = round(1000 * measure(name, groups, options.runs), 1)
    for name, of_mode in milliseconds.items():
        print(f"{name:<30}" + "  ".join(f"{mode} {ms:7.1f} ms" for mode, ms in of_mode.items()))
    result = {
        "machine": describe_machine(),
        "num_trajectories": options.groups * GROUP_SIZE,
        "num_turns": NUM_TURNS,
        "num_tokens": NUM_TOKENS,
        "milliseconds": milliseconds,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def add_step(out: Path, num_groups: int) -> None:
    """Measures a step and writes it, with the share of the slowest estimator, to the results that are
    there."""
    result = json.loads(out.read_text(encoding="utf-8"))
    result["step"] = step_seconds(num_groups)
    slowest = max(of_mode["trajectory"] for of_mode in result["milliseconds"].values()) / 1000
    result["largest_share_of_step"] = round(slowest / sum(result["step"].values()), 5)
    print({name: result[name] for name in ("step", "largest_share_of_step")})
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def step_seconds(num_groups: int) -> dict[str, float]:
    """Processor seconds of playing the batch and of training on it."""
    model = make_model(512)
    server = EmbeddedServer(
        model, max_length=NUM_TURNS * (NUM_PROMPT + NUM_TOKENS), max_concurrency=256, kv_cache_bytes=2**32
    )
    started = time.process_time()
    trajectories = asyncio.run(play_all(server, num_groups))
    played = time.process_time()
    samples = with_advantages([build_samples(trajectory)[0] for trajectory in trajectories])
    train_step(make_strategy(model), samples, PolicyLoss(AlgorithmSettings()))
    return {"rollout_s": round(played - started, 1), "train_s": round(time.process_time() - played, 1)}


async def play_all(server: EmbeddedServer, num_groups: int) -> list[Trajectory]:
    episodes = (
        sampled_episode(server, index, sibling)
        for index in range(num_groups)
        for sibling in range(GROUP_SIZE)
    )
    played = await asyncio.gather(*episodes)
    await server.close()
    return list(played)


async def sampled_episode(server: EmbeddedServer, index: int, sibling: int) -> Trajectory:
    """Turns of random observations and sampled responses in one context."""
    rng = np.random.default_rng((index, sibling))
    context: list[int] = []
    turns = []
    for turn in range(NUM_TURNS):
        prompt = rng.integers(0, 512, NUM_PROMPT)
        context += prompt.tolist()
        sampling = SamplingParams(NUM_TOKENS, seed=turn + NUM_TURNS * (sibling + GROUP_SIZE * index))
        completion = await server.generate(context, sampling, f"{index}/{sibling}")
        context += list(completion.token_ids)
        turns.append(Turn(prompt, np.array(completion.token_ids), np.array(completion.logprobs, np.float32)))
    await server.release(f"{index}/{sibling}")
    return Trajectory(Task(id=str(index), tag="benchmark", split="train", seed=index), sibling, turns=turns)


def measure(name: str, groups: list[Group], runs: int) -> float:
    """Median processor seconds of crediting the batch once."""
    settings = AlgorithmSettings(adv_estimator=name, add_token_level_kl=True, init_kl_coef=0.01, gamma=0.99)
    algorithm = load_class(ESTIMATORS[name].entry, "adv_estimator", ConfigError)(settings)
    times = []
    for _ in range(runs):
        started = time.process_time()
        algorithm.credit(groups)
        times.append(time.process_time() - started)
    return statistics.median(times)


def play(num_groups: int, is_stepwise: bool) -> list[Group]:
    """Random rewards, states and log-probs; each group has a greedy sibling."""
    rng = np.random.default_rng(0)
    groups = []
    for index in range(num_groups):
        task = Task(id=str(index), tag="benchmark", split="train", seed=index)
        siblings = [episode(task, sibling, is_stepwise, rng) for sibling in range(GROUP_SIZE)]
        groups.append(Group(task, siblings, index=index, greedy=episode(task, 0, is_stepwise, rng)))
    for sample in samples_of(groups):
        arrays = rng.normal(size=(4, sample.num_tokens)).astype(np.float32)
        sample.old_logprobs, sample.ref_logprobs, sample.values, sample.next_values = arrays
    return groups


def episode(task: Task, sibling: int, is_stepwise: bool, rng: np.random.Generator) -> Trajectory:
    turns = [
        Turn(
            prompt_ids=np.arange(NUM_PROMPT),
            response_ids=np.arange(NUM_TOKENS),
            logprobs=np.zeros(NUM_TOKENS, np.float32),
            reward=float(rng.random() < 0.1),
            state_key=f"state {rng.integers(NUM_STATES)}",
            starts_context=is_stepwise,
        )
        for _ in range(NUM_TURNS)
    ]
    trajectory = Trajectory(task, sibling, turns=turns)
    trajectory.samples = build_samples(trajectory)
    return trajectory


if __name__ == "__main__":
    main()
