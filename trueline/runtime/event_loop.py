"""An event loop beside a synchronous controller."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from trueline.runtime.actors import ActorFailure, Result

STOP_SECONDS = 10


class Interrupted(Exception):
    """What was waited for is broken off, as the run is to end."""


class EventLoop:
    """An event loop in a thread of its own, for a controller that is not asynchronous."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="rollouts", daemon=True)
        self.thread.start()
        self.interrupted = False
        self.breakable: asyncio.Task[Any] | None = None  # what an interrupt breaks off

    def run(self, work: Coroutine[Any, Any, Result], what: str, *, bounded: bool = True) -> Result:
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(self.timeout_seconds if bounded else None)
        except FutureTimeout:
            future.cancel()
            raise ActorFailure(f"{what}: not done within timeout_seconds={self.timeout_seconds:.0f}") from None

    def run_until_interrupted(self, work: Coroutine[Any, Any, Result], what: str) -> Result:
        """Run work of any length; raise `Interrupted`, once it has ended, if there was an interrupt before its end."""
        try:
            found = self.run(self._break_off(work), what, bounded=False)
        except CancelledError:
            raise Interrupted from None
        if self.interrupted:
            raise Interrupted
        return found

    async def _break_off(self, work: Coroutine[Any, Any, Result]) -> Result:
        self.breakable = asyncio.current_task()
        try:
            if self.interrupted:
                work.close()
                raise Interrupted
            return await work
        finally:
            self.breakable = None

    def interrupt(self) -> None:
        """Break off what may be broken off, now and from now on; a handler of signals may call it."""
        self.interrupted = True
        self.loop.call_soon_threadsafe(lambda: self.breakable and self.breakable.cancel())

    def stop(self) -> None:
        """End what still runs, then the loop and its thread."""
        asyncio.run_coroutine_threadsafe(cancel_others(), self.loop).result(STOP_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(STOP_SECONDS)
        self.loop.close()


async def cancel_others() -> None:
    """Cancel other tasks until all end: Python 3.11's `wait_for` loses a cancellation that meets a result."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=0.2)
