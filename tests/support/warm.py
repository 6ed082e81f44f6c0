"""Ray processes that the next run of a test file takes over: to start them takes longer than what most runs do."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import RayError

from trueline.runs import processes
from trueline.runtime.actors import RayActor
from trueline.runtime.cluster import Machine, connect


class WarmProcesses:
    """Each run makes its objects anew, in the processes of the run before."""

    def __init__(self) -> None:
        self.idle = defaultdict[str, list[tuple[Any, Any]]](list)  # handles and locations
        self.used: list[tuple[str, RayActor[Any], Any, Any]] = []
        self.begin_cold = RayActor.begin

    def begin(self, actor: RayActor[Any]) -> None:
        kind = f"{actor.target.path} {sorted(actor.placement.environment.items())}"
        if self.idle[kind]:
            actor.handle, actor.location_ref = self.idle[kind].pop()
            with suppress(RayError):  # which the first call reports
                ray.get(actor._control(actor.handle.make).remote(actor.target.path, actor.args))
        else:
            self.begin_cold(actor)
        self.used.append((kind, actor, actor.handle, actor.location_ref))

    @contextmanager
    def cluster(self, machine: Machine, store_bytes: int) -> Iterator[None]:
        connect(machine.gpus, store_bytes)
        try:
            yield
        finally:
            for kind, _, handle, location in self.used:
                with suppress(RayError):
                    if is_alive(ray.get(location).pid):
                        self.idle[kind].append((handle, location))
            self.used.clear()

    def pids(self, name: str) -> list[int]:
        """Return the living processes of the present run with such names."""
        found = []
        for _, actor, handle, location in list(self.used):
            with suppress(RayError):
                if actor.name.startswith(name) and actor.handle is handle and is_alive(ray.get(location).pid):
                    found.append(ray.get(location).pid)
        return found


def is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def warm_processes() -> Iterator[WarmProcesses]:
    warm = WarmProcesses()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "ray_cluster", warm.cluster)
        patch.setattr(RayActor, "begin", lambda actor: warm.begin(actor))
        try:
            yield warm
        finally:
            ray.shutdown()
