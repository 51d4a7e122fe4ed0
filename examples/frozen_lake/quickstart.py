"""From random weights to a model that solves FrozenLake maps it has never seen.

    python examples/frozen_lake/quickstart.py [--out DIR] [--seed N] [--episodes N] [KEY=VALUE ...]

1. A scripted player that errs half of the time plays demonstrations.
2. A model with random weights and a tokenizer are made.
3. Supervised fine-tuning teaches it the format, the rules, and to act like that player.
4. Reinforcement learning makes it win.

KEY=VALUE overrides agentic.yaml, the config of step 4.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.saved import evaluate_model
from turnwise.assemble.sft import fine_tune
from turnwise.assemble.whole_run import whole_run
from turnwise.cli.main import exit_status
from turnwise.config import AgenticConfig, SFTConfig, load_config
from turnwise.data.demonstrations import read_demonstrations
from turnwise.envs.frozen_lake.map import best_blind_path
from turnwise.envs.players import BlindPlayer
from turnwise.examine.agents import agent_settings
from turnwise.examine.envs import env_factory
from turnwise.examine.examined import examine
from turnwise.models.make import make_model
from turnwise.pipelines.evaluate import Score, success_table
from turnwise.play.demonstrations import play, write_jsonl
from turnwise.play.demonstrator import Demonstrator, demonstrate, tasks_of_tag
from turnwise.play.tokenizer_text import message_text
from turnwise.report.curve import learning_curve
from turnwise.runtime.replaceable import point_link, require_new_or_link
from turnwise.tracking.jsonl import read_metrics

HERE = Path(__file__).parent
TAG = "FrozenLake"
NUM_DEMONSTRATIONS = 12_000
ERROR_RATE = 0.5
GREEDY = "val_env_manager.generating_args.do_sample=false"


def main() -> None:
    options = parse_arguments()
    started = time.perf_counter()
    out = Path(options.out)
    require_new_or_link(out / "sft_model", "--out")
    config = config_of(options)

    announce("1/4  demonstrations of a player that errs half of the time")
    demos = out / "demonstrations.jsonl"
    episodes = demonstrate(examine(config), TAG, Demonstrator("erring", ERROR_RATE), NUM_DEMONSTRATIONS)
    write_jsonl(demos, chain.from_iterable(episode.conversations for episode in episodes))

    announce("2/4  a model with random weights")
    made = make_model("tiny", out / "model", message_text(read_demonstrations([demos])), seed=options.seed)
    print(f"{made.num_parameters:,} parameters, {made.num_tokens} tokens")
    before = success(config, made.folder, options.episodes)

    announce("3/4  supervised fine-tuning: imitate the erring player")
    sft_overrides = [
        f"pretrain={made.folder}",
        f"train_files=[{demos}]",
        f"output_dir={out}",
        f"seed={options.seed}",
    ]
    sft_overrides += [f"sequence_length={config.sequence_length}"]
    sft_config, _ = load_config(HERE / "sft.yaml", sft_overrides, SFTConfig)
    sft_model = point_link(out / "sft_model", fine_tune(examine(sft_config)), "--out")
    after_sft = success(config, sft_model, options.episodes)

    announce("4/4  reinforcement learning: win")
    training = config_of(options, f"pretrain={sft_model}")
    with whole_run(training, partial(build_agentic, examine(training))) as pipeline:
        pipeline.run()
    folder, rl_model = pipeline.folder, pipeline.checkpoints.newest
    assert rl_model is not None  # a finished run has saved one
    after_rl = success(config, rl_model, options.episodes)

    players = baselines(config, options.episodes)
    rows = [*players, ("before SFT", before), ("after SFT", after_sft), ("after RL", after_rl)]
    # What a policy would do if it always took its likeliest token: how much of the skill SFT has taught, and
    # RL brings out.
    greedy = config_of(options, GREEDY)
    rows += [("after SFT, greedy", success(greedy, sft_model, options.episodes))]
    rows += [("after RL, greedy", success(greedy, rl_model, options.episodes))]
    announce(
        f"success on {options.episodes} held-out tasks ({num_held_out_maps(config, options.episodes)} "
        "different maps)"
    )
    print(success_table(rows))
    curve = learning_curve(
        read_metrics(folder.metrics),
        folder.curve,
        "FrozenLake 4×4: success while training",
        {name: score.success for name, score in players},
    )
    print(f"\nlearning curve  {curve}\nTensorBoard     tensorboard --logdir {folder.tensorboard}")
    print(f"model           {rl_model}")
    print(f"took {(time.perf_counter() - started) / 60:.1f} minutes")


def config_of(options: argparse.Namespace, *changes: str) -> AgenticConfig:
    """agentic.yaml with this run's folder and seed, the user's overrides and `changes`."""
    out = Path(options.out)
    own = [f"pretrain={out / 'model'}", f"output_dir={out}", f"seed={options.seed}"]
    config, _ = load_config(HERE / "agentic.yaml", [*own, *options.overrides, *changes])
    return config


def success(config: AgenticConfig, model: Path, num_episodes: int) -> Score:
    """Success of a saved model on the held-out tasks."""
    return evaluate_model(examine(config), str(model), num_episodes).overall


def baselines(config: AgenticConfig, num_episodes: int) -> list[tuple[str, Score]]:
    """What players without a model reach on the held-out tasks.

    The blind path is the one that succeeds most often on them: no player that doesn't look at the map does
    better.
    """
    path, _ = best_blind_path(held_out_maps(config, num_episodes))
    make_env, settings = env_factory(config, TAG, "val"), agent_settings(config, TAG, "val")
    tasks = tasks_of_tag(config, TAG, num_episodes, "val")
    blind = play(make_env, settings, lambda env, task: BlindPlayer(env, path), tasks)

    def scripted(policy: str) -> Score:
        played = demonstrate(examine(config), TAG, Demonstrator(policy), num_episodes, "val")
        return Score.count([episode.outcome for episode in played])

    return [
        ("random player", scripted("random")),
        ("best blind path", Score.count(blind)),
        ("shortest path", scripted("expert")),
    ]


def held_out_maps(config: AgenticConfig, num_tasks: int) -> list[Sequence[str]]:
    make_env = env_factory(config, TAG, "val")
    maps = []
    for task in tasks_of_tag(config, TAG, num_tasks, "val"):
        env = make_env(task)
        env.reset(seed=task.seed)
        maps.append(env.rows)
    return maps


def num_held_out_maps(config: AgenticConfig, num_tasks: int) -> int:
    return len({tuple(rows) for rows in held_out_maps(config, num_tasks)})


def announce(text: str) -> None:
    print(f"\n== {text}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a tiny model to solve FrozenLake.")
    parser.add_argument("--out", default="runs/quickstart", help="folder for everything it makes")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--episodes", type=int, default=1000, help="held-out episodes of each evaluation")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="values that replace those of agentic.yaml"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_status(main))
