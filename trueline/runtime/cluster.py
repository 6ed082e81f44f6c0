"""The machines a run has: what is there, and Ray on top of it."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray.exceptions import GetTimeoutError

from trueline.config.base import ConfigError
from trueline.monitoring.beats import WORK
from trueline.runtime import LOOPBACK

START_SECONDS = 120
PROCESS_GROUPS, CONTROLLERS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
OBJECT_STORE_BYTES = 512 * 2**20
PROCESS_BYTES = 512 * 2**20  # of a process that has imported its libraries

# What every process of a run starts with. Ray must leave device variables alone: processes that share a
# GPU are given none by Ray and see it through CUDA_VISIBLE_DEVICES.
QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_worker_niceness": "0",  # Ray's own 15 leaves a rank 3 % of a core that another program keeps busy
    "DO_NOT_TRACK": "1",
    **LOOPBACK,
}

# Threads that wait for each other sleep: were they to spin, those of a process that waits would take the cores from the
# one at work, and any other program would stall them all.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


@dataclass(frozen=True, slots=True)
class Machine:
    """What one run may use of the machine it is started on."""

    cpus: int
    memory_bytes: int
    gpus: int
    gpu_bytes: int
    gpu_name: str = ""


def this_machine() -> Machine:
    gpus = torch.cuda.device_count()
    return Machine(
        cpus=psutil.cpu_count() or 1,
        memory_bytes=free_memory(),
        gpus=gpus,
        gpu_bytes=torch.cuda.get_device_properties(0).total_memory if gpus else 0,
        gpu_name=torch.cuda.get_device_name(0) if gpus else "",
    )


def free_memory() -> int:
    """Return the bytes that processes here may still take: of the machine, or of their control group (1 or 2)."""
    rooms = [psutil.virtual_memory().available]
    for line in PROCESS_GROUPS.read_text().splitlines() if PROCESS_GROUPS.exists() else ():
        _, controller, name = line.split(":", 2)
        folder = CONTROLLERS / controller / name.lstrip("/")
        with suppress(OSError, ValueError, KeyError):  # no such group is seen from here, or it has no limit
            known = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
            limit = known.get("hierarchical_memory_limit") or (folder / "memory.max").read_text()
            rooms.append(int(limit) - int(known.get("total_rss") or known["anon"]))  # cached files make room
    return max(min(rooms), 0)


@contextmanager
def ray_cluster(machine: Machine) -> Iterator[None]:
    """Start Ray here, or join the cluster that RAY_ADDRESS names; afterwards end it, with all its processes."""
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    address = os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {} if address else {"object_store_memory": OBJECT_STORE_BYTES, "num_gpus": machine.gpus}
    ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **local)
    try:
        yield
    finally:
        with WORK.doing("phase", "end"):
            ray.shutdown()


def reserve(bundles: list[dict[str, float]]) -> object:
    """Return a placement group for these bundles, or say in an error what is missing, but never wait endlessly."""
    group = ray.util.placement_group(bundles, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=START_SECONDS)
    except GetTimeoutError:
        wanted = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in ("CPU", "GPU")}
        free = {name: ray.available_resources().get(name, 0) for name in wanted}
        raise ConfigError(
            f"the cluster has no room: {wanted} wanted, {free} free; use fewer ranks or engines"
        ) from None
    return group
