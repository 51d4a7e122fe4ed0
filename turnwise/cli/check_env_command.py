"""`turnwise check-env ENV [KEY=VALUE ...]`: examines an environment, and says whether it is fit to train
in."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import TimeoutError as CallTimeout
from contextlib import redirect_stdout

from turnwise.cli.env_target import NO_MODEL, EnvTarget, given_actions, read_target
from turnwise.envs.checks.examination import CheckSettings, Report, check_env
from turnwise.envs.registry import make_env, takes_split
from turnwise.errors import EnvironmentFault
from turnwise.lifecycle.interrupt import ends_at_once
from turnwise.model_files.folder import folder_here
from turnwise.runtime.console import open_console, printable
from turnwise.runtime.threads import DaemonThread

EXIT_FINDINGS = 1
_MAX_SHOWN = 300  # characters shown of one result
MARKS = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "error": ("ERROR", "bold red"),
    "skipped": ("–", "dim"),
}


def run(options: argparse.Namespace) -> int:
    """Examines the environment and prints the findings. Returns 1 if one is an error, else 0."""
    target = read_target(options, options.config)
    settings = _settings(options, target)
    env_type, arguments = target.env.env_type, target.env.env_config
    # An environment's own output is not part of the report.
    with redirect_stdout(sys.stderr):
        takes = _takes_split(env_type, settings.timeout_s)
        report = check_env(lambda split: make_env(env_type, arguments, split), takes, settings)
    if options.json:
        shown = report.to_json() | {"env_type": env_type, "env_config": arguments}
        print(json.dumps(shown, indent=2, ensure_ascii=False, default=str))
    else:
        _print(report, target, settings)
    return EXIT_FINDINGS if report.verdict == "error" else 0


def _settings(options: argparse.Namespace, target: EnvTarget) -> CheckSettings:
    own = CheckSettings()
    return CheckSettings(
        num_episodes=options.episodes or own.num_episodes,
        max_steps=target.env.max_steps,
        timeout_s=options.timeout
        or (target.config.train_env_manager.env_step_timeout_s if target.file else own.timeout_s),
        actions=given_actions(options),
        count_tokens=_token_counter(options.tokenizer, target),
        token_budget=options.budget or target.config.sequence_length,
        is_split_given="split" in target.env.env_config,
    )


def _token_counter(folder: str | None, target: EnvTarget) -> Callable[[str], int] | None:
    """A function that counts a text's tokens with the tokenizer in `folder`, else the model's; None if there
    is no model."""
    if folder is None:
        if target.file is None:
            return None
        folder = target.config.actor_train.model_args.model_name_or_path
        if folder == NO_MODEL or folder_here(folder) is None:
            print(
                "note: no model is named" if folder == NO_MODEL else f"note: {folder} isn't here",
                "so tokens aren't counted; --tokenizer DIR names a tokenizer",
                sep=", ",
                file=sys.stderr,
            )
            return None
    with ends_at_once():  # transformers takes seconds to import
        from turnwise.models.load import load_tokenizer

    tokenizer = load_tokenizer(folder)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _takes_split(env_type: str, timeout_s: float) -> bool:
    """Whether the environment's class takes an argument `split`. Raises EnvironmentFault if importing it
    hangs."""
    thread = DaemonThread("import")
    try:
        return thread.start(takes_split, env_type).result(timeout_s)
    except CallTimeout:
        raise EnvironmentFault(
            f"importing {env_type} hangs: no answer in {timeout_s:g} s (--timeout allows more)"
        ) from None
    finally:
        thread.end()


def _print(report: Report, target: EnvTarget, settings: CheckSettings) -> None:
    from rich.table import Table
    from rich.text import Text

    console = open_console()
    arguments = [f"{key}={value}" for key, value in target.env.env_config.items()]
    console.print(
        "  ".join([report.env, *arguments, f"{settings.num_episodes} seeds"]), style="bold", soft_wrap=True
    )
    rows = Table.grid(padding=(0, 2, 0, 0))
    for finding in report.findings:
        word, style = MARKS[finding.verdict]
        cell = Text(_cut(printable(finding.result)), "dim" if finding.verdict == "skipped" else "")
        for line in finding.trace:
            cell.append(f"\n  {_cut(printable(line))}", "dim")
        if finding.advice:
            cell.append(f"\n→ {finding.advice}", style)
        rows.add_row(Text(finding.check, "bold"), Text(word, style), cell)
    console.print(rows)
    console.print(_summary(report), style="bold")


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} …"


def _summary(report: Report) -> str:
    counts = Counter(finding.verdict for finding in report.findings)
    parts = [f"{counts[v]} {v}{'s' if counts[v] > 1 else ''}" for v in ("error", "warning") if counts[v]]
    fitness = "not fit to train in" if report.verdict == "error" else "fit to train in"
    if report.verdict == "skipped":
        fitness = "not examined: no action was named that it understands"
    return f"{report.env} is {fitness}" + (f": {', '.join(parts)}" if parts else "")
