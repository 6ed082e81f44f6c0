"""Let models and engines on the same GPUs take turns with the memory."""

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate

from trueline.rollout.engine import RolloutEngine
from trueline.rollout.pool import EnginePool
from trueline.runtime.actors import Given
from trueline.runtime.event_loop import EventLoop


class DeviceSharing:
    """Models and engines that share GPUs take turns; those that do not are always awake."""

    def __init__(self, pool: EnginePool, loop: EventLoop, shared: bool) -> None:
        self.pool, self.loop, self.shared = pool, loop, shared

    def _engines(
        self,
        method: Callable[Concatenate[RolloutEngine, Given], Coroutine[Any, Any, None]],
        *args: Given.args,
        **named: Given.kwargs,
    ) -> None:
        if self.shared:
            self.loop.run(self.pool.call(method, *args, **named), f"{method.__name__} of the engines")

    @contextmanager
    def training(self) -> Iterator[None]:
        self._engines(RolloutEngine.sleep)
        yield

    @contextmanager
    def syncing(self) -> Iterator[None]:
        self._engines(RolloutEngine.wake, "weights")
        yield
        self._engines(RolloutEngine.wake, "kv_cache")
