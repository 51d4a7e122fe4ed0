"""`turnwise …` in processes of its own that start in milliseconds: they are forked off one that has imported
the libraries.

`run` and `Popen` take what `subprocess` takes, but the command is given by its arguments alone. What a
process does while it imports torch, and variables that libraries read then, need a real start (`subprocess`).
`fresh_hub.py` reads some again.
"""

from __future__ import annotations

import array
import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

LIBRARIES = (
    "torch",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama",
    "transformers.generation.utils",
    "tokenizers",
    "safetensors.torch",
    "jinja2",
    "omegaconf",
    "hydra",
    "rich.live",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "torch.utils.tensorboard",
)


class Popen:
    """A forked process that runs `turnwise` with these arguments. Its fate is the guard's: the pid is the
    command's own."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        text: bool = True,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        module: str = "turnwise.cli.main",
    ) -> None:
        assert text, "bytes aren't read here"
        self.args = [str(argument) for argument in arguments]
        self.returncode: int | None = None
        ours: list[IO[str] | None] = []
        theirs: list[int] = []
        for number, given in enumerate((stdin, stdout, stderr)):
            ours.append(None)
            if given == subprocess.PIPE:
                readable, writable = os.pipe()
                mine, other = (writable, readable) if number == 0 else (readable, writable)
                ours[number] = open(mine, "w" if number == 0 else "r", encoding="utf-8", errors="replace")  # noqa: SIM115
                theirs.append(other)
            elif given == subprocess.STDOUT:
                theirs.append(os.dup(theirs[1]))
            elif given == subprocess.DEVNULL:
                theirs.append(os.open(os.devnull, os.O_RDWR))
            else:
                theirs.append(
                    os.dup(number if given is None else given if isinstance(given, int) else given.fileno())
                )
        self.stdin, self.stdout, self.stderr = ours
        request = {
            "arguments": self.args,
            "module": module,
            "cwd": str(Path(cwd or os.getcwd())),
            "env": dict(os.environ if env is None else env),
            "new_session": start_new_session,
        }
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_server())
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", theirs))]
        text_of_request = json.dumps(request).encode() + b"\n"
        self._connection.sendmsg([text_of_request[:1]], rights)
        self._connection.sendall(text_of_request[1:])
        for descriptor in theirs:
            os.close(descriptor)
        self._answers = self._connection.makefile("r")
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        try:
            return self.wait(0.001)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, minus the signal that ended it.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            self._connection.settimeout(None)
            if timeout is not None and not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(
        self, input: str | None = None, timeout: float | None = None
    ) -> tuple[str | None, str | None]:
        """All that it writes until it ends.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        texts: list[str | None] = [None, None]

        def read(index: int, stream: IO[str]) -> None:
            texts[index] = stream.read()

        streams = [
            (index, stream) for index, stream in enumerate((self.stdout, self.stderr)) if stream is not None
        ]
        readers = [threading.Thread(target=read, args=pair, daemon=True) for pair in streams]
        for reader in readers:
            reader.start()
        if self.stdin is not None:
            with suppress(BrokenPipeError):
                self.stdin.write(input or "")
                self.stdin.close()
        deadline = None if timeout is None else time.monotonic() + timeout
        for reader in readers:
            reader.join(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if deadline is None else max(deadline - time.monotonic(), 0.001))
        for _, stream in streams:
            stream.close()
        return texts[0], texts[1]

    def __enter__(self) -> Popen:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def launch(arguments: Sequence[str | Path], num_processes: int = 2, **options: Any) -> list[Popen]:
    """Processes as a launcher starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    shared = {**os.environ, **meeting, "WORLD_SIZE": str(num_processes)}
    environments = [{**shared, "RANK": str(rank)} for rank in range(num_processes)]
    return [Popen(arguments, env=environment, **options) for environment in environments]


def run(
    arguments: Sequence[str | Path],
    *,
    input: str | None = None,
    capture_output: bool = True,
    timeout: float | None = 300,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Runs like `subprocess.run`, with the outputs captured. A process that takes longer than `timeout`
    seconds is killed."""
    if capture_output:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    if input is not None:
        options["stdin"] = subprocess.PIPE
    process = Popen(arguments, **options)
    try:
        stdout, stderr = process.communicate(input, timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.wait(), stdout, stderr)


_address: str | None = None


def _server() -> str:
    """The address of this test process's server, which ends with it."""
    global _address
    if _address is None:
        folder = tempfile.mkdtemp(prefix="forked-")
        _address = f"{folder}/server"
        environment = os.environ | {
            "HF_MODULES_CACHE": f"{folder}/modules"
        }  # transformers reads it when it is imported
        command = [sys.executable, __file__, _address]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=environment)
        atexit.register(process.kill)
        while not os.path.exists(_address):
            assert process.poll() is None, "the server of forked processes ended"
            time.sleep(0.02)
    return _address


def _serve(address: str) -> None:
    """Forks a process for each connection: its pid is answered, and its exit status when it has ended."""
    sys.path.pop(0)  # this script's folder, which `python -m` doesn't look into
    for name in LIBRARIES:
        __import__(name)
    sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or os.cpu_count() or 1)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    # The test process has the other end of standard input, and may be killed before `atexit`.
    while 0 not in select.select([listener, 0], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _handle(connection)
        connection.close()
        while True:  # processes that have answered
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break


def _handle(connection: socket.socket) -> None:
    """Forks the command and waits for it, in a process of its own."""
    first, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(3 * 4))
    descriptors = list(array.array("i", ancillary[0][2]))
    request = json.loads(first + connection.makefile("rb").readline())
    child = os.fork()
    if child == 0:
        connection.close()
        _become(request, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.sendall(b"%d\n" % child)
    _, status = os.waitpid(child, 0)
    with suppress(OSError):  # nobody waits any more
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _become(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """This process is `python -m MODULE ARGUMENTS` from here on."""
    code = 1
    try:
        if request["new_session"]:
            os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(3, 256)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        os.environ.pop("PYTEST_CURRENT_TEST", None)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            is_line_buffered = name == "stderr" or (name == "stdout" and os.isatty(number))
            errors = "backslashreplace" if name == "stderr" else "strict"
            stream = open(number, "w" if number else "r", encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
            stream.reconfigure(line_buffering=is_line_buffered)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        added = [folder for folder in request["env"].get("PYTHONPATH", "").split(os.pathsep) if folder]
        here = [] if request["env"].get("PYTHONSAFEPATH") else [request["cwd"]]
        sys.path[:] = [*here, *added, *(folder for folder in sys.path if folder not in added)]
        sys.argv = [request["module"], *request["arguments"]]
        sys.dont_write_bytecode = False
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]  # as at the end of an interpreter
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
