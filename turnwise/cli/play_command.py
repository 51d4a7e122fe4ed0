"""`turnwise play ENV [KEY=VALUE ...]`: one episode of an environment or a data row, turn by turn as the
policy sees it."""

import argparse
import sys
from contextlib import closing

from turnwise.cli.env_target import NO_MODEL, given_actions, read_target
from turnwise.cli.options import check_policy
from turnwise.examine.examined import examine
from turnwise.lifecycle.interrupt import ends_at_once
from turnwise.model_files.folder import folder_here
from turnwise.model_files.hub import local_path, looks_like_hub_name
from turnwise.play.policies import OPENAI, PLAYERS
from turnwise.play.screen import PlayScreen, reader
from turnwise.runtime.console import open_console

HELP = "an action, or !TEXT for a response as it stands; q leaves"
HELP_ROWS = "a response as it stands; q leaves"


def run(options: argparse.Namespace) -> int:
    """Plays an episode and prints it turn by turn. Returns 0 however the episode ends."""
    policy = options.policy
    more = (
        (
            "--tokenizer",
            options.tokenizer is not None,
            policy in PLAYERS,
            f"is for {', '.join(PLAYERS)}: a model has its own",
        ),
        (
            "--ids",
            options.ids,
            not policy.startswith(OPENAI),
            "shows token ids, and such a policy takes text only",
        ),
    )
    check_policy(options, policy == "random", "the random player draws", more)
    model = (
        policy
        if local_path(policy).is_dir() or looks_like_hub_name(policy)
        else options.tokenizer or NO_MODEL
    )
    target = read_target(options, model=model, takes_rows=True)
    # torch takes seconds to import; a wrong command line has been refused by now.
    with ends_at_once():
        from turnwise.play.setup import Choices, set_up

    console, own = (
        open_console(no_color=options.no_color),
        target.config.actor_train.model_args.model_name_or_path,
    )
    choices = Choices(
        policy=policy,
        split=options.split,
        seed=options.seed,
        tokenizer=options.tokenizer
        or (own if target.file is not None and own != NO_MODEL and folder_here(own) else None),
        actions=given_actions(options),
        model_name=options.model_name or "",
        read=reader(console, sys.stdin),
        show=lambda text: console.print(text, style="dim", markup=False),
    )
    with closing(set_up(examine(target.config), target.tag, choices)) as setup:
        screen = PlayScreen(console, setup, shows_ids=options.ids)
        screen.begin(policy)
        if policy == "human":
            console.print(HELP if target.tag in target.config.custom_envs else HELP_ROWS, style="dim")
        setup.play(screen)
    return 0
