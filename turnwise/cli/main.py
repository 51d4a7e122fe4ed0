"""`turnwise VERB`: reads the command line, imports only what the verb needs, and prints errors as one message."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

from turnwise import __version__
from turnwise.cli.command_line import EXIT_NO_READER, MENDABLE, check_options, has_lost_reader, open_standard_streams
from turnwise.cli.guard import guarded
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.models.presets import PRESETS
from turnwise.pipelines.interrupt import EXIT_INTERRUPTED, ends_at_once, ends_by_signals
from turnwise.runtime.call_board import CALLS
from turnwise.runtime.rank import launched

EXIT_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit status: 0, 2 for an error that the user can fix, 130 after Ctrl-C or SIGTERM.

    The command itself (no `arguments`) runs under the eyes of a parent process.
    """
    with ends_at_once():
        open_standard_streams(is_command=arguments is None)
        parser = build_parser()
        # Overrides may follow options too, where argparse's own "*" no longer finds them.
        options, rest = parser.parse_known_args(arguments)
        unknown = [word for word in rest if word.startswith("-") or "=" not in word or "overrides" not in options]
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)} (settings are KEY=VALUE)")
        if rest:
            options.overrides = [*options.overrides, *rest]
        # A user's own `module:Class` is beside the config or in the working directory, which a console script doesn't search.
        named = [vars(options).get(name) for name in ("config", "env")]
        configs = [os.path.abspath(word) for word in named if isinstance(word, str) and word.endswith((".yaml", ".yml"))]
        sys.path[:0] = list(dict.fromkeys([*map(os.path.dirname, configs), os.getcwd()]))
        return _run(options) if arguments is not None else guarded(partial(_run, options))


def _run(options: argparse.Namespace) -> int:
    def run() -> int:
        check_options(options)
        if launched()[0] > 0:
            return _serve(options)
        verb: Callable[[argparse.Namespace], int] = import_module(f"turnwise.cli.{options.module}").run
        return verb(options)

    return exit_status(run)


def _serve(options: argparse.Namespace) -> int:
    """What a launcher's processes do beside the first one."""
    is_tool_train = options.module == "tool_command" and vars(options).get("action") == "train"
    if options.module not in ("train_command", "sft_command") and not is_tool_train:
        raise ConfigError(
            "a launcher started this command in several processes, and only train and sft train on them; start it without"
        )
    import_module("turnwise.cluster.launched").serve_launched()
    return 0


def exit_status(run: Callable[[], int | None]) -> int:
    """Runs something and prints the errors that a user can fix as one message, without a traceback."""
    from turnwise.tracking.terminal import warnings_on_terminal  # behind the fork: the parent process stays small

    try:
        with ends_by_signals(), warnings_on_terminal():
            status = run() or 0
            sys.stdout.flush()
            return status
    except TurnwiseError as fault:
        print(f"error: {fault}", file=sys.stderr)
    except OSError as fault:
        if isinstance(fault, BrokenPipeError) and has_lost_reader():
            return EXIT_NO_READER
        if fault.errno not in MENDABLE:
            raise
        print(f"error: {fault}; {MENDABLE[fault.errno]}", file=sys.stderr)
    except KeyboardInterrupt:
        CALLS.finish(EXIT_INTERRUPTED)  # another Ctrl-C has nothing to say
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_ERROR


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs; it imports none of them."""
    parser = argparse.ArgumentParser(prog="turnwise", description="Reinforcement learning of language-model agents.")
    parser.add_argument("--version", action="version", version=f"turnwise {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    train = _verb(verbs, "train", "train_command", "train a policy by reinforcement learning")
    _config_arguments(train)
    _quiet_argument(train)
    train.add_argument("--from-rollouts", metavar="FILE", help="train from this rollouts.jsonl, in its order; play nothing")
    train.add_argument(
        "--replay", metavar="RUN", help="repeat an asynchronous run bit by bit, with its config; only KEY=VALUE may follow"
    )
    train.add_argument("--profile", action="store_true", help="write timeline.json, a Chrome trace, into the run folder")

    sft = _verb(verbs, "sft", "sft_command", "train a model on demonstrations (JSONL of messages)")
    _config_arguments(sft)
    _quiet_argument(sft)

    _demos_arguments(_verb(verbs, "demos", "demos_command", "play demonstrations for sft, by a player that needs no model"))

    _rollout_arguments(
        _verb(verbs, "rollout", "rollout_command", "play batches without training, write them to a file and sum them up")
    )

    evaluate = _verb(verbs, "eval", "eval_command", "success of saved models on a config's validation tasks")
    _config_arguments(evaluate)
    models = "a model to score (default: the config's pretrain); may be given several times, for the same tasks"
    evaluate.add_argument("--model", action="append", default=[], metavar="DIR", help=models)
    evaluate.add_argument("--episodes", type=int, metavar="N", help="number of tasks (default: as many as a validation has)")
    evaluate.add_argument("--samples", type=int, metavar="K", help="episodes of each task, for pass@k (default: group_size)")
    evaluate.add_argument("--sampled", action="store_true", help="sample as validation does; no greedy episodes")
    evaluate.add_argument("--greedy", action="store_true", help="take the likeliest tokens; no sampled episodes")
    evaluate.add_argument("--json", metavar="FILE", help="write the result here too")

    config = _verb(verbs, "config", "config_command", "print the resolved config and what will be applied")
    _config_arguments(config)
    config.add_argument("--json", action="store_true", help="print as JSON")

    export = _verb(verbs, "export", "export_command", "write a checkpoint as a plain model folder, its LoRA adapter merged")
    export.add_argument("--model", required=True, metavar="DIR", help="checkpoint, adapter or model folder")
    export.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    export.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"), help="of the weights (default: fp32)")

    compare = _verb(verbs, "compare", "compare_command", "compare runs: results, settings in which they differ, curves")
    _compare_arguments(compare)
    _tool_verbs(verbs)

    make = _verb(verbs, "make-model", "make_model_command", "make a model folder with random weights and its tokenizer")
    make.add_argument("--size", default="tiny", help=f"one of {', '.join(PRESETS)} (default: tiny)")
    make.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--text", nargs="*", default=[], metavar="FILE", help="more text for the tokenizer to be trained on")
    make.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="change a value of the preset's config.json")

    check = _verb(verbs, "check-env", "check_env_command", "examine an environment: what is wrong with it, and what to change")
    _env_arguments(check)
    _tokenizer_argument(check)
    check.add_argument("--config", metavar="FILE", help="take arguments and limits from a tag of this config")
    check.add_argument("--episodes", type=int, metavar="N", help="episodes of each player (default: 64)")
    check.add_argument("--budget", type=int, metavar="TOKENS", help="tokens of a context (default: its sequence_length)")
    check.add_argument("--timeout", type=float, metavar="S", help="seconds after which a call counts as hanging (default: 20)")
    check.add_argument("--json", action="store_true", help="print as JSON")

    play = _verb(verbs, "play", "play_command", "one episode turn by turn, as the model sees it")
    _env_arguments(play)
    _tokenizer_argument(play)
    play.add_argument(
        "--policy", default="human", metavar="WHO", help="human (default), random, scripted, a model's DIR, or openai:URL"
    )
    play.add_argument("--model-name", metavar="NAME", help="the model behind openai:URL")
    play.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the episode; of rows, the number of the row (default: 0)"
    )
    play.add_argument("--split", choices=("train", "val"), default="train")
    play.add_argument("--ids", action="store_true", help="show every token id")
    play.add_argument("--no-color", action="store_true")
    return parser


def _verb(verbs: argparse._SubParsersAction, name: str, module: str, help_text: str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=help_text, description=help_text)
    parser.set_defaults(module=module, verb=name)
    return parser


def _tool_verbs(verbs: argparse._SubParsersAction) -> None:
    tool = _verb(verbs, "tool", "tool_command", "one action of the tool: train, load_dataset, create_reward, evaluate, export")
    tool.add_argument("action", metavar="ACTION")
    tool.add_argument("parameters", nargs=argparse.REMAINDER, metavar="--NAME VALUE", help="parameters (docs/rl_tool.md)")

    pipeline = _verb(verbs, "pipeline", "tool_command", "data, sft, evaluation, grpo, evaluation and a report, from one file")
    pipeline.add_argument("config", metavar="FILE", help="YAML or JSON (docs/rl_tool.md)")


def _compare_arguments(compare: argparse.ArgumentParser) -> None:
    compare.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or one of an experiment with all of its runs")
    metric = "a name of metrics.jsonl, `*` for any one part; may be given several times (default: success, score or loss)"
    compare.add_argument("--metric", action="append", default=[], metavar="NAME", help=metric)
    compare.add_argument("--out", metavar="FILE", help="draw the curves side by side into this picture")


def _env_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("env", nargs="?", metavar="ENV", help="env_type (frozen_lake), your module:Class, or a config (.yaml)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="arguments of the environment; of a config, any key")
    parser.add_argument("--tag", help="which environment of the config")
    parser.add_argument("--actions", metavar="A,B,C", help="the random player's actions, if the environment has no `actions`")
    parser.add_argument("--actions-file", metavar="FILE", help="a file of actions, one a line (they may hold commas)")
    parser.add_argument("--max-steps", type=int, metavar="N", help="most actions of an episode (default: the config's, or 10)")


def _tokenizer_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", metavar="DIR", help="model whose tokenizer counts (default: the config's pretrain)")


def _rollout_arguments(rollout: argparse.ArgumentParser) -> None:
    _config_arguments(rollout)
    rollout.add_argument("--model", metavar="DIR", help="the model that plays (default: the config's pretrain)")
    rollout.add_argument("--out", default="rollouts.jsonl", metavar="FILE", help="a new file (default: rollouts.jsonl)")
    rollout.add_argument("--batches", "--steps", type=int, default=1, metavar="N", help="number of batches (default: 1)")
    rollout.add_argument("--split", choices=("train", "val"), default="train", help="whose tasks (default: train)")
    rollout.add_argument("--json", action="store_true", help="print the summary as JSON")
    rollout.add_argument(
        "--replay",
        metavar="FILE",
        help="put what this rollouts.jsonl or turns.jsonl holds through the loop; stop at a difference",
    )


def _demos_arguments(demos: argparse.ArgumentParser) -> None:
    _env_arguments(demos)
    demos.add_argument(
        "--policy", default="expert", metavar="WHO", help="expert (default), random, erring, your module:Class, or openai:URL"
    )
    demos.add_argument(
        "--error-rate", type=float, metavar="P", help="share of the erring player's random actions (default: 0.5)"
    )
    demos.add_argument("--episodes", type=int, default=1000, metavar="N", help="number of episodes (default: 1000)")
    demos.add_argument("--model-name", metavar="NAME", help="the model behind openai:URL")
    demos.add_argument("--out", default="demos.jsonl", metavar="FILE", help="a new file (default: demos.jsonl)")


def _quiet_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="print warnings, errors and where the results are, no steps")


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="FILE", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values that replace the file's")
    parser.add_argument("--strict", action="store_true", help="refuse settings that have no effect")


if __name__ == "__main__":
    sys.exit(main())
