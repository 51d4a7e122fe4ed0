"""How `print` and a notebook show trajectories and groups. Importing this module registers it."""

from html import escape
from typing import Any

import numpy as np

from turnwise.errors import counted
from turnwise.types import FloatArray, Group, Trajectory, Turn
from turnwise.types.shown import register

_BOX = (
    "border:1px solid #8886;border-radius:4px;padding:6px;margin:4px "
    "0;font-family:monospace;white-space:pre-wrap"
)


def summary(trajectory: Trajectory) -> str:
    """One line: task and sibling, score, number of turns, and how the episode ended."""
    score = f"score {trajectory.score:g}"
    rewards = [f"{name} {value:g}" for name, value in trajectory.outcome_rewards.items()]
    if rewards:
        score += f" ({', '.join(rewards)})"
    end: str = trajectory.status
    if trajectory.limit:
        end += f" by {trajectory.limit}"
    if trajectory.error:
        end += f": {trajectory.error}"
    num_turns = counted(len(trajectory.turns), "turn")
    return f"{trajectory.task.id}, sibling {trajectory.sibling}: {score}, {num_turns}, {end}"


def _shown(turn: Turn) -> str:
    """The turn's new messages before its response, each with its role; for a turn read from a file, the
    observation."""
    messages = turn.messages[:-1] or ({"role": "user", "content": turn.observation},)
    return "\n".join(f"{message['role']}: {_text(message.get('content'))}" for message in messages)


def _text(content: Any) -> str:
    """The content of a message as text: parts without text are shown by their type."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", f"[{part.get('type')}]") for part in content or ())


def _cells(turn: Turn, credit: FloatArray | None) -> str:
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


class Notebook:
    """The renderer of trajectories and groups."""

    def line(self, noun: Trajectory | Group) -> str:
        """One line, for `repr`."""
        if isinstance(noun, Trajectory):
            return f"<Trajectory {summary(noun)}>"
        scores = ", ".join(f"{trajectory.score:g}" for trajectory in noun.trajectories)
        return f"<Group {noun.index} of {noun.task.id}, scores {scores}>"

    def text(self, noun: Trajectory | Group) -> str:
        """A line for each turn of a trajectory, or for each trajectory of a group."""
        if isinstance(noun, Trajectory):
            turns = (
                f"  turn {number}: {turn.text!r} → reward {turn.reward:g}, {len(turn.response_ids)} tokens"
                for number, turn in enumerate(noun.turns, start=1)
            )
            return "\n".join([summary(noun), *turns])
        return "\n  ".join([_group_title(noun), *map(summary, noun.trajectories)])

    def page(self, noun: Trajectory | Group) -> str:
        """HTML: the messages that were new in each turn and the response, with a cell for each sampled token.
        The cell's colour shows the advantage, if there is one (green above 0, red below), else the log-prob
        (the redder, the less likely). Of a group, its trajectories, folded."""
        if isinstance(noun, Trajectory):
            return _trajectory_page(noun)
        parts = (
            f"<details><summary>{escape(summary(t))}</summary>{_trajectory_page(t)}</details>"
            for t in noun.trajectories
        )
        return f"<div>{escape(_group_title(noun))}{''.join(parts)}</div>"


def _group_title(group: Group) -> str:
    title = f"group {group.index}, {len(group.trajectories)} trajectories"
    if group.rejected:
        title += f", rejected: {group.rejected}"
    return title


def _trajectory_page(trajectory: Trajectory) -> str:
    rows = [f"<b>{escape(summary(trajectory))}</b>"]
    advantages = trajectory.advantages_by_turn
    for number, turn in enumerate(trajectory.turns):
        rows.append(
            f"<div style='{_BOX}'><small>turn {number + 1}, reward {turn.reward:g}</small>\n"
            f"<span style='opacity:0.7'>{escape(_shown(turn))}</span>\n{escape(turn.text)}\n"
            f"{_cells(turn, advantages.get(number))}</div>"
        )
    return "<div>" + "".join(rows) + "</div>"


register(Notebook())
