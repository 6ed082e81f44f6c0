"""Devices on paper: what their makers promise, and how much of it a run gets."""

import re
from dataclasses import dataclass

from trueline.config.base import ConfigError
from trueline.monitoring.speed import PEAK_TFLOPS
from trueline.runtime.cluster import Machine, Node

GIB = 2**30
HOST_GIB, HOST_CORES = 256, 14  # for each GPU, as in the makers' machines of eight

# Shares of these promises that a run gets. On one H200 a step of a 1.5 B shape (docs/benchmarks.md) gives those that
# say so; nothing has been measured yet between GPUs.
COMPUTE = 0.34  # of the peak, in forward and backward passes: measured, training 2.2 s
READING = 0.7  # of the memory's bandwidth, while tokens are sampled: assumed
TOKEN_SECONDS = 0.003  # of an engine for each token, whatever the model: what is left of a measured rollout of 2.3 s
LINKS = 0.7  # of what connects GPUs: assumed
HOST_RATE = 50e9  # bytes a second between a GPU and its host: assumed, of 64e9
# Of a sync with its proof, whatever its bytes; with the next, from 3.1 GB in 0.28 s and 13.5 GB in 0.8 s.
SYNC_SECONDS = 0.125
IPC_RATE = 20e9  # bytes a second into an engine on the same GPU: measured
GLOO_RATE = 2e9  # through the memories of hosts: assumed


@dataclass(frozen=True, slots=True)
class Device:
    """What a data sheet says of a GPU in a machine of eight."""

    gib: float  # as CUDA reports it
    memory_rate: float  # bytes a second
    link_rate: float  # to the other GPUs of its node, in one direction
    network_rate: float  # to other nodes


DEVICES = {
    "A100": Device(79.1, 2.04e12, 300e9, 25e9),  # 80 GB SXM
    "H100": Device(79.1, 3.35e12, 450e9, 50e9),  # SXM
    "H200": Device(139.8, 4.8e12, 450e9, 50e9),
    "B200": Device(178.3, 8.0e12, 900e9, 50e9),
}


@dataclass(frozen=True, slots=True)
class Devices:
    nodes: int
    gpus_of_node: int
    name: str

    @property
    def device(self) -> Device:
        return DEVICES[self.name]

    def machine(self) -> Machine:
        """Return these devices as a planner sees a machine."""
        one, gpus = self.gpus_of_node, self.nodes * self.gpus_of_node
        nodes = tuple(Node(str(at), "", one * HOST_CORES, one * HOST_GIB * GIB, one) for at in range(self.nodes))
        return Machine(gpus * HOST_CORES, gpus * HOST_GIB * GIB, gpus, int(self.device.gib * GIB), self.name, nodes)

    def flops(self) -> float:
        """Return what one GPU computes in a second."""
        return COMPUTE * PEAK_TFLOPS[self.name] * 1e12

    def exchange_rate(self, gpus: int) -> float:
        """Return the bytes a second at which each of so many GPUs gets what all hold, a node once by all its ways."""
        across = self.device.network_rate * self.gpus_of_node
        return LINKS * (self.device.link_rate if gpus <= self.gpus_of_node else min(self.device.link_rate, across))

    def send_rate(self) -> float:
        """Return the bytes a second from one GPU to others."""
        return LINKS * (self.device.network_rate if self.nodes > 1 else self.device.link_rate)


def read_devices(text: str) -> Devices:
    """Read `8x8xH100`, eight nodes of eight GPUs, or `8xH100`, one node."""
    found = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)x([A-Za-z]\w*)", text)
    if found is None:
        raise ConfigError(f"--devices {text}: write NODESxGPUSxNAME, e.g. 8x8xH100, or GPUSxNAME for one node")
    if found[3].upper() not in DEVICES:
        raise ConfigError(f"--devices {text}: {found[3]} is not known; choose from {', '.join(DEVICES)}")
    return Devices(int(found[1] or 1), int(found[2]), found[3].upper())
