"""The process that user code runs in: one JSON object a line in, one a line out; it starts without torch.

`python -m trueline.usercode.child MODULE:LOADER MEMORY_GIB THREADS`. The loader makes the object that serves calls of
the specification and options in the first request. With 0 threads, calls run one at a time in the main thread, where
signals work and no event loop is in the way. Else many episodes run at a time: coroutines share a loop, and other
functions have a thread.
"""

import asyncio
import faulthandler
import importlib
import json
import os
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from typing import Any

from trueline.usercode.failures import NoSuchFunction, PolicyError, ProgramEnded, ToolRaised, WrongResult, explain
from trueline.usercode.linux import die_with_parent

# Failures whose message is enough, by the names that both sides know; all others are sent with their traceback.
SENT_AS: dict[type[Exception], str] = {
    PolicyError: "policy_error",
    WrongResult: "wrong_result",
    ProgramEnded: "ended",
    ToolRaised: "raised",
}

CHUNK = 2**18  # bytes that are read at a time


class UserCodeServer:
    """Serves requests. Each reports first that it has begun, so that the host knows which may hold up the process."""

    def __init__(self, load: Callable[[list[str], dict[str, Any]], Any], memory_gib: float) -> None:
        self.load, self.memory_gib = load, memory_gib
        self.code: Any = None
        self.tasks: set[asyncio.Task[None]] = set()
        # Private copies, for the standard streams are the user code's: its input is empty, and it prints into the log.
        self.requests, self.replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        for stream in (self.requests, self.replies):
            os.register_at_fork(after_in_child=stream.close)  # what user code forks must not keep them open

    def serve_in_turn(self) -> None:
        for line in self.requests:
            request = json.loads(line)
            self.reply({"id": request["id"], "begun": True})
            with self.reporting(request["id"]):
                self.reply({"id": request["id"], "result": self.run(request["method"], request["arguments"])})

    async def serve_together(self, threads: int) -> None:
        loop, pool, ended = asyncio.get_running_loop(), ThreadPoolExecutor(threads), asyncio.Event()
        together = threading.Barrier(threads + 1)
        for _ in range(threads):  # they start now, so that their stacks are no part of the memory that is limited later
            pool.submit(together.wait)
        together.wait()
        loop.set_default_executor(pool)

        def read() -> None:
            parts: list[bytes] = []
            while data := self.requests.read1(CHUNK):
                parts.append(data)
                if b"\n" in data:
                    *lines, rest = b"".join(parts).split(b"\n")
                    loop.call_soon_threadsafe(self.begin, lines)
                    parts = [rest]
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        await ended.wait()

    def begin(self, lines: list[bytes]) -> None:
        """Begin several requests; all are reported before the code of any runs."""
        requests = [json.loads(line) for line in lines]
        self.reply(*({"id": request["id"], "begun": True} for request in requests))
        for request in requests:
            task = asyncio.create_task(self.answer(request))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def answer(self, request: dict[str, Any]) -> None:
        method, arguments = request["method"], request["arguments"]
        with self.reporting(request["id"]):
            if method == "open":
                result = await asyncio.to_thread(self.run, method, arguments)
            else:
                result = self.run(method, arguments)
            self.reply({"id": request["id"], "result": result if method in OWN_METHODS else await result})

    def run(self, method: str, arguments: dict[str, Any]) -> Any:
        own = OWN_METHODS.get(method)
        return own(self, **arguments) if own else methodcaller(method, **arguments)(self.code)

    def open(self, specification: list[str], options: dict[str, Any]) -> Any:
        """Load the code, and return what it says of itself."""
        self.code = self.load(specification, options)
        about, statm = self.code.describe(), Path("/proc/self/statm")
        if statm.exists():  # memory beyond what there is by now: a leak ends in an error, not in the kernel's killer
            used = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            limit = used + int(self.memory_gib * 2**30)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return about

    def ping(self) -> None:
        """Show that the process as a whole is not held up."""

    def log_to(self, file: str) -> None:
        log = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    @contextmanager
    def reporting(self, number: int) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # noqa: BLE001  (the boundary where user code runs; sys.exit and cancellation too)
            kind = next((name for kind, name in SENT_AS.items() if isinstance(error, kind)), "error")
            text = str(error) if kind != "error" or isinstance(error, NoSuchFunction) else explain(error)
            self.reply({"id": number, "failed": kind, "text": text})

    def reply(self, *messages: dict[str, Any]) -> None:
        self.replies.write("".join(json.dumps(message, default=str) + "\n" for message in messages))
        self.replies.flush()


OWN_METHODS: dict[str, Callable[..., Any]] = {
    method.__name__: method for method in (UserCodeServer.open, UserCodeServer.ping, UserCodeServer.log_to)
}


def main(loader: str, memory_gib: float, threads: int) -> None:
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    module, _, name = loader.partition(":")
    server = UserCodeServer(vars(importlib.import_module(module))[name], memory_gib)
    try:
        asyncio.run(server.serve_together(threads)) if threads else server.serve_in_turn()
    except KeyboardInterrupt:
        traceback.print_exc()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
