"""The command line: what each verb does, its arguments, and the function that runs it. A verb's module is
imported by its `load` only, so that `turnwise --help` needs none of them."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

from turnwise.cli.model_arguments import add_export, add_make_model, add_serve
from turnwise.cli.record_arguments import add_compare, add_convert, add_serve_env, add_trace, add_view

Command = Callable[[Namespace], int]
"""Runs a verb with its options and returns the exit status."""

_TRAINING_CONTINUES = "a training run continues with resume_from_checkpoint=true"


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of the command line."""

    help: str
    add_arguments: Callable[[ArgumentParser], None]
    load: Callable[[], Command]
    continued: str | None = None
    """How its work is continued after a full disk; None if it begins again."""


def _add_config(parser: ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="FILE", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values that replace the file's")
    parser.add_argument("--strict", action="store_true", help="refuse settings that have no effect")


def _add_quiet(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--quiet", action="store_true", help="print warnings, errors and where the results are, no steps"
    )


def _add_env(parser: ArgumentParser) -> None:
    parser.add_argument(
        "env",
        nargs="?",
        metavar="ENV",
        help="env_type (frozen_lake), your module:Class, URL of an OpenEnv server, or a config (.yaml)",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="arguments of the environment; of a config, any key",
    )
    parser.add_argument("--tag", help="which environment of the config")
    parser.add_argument(
        "--actions",
        metavar="A,B,C",
        help="the random player's actions, if the environment offers none",
    )
    parser.add_argument(
        "--actions-file",
        metavar="FILE",
        help="a file of actions, one per line (they may hold commas)",
    )
    parser.add_argument(
        "--max-steps",
        type=int,
        metavar="N",
        help="maximum actions per episode (default: the config's, or 10)",
    )


def _add_tokenizer(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="model whose tokenizer counts (default: the config's pretrain)"
    )


def _add_train(parser: ArgumentParser) -> None:
    _add_config(parser)
    _add_quiet(parser)
    parser.add_argument(
        "--from-rollouts",
        metavar="FILE",
        help="train from this rollouts.jsonl, in its order; play nothing",
    )
    parser.add_argument(
        "--replay",
        metavar="RUN",
        help="repeat an asynchronous run bit by bit, with its config; only KEY=VALUE may follow",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="write timeline.json, a Chrome trace, into the run folder",
    )


def _load_train() -> Command:
    from turnwise.cli.train_command import run

    return run


def _add_sft(parser: ArgumentParser) -> None:
    _add_config(parser)
    _add_quiet(parser)


def _load_sft() -> Command:
    from turnwise.cli.train_command import run_sft

    return run_sft


def _add_demos(parser: ArgumentParser) -> None:
    _add_env(parser)
    parser.add_argument(
        "--policy",
        default="expert",
        metavar="WHO",
        help="expert (default), random, erring, your module:Class, or openai:URL",
    )
    parser.add_argument(
        "--error-rate",
        type=float,
        metavar="P",
        help="share of the erring player's random actions (default: 0.5)",
    )
    parser.add_argument(
        "--episodes", type=int, default=1000, metavar="N", help="number of episodes (default: 1000)"
    )
    parser.add_argument("--model-name", metavar="NAME", help="the model behind openai:URL")
    parser.add_argument(
        "--out", default="demos.jsonl", metavar="FILE", help="a new file (default: demos.jsonl)"
    )


def _load_demos() -> Command:
    from turnwise.cli.demos_command import run

    return run


def _add_rollout(parser: ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--model", metavar="DIR", help="the model that plays (default: the config's pretrain)"
    )
    parser.add_argument(
        "--out", default="rollouts.jsonl", metavar="FILE", help="a new file (default: rollouts.jsonl)"
    )
    parser.add_argument(
        "--batches",
        "--steps",
        type=int,
        default=1,
        metavar="N",
        help="number of batches (default: 1)",
    )
    parser.add_argument(
        "--split", choices=["train", "val"], default="train", help="whose tasks (default: train)"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument(
        "--replay",
        metavar="FILE",
        help="replay the episodes of this rollouts.jsonl or turns.jsonl through the loop; "
        "stop at a difference",
    )


def _load_rollout() -> Command:
    from turnwise.cli.rollout_command import run

    return run


def _add_eval(parser: ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="DIR",
        help="a model to score (default: the config's pretrain); may be given several times, "
        "for the same tasks",
    )
    parser.add_argument(
        "--episodes",
        type=int,
        metavar="N",
        help="number of tasks (default: as many as a validation has)",
    )
    parser.add_argument(
        "--samples",
        type=int,
        metavar="K",
        help="episodes of each task, for pass@k (default: group_size)",
    )
    parser.add_argument(
        "--sampled", action="store_true", help="sample as validation does; no greedy episodes"
    )
    parser.add_argument(
        "--greedy", action="store_true", help="take the likeliest tokens; no sampled episodes"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    parser.add_argument("--rollouts", metavar="FILE", help="write the episodes to this new file")


def _load_eval() -> Command:
    from turnwise.cli.eval_command import run

    return run


def _add_config_options(parser: ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument("--all", action="store_true", help="list all problems, not the first 20")


def _load_config() -> Command:
    from turnwise.cli.config_command import run

    return run


def _load_export() -> Command:
    from turnwise.cli.model_commands import export

    return export


def _load_compare() -> Command:
    from turnwise.cli.compare_command import run

    return run


def _load_view() -> Command:
    from turnwise.cli.view_command import run

    return run


def _add_tool(parser: ArgumentParser) -> None:
    parser.add_argument("action", metavar="ACTION")
    parser.add_argument(
        "parameters", nargs="...", metavar="--NAME VALUE", help="parameters (docs/rl_tool.md)"
    )


def _add_pipeline(parser: ArgumentParser) -> None:
    parser.add_argument("config", metavar="FILE", help="YAML or JSON (docs/rl_tool.md)")


def _load_tool() -> Command:
    from turnwise.cli.tool_command import run

    return run


def _load_make_model() -> Command:
    from turnwise.cli.model_commands import make

    return make


def _add_check_env(parser: ArgumentParser) -> None:
    _add_env(parser)
    _add_tokenizer(parser)
    parser.add_argument(
        "--config", metavar="FILE", help="take arguments and limits from a tag of this config"
    )
    parser.add_argument("--episodes", type=int, metavar="N", help="episodes of each player (default: 64)")
    parser.add_argument(
        "--budget",
        type=int,
        metavar="TOKENS",
        help="tokens of a context (default: its sequence_length)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds after which a call counts as hanging (default: 20)",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _load_check_env() -> Command:
    from turnwise.cli.check_env_command import run

    return run


def _load_serve_env() -> Command:
    from turnwise.cli.serve_env_command import run

    return run


def _add_play(parser: ArgumentParser) -> None:
    _add_env(parser)
    _add_tokenizer(parser)
    parser.add_argument(
        "--policy",
        default="human",
        metavar="WHO",
        help="human (default), random, scripted, a model's DIR, or openai:URL",
    )
    parser.add_argument("--model-name", metavar="NAME", help="the model behind openai:URL")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the episode; of rows, the number of the row (default: 0)",
    )
    parser.add_argument("--split", choices=["train", "val"], default="train")
    parser.add_argument("--ids", action="store_true", help="show every token id")
    parser.add_argument("--no-color", action="store_true")


def _load_play() -> Command:
    from turnwise.cli.play_command import run

    return run


def _load_serve() -> Command:
    from turnwise.cli.serve_command import run

    return run


def _load_trace() -> Command:
    from turnwise.cli.trace_command import run

    return run


def _load_convert() -> Command:
    from turnwise.cli.convert_command import run

    return run


VERBS: dict[str, Verb] = {
    "train": Verb("train a policy by reinforcement learning", _add_train, _load_train, _TRAINING_CONTINUES),
    "sft": Verb(
        "train a model on demonstrations (JSONL of messages)", _add_sft, _load_sft, _TRAINING_CONTINUES
    ),
    "demos": Verb(
        "play demonstrations for sft, by a built-in player or a model behind a URL", _add_demos, _load_demos
    ),
    "rollout": Verb(
        "play batches without training, write them to a file and summarise them",
        _add_rollout,
        _load_rollout,
    ),
    "eval": Verb("success of saved models on a config's validation tasks", _add_eval, _load_eval),
    "serve": Verb("serve a model over HTTP by the protocols of OpenAI and Anthropic", add_serve, _load_serve),
    "config": Verb("print the resolved config and what will be applied", _add_config_options, _load_config),
    "export": Verb(
        "write a checkpoint as a plain model folder, its LoRA adapter merged", add_export, _load_export
    ),
    "compare": Verb(
        "compare runs: results, settings in which they differ, curves", add_compare, _load_compare
    ),
    "trace": Verb("show the traced episodes of a run, span by span", add_trace, _load_trace),
    "convert": Verb("rollouts.jsonl as OpenEnv's TrainingTrace, and back", add_convert, _load_convert),
    "view": Verb("read the episodes of runs, token by token, in a browser or here", add_view, _load_view),
    "tool": Verb(
        "one action of the tool: train, load_dataset, create_reward, evaluate, export",
        _add_tool,
        _load_tool,
    ),
    "pipeline": Verb(
        "data, sft, evaluation, grpo, evaluation and a report, from one file", _add_pipeline, _load_tool
    ),
    "make-model": Verb(
        "make a model folder with its tokenizer: random weights, or a GGUF file's",
        add_make_model,
        _load_make_model,
    ),
    "check-env": Verb(
        "examine an environment: what is wrong with it, and what to change", _add_check_env, _load_check_env
    ),
    "serve-env": Verb(
        "serve an environment of a config in OpenEnv's protocol", add_serve_env, _load_serve_env
    ),
    "play": Verb("one episode turn by turn, as the model sees it", _add_play, _load_play),
}
"""The verbs by name, in the order of `turnwise --help`."""
