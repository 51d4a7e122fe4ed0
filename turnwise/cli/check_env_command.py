"""`turnwise check-env ENV [KEY=VALUE ...]`: examines an environment, and says whether it is fit to train
in."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import TimeoutError as CallTimeout
from contextlib import redirect_stdout

from turnwise.cli.env_target import NO_MODEL, EnvTarget, read_actions, read_target
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
    env_type = target.env.env_type
    arguments = target.env.env_config
    # An environment's own output is not part of the report.
    with redirect_stdout(sys.stderr):
        takes = _takes_split(env_type, settings.timeout_s)
        report = check_env(lambda split: make_env(env_type, arguments, split), takes, settings)
    if options.json:
        answer = report.to_json() | {"env_type": env_type, "env_config": arguments}
        print(json.dumps(answer, indent=2, ensure_ascii=False, default=str))
    else:
        _print(report, target, settings)
    return EXIT_FINDINGS if report.verdict == "error" else 0


def _settings(options: argparse.Namespace, target: EnvTarget) -> CheckSettings:
    defaults = CheckSettings()
    timeout_s = defaults.timeout_s
    if target.file:
        timeout_s = target.config.train_env_manager.env_step_timeout_s
    return CheckSettings(
        num_episodes=options.episodes or defaults.num_episodes,
        max_steps=target.env.max_steps,
        timeout_s=options.timeout or timeout_s,
        actions=read_actions(options),
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
        reason = ""
        if folder == NO_MODEL:
            reason = "no model is named"
        elif folder_here(folder) is None:
            reason = f"{folder} isn't here"
        if reason:
            print(
                f"note: {reason}, so tokens aren't counted; --tokenizer DIR names a tokenizer",
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
    title = "  ".join([report.env, *arguments, f"{settings.num_episodes} seeds"])
    console.print(title, style="bold", soft_wrap=True)
    rows = Table.grid(padding=(0, 2, 0, 0))
    for finding in report.findings:
        word, style = MARKS[finding.verdict]
        result_style = "dim" if finding.verdict == "skipped" else ""
        cell = Text(_cut(printable(finding.result)), result_style)
        for line in finding.trace:
            cell.append(f"\n  {_cut(printable(line))}", "dim")
        if finding.advice:
            cell.append(f"\n→ {finding.advice}", style)
        rows.add_row(Text(finding.check, "bold"), Text(word, style), cell)
    console.print(rows)
    console.print(_summary(report), style="bold")


def _cut(text: str) -> str:
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[:_MAX_SHOWN]} …"


def _summary(report: Report) -> str:
    counts = Counter(finding.verdict for finding in report.findings)
    parts = []
    for verdict in ("error", "warning"):
        count = counts[verdict]
        if count:
            plural = "s" if count > 1 else ""
            parts.append(f"{count} {verdict}{plural}")
    fitness = "fit to train in"
    if report.verdict == "error":
        fitness = "not fit to train in"
    elif report.verdict == "skipped":
        fitness = "not examined: no action was named that it understands"
    summary = f"{report.env} is {fitness}"
    if parts:
        summary += f": {', '.join(parts)}"
    return summary
