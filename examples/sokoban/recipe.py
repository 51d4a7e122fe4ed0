"""From random weights to a model that solves some Sokoban rooms, for reinforcement learning to start from.

    python examples/sokoban/recipe.py [--out DIR] [--seed N] [--rooms N] [--error-rate P]

1. A scripted player that draws most of its actions at random plays, under the limits of agentic.yaml, and
gives up where a box
   is stuck.
2. A model with random weights and a tokenizer are made.
3. Supervised fine-tuning teaches it the format, the rules, and to act like that player.

Then: `turnwise train examples/sokoban/agentic.yaml pretrain=DIR/sft_model`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from turnwise.assemble.saved import evaluate_model
from turnwise.assemble.sft import fine_tune
from turnwise.cli.main import exit_status
from turnwise.config import AgenticConfig, SFTConfig, load_config
from turnwise.data.demonstrations import read_demonstrations
from turnwise.envs.players import ErringPlayer, ExpertPlayer, GivingUpPlayer, Player
from turnwise.envs.sokoban.env import SokobanEnv
from turnwise.examine.agents import agent_settings
from turnwise.examine.envs import env_factory
from turnwise.examine.examined import examine
from turnwise.models.make import make_model
from turnwise.pipelines.evaluate import Score, success_table
from turnwise.play.demonstrations import demonstrations, write_jsonl
from turnwise.play.demonstrator import Demonstrator, demonstrate, tasks_of_tag
from turnwise.play.tokenizer_text import message_text
from turnwise.runtime.replaceable import point_link, require_new_or_link
from turnwise.types import Task, derive_seed

HERE = Path(__file__).parent
TAG = "Sokoban"


def main() -> None:
    options = parse_arguments()
    out = Path(options.out)
    require_new_or_link(out / "sft_model", "--out")
    config, _ = load_config(
        HERE / "agentic.yaml", [f"pretrain={out / 'model'}", f"seed={options.seed}"], AgenticConfig
    )

    def teacher(env: SokobanEnv, task: Task) -> Player:
        erring = ErringPlayer(ExpertPlayer(env), options.error_rate, seed=derive_seed(task.seed, "player"))
        return GivingUpPlayer(erring, lambda: not env.is_solvable)

    announce(f"1/3  demonstrations of a player that draws {options.error_rate:.0%} of its actions at random")
    demos = out / "demonstrations.jsonl"
    make_env, settings = env_factory(config, TAG, "train"), agent_settings(config, TAG, "train")
    tasks = tasks_of_tag(config, TAG, options.rooms, "train")
    num_episodes = write_jsonl(demos, demonstrations(make_env, settings, teacher, tasks))
    print(f"{num_episodes:,} episodes")

    announce("2/3  a model with random weights")
    made = make_model("tiny", out / "model", message_text(read_demonstrations([demos])), seed=options.seed)
    print(f"{made.num_parameters:,} parameters, {made.num_tokens} tokens")

    announce("3/3  supervised fine-tuning: imitate the erring player")
    overrides = [
        f"pretrain={made.folder}",
        f"train_files=[{demos}]",
        f"output_dir={out}",
        f"seed={options.seed}",
    ]
    sft_config, _ = load_config(HERE / "sft.yaml", [*overrides, *options.overrides], SFTConfig)
    sft_model = point_link(out / "sft_model", fine_tune(examine(sft_config)), "--out")

    rows = []
    for policy in ("random", "erring", "expert"):
        played = demonstrate(
            examine(config), TAG, Demonstrator(policy, options.error_rate), options.episodes, "val"
        )
        rows.append((policy, Score.count([episode.outcome for episode in played])))
    rows.append(("after SFT", evaluate_model(examine(config), str(sft_model), options.episodes).overall))
    announce(f"success on {options.episodes} held-out rooms")
    print(success_table(rows))
    print(f"\nnext: turnwise train examples/sokoban/agentic.yaml pretrain={sft_model}")


def announce(text: str) -> None:
    print(f"\n== {text}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Makes a tiny model that imitates a Sokoban player.")
    parser.add_argument("--out", default="runs/sokoban", help="folder for everything it makes")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--rooms", type=int, default=40_000, help="rooms that the erring player tries")
    parser.add_argument("--error-rate", type=float, default=0.6, help="share of actions drawn at random")
    parser.add_argument("--episodes", type=int, default=1000, help="held-out rooms of the evaluation")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="values that replace those of sft.yaml"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_status(main))
