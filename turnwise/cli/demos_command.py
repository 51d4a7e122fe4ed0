"""`turnwise demos CONFIG [KEY=VALUE ...]`: plays demonstrations for `turnwise sft`, without loading a
model."""

import argparse

from turnwise.cli.env_target import read_actions, read_target
from turnwise.cli.options import PolicyOption, check_policy, new_file
from turnwise.errors import ConfigError
from turnwise.examine.examined import examine
from turnwise.lifecycle.interrupt import ends_at_once
from turnwise.pipelines.evaluate import Score, success_table
from turnwise.runtime.disk import naming


def run(options: argparse.Namespace) -> int:
    """Plays episodes with --policy, writes each conversation to --out as a line of JSON, and prints the
    success rate."""
    if options.error_rate is not None and not 0.0 <= options.error_rate <= 1.0:
        raise ConfigError(f"--error-rate is {options.error_rate}; it must be from 0 to 1")
    error_rate_option = PolicyOption(
        "--error-rate",
        options.error_rate is not None,
        options.policy == "erring",
        "is how often the erring player errs",
    )
    draws = options.policy in ("random", "erring")
    check_policy(options, draws, "random and erring players draw", [error_rate_option])
    target = read_target(options, takes_rows=True)
    file = new_file(options.out, "--out")
    # torch takes seconds to import; a wrong command line has been refused by now.
    with ends_at_once():
        from turnwise.play.demonstrator import Demonstrator, as_row, demonstrate

    error_rate = 0.5 if options.error_rate is None else options.error_rate
    demonstrator = Demonstrator(
        options.policy,
        error_rate,
        read_actions(options),
        options.model_name or "",
    )
    outcomes = []
    num_rows = 0
    try:
        with naming(file), file.open("w", encoding="utf-8") as lines:
            for episode in demonstrate(
                examine(target.config),
                target.tag,
                demonstrator,
                options.episodes,
            ):
                for conversation in episode.conversations:
                    lines.write(as_row(conversation, episode.tools) + "\n")
                    num_rows += 1
                outcomes.append(episode.outcome)
    finally:
        if num_rows == 0:
            file.unlink(missing_ok=True)
        else:
            name = options.policy
            if name == "erring":
                name = f"erring ({error_rate:.0%} at random)"
            print(success_table([(name, Score.count(outcomes))]))
            print(f"{file}: {num_rows:,} conversations of {len(outcomes):,} episodes of {target.tag}")
    if num_rows == 0:
        raise ConfigError(
            f"--policy {options.policy} gave up at once in every episode, so there is nothing to learn from"
        )
    return 0
