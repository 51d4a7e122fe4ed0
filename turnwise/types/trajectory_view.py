"""Shows trajectories and groups as text, and as HTML in a notebook. They are typed `Any`, since `types`
imports this module."""

from html import escape
from typing import Any

import numpy as np

from turnwise.errors import counted

_BOX = (
    "border:1px solid #8886;border-radius:4px;padding:6px;margin:4px "
    "0;font-family:monospace;white-space:pre-wrap"
)


def summary(trajectory: Any) -> str:
    """One line: task and sibling, score, number of turns, and how the episode ended."""
    parts = ", ".join(f"{name} {value:g}" for name, value in trajectory.outcome_rewards.items())
    score = f"score {trajectory.score:g}" + (f" ({parts})" if parts else "")
    end = f"{trajectory.status} by {trajectory.limit}" if trajectory.limit else trajectory.status
    error = f": {trajectory.error}" if trajectory.error else ""
    return (
        f"{trajectory.task.id}, sibling {trajectory.sibling}: {score}, "
        f"{counted(len(trajectory.turns), 'turn')}, {end}{error}"
    )


def _shown(turn: Any) -> str:
    """The turn's new messages before its response, each with its role; for a turn read from a file, the
    observation."""
    lines = []
    for message in turn.messages[:-1] or ({"role": "user", "content": turn.observation},):
        content = message.get("content")
        is_text = isinstance(content, str)
        text = (
            content
            if is_text
            else "".join(part.get("text", f"[{part.get('type')}]") for part in content or ())
        )
        lines.append(f"{message['role']}: {text}")
    return "\n".join(lines)


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
        cells.append(
            f"<span title='{title}' style='background:rgba({color},{share:.2f});border:1px solid "
            f"#8884'>&nbsp;</span>"
        )
    return "".join(cells)


class ViewedTrajectory:
    """How a trajectory is printed, and how a notebook shows it."""

    __slots__ = ()

    def __repr__(self: Any) -> str:
        return f"<Trajectory {summary(self)}>"

    def __str__(self: Any) -> str:
        turns = (
            f"  turn {number}: {turn.text!r} → reward {turn.reward:g}, {len(turn.response_ids)} tokens"
            for number, turn in enumerate(self.turns, start=1)
        )
        return "\n".join([summary(self), *turns])

    def _repr_html_(self: Any) -> str:
        """The messages that were new in each turn and the response, with a cell for each sampled token. The
        cell's colour shows the advantage, if there is one (green above 0, red below), else the log-prob (the
        redder, the less likely)."""
        rows = [f"<b>{escape(summary(self))}</b>"]
        advantages = self.advantages_by_turn
        for number, turn in enumerate(self.turns):
            rows.append(
                f"<div style='{_BOX}'><small>turn {number + 1}, reward {turn.reward:g}</small>\n"
                f"<span style='opacity:0.7'>{escape(_shown(turn))}</span>\n{escape(turn.text)}\n"
                f"{_cells(turn, advantages.get(number))}</div>"
            )
        return "<div>" + "".join(rows) + "</div>"


class ViewedGroup:
    """How a group is printed, and how a notebook shows it."""

    __slots__ = ()

    def __repr__(self: Any) -> str:
        scores = ", ".join(f"{trajectory.score:g}" for trajectory in self.trajectories)
        return f"<Group {self.index} of {self.task.id}, scores {scores}>"

    def __str__(self: Any) -> str:
        rejected = f", rejected: {self.rejected}" if self.rejected else ""
        title = f"group {self.index}, {len(self.trajectories)} trajectories{rejected}"
        return "\n  ".join([title, *map(summary, self.trajectories)])

    def _repr_html_(self: Any) -> str:
        parts = (
            f"<details><summary>{escape(summary(t))}</summary>{t._repr_html_()}</details>"
            for t in self.trajectories
        )
        return f"<div>{escape(str(self).splitlines()[0])}{''.join(parts)}</div>"
