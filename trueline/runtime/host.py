"""Inside a process of a run: it makes one object and forwards calls to it."""

import asyncio
import logging
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

from trueline.monitoring.heartbeat import WORK, start_beating
from trueline.monitoring.timing import START, Milestones


class Location(NamedTuple):
    node: str
    gpus: list[str]
    pid: int


class ActorHost:
    def __init__(self, log: str) -> None:
        redirect_output(Path(log))
        use_interface(ray.util.get_node_ip_address())
        start_beating(Path(log).parent, Path(log).stem)
        START.end("process")
        self.making = WORK.begin("call", "", "make")  # unpickling the arguments of `make` imports modules first

    def make(self, target: str, args: Sequence[Any]) -> None:
        """Import and build the object; an error ends the process, and callers get the last line of its log."""
        self.target = None
        try:
            make = pkgutil.resolve_name(target)
            START.end("imports")
            self.target = make(*args)
            START.end("rest")
            WORK.end(self.making)
        finally:
            if self.target is None:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)

    def call(self, method: str, *args: Any, **named: Any) -> Any:
        with WORK.doing("call", "", method):
            return methodcaller(method, *args, **named)(self.target)

    def milestones(self) -> Milestones:
        return START.ends

    def location(self) -> Location:
        """Return where this process runs, for those that share its GPUs or kill it."""
        return Location(ray.get_runtime_context().get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()], os.getpid())


def use_interface(address: str) -> None:
    """Let gloo, NCCL and vLLM use the interface of this node's address, unless the user has chosen one."""
    named = (name for name, found in psutil.net_if_addrs().items() if any(one.address == address for one in found))
    if (interface := next(named, None)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        os.environ.setdefault("VLLM_HOST_IP", address)


class AsyncActorHost(ActorHost):
    """The same for coroutines, which Ray may start in any order."""

    def __init__(self, log: str) -> None:
        super().__init__(log)
        # Ray warns of a blocking `get` wherever it is; those of this process are in threads of their own.
        logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
        self.loop = asyncio.get_running_loop()  # the object's
        self.located, self.made = asyncio.Event(), asyncio.Event()

    def location(self) -> Location:
        self.loop.call_soon_threadsafe(self.located.set)
        return super().location()

    async def make(self, target: str, args: Sequence[Any]) -> None:  # type: ignore[override]
        await self._in_loop(self._make(target, args))

    async def _make(self, target: str, args: Sequence[Any]) -> None:
        await self.located.wait()  # the controller must be able to kill this process before anything here can hang
        super().make(target, args)
        self.made.set()

    async def ping(self) -> None:
        """Return once the object is made; this is no activity of the process."""
        await self._in_loop(self.made.wait())

    async def call(self, method: str, *args: Any, **named: Any) -> Any:
        return await self._in_loop(self._call(method, *args, **named))

    async def _in_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run in the object's loop: each concurrency group has its own loop and thread."""
        if asyncio.get_running_loop() is self.loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def _call(self, method: str, *args: Any, **named: Any) -> Any:
        await self.made.wait()
        with WORK.doing("call", "", method):
            return await methodcaller(method, *args, **named)(self.target)


def build(target: str, args: Sequence[Any]) -> Any:
    """Make an object of the class at `package.module:Class`."""
    return pkgutil.resolve_name(target)(*args)


def redirect_output(log: Path) -> None:
    """Send the output of libraries to a file instead of the user's screen."""
    log.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
