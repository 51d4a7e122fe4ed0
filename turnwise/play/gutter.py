"""The layout of episodes in a terminal: two columns in front of each line, the gutter, name its content and
its number of tokens."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from turnwise.batching.samples import build_samples
from turnwise.errors import counted
from turnwise.runtime.console import printable
from turnwise.types import Message, Sample, Trajectory

if TYPE_CHECKING:
    from rich.console import Console

_LABEL = 7  # characters of the gutter's first column
_COUNT = 6  # and of its second one
_SHOWN_IDS = 60  # token ids that are all shown
_CUT_IDS = 24  # token ids that are shown of a longer list
_STRIP = 96  # maximum cells that picture the tokens of a context
_SHOWN_ZEROS = 3  # metrics of value 0 that are named; of more, only their number is shown
_RULE = 96  # maximum characters of a horizontal rule

ENDS = {
    "max_steps": "cut by max_steps",
    "max_new_tokens": "cut by max_new_tokens, the limit of one response",
    "sequence_length": "cut by sequence_length: the context has no room left",
    "environment": "cut by the environment (truncated)",
    "time": "cut by episode_timeout_s",
}


Decode = Callable[[Sequence[int]], str]


class Gutter:
    """Prints an episode on a console. Long lists of token ids are shortened unless `shows_ids`. `decode`
    gives the text of ids."""

    def __init__(self, console: "Console", decode: Decode | None, shows_ids: bool = False) -> None:
        self._console = console
        self._decode = decode
        self._shows_ids = shows_ids

    def lines(
        self,
        label: str,
        count: str,
        text: str,
        style: str = "",
    ) -> None:
        """Prints a text of one or several lines, with label and count in front of the first."""
        lines = printable(text).split("\n")
        if len(lines) > 1 and not lines[-1]:
            lines.pop()
        for line in lines:
            self.row(label, count, Text(line, style) if line else Text("⏎", "dim"))
            label = count = ""

    @property
    def _room(self) -> int:
        """Number of characters that fit into a line behind the gutter."""
        return max(self._console.width - _LABEL - _COUNT - 4, 20)

    def row(self, label: str, count: str, text: Text) -> None:
        """Prints a text behind the gutter, wrapped."""
        pieces: Iterable[Text] = [text]
        if len(text) > self._room:
            pieces = text.wrap(self._console, self._room)
        for piece in pieces:
            gutter = Text().append(f"{label:<{_LABEL}} {count:>{_COUNT}} ", "cyan")
            piece.rstrip()
            self.print(gutter.append("│ ", "dim").append_text(piece))
            label = count = ""

    def rule(self, title: str) -> None:
        """Prints a horizontal rule with a title."""
        width = min(self._console.width, _RULE)
        rule = "━" * max(width - len(title) - 4, 2)
        self.print(Text().append("━━ ", "dim").append(title, "bold").append(f" {rule}", "dim"))

    def print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def message(self, message: Message) -> None:
        """Prints a message and its tool calls."""
        self.lines(str(message["role"]), "", text_of(message.get("content") or ""))
        self.calls(message)

    def calls(self, message: Message, style: str = "") -> None:
        """Prints the tool calls of a message."""
        for call in message.get("tool_calls") or ():
            function = call["function"]
            arguments = function.get("arguments", {})
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments)
            self.lines("calls", "", f"{function['name']}({arguments})", style)

    def ids(self, ids: Sequence[int]) -> str:
        """The ids as text; the middle of a long list is left out."""
        if self._shows_ids or len(ids) <= _SHOWN_IDS:
            return " ".join(map(str, ids))
        half = _CUT_IDS // 2
        start = " ".join(map(str, ids[:half]))
        end = " ".join(map(str, ids[-half:]))
        return f"{start} … {len(ids) - 2 * half} more (--ids) … {end}"

    def logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Prints each sampled token with its id and log-prob."""
        label = "logp"
        line = Text()
        for token_id, logprob in zip(ids, logprobs, strict=True):
            word = printable(self.decode([token_id])).replace("\n", "\\n")
            item = Text().append(word, _style_of(logprob))
            item.append(f" {token_id} {logprob:.2f}   ", "dim")
            if line and len(line) + len(item) > self._room:
                self.row(label, "", line)
                label = ""
                line = Text()
            line.append_text(item)
        self.row(label, "", line)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; the ids themselves if there is no tokenizer."""
        if self._decode is None:
            return " ".join(map(str, ids))
        return self._decode(ids)

    def outcome(self, trajectory: Trajectory, ending: str) -> None:
        """Prints the score and what ended the episode, its rewards and metrics."""
        turns = counted(len(trajectory.turns), "turn")
        if trajectory.status == "failed":
            self.lines("failed", "", f"no score after {turns}: {trajectory.error}", "red")
        else:
            score = Text().append(f"{trajectory.score:g}", "bold")
            self.row("score", "", score.append(f" after {turns}, {ending}"))
        if trajectory.outcome_rewards:
            rewards = [f"{name} {value:g}" for name, value in trajectory.outcome_rewards.items()]
            self.lines("rewards", "", ", ".join(rewards))
        if trajectory.metrics:
            self.lines("metrics", "", _metrics_text(trajectory.metrics))

    def trained_tokens(self, trajectory: Trajectory) -> None:
        """Prints which tokens of each context would be trained on."""
        samples = build_samples(trajectory)
        num_tokens = sum(sample.num_tokens for sample in samples)
        num_trained = sum(sample.num_trained for sample in samples)
        text = f"{num_tokens} in {counted(len(samples), 'context')}"
        text += f", response_mask 1 on {num_trained} ({num_trained / num_tokens:.0%})"
        if any(turn.is_greedy for turn in trajectory.turns):
            text += "; greedy turns aren't trained on"
        self.lines("tokens", "", text)
        longest = max(sample.num_tokens for sample in samples)
        per_cell = max(math.ceil(longest / _STRIP), 1)
        for sample in samples:
            self.row("mask", str(sample.num_tokens), _strip(sample, per_cell))
        self.lines("", "", f"█ trained on, ░ not; a cell is {counted(per_cell, 'token')}", "dim")
        spans = [span for sample in samples for span in sample.turn_spans]
        cells = [f"turn {span.turn + 1}: {span.start}–{span.stop - 1}" for span in spans]
        self.lines("spans", "", ", ".join(cells) or "none", "dim")


def ending_of(trajectory: Trajectory) -> str:
    """What ended an episode that its player didn't stop."""
    if trajectory.limit:
        return ENDS[trajectory.limit]
    if trajectory.task.row is None:
        return "finished by the environment"
    return "finished"


def _style_of(logprob: float) -> str:
    if logprob > -0.7:
        return "green"
    if logprob > -2.3:
        return "yellow"
    return "red"


def _strip(sample: Sample, per_cell: int) -> Text:
    """A picture of a context: one cell per `per_cell` tokens, marked if any of these is trained on."""
    text = Text()
    for start in range(0, sample.num_tokens, per_cell):
        if sample.response_mask[start : start + per_cell].any():
            text.append("█", "green")
        else:
            text.append("░", "dim")
    return text


def _metrics_text(metrics: Mapping[str, float]) -> str:
    shown = [f"{name} {value:g}" for name, value in metrics.items() if value]
    zeros = [name for name, value in metrics.items() if not value]
    if len(zeros) > _SHOWN_ZEROS:
        shown.append(f"{len(zeros)} others 0")
    elif zeros:
        shown.append(f"0: {', '.join(zeros)}")
    return ", ".join(shown)


def text_of(content: Any) -> str:
    """The text of a message's content. Parts that aren't text show as their type, such as `[image]`."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)
