"""The machine that a run is placed on, as a value: described by a test or a config, or found."""

import os
import socket
import struct
import sys
from dataclasses import dataclass, replace

from turnwise.errors import ConfigError
from turnwise.runtime.rank import launched, launched_nodes

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""One of these exists if Linux has a driver for accelerators."""

_SIOCGIFADDR = 0x8915
"""Linux's request for the address of an interface (`netdevice(7)`)."""


@dataclass(frozen=True, slots=True)
class Node:
    """One computer. Where it has no accelerators, a device is a slot of its CPU."""

    num_devices: int = 1
    """Number of its accelerators; without any, the number of its cores."""
    accelerator: str = ""
    """Torch's name for the kind of its accelerators, `cuda`; empty where a device is a slot of the CPU."""
    name: str = ""
    address: str = ""
    """The address by which other nodes reach it; empty for this machine alone."""
    key: str = ""
    """Ray's id of the node."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The nodes of a run, whose devices are numbered through, and the processes that a launcher has started
    on them.

    >>> machine = Machine((Node(4, "cuda"), Node(4, "cuda")))
    >>> machine.num_devices, machine.locate(5), machine.device_name(5)
    (8, (1, 1), 'cuda:1')
    """

    nodes: tuple[Node, ...] = (Node(),)
    num_launched: int = 1
    """Number of the launcher's processes; 1 without a launcher."""
    ray_sign: str = ""
    """What in this process's environment says that it belongs to a Ray; empty if nothing does."""
    num_per_node: int | None = None
    """With it, device d is device `d % num_per_node` of the node `d // num_per_node`, of those with devices.
    Without it devices are numbered through the nodes."""

    @property
    def num_devices(self) -> int:
        return sum(node.num_devices for node in self.nodes)

    @property
    def accelerator(self) -> str:
        return next((node.accelerator for node in self.nodes if node.accelerator), "")

    @property
    def is_of_ray(self) -> bool:
        """Whether Ray knows its nodes."""
        return any(node.key for node in self.nodes)

    def with_slots(self, num_per_node: int | None) -> "Machine":
        """The machine, with that many slots on each node if it has no accelerators; None leaves one slot for
        each core."""
        if num_per_node is None or self.accelerator:
            return self
        nodes = (replace(node, num_devices=num_per_node) for node in self.nodes)
        return replace(self, nodes=tuple(nodes))

    def numbered_by_node(self, num_per_node: int | None) -> "Machine":
        """The machine with that `num_per_node`."""
        return replace(self, num_per_node=num_per_node)

    def has(self, device: int) -> bool:
        """Whether there is such a device."""
        try:
            self.locate(device)
        except IndexError:
            return False
        return True

    def locate(self, device: int) -> tuple[int, int]:
        """`(node, number on that node)` of a device. Raises IndexError if there is no such device."""
        if self.num_per_node is not None:
            return self._locate_by_node(device, self.num_per_node)
        number = device
        for index, node in enumerate(self.nodes):
            if number < node.num_devices:
                return index, number
            number -= node.num_devices
        raise IndexError(f"device {device} of {self.num_devices}")

    def _locate_by_node(self, device: int, num_per_node: int) -> tuple[int, int]:
        hosts = [index for index, node in enumerate(self.nodes) if node.num_devices]
        position, number = divmod(device, num_per_node)
        if position >= len(hosts) or number >= self.nodes[hosts[position]].num_devices:
            raise IndexError(f"device {number} of node {position}")
        return hosts[position], number

    def node_of(self, device: int) -> Node:
        """The node of a device. Raises IndexError if there is no such device."""
        index, _ = self.locate(device)
        return self.nodes[index]

    def device_name(self, device: int) -> str:
        """Torch's name for a device, in the processes of its node."""
        index, number = self.locate(device)
        accelerator = self.nodes[index].accelerator
        if not accelerator:
            return "cpu"
        return f"{accelerator}:{number}"


def interface_of(address: str) -> str:
    """The name of this machine's network interface that has an IPv4 address; empty if none has, or if the
    system doesn't tell."""
    return next((name for name, own in _addresses().items() if own == address), "")


def address_of(interface: str, setting: str) -> str:
    """The IPv4 address of this machine's network interface of a name, which `setting` gives. Raises
    ConfigError if it has none, there is no such interface, or the system doesn't tell."""
    addresses = _addresses()
    if interface in addresses:
        return addresses[interface]
    own = ", ".join(f"{name} ({address})" for name, address in addresses.items())
    raise ConfigError(
        f"{setting}: {interface}: {socket.gethostname()} isn't known to have a network interface of this "
        f"name with an IPv4 address; it has {own or 'none'}: name one that all nodes have"
    )


def _addresses() -> dict[str, str]:
    """Name of each of this machine's network interfaces → its IPv4 address; empty if the system doesn't
    tell."""
    if sys.platform != "linux":
        return {}
    import fcntl

    addresses: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # the interface has no such address
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def gloo_interface(address: str, setting: str) -> str:
    """The interface over which the processes of several machines reach this one at an IPv4 address; empty if
    GLOO_SOCKET_IFNAME names one that isn't known to have it. Raises ConfigError if none has the address,
    since gloo would connect nobody; `setting` says how to name one."""
    interface = interface_of(address)
    if interface or os.environ.get("GLOO_SOCKET_IFNAME"):
        return interface
    raise ConfigError(
        f"no network interface of {socket.gethostname()} is known to have its address {address}; name the "
        f"one by which the other machines reach it ({setting})"
    )


def find_machine() -> Machine:
    """This machine, with the launcher that started this process, and the launcher's other machines, which are
    taken to be like this one. Imports torch only if there may be accelerators."""
    _, num_launched = launched()
    num_accelerators = _num_accelerators()
    node = Node(num_accelerators, "cuda") if num_accelerators else Node(num_cores())
    num_nodes = launched_nodes()
    if num_nodes == 1:
        return Machine((node,), num_launched, ray_sign())
    own_address(os.environ["MASTER_ADDR"])
    # A launcher gives device k of a machine to the process with LOCAL_RANK k.
    num_each = num_launched // num_nodes
    if node.accelerator and num_each > node.num_devices:
        raise ConfigError(
            f"a launcher started {num_each} processes on each machine, and this one has {node.num_devices} "
            "accelerators; start one process for each (--nproc_per_node of torchrun)"
        )
    nodes = (replace(node, num_devices=num_each, name=f"machine {index}") for index in range(num_nodes))
    return Machine(tuple(nodes), num_launched, ray_sign())


def own_address(peer: str) -> str:
    """The IPv4 address by which this machine reaches the host `peer`. Raises ConfigError if it reaches no
    such host, or only itself."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # sends nothing: it only chooses a route
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR={peer}: this machine has no way to it ({error}); name the first machine by an "
            "address that all others reach (--master_addr of torchrun, --main_process_ip of accelerate)"
        ) from error
    if address.startswith("127."):
        raise ConfigError(
            f"MASTER_ADDR={peer} is {address} here, which no other machine reaches; name the first machine "
            "by an address that all others reach (--master_addr of torchrun, --main_process_ip of accelerate)"
        )
    return address


def ray_sign() -> str:
    """What in this process's environment says that it belongs to a Ray; empty if nothing does."""
    if os.environ.get("RAY_ADDRESS"):
        return "RAY_ADDRESS is set"
    return "a job of Ray started this run" if os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") else ""


def num_cores() -> int:
    """The number of cores that this process may use."""
    if "sched_getaffinity" in dir(os):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _num_accelerators() -> int:
    if "torch" not in sys.modules and sys.platform == "linux":
        if not any(map(os.path.exists, _DRIVERS)):
            return 0
    import torch

    if not torch.cuda.is_available():
        return 0
    return torch.cuda.device_count()
