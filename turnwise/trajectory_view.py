"""Trajectories and groups as a few lines of text, and as HTML for a notebook. `types` imports this."""

from html import escape
from typing import Any

import numpy as np

_BOX = "border:1px solid #8886;border-radius:4px;padding:6px;margin:4px 0;font-family:monospace;white-space:pre-wrap"


def summary(trajectory: Any) -> str:
    """One line: whose it is, how it ended and what it earned."""
    ended = trajectory.status + (f" ({trajectory.limit})" if trajectory.limit else "")
    parts = "".join(f", {name} {value:g}" for name, value in trajectory.outcome_rewards.items())
    error = f": {trajectory.error}" if trajectory.error else ""
    return f"{trajectory.task.id}, sibling {trajectory.sibling}: {ended}, score {trajectory.score:g}{parts}{error}"


def trajectory_text(trajectory: Any) -> str:
    """The summary, and a line for each turn."""
    turns = (
        f"  turn {number}: {turn.text!r} → reward {turn.reward:g}, {len(turn.response_ids)} tokens"
        for number, turn in enumerate(trajectory.turns, start=1)
    )
    return "\n".join([summary(trajectory), *turns])


def trajectory_html(trajectory: Any) -> str:
    """What the model saw and wrote turn by turn, with a cell for each sampled token: by its advantage (green above 0, red
    below) where there is one, else by its log-prob (the redder, the less likely)."""
    rows = [f"<b>{escape(summary(trajectory))}</b>"]
    advantages = trajectory.advantages_by_turn
    for number, turn in enumerate(trajectory.turns):
        credit = advantages.get(number)
        rows.append(
            f"<div style='{_BOX}'><small>turn {number + 1}, reward {turn.reward:g}</small>\n"
            f"<span style='opacity:0.7'>{escape(turn.observation)}</span>\n{escape(turn.text)}\n{_cells(turn, credit)}</div>"
        )
    return "<div>" + "".join(rows) + "</div>"


def group_text(group: Any) -> str:
    rejected = f", rejected: {group.rejected}" if group.rejected else ""
    lines = [f"group {group.index}, {len(group.trajectories)} trajectories{rejected}", *map(summary, group.trajectories)]
    return "\n  ".join(lines)


def group_html(group: Any) -> str:
    shown = "".join(
        f"<details><summary>{escape(summary(t))}</summary>{trajectory_html(t)}</details>" for t in group.trajectories
    )
    return f"<div>{escape(group_text(group).splitlines()[0])}{shown}</div>"


def _cells(turn: Any, credit: Any) -> str:
    cells = []
    top = float(np.abs(credit).max()) if credit is not None and len(credit) else 0.0
    for place, (token, logprob) in enumerate(zip(turn.response_ids, turn.logprobs, strict=True)):
        title = f"token {token}, log-prob {logprob:.2f}"
        color, share = "255,60,60", 1 - float(np.exp(min(logprob, 0.0)))
        if credit is not None and place < len(credit):
            title += f", advantage {credit[place]:.3g}"
            color = "40,170,80" if credit[place] > 0 else color
            share = abs(float(credit[place])) / top if top else 0.0
        cells.append(f"<span title='{title}' style='background:rgba({color},{share:.2f});border:1px solid #8884'>&nbsp;</span>")
    return "".join(cells)


class ViewedTrajectory:
    """What a trajectory is printed as, and what a notebook shows of it."""

    __slots__ = ()

    def __str__(self) -> str:
        return trajectory_text(self)

    def _repr_html_(self) -> str:
        return trajectory_html(self)


class ViewedGroup:
    """What a group is printed as, and what a notebook shows of it."""

    __slots__ = ()

    def __str__(self) -> str:
        return group_text(self)

    def _repr_html_(self) -> str:
        return group_html(self)
