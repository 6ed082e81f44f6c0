"""Who runs where: computed before anything starts, compared with what there is, and said."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError
from trueline.runtime.actors import Actor, Home, LocalActor, Object, RayActor, Spot, Target, build, wait_all
from trueline.runtime.cluster import PASSIVE, QUIET, START_SECONDS, Machine, reserve


@dataclass(frozen=True, slots=True)
class RoleRanks:
    """The ranks of a model beside the policy: on the policy's GPUs, or on GPUs of their own."""

    name: str
    ranks: int
    shared: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """How many processes of each kind, and whether engines share the trainer's GPUs."""

    policy_ranks: int
    engines: int = 0
    tensor_parallel: int = 1
    colocated: bool = False
    roles: tuple[RoleRanks, ...] = ()
    in_turns: bool = True  # models wait while engines sample, and engines while models train

    def engine_gpus(self) -> int:
        return self.engines * self.tensor_parallel

    def own_gpus(self) -> int:
        return sum(one.ranks for one in self.roles if not one.shared)

    def at_work(self, processes: int) -> int:
        """Return how many processes compute at once while this many of one kind do."""
        return processes if self.in_turns else self.policy_ranks + self.engine_gpus()

    def gpus_needed(self) -> int:
        return self.policy_ranks + self.own_gpus() + (0 if self.colocated else self.engine_gpus())


def check_devices(layout: Layout, machine: Machine) -> None:
    """Refuse what the machine cannot hold, with the sum and the way out."""
    if machine.gpus == 0:
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
        if not machine.gpus and count > machine.cpus
    ]


def process_environment(target: Target[Object], machine: Machine, processes: int = 1) -> dict[str, str]:
    """Return the environment: on CPUs, `processes` that work at once share the cores."""
    threads = {"OMP_NUM_THREADS": str(max(machine.cpus // processes, 1)), **PASSIVE}
    return QUIET | ({} if machine.gpus else threads) | target.environment(machine.gpus)


@dataclass(slots=True)
class Processes:
    """Start the processes of a run, and remember where the policy's ranks live, for those that share with them."""

    machine: Machine
    layout: Layout
    logs: Path
    local: bool
    homes: list[Home] = field(default_factory=list)

    def policy(self, target: Target[Object], specs: list[Any]) -> list[Actor[Object]]:
        actors = self._start("policy", target, specs, self._own_spots(target, len(specs)))
        if self.machine.gpus:
            homes = [actor.home() for actor in actors if isinstance(actor, RayActor)]
            self.homes = wait_all(homes, START_SECONDS)
        return actors

    def _own_spots(self, target: Target[Object], count: int) -> list[Spot]:
        environment = process_environment(target, self.machine, self.layout.at_work(count))
        if not self.machine.gpus:
            return [Spot(environment=environment)] * count
        group = None if self.local else reserve([{"CPU": 1, "GPU": 1}] * count)
        return [Spot(group, bundle, cpus=1, gpus=1, environment=environment) for bundle in range(count)]

    def role(self, one: RoleRanks, target: Target[Object], specs: list[Any]) -> list[Actor[Object]]:
        """Start the ranks of a model beside the policy."""
        environment = process_environment(target, self.machine, self.layout.at_work(len(specs)))
        shared = [self._beside([number], environment) for number in range(len(specs))]
        return self._start(one.name, target, specs, shared if one.shared else self._own_spots(target, len(specs)))

    def engines(self, target: Target[Object], specs: list[Any]) -> list[Actor[Object]]:
        width = self.layout.tensor_parallel
        environment = process_environment(target, self.machine, self.layout.at_work(len(specs) * width))
        if not self.machine.gpus or self.layout.colocated:
            shares = [list(range(number * width, (number + 1) * width)) for number in range(len(specs))]
            spots = [self._beside(share, environment) for share in shares]
        else:
            group = None if self.local else reserve([{"CPU": 1, "GPU": width}] * len(specs))
            spots = [Spot(group, bundle, cpus=1, gpus=width, environment=environment) for bundle in range(len(specs))]
        return self._start("engine", target, specs, spots)

    def _beside(self, ranks: list[int], environment: dict[str, str]) -> Spot:
        """Return a spot on the node and GPUs of these policy ranks; on a CPU, anywhere."""
        if not self.homes:
            return Spot(environment=environment)
        homes = [self.homes[rank % len(self.homes)] for rank in ranks]
        devices = ",".join(gpu for home in homes for gpu in home.gpus)
        return Spot(node=homes[0].node, environment=environment | {"CUDA_VISIBLE_DEVICES": devices})

    def _start(self, role: str, target: Target[Object], specs: list[Any], spots: list[Spot]) -> list[Actor[Object]]:
        if self.local:
            return [LocalActor(role, build(target.path, [spec])) for spec in specs]
        return [
            RayActor(f"{role}-{number}", target, [spec], spot, self.logs / f"{role}-{number}.log")
            for number, (spec, spot) in enumerate(zip(specs, spots, strict=True))
        ]
