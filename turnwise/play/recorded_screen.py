"""A recorded episode in the terminal, in the layout of `turnwise play`."""

from typing import TYPE_CHECKING

from rich.text import Text

from turnwise.errors import counted
from turnwise.play.gutter import Decode, Gutter, ending_of
from turnwise.runtime.console import printable
from turnwise.types import Trajectory, Turn

if TYPE_CHECKING:
    from rich.console import Console

_NOTES = {"stop": "", "length": "  ← cut at its limit", "aborted": "  ← aborted"}


class RecordedScreen:
    """Prints recorded episodes turn by turn. `decode` gives the text of ids; None = there is no tokenizer, so
    messages and texts are shown."""

    def __init__(self, console: "Console", decode: Decode | None, shows_ids: bool = False) -> None:
        self._gutter = Gutter(console, decode, shows_ids)
        self._has_tokens = decode is not None

    def show(self, trajectory: Trajectory, title: str) -> None:
        """Prints a whole episode below its title."""
        gutter = self._gutter
        gutter.print(Text(printable(title), "bold"))
        sizes: list[int] = []  # of the context up to the end of each turn
        for number, turn in enumerate(trajectory.turns):
            num_before = 0
            if not turn.starts_context and number > 0:
                num_before = sizes[number - 1 if turn.parent is None else turn.parent]
            gutter.rule(_turn_title(trajectory, number, num_before))
            self._turn(turn)
            sizes.append(num_before + turn.num_tokens)
        gutter.rule("end")
        gutter.outcome(trajectory, ending_of(trajectory))
        if trajectory.turns and any(len(turn.response_ids) for turn in trajectory.turns):
            gutter.trained_tokens(trajectory)

    def _turn(self, turn: Turn) -> None:
        gutter = self._gutter
        ids = turn.response_ids.tolist()
        note = _NOTES[turn.finish_reason]
        if self._has_tokens:
            gutter.lines("sees", f"+{len(turn.prompt_ids)}", gutter.decode(turn.prompt_ids.tolist()))
            gutter.lines("says", f"+{len(ids)}", gutter.decode(ids) + note, "green")
        else:
            for message in turn.messages[:-1] or [{"role": "user", "content": turn.observation}]:
                gutter.message(message)
            gutter.lines("says", f"+{len(ids)}", turn.text + note, "green")
        if turn.messages:
            gutter.calls(turn.messages[-1], "green")
        if ids:
            gutter.logprobs(ids, turn.logprobs.tolist())
        gutter.row("does", "", _gained(turn))
        if turn.state_key is not None and turn.state_key != turn.observation:
            gutter.lines("state", "", str(turn.state_key), "dim")


def _turn_title(trajectory: Trajectory, number: int, num_before: int) -> str:
    turn = trajectory.turns[number]
    title = f"turn {number + 1}"
    if turn.starts_context:
        title += ", a new context"
    elif num_before:
        title += f", context {num_before}"
    parent = trajectory.branched_off(number)
    if parent is not None:
        title += f", off turn {parent + 1}"
    if turn.is_greedy or not turn.is_trained:
        title += ", not trained on"
    return title


def _gained(turn: Turn) -> Text:
    """What the response did, and what it was worth."""
    action = printable(repr(turn.action))
    if turn.action is None:
        action = "a call" if turn.metrics.get("tool_calls") else "an answer"
    gained = Text().append(action, "bold")
    gained.append(f" → reward {turn.reward:g}", "bold" if turn.reward else "")
    gained.append("".join(f", {printable(name)} {value:g}" for name, value in turn.metrics.items()), "dim")
    seconds = f"; sampled in {turn.generate_s:.3g} s"
    return gained.append(seconds, "dim")


def episode_title(trajectory: Trajectory, step: str, group: int) -> str:
    """The line above an episode: where it stands, its task and how long it is."""
    turns = counted(len(trajectory.turns), "turn")
    return f"{step}, group {group}, sibling {trajectory.sibling}: {trajectory.task.place}, {turns}"
