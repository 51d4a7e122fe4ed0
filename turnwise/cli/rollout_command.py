"""`turnwise rollout CONFIG`: plays without training and writes the trajectories, or replays recorded ones."""

import argparse
import json
import sys
from pathlib import Path

from turnwise.cli.options import new_file, new_traces, read_examined
from turnwise.config import require, unavailable_to_play
from turnwise.lifecycle.interrupt import ends_at_once
from turnwise.pipelines.collect import Collection


def run(options: argparse.Namespace) -> int:
    """Plays batches, writes them to a file, and prints a summary. With --replay, replays a file up to the
    first difference."""
    examined = read_examined(options, "play")
    config = examined.config
    if options.replay:
        require(unavailable_to_play(config, options.split))
        with ends_at_once():
            from turnwise.assemble.saved import replay_rollouts

        num_replayed, sentences = replay_rollouts(
            examined, Path(options.replay), options.split, options.model
        )
        for sentence in sentences:
            print(f"note: {sentence}", file=sys.stderr)
        print(f"replayed   {options.replay}: {num_replayed:,} trajectories, all as recorded")
        return 0
    file = new_file(options.out, "--out")
    traces = new_traces(config, file)
    require(unavailable_to_play(config, options.split))
    # torch takes seconds to import; a wrong config has been refused by now.
    with ends_at_once():
        from turnwise.assemble.saved import collect_rollouts

    collection = Collection(file)
    terminal = sys.stderr if options.json else sys.stdout
    try:
        collect_rollouts(
            examined,
            collection,
            options.split,
            options.batches,
            options.model,
            on_start=lambda table: table.show(terminal),
        )
    finally:
        if collection.num_written:
            if options.json:
                print(json.dumps(collection.summary(), indent=2))
            else:
                print(collection.render())
            print(f"rollouts   {file}: {collection.num_written:,} trajectories", file=terminal)
            if traces:
                print(f"traces     {traces}: turnwise trace shows them", file=terminal)
    return 0
