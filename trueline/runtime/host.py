"""Inside of a process of a run: it makes one object and passes calls on to it."""

import asyncio
import os
import pkgutil
import sys
import traceback
from collections.abc import Coroutine, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray

from trueline.monitoring.beats import WORK, start_beating


class Home(NamedTuple):
    node: str
    gpus: list[str]
    pid: int


class Host:
    """Make the object that `target` names inside a process of its own, and pass calls on to it."""

    def __init__(self, log: str) -> None:
        redirect_output(Path(log))
        use_interface(ray.util.get_node_ip_address())
        start_beating(Path(log).parent, Path(log).stem)
        self.making = WORK.begin("call", "", "make")  # from now on: what is sent along is imported first

    def make(self, target: str, args: Sequence[Any]) -> None:
        """Import and build it; an error ends the process, and its last words in the log are what callers are told."""
        self.target = None
        try:
            self.target = build(target, args)
            WORK.end(self.making)
        finally:
            if self.target is None:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)

    def call(self, method: str, *args: Any, **named: Any) -> Any:
        with WORK.doing("call", "", method):
            return methodcaller(method, *args, **named)(self.target)

    def home(self) -> "Home":
        """Return where this process is, for others that share its GPUs or have to end it."""
        return Home(ray.get_runtime_context().get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()], os.getpid())


def use_interface(address: str) -> None:
    """Have gloo, NCCL and vLLM meet others at this node's address, unless the user has said where."""
    named = (name for name, found in psutil.net_if_addrs().items() if any(one.address == address for one in found))
    interface = next(named, None)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        os.environ.setdefault("VLLM_HOST_IP", address)


class AsyncHost(Host):
    """The same for coroutines, which Ray may begin in another order than they were asked for."""

    def __init__(self, log: str) -> None:
        super().__init__(log)
        self.loop = asyncio.get_running_loop()  # the object's
        self.asked, self.made = asyncio.Event(), asyncio.Event()

    def home(self) -> "Home":
        self.loop.call_soon_threadsafe(self.asked.set)
        return super().home()

    async def make(self, target: str, args: Sequence[Any]) -> None:  # type: ignore[override]
        await self._at_home(self._make(target, args))

    async def _make(self, target: str, args: Sequence[Any]) -> None:
        await self.asked.wait()  # who has to end this process must know it before something here can hang
        super().make(target, args)
        self.made.set()

    async def alive(self) -> None:
        """Answer once the object is made; not counted as something that the process does."""
        await self._at_home(self.made.wait())

    async def call(self, method: str, *args: Any, **named: Any) -> Any:
        return await self._at_home(self._call(method, *args, **named))

    async def _at_home(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run it in the object's loop: calls of another concurrency group come in a loop and thread of their own."""
        if asyncio.get_running_loop() is self.loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def _call(self, method: str, *args: Any, **named: Any) -> Any:
        await self.made.wait()
        with WORK.doing("call", "", method):
            return await methodcaller(method, *args, **named)(self.target)


def build(target: str, args: Sequence[Any]) -> Any:
    """Make an object of the class at `package.module:Class`; nothing else of the package is imported."""
    return pkgutil.resolve_name(target)(*args)


def redirect_output(log: Path) -> None:
    """Send what libraries print to a file, not to the user's screen."""
    log.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
