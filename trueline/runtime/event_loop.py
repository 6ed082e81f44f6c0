"""An event loop for a synchronous controller."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from trueline.runtime.actors import ActorFailure, Result

STOP_SECONDS = 10


class Interrupted(Exception):
    """The work was cancelled because the run is ending."""


class EventLoop:
    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="rollouts", daemon=True)
        self.thread.start()
        self.interrupted = False
        self.cancellable: asyncio.Task[Any] | None = None  # an interrupt cancels it

    def run(self, work: Coroutine[Any, Any, Result], what: str, *, bounded: bool = True) -> Result:
        return self.begin(work, what, bounded=bounded)()

    def begin(self, work: Coroutine[Any, Any, Result], what: str, *, bounded: bool = True) -> Callable[[], Result]:
        """Begin work, and return a function that waits for its result."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)

        def wait() -> Result:
            try:
                return future.result(self.timeout_seconds if bounded else None)
            except FutureTimeout:
                future.cancel()
                raise ActorFailure(f"{what}: not done within timeout_seconds={self.timeout_seconds:.0f}") from None

        return wait

    def run_until_interrupted(self, work: Coroutine[Any, Any, Result], what: str) -> Result:
        """Run work of any length; raise `Interrupted` after it ended if there was an interrupt."""
        try:
            found = self.run(self._run_cancellable(work), what, bounded=False)
        except CancelledError:
            raise Interrupted from None
        if self.interrupted:
            raise Interrupted
        return found

    async def _run_cancellable(self, work: Coroutine[Any, Any, Result]) -> Result:
        self.cancellable = asyncio.current_task()
        try:
            if self.interrupted:
                work.close()
                raise Interrupted
            return await work
        finally:
            self.cancellable = None

    def interrupt(self) -> None:
        """Cancel cancellable work, now and from now on; signal handlers may call this."""
        self.interrupted = True
        self.loop.call_soon_threadsafe(lambda: self.cancellable and self.cancellable.cancel())

    def stop(self) -> None:

        async def cancel_others() -> None:
            # Until all end: Python 3.11's `wait_for` can lose a cancellation.
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in others:
                    task.cancel()
                await asyncio.wait(others, timeout=0.2)

        asyncio.run_coroutine_threadsafe(cancel_others(), self.loop).result(STOP_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(STOP_SECONDS)
        self.loop.close()
