"""Mutants: known mistakes, each of which must turn a named test red. `python tests/mutants.py [NAME …]` runs
them.

A mutant is a piece of the package's code and what stands there instead (`mutants.txt`). The piece is found by
its tokens, however the lines are broken. Each is applied to a copy of the package in a temporary folder, and
its tests run against the copy in a process of their own, forked off one that has imported the libraries; as
many at a time as there are cores. A mutant that its tests let pass has survived: a test is missing. Beside
one that was killed stands the test that failed. `--check` only looks whether every piece is in the source,
and whether every mutant is Python.
`--changed REVISION` chooses the mutants that are new since then, and those where the code of their file or of
their named tests, with the helpers there, has changed. A change in any other file, such as a `conftest.py` or
one of `tests/support`, selects nothing; `make test-full` is there for those, as it runs every mutant.
`--green` leaves out the run of all their tests without any mutant, for those who have just seen them pass.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 300
PASSED, FAILED, HUNG = 0, 1, -signal.SIGALRM
"""Exit codes of pytest, and of one whose tests stood still for TIMEOUT_S. Any other means that they couldn't
be run."""
KILLED_BY = "\nkilled by "


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replaces the code `old`, which occurs once in `file` of the package, by `new`. One of `tests` must
    notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_MUTANT = re.compile(r"(?m)^(\S.*)\n((?:  - .*\n)+)((?:  \+.*\n)+)")


def read_mutants(table: str) -> tuple[Mutant, ...]:
    """The mutants of a table, whose form is said at its top.

    >>> [mutant] = read_mutants("Above.\\n@ masks.py: unit/test_masks.py\\nsign\\n  - a = 1\\n  + a = -1\\n")
    >>> mutant.name, mutant.old, mutant.new, mutant.tests
    ('sign', 'a = 1', 'a = -1', ('tests/unit/test_masks.py',))

    Raises:
        ValueError: a part of the table that isn't of the form.
    """
    mutants: list[Mutant] = []
    for section in table.split("\n@ ")[1:]:
        head, _, body = section.partition("\n")
        while body.startswith("    "):  # the line goes on
            more, _, body = body.partition("\n")
            head += more
        file, _, names = head.partition(": ")
        if rest := _MUTANT.sub("", f"{body}\n").strip():
            raise ValueError(f"this is no mutant of {file}: {rest!r}")
        tests = _tests(names.split())
        mutants += [
            Mutant(name, file, _text(old), _text(new), tests)
            for name, old, new in _MUTANT.findall(f"{body}\n")
        ]
    return tuple(mutants)


def _tests(names: Sequence[str]) -> tuple[str, ...]:
    """What pytest is given. `::NAME` is another test of the file before it."""
    tests: list[str] = []
    for name in names:
        tests.append(f"{tests[-1].partition('::')[0]}{name}" if name.startswith("::") else f"tests/{name}")
    return tuple(tests)


def _text(marked: str) -> str:
    return "\n".join(line[4:] for line in marked.splitlines())


@cache  # Several mutants change one file.
def _tokens(code: str) -> list[tokenize.TokenInfo]:
    """The tokens of a piece of code, without line breaks, indentation, comments, and commas before a closing
    bracket."""
    tokens: list[tokenize.TokenInfo] = []
    with suppress(tokenize.TokenError, IndentationError):  # a piece may end in the middle of a bracket
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if tokens and tokens[-1].string == "," and token.string in (")", "]", "}"):
                tokens.pop()
            if token.string.strip() and token.type != tokenize.COMMENT:
                tokens.append(token)
    return tokens


def places(source: str, piece: str) -> list[tuple[int, int]]:
    """Where the source has the tokens of the piece: the first character and the end of each place.

    >>> places("a = f(\\n    x,  # one\\n)\\n", "f(x)")
    [(4, 22)]
    """
    tokens, wanted = _tokens(source), [token.string for token in _tokens(piece.strip())]
    starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]
    found = []
    for first in range(len(tokens) - len(wanted) + 1):
        chosen = tokens[first : first + len(wanted)]
        if [token.string for token in chosen] == wanted:
            (row, column), (end_row, end_column) = chosen[0].start, chosen[-1].end
            found.append((starts[row - 1] + column, starts[end_row - 1] + end_column))
    return found


def stale(mutants: Sequence[Mutant]) -> list[str]:
    """A sentence for each mutant that is no Python, whose code isn't in the source exactly once, or whose
    test is gone."""
    found = []
    for mutant in mutants:
        path = ROOT / "turnwise" / mutant.file
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        count = len(places(source, mutant.old))
        if count == 1:
            found += _syntax_error(mutant, source)
        else:
            found.append(
                f"{mutant.name}: turnwise/{mutant.file} holds its code {count} times: {mutant.old!r}"
            )
        found += [f"{mutant.name}: there is no {test}" for test in mutant.tests if not _is_there(test)]
    return found


def _syntax_error(mutant: Mutant, source: str) -> list[str]:
    [(start, end)] = places(source, mutant.old)
    try:
        compile(source[:start] + mutant.new + source[end:], mutant.file, "exec", dont_inherit=True)
    except SyntaxError as error:
        return [f"{mutant.name}: turnwise/{mutant.file} would be no Python: {error}"]
    return []


def _is_there(test: str) -> bool:
    file, _, name = test.partition("::")
    function = name.partition("[")[0].rpartition("::")[2]
    return (ROOT / file).is_file() and f"def {function}" in (ROOT / file).read_text(encoding="utf-8")


def changed(mutants: Sequence[Mutant], revision: str) -> list[Mutant]:
    """The mutants that are new since the revision, or where the code of their file or tests has changed; all
    where git doesn't know it. A changed docstring or comment is no changed code, and other tests of a file
    are no code of a named one."""
    old = set(read_mutants(_git("show", f"{revision}:tests/mutants.txt") or ""))
    is_same = cache(partial(_is_same, revision))
    return [m for m in mutants if m not in old or not all(map(is_same, (f"turnwise/{m.file}", *m.tests)))]


def _git(*command: str) -> str | None:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode else done.stdout


def _is_same(revision: str, part: str) -> bool:
    """Whether the code of a file, or of one of its tests (`FILE::TEST`), is what it was."""
    file, _, test = part.partition("::")
    before, now = _git("show", f"{revision}:{file}"), ROOT / file
    return (
        before is not None
        and now.is_file()
        and _code(before, test) == _code(now.read_text(encoding="utf-8"), test)
    )


def _code(source: str, test: str = "") -> str:
    """The syntax tree of a module without its docstrings, those of attributes included; with `test` without
    all other tests."""
    tree, named = ast.parse(source), test.partition("[")[0]
    if test:
        tree.body = [
            s
            for s in tree.body
            if not getattr(s, "name", "").startswith("test_") or getattr(s, "name", "") == named
        ]
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [
                s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
            ]
    return ast.dump(tree)


def run(mutants: Sequence[Mutant], are_green: bool = False) -> list[str]:
    """Runs the mutants, after their tests without any unless those `are_green`; a sentence for each that
    survived or whose tests couldn't be run."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        copies = [folder / str(number) for number in range(os.cpu_count() or 1)]
        for copy in copies:
            shutil.copytree(
                ROOT / "turnwise", copy / "turnwise", ignore=shutil.ignore_patterns("__pycache__")
            )
        libraries = folder / "libraries"
        started = time.monotonic()
        tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
        plain = _Child(copies[0], (*tests, *(["--collect-only"] if are_green else [])), libraries)
        code = os.waitstatus_to_exitcode(os.waitpid(plain.pid, 0)[1])
        print(
            f"{'reading' if are_green else 'running'} their tests took {time.monotonic() - started:.1f} s "
            "without any mutant",
            flush=True,
        )
        if code != PASSED:
            return [f"the tests fail without any mutant (pytest exit code {code}):\n{plain.written()}"]
        _import(libraries.read_text(encoding="utf-8").split())
        return _run_mutants(mutants, copies)


def _run_mutants(mutants: Sequence[Mutant], copies: list[Path]) -> list[str]:
    """Runs the mutants, one in each copy of the package at a time."""
    problems, waiting, running = [], list(reversed(mutants)), {}
    while waiting or running:
        if waiting and copies:
            mutant, copy = waiting.pop(), copies.pop()
            source = copy / "turnwise" / mutant.file
            plain = _apply(mutant, source)
            child = _Child(copy, mutant.tests)
            running[child.pid] = (mutant, child, source, plain)
            continue
        pid, status = os.wait()
        mutant, child, source, plain = running.pop(pid)
        _restore(source, *plain)
        copies.append(child.folder)
        code = os.waitstatus_to_exitcode(status)
        output, _, killer = child.written().rpartition(KILLED_BY)
        verdict = {PASSED: "survived", FAILED: "killed", HUNG: "killed"}.get(code, f"broken ({code})")
        by = f": {killer}" if code == FAILED else ": its tests never end" if code == HUNG else ""
        print(f"{verdict:<9} {time.monotonic() - child.started:5.1f} s  {mutant.name}{by}", flush=True)
        if code == PASSED:
            problems.append(f"{mutant.name}: survived {', '.join(mutant.tests)}")
        elif code not in (FAILED, HUNG):
            problems.append(
                f"{mutant.name}: its tests couldn't be run (exit code {code}):\n{output or killer}"
            )
    return problems


def _apply(mutant: Mutant, source: Path) -> tuple[str, os.stat_result]:
    """Puts the mutant into its file. The text and times that the file had before."""
    text, times = source.read_text(encoding="utf-8"), source.stat()
    [(start, end)] = places(text, mutant.old)
    source.write_text(text[:start] + mutant.new + text[end:], encoding="utf-8")
    return text, times


def _restore(source: Path, text: str, times: os.stat_result) -> None:
    """Gives the file its text and time back, so that its bytecode is valid again."""
    source.write_text(text, encoding="utf-8")
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))


def _import(libraries: Sequence[str]) -> None:
    """What the tests import of others, once for all forked processes."""
    for name in libraries:
        with suppress(ImportError, AttributeError):
            importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)


class _Child:
    """A forked process that runs tests on the package of `folder`."""

    def __init__(self, folder: Path, tests: Sequence[str], libraries: Path | None = None) -> None:
        self.folder, self.started = folder, time.monotonic()
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  it is read when the process has ended
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                code = _in_child(folder, tests, self._output.fileno(), libraries)
            finally:
                os._exit(code)

    def written(self) -> str:
        with self._output as output:
            output.seek(0)
            return output.read()[-4000:]


class _Killer:
    """Tells the parent process which test failed first."""

    def __init__(self, output: int) -> None:
        self.output, self.name = output, ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.name = self.name or report.nodeid

    def pytest_unconfigure(self) -> None:
        os.write(self.output, f"{KILLED_BY}{self.name}".encode())


def _in_child(folder: Path, tests: Sequence[str], output: int, libraries: Path | None) -> int:
    """Runs pytest. The first child notes in `libraries` what was imported besides the package and its tests,
    and leaves bytecode behind; the others mustn't, since theirs is a mutant's."""
    signal.alarm(TIMEOUT_S)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    os.environ.pop("TURNWISE_DURATIONS", None)  # how long a mutant takes is no test's duration
    sys.dont_write_bytecode = libraries is None
    sys.path[:] = [
        str(folder),
        *(entry for entry in sys.path if entry and Path(entry).resolve() not in (ROOT, ROOT / "tests")),
    ]
    import pytest

    import turnwise

    if Path(turnwise.__file__).parent.parent != folder:
        raise RuntimeError(f"turnwise comes from {turnwise.__file__}, not from {folder}")
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(ROOT),
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    code = int(
        pytest.main(
            [*options, *(test if test.startswith("-") else str(ROOT / test) for test in tests)],
            [_Killer(output)],
        )
    )
    if libraries is not None:
        own = ("turnwise", "tests", "conftest", "test_", "__main__", "_pytest", "pytest")
        # What tests/support holds imports the package too, and the parent finds it where PYTHONPATH names
        # that folder.
        support = {path.stem for path in (ROOT / "tests" / "support").iterdir()}
        foreign = [
            name
            for name in list(sys.modules)
            if not name.startswith(own) and name.partition(".")[0] not in support
        ]
        libraries.write_text("\n".join(foreign), encoding="utf-8")
    return code


def main(arguments: Sequence[str]) -> int:
    """Exit status 1 where something is wrong, with a sentence for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all where none is given")
    parser.add_argument("--check", action="store_true", help="run nothing")
    parser.add_argument("--green", action="store_true", help="don't run the tests without any mutant first")
    parser.add_argument("--changed", metavar="REVISION", help="only what has changed since")
    parser.add_argument("--most", metavar="NUMBER", type=int, help="so many of them, evenly spread")
    options = parser.parse_args(arguments)
    mutants = read_mutants((Path(__file__).parent / "mutants.txt").read_text(encoding="utf-8"))
    chosen = [
        mutant
        for mutant in mutants
        if not options.names or any(name in mutant.name for name in options.names)
    ]
    if options.changed:
        chosen = changed(chosen, options.changed)
    if options.most and len(chosen) > options.most:
        print(f"{options.most} of {len(chosen)} mutants are run here, all by make test-full")
        chosen = [chosen[number * len(chosen) // options.most] for number in range(options.most)]
    problems = stale(mutants) or ([] if options.check or not chosen else run(chosen, options.green))
    print(
        "\n".join(problems)
        or f"{len(chosen)} mutants: {'all pieces are there' if options.check else 'all killed'}"
    )
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
