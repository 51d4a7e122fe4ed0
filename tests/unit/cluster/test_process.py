"""Roles in a process of their own: calls, threads, logs, times, weights, and every way in which it can
end."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import torch

from turnwise.assemble.placement import set_torch_threads
from turnwise.cluster.child import BufferedStopwatch
from turnwise.cluster.fork_server import ForkServer, drop_processes, prepare_processes
from turnwise.cluster.messages import SetUp, dumps, loads, pack, parted, unpack
from turnwise.cluster.process import WorkerProcess
from turnwise.cluster.process_cluster import ProcessCluster, _share
from turnwise.cluster.server_child import ServerCall, _Calls
from turnwise.cluster.server_process import SERVERS, ServerProcess
from turnwise.cluster.weight_senders import spawn_senders
from turnwise.errors import ConfigError, DataError, DeadlineError, WorkerError
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.placement import CpuThreads
from turnwise.runtime.rank import RankContext
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog

logger = logging.getLogger("turnwise.testing.worker")


class Worker:
    """Lives in the process, as this module is found there as well."""

    def __init__(self, rank):
        self.stopwatch = rank.stopwatch
        self.parameters = [("a", torch.zeros(2, 3)), ("b", torch.zeros(1, dtype=torch.bfloat16))]

    def process(self):
        return os.getpid()

    def environment(self, name):
        return os.environ.get(name)

    def wait(self, seconds):
        time.sleep(seconds)

    def wait_for_file(self, path):
        while not path.exists():
            time.sleep(0.005)

    def say(self):
        print("said")

    def say_and_wait(self):
        logger.warning("waiting")
        time.sleep(3600)

    def measure(self):
        return [torch.tensor(float(number)) for number in range(18)]

    def num_files(self):
        return len(os.listdir("/proc/self/fd"))

    def add_to(self, value):
        value += 1
        return value

    def count(self):
        torch.ones(2).exp()
        return torch.get_num_threads()

    def fail(self, how):
        two = Unpicklable("one", "two")
        raise {
            "no rows": DataError("no rows"),
            "StopIteration": StopIteration(),
            "Nameless": Nameless(),
            "one and two": two,
        }[how]

    def work(self):
        started = self.stopwatch.now()
        time.sleep(0.01)
        self.stopwatch.add("trainer", "work", started, samples=3)
        logger.warning("worked on %d", 3)

    def log_and_end(self):
        logger.warning("the last words")
        os.kill(os.getpid(), signal.SIGKILL)

    def log(self, what):
        extra = threading.Lock() if what == "a lock" else Unpicklable("one", "two")
        logger.warning("a record with %s", what, extra={"extra": extra})
        return "the answer"

    def log_in_a_thread(self):
        def log():
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                logger.debug("again")

        logger.setLevel(logging.DEBUG)
        threading.Thread(target=log, daemon=True).start()

    def end(self, number):
        os.kill(os.getpid(), number)
        time.sleep(60)

    def weights(self):
        return ((name, tensor) for name, tensor in self.parameters)

    def train(self):
        for _, tensor in self.parameters:
            tensor += 1

    def unsendable(self):
        return threading.Lock()


class BreaksOnce(Worker):
    num_iterations = 0

    def weights(self):
        """Breaks when it is iterated for the second time, which is for writing."""
        self.num_iterations += 1
        yield self.parameters[0]
        if self.num_iterations == 2:
            raise DataError("half")
        yield self.parameters[1]


def set_up():
    os.environ["TURNWISE_SET_UP"] = "too"


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.add_note("a note")


class Nameless(Exception):
    """Can be neither sent nor shown."""

    def __init__(self):
        super().__init__(threading.Lock())

    def __str__(self):
        raise RuntimeError("no name")


class Notes(Stopwatch):
    def __init__(self):
        super().__init__()
        self.notes = []

    def add(self, track, name, started, ended=None, **details):
        self.notes.append((track, name, ended - started, details))


@pytest.fixture(scope="module", autouse=True)
def fork_server_of_torch():
    """Most of what runs import isn't needed here."""
    drop_processes()
    prepare_processes(["pytest", "turnwise.assemble.placement", "turnwise.cluster.child"])
    yield
    drop_processes()


@pytest.fixture(scope="module")
def runner():
    with WatchedRunner(Watchdog(grace_s=5.0)) as runner:
        yield runner


@pytest.fixture
def make_cluster(runner):
    threads = set(threading.enumerate())
    before, made = torch.get_num_threads(), []

    def make(stopwatch=None, **options):
        threads = CpuThreads(train=2, rollout=3, total=4)
        made.append(
            ProcessCluster(
                runner.run, runner.watchdog, stopwatch or Stopwatch(), threads, set_torch_threads, **options
            )
        )
        return made[-1]

    yield make
    for cluster in made:
        cluster.shutdown()
    assert torch.get_num_threads() == (4 if made else before)
    torch.set_num_threads(before)
    assert not any("trainer" in thread.name for thread in set(threading.enumerate()) - threads)


@pytest.fixture(scope="module")
def cluster(runner):
    """One for the tests that leave its process as they find it."""
    threads = CpuThreads(train=2, rollout=3, total=torch.get_num_threads())
    cluster = ProcessCluster(runner.run, runner.watchdog, Stopwatch(), threads, set_torch_threads)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def workers(cluster):
    return cluster.spawn("actor_train", Worker)


@pytest.fixture(scope="module")
def senders(cluster, workers):
    return spawn_senders(cluster, "actor_train", is_shared=True, is_sharded=False)


@pytest.fixture
def own_cluster(make_cluster):
    return make_cluster()


@pytest.fixture
def own_workers(own_cluster):
    return own_cluster.spawn("actor_train", Worker)


@pytest.fixture
def impatient(own_cluster, own_workers):
    """Gives the workers' calls a second from now on: starting their process may take longer."""

    def limit():
        rank = own_cluster._processes[0]
        rank.settings = replace(rank.settings, deadline_s=2.0)
        return own_workers

    return limit


def test_all_roles_are_in_one_other_process(cluster):
    ids = {cluster.spawn(role, Worker).call("process").result() for role in ("actor_train", "critic")}
    assert len(ids) == 1 and os.getpid() not in ids


def test_the_loop_turns_until_the_call_is_done(runner, workers, tmp_path):
    async def tick():
        for _ in range(5):
            await asyncio.sleep(0.005)
        (tmp_path / "turned").touch()

    async def start():
        return asyncio.create_task(tick())

    task = runner.run(start())
    workers.call("wait_for_file", tmp_path / "turned").result()
    assert task.done()


def test_a_call_can_be_awaited(runner, workers):
    async def ask():
        return await workers.call("process")

    assert runner.run(ask()) != os.getpid()


def test_each_side_has_its_own_number_of_threads(workers):
    assert workers.call("count").result() == 2
    torch.ones(2).exp()
    assert torch.get_num_threads() == 3


def test_the_surroundings_are_taken_over(make_cluster, monkeypatch):
    monkeypatch.setenv("TURNWISE_ONLY_NOW", "yes")
    workers = make_cluster(set_up=set_up).spawn("actor_train", Worker)
    assert workers.call("environment", "TURNWISE_ONLY_NOW").result() == "yes"
    assert workers.call("environment", "TURNWISE_SET_UP").result() == "too"


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("no rows", DataError),
        ("StopIteration", WorkerError),
        ("Nameless", WorkerError),
        ("one and two", WorkerError),
    ],
)
def test_errors_of_any_kind_come_back_with_where_they_were_raised(workers, how, kind):
    with pytest.raises(kind, match=how) as caught:
        workers.call("fail", how).result()
    assert "in fail" in caught.value.__notes__[0]
    assert workers.call("process").result()


def test_what_cannot_be_sent_is_said_on_either_side(workers):
    with pytest.raises(
        WorkerError, match=r"actor_train.fail: its arguments can't be sent .*leave out what can't be pickled"
    ):
        workers.call("fail", threading.Lock()).result()
    with pytest.raises(TypeError, match="cannot pickle"):
        workers.call("unsendable").result()
    assert workers.call("process").result()


def test_a_result_of_a_server_that_cannot_be_sent_is_the_error_of_its_call():
    class Server:
        async def generate(self):
            return threading.Lock()

    async def main():
        calls = _Calls(
            SimpleNamespace(send=sent.append),
            Server(),
            SimpleNamespace(stopwatch=BufferedStopwatch(sent.append)),
        )
        calls._begin(ServerCall(7, "generate"))
        await asyncio.gather(*calls._running.values())
        await asyncio.sleep(0)  # what is answered in a tick is sent at its end

    sent = []
    asyncio.run(main())
    [(number, reply)] = map(unpack, parted(*sent))
    assert number == 7 and "cannot pickle" in str(reply.error)


def test_a_factory_that_fails_says_why(cluster):
    with pytest.raises(TypeError, match="missing 1 required"):
        cluster.spawn("critic", partial(Unpicklable))
    assert cluster.spawn("actor_train", Worker).call("process").result()


def test_logs_and_times_arrive(make_cluster, caplog):
    stopwatch = Notes()
    workers = make_cluster(stopwatch).spawn("actor_train", Worker)
    with caplog.at_level(logging.WARNING):
        workers.call("work").result()
    assert [record.getMessage() for record in caplog.records if record.name == logger.name] == ["worked on 3"]
    [(track, name, seconds, details)] = stopwatch.notes
    assert (track, name, details) == ("trainer", "work", {"samples": 3}) and seconds >= 0.01


def test_weights_are_written_where_both_sides_see_them(workers, senders):
    first = senders.publish().result()
    assert {name: tensor.unique().tolist() for name, tensor in first} == {"a": [0.0], "b": [0.0]}
    workers.call("train").result()
    second = senders.publish().result()
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in second} == {
        "a": (torch.Size([2, 3]), torch.float32),
        "b": (torch.Size([1]), torch.bfloat16),
    }
    assert [tensor.unique().tolist() for _, tensor in second] == [[1.0], [1.0]]
    assert [tensor.unique().tolist() for _, tensor in first] == [[1.0], [1.0]]


def test_nothing_is_kept_open_by_answers_and_weights(workers, senders):
    def num_open():
        return len(os.listdir("/proc/self/fd")), workers.call("num_files").result()

    list(senders.publish().result())
    before = num_open()
    for _ in range(20):
        assert [value.item() for value in workers.call("measure").result()] == list(range(18))
        list(senders.publish().result())
    # Fewer are left if files of earlier tests are closed meanwhile.
    assert all(now <= then for now, then in zip(num_open(), before, strict=True))


def test_weights_that_fail_once_are_there_the_next_time(cluster):
    cluster.spawn("critic", BreaksOnce)
    senders = spawn_senders(cluster, "critic", is_shared=True, is_sharded=False)
    with pytest.raises(DataError, match="half"):
        senders.publish().result()
    assert [name for name, _ in senders.publish().result()] == ["a", "b"]


def test_arguments_are_copies(workers):
    mine = torch.ones(3)
    assert workers.call("add_to", mine).result().tolist() == [2.0] * 3
    assert mine.tolist() == [1.0] * 3


def test_what_can_be_sent_is_known_before_it_is_needed(cluster, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "OfAScript", OfAScript, raising=False)
    monkeypatch.setattr(OfAScript, "__module__", "__main__")
    for value in (Unpicklable, lambda: None, type("Local", (), {}), OfAScript):
        [trial] = cluster.try_sending(value).values()
        trial.result()
    [trial] = cluster.try_sending(threading.Lock()).values()
    with pytest.raises(WorkerError, match="a trial: its arguments can't be sent"):
        trial.result()


class OfAScript:
    """As if a notebook had it."""


def test_what_was_logged_before_a_crash_arrives(own_workers, caplog):
    with caplog.at_level(logging.WARNING), pytest.raises(WorkerError):
        own_workers.call("log_and_end").result()
    assert "the last words" in caplog.text


@pytest.mark.parametrize("what", ["a lock", "an error"])
def test_records_with_anything_in_them_arrive_and_do_not_shift_the_answers(workers, caplog, what):
    with caplog.at_level(logging.WARNING):
        assert workers.call("log", what).result() == "the answer"
    assert f"a record with {what}" in caplog.text
    assert workers.call("add_to", 1).result() == 2


def test_a_thread_that_logs_does_not_disturb_the_first_weights(own_cluster):
    for number in range(4):
        workers = own_cluster.spawn(f"role {number}", Worker)
        workers.call("log_in_a_thread").result()
        senders = spawn_senders(own_cluster, f"role {number}", is_shared=True, is_sharded=False)
        assert [name for name, _ in senders.publish().result()] == ["a", "b"]


def test_a_call_in_progress_is_not_waited_for_at_the_end(own_cluster, own_workers):
    call = own_workers.call("wait", 3600)
    own_cluster.shutdown()
    assert isinstance(call.future.exception(timeout=10), WorkerError)


def test_two_clusters_after_each_other_and_at_once(make_cluster):
    first, second = make_cluster(), make_cluster()
    ids = [cluster.spawn("actor_train", Worker).call("process").result() for cluster in (first, second)]
    first.shutdown()
    ids.append(make_cluster().spawn("actor_train", Worker).call("process").result())
    assert len(set(ids)) == 3


def test_a_call_that_somebody_else_stops_to_await_is_named_too(runner, own_workers):
    async def ask(timeout_s):
        async with runner.watchdog.waiting("the weights", "an update", timeout_s, "deadlines.weights_s"):
            await own_workers.call("say_and_wait")

    with pytest.raises(
        DeadlineError, match=r"(?s)the weights waited 2 s .*the trainer's process:\n.* in say_and_wait"
    ):
        runner.run(ask(2.0))
    with pytest.raises(
        DeadlineError, match=r"count can't be called: actor_train.say_and_wait is past its deadline"
    ):
        own_workers.call("count")


@pytest.mark.parametrize("name", ["say_and_wait", "count"])
def test_a_call_without_end_and_one_behind_it_name_it_and_no_other_waits(impatient, name):
    workers = impatient()
    calls = {method: workers.call(method) for method in dict.fromkeys(["say_and_wait", name])}
    with pytest.raises(
        DeadlineError, match=rf"waited 2 s for actor_train.{name}; raise deadlines.train_s"
    ) as caught:
        calls[name].result()
    assert re.search(r"the trainer's process:\n.* in say_and_wait", str(caught.value), re.DOTALL)
    with pytest.raises(
        DeadlineError, match=r"process can't be called: actor_train.say_and_wait is past its deadline"
    ):
        workers.call("process")


@pytest.mark.extra
def test_a_call_that_was_only_late_has_others_after_it(impatient):
    workers = impatient()
    late = workers.call("wait", 4.0)
    with pytest.raises(DeadlineError, match=r"waited 2 s for actor_train\.wait"):
        late.result()
    with pytest.raises(DeadlineError, match="still runs"):
        workers.call("process")
    late.future.exception(timeout=60)
    assert workers.call("process").result()


def test_stacks_that_somebody_else_asked_for_are_not_shown(own_workers, impatient):
    trainer = own_workers.call("process").result()
    for _ in range(300):  # more than a pipe has room for
        os.kill(trainer, signal.SIGUSR1)
        assert own_workers.call("add_to", 1).result() == 2
    impatient()
    with pytest.raises(DeadlineError) as caught:
        own_workers.call("say_and_wait").result()
    assert "in say_and_wait" in str(caught.value)
    assert not re.search(r"line \d+ in receive", str(caught.value)), "where the process stood before the call"


def test_a_call_whose_wait_is_cancelled_has_others_behind_it(runner, workers):
    async def leave():
        task = asyncio.ensure_future(workers.call("wait", 0.5))
        await asyncio.sleep(0.1)
        task.cancel()

    runner.run(leave())
    assert workers.call("add_to", 1).result() == 2


def test_a_process_that_is_gone_has_no_stack(own_cluster, own_workers):
    os.kill(own_workers.call("process").result(), signal.SIGKILL)
    assert own_cluster._processes[0]._stacks() == "it doesn't say"


@pytest.mark.parametrize(
    ("number", "fate"),
    [(signal.SIGKILL, "something killed it .*memory runs out"), (signal.SIGSEGV, "by SIGSEGV")],
)
def test_a_process_that_ends_is_named(own_workers, number, fate):
    with pytest.raises(WorkerError, match=rf"actor_train.end: the trainer's process has ended: {fate}"):
        own_workers.call("end", number).result()
    with pytest.raises(WorkerError, match="has ended"):
        own_workers.call("count").result()


def test_what_a_shell_or_a_scheduler_sends_to_all_is_left_to_the_parent(make_cluster, own_workers):
    fork_server, process = prepare_processes(), own_workers.call("process").result()
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        os.kill(fork_server._process.pid, signal.Signals[name])
        os.kill(process, signal.Signals[name])
        assert own_workers.call("process").result() == process, name
    assert make_cluster().spawn("actor_train", Worker).call("process").result()
    assert prepare_processes() is fork_server


@pytest.mark.parametrize("how", [pytest.param("exit", marks=pytest.mark.extra), "kill"])
def test_no_process_outlives_a_script_without_a_guard(tmp_path, how):
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from test_process import *\n"
        "print('started', flush=True)\n"
        "runner = WatchedRunner(Watchdog()).__enter__()\n"
        "cluster = ProcessCluster(runner.run, runner.watchdog, Stopwatch(), CpuThreads(1, 1, 1), "
        "set_torch_threads)\n"
        "workers = cluster.spawn('actor_train', Worker)\n"
        "print(workers.call('process').result(), prepare_processes()._process.pid, flush=True)\n"
        "workers.call('say').result()\n"
        "workers.call('wait', 3600)\n"
        + {
            "exit": "sys.exit(0)\n",
            # A fork has the ends of all our connections.
            "kill": "if os.fork() == 0:\n    os.closerange(0, 3)\n    time.sleep(60)\n    os._exit(0)\n"
            "os.kill(os.getpid(), 9)\n",
        }[how]
    )
    started, process, fork_server, said = forked.run([], module="script", cwd=tmp_path).stdout.split()
    assert (started, said) == ("started", "said")
    for gone in (process, fork_server):
        end = time.monotonic() + 60
        while time.monotonic() < end and os.path.exists(f"/proc/{gone}"):
            time.sleep(0.05)
        with pytest.raises(ProcessLookupError):
            os.kill(int(gone), 0)


def test_a_folder_of_ranks_does_not_outlive_a_process_that_was_killed(tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    (folder / "rendezvous").touch()
    script = (
        "import os, sys; from turnwise.cluster.fork_server import ForkServer\n"
        "server = ForkServer([]); server.remove_at_end(sys.argv[1]); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(folder)]).returncode == -9
    end = time.monotonic() + 60
    while time.monotonic() < end and folder.exists():
        time.sleep(0.05)
    assert not folder.exists()


@pytest.fixture
def small_fork_server():
    """One that imports nothing."""
    fork_server = ForkServer([])
    yield fork_server
    fork_server.kill()


def test_a_fork_server_that_does_not_answer_is_named(small_fork_server, monkeypatch):
    monkeypatch.setattr("turnwise.cluster.fork_server._ANSWER_S", 0.2)
    os.kill(small_fork_server._process.pid, signal.SIGSTOP)
    with pytest.raises(
        WorkerError, match=r"didn't answer within .* async_generation_ratio: 0 on one device needs no such"
    ):
        small_fork_server.fork("signal:pause", [])
    small_fork_server._process.wait(timeout=60)


def test_a_fork_server_that_cannot_start_says_so_at_once(monkeypatch, capfd):
    monkeypatch.setattr(sys, "path", ["/nowhere"])
    with pytest.raises(WorkerError, match=r"has ended with exit code 1 .* there may be a message above"):
        ForkServer([]).fork("signal:pause", [])
    assert "No module named" in capfd.readouterr().err


def test_a_process_that_breaks_outside_of_calls_says_so(capfd):
    fork_server = ForkServer([])
    assert fork_server.reap(fork_server.fork("signal:nothing", [])) == 1
    fork_server.kill()
    assert "has no attribute 'nothing'" in capfd.readouterr().err


def test_several_threads_may_ask_how_a_process_ended(small_fork_server):
    """The system tells it once; a second question of the same process must not end the others."""
    first, second = (small_fork_server.fork("signal:pause", []) for _ in range(2))
    os.kill(first, signal.SIGKILL)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(small_fork_server.reap, [first] * 8)) == [-signal.SIGKILL] * 8

    os.kill(second, signal.SIGKILL)
    assert small_fork_server.is_alive and small_fork_server.reap(second) == -signal.SIGKILL


def test_batches_that_ranks_can_not_share_are_refused():
    with pytest.raises(
        WorkerError, match="3 batches can't be dealt to 2 ranks: each needs the same number of them"
    ):
        _share([1, 2, 3], 0, 2)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.ones(2, 3, dtype=torch.float16)[:, ::2],
        torch.zeros(0, 3, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
        torch.eye(2).to_sparse(),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_tensors_of_any_kind_can_be_sent(tensor):
    for copy in (loads(dumps(tensor)), unpack(pack(tensor))):
        assert_same_tensor(copy, tensor)


def assert_same_tensor(copy, tensor):
    assert (type(copy), copy.dtype, copy.shape, copy.layout) == (
        type(tensor),
        tensor.dtype,
        tensor.shape,
        tensor.layout,
    )
    assert copy.requires_grad == tensor.requires_grad
    torch.testing.assert_close(copy, tensor)


def test_the_process_is_gone_after_shutdown(own_cluster, own_workers):
    process = own_workers.call("process").result()
    own_cluster.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def press_ctrl_c(self):
    raise KeyboardInterrupt


def test_a_fork_server_that_was_left_in_the_middle_is_followed_by_another(
    make_cluster, own_workers, monkeypatch
):
    """The next one bears what the main process has by then: a path that is no text, and children that nobody
    waits for."""
    first = prepare_processes()
    monkeypatch.setattr(ForkServer, "_answer", press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        make_cluster()
    monkeypatch.undo()
    first._process.wait(timeout=60)
    assert own_workers.call("process").result(), "a process that was forked goes on without it"
    monkeypatch.setattr(sys, "path", [*sys.path, Path("anywhere")])
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert prepare_processes() is not first
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert prepare_processes().modules == first.modules != ()
    with pytest.raises(WorkerError, match="something killed it"):
        make_cluster().spawn("actor_train", Worker).call("end", signal.SIGKILL).result()


def test_threads_that_prepare_at_once_get_one_fork_server() -> None:
    drop_processes()
    barrier = threading.Barrier(4)

    def prepare(_: int) -> ForkServer:
        barrier.wait()
        return prepare_processes()

    with ThreadPoolExecutor(4) as threads:
        fork_servers = list(threads.map(prepare, range(4)))
    try:
        assert len({id(one) for one in fork_servers}) == 1 and fork_servers[0].is_alive
    finally:
        drop_processes()


def no_engine(rank):
    raise ConfigError("the engine didn't start")


def test_what_an_engine_wrote_into_a_file_of_its_node_is_shown_if_it_does_not_start(caplog, monkeypatch):
    worker_process = WorkerProcess.fork("the replica", SERVERS, Stopwatch())
    monkeypatch.setattr(worker_process.life, "hidden_output", lambda: "no memory for the cache")
    server = ServerProcess(worker_process, asyncio.run, Watchdog())
    set_up = SetUp(dict(os.environ), list(sys.path), os.getcwd(), {}, partial(set_torch_threads, 1))
    server.begin(set_up, no_engine, RankContext("actor_infer"))
    with pytest.raises(ConfigError, match="the engine"):
        server.wait_until_ready()
    server.end()
    assert "no memory for the cache" in caplog.text
