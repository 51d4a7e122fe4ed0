"""Tells the parent process (`cli.guard`) which of a user's functions this process is in, even after this
process has ended."""

import mmap

_NUM_LINES, _WIDTH = 64, 256
_IS_DONE, _LAST, _STATUS = 0, 1, 2
"""Bytes of line 0: whether the command is done, the line number of the last call, and the exit status to
come."""


class CallBoard:
    """Shared memory with one line for each running call. It also knows which call began last."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, (_NUM_LINES + 1) * _WIDTH)
        self._free = list(range(_NUM_LINES, 0, -1))

    def begin(self, text: str) -> int:
        """Notes a call and returns its line, for `end`; 0 if no line is free."""
        try:
            line = self._free.pop()
        except IndexError:
            return 0
        written = b"+%b\0" % text.encode(errors="replace")[: _WIDTH - 2]
        self._memory[line * _WIDTH : line * _WIDTH + len(written)] = written
        self._memory[_LAST] = line
        return line

    def end(self, line: int) -> None:
        if line:
            self._memory[line * _WIDTH] = ord("-")
            self._free.append(line)

    def finish(self, status: int) -> None:
        """Notes that everything has been printed and that the process is about to end with this status."""
        self._memory[_STATUS] = status
        self._memory[_IS_DONE] = 1

    @property
    def is_finished(self) -> bool:
        return bool(self._memory[_IS_DONE])

    @property
    def status(self) -> int:
        """The status noted by `finish`."""
        return self._memory[_STATUS]

    def going_on(self) -> list[str]:
        """The calls that haven't returned."""
        return [
            self._text(line) for line in range(1, _NUM_LINES + 1) if self._memory[line * _WIDTH] == ord("+")
        ]

    def last(self) -> str:
        """The call that began last, "" if there was none."""
        return self._text(self._memory[_LAST]) if self._memory[_LAST] else ""

    def _text(self, line: int) -> str:
        return (
            self._memory[line * _WIDTH + 1 : (line + 1) * _WIDTH].partition(b"\0")[0].decode(errors="replace")
        )


CALLS = CallBoard()
"""The board that this process shares with the parent that forked it."""
