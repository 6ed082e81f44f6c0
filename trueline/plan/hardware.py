"""Devices on paper: their data sheets, and the share of these figures that a run gets."""

import difflib
import re
from dataclasses import dataclass

from trueline.config.base import ConfigError
from trueline.monitoring.timing import PEAK_TFLOPS, peak_tflops
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
CORE_FLOPS, CPU_RATE = 2e10, 2e10  # of a CPU core in float32, and bytes a second of all memory: assumed


@dataclass(frozen=True, slots=True)
class Device:
    """What a data sheet says of a GPU in a machine of eight."""

    gib: float  # as a driver reports it, a little less than the data sheet's
    memory_rate: float  # bytes a second
    link_rate: float  # to the other GPUs of its node, in one direction
    network_rate: float = 25e9  # to other nodes
    aliases: tuple[str, ...] = ()  # other names in use


PCIE3, PCIE4, PCIE5 = 16e9, 32e9, 64e9  # bytes a second, where no other link joins more than two GPUs
DEVICES = {
    "A100": Device(79.1, 2.04e12, 300e9, aliases=("A100-80GB", "A100 SXM", "A100 SXM4 80GB")),
    "A100-40GB": Device(39.3, 1.555e12, 300e9, aliases=("A100 SXM4 40GB",)),
    "A800": Device(79.1, 2.04e12, 200e9),
    "H100": Device(79.1, 3.35e12, 450e9, 50e9, ("H100 SXM", "H100 SXM5", "H100-80GB")),
    "H100 PCIe": Device(79.1, 2.0e12, PCIE5, 50e9),
    "H100 NVL": Device(93.0, 3.9e12, PCIE5, 50e9, ("H100-94GB",)),
    "H800": Device(79.1, 3.35e12, 200e9, 50e9),
    "H20": Device(95.0, 4.0e12, 450e9, 50e9),
    "H200": Device(139.8, 4.8e12, 450e9, 50e9, ("H200 SXM", "H200-141GB")),
    "GH200": Device(94.5, 4.0e12, 450e9, 50e9, ("GH200-96GB", "GH200-480GB")),
    "B200": Device(178.3, 8.0e12, 900e9, 50e9, ("B200 SXM", "B200-180GB")),
    "L4": Device(22.0, 300e9, PCIE4),
    "L40": Device(44.4, 864e9, PCIE4),
    "L40S": Device(44.4, 864e9, PCIE4),
    "A10": Device(22.0, 600e9, PCIE4),
    "A10G": Device(22.0, 600e9, PCIE4),
    "A30": Device(23.5, 933e9, PCIE4),
    "A40": Device(44.4, 696e9, PCIE4),
    "V100": Device(31.7, 900e9, 150e9, aliases=("V100-32GB", "V100 SXM2", "V100 SXM2 32GB")),
    "V100-16GB": Device(15.7, 900e9, 150e9, aliases=("V100 SXM2 16GB",)),
    "T4": Device(14.5, 320e9, PCIE3),
    "RTX 3090": Device(23.5, 936e9, PCIE4, aliases=("3090",)),
    "RTX 4090": Device(23.5, 1008e9, PCIE4, aliases=("4090",)),
    "RTX 5090": Device(31.3, 1792e9, PCIE5, aliases=("5090",)),
    "RTX A6000": Device(47.4, 768e9, PCIE4, aliases=("A6000",)),
    "RTX 6000 Ada": Device(47.4, 960e9, PCIE4, aliases=("6000 Ada", "RTX 6000 Ada Generation")),
    "MI210": Device(63.9, 1.6e12, PCIE4),
    "MI250X": Device(63.9, 1.6e12, 200e9, aliases=("MI250X GCD",)),  # one of its two dies, each of which is a device
    "MI300X": Device(191.9, 5.3e12, 448e9, 50e9),
    "MI325X": Device(255.9, 6.0e12, 448e9, 50e9),
    "MI355X": Device(287.9, 8.0e12, 537e9, 50e9),
}
UNKNOWN_TFLOPS = 300  # of a GPU that has no name here
FORM = "write NODESxGPUSxNAME, e.g. 8x8xH100, or GPUSxNAME for one node"
SIZED = "a GPU that has no name here is written with its memory and bfloat16 speed, e.g. 2x8x80GiB@990TFLOPs or 1x80GiB"
ABOVE_0 = r"0*[1-9]\d*(?:\.\d+)?"
MAKERS = re.compile(r"nvidia|amd|geforce|tesla|instinct|[\s_-]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Devices:
    nodes: int
    gpus_of_node: int
    name: str
    device: Device
    tflops: float | None  # of dense bfloat16 matrices; without them a plan has no seconds
    cores: int = 0  # of a CPU, which all processes share

    def machine(self) -> Machine:
        """Return these devices as a planner sees a machine."""
        one, gpus = self.gpus_of_node, self.nodes * self.gpus_of_node
        nodes = tuple(Node(str(at), "", one * HOST_CORES, one * HOST_GIB * GIB, one) for at in range(self.nodes))
        return Machine(gpus * HOST_CORES, gpus * HOST_GIB * GIB, gpus, int(self.device.gib * GIB), self.name, nodes)

    def flops(self) -> float:
        """Return what one GPU computes in a second."""
        return COMPUTE * (self.tflops or 0.0) * 1e12

    def speed(self, processes: int) -> float:
        """Return what so many processes compute in a second, each on a GPU, or all on the cores."""
        return self.cores * CORE_FLOPS if self.cores else processes * self.flops()

    def memory_rate(self, engines: int) -> float:
        """Return the bytes a second that one of so many engines reads."""
        return self.device.memory_rate / (engines if self.cores else 1)

    def exchange_rate(self, gpus: int) -> float:
        """Return the bytes a second at which each of so many GPUs gets what all hold, a node once by all its ways."""
        across = self.device.network_rate * self.gpus_of_node
        return LINKS * (self.device.link_rate if gpus <= self.gpus_of_node else min(self.device.link_rate, across))

    def send_rate(self) -> float:
        """Return the bytes a second from one GPU to others."""
        return LINKS * (self.device.network_rate if self.nodes > 1 else self.device.link_rate)


def devices_of(machine: Machine) -> Devices:
    """Return a machine's devices by the name of its GPUs; one that has none here counts as slow as it may be."""
    if not machine.gpus:
        return Devices(1, 1, "CPU", Device(machine.memory_bytes / GIB, CPU_RATE, CPU_RATE), None, machine.cpus)
    nodes, named = len(machine.nodes) or 1, [one for one in DEVICES if re.search(rf"\b{one}\b", machine.gpu_name)]
    name = NAMES.get(plain(machine.gpu_name)) or max(named, key=len, default="")
    gpus, tflops = max(machine.gpus // nodes, 1), peak_tflops(name)
    if tflops is None:
        return sized_devices(nodes, gpus, machine.gpu_bytes, str(UNKNOWN_TFLOPS))
    return Devices(nodes, gpus, name, DEVICES[name], tflops)


def read_devices(text: str) -> Devices:
    """Read `8x8xH100`, eight nodes of eight GPUs, `8xH100`, one node, or `8x80GiB@990TFLOPs`, a GPU by its figures."""
    found = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)x(\w.*)", text)
    if found is None or re.match(r"\d+x|\d$|0", found[3]):
        raise ConfigError(f"--devices {text}: {FORM}; {SIZED}")
    nodes, gpus, word = int(found[1] or 1), int(found[2]), found[3]
    if sized := re.fullmatch(rf"({ABOVE_0})(GiB|GB)(?:@({ABOVE_0})TFLOPs)?", word, re.IGNORECASE):
        return sized_devices(nodes, gpus, float(sized[1]) * (GIB if sized[2].lower() == "gib" else 1e9), sized[3])
    if plain(word) not in NAMES:
        near = dict.fromkeys(NAMES[one] for one in difflib.get_close_matches(plain(word), NAMES, n=4, cutoff=0.5))
        known = f"near are {', '.join(near)}" if near else f"known are {', '.join(DEVICES)}"
        raise ConfigError(f"--devices {text}: {word} is not known ({known}); {SIZED}")
    name = NAMES[plain(word)]
    return Devices(nodes, gpus, name, DEVICES[name], peak_tflops(name))


def plain(name: str) -> str:
    """Return a GPU's name without its maker, spaces and dashes."""
    return MAKERS.sub("", name).lower()


def sized_devices(nodes: int, gpus: int, memory: float, speed: str | None) -> Devices:
    """Return devices by their figures, with bandwidths that are to their speed as those of an H100 to its own."""
    like, tflops = DEVICES["H100"], float(speed) if speed else None
    share = (tflops or 0.0) / PEAK_TFLOPS["H100"]
    device = Device(memory / GIB, share * like.memory_rate, share * like.link_rate, like.network_rate)
    return Devices(nodes, gpus, f"{memory / GIB:.1f} GiB GPU", device, tflops)


NAMES = {plain(one): name for name, device in DEVICES.items() for one in (name, *device.aliases)}
