"""`--toy`, which every benchmark has: the same code at a size of seconds. tests/extras runs it, so that no
benchmark rots."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

SMALL_RUN = [
    "max_steps=1",
    "eval_steps=1",
    "rollout_batch_size=8",
    "train_env_manager.num_env_groups=1",
    "val_env_manager.num_env_groups=4",
    "actor_train.training_args.per_device_train_batch_size=8",
]
"""What makes a run of an example end after seconds."""


def parse_arguments(parser: argparse.ArgumentParser, **sizes: Any) -> argparse.Namespace:
    """The command's arguments. With `--toy` the sizes take the places of defaults, and no file is written
    unless `--out` is given: a figure of such a run means nothing."""
    parser.add_argument(
        "--toy", action="store_true", help="the same code at a size of seconds; its figures mean nothing"
    )
    if "--toy" in sys.argv[1:]:
        nowhere = {
            name: Path(os.devnull) for name in ("out", "picture") if parser.get_default(name) is not None
        }
        parser.set_defaults(**nowhere | sizes)
    return parser.parse_intermixed_args()
