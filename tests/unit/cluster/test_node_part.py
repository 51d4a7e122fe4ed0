"""What the node of a run has to have: its address, versions, folders, and an agent that starts."""

from __future__ import annotations

import os
import socket

import pytest

from turnwise.cluster.beats import ProcessKey
from turnwise.cluster.node_agent import NodeAgent, WatchSettings
from turnwise.cluster.node_facts import NodeFacts, versions
from turnwise.cluster.node_part import Spread, failed_start, lacking_agent, require_paths, require_versions
from turnwise.cluster.ray_settings import require_addresses, require_head, with_own_names
from turnwise.errors import NotAvailableError, WorkerError
from turnwise.runtime.machine import Node

NODE = Node(name="far")


def test_another_version_is_named_with_its_node_and_both_versions():
    this = ProcessKey.of_this()
    require_versions(NODE, NodeFacts((), 1, versions(), this))
    with pytest.raises(WorkerError, match=r"node far has torch 1\.0, and the run 2"):
        require_versions(NODE, NodeFacts((), 1, versions() | {"torch": "1.0"}, this))


def test_a_folder_that_a_node_does_not_see_is_named_with_its_key(tmp_path):
    agent = NodeAgent(WatchSettings(ProcessKey.of_this(), 30.0, None))
    (tmp_path / "config.json").touch()
    paths = {"pretrain": str(tmp_path / "config.json"), "output_dir": str(tmp_path / "gone" / "mark")}
    missing = agent.missing(paths)
    assert missing == ["output_dir"]
    with pytest.raises(WorkerError, match=r"node far doesn't see .* output_dir \(.*/gone\)"):
        require_paths(NODE, missing, paths)
    require_paths(NODE, [], paths)


def test_cores_that_a_scheduler_withholds_are_not_a_node_s(monkeypatch):
    """SLURM and containers bind processes to some of them."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7}, raising=False)
    assert NodeAgent(WatchSettings(ProcessKey.of_this(), 30.0, None)).facts().num_cores == 3


def test_a_node_tells_its_memory_that_of_its_devices_and_its_shared_memory(monkeypatch, tmp_path):
    """Engines need them, and a container may have 64 MB of shared memory."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-a, 40960'; echo '3, GPU-b, 81920'; echo '4, GPU-c, [N/A]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-a,4")
    agent = NodeAgent(WatchSettings(ProcessKey.of_this(), 30.0, None))
    facts = agent.facts()
    assert facts.devices == ("3", "GPU-a", "4")
    assert facts.device_bytes == (81920 * 2**20, 40960 * 2**20, None)
    assert facts.memory_bytes and facts.memory_bytes > 2**28
    if os.path.isdir("/dev/shm"):
        assert facts.shared_bytes and "/dev/shm of" in facts.describe()
    assert "85.9 GB, 42.9 GB, unknown" in facts.describe()
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert agent.facts().device_bytes == (None,) * 3


def test_processes_that_have_ended_leave_room_on_their_node():
    """Else a worker that is started again would go elsewhere each time, and leave its node's cores idle."""
    cores = {0: 4, 2: 2}
    spread = Spread()
    assert [spread.add(cores) for _ in range(6)] == [0, 0, 2, 0, 0, 2]
    for _ in range(5):
        spread.remove(2)
        assert spread.add(cores) == 2
    assert spread.add({2: 2}) == 2, "the other node is lost"


def test_an_agent_that_can_not_start_says_why_in_its_last_line():
    error = lacking_agent(
        NODE, RuntimeError("a trace\n  of lines\nModuleNotFoundError: No module named 'turnwise'")
    )
    assert "node far can't start a process of the run: ModuleNotFoundError" in str(error)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: ActorHost\nThe actor is "
            "dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "its connection\nended with code 2. Some common causes include: (1) a kill",
            "its connection ended with code 2",
        ),
        (
            "The actor died because of an error raised in its creation task, \x1b[36mray::ActorHost()\n"
            '  File "host.py", line 3\nOSError: no space\n',
            "OSError: no space",
        ),
        ("", "RuntimeError"),
    ],
)
def test_a_process_that_ends_while_it_starts_is_one_sentence(text, reason):
    error = str(failed_start("inference replica 1", NODE, RuntimeError(text)))
    assert error.startswith(f"inference replica 1 can't be started on node far: {reason}; ")
    assert "\n" not in error


@pytest.mark.parametrize(
    ("addresses", "refused"),
    [
        (("10.0.0.1", "10.0.0.2"), ""),
        (("127.0.0.1",), ""),
        (("127.0.0.1", "127.0.0.1"), ""),
        (("10.0.0.1", "127.0.1.1"), r"node 1 as 127\.0\.1\.1"),
        (("127.0.0.1", "10.0.0.2"), r"node 0 as 127\.0\.0\.1"),
        (("fe80::1", "::1"), "node 1 as ::1"),
    ],
)
def test_a_loopback_address_is_refused_beside_other_machines(addresses, refused):
    nodes = [Node(name=str(index), address=address) for index, address in enumerate(addresses)]
    if not refused:
        require_addresses(nodes)
        return
    with pytest.raises(NotAvailableError, match=refused):
        require_addresses(nodes)


def test_nodes_of_one_host_name_are_told_apart_unless_they_are_one_machine():
    """Weights for a node of the trainer's name would be looked for in the trainer's memory."""
    named = [Node(name=name, address=address) for name, address in (("a", "1"), ("a", "2"), ("b", "3"))]
    assert [node.name for node in with_own_names(named)] == ["a (1)", "a (2)", "b"]
    one_machine = (Node(name="a", address="1", key="x"), Node(name="a", address="1", key="y"))
    assert with_own_names(one_machine) == one_machine


def test_a_head_that_is_not_there_is_named_at_once():
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        require_head(f"127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", "nobody.invalid:6379", "127.0.0.1:99999999"):
        with pytest.raises(NotAvailableError, match=f"can't join the Ray at {address}: .*cluster.address"):
            require_head(address)
