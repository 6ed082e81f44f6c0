"""Who runs where: computed before anything starts, compared with what there is, and said."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError
from trueline.runtime.actors import Actor, LocalActor, RayActor, Spot, Target, build, wait_all
from trueline.runtime.cluster import START_SECONDS, Machine, engine_environment, reserve, worker_environment


@dataclass(frozen=True, slots=True)
class Layout:
    """How many processes of each kind, and whether engines share the trainer's GPUs."""

    policy_ranks: int
    reference_ranks: int
    engines: int
    tensor_parallel: int
    colocated: bool

    def engine_gpus(self) -> int:
        return self.engines * self.tensor_parallel

    def gpus_needed(self) -> int:
        if self.colocated:
            return max(self.policy_ranks, self.engine_gpus())
        return self.policy_ranks + self.engine_gpus()


def check_devices(layout: Layout, machine: Machine) -> None:
    """Refuse what the machine cannot hold, with the sum and the way out."""
    if machine.gpus == 0 or layout.gpus_needed() <= machine.gpus:
        if machine.gpus and layout.reference_ranks > layout.policy_ranks:
            raise ConfigError(
                f"reference.ranks={layout.reference_ranks} share the policy's GPUs: "
                f"set it to at most training.ranks={layout.policy_ranks}"
            )
        return
    sign = "shared by" if layout.colocated else "+"
    raise ConfigError(
        f"training.ranks={layout.policy_ranks} {sign} rollout.engines={layout.engines} x "
        f"rollout.tensor_parallel={layout.tensor_parallel} need {layout.gpus_needed()} GPUs, there are {machine.gpus}: "
        "lower one of them, or set placement=colocated"
    )


@dataclass(slots=True)
class Processes:
    """Starts the processes of a run and remembers where the policy's ranks live, for those that share with them."""

    machine: Machine
    layout: Layout
    logs: Path
    local: bool
    homes: list[tuple[str, list[str]]] = field(default_factory=list)

    def policy(self, target: Target, specs: list[Any]) -> list[Actor]:
        actors = self._start("policy", target, specs, self._policy_spots(len(specs)))
        if self.machine.gpus:
            homes = [actor.home() for actor in actors if isinstance(actor, RayActor)]
            self.homes = wait_all(homes, START_SECONDS)
        return actors

    def _policy_spots(self, count: int) -> list[Spot]:
        environment = worker_environment(self.machine, count)
        if not self.machine.gpus:
            return [Spot(environment=environment)] * count
        group = None if self.local else reserve([{"CPU": 1, "GPU": 1}] * count)
        return [Spot(group, bundle, cpus=1, gpus=1, environment=environment) for bundle in range(count)]

    def reference(self, target: Target, specs: list[Any]) -> list[Actor]:
        environment = worker_environment(self.machine, len(specs))
        spots = [self._beside([number], environment) for number in range(len(specs))]
        return self._start("reference", target, specs, spots)

    def engines(self, target: Target, specs: list[Any], cpu_cache_gib: float) -> list[Actor]:
        environment = engine_environment(self.machine, cpu_cache_gib)
        width = self.layout.tensor_parallel
        if not self.machine.gpus or self.layout.colocated:
            shares = [list(range(number * width, (number + 1) * width)) for number in range(len(specs))]
            spots = [self._beside(share, environment) for share in shares]
        else:
            group = None if self.local else reserve([{"CPU": 1, "GPU": width}] * len(specs))
            spots = [Spot(group, bundle, cpus=1, gpus=width, environment=environment) for bundle in range(len(specs))]
        return self._start("engine", target, specs, spots)

    def _beside(self, ranks: list[int], environment: dict[str, str]) -> Spot:
        """On the node and GPUs of these policy ranks; on a CPU, anywhere."""
        if not self.homes:
            return Spot(environment=environment)
        homes = [self.homes[rank % len(self.homes)] for rank in ranks]
        devices = ",".join(gpu for _, gpus in homes for gpu in gpus)
        return Spot(node=homes[0][0], environment=environment | {"CUDA_VISIBLE_DEVICES": devices})

    def _start(self, role: str, target: Target, specs: list[Any], spots: list[Spot]) -> list[Actor]:
        if self.local:
            return [LocalActor(role, build(target.path, [spec])) for spec in specs]
        return [
            RayActor(f"{role}-{number}", target, [spec], spot, self.logs / f"{role}-{number}.log")
            for number, (spec, spot) in enumerate(zip(specs, spots, strict=True))
        ]
