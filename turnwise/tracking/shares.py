"""How a step spent its time: its wall time split once by what the trainer did, and once by what the rollouts
did."""

from collections.abc import Mapping

from turnwise.runtime.stopwatch import ENGINE, ENVIRONMENTS, HELD, IDLE, LOOP

_PHASES = {
    "rollout": "waiting",
    "ref_log_probs": "forward",
    "old_log_probs_values": "forward",
    "adv": "update",
    "train": "update",
    "model_update": "weights",
}
"""The trainer's activity in each phase of the pipeline."""


def time_shares(
    elapsed_s: float, phases: Mapping[str, float], totals: Mapping[str, float]
) -> dict[str, float]:
    """Shares of the `elapsed_s` seconds of a step. Those of `time/trainer/…` add up to 1, and so do those of
    `time/rollouts/…`.

    `phases` are seconds by phase, none of them inside another; `totals` are the stopwatch's seconds by track.

    >>> totals = {"event loop": 6.0, "engine": 4.0, "idle": 1.5}
    >>> shares = time_shares(10.0, {"rollout": 6.0, "train": 3.0}, totals)
    >>> {name: round(share, 2) for name, share in shares.items() if share}
    ... # doctest: +NORMALIZE_WHITESPACE
    {'time/trainer/waiting': 0.6, 'time/trainer/update': 0.3, 'time/trainer/other': 0.1,
     'time/rollouts/engine': 0.4, 'time/rollouts/waiting': 0.15, 'time/rollouts/agents': 0.05,
     'time/rollouts/paused': 0.4}
    """
    trainer = dict.fromkeys(("waiting", "forward", "update", "weights"), 0.0)
    for phase, phase_s in phases.items():
        if phase in _PHASES:
            trainer[_PHASES[phase]] += phase_s
    trainer["other"] = max(elapsed_s - sum(trainer.values()), 0.0)
    rollouts = {
        "engine": totals.get(ENGINE, 0.0),
        "environments": totals.get(ENVIRONMENTS, 0.0),
        "waiting": totals.get(IDLE, 0.0),
        "held": totals.get(HELD, 0.0),
    }
    turning_s = totals.get(LOOP, 0.0)
    rollouts["agents"] = max(turning_s - sum(rollouts.values()), 0.0)
    rollouts["paused"] = max(elapsed_s - turning_s, 0.0)
    seconds = {f"time/trainer/{activity}": value for activity, value in trainer.items()}
    seconds |= {f"time/rollouts/{activity}": value for activity, value in rollouts.items()}
    return {name: value / elapsed_s for name, value in seconds.items()}


def describe_shares(shares: Mapping[str, float]) -> str:
    """The shares as one line for the log.

    >>> shares = {"time/trainer/waiting": 0.6, "time/trainer/update": 0.4, "time/rollouts/engine": 1.0}
    >>> describe_shares(shares)
    'trainer: waiting 60%, update 40%; rollouts: engine 100%'
    """
    lines = []
    for part in ("trainer", "rollouts"):
        prefix = f"time/{part}/"
        activities = [
            f"{name.removeprefix(prefix)} {share:.0%}"
            for name, share in shares.items()
            if name.startswith(prefix)
        ]
        lines.append(f"{part}: {', '.join(activities)}")
    return "; ".join(lines)
