"""The sandbox holds what tries to get out of it, and each attempt that it holds succeeds outside."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from growth import assert_linear
from messages import says
from toy_tools import LACKS_SANDBOX

import turnwise
from turnwise.errors import ConfigError, NotAvailableError
from turnwise.tools import jail
from turnwise.tools.sandbox import Limits, PythonResult, run_python

ATTEMPTS = Path(__file__).parents[2] / "support" / "escape_attempts.py"

ATTEMPT_S = 20
ORDINARY = [
    *("setpriv", "--reuid=61000", "--regid=61000", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
]
"""Makes root an ordinary user that may read the interpreter wherever it is installed."""

pytestmark = pytest.mark.skipif(LACKS_SANDBOX, reason="this kernel has no Landlock")


def run(code: str, **limits) -> PythonResult:
    return asyncio.run(run_python(code, Limits(**limits)))


@pytest.fixture(scope="module")
def outside():
    """Paths, sockets and processes that an escape may reach. Everybody may read and write the files, so that
    nothing but the sandbox stands before them."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        for name in ("secret", "victim", "owned", "movable", "deletable"):
            Path(folder, name).write_text("a secret")
            os.chmod(f"{folder}/{name}", 0o666)
        sockets = {
            "tcp": (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            "udp": (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            "unix": (socket.AF_UNIX, socket.SOCK_STREAM, f"{folder}/stream"),
            "datagrams": (socket.AF_UNIX, socket.SOCK_DGRAM, f"{folder}/datagrams"),
            "abstract": (socket.AF_UNIX, socket.SOCK_STREAM, f"\0turnwise-{os.getpid()}"),
        }
        opened = {name: socket.socket(family, kind) for name, (family, kind, _) in sockets.items()}
        for name, sock in opened.items():
            sock.bind(sockets[name][2])
            if sock.type == socket.SOCK_STREAM:
                sock.listen(8)
        for name in ("stream", "datagrams"):
            os.chmod(f"{folder}/{name}", 0o777)
        with open(f"{folder}/inherited", "w+") as inherited:
            inherited.write("inherited")
            inherited.flush()
            os.set_inheritable(inherited.fileno(), True)
            yield {
                "folder": folder,
                **{name: f"{folder}/{name}" for name in ("secret", "victim", "owned")},
                "home": os.path.expanduser("~"),
                "project": str(Path(turnwise.__file__).parents[1]),
                "source": turnwise.__file__,
                "package": pytest.__file__,
                "python": sys.executable,
                "group": os.getpgid(0),
                "tcp": opened["tcp"].getsockname()[1],
                "udp": opened["udp"].getsockname()[1],
                "unix": f"{folder}/stream",
                "datagrams": f"{folder}/datagrams",
                "abstract": f"turnwise-{os.getpid()}",
                "inherited": inherited.fileno(),
                "seconds": ATTEMPT_S,
            }
        for sock in opened.values():
            sock.close()


def program(outside: dict, back: str) -> str:
    return f"T = {outside | {'back': back}!r}\n{ATTEMPTS.read_text(encoding='utf-8')}"


def check(text: str) -> None:
    results = json.loads(text)["results"]
    assert len(results) >= 40
    assert {name: said for name, said in results.items() if said == "out" or "took too long" in said} == {}


def test_no_attempt_gets_out(outside, monkeypatch):
    Path(outside["victim"]).write_text(
        "a secret"
    )  # It was lost if an attempt without the sandbox came first.
    monkeypatch.setenv("TURNWISE_SECRET", "a secret")
    result = run(program(outside, "."), timeout_s=60, memory_mb=256)
    assert result.outcome == "ok", result
    assert result.isolation.startswith("Landlock and seccomp, as user ")
    check(result.text)
    assert Path(outside["victim"]).read_text() == "a secret"


def test_each_attempt_gets_out_without_the_sandbox(outside, tmp_path, monkeypatch):
    monkeypatch.setenv("TURNWISE_SECRET", "a secret")
    control = subprocess.run(
        [sys.executable, "-c", program(outside, str(tmp_path))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        pass_fds=[outside["inherited"]],
    )
    assert control.returncode == 0, control.stderr
    said = json.loads(control.stdout.splitlines()[-1])
    not_ours = set(said["of_root"]) if os.geteuid() else set()
    assert {
        name: text for name, text in said["results"].items() if text != "out" and name not in not_ours
    } == {}


def as_ordinary_user(code: str, outside: dict) -> subprocess.CompletedProcess:
    """Runs a program that may import the project, as a user that isn't root."""
    return subprocess.run(
        [*(ORDINARY if os.geteuid() == 0 else []), sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        env=os.environ | {"PYTHONPATH": outside["project"], "TURNWISE_SECRET": "a secret"},
    )


def test_an_ordinary_user_is_held_too(outside):
    code = (
        "import asyncio\n"
        "from turnwise.tools.sandbox import Limits, run_python\n"
        f"result = asyncio.run(run_python({program(outside, '.')!r}, Limits(timeout_s=60)))\n"
        "print(result.isolation, '|', result.text)"
    )
    done = as_ordinary_user(code, outside)
    isolation, _, text = done.stdout.partition(" | ")
    assert isolation == f"Landlock and seccomp, as user {os.geteuid() or 61000}", done
    check(text)


def test_an_ordinary_user_leaves_rights_of_root_behind(outside):
    code = (
        "import asyncio, os\n"
        "from turnwise.tools.sandbox import run_python\n"
        "async def main():\n"
        "    task = asyncio.create_task(run_python('import time\\ntime.sleep(100)'))\n"
        "    while True:\n"
        "        await asyncio.sleep(0.01)\n"
        "        for child in open(f'/proc/self/task/{os.getpid()}/children').read().split():\n"
        "            status = open(f'/proc/{child}/status').read()\n"
        "            if 'Seccomp:\\t2' in status:\n"
        "                return task.cancel() and print(status)\n"
        "asyncio.run(main())"
    )
    done = as_ordinary_user(code, outside)
    status = dict(line.split(":\t", 1) for line in done.stdout.splitlines() if ":\t" in line)
    assert {status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Amb")} == {"0" * 16}, done
    assert status["NoNewPrivs"] == "1"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(100)",
        "import threading\nfor _ in range(3): threading.Thread(target=lambda: [0 for _ in iter(int, "
        "1)]).start()",
        "import sys\nwhile True: sys.stdout.write('x' * 65536)",
        "def bomb():\n  import os\n  while True:\n    try: os.fork()\n    except OSError: pass\nbomb()",
    ],
    ids=["a spin", "ignored signals", "threads that never end", "a flood", "a fork bomb"],
)
def test_code_that_never_ends_is_ended(code):
    result = run(code, timeout_s=0.3)
    assert result.outcome == "timeout"
    assert len(result.text) < 21_000
    assert result.text.endswith("The code ran for longer than 0.3 s and was ended.")


def test_memory_is_limited():
    result = run("kept = [bytearray(1 << 24) for _ in range(1000)]", memory_mb=128)
    assert result.outcome == "error" and "MemoryError" in result.text


def test_the_disk_is_limited():
    result = run("n = 0\nwhile True:\n  n += 1\n  open(str(n), 'wb').write(b'x' * (1 << 20))", disk_mb=8)
    assert result.outcome == "disk"
    assert result.text.endswith("The code wrote more than 8 MiB of files and was ended.")


def test_many_files_cost_the_event_loop_nothing():
    """Measuring and removing them takes other threads: this one, which the event loop runs in, hardly
    computes meanwhile."""

    def write(num_files: int) -> None:
        code = f"import time\nfor n in range({num_files}):\n    open(str(n), 'w').close()\ntime.sleep(0.5)"
        assert run(code, timeout_s=60).outcome == "ok"

    assert_linear(write, 6000, most_growth=6.0)


def test_one_file_is_limited():
    assert "File too large" in run("open('large', 'wb').write(b'x' * (5 << 20))", disk_mb=16).text


def test_ten_megabytes_of_output_are_cut_in_their_middle():
    result = run("print('first'); print('x' * 10_000_000); print('last')", max_output=1000)
    assert result.outcome == "ok"
    assert result.text.startswith("first\nxxx") and result.text.endswith("xxx\nlast\n")
    assert "… 9,999,012 bytes left out …" in result.text and len(result.text) < 1100


@pytest.mark.parametrize(
    ("code", "text", "outcome"),
    [
        ("print(6 * 7)", "42\n", "ok"),
        ("", "", "ok"),
        ("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", "out\nerr\n", "error"),
        ("exit()", "", "ok"),
        ("def f(x):\n  return 1 / x\nf(0)", "ZeroDivisionError: division by zero\n", "error"),
        ("1 +", "SyntaxError: invalid syntax\n", "error"),
        ("import os; os.abort()", "The code was ended by signal 6.", "killed"),
        ("import os; os._exit(0)", "", "ok"),
        ("print('äß𝄞')", "äß𝄞\n", "ok"),
        ("import asyncio; print(asyncio.run(asyncio.sleep(0, 5)))", "5\n", "ok"),
        ("import sys; print(sys.argv, __name__, sys.stdin.read())", "['main.py'] __main__ \n", "ok"),
        ("import sqlite3, ssl, decimal, ctypes, concurrent.futures, importlib.metadata, zoneinfo; "
        "print(1)", "1\n", "ok"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy'\n", "error"),
        ("open('a', 'w').write('b'); print(open('a').read())", "b\n", "ok"),
        ("print(1)\0", "source code string cannot contain null bytes\n", "error"),
        ("print('\ud800')", "?\n", "ok"),
        ("import os\nfor n in range(3000): open('a', 'w').close(); os.unlink('a')", "", "ok"),
        ("import threading\nt = threading.Thread(target=print, args=[1]); t.start(); t.join()", "1\n", "ok"),
    ],
)  # fmt: skip
def test_output_and_outcome(code, text, outcome):
    result = run(code)
    assert (result.text.endswith(text), result.outcome) == (True, outcome), result
    assert "jail.py" not in result.text and "runpy" not in result.text


def test_a_run_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run("open('a', 'w').write('b')")
    assert list(tmp_path.iterdir()) == []


def test_a_cancelled_run_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def scenario() -> None:
        task = asyncio.create_task(run_python("import time\nopen('ready', 'w')\ntime.sleep(100)"))
        while not list(tmp_path.glob("*/ready")):
            assert not task.done()
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


def test_code_dies_with_its_parent(tmp_path, outside):
    code = (
        "import asyncio, tempfile\n"
        "from turnwise.tools.sandbox import run_python\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "asyncio.run(run_python(\"import time\\nopen('ready', 'w')\\ntime.sleep(100)\"))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": outside["project"]}
    ) as parent:
        while not list(tmp_path.glob("*/ready")):
            assert parent.poll() is None
        (child,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        end = os.pidfd_open(int(child))
        parent.kill()
    assert select.select([end], [], [], 60)[0] == [end]
    os.close(end)


@pytest.mark.parametrize(
    ("code", "timeout_s", "outcome"), [("", 20, "ok"), ("while True: pass", 0.5, "timeout")]
)
def test_an_output_that_another_process_holds_open_keeps_nobody_waiting(
    code, timeout_s, outcome, monkeypatch
):
    """A process that is forked between the making of a pipe and the closing of its ends has them too."""
    spawn, others = os.posix_spawn, []

    def spawn_two(path, command, environment, **options):
        others.append(spawn(path, [path, "-I", "-S", "-c", "import time; time.sleep(100)"], {}, **options))
        return spawn(path, command, environment, **options)

    monkeypatch.setattr(os, "posix_spawn", spawn_two)
    assert run(code, timeout_s=timeout_s).outcome == outcome
    (other,) = others
    assert os.waitpid(other, os.WNOHANG) == (0, 0)
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)


def test_runs_at_the_same_time_are_apart():
    async def scenario() -> list[PythonResult]:
        return await asyncio.gather(
            *(run_python(f"open('a', 'x').write('{n}'); print(open('a').read())") for n in range(8))
        )

    assert [result.text for result in asyncio.run(scenario())] == [f"{n}\n" for n in range(8)]


LAUNCHER = Path(jail.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        (LAUNCHER.replace("MIN_LANDLOCK = 3", "MIN_LANDLOCK = 99"), "the kernel .* has no Landlock of "
        "version 99"),
        (LAUNCHER.replace('"x86_64": 0, "aarch64": 1', '"alpha": 0'), "the table of system calls is for "
        "alpha, and this is "),
        ("import time; time.sleep(100)", "its launcher said nothing for 0.3 s"),
        ("1 / 0", "Traceback"),
        ("", "its launcher ended and said nothing"),
    ],
    ids=["no Landlock", "another machine", "a launcher that "
    "hangs", "a launcher that fails", "a launcher that says nothing"],
)  # fmt: skip
def test_what_cannot_be_isolated_is_refused(launcher, message, tmp_path, monkeypatch):
    (tmp_path / "jail.py").write_text(launcher)
    shutil.copy(Path(jail.__file__).with_suffix(".json"), tmp_path)
    monkeypatch.setattr("turnwise.tools.sandbox.JAIL", tmp_path / "jail.py")
    if "0.3 s" in message:
        monkeypatch.setattr("turnwise.tools.sandbox.START_S", 0.3)
    with pytest.raises(NotAvailableError, match=f"can't isolate Python code of a model: {message}"):
        run("print(1)")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"timeout_s": 0}, says("timeout_s", "0", "above 0")),
        ({"timeout_s": float("inf")}, "timeout_s is inf"),
        ({"memory_mb": 63}, says("memory_mb", "63", "64")),
        ({"threads": True}, "threads is True"),
    ],
)
def test_limits_that_limit_nothing_are_refused(limits, message):
    with pytest.raises(ConfigError, match=message):
        Limits(**limits)
