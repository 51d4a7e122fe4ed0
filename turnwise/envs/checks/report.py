"""Examines an environment before training: its faults, what to change, and the figures that show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from turnwise.envs.checks.examination import CheckSettings, Examination
from turnwise.envs.checks.findings import Finding, Verdict
from turnwise.envs.checks.session import BrokenCall
from turnwise.protocols import Env
from turnwise.types import Split


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict on one environment."""

    env: str
    findings: tuple[Finding, ...]
    is_played: bool = True
    """Whether any valid action was tried."""

    @property
    def verdict(self) -> Verdict:
        """`skipped` if nothing is wrong but hardly anything was examined."""
        verdicts = {finding.verdict for finding in self.findings}
        if "error" in verdicts or not self.is_played:
            return "error" if "error" in verdicts else "skipped"
        return "warning" if "warning" in verdicts else "ok"

    def to_json(self) -> dict[str, Any]:
        return {"env": self.env, "verdict": self.verdict, "findings": [finding.to_json() for finding in self.findings]}


def check_env(make_env: Callable[[Split], Env], takes_split: bool, settings: CheckSettings) -> Report:
    """Plays an environment and returns the findings. A call that hangs ends the examination, any other fault only its check.

    Args:
        takes_split: whether the environment separates training and validation tasks by an argument of `make_env`.

    Raises:
        TurnwiseError: the constructor refuses its arguments.

    >>> from turnwise.envs.frozen_lake.env import FrozenLakeEnv
    >>> report = check_env(lambda split: FrozenLakeEnv(split=split), True, CheckSettings(num_episodes=4))
    >>> report.env, [finding.check for finding in report.findings if finding.verdict == "error"]
    ('FrozenLakeEnv', [])
    """
    examination = Examination(make_env, takes_split, settings)
    rows: list[Finding] = []
    for check in examination.checks:
        try:
            # Keeps what a check found before its call broke.
            rows += check()
        except BrokenCall as broken:
            if not any(row.result == broken.problem for row in rows):
                rows.append(_of_broken(broken))
            if broken.hangs or check == examination.checks[0]:
                break
    if not any(row.verdict == "error" for row in rows):
        rows.insert(0, Finding("returns", "ok", f"{examination.num_calls:,} calls of reset and step return what they should"))
    return Report(examination.name, tuple(rows), examination.is_played)


def _of_broken(broken: BrokenCall) -> Finding:
    advice = ""
    if broken.hangs:
        advice = "give it a time limit of its own, or allow more with --timeout (env_step_timeout_s in training)"
    elif broken.is_raised and broken.method == "step":
        advice = "an exception fails the episode: answer with an observation, or with terminated"
    elif broken.is_raised and broken.method not in ("actions", "expert_action"):
        advice = "an exception there fails every episode"
    return Finding(broken.method, "error", broken.problem, advice, trace=broken.trace)
