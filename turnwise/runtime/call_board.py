"""Tells the parent process (`cli.guard`) which of a user's functions this process is in, even after this
process has ended."""

import mmap

_NUM_LINES = 64
_WIDTH = 256
_IS_DONE = 0
_LAST = 1
_STATUS = 2
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
        start = line * _WIDTH
        self._memory[start : start + len(written)] = written
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
        texts: list[str] = []
        for line in range(1, _NUM_LINES + 1):
            if self._memory[line * _WIDTH] == ord("+"):
                texts.append(self._text(line))
        return texts

    def last(self) -> str:
        """The call that began last, "" if there was none."""
        line = self._memory[_LAST]
        if not line:
            return ""
        return self._text(line)

    def _text(self, line: int) -> str:
        start = line * _WIDTH
        # The byte before the text says whether the call is going on.
        text, _, _ = self._memory[start + 1 : start + _WIDTH].partition(b"\0")
        return text.decode(errors="replace")


CALLS = CallBoard()
"""The board that this process shares with the parent that forked it."""
