# ruff: noqa: E501, RUF034
"""A program that tries to get out of the sandbox, and says which attempts did.

It is run as text, after a line `T = {…}` with the paths and sockets that wait for it outside: in the sandbox, where nothing may get
out, and outside, where each attempt has to.
"""

import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading

T = globals().get("T")
ATTEMPTS = {}
ROOT_ONLY = set()
libc = ctypes.CDLL(None, use_errno=True)
PARENT = os.getppid()


def attempt(function):
    ATTEMPTS[function.__name__] = function
    return function


def of_root(function):
    """An attempt that an ordinary user can't make outside either."""
    ROOT_ONLY.add(function.__name__)
    return attempt(function)


def read(path):
    with open(path, "rb") as file:
        return file.read(64) is not None


# Files


@attempt
def a_file_of_others_in_tmp():
    return read(T["secret"])


@attempt
def the_list_of_users():
    return read("/etc/passwd")


@attempt
def the_home_folder():
    return os.listdir(T["home"]) is not None


@attempt
def a_listing_of_tmp():
    return os.listdir("/tmp")


@attempt
def a_listing_of_the_root():
    return os.listdir("/")


@attempt
def the_source_of_the_project():
    return read(T["source"])


@attempt
def installed_packages():
    return read(T["package"])


@attempt
def dots():
    return read(os.path.join(*[".."] * 20, T["secret"].lstrip("/")))


@attempt
def a_symbolic_link():
    os.symlink(T["secret"], "symbolic")
    return read("symbolic")


@attempt
def a_hard_link():
    os.link(T["secret"], "hard")
    return read("hard")


@attempt
def a_folder_by_number():
    folder = os.open(T["folder"], os.O_PATH)
    return os.read(os.open("secret", os.O_RDONLY, dir_fd=folder), 9)


@attempt
def a_change_of_folder():
    os.chdir(T["folder"])
    try:
        return read("secret")
    finally:
        os.chdir(T["back"])


@attempt
def the_root_of_a_process():
    return read("/proc/self/root" + T["secret"])


@attempt
def the_folder_of_the_parent():
    return os.listdir(f"/proc/{PARENT}/cwd")


@attempt
def writing_to_a_file_of_others():
    with open(T["victim"], "a") as file:
        return file.write("x")


@attempt
def emptying_a_file_opened_to_read():
    os.close(os.open(T["victim"], os.O_RDONLY | os.O_TRUNC))
    return True


@attempt
def emptying_a_file_by_its_path():
    os.truncate(T["victim"], 0)
    return True


@attempt
def the_mode_of_a_file():
    os.chmod(T["owned"], 0o666)
    return True


@attempt
def the_times_of_a_file():
    os.utime(T["owned"])
    return True


@attempt
def the_attributes_of_a_file():
    os.setxattr(T["owned"], "user.turnwise", b"x")
    return True


@attempt
def a_new_file_in_an_open_folder():
    with open(T["folder"] + "/new", "w") as file:
        return file.write("x")


@attempt
def a_new_folder_in_an_open_folder():
    os.mkdir(T["folder"] + "/new_folder")
    return True


@attempt
def a_pipe_in_an_open_folder():
    os.mkfifo(T["folder"] + "/pipe")
    return True


@attempt
def a_link_in_an_open_folder():
    os.symlink("/", T["folder"] + "/link")
    return True


@attempt
def a_move_out_of_the_folder():
    with open("mine", "w"):
        pass
    os.rename("mine", T["folder"] + "/moved")
    return True


@attempt
def a_move_of_a_file_of_others():
    os.rename(T["folder"] + "/movable", T["folder"] + "/stolen")
    return True


@attempt
def a_deleted_file_of_others():
    os.unlink(T["folder"] + "/deletable")
    return True


@attempt
def shared_memory():
    with open("/dev/shm/turnwise-escape", "w") as file:
        file.write("x")
    os.unlink("/dev/shm/turnwise-escape")
    return True


@of_root
def the_standard_library():
    path = os.path.dirname(os.__file__) + "/turnwise_escape.py"
    with open(path, "w"):
        pass
    os.unlink(path)
    return True


@of_root
def a_device():
    return os.open("/dev/kmsg", os.O_RDONLY)


@attempt
def an_import_of_the_project():
    sys.path.insert(0, T["project"])
    try:
        import turnwise.errors
    finally:
        del sys.path[0]
    return turnwise.errors


# What the parent knows


@attempt
def environment_variables():
    return os.environ["TURNWISE_SECRET"]


@attempt
def the_environment_of_the_parent():
    return read(f"/proc/{PARENT}/environ")


@attempt
def the_memory_of_the_parent():
    return os.open(f"/proc/{PARENT}/mem", os.O_RDONLY)


@attempt
def a_listing_of_processes():
    return os.listdir("/proc")


@attempt
def inherited_files():
    for number in range(3, 256):
        try:
            if os.pread(number, 9, 0) == b"inherited":
                return True
        except OSError:
            continue
    return False


# Network


def connect(family, kind, address):
    with socket.socket(family, kind) as sock:
        sock.connect(address)
        sock.send(b"x")
    return True


@attempt
def tcp():
    return connect(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", T["tcp"]))


@attempt
def udp():
    return connect(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", T["udp"]))


@attempt
def a_port_of_its_own():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()


@attempt
def names_of_machines():
    return socket.getaddrinfo("localhost", 80)


@attempt
def a_unix_socket():
    return connect(socket.AF_UNIX, socket.SOCK_STREAM, T["unix"])


@attempt
def an_abstract_socket():
    return connect(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + T["abstract"])


@attempt
def a_message_from_a_pair_of_sockets():
    for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
        return sock.sendto(b"x", T["datagrams"])


@attempt
def the_routing_table():
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)


@of_root
def raw_packets():
    return socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)


# Processes


@attempt
def a_fork():
    child = os.fork()
    if child == 0:
        os._exit(0)
    return os.waitpid(child, 0)


@attempt
def a_process_that_outlives():
    child = os.fork()
    if child == 0:
        os.setsid()
        os._exit(0 if os.fork() else 0)
    return os.waitpid(child, 0)


@attempt
def a_shell():
    return os.system("true") == 0


@attempt
def another_program():
    return subprocess.run([T["python"], "-I", "-S", "-c", ""], check=True)


@attempt
def a_spawned_program():
    return os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)


@attempt
def a_program_in_memory():
    return os.memfd_create("program")


@attempt
def a_session_of_its_own():
    return os.setpgid(0, 0) is None


@attempt
def five_hundred_threads():
    threading.stack_size(1 << 16)
    hold, threads = threading.Event(), []
    try:
        for _ in range(500):
            threads.append(threading.Thread(target=hold.wait, daemon=True))
            threads[-1].start()
        return True
    finally:
        hold.set()


@attempt
def a_gibibyte():
    return len(mmap.mmap(-1, 1 << 30))


@attempt
def more_memory():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))
    return True


@attempt
def the_limits_of_the_parent():
    return resource.prlimit(PARENT, resource.RLIMIT_NOFILE)


@attempt
def the_processors_of_the_parent():
    os.sched_setaffinity(PARENT, os.sched_getaffinity(0))
    return True


@attempt
def the_priority_of_the_parent():
    os.setpriority(os.PRIO_PROCESS, PARENT, os.getpriority(os.PRIO_PROCESS, PARENT))
    return True


# Signals. Signal 0 asks whether one could be sent.


@attempt
def a_signal_to_the_parent():
    os.kill(PARENT, 0)
    return True


@attempt
def a_signal_to_the_group_of_the_parent():
    os.kill(-T["group"], 0)
    return True


@attempt
def a_signal_by_file():
    signal.pidfd_send_signal(os.pidfd_open(PARENT), 0)
    return True


@attempt
def a_signal_by_input():
    import fcntl

    reader, _ = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETOWN, PARENT)
    return True


# System calls that reach the kernel fail there with another error, as their arguments are wrong.

CALLS = {
    "x86_64": {
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "unshare": 272, "setns": 308, "chroot": 161, "mount": 165,
        "umount2": 166, "pivot_root": 155, "setuid": 105, "setgroups": 116, "capset": 126, "keyctl": 250, "add_key": 248,
        "request_key": 249, "bpf": 321, "perf_event_open": 298, "io_uring_setup": 425, "userfaultfd": 323, "open_by_handle_at": 304,
        "fanotify_init": 300, "inotify_init1": 294, "init_module": 175, "finit_module": 313, "kexec_load": 246, "swapon": 167,
        "sethostname": 170, "settimeofday": 164, "acct": 163, "quotactl": 179, "syslog": 103, "mknod": 133, "execveat": 322,
        "clone_of_namespaces": 56, "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240, "personality": 135, "ioperm": 173,
        "seccomp": 317, "pidfd_getfd": 438, "kcmp": 312, "move_pages": 279, "sendmsg": 46, "fsopen": 430, "rt_sigqueueinfo": 129,
        "tkill": 200, "openat2": 437, "a_call_of_another_interface": 0x40000000 + 39,
    },
    "aarch64": {
        "ptrace": 117, "process_vm_readv": 270, "unshare": 97, "setns": 268, "chroot": 51, "mount": 40, "setuid": 146, "keyctl": 219,
        "bpf": 280, "perf_event_open": 241, "io_uring_setup": 425, "userfaultfd": 282, "open_by_handle_at": 265, "execveat": 281,
    },
}.get(os.uname().machine, {})  # fmt: skip


def reaches_the_kernel(number):
    # For clone: a new user namespace and nothing else; for others a wrong address, file or size.
    first = 0x10000000 | 0x20000000 if number == CALLS.get("clone_of_namespaces") else -1
    ctypes.set_errno(0)
    result = libc.syscall(number, ctypes.c_long(first), *[ctypes.c_long(-1)] * 5)
    if result == 0 and number == CALLS.get("clone_of_namespaces"):
        os._exit(0)
    return result >= 0 or ctypes.get_errno() != 13


def too_long(*_):
    raise TimeoutError("the attempt took too long")


def main():
    results = {}
    signal.signal(signal.SIGALRM, too_long)
    for name, function in ATTEMPTS.items():
        signal.setitimer(signal.ITIMER_REAL, T["seconds"])
        try:
            results[name] = "out" if function() else "nothing found"
        except (OSError, ValueError, RuntimeError, MemoryError, KeyError, ImportError) as error:
            results[name] = repr(error)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for name, number in CALLS.items():
        results[name] = "out" if reaches_the_kernel(number) else "refused"
    print(json.dumps({"results": results, "of_root": sorted(ROOT_ONLY)}))


if T:  # not where pytest looks for doctests
    main()
