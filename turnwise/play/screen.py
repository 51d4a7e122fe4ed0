"""The output of `turnwise play`. Two columns in front of each line, the gutter, name its content and its
number of tokens."""

import json
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from rich.text import Text

from turnwise.batching.samples import build_samples
from turnwise.errors import counted
from turnwise.play.episode import ShownPrompt
from turnwise.protocols import SilentObserver, TurnPlace
from turnwise.runtime.console import printable
from turnwise.types import Message, Sample, Trajectory, Turn

if TYPE_CHECKING:
    from rich.console import Console

    from turnwise.play.setup import EpisodeSetup

_LABEL, _COUNT = 7, 6  # characters of the gutter's two columns
_SHOWN_IDS, _CUT_IDS = 60, 24  # up to 60 token ids are all shown; of a longer list, 24
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


class PlayScreen(SilentObserver):
    """An `Onlooker` that prints an episode on a console. Long lists of token ids are shortened unless
    `shows_ids`."""

    def __init__(self, console: "Console", setup: "EpisodeSetup", shows_ids: bool = False) -> None:
        self._console = console
        self._setup = setup
        self._shows_ids = shows_ids
        self._turn_idx = 1
        self._prompt: ShownPrompt
        self._left = (0, 0)  # tokens that the last response left unused: of the context, and of its own limit

    def begin(self, policy: str) -> None:
        """Prints the task, the policy and the limits."""
        setup = self._setup
        turns = counted(setup.max_turns, "turn") if setup.max_turns else "any number of turns"
        limits = f"{turns}, responses of {setup.max_new_tokens} tokens"
        limits += f", a context of {setup.max_length}" if setup.policy.tokenizer else ""
        number = f"seed {setup.task.seed} · mode" if setup.task.row is None else f"row {setup.task.row} ·"
        what = f"  {setup.task.split} {number} {setup.mode} · {policy} · {limits}"
        self._print(Text().append(setup.task.tag, "bold").append(what))
        if setup.policy.note:
            self._print(Text(f"note: {setup.policy.note}", "yellow"))

    def asked(self, place: TurnPlace, messages: Sequence[Message]) -> None:
        self._turn_idx = place.number + 1

    def prompted(self, prompt: ShownPrompt) -> None:
        self._prompt = prompt
        most = self._setup.max_turns
        title = f"turn {self._turn_idx} of {most}" if most else f"turn {self._turn_idx}"
        if self._setup.policy.tokenizer:
            title += (
                f", context {prompt.num_before} of {self._setup.max_length}"
                if prompt.num_before
                else ", a new context"
            )
        self._rule(title)
        if self._setup.policy.tokenizer:
            self._lines("sees", f"+{len(prompt.added_ids)}", self._decode(prompt.added_ids))
            self._lines("ids", "", self._ids(prompt.added_ids), "dim")
        for message in prompt.messages:
            self._lines(str(message["role"]), "", _text(message.get("content") or ""))
            for call in message.get("tool_calls") or ():
                name, given = call["function"]["name"], call["function"].get("arguments", {})
                self._lines("calls", "", f"{name}({given if isinstance(given, str) else json.dumps(given)})")

    def sampled(self, place: TurnPlace, turn: Turn, reply: Message) -> None:
        prompt = self._prompt
        ending = {
            "stop": "",
            "length": f"  ← cut at {prompt.max_new_tokens} tokens",
            "aborted": "  ← aborted",
        }
        note = ending[turn.finish_reason]
        if self._setup.policy.tokenizer is None:
            self._lines("says", "", turn.text + note, "green")
            for call in reply.get("tool_calls") or ():
                function = call["function"]
                self._lines("calls", "", f"{function['name']}({json.dumps(function['arguments'])})", "green")
            return
        ids = turn.response_ids.tolist()
        self._left = (
            self._setup.max_length - prompt.num_before - len(prompt.added_ids) - len(ids),
            prompt.max_new_tokens - len(ids),
        )
        self._lines("says", f"+{len(ids)}", self._decode(ids) + note, "green")
        if self._setup.policy.has_logprobs:
            self._logprobs(ids, turn.logprobs.tolist())
        else:
            self._lines("ids", "", self._ids(ids), "dim")

    def rewarded(self, place: TurnPlace, turn: Turn) -> None:
        action = "nothing that action_pattern reads" if turn.action is None else repr(turn.action)
        style = "red" if turn.action is None else "bold"
        if self._setup.task.row is not None:
            action, style = "an answer" if not turn.metrics.get("tool_calls") else "a call", "bold"
        gained = (
            Text()
            .append(printable(action), style)
            .append(f" → reward {turn.reward:g}", "bold" if turn.reward else "")
        )
        gained.append("".join(f", {name} {value:g}" for name, value in turn.metrics.items()), "dim")
        self._row("does", "", gained)
        if turn.state_key is not None and turn.state_key != turn.observation:
            self._lines("state", "", str(turn.state_key), "dim")
        most = self._setup.max_turns
        left = counted(most - place.number - 1, "turn") if most else "any number of turns"
        if self._setup.policy.tokenizer:
            left += f", {self._left[0]} tokens of the context, {self._left[1]} of the response"
        self._lines("left", "", left, "dim")

    def ended(self, trajectories: Sequence[Trajectory], fault: BaseException | None) -> None:
        """Prints the score, what ended the episode, and which tokens would be trained on."""
        trajectory = trajectories[0]
        self._rule("end")
        finished = "finished by the environment" if trajectory.task.row is None else "finished"
        how = "left by you" if fault is not None else ENDS[trajectory.limit] if trajectory.limit else finished
        turns = counted(len(trajectory.turns), "turn")
        if trajectory.status == "failed":
            self._lines("failed", "", f"no score after {turns}: {trajectory.error}", "red")
        else:
            self._row(
                "score", "", Text().append(f"{trajectory.score:g}", "bold").append(f" after {turns}, {how}")
            )
        if trajectory.outcome_rewards:
            self._lines(
                "rewards",
                "",
                ", ".join(f"{name} {value:g}" for name, value in trajectory.outcome_rewards.items()),
            )
        if trajectory.metrics:
            shown = [f"{name} {value:g}" for name, value in trajectory.metrics.items() if value]
            zeros = [name for name, value in trajectory.metrics.items() if not value]
            if zeros:
                shown.append(
                    f"0: {', '.join(zeros)}" if len(zeros) <= _SHOWN_ZEROS else f"{len(zeros)} others 0"
                )
            self._lines("metrics", "", ", ".join(shown))
        if self._setup.policy.tokenizer and trajectory.turns:
            self._trained_tokens(trajectory)

    def _trained_tokens(self, trajectory: Trajectory) -> None:
        """Prints which tokens of each context would be trained on."""
        samples = build_samples(trajectory)
        num_tokens, num_trained = sum(s.num_tokens for s in samples), sum(s.num_trained for s in samples)
        greedy = (
            "; greedy turns aren't trained on" if any(turn.is_greedy for turn in trajectory.turns) else ""
        )
        trained = f"response_mask 1 on {num_trained} ({num_trained / num_tokens:.0%}){greedy}"
        self._lines("tokens", "", f"{num_tokens} in {counted(len(samples), 'context')}, {trained}")
        per_cell = max(math.ceil(max(sample.num_tokens for sample in samples) / _STRIP), 1)
        for sample in samples:
            self._row("mask", str(sample.num_tokens), _strip(sample, per_cell))
        self._lines("", "", f"█ trained on, ░ not; a cell is {counted(per_cell, 'token')}", "dim")
        spans = [(span.turn + 1, span.start, span.stop) for sample in samples for span in sample.turn_spans]
        cells = [f"turn {turn}: {start}–{stop - 1}" for turn, start, stop in spans]
        self._lines("spans", "", ", ".join(cells) or "none", "dim")

    def _ids(self, ids: Sequence[int]) -> str:
        if self._shows_ids or len(ids) <= _SHOWN_IDS:
            return " ".join(map(str, ids))
        half = _CUT_IDS // 2
        return " ".join(
            [*map(str, ids[:half]), f"… {len(ids) - 2 * half} more (--ids) …", *map(str, ids[-half:])]
        )

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Prints each sampled token with its id and log-prob."""
        line, label = Text(), "logp"
        for token_id, logprob in zip(ids, logprobs, strict=True):
            word = printable(self._decode([token_id])).replace("\n", "\\n")
            style = "green" if logprob > -0.7 else "yellow" if logprob > -2.3 else "red"
            item = Text().append(word, style).append(f" {token_id} {logprob:.2f}   ", "dim")
            if line and len(line) + len(item) > self._room:
                self._row(label, "", line)
                line, label = Text(), ""
            line.append_text(item)
        self._row(label, "", line)

    def _decode(self, ids: Sequence[int]) -> str:
        tokenizer: Any = self._setup.policy.tokenizer
        return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _lines(self, label: str, count: str, text: str, style: str = "") -> None:
        """Prints a text of one or several lines, with label and count in front of the first."""
        lines = printable(text).split("\n")
        for index, line in enumerate(lines[:-1] if len(lines) > 1 and not lines[-1] else lines):
            self._row(
                label if index == 0 else "",
                count if index == 0 else "",
                Text(line, style) if line else Text("⏎", "dim"),
            )

    @property
    def _room(self) -> int:
        """Number of characters that fit into a line behind the gutter."""
        return max(self._console.width - _LABEL - _COUNT - 4, 20)

    def _row(self, label: str, count: str, text: Text) -> None:
        pieces = text.wrap(self._console, self._room) if len(text) > self._room else [text]
        for index, piece in enumerate(pieces):
            gutter = Text().append(
                f"{label if index == 0 else '':<{_LABEL}} {count if index == 0 else '':>{_COUNT}} ", "cyan"
            )
            piece.rstrip()
            self._print(gutter.append("│ ", "dim").append_text(piece))

    def _rule(self, title: str) -> None:
        width = min(self._console.width, _RULE)
        self._print(
            Text()
            .append("━━ ", "dim")
            .append(title, "bold")
            .append(f" {'━' * max(width - len(title) - 4, 2)}", "dim")
        )

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def _strip(sample: Sample, per_cell: int) -> Text:
    """A picture of a context: one cell per `per_cell` tokens, marked if any of these is trained on."""
    text = Text()
    for start in range(0, sample.num_tokens, per_cell):
        is_trained = bool(sample.response_mask[start : start + per_cell].any())
        text.append("█" if is_trained else "░", "green" if is_trained else "dim")
    return text


def _text(content: Any) -> str:
    """The text of a message's content. Parts that aren't text show as their type, such as `[image]`."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)


def reader(console: "Console", stdin: TextIO | None) -> Callable[[], str | None]:
    """A function that asks a person for a line and returns it; None at the end of input or after Ctrl-C. It
    echoes a line that comes from a pipe, and replaces bytes that aren't UTF-8 by question marks."""

    def read_line() -> str | None:
        if stdin is None:
            return None
        try:
            with _interrupted_at_once():
                console.print(Text("action ⟩ ", "bold cyan"), end="")
                line = input().encode(errors="replace").decode()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return None
        if not stdin.isatty():
            console.print(Text(printable(line)))
        return line

    return read_line


@contextmanager
def _interrupted_at_once() -> Iterator[None]:
    """Lets Ctrl-C raise KeyboardInterrupt at once. The handler of a running event loop would wait until the
    line is read."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
