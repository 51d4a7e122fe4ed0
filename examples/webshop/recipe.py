"""From random weights to a model that sometimes buys the right thing, for reinforcement learning to start
from.

    python examples/webshop/recipe.py [--out DIR] [--seed N] [--episodes N] [--error-rate P] [KEY=VALUE ...]

1. A scripted player that draws some of its actions at random shops, under the limits of agentic.yaml.
2. A model with random weights is made. Its tokenizer has a token for each word of the shop, so that words can
   be copied.
3. Supervised fine-tuning teaches it the pages, the form of actions, and to act like that player.

Then: `turnwise train examples/webshop/agentic.yaml pretrain=DIR/sft_model`. KEY=VALUE replaces values of
sft.yaml.
"""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path

from turnwise.assemble.saved import evaluate_model
from turnwise.assemble.sft import fine_tune
from turnwise.cli.main import exit_status
from turnwise.config import AgenticConfig, SFTConfig, load_config
from turnwise.data.demonstrations import read_demonstrations
from turnwise.examine.examined import examine
from turnwise.models.make import make_model
from turnwise.pipelines.evaluate import Score, success_table
from turnwise.play.demonstrations import write_jsonl
from turnwise.play.demonstrator import Demonstrator, demonstrate
from turnwise.play.tokenizer_text import message_text
from turnwise.runtime.replaceable import point_link, require_new_or_link

HERE = Path(__file__).parent
TAG = "WebShop"
VOCAB_SIZE = 1024
GREEDY = "val_env_manager.generating_args.do_sample=false"


def main() -> None:
    options = parse_arguments()
    out = Path(options.out)
    require_new_or_link(out / "sft_model", "--out")
    config = config_of(options)

    announce(f"1/3  demonstrations of a player that draws {options.error_rate:.0%} of its actions at random")
    demos = out / "demonstrations.jsonl"
    played = demonstrate(
        examine(config), TAG, Demonstrator("erring", options.error_rate), options.demonstrations
    )
    num_rows = write_jsonl(demos, chain.from_iterable(episode.conversations for episode in played))
    print(f"{num_rows:,} turns of {options.demonstrations:,} episodes")

    announce("2/3  a model with random weights")
    texts = message_text(read_demonstrations([demos]))
    made = make_model("tiny", out / "model", texts, seed=options.seed, vocab_size=VOCAB_SIZE)
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
        baseline = demonstrate(
            examine(config), TAG, Demonstrator(policy, options.error_rate), options.episodes, "val"
        )
        rows.append((policy, Score.count([episode.outcome for episode in baseline])))
    for name, changes in (("after SFT", []), ("after SFT, greedy", [GREEDY])):
        score = evaluate_model(
            examine(config_of(options, *changes)), str(sft_model), options.episodes
        ).overall
        rows.append((name, score))
    announce(f"success on {options.episodes} held-out wishes")
    print(success_table(rows))
    print(f"\nnext: turnwise train examples/webshop/agentic.yaml pretrain={sft_model}")


def config_of(options: argparse.Namespace, *changes: str) -> AgenticConfig:
    """agentic.yaml with this run's folder and seed, and `changes`."""
    own = [f"pretrain={Path(options.out) / 'model'}", f"seed={options.seed}"]
    config, _ = load_config(HERE / "agentic.yaml", [*own, *changes], AgenticConfig)
    return config


def announce(text: str) -> None:
    print(f"\n== {text}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Makes a tiny model that imitates a WebShop player.")
    parser.add_argument("--out", default="runs/webshop", help="folder for everything it makes")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--demonstrations", type=int, default=2000, help="episodes of the erring player")
    parser.add_argument("--error-rate", type=float, default=0.5, help="share of actions drawn at random")
    parser.add_argument("--episodes", type=int, default=500, help="held-out wishes of the evaluation")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="values that replace those of sft.yaml"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_status(main))
