"""Places the roles of a config on this machine's devices. `turnwise config` uses this module, so torch is
imported only where it is needed."""

from dataclasses import replace

from turnwise.assemble.ray import placed_on_nodes
from turnwise.cluster.fork_server import prepare_processes
from turnwise.config import AgenticConfig, SFTConfig
from turnwise.config.demand import ray_reason
from turnwise.config.place import place
from turnwise.runtime.machine import find_machine
from turnwise.runtime.placement import CpuThreads, Placement


def place_here(config: AgenticConfig | SFTConfig, plays: bool = True) -> Placement:
    """The placement of a config on this machine, or on the nodes of the Ray that it uses, which is joined.
    Raises as `place` and `placed_on_nodes`."""
    machine = find_machine()
    if not ray_reason(config, machine):
        return place(config, machine, plays)
    return placed_on_nodes(config, lambda nodes: place(config, replace(machine, nodes=nodes), plays))


def placed_rewards(config: AgenticConfig) -> Placement:
    """The placement of the reward role's model where nothing is trained or served: always in this process. A
    config without such a model may name devices that this machine lacks."""
    if not config.needs_reward_role:
        return Placement("local")
    machine = find_machine()
    if ray_reason(config, machine):
        return Placement("local", machine)
    return place(config, machine)


def prepare_run(placement: Placement) -> None:
    """Starts the fork server now if training or servers will fork. It then imports libraries while this
    process does."""
    modules: list[str] = []
    if placement.cluster == "ray":
        return
    if placement.cluster == "process" or placement.num_servers > 1:
        modules.append("turnwise.assemble.strategies")
    if placement.num_servers > 1:
        modules.append("turnwise.assemble.servers")
    if modules:
        prepare_processes(modules)


def cpu_threads(config: AgenticConfig | SFTConfig, num_threads: int) -> CpuThreads:
    """Numbers of threads for training and for rollouts. If `cpu_split` sets only one number, the other is the
    rest, at least 1; if it sets neither, each is half of `num_threads`. Synchronous runs don't divide them:
    each is `num_threads`."""
    if isinstance(config, SFTConfig) or not config.plays_ahead:
        return CpuThreads(num_threads, num_threads, num_threads)
    rollout = config.cpu_split.rollout
    num_train = config.cpu_split.train or max(1, num_threads - (rollout or num_threads // 2))
    num_rollout = rollout or max(1, num_threads - num_train)
    return CpuThreads(num_train, num_rollout, num_threads)


def set_torch_threads(num_threads: int) -> None:
    """Sets how many threads torch's operators use when the current thread calls them."""
    import torch

    # At its first use of torch, a thread adopts the number that any thread has set last. So torch is used
    # before it is set.
    torch.get_num_threads()
    torch.set_num_threads(num_threads)
