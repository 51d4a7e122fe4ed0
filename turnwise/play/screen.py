"""The output of `turnwise play`. Two columns in front of each line, the gutter, name its content and its
number of tokens."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from rich.text import Text

from turnwise.errors import counted
from turnwise.play.episode import ShownPrompt
from turnwise.play.gutter import Gutter, ending_of
from turnwise.protocols import SilentObserver, TurnPlace
from turnwise.runtime.console import printable
from turnwise.types import Message, Trajectory, Turn

if TYPE_CHECKING:
    from rich.console import Console

    from turnwise.play.setup import EpisodeSetup


class PlayScreen(SilentObserver):
    """An `Onlooker` that prints an episode on a console. Long lists of token ids are shortened unless
    `shows_ids`."""

    def __init__(self, console: "Console", setup: "EpisodeSetup", shows_ids: bool = False) -> None:
        self._setup = setup
        self._gutter = Gutter(console, self._decode, shows_ids)
        self._num_sampled = 0
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
        self._gutter.print(Text().append(task.tag, "bold").append(details))
        if setup.policy.note:
            self._gutter.print(Text(f"note: {setup.policy.note}", "yellow"))

    def prompted(self, prompt: ShownPrompt) -> None:
        self._prompt = prompt
        self._gutter.rule(self._title(prompt))
        if self._setup.policy.tokenizer:
            self._gutter.lines("sees", f"+{len(prompt.added_ids)}", self._gutter.decode(prompt.added_ids))
            self._gutter.lines("ids", "", self._gutter.ids(prompt.added_ids), "dim")
        for message in prompt.messages:
            self._gutter.message(message)

    def _title(self, prompt: ShownPrompt) -> str:
        """The title of a turn: its number, and how full its context is."""
        title = f"turn {self._num_sampled + 1}"
        if self._setup.max_turns:
            title += f" of {self._setup.max_turns}"
        if not self._setup.policy.tokenizer:
            return title
        if not prompt.num_before:
            return f"{title}, a new context"
        if prompt.parent is not None:
            title += f", off turn {prompt.parent + 1}"
        return f"{title}, context {prompt.num_before} of {self._setup.max_length}"

    def sampled(self, place: TurnPlace, turn: Turn, reply: Message) -> None:
        prompt = self._prompt
        self._num_sampled += 1
        ending = {
            "stop": "",
            "length": f"  ← cut at {prompt.max_new_tokens} tokens",
            "aborted": "  ← aborted",
        }
        note = ending[turn.finish_reason]
        if self._setup.policy.tokenizer is None:
            self._gutter.lines("says", "", turn.text + note, "green")
            self._gutter.calls(reply, "green")
            return
        ids = turn.response_ids.tolist()
        num_prompt_tokens = prompt.num_before + len(prompt.added_ids)
        self._unused_context = self._setup.max_length - num_prompt_tokens - len(ids)
        self._unused_response = prompt.max_new_tokens - len(ids)
        self._gutter.lines("says", f"+{len(ids)}", self._gutter.decode(ids) + note, "green")
        if self._setup.policy.has_logprobs:
            self._gutter.logprobs(ids, turn.logprobs.tolist())
        else:
            self._gutter.lines("ids", "", self._gutter.ids(ids), "dim")

    def rewarded(self, place: TurnPlace, turn: Turn) -> None:
        gained = self._action(turn)
        gained.append(f" → reward {turn.reward:g}", "bold" if turn.reward else "")
        gained.append("".join(f", {name} {value:g}" for name, value in turn.metrics.items()), "dim")
        self._gutter.row("does", "", gained)
        if turn.state_key is not None and turn.state_key != turn.observation:
            self._gutter.lines("state", "", str(turn.state_key), "dim")
        unused = "any number of turns"
        if self._setup.max_turns:
            unused = counted(self._setup.max_turns - place.number - 1, "turn")
        if self._setup.policy.tokenizer:
            unused += (
                f", {self._unused_context} tokens of the context, {self._unused_response} of the response"
            )
        self._gutter.lines("left", "", unused, "dim")

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
        self._gutter.rule("end")
        ending = ending_of(trajectory)
        if fault is not None:
            ending = "left by you"
        self._gutter.outcome(trajectory, ending)
        if self._setup.policy.tokenizer and trajectory.turns:
            self._gutter.trained_tokens(trajectory)

    def _decode(self, ids: Sequence[int]) -> str:
        tokenizer: Any = self._setup.policy.tokenizer
        return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


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
