"""Which process runs where: computed before anything starts, and compared with the devices."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError
from trueline.monitoring.findings import Finding
from trueline.runtime.actors import Actor, LocalActor, Object, Placement, RayActor, Target, wait_all
from trueline.runtime.cluster import OBJECT_STORE_BYTES, PASSIVE, QUIET, START_SECONDS, Machine, Node, reserve
from trueline.runtime.host import Location, build

# What makes a process compute the same bits again: fixed paths through MKL and cuBLAS, kernels that add in one order,
# vLLM's tokens independent of their batch, and the order of sets of strings.
REPEATED = {
    "MKL_CBWR": "AUTO",
    "MKL_DYNAMIC": "FALSE",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    "VLLM_BATCH_INVARIANT": "1",
    "PYTHONHASHSEED": "0",
}
STORE_MARGIN = 1.25  # the last samples of a step stay until it is reported, while the next are sampled


@dataclass(frozen=True, slots=True)
class RoleRanks:
    """The ranks of a model other than the policy: on the policy's GPUs, or on GPUs of their own."""

    name: str  # the section of the configuration, then "-" and the model where a section has several
    ranks: int
    shared: bool
    width: int = 1  # ranks of one copy of the model

    @property
    def key(self) -> str:
        return f"{self.name.partition('-')[0]}.ranks"


@dataclass(frozen=True, slots=True)
class Layout:
    policy_ranks: int
    engines: int = 0
    tensor_parallel: int = 1
    colocated: bool = False
    roles: tuple[RoleRanks, ...] = ()
    in_turns: bool = True  # models wait while engines sample, and engines wait while models train
    width: int = 1  # policy ranks of one copy of the model
    store_bytes: int = OBJECT_STORE_BYTES  # of Ray's object store, where the run starts it
    deterministic: bool = False  # another run computes the same bits

    def engine_gpus(self) -> int:
        return self.engines * self.tensor_parallel

    def gpus_needed(self) -> int:
        roles = sum(one.ranks for one in self.roles if not one.shared)
        return self.policy_ranks + roles + (0 if self.colocated else self.engine_gpus())

    def engine_keys(self) -> str:
        return f"rollout.engines={self.engines} x rollout.tensor_parallel={self.tensor_parallel}"


def check_devices(layout: Layout, machine: Machine) -> None:
    """Refuse a layout that needs more devices than there are, with the sum and the remedy."""
    for one in layout.roles if machine.gpus else ():
        if one.shared and one.ranks > layout.policy_ranks:
            raise ConfigError(
                f"{one.key}={one.ranks} share the policy's GPUs: set it to at most "
                f"training.ranks={layout.policy_ranks}, or {one.key.removesuffix('.ranks')}.placement=separate"
            )
    if machine.gpus and layout.colocated and layout.engine_gpus() > layout.policy_ranks:
        raise ConfigError(
            f"{layout.engine_keys()} share the policy's GPUs: make it at most training.ranks={layout.policy_ranks}, "
            "raise that, or set placement=separate"
        )
    if not machine.gpus or layout.gpus_needed() <= machine.gpus:
        place_processes(layout, machine)
        return
    sign = "shared by" if layout.colocated else "+"
    own = "".join(f" + {one.key}={one.ranks}" for one in layout.roles if not one.shared)
    raise ConfigError(
        f"training.ranks={layout.policy_ranks} {sign} {layout.engine_keys()}{own} need {layout.gpus_needed()} GPUs, "
        f"there are {machine.gpus}: lower one of them, or set placement=colocated"
    )


def crowding(layout: Layout, machine: Machine) -> list[Finding]:
    kinds = {f"{one.key}={one.ranks}": one.ranks for one in layout.roles}
    kinds |= {f"training.ranks={layout.policy_ranks}": layout.policy_ranks, layout.engine_keys(): layout.engine_gpus()}
    why = f"they slow each other down: use {machine.cpus} or fewer"
    return [
        Finding("watch", "crowded_cores", f"{keys}: {count} processes on {machine.cpus} CPU cores", why)
        for keys, count in kinds.items()
        if not machine.gpus and not machine.nodes and count > machine.cpus
    ]


def store_bytes(samples: int, machine: Machine) -> int:
    """Return the size of the store that a run starts on its own machine, which may not have as much as it wants."""
    return max(OBJECT_STORE_BYTES, min(int(STORE_MARGIN * samples), machine.store_bytes))


def store_findings(samples: int, started: int, machine: Machine) -> list[Finding]:
    """Find a store that is too small for the samples, of the size that was `started` or of a cluster."""
    there = machine.store_bytes if machine.nodes else started
    if samples <= there:
        return []
    what = f"samples take up to {samples / 2**30:.1f} GiB, Ray's object store has {there / 2**30:.1f} GiB"
    remedy = (
        "start its nodes with ray start --object-store-memory=BYTES" if machine.nodes else "free memory or /dev/shm"
    )
    why = f"Ray writes the rest to disk, which takes time: {remedy}, or lower prompts_per_step"
    return [Finding("watch", "object_store", what, why, "prompts_per_step")]


def process_environment(target: Target[Object], machine: Machine, processes: int = 1, cpus: int = 0) -> dict[str, str]:
    """Return the environment of a process; on CPUs, `processes` that work at once share the cores."""
    threads = {"OMP_NUM_THREADS": str(max((cpus or machine.cpus) // max(processes, 1), 1)), **PASSIVE}
    return QUIET | ({} if machine.gpus else threads) | target.environment(machine.gpus)


@dataclass(frozen=True, slots=True)
class Places:
    """The node of every process, by its index in the machine."""

    policy: list[int]
    engines: list[int]
    roles: dict[str, list[int]]

    def nodes(self) -> list[int]:
        return sorted({*self.policy, *self.engines, *(node for ranks in self.roles.values() for node in ranks)})

    def rollout_workers(self, count: int) -> list[int]:
        """Return nodes of rollout workers: all nodes of the run in turn, that of the policy's rank 0 first."""
        nodes = list(dict.fromkeys([*self.policy[:1], *self.nodes()]))
        return [nodes[number % len(nodes)] for number in range(count)]


def place_processes(layout: Layout, machine: Machine) -> Places:
    """Give every process a node: copies of models and engines stay on one node where they fit."""
    if not machine.nodes:
        roles = {one.name: [0] * one.ranks for one in layout.roles}
        return Places([0] * layout.policy_ranks, [0] * layout.engines, roles)
    nodes = machine.split()
    free = [node.gpus if machine.gpus else node.cpus for node in nodes]
    policy = take_nodes(free, layout.policy_ranks, layout.width, "training.ranks", machine)
    roles = {}
    for one in layout.roles:
        shared = [policy[rank % len(policy)] if policy else 0 for rank in range(one.ranks)]
        roles[one.name] = shared if one.shared else take_nodes(free, one.ranks, one.width, one.key, machine)
    width = layout.tensor_parallel
    if layout.colocated:
        return Places(policy, [shared_node(policy, number, width, nodes) for number in range(layout.engines)], roles)
    engines = []
    for _ in range(layout.engines):
        freest = max(range(len(nodes)), key=lambda at: free[at])
        if free[freest] < width:
            raise no_room(f"rollout.tensor_parallel={width}", width, free, machine, " on one node")
        free[freest] -= width
        engines.append(freest)
    return Places(policy, engines, roles)


def take_nodes(free: list[int], count: int, width: int, key: str, machine: Machine) -> list[int]:
    """Take places for ranks, copy by copy: each on the first node with room for a whole copy, or else anywhere."""
    found: list[int] = []
    while len(found) < count:
        whole = next((at for at, room in enumerate(free) if room >= width), None)
        for _ in range(width):
            at = whole if whole is not None else next((at for at, room in enumerate(free) if room), None)
            if at is None:
                raise no_room(f"{key}={count}", count, free, machine)
            free[at] -= 1
            found.append(at)
    return found


def shared_node(policy: list[int], number: int, width: int, nodes: tuple[Node, ...]) -> int:
    """Return the node of an engine on the policy's GPUs; all of its GPUs must be on one node."""
    found = {policy[rank % len(policy)] for rank in range(number * width, (number + 1) * width)}
    if len(found) > 1:
        there = " and ".join(nodes[at].address for at in sorted(found))
        raise ConfigError(
            f"rollout.tensor_parallel={width}: engine {number} would span {there}, and an engine must be on one node: "
            "lower it, or set placement=separate"
        )
    return found.pop()


def no_room(key: str, count: int, free: list[int], machine: Machine, where: str = "") -> ConfigError:
    sizes = [(node.address, node.gpus if machine.gpus else node.cpus) for node in machine.nodes]
    rooms = zip(sizes, free, strict=True)
    sums = ", ".join(f"{address} has {left} of {size} left" for (address, size), left in rooms)
    kind = "GPUs" if machine.gpus else "CPU slots"
    return ConfigError(f"{key} needs {count} {kind}{where}: {sums}; lower it, or start fewer other processes")


@dataclass(slots=True)
class Processes:
    """Start the processes of a run, and keep the locations of the policy's ranks for those that share their GPUs."""

    machine: Machine
    layout: Layout
    logs: Path
    local: bool
    clients: dict[str, str] = field(default_factory=dict)  # environment of processes that share GPUs by MPS
    locations: list[Location] = field(default_factory=list)
    places: Places = field(init=False)
    group: Any = None  # Ray's placement group of all processes with devices or slots of their own
    bundles: dict[str, int] = field(default_factory=dict)  # index of the first process of each kind

    def __post_init__(self) -> None:
        self.places = place_processes(self.layout, self.machine)
        if self.local or not (self.machine.gpus or self.machine.nodes):
            return
        layout, places = self.layout, self.places
        own = {"policy": (places.policy, 1)}
        own |= {one.name: (places.roles[one.name], 1) for one in layout.roles if not one.shared}
        own |= {} if layout.colocated else {"engine": (places.engines, layout.tensor_parallel)}
        claims: list[dict[str, float]] = []
        for kind, (nodes, width) in own.items():
            self.bundles[kind] = len(claims)
            claim = {"CPU": 1.0, "GPU": float(width)} if self.machine.gpus else {"CPU": float(width)}
            addresses = [self.machine.split()[at].address for at in nodes]
            claims += [claim | ({f"node:{address}": 0.001} if address else {}) for address in addresses]
        self.group = reserve(claims)

    def policy(self, target: Target[Object], specs: list[Any]) -> list[Actor[Object]]:
        actors = self._start("policy", target, specs, self.places.policy, shared=False)
        if self.machine.gpus == 1 and not self.machine.nodes:  # known before the process runs
            self.locations = [Location("", [os.environ.get("CUDA_VISIBLE_DEVICES", "0")], 0)]
        elif self.machine.gpus:
            locations = [actor.location() for actor in actors if isinstance(actor, RayActor)]
            self.locations = wait_all(locations, START_SECONDS)
        return actors

    def role(self, one: RoleRanks, target: Target[Object], specs: list[Any]) -> list[Actor[Object]]:
        return self._start(one.name, target, specs, self.places.roles[one.name], one.shared)

    def engines(self, target: Target[Object], specs: list[Any]) -> list[Actor[Object]]:
        layout = self.layout
        return self._start("engine", target, specs, self.places.engines, layout.colocated, layout.tensor_parallel)

    def rollout_workers(self, target: Target[Object], specs: list[Any]) -> list[Actor[Object]]:
        """Start rollout workers, which claim no devices."""
        hidden = process_environment(target, self.machine, self.machine.cpus) | {"CUDA_VISIBLE_DEVICES": ""}
        actors: list[Actor[Object]] = []
        for number, (spec, at) in enumerate(zip(specs, self.places.rollout_workers(len(specs)), strict=True)):
            there = self.machine.split()[at]
            spot = Placement(node=there.id or None, environment=hidden, address=there.address)
            actors.append(RayActor(f"rollouts-{number}", target, [spec], spot, self.logs / f"rollouts-{number}.log"))
        return actors

    def _start(
        self, kind: str, target: Target[Object], specs: list[Any], nodes: list[int], shared: bool, width: int = 1
    ) -> list[Actor[Object]]:
        if self.local:
            return [LocalActor(kind, build(target.path, [spec])) for spec in specs]
        actors: list[Actor[Object]] = []
        for number, (spec, at) in enumerate(zip(specs, nodes, strict=True)):
            where, name = (number, at, width), f"{kind}-{number}"
            spot = self._shared_placement(*where) if shared else self._own_placement(kind, *where)
            spot = replace(spot, environment=self._environment(target, nodes, at, width) | spot.environment)
            actors.append(RayActor(name, target, [spec], spot, self.logs / f"{name}.log"))
        return actors

    def _environment(self, target: Target[Object], nodes: list[int], at: int, width: int) -> dict[str, str]:
        """Return the environment of a process; on CPUs, processes of its kind on its node share the cores."""
        working = nodes.count(at) * width
        if not self.layout.in_turns:
            working = self.places.policy.count(at) + self.places.engines.count(at) * self.layout.tensor_parallel
        own = process_environment(target, self.machine, working, self.machine.split()[at].cpus) | self.clients
        return own | (REPEATED if self.layout.deterministic else {})

    def _own_placement(self, kind: str, number: int, node: int, width: int) -> Placement:
        """Return a placement with devices or slots of its own; on this machine's CPUs processes claim none."""
        if self.group is None:
            return Placement()
        cpus, gpus = (1, width) if self.machine.gpus else (width, 0)
        address = self.machine.split()[node].address
        return Placement(self.group, self.bundles[kind] + number, cpus=cpus, gpus=gpus, address=address)

    def _shared_placement(self, number: int, node: int, width: int) -> Placement:
        """Return a placement on the devices of policy ranks."""
        there, ranks = self.machine.split()[node], range(number * width, (number + 1) * width)
        if not self.locations:
            return Placement(node=there.id or None, address=there.address)
        locations = [self.locations[rank % len(self.locations)] for rank in ranks]
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpu for location in locations for gpu in location.gpus)}
        return Placement(node=locations[0].node or None, environment=devices, address=there.address)
