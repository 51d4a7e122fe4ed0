"""The output of `turnwise play`. Two columns in front of each line, the gutter, name its content and its
number of tokens."""

import json
import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


class PlayScreen(SilentObserver):
    """An `Onlooker` that prints an episode on a console. Long lists of token ids are shortened unless
    `shows_ids`."""

    def __init__(self, console: "Console", setup: "EpisodeSetup", shows_ids: bool = False) -> None:
        self._console = console
        self._setup = setup
        self._shows_ids = shows_ids
        self._turn_idx = 1
        self._prompt: ShownPrompt
        self._unused_context = 0  # tokens of the context behind the last response
        self._unused_response = 0  # tokens of its limit that the last response didn't need

    def begin(self, policy: str) -> None:
        """Prints the task, the policy and the limits."""
        setup = self._setup
        task = setup.task
        turns = "any number of turns"
        if setup.max_turns:
            turns = counted(setup.max_turns, "turn")
        limits = f"{turns}, responses of {setup.max_new_tokens} tokens"
        if setup.policy.tokenizer:
            limits += f", a context of {setup.max_length}"
        number = f"row {task.row} ·"
        if task.row is None:
            number = f"seed {task.seed} · mode"
        details = f"  {task.split} {number} {setup.mode} · {policy} · {limits}"
        self._print(Text().append(task.tag, "bold").append(details))
        if setup.policy.note:
            self._print(Text(f"note: {setup.policy.note}", "yellow"))

    def asked(self, place: TurnPlace, messages: Sequence[Message]) -> None:
        self._turn_idx = place.number + 1

    def prompted(self, prompt: ShownPrompt) -> None:
        self._prompt = prompt
        self._rule(self._title(prompt))
        if self._setup.policy.tokenizer:
            self._lines("sees", f"+{len(prompt.added_ids)}", self._decode(prompt.added_ids))
            self._lines("ids", "", self._ids(prompt.added_ids), "dim")
        for message in prompt.messages:
            self._lines(str(message["role"]), "", _text(message.get("content") or ""))
            for call in message.get("tool_calls") or ():
                function = call["function"]
                arguments = function.get("arguments", {})
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments)
                self._lines("calls", "", f"{function['name']}({arguments})")

    def _title(self, prompt: ShownPrompt) -> str:
        """The title of a turn: its number, and how full its context is."""
        title = f"turn {self._turn_idx}"
        if self._setup.max_turns:
            title += f" of {self._setup.max_turns}"
        if not self._setup.policy.tokenizer:
            return title
        if not prompt.num_before:
            return f"{title}, a new context"
        return f"{title}, context {prompt.num_before} of {self._setup.max_length}"

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
        num_prompt_tokens = prompt.num_before + len(prompt.added_ids)
        self._unused_context = self._setup.max_length - num_prompt_tokens - len(ids)
        self._unused_response = prompt.max_new_tokens - len(ids)
        self._lines("says", f"+{len(ids)}", self._decode(ids) + note, "green")
        if self._setup.policy.has_logprobs:
            self._logprobs(ids, turn.logprobs.tolist())
        else:
            self._lines("ids", "", self._ids(ids), "dim")

    def rewarded(self, place: TurnPlace, turn: Turn) -> None:
        gained = self._action(turn)
        gained.append(f" → reward {turn.reward:g}", "bold" if turn.reward else "")
        gained.append("".join(f", {name} {value:g}" for name, value in turn.metrics.items()), "dim")
        self._row("does", "", gained)
        if turn.state_key is not None and turn.state_key != turn.observation:
            self._lines("state", "", str(turn.state_key), "dim")
        unused = "any number of turns"
        if self._setup.max_turns:
            unused = counted(self._setup.max_turns - place.number - 1, "turn")
        if self._setup.policy.tokenizer:
            unused += (
                f", {self._unused_context} tokens of the context, {self._unused_response} of the response"
            )
        self._lines("left", "", unused, "dim")

    def _action(self, turn: Turn) -> Text:
        """What the policy did in a turn: the action of an environment; on a row, a call or an answer."""
        if self._setup.task.row is not None:
            return Text().append("a call" if turn.metrics.get("tool_calls") else "an answer", "bold")
        if turn.action is None:
            return Text().append("nothing that action_pattern reads", "red")
        return Text().append(printable(repr(turn.action)), "bold")

    def ended(self, trajectories: Sequence[Trajectory], fault: BaseException | None) -> None:
        """Prints the score, what ended the episode, and which tokens would be trained on."""
        trajectory = trajectories[0]
        self._rule("end")
        turns = counted(len(trajectory.turns), "turn")
        if trajectory.status == "failed":
            self._lines("failed", "", f"no score after {turns}: {trajectory.error}", "red")
        else:
            ending = "left by you" if fault is not None else _ending(trajectory)
            score = Text().append(f"{trajectory.score:g}", "bold")
            self._row("score", "", score.append(f" after {turns}, {ending}"))
        if trajectory.outcome_rewards:
            rewards = [f"{name} {value:g}" for name, value in trajectory.outcome_rewards.items()]
            self._lines("rewards", "", ", ".join(rewards))
        if trajectory.metrics:
            self._lines("metrics", "", _metrics_text(trajectory.metrics))
        if self._setup.policy.tokenizer and trajectory.turns:
            self._trained_tokens(trajectory)

    def _metrics(self, metrics: Mapping[str, float]) -> None:
        parts = [f"{name} {value:g}" for name, value in metrics.items() if value]
        zeros = [name for name, value in metrics.items() if not value]
        if len(zeros) > _SHOWN_ZEROS:
            parts.append(f"{len(zeros)} others 0")
        elif zeros:
            parts.append(f"0: {', '.join(zeros)}")
        self._lines("metrics", "", ", ".join(parts))

    def _trained_tokens(self, trajectory: Trajectory) -> None:
        """Prints which tokens of each context would be trained on."""
        samples = build_samples(trajectory)
        num_tokens = sum(sample.num_tokens for sample in samples)
        num_trained = sum(sample.num_trained for sample in samples)
        text = f"{num_tokens} in {counted(len(samples), 'context')}"
        text += f", response_mask 1 on {num_trained} ({num_trained / num_tokens:.0%})"
        if any(turn.is_greedy for turn in trajectory.turns):
            text += "; greedy turns aren't trained on"
        self._lines("tokens", "", text)
        longest = max(sample.num_tokens for sample in samples)
        per_cell = max(math.ceil(longest / _STRIP), 1)
        for sample in samples:
            self._row("mask", str(sample.num_tokens), _strip(sample, per_cell))
        self._lines("", "", f"█ trained on, ░ not; a cell is {counted(per_cell, 'token')}", "dim")
        spans = [span for sample in samples for span in sample.turn_spans]
        cells = [f"turn {span.turn + 1}: {span.start}–{span.stop - 1}" for span in spans]
        self._lines("spans", "", ", ".join(cells) or "none", "dim")

    def _ids(self, ids: Sequence[int]) -> str:
        if self._shows_ids or len(ids) <= _SHOWN_IDS:
            return " ".join(map(str, ids))
        half = _CUT_IDS // 2
        start = " ".join(map(str, ids[:half]))
        end = " ".join(map(str, ids[-half:]))
        return f"{start} … {len(ids) - 2 * half} more (--ids) … {end}"

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Prints each sampled token with its id and log-prob."""
        label = "logp"
        line = Text()
        for token_id, logprob in zip(ids, logprobs, strict=True):
            word = printable(self._decode([token_id])).replace("\n", "\\n")
            item = Text().append(word, _logprob_style(logprob))
            item.append(f" {token_id} {logprob:.2f}   ", "dim")
            if line and len(line) + len(item) > self._room:
                self._row(label, "", line)
                label = ""
                line = Text()
            line.append_text(item)
        self._row(label, "", line)

    def _decode(self, ids: Sequence[int]) -> str:
        tokenizer: Any = self._setup.policy.tokenizer
        return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _lines(
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
            self._row(label, count, Text(line, style) if line else Text("⏎", "dim"))
            label = count = ""

    @property
    def _room(self) -> int:
        """Number of characters that fit into a line behind the gutter."""
        return max(self._console.width - _LABEL - _COUNT - 4, 20)

    def _row(self, label: str, count: str, text: Text) -> None:
        pieces: Iterable[Text] = [text]
        if len(text) > self._room:
            pieces = text.wrap(self._console, self._room)
        for piece in pieces:
            gutter = Text().append(f"{label:<{_LABEL}} {count:>{_COUNT}} ", "cyan")
            piece.rstrip()
            self._print(gutter.append("│ ", "dim").append_text(piece))
            label = count = ""

    def _rule(self, title: str) -> None:
        width = min(self._console.width, _RULE)
        rule = "━" * max(width - len(title) - 4, 2)
        self._print(Text().append("━━ ", "dim").append(title, "bold").append(f" {rule}", "dim"))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def _end(trajectory: Trajectory, fault: BaseException | None) -> str:
    """What ended the episode."""
    if fault is not None:
        return "left by you"
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


def _ending(trajectory: Trajectory) -> str:
    """What ended an episode that its player didn't stop."""
    if trajectory.limit:
        return ENDS[trajectory.limit]
    if trajectory.task.row is None:
        return "finished by the environment"
    return "finished"


def _metrics_text(metrics: Mapping[str, float]) -> str:
    shown = [f"{name} {value:g}" for name, value in metrics.items() if value]
    zeros = [name for name, value in metrics.items() if not value]
    if len(zeros) > _SHOWN_ZEROS:
        shown.append(f"{len(zeros)} others 0")
    elif zeros:
        shown.append(f"0: {', '.join(zeros)}")
    return ", ".join(shown)


def _logprob_style(logprob: float) -> str:
    if logprob > -0.7:
        return "green"
    if logprob > -2.3:
        return "yellow"
    return "red"


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
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
