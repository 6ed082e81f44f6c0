"""The thread of an engine: it steps while there are requests, and makes other calls between steps."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from typing import Any

from trueline.runtime.actors import Given, Result


class Settles(AbstractContextManager[None]):
    """Passes an error to those who wait for a future, instead of ending the thread."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is not None and claim(self.future):
            self.future.set_exception(error)
        return error is not None


def claim(future: Future[Any]) -> bool:
    """Tell whether someone still waits for a future, who can then no longer cancel it."""
    return future.running() or (not future.done() and future.set_running_or_notify_cancel())


class StepThread:
    """Calls are made in their order as soon as the current step ends; no other thread is woken between two steps."""

    def __init__(self, step: Callable[[], bool], fail: Callable[[BaseException], None]) -> None:
        self.step = step  # returns whether there is more to do
        self.fail = fail  # is told of an error in a step
        self.inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.stopped = False
        threading.Thread(target=self._work, name="engine", daemon=True).start()

    def call(self, method: Callable[Given, Result], *args: Given.args, **named: Given.kwargs) -> Future[Result]:
        result: Future[Result] = Future()
        self.inbox.put(partial(self._answer, result, partial(method, *args, **named)))
        return result

    def begin(self, work: Callable[[], object], result: Future[Any]) -> None:
        """Make a call whose result comes from later steps; only its error settles the future."""
        self.inbox.put(partial(self._begin, work, result))

    def stop(self) -> None:
        self.inbox.put(self._stop)

    def _work(self) -> None:
        more = False
        while not self.stopped:
            if not more or not self.inbox.empty():
                self.inbox.get()()
                more = True  # a call may have brought something to do
            else:
                more = self._try_step()

    def _try_step(self) -> bool:
        result: Future[bool] = Future()
        with Settles(result):
            result.set_result(self.step())
        if (error := result.exception()) is not None:
            self.fail(error)
        return error is None and result.result()

    def _answer(self, result: Future[Result], work: Callable[[], Result]) -> None:
        if claim(result):
            with Settles(result):
                result.set_result(work())

    def _begin(self, work: Callable[[], object], result: Future[Any]) -> None:
        with Settles(result):
            work()

    def _stop(self) -> None:
        self.stopped = True
