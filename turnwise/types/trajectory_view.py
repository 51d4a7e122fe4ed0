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
    score = f"score {trajectory.score:g}"
    rewards = [f"{name} {value:g}" for name, value in trajectory.outcome_rewards.items()]
    if rewards:
        score += f" ({', '.join(rewards)})"
    end = trajectory.status
    if trajectory.limit:
        end += f" by {trajectory.limit}"
    if trajectory.error:
        end += f": {trajectory.error}"
    num_turns = counted(len(trajectory.turns), "turn")
    return f"{trajectory.task.id}, sibling {trajectory.sibling}: {score}, {num_turns}, {end}"


def _shown(turn: Any) -> str:
    """The turn's new messages before its response, each with its role; for a turn read from a file, the
    observation."""
    messages = turn.messages[:-1] or ({"role": "user", "content": turn.observation},)
    return "\n".join(f"{message['role']}: {_text(message.get('content'))}" for message in messages)


def _text(content: Any) -> str:
    """The content of a message as text: parts without text are shown by their type."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", f"[{part.get('type')}]") for part in content or ())


def _cells(turn: Any, credit: Any) -> str:
    cells = []
    advantages = () if credit is None else credit
    top = max(map(abs, advantages), default=0.0)
    for place, (token, logprob) in enumerate(zip(turn.response_ids, turn.logprobs, strict=True)):
        title = f"token {token}, log-prob {logprob:.2f}"
        color = "255,60,60"
        share = 1 - float(np.exp(min(logprob, 0.0)))
        if place < len(advantages):
            advantage = float(advantages[place])
            title += f", advantage {advantage:.3g}"
            if advantage > 0:
                color = "40,170,80"
            share = abs(advantage) / float(top) if top else 0.0
        cells.append(
            f"<span title='{title}' style='background:rgba({color},{share:.2f});border:1px solid "
            "#8884'>&nbsp;</span>"
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
        title = f"group {self.index}, {len(self.trajectories)} trajectories"
        if self.rejected:
            title += f", rejected: {self.rejected}"
        return "\n  ".join([title, *map(summary, self.trajectories)])

    def _repr_html_(self: Any) -> str:
        parts = (
            f"<details><summary>{escape(summary(t))}</summary>{t._repr_html_()}</details>"
            for t in self.trajectories
        )
        return f"<div>{escape(str(self).splitlines()[0])}{''.join(parts)}</div>"
