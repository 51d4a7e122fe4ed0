"""The launcher of the sandbox: it restricts its own process irrevocably, then runs the file `main.py` in a
folder.

It is started as `python -I -S jail.py FOLDER {"…": …}`, where the JSON holds the limits, and imports nothing
but the standard library. Its first line of output says how the process is isolated, or why it can't be. The
output of `main.py` follows.

Landlock (kernel 6.2 or newer) allows only access to the standard library, shared libraries and the folder
itself. Seccomp allows only the system calls of `jail.json`: no network, no other processes, no signals to
them, no more rights."""

import builtins
import ctypes
import json
import linecache
import os
import resource
import struct
import sys
import tokenize
import traceback
from importlib.machinery import SourceFileLoader
from types import ModuleType

# Imported early, since showing an error must not depend on what the code has left of the file system.
LOADED_EARLY: tuple[ModuleType, ...] = (linecache, tokenize)

STDLIB = os.path.dirname(os.__file__)
FIRST_UID = 61184
NUM_UIDS = 4096
"""The first of the sandbox's user ids, and their number. They have no accounts, and no rights to others'
files or processes."""
OPTIONAL = ("/dev/null", "/dev/urandom", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""Further paths that the code may read, where they exist."""
MIN_LANDLOCK = 3
READ_FILE = 1 << 2
READ_DIR = 1 << 3
SCRATCH = 1 << 1 | READ_FILE | READ_DIR | 1 << 5 | 1 << 8 | 1 << 12 | 1 << 14
"""Rights in the code's own folder: reading, writing, deleting, truncating, and making files and symbolic
links, but no folders, so that the folder's size is quickly measured."""
ALL_ACCESS = (1 << 15) - 1

MACHINES = {"x86_64": 0, "aarch64": 1}
ARCHITECTURES = (0xC000003E, 0xC00000B7)
with open(os.path.join(os.path.dirname(__file__), "jail.json"), encoding="utf-8") as file:
    CALLS = json.load(file)
"""`allowed`: system calls with their numbers on `MACHINES`. `only_with`: calls that are allowed only with
some values of one argument. They make socket pairs, send without an address, name a thread, read or set the
process's own limits, use fcntl (except to send signals) and ioctl (terminal checks, non-blocking,
close-on-exec), and signal the process itself."""
CLONE = (56, 220)
CLONE3 = 435
CLONE_THREAD = 0x10000

LOAD = 0x20
EQUAL = 0x15
ANY_BIT = 0x45
RETURN = 0x06

EACCES = 13
ENOSYS = 38
_ERRNO = 0x00050000
ALLOW = (RETURN, 0, 0, 0x7FFF0000)
KILL = (RETURN, 0, 0, 0x80000000)
DENY = (RETURN, 0, 0, _ERRNO | EACCES)
IS_MISSING = (RETURN, 0, 0, _ERRNO | ENOSYS)
"""Instructions that end the filter: the call is made, the process is killed, the call fails with EACCES, or
with ENOSYS, as if the kernel didn't have it."""

ISOLATED = "isolated: "
REFUSED = "refused: "

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The system can't isolate the code. The message says why."""


def called(name: str, *arguments: object) -> int:
    """Makes the system call `name` (number, then arguments) and returns its result. Raises Refused if it
    fails."""
    result: int = libc.syscall(*arguments)
    if result < 0:
        raise Refused(f"{name} failed: {os.strerror(ctypes.get_errno())}")
    return result


def landlock_version() -> int:
    """The version of this kernel's Landlock; below 1 if it has none."""
    if not sys.platform.startswith("linux"):
        return 0
    return int(libc.syscall(444, None, 0, 1))


def readable_files() -> list[tuple[str, int]]:
    """`(path, rights)` of what the code may read: the standard library (no site-packages), shared libraries,
    `OPTIONAL`."""
    with open("/proc/self/maps") as maps:
        libraries = [line.split()[-1] for line in maps if ".so" in line]
    files = [(STDLIB, READ_DIR)]
    files += [(path, READ_FILE) for path in OPTIONAL if os.path.exists(path)]
    for entry in os.scandir(STDLIB):
        if entry.name in ("site-packages", "dist-packages"):
            continue
        rights = READ_FILE
        if entry.is_dir():
            rights |= READ_DIR
        files.append((entry.path, rights))
    folders = set(map(os.path.dirname, libraries))
    for folder in folders - {STDLIB, f"{STDLIB}/lib-dynload"}:
        for entry in os.scandir(folder):
            if ".so" in entry.name and entry.is_file():
                files.append((entry.path, READ_FILE))
    return files


def become_nobody() -> str:
    """Changes the user id, if it is root's, to one from `FIRST_UID` on. Drops all capabilities. Returns the
    user as text."""
    if os.geteuid() == 0:
        uid = FIRST_UID + os.getpid() % NUM_UIDS
        try:
            for path in (".", "main.py"):
                os.chown(path, uid, uid)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        except OSError as fault:
            raise Refused(
                f"root can't become the user {uid} ({fault.strerror}); run turnwise as an ordinary user"
            ) from fault
    capset = 126 if os.uname().machine == "x86_64" else 91
    called("capset", capset, struct.pack("=Ii", 0x20080522, 0), bytes(24))
    return f"as user {os.geteuid()}"


def limit(limits: dict[str, int]) -> None:
    """Sets the limits of the process. The kernel counts threads per user, so the limit adds the user's
    running threads."""
    threads = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.geteuid():
                threads += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    sizes = {
        "AS": limits["memory"],
        "FSIZE": limits["file"],
        "CPU": limits["cpu_s"],
        "NOFILE": 64,
        "CORE": 0,
        "MEMLOCK": 0,
        "NPROC": threads + limits["threads"],
        "MSGQUEUE": 0,
    }
    for key, size in sizes.items():
        number = resource.__dict__[f"RLIMIT_{key}"]
        _, hard = resource.getrlimit(number)
        if hard != resource.RLIM_INFINITY:
            size = min(size, hard)
        resource.setrlimit(number, (size, size))


def rules_of_files() -> int:
    """A file descriptor of the Landlock rules for the readable files and the current folder; see
    `landlock_restrict_self`."""
    if landlock_version() < MIN_LANDLOCK:
        raise Refused(
            f"the kernel {os.uname().release} has no Landlock of version {MIN_LANDLOCK} (Linux 6.2 or "
            "newer, and `landlock` in its list of security modules, /sys/kernel/security/lsm)"
        )
    rules = called("landlock_create_ruleset", 444, struct.pack("=Q", ALL_ACCESS), 8, 0)
    for path, access in [*readable_files(), (".", SCRATCH)]:
        file = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", access, file)
        called("landlock_add_rule", 445, rules, 1, rule, 0)
        os.close(file)
    return rules


def filter_of_calls(column: int) -> bytes:
    """The seccomp filter in classic BPF (code, jump if true, jump if false, operand). `column` is a value of
    `MACHINES`."""
    program = [
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, ARCHITECTURES[column]),
        KILL,
        (LOAD, 0, 0, 0),
    ]
    for numbers in CALLS["allowed"].values():
        number = numbers[column]
        if number is not None:
            program += [(EQUAL, 0, 1, number), ALLOW]
    for call in CALLS["only_with"].values():
        values = [os.getpid() if value == "pid" else value for value in call["values"]]
        program += [
            (EQUAL, 0, 2 + 2 * len(values), call["numbers"][column]),
            (LOAD, 0, 0, 16 + 8 * call["argument"]),
        ]
        for value in values:
            program += [(EQUAL, 0, 1, value), ALLOW]
        program.append(DENY)
    program += [
        (EQUAL, 0, 4, CLONE[column]),
        (LOAD, 0, 0, 16),
        (ANY_BIT, 0, 1, CLONE_THREAD),
        ALLOW,
        DENY,
    ]
    # Without clone3, libraries call clone, whose flags a filter can read.
    program += [(EQUAL, 0, 1, CLONE3), IS_MISSING]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in [*program, DENY])


def read_through(folder: str) -> None:
    """Makes Python import the standard library through an open descriptor, as the new user can't enter paths
    like /root."""
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    sys.path = [path.replace(STDLIB, folder) for path in sys.path]
    for module in list(sys.modules.values()):
        if "__path__" in vars(module):
            module.__path__ = [path.replace(STDLIB, folder) for path in module.__path__]


def isolate(folder: str, limits: dict[str, int]) -> str:
    """Confines this process to `folder`. Returns a text that says how. Raises Refused or OSError if it
    can't."""
    os.closerange(3, 1 << 20)
    os.setsid()
    os.chdir(folder)
    column = MACHINES.get(os.uname().machine)
    if column is None:
        raise Refused(
            f"the table of system calls is for {' and '.join(MACHINES)}, and this is {os.uname().machine}"
        )
    rules = rules_of_files()
    library = os.open(STDLIB, os.O_PATH)
    user = become_nobody()
    for option, value in ((PR_SET_PDEATHSIG, 9), (PR_SET_NO_NEW_PRIVS, 1)):
        if libc.prctl(option, value, 0, 0, 0):
            raise Refused("prctl failed")
    if os.getppid() != limits["parent"]:
        raise Refused("the process that asked for it is gone")
    if not os.access(f"{STDLIB}/os.py", os.R_OK):
        read_through(f"/proc/self/fd/{library}")
    limit(limits)
    called("landlock_restrict_self", 446, rules, 0)
    os.close(rules)
    instructions = filter_of_calls(column)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(buffer))
    if libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0):
        raise Refused(f"the kernel takes no seccomp filter: {os.strerror(ctypes.get_errno())}")
    return f"Landlock and seccomp, {user}"


def run() -> None:
    """Runs `main.py` as a program. Shows an exception as Python does, without the frames of this module."""
    sys.argv[:] = ["main.py"]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = "main.py"
    try:
        # By a relative path, since the code's user may have no access to the folders above.
        SourceFileLoader("__main__", "main.py").exec_module(module)
    except Exception as error:  # boundary: the error of the program, shown as Python shows it
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != "main.py":
            trace = trace.tb_next
        traceback.print_exception(error.with_traceback(trace))
        sys.exit(1)


if __name__ == "__main__":
    try:
        _, scratch, limits_text = sys.argv
        isolation = isolate(scratch, json.loads(limits_text))
        print(ISOLATED + isolation, flush=True)
    except (Refused, OSError) as error:
        print(f"{REFUSED}{error}", flush=True)
        sys.exit(1)
    run()
