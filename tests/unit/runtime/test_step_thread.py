"""The thread of an engine."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue

import pytest

from trueline.runtime.step_thread import StepThread

SECONDS = 60.0


class Machine:
    """Steps as often as it is told to, and writes down what happens in which order."""

    def __init__(self) -> None:
        self.left = 0
        self.seen: list[str] = []
        self.errors: SimpleQueue[BaseException] = SimpleQueue()
        self.broken = False
        self.thread = StepThread(self.step, self.errors.put)

    def step(self) -> bool:
        assert not self.broken, "a broken step"
        if self.left:
            self.left -= 1
            self.seen.append("step")
        return self.left > 0

    def note(self, name: str, steps: int = 0) -> str:
        self.seen.append(name)
        self.left += steps
        return name

    def wait(self) -> None:
        """Until all steps are done."""
        while self.thread.call(lambda: self.left).result(SECONDS):
            pass


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.thread.stop()


def test_calls_come_in_order_between_steps(machine: Machine) -> None:
    """Those that have gathered during a step are made before the next one."""
    gate = threading.Event()
    held = machine.thread.call(gate.wait)
    calls = [machine.thread.call(machine.note, name, steps=2) for name in ("a", "b", "c")]
    gate.set()
    assert held.result(SECONDS) and [call.result(SECONDS) for call in calls] == ["a", "b", "c"]
    machine.wait()
    assert machine.seen == ["a", "b", "c", *["step"] * 6]


def test_an_error_goes_to_whoever_waits(machine: Machine) -> None:
    """And the thread goes on: neither a failed call nor a failed step ends it."""
    with pytest.raises(ZeroDivisionError):
        machine.thread.call(lambda: 1 // 0).result(SECONDS)
    later: Future[None] = Future()
    machine.thread.begin(lambda: 1 // 0, later)
    assert isinstance(later.exception(SECONDS), ZeroDivisionError)
    machine.broken = True
    machine.thread.call(machine.note, "x", steps=1).result(SECONDS)
    assert str(machine.errors.get(timeout=SECONDS)).startswith("a broken step")
    machine.broken = False
    machine.wait()
    assert machine.seen[-1] == "step"


def test_what_is_cancelled_is_not_made(machine: Machine) -> None:
    gate = threading.Event()
    held = machine.thread.call(gate.wait)
    cancelled, begun = machine.thread.call(machine.note, "cancelled"), Future[None]()
    machine.thread.begin(lambda: 1 // 0, begun)
    assert cancelled.cancel() and begun.cancel()
    gate.set()
    assert held.result(SECONDS) and machine.thread.call(machine.note, "after").result(SECONDS) == "after"
    assert machine.seen == ["after"]
