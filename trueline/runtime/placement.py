"""Who runs where: computed before anything starts, compared with what there is, and said."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError
from trueline.runtime.actors import Actor, LocalActor, Object, RayActor, Spot, Target, wait_all
from trueline.runtime.cluster import PASSIVE, QUIET, START_SECONDS, Machine, Node, reserve
from trueline.runtime.host import Home, build


@dataclass(frozen=True, slots=True)
class RoleRanks:
    """The ranks of a model beside the policy: on the policy's GPUs, or on GPUs of their own."""

    name: str
    ranks: int
    shared: bool
    width: int = 1  # ranks of one copy of the model


@dataclass(frozen=True, slots=True)
class Layout:
    """How many processes of each kind, and whether engines share the trainer's GPUs."""

    policy_ranks: int
    engines: int = 0
    tensor_parallel: int = 1
    colocated: bool = False
    roles: tuple[RoleRanks, ...] = ()
    in_turns: bool = True  # models wait while engines sample, and engines while models train
    width: int = 1  # policy ranks of one copy of the model

    def engine_gpus(self) -> int:
        return self.engines * self.tensor_parallel

    def own_gpus(self) -> int:
        return sum(one.ranks for one in self.roles if not one.shared)

    def gpus_needed(self) -> int:
        return self.policy_ranks + self.own_gpus() + (0 if self.colocated else self.engine_gpus())


def check_devices(layout: Layout, machine: Machine) -> None:
    """Refuse what the machine cannot hold, with the sum and the way out."""
    if machine.gpus == 0:
        placed(layout, machine)
        return
    for one in layout.roles:
        if one.shared and one.ranks > layout.policy_ranks:
            raise ConfigError(
                f"{one.name}.ranks={one.ranks} share the policy's GPUs: set it to at most "
                f"training.ranks={layout.policy_ranks}, or {one.name}.placement=separate"
            )
    if layout.colocated and layout.engine_gpus() > layout.policy_ranks:
        raise ConfigError(
            f"rollout.engines={layout.engines} x rollout.tensor_parallel={layout.tensor_parallel} share the policy's "
            f"GPUs: make it at most training.ranks={layout.policy_ranks}, raise that, or set placement=separate"
        )
    if layout.gpus_needed() <= machine.gpus:
        placed(layout, machine)
        return
    sign = "shared by" if layout.colocated else "+"
    own = "".join(f" + {one.name}.ranks={one.ranks}" for one in layout.roles if not one.shared)
    raise ConfigError(
        f"training.ranks={layout.policy_ranks} {sign} rollout.engines={layout.engines} x "
        f"rollout.tensor_parallel={layout.tensor_parallel}{own} need {layout.gpus_needed()} GPUs, there are "
        f"{machine.gpus}: lower one of them, or set placement=colocated"
    )


def crowding(layout: Layout, machine: Machine) -> list[str]:
    """Return warnings of more processes of one kind than CPU cores: working at once, they wait for each other."""
    kinds = {f"{one.name.partition('-')[0]}.ranks={one.ranks}": one.ranks for one in layout.roles}
    kinds |= {
        f"training.ranks={layout.policy_ranks}": layout.policy_ranks,
        f"rollout.engines={layout.engines} x rollout.tensor_parallel={layout.tensor_parallel}": layout.engine_gpus(),
    }
    return [
        f"{said}: {count} processes on {machine.cpus} CPU cores slow each other down; take {machine.cpus} or fewer"
        for said, count in kinds.items()
        if not machine.gpus and not machine.nodes and count > machine.cpus
    ]


def process_environment(target: Target[Object], machine: Machine, processes: int = 1, cpus: int = 0) -> dict[str, str]:
    """Return the environment: on CPUs, `processes` that work at once share the cores."""
    threads = {"OMP_NUM_THREADS": str(max((cpus or machine.cpus) // max(processes, 1), 1)), **PASSIVE}
    return QUIET | ({} if machine.gpus else threads) | target.environment(machine.gpus)


@dataclass(frozen=True, slots=True)
class Places:
    """The node of every process, by its place among the machine's."""

    policy: list[int]
    engines: list[int]
    roles: dict[str, list[int]]

    def used(self) -> list[int]:
        return sorted({*self.policy, *self.engines, *(node for ranks in self.roles.values() for node in ranks)})


def placed(layout: Layout, machine: Machine) -> Places:
    """Give every process a node: copies of models and engines stay whole where they fit, and lie close together."""
    nodes, beside = machine.split(), {one.name: one for one in layout.roles}
    if not machine.nodes:
        roles = {name: [0] * one.ranks for name, one in beside.items()}
        return Places([0] * layout.policy_ranks, [0] * layout.engines, roles)
    free = [node.gpus if machine.gpus else node.cpus for node in nodes]
    policy = taken(free, layout.policy_ranks, layout.width, "training.ranks", machine)
    roles = {
        one.name: taken(free, one.ranks, one.width, f"{one.name}.ranks", machine)
        for one in layout.roles
        if not one.shared
    }
    roles |= {
        one.name: [policy[rank % len(policy)] if policy else 0 for rank in range(one.ranks)]
        for one in layout.roles
        if one.shared
    }
    width = layout.tensor_parallel
    if layout.colocated:
        return Places(policy, [beside_ranks(policy, number, width, nodes) for number in range(layout.engines)], roles)
    engines = []
    for _ in range(layout.engines):
        roomy = max(range(len(nodes)), key=lambda at: free[at])
        if free[roomy] < width:
            raise ConfigError(no_room(f"rollout.tensor_parallel={width}", width, free, machine))
        free[roomy] -= width
        engines.append(roomy)
    return Places(policy, engines, roles)


def taken(free: list[int], count: int, width: int, key: str, machine: Machine) -> list[int]:
    """Take places for ranks, copy by copy: each in the first node that has room for all of it, else wherever."""
    found: list[int] = []
    while len(found) < count:
        whole = next((at for at, room in enumerate(free) if room >= width), None)
        for _ in range(width):
            at = whole if whole is not None else next((at for at, room in enumerate(free) if room), None)
            if at is None:
                raise ConfigError(no_room(f"{key}={count}", count, free, machine))
            free[at] -= 1
            found.append(at)
    return found


def beside_ranks(policy: list[int], number: int, width: int, nodes: tuple[Node, ...]) -> int:
    """Return the node of an engine on the policy's GPUs, all of which must be there."""
    found = {policy[rank % len(policy)] for rank in range(number * width, (number + 1) * width)}
    if len(found) > 1:
        there = " and ".join(nodes[at].address for at in sorted(found))
        raise ConfigError(
            f"rollout.tensor_parallel={width}: engine {number} would lie on {there}; one has to be within a node: "
            "lower it, or set placement=separate"
        )
    return found.pop()


def no_room(key: str, count: int, free: list[int], machine: Machine) -> str:
    kind = "GPUs" if machine.gpus else "CPU slots"
    total = [node.gpus if machine.gpus else node.cpus for node in machine.nodes]
    sums = ", ".join(
        f"{node.address} has {left} of {size} left" for node, left, size in zip(machine.nodes, free, total, strict=True)
    )
    within = " on one node" if "tensor_parallel" in key else ""
    return f"{key} needs {count} {kind}{within}: {sums}; lower it, or the number of other processes"


@dataclass(slots=True)
class Processes:
    """Start the processes of a run, and remember where the policy's ranks live, for those that share with them."""

    machine: Machine
    layout: Layout
    logs: Path
    local: bool
    homes: list[Home] = field(default_factory=list)
    places: Places = field(init=False)
    group: Any = None  # Ray's placement group of all that has devices or slots of its own
    bundles: dict[str, int] = field(default_factory=dict)  # of the first process of each kind

    def __post_init__(self) -> None:
        self.places = placed(self.layout, self.machine)
        if self.local or not (self.machine.gpus or self.machine.nodes):
            return
        layout, places = self.layout, self.places
        own = {"policy": (places.policy, 1)}
        own |= {one.name: (places.roles[one.name], 1) for one in layout.roles if not one.shared}
        own |= {} if layout.colocated else {"engine": (places.engines, layout.tensor_parallel)}
        wanted = [(at, width) for nodes, width in own.values() for at in nodes]
        self.bundles = {kind: sum(len(nodes) for nodes, _ in [*own.values()][:at]) for at, kind in enumerate(own)}
        self.group = reserve([self._claim(at, width) for at, width in wanted])

    def _claim(self, node: int, width: int) -> dict[str, float]:
        address = self.machine.split()[node].address
        claim: dict[str, float] = {"CPU": 1, "GPU": width} if self.machine.gpus else {"CPU": width}
        return claim | ({f"node:{address}": 0.001} if address else {})

    def policy(self, target: Target[Object], specs: list[Any]) -> list[Actor[Object]]:
        actors = self._start("policy", target, specs, self._own_spots("policy", target, self.places.policy))
        if self.machine.gpus:
            homes = [actor.home() for actor in actors if isinstance(actor, RayActor)]
            self.homes = wait_all(homes, START_SECONDS)
        return actors

    def _own_spots(self, kind: str, target: Target[Object], nodes: list[int], width: int = 1) -> list[Spot]:
        """Return spots with devices or slots of their own; on this machine's CPUs processes claim none."""
        if self.group is None:
            return [Spot(environment=self._environment(target, nodes, at, width)) for at in nodes]
        cpus, gpus = (1, width) if self.machine.gpus else (width, 0)
        first = self.bundles[kind]
        return [
            Spot(
                self.group,
                first + number,
                cpus=cpus,
                gpus=gpus,
                environment=self._environment(target, nodes, at, width),
                address=self.machine.split()[at].address,
            )
            for number, at in enumerate(nodes)
        ]

    def _environment(self, target: Target[Object], nodes: list[int], at: int, width: int = 1) -> dict[str, str]:
        """Return what a process starts with: on CPUs those of its kind on its node share the cores."""
        working = nodes.count(at) * width
        if not self.layout.in_turns:
            working = self.places.policy.count(at) + self.places.engines.count(at) * self.layout.tensor_parallel
        return process_environment(target, self.machine, working, self.machine.split()[at].cpus)

    def role(self, one: RoleRanks, target: Target[Object], specs: list[Any]) -> list[Actor[Object]]:
        """Start the ranks of a model beside the policy."""
        nodes = self.places.roles[one.name]
        if not one.shared:
            return self._start(one.name, target, specs, self._own_spots(one.name, target, nodes))
        spots = [self._beside(at, [rank], self._environment(target, nodes, at)) for rank, at in enumerate(nodes)]
        return self._start(one.name, target, specs, spots)

    def engines(self, target: Target[Object], specs: list[Any]) -> list[Actor[Object]]:
        width, nodes = self.layout.tensor_parallel, self.places.engines
        if not self.layout.colocated:
            return self._start("engine", target, specs, self._own_spots("engine", target, nodes, width))
        shares = [range(number * width, (number + 1) * width) for number in range(len(nodes))]
        spots = [
            self._beside(at, list(share), self._environment(target, nodes, at, width))
            for at, share in zip(nodes, shares, strict=True)
        ]
        return self._start("engine", target, specs, spots)

    def _beside(self, node: int, ranks: list[int], environment: dict[str, str]) -> Spot:
        """Return a spot on the node and GPUs of these policy ranks."""
        there = self.machine.split()[node]
        if not self.homes:
            return Spot(node=there.id or None, environment=environment, address=there.address)
        homes = [self.homes[rank % len(self.homes)] for rank in ranks]
        devices = ",".join(gpu for home in homes for gpu in home.gpus)
        seen = environment | {"CUDA_VISIBLE_DEVICES": devices}
        return Spot(node=homes[0].node, environment=seen, address=there.address)

    def _start(self, role: str, target: Target[Object], specs: list[Any], spots: list[Spot]) -> list[Actor[Object]]:
        if self.local:
            return [LocalActor(role, build(target.path, [spec])) for spec in specs]
        return [
            RayActor(f"{role}-{number}", target, [spec], spot, self.logs / f"{role}-{number}.log")
            for number, (spec, spot) in enumerate(zip(specs, spots, strict=True))
        ]
