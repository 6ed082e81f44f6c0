"""Let models and engines on the same GPUs take turns with the memory."""

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate

from trueline.rollout.engine import RolloutEngine
from trueline.rollout.pool import EnginePool
from trueline.runtime.actors import Given
from trueline.runtime.event_loop import EventLoop
from trueline.training.group import ModelGroup
from trueline.training.worker import Worker


class DeviceSharing:
    """Models and engines that share GPUs take turns; those that do not are always awake."""

    def __init__(
        self,
        pool: EnginePool,
        loop: EventLoop,
        shared: bool,
        models: Sequence[ModelGroup] = (),
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.pool, self.loop, self.shared, self.models, self.note = pool, loop, shared, models, note
        self.phase = "start"
        self.in_use: dict[str, float] = {}  # GiB of a GPU at the end of each phase, the last time

    def _engines(
        self,
        method: Callable[Concatenate[RolloutEngine, Given], Coroutine[Any, Any, None]],
        *args: Given.args,
        **named: Given.kwargs,
    ) -> None:
        if self.shared:
            self.loop.run(self.pool.call(method, *args, **named), f"{method.__name__} of the engines")

    def _release(self, following: str) -> None:
        """End a phase: remember what is in use, and let models give back what they do not need for the next one."""
        if not self.shared:
            return
        found = [pair for model in self.models for pair in model.call(Worker.release)]
        first = self.phase == "training" and self.phase not in self.in_use
        self.in_use[self.phase] = max((used for used, _ in found), default=0.0)
        self.phase = following
        if first:
            given = sum(freed for _, freed in found)
            self.note(f"memory     models give back {given:.1f} GiB before the engine wakes")

    def metrics(self) -> dict[str, float]:
        if not self.in_use:
            return {}
        phases = {f"memory/{phase}_gib": used for phase, used in self.in_use.items()}
        return phases | {"memory/device_gib": max(self.in_use.values())}

    @contextmanager
    def training(self) -> Iterator[None]:
        self._release("training")
        if self.shared:
            self.loop.run(self.pool.sleep(), "sleep of the engines")
        yield

    @contextmanager
    def syncing(self, revive: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Wake engines for new weights; `revive` starts lost ones again, in memory that models have given back."""
        self._release("rollout")
        revive()
        self._engines(RolloutEngine.wake, "weights")
        yield
        self._engines(RolloutEngine.wake, "kv_cache")
