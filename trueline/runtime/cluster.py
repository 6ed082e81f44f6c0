"""The machines of a run: their free devices and memory, and Ray on top of them."""

import logging
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray._private import state as cluster_state
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trueline.config.base import ConfigError
from trueline.monitoring.heartbeat import WORK
from trueline.runtime import REACH, mps

START_SECONDS = 120
PROCESS_GROUPS, CONTROLLERS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
OBJECT_STORE_BYTES = 512 * 2**20  # at least
STORE_SHARE, SHARED_MEMORY = 0.3, Path("/dev/shm")  # the largest share of free memory for the store, and where it lies
PROCESS_BYTES = 512 * 2**20  # of a process with its libraries imported
VERSIONS = f"Python {platform.python_version()}, Ray {ray.__version__}"

# The environment of every process. Ray must leave device variables alone: processes that share a GPU get none from Ray
# and see it through CUDA_VISIBLE_DEVICES.
QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_worker_niceness": "0",  # with Ray's 15, a rank gets 3 % of a busy core
    "RAY_prestart_worker_first_driver": "0",  # idle processes, one per core; each of ours has an environment of its own
    "DO_NOT_TRACK": "1",
    **REACH,
}

# Waiting threads sleep: spinning ones would take the cores from the process that works.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


@dataclass(frozen=True, slots=True)
class Node:
    address: str
    id: str  # Ray's
    cpus: int  # free slots of Ray
    memory_bytes: int
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    cpus: int
    memory_bytes: int
    gpus: int
    gpu_bytes: int  # of each; the smallest
    gpu_name: str = ""
    nodes: tuple[Node, ...] = ()  # of a cluster
    store_bytes: int = OBJECT_STORE_BYTES  # Ray's object store: of a cluster, or the largest that can be started here
    mps: bool = False  # processes that share a GPU can compute on it at the same time; only where there is no cluster

    def split(self) -> tuple[Node, ...]:
        """Return the nodes; without a cluster, this machine is the only one."""
        return self.nodes or (Node("", "", self.cpus, self.memory_bytes, self.gpus),)


def machine_at_hand() -> Machine:
    """Return the resources of the cluster at RAY_ADDRESS, or of this machine."""
    if "RAY_ADDRESS" not in os.environ:
        return own_devices()
    connect(0)
    living = [node for node in ray.nodes() if node["Alive"]]
    living.sort(key=lambda node: ip_address(node["NodeManagerAddress"]))
    seen = [(node, run_on_node(node["NodeID"], own_devices)) for node in living]
    free = cluster_state.available_resources_per_node()
    nodes, kinds = [], []
    for node, pending in seen:
        there = wait_for_node(pending, node["NodeManagerAddress"])
        left = free.get(node["NodeID"], {})
        cpus, gpus = int(left.get("CPU", 0)), int(left.get("GPU", 0))
        nodes.append(Node(node["NodeManagerAddress"], node["NodeID"], cpus, there.memory_bytes, gpus))
        kinds += [there] * (gpus > 0)
    return Machine(
        sum(node.cpus for node in nodes),
        sum(node.memory_bytes for node in nodes),
        sum(node.gpus for node in nodes),
        min((kind.gpu_bytes for kind in kinds), default=0),
        kinds[0].gpu_name if kinds else "",
        tuple(nodes),
        sum(int(node["Resources"].get("object_store_memory", 0)) for node in living),
    )


def own_devices() -> Machine:
    gpus = torch.cuda.device_count()
    return Machine(
        cpus=psutil.cpu_count() or 1,
        memory_bytes=free_memory(),
        gpus=gpus,
        gpu_bytes=torch.cuda.get_device_properties(0).total_memory if gpus else 0,
        gpu_name=torch.cuda.get_device_name(0) if gpus else "",
        store_bytes=largest_store(),
        mps=gpus > 0 and mps.is_installed(),
    )


def largest_store() -> int:
    room = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return max(OBJECT_STORE_BYTES, min(int(STORE_SHARE * free_memory()), room))


def free_memory() -> int:
    """Return the free bytes of this machine, or of the control group (v1 or v2) if that is less."""
    rooms = [psutil.virtual_memory().available]
    for line in PROCESS_GROUPS.read_text().splitlines() if PROCESS_GROUPS.exists() else ():
        _, controller, name = line.split(":", 2)
        folder = CONTROLLERS / controller / name.lstrip("/")
        with suppress(OSError, ValueError, KeyError):  # the group is not visible here, or has no limit
            known = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
            limit = known.get("hierarchical_memory_limit") or (folder / "memory.max").read_text()
            rooms.append(int(limit) - int(known.get("total_rss") or known["anon"]))  # cached files can be evicted
    return max(min(rooms), 0)


def run_on_node(node: str, work: Any, *args: Any) -> Any:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"scheduling_strategy": there, "num_cpus": 0, "max_retries": 0, "runtime_env": {"env_vars": QUIET}}
    return ray.remote(work).options(**options).remote(*args)


def wait_for_node(pending: Any, address: str) -> Any:
    try:
        return ray.get(pending, timeout=START_SECONDS)
    except (RayError, GetTimeoutError) as error:
        reason = str(error).strip().split("\n")[-1]
        raise ConfigError(
            f"node {address} cannot run tasks of this run ({reason}): install the same {VERSIONS} and this package "
            "there, or send the package as Ray's working directory"
        ) from error


def connect(gpus: int, store_bytes: int = OBJECT_STORE_BYTES) -> None:
    """Join the cluster at RAY_ADDRESS, or start Ray here; do nothing if Ray is running."""
    if ray.is_initialized():
        return
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    address = os.environ.get("RAY_ADDRESS")
    if address and address.startswith("ray://"):
        raise ConfigError(f"RAY_ADDRESS={address}: start the run on a node of the cluster, and set HOST:PORT or auto")
    local: dict[str, Any] = {} if address else {"object_store_memory": store_bytes, "num_gpus": gpus}
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ConnectionError, RuntimeError) as error:
        if not address:
            raise
        raise ConfigError(f"cannot join the Ray cluster at {address} with {VERSIONS}: {error}") from error


@contextmanager
def ray_cluster(machine: Machine, store_bytes: int = OBJECT_STORE_BYTES) -> Iterator[None]:
    """Join the cluster or start Ray here; at the end, stop all processes of the run."""
    connect(machine.gpus, store_bytes)
    try:
        yield
    finally:
        with WORK.doing("phase", "end"):
            ray.shutdown()


def reserve(bundles: Sequence[dict[str, float]]) -> object:
    """Return a placement group for these bundles, or raise an error that names the missing resources."""
    group = ray.util.placement_group(list(bundles), strategy="PACK")
    if not group.wait(START_SECONDS):  # without a process, which `ready` would start
        wanted = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in ("CPU", "GPU")}
        free = {name: ray.available_resources().get(name, 0) for name in wanted}
        ray.util.remove_placement_group(group)
        message = f"the cluster has no room: {wanted} wanted, {free} free; use fewer ranks or engines"
        raise ConfigError(message)
    return group


def check_folders(nodes: Sequence[Node], run: Path, models: Sequence[str], saves: bool) -> None:
    """Check that every node can read the models, and that files it writes into the run's folder arrive here."""
    pendings = [(node, run_on_node(node.id, try_folders, str(run), models)) for node in nodes]
    for node, pending in pendings:
        unread, written = wait_for_node(pending, node.address)
        if unread:
            raise ConfigError(f"node {node.address} cannot read {unread}: put it on a shared disk")
        mark = run / written if written else None
        if mark is not None and mark.is_file():
            mark.unlink()
        elif saves:
            raise ConfigError(
                f"node {node.address} does not write into {run}, the folder of checkpoints and logs: set folder= to "
                "one on a shared disk, or checkpoint.save=false, which leaves logs on their nodes"
            )


def try_folders(run: str, models: Sequence[str]) -> tuple[str, str]:
    """Return the first model that cannot be read here, and the name of a file written into the run's folder."""
    unread = next((path for path in models if Path(path).is_absolute() and not Path(path, "config.json").is_file()), "")
    mark = Path(run, f"node-{ray.get_runtime_context().get_node_id()}")
    try:
        mark.write_text("")
    except OSError:
        return unread, ""
    return unread, mark.name
