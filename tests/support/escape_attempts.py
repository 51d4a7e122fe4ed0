# ruff: noqa: E501, RUF034
"""A program that tries to get out of the sandbox, and says which attempts did.

It is run as text, after a line `T = {…}` with the paths and sockets that wait for it outside: in the sandbox,
where nothing may get out, and outside, where each attempt has to.
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
ROOT_ONLY = {"the_standard_library", "a_device", "raw_packets"}
"""Attempts that an ordinary user can't make outside either."""
libc = ctypes.CDLL(None, use_errno=True)
PARENT = os.getppid()


def read(path):
    with open(path, "rb") as file:
        return file.read(64) is not None


def write(path, mode="a"):
    with open(path, mode) as file:
        return file.write("x")


def connect(family, kind, address):
    with socket.socket(family, kind) as sock:
        sock.connect(address)
        sock.send(b"x")
    return True


def a_symbolic_link():
    os.symlink(T["secret"], "symbolic")
    return read("symbolic")


def a_hard_link():
    os.link(T["secret"], "hard")
    return read("hard")


def a_folder_by_number():
    folder = os.open(T["folder"], os.O_PATH)
    return os.read(os.open("secret", os.O_RDONLY, dir_fd=folder), 9)


def a_change_of_folder():
    os.chdir(T["folder"])
    try:
        return read("secret")
    finally:
        os.chdir(T["back"])


def a_move_out_of_the_folder():
    write("mine", "w")
    os.rename("mine", T["folder"] + "/moved")
    return True


def a_file_that_is_removed(path):
    write(path, "w")
    os.unlink(path)
    return True


def an_import_of_the_project():
    sys.path.insert(0, T["project"])
    try:
        import turnwise.errors
    finally:
        del sys.path[0]
    return turnwise.errors


def inherited_files():
    for number in range(3, 256):
        try:
            if os.pread(number, 9, 0) == b"inherited":
                return True
        except OSError:
            continue
    return False


def a_port_of_its_own():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()


def a_message_from_a_pair_of_sockets():
    for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
        return sock.sendto(b"x", T["datagrams"])


def a_fork():
    child = os.fork()
    if child == 0:
        os._exit(0)
    return os.waitpid(child, 0)


def a_process_that_outlives():
    child = os.fork()
    if child == 0:
        os.setsid()
        os._exit(0 if os.fork() else 0)
    return os.waitpid(child, 0)


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


def a_signal_by_input():
    import fcntl

    reader, _ = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETOWN, PARENT)
    return True


FILES = {
    "a_file_of_others_in_tmp": lambda: read(T["secret"]),
    "the_list_of_users": lambda: read("/etc/passwd"),
    "the_home_folder": lambda: os.listdir(T["home"]) is not None,
    "a_listing_of_tmp": lambda: os.listdir("/tmp"),
    "a_listing_of_the_root": lambda: os.listdir("/"),
    "the_source_of_the_project": lambda: read(T["source"]),
    "installed_packages": lambda: read(T["package"]),
    "dots": lambda: read(os.path.join(*[".."] * 20, T["secret"].lstrip("/"))),
    "a_symbolic_link": a_symbolic_link,
    "a_hard_link": a_hard_link,
    "a_folder_by_number": a_folder_by_number,
    "a_change_of_folder": a_change_of_folder,
    "the_root_of_a_process": lambda: read("/proc/self/root" + T["secret"]),
    "the_folder_of_the_parent": lambda: os.listdir(f"/proc/{PARENT}/cwd"),
    "writing_to_a_file_of_others": lambda: write(T["victim"]),
    "emptying_a_file_opened_to_read": lambda: (
        os.close(os.open(T["victim"], os.O_RDONLY | os.O_TRUNC)) is None
    ),
    "emptying_a_file_by_its_path": lambda: os.truncate(T["victim"], 0) is None,
    "the_mode_of_a_file": lambda: os.chmod(T["owned"], 0o666) is None,
    "the_times_of_a_file": lambda: os.utime(T["owned"]) is None,
    "the_attributes_of_a_file": lambda: os.setxattr(T["owned"], "user.turnwise", b"x") is None,
    "a_new_file_in_an_open_folder": lambda: write(T["folder"] + "/new", "w"),
    "a_new_folder_in_an_open_folder": lambda: os.mkdir(T["folder"] + "/new_folder") is None,
    "a_pipe_in_an_open_folder": lambda: os.mkfifo(T["folder"] + "/pipe") is None,
    "a_link_in_an_open_folder": lambda: os.symlink("/", T["folder"] + "/link") is None,
    "a_move_out_of_the_folder": a_move_out_of_the_folder,
    "a_move_of_a_file_of_others": lambda: (
        os.rename(T["folder"] + "/movable", T["folder"] + "/stolen") is None
    ),
    "a_deleted_file_of_others": lambda: os.unlink(T["folder"] + "/deletable") is None,
    "shared_memory": lambda: a_file_that_is_removed("/dev/shm/turnwise-escape"),
    "the_standard_library": lambda: a_file_that_is_removed(
        os.path.dirname(os.__file__) + "/turnwise_escape.py"
    ),
    "a_device": lambda: os.open("/dev/kmsg", os.O_RDONLY),
    "an_import_of_the_project": an_import_of_the_project,
}
OF_THE_PARENT = {
    "environment_variables": lambda: os.environ["TURNWISE_SECRET"],
    "the_environment_of_the_parent": lambda: read(f"/proc/{PARENT}/environ"),
    "the_memory_of_the_parent": lambda: os.open(f"/proc/{PARENT}/mem", os.O_RDONLY),
    "a_listing_of_processes": lambda: os.listdir("/proc"),
    "inherited_files": inherited_files,
}
NETWORK = {
    "tcp": lambda: connect(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", T["tcp"])),
    "udp": lambda: connect(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", T["udp"])),
    "a_port_of_its_own": a_port_of_its_own,
    "names_of_machines": lambda: socket.getaddrinfo("localhost", 80),
    "a_unix_socket": lambda: connect(socket.AF_UNIX, socket.SOCK_STREAM, T["unix"]),
    "an_abstract_socket": lambda: connect(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + T["abstract"]),
    "a_message_from_a_pair_of_sockets": a_message_from_a_pair_of_sockets,
    "the_routing_table": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "raw_packets": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
}
PROCESSES = {
    "a_fork": a_fork,
    "a_process_that_outlives": a_process_that_outlives,
    "a_shell": lambda: os.system("true") == 0,
    "another_program": lambda: subprocess.run([T["python"], "-I", "-S", "-c", ""], check=True),
    "a_spawned_program": lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0),
    "a_program_in_memory": lambda: os.memfd_create("program"),
    "a_session_of_its_own": lambda: os.setpgid(0, 0) is None,
    "five_hundred_threads": five_hundred_threads,
    "a_gibibyte": lambda: len(mmap.mmap(-1, 1 << 30)),
    "more_memory": lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)) is None,
    "the_limits_of_the_parent": lambda: resource.prlimit(PARENT, resource.RLIMIT_NOFILE),
    "the_processors_of_the_parent": lambda: os.sched_setaffinity(PARENT, os.sched_getaffinity(0)) is None,
    "the_priority_of_the_parent": lambda: (
        os.setpriority(os.PRIO_PROCESS, PARENT, os.getpriority(os.PRIO_PROCESS, PARENT)) is None
    ),
}
SIGNALS = {
    # Signal 0 asks whether one could be sent.
    "a_signal_to_the_parent": lambda: os.kill(PARENT, 0) is None,
    "a_signal_to_the_group_of_the_parent": lambda: os.kill(-T["group"], 0) is None,
    "a_signal_by_file": lambda: signal.pidfd_send_signal(os.pidfd_open(PARENT), 0) is None,
    "a_signal_by_input": a_signal_by_input,
}
ATTEMPTS = FILES | OF_THE_PARENT | NETWORK | PROCESSES | SIGNALS

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
