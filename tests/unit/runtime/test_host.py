"""The inside of a process with coroutines: calls come in two loops, and the object lives in one."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from trueline.runtime import host as host_module
from trueline.runtime.event_loop import EventLoop
from trueline.runtime.host import AsyncActorHost


class Object:
    """What was asked of it, and in which threads."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.gate, self.waiting, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def wait(self) -> int:
        self.threads.append(threading.get_ident())
        self.waiting.set()
        try:
            await self.gate.wait()
        finally:
            self.ended.set()
        return 1

    async def let_go(self) -> int:
        """Wait for one that waits, then let it go on: neither is possible from another loop."""
        self.threads.append(threading.get_ident())
        await self.waiting.wait()
        self.gate.set()
        return 2


@pytest.fixture
def loops() -> Iterator[tuple[EventLoop, EventLoop]]:
    """The loop of the object, and that of a concurrency group."""
    made = EventLoop(60), EventLoop(60)
    yield made
    for loop in made:
        loop.stop()


@pytest.fixture
def host(loops: tuple[EventLoop, EventLoop], monkeypatch: pytest.MonkeyPatch) -> AsyncActorHost:
    """A process that is asked to make its object from the other loop, as all but requests are."""
    for name in ("redirect_output", "use_interface", "start_beating"):
        monkeypatch.setattr(host_module, name, lambda *args: None)
    monkeypatch.setattr(host_module.ray.util, "get_node_ip_address", lambda: "")

    async def begin() -> AsyncActorHost:
        return AsyncActorHost(str(Path("engine.log")))

    home, other = loops
    begun = home.run(begin(), "beginning")
    making = asyncio.run_coroutine_threadsafe(begun.make(f"{__name__}:Object", []), other.loop)
    alive = asyncio.run_coroutine_threadsafe(begun.ping(), other.loop)
    assert not alive.done() and not making.done()  # it must be known where the process is, first
    home.loop.call_soon_threadsafe(begun.located.set)
    making.result(60)
    alive.result(60)
    return begun


def test_calls_of_both_loops_meet_in_the_objects_own(host: AsyncActorHost, loops: tuple[EventLoop, EventLoop]) -> None:
    home, other = loops
    waiting = asyncio.run_coroutine_threadsafe(host.call("wait"), home.loop)
    assert other.run(host.call("let_go"), "letting go") == 2
    assert waiting.result(60) == 1
    assert host.target is not None and set(host.target.threads) == {home.thread.ident}


def test_a_call_of_the_other_loop_that_is_cancelled_ends(
    host: AsyncActorHost, loops: tuple[EventLoop, EventLoop]
) -> None:
    home, other = loops
    waiting = asyncio.run_coroutine_threadsafe(host.call("wait"), other.loop)
    assert host.target is not None
    home.run(host.target.waiting.wait(), "waiting")
    waiting.cancel()
    home.run(host.target.ended.wait(), "ending")
    with pytest.raises(CancelledError):
        waiting.result(60)
