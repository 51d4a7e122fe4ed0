"""The arguments of the verbs that look at finished or running runs, `compare` and `view`."""

from argparse import ArgumentParser


def add_compare(parser: ArgumentParser) -> None:
    """Adds those of `turnwise compare`."""
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
