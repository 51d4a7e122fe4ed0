"""The arguments of the commands that read what runs have written, and of `serve-env`."""

from argparse import ArgumentParser


def add_compare(parser: ArgumentParser) -> None:
    """Adds the arguments of `turnwise compare`."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run folder, or one of an experiment with all of its runs"
    )
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="a name of metrics.jsonl, `*` for any one part; may be given several times "
        "(default: success, score or loss)",
    )
    parser.add_argument("--out", metavar="FILE", help="draw the curves side by side into this picture")


def add_view(parser: ArgumentParser) -> None:
    """Adds those of `turnwise view`."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run folder or a rollouts.jsonl; several stand side by side",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder of the pages (default: `view` in the run, FILE-view of a file)"
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="serve the pages on this machine while the run goes on"
    )
    parser.add_argument(
        "--steps",
        metavar="A,B,…",
        help="steps to show, such as 1,50,last (default: all; of more than 1 GB every k-th)",
    )
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="model whose tokenizer names the tokens (default: the run's)"
    )
    parser.add_argument("--text", action="store_true", help="print in the terminal, write no pages")
    parser.add_argument("--failed", action="store_true", help="with --text: the failed episodes")
    parser.add_argument(
        "--trajectory",
        metavar="STEP/GROUP/SIBLING",
        help="with --text: one episode, turn by turn",
    )
    parser.add_argument("--no-color", action="store_true")


def add_trace(parser: ArgumentParser) -> None:
    """Adds the arguments of `turnwise trace`."""
    parser.add_argument("run", metavar="RUN", help="a run folder, or a traces.jsonl")
    parser.add_argument("--task", metavar="ID", help="show the episodes of this task, span by span")
    parser.add_argument("--step", type=int, metavar="N", help="show those of this step (from 0)")
    parser.add_argument(
        "--sibling",
        type=int,
        metavar="N",
        help="show those of this sibling (from 0)",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON, one line an episode")


def add_convert(parser: ArgumentParser) -> None:
    """Adds the arguments of `turnwise convert`."""
    parser.add_argument("source", metavar="FROM", help="a rollouts.jsonl, or a file of TrainingTraces")
    parser.add_argument("target", metavar="TO", help="a new file of the other kind")
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="so many consecutive traces are a group",
    )
    parser.add_argument("--rewards", metavar="FILE", help="the reward of each trace, one number a line")


def add_serve_env(parser: ArgumentParser) -> None:
    """Adds the arguments of `turnwise serve-env`."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("tag", metavar="TAG", help="which environment of the config")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="values that replace the file's",
    )
    parser.add_argument(
        "--split",
        choices=["train", "val"],
        default="train",
        help="(default: train)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1)")
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="0 = a free one (default: 8000)",
    )
    parser.add_argument(
        "--max-sessions", type=int, default=64, metavar="N", help="episodes at once (default: 64)"
    )
