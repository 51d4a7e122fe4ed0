"""From random weights to a model that imitates an erring player, for reinforcement learning to start from.

    python examples/imitate.py CONFIG [--demonstrations N] [--error-rate P] [--vocab-size N] [KEY=VALUE ...]

CONFIG has one environment with an expert, such as `examples/webshop/agentic.yaml`, and an `sft.yaml` beside
it. Everything is written to the folder of its `pretrain`.

1. A player that follows the expert, and draws some of its actions at random, plays under CONFIG's limits.
2. A model with random weights is made, with a tokenizer of the demonstrations' words.
3. Supervised fine-tuning teaches it the pages, the form of actions, and to act like that player.

Then: `turnwise train CONFIG`. KEY=VALUE replaces values of sft.yaml.
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

GREEDY = "val_env_manager.generating_args.do_sample=false"


def main() -> None:
    options = parse_arguments()
    config = config_of(options)
    [tag] = config.custom_envs
    out = Path(config.pretrain).parent
    require_new_or_link(out / "sft_model", "pretrain")

    announce(f"1/3  demonstrations of a player that draws {options.error_rate:.0%} of its actions at random")
    demos = out / "demonstrations.jsonl"
    teacher = Demonstrator("erring", options.error_rate)
    played = demonstrate(examine(config), tag, teacher, options.demonstrations)
    num_rows = write_jsonl(demos, chain.from_iterable(episode.conversations for episode in played))
    print(f"{num_rows:,} conversations of {options.demonstrations:,} episodes")

    announce("2/3  a model with random weights")
    texts = message_text(read_demonstrations([demos]))
    made = make_model("tiny", out / "model", texts, seed=config.seed, vocab_size=options.vocab_size)
    print(f"{made.num_parameters:,} parameters, {made.num_tokens} tokens")

    announce("3/3  supervised fine-tuning: imitate the erring player")
    overrides = [
        f"pretrain={made.folder}",
        f"train_files=[{demos}]",
        f"output_dir={out}",
        f"seed={config.seed}",
    ]
    sft_file = Path(options.config).with_name("sft.yaml")
    sft_config, _ = load_config(sft_file, [*overrides, *options.overrides], SFTConfig)
    sft_model = point_link(out / "sft_model", fine_tune(examine(sft_config)), "pretrain")

    rows = []
    for policy in ("random", "erring", "expert"):
        player = Demonstrator(policy, options.error_rate)
        baseline = demonstrate(examine(config), tag, player, options.episodes, "val")
        rows.append((policy, Score.count([episode.outcome for episode in baseline])))
    for name, changes in (("after SFT", []), ("after SFT, greedy", [GREEDY])):
        changed = examine(config_of(options, *changes))
        rows.append((name, evaluate_model(changed, str(sft_model), options.episodes).overall))
    announce(f"success on {options.episodes} held-out tasks")
    print(success_table(rows))
    print(f"\nnext: turnwise train {options.config}")


def config_of(options: argparse.Namespace, *changes: str) -> AgenticConfig:
    """The config with this run's folder and seed, and `changes`."""
    own = [] if options.seed is None else [f"seed={options.seed}"]
    if options.out is not None:
        own.append(f"pretrain={Path(options.out) / 'sft_model'}")
    config, _ = load_config(Path(options.config), [*own, *changes], AgenticConfig)
    return config


def announce(text: str) -> None:
    print(f"\n== {text}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Makes a tiny model that imitates an erring player.")
    parser.add_argument("config", metavar="CONFIG", help="config of the reinforcement learning that follows")
    parser.add_argument("--out", help="folder for everything it makes [that of the config's pretrain]")
    parser.add_argument("--seed", type=int, help="seed of everything [the config's]")
    parser.add_argument("--demonstrations", type=int, default=2000, help="episodes of the erring player")
    parser.add_argument("--error-rate", type=float, default=0.5, help="share of actions drawn at random")
    parser.add_argument("--vocab-size", type=int, default=512, help="maximum tokens of the tokenizer")
    parser.add_argument("--episodes", type=int, default=500, help="held-out tasks of the evaluation")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="values that replace those of sft.yaml"
    )
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    sys.exit(exit_status(main))
