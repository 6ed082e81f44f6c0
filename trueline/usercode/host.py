"""The run's side of user code: start its processes, call them with a deadline that kills, and restart them."""

import asyncio
import contextlib
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil

from trueline.usercode.child import OWN_METHODS, SENT_AS
from trueline.usercode.failures import CallTimeout, PolicyError, ProcessLost, ProgramEnded, ToolRaised, UserCodeFailure
from trueline.usercode.line import Line

START_SECONDS = 120.0
END_SECONDS = 5
PING_SECONDS = 2.0  # in which a process replies whose interpreter is not held up as a whole
# Each arena takes 64 MiB of the addresses that a child may have, and without this there are up to 8 for every core.
FEW_ARENAS = {"MALLOC_ARENA_MAX": "2"}
ENCODER = json.JSONEncoder(default=str)
MARK = "TRUELINE_USER_CODE"  # environment variable by which a host finds what user code has started
# The kernel kills a child when the thread that started it ends. This one ends with the run.
STARTER = ThreadPoolExecutor(1, thread_name_prefix="user-code")

Method = Callable[..., Any]  # of the class that serves calls in the child
Since = Callable[[], float | None]  # when the wait for a reply began; None while the wait is not the child's fault


@dataclass(frozen=True, slots=True)
class UserCode:
    """What processes load, and their limits."""

    load: Callable[[list[str], dict[str, Any]], Any]  # makes, in the child, the object that serves calls
    specification: list[str]
    options: dict[str, Any]
    section: str  # of the configuration, which has timeout_seconds and memory_gib
    key: str
    timeout_seconds: float
    memory_gib: float
    threads: int = 0  # calls at a time; 0: one, in the main thread

    def command(self) -> list[str]:
        loader = f"{self.load.__module__}:{self.load.__qualname__}"
        return [sys.executable, "-m", "trueline.usercode.child", loader, str(self.memory_gib), str(self.threads)]

    def name(self) -> str:
        return f"{self.section}.{self.key}={' '.join(self.specification)}"


class ChildProcess:
    """A process of user code. It belongs to no event loop, so that a run can take over what a check has started."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.command, self.log = command, log
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen[bytes] | None = None
        self.line: socket.socket
        self.end: Callable[[], Any]
        self.about: Any = None  # what it says of the code that it has loaded

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def open(self) -> None:
        self.process = STARTER.submit(self._popen).result()
        # At the latest when this object is dropped.
        self.end = weakref.finalize(self, kill_all, self.process, self.line, self.mark)

    def _popen(self) -> subprocess.Popen[bytes]:
        self.line, theirs = socket.socketpair()
        variables = {**FEW_ARENAS, **os.environ, MARK: self.mark}
        with theirs, self.log.open("a") as log:
            stdin = stdout = theirs.fileno()
            return subprocess.Popen(
                self.command, stdin=stdin, stdout=stdout, stderr=log, env=variables, start_new_session=True
            )

    def kill(self) -> None:
        if self.process is not None:
            self.end()
        self.process = self.about = None

    async def wait_for_end(self) -> str:
        """Return how a process ended that has closed its line."""
        assert self.process is not None
        try:
            status = await asyncio.to_thread(self.process.wait, END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"died of {signal.Signals(-status).name}" if status < 0 else f"died with exit status {status}"


def kill_all(process: subprocess.Popen[bytes], line: socket.socket, mark: str) -> None:
    """Kill a process with all that it started: its session, and whatever left that but still carries its mark."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for other in psutil.process_iter(["environ"]):
        if (other.info["environ"] or {}).get(MARK) == mark:
            with contextlib.suppress(psutil.NoSuchProcess):
                other.kill()
    threading.Thread(target=process.wait, daemon=True).start()  # so that no zombie is left
    line.close()


@dataclass(slots=True, eq=False)
class PendingCall:
    episode: str
    what: str
    reply: asyncio.Future[Any]
    has_begun: bool = False  # so that it may be what holds up or ends the process

    def settle(self, outcome: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(outcome)
            self.reply.exception()  # the caller may be gone


class Host:
    """One process, in which many episodes may run; where one of them ends it, the others may start again."""

    def __init__(self, code: UserCode, log: Path, child: ChildProcess | None = None) -> None:
        self.code, self.log = code, log
        self.child = child if child and child.is_running() else ChildProcess(code.command(), log)
        self.episodes = 0
        self.life = 0  # how often it was started
        self.end = ""  # why it was last ended
        self.is_stopped = False  # for good
        self.pending: dict[int, PendingCall] = {}
        self.numbers = itertools.count(1)
        self.opening = asyncio.Lock()
        self.reader: asyncio.Task[None] | None = None
        self.line: Line
        self.kept: set[asyncio.Task[Any]] = set()
        self.free_threads = asyncio.Semaphore(max(code.threads, 1))

    @property
    def about(self) -> Any:
        return self.child.about

    async def start(self) -> None:
        async with self.opening:
            if self.is_stopped:
                raise UserCodeFailure(self.end)
            if not self.child.is_running():
                await self._open()
            elif self.reader is None:  # another event loop has started it
                await self._connect()
                before, self.life = self.child.log, self.life + 1
                await self._begin("", "log_to", {"file": str(self.log)}, START_SECONDS)
                with self.log.open("ab") as log:
                    log.write(before.read_bytes())
                before.unlink()
                self.child.log = self.log

    async def _open(self) -> None:
        if self.reader is not None:
            await asyncio.wait([self.reader])  # it settles the calls of the process that has ended
        self.child.kill()
        try:
            self.child.open()
        except OSError as error:
            raise self.failure(f"its process cannot be started: {error}") from None
        self.life += 1
        await self._connect()
        given = {"specification": self.code.specification, "options": self.code.options}
        try:
            self.child.about = await self._begin("", "open", given, START_SECONDS)
        finally:
            if self.about is None:
                self.child.kill()

    async def _connect(self) -> None:
        self.line = await Line.connect(self.child.line.dup(), self._receive)
        self.reader = asyncio.create_task(self._read(self.line))

    async def release(self) -> ChildProcess:
        """Hand the process over to another event loop; one that is busy is killed."""
        if self.pending:
            self.child.kill()
        child, self.child = self.child, ChildProcess(self.code.command(), self.log)
        if self.reader is not None:
            self.reader.cancel()
        await self.stop()
        return child

    async def call(
        self, method: Method, given: dict[str, Any], place: "EpisodePlace | None" = None, since: Since | None = None
    ) -> Any:
        """Call once a thread is free; a caller that is cancelled leaves the call its thread and its deadline."""
        await self.free_threads.acquire()
        send = partial(self._call, method, given, place, since)
        reply = send() if self._is_open() else self._keep(self._start_and(send))
        return await asyncio.shield(reply)

    def _call(
        self, method: Method, given: dict[str, Any], place: "EpisodePlace | None", since: Since | None
    ) -> "asyncio.Future[Any]":
        """Send a call that has a thread; the thread is free again with the reply."""
        reply = None
        try:
            if place is not None:
                place.settle()
            episode = place.episode if place else ""
            reply = self._begin(episode, method.__name__, given, self.code.timeout_seconds, since)
        finally:
            if reply is None:
                self.free_threads.release()
        reply.add_done_callback(lambda ended: self.free_threads.release())
        return reply

    async def _start_and(self, send: "Callable[[], asyncio.Future[Any]]") -> Any:
        is_started = False
        try:
            await self.start()
            is_started = True
        finally:
            if not is_started:
                self.free_threads.release()
        return await send()

    def _is_open(self) -> bool:
        is_settled = self.reader is not None and self.about is not None and not self.opening.locked()
        return is_settled and not self.is_stopped and self.child.is_running()

    def _keep(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start work that goes on even if nobody waits for it."""
        task = asyncio.create_task(work)
        self.kept.add(task)
        task.add_done_callback(self.kept.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return task

    def _begin(
        self, episode: str, method: str, given: dict[str, Any], seconds: float, since: Since | None = None
    ) -> "asyncio.Future[Any]":
        """Send a call, and return the reply to come, which is watched from its deadline on."""
        what = "its import" if method == "open" else f"`{method}`" if self.code.threads else "a call"
        begun, loop = time.monotonic(), asyncio.get_running_loop()

        def silent() -> float | None:
            quiet = since() if since else begun
            return None if quiet is None else max(begun, quiet)

        number, reply = self._send(episode, what, method, given)
        key = "" if method in OWN_METHODS else f" ({self.code.section}.timeout_seconds)"
        why = f"took more than {seconds:g} s{key} and was killed"
        timer = loop.call_later(seconds, lambda: self._keep(self._watch(number, silent, seconds, why)))

        def end(ended: "asyncio.Future[Any]") -> None:
            timer.cancel()
            del self.pending[number]

        reply.add_done_callback(end)
        return reply

    async def _watch(self, number: int, silent: Since, seconds: float, why: str) -> None:
        """Wait for a reply whose deadline may be over, and blame the call that holds it up."""
        while (call := self.pending.get(number)) and not call.reply.done():
            quiet = silent()
            left = seconds if quiet is None else max(quiet + seconds - time.monotonic(), 0.0)
            await asyncio.wait({call.reply}, timeout=left)
            if not call.reply.done() and (silent() or math.inf) + seconds <= time.monotonic():
                await self._blame(number, why)

    def _send(self, episode: str, what: str, method: str, given: dict[str, Any]) -> "tuple[int, asyncio.Future[Any]]":
        if self.child.process is None:
            raise ProcessLost(self.end)
        number, reply = next(self.numbers), asyncio.get_running_loop().create_future()
        try:
            self.line.send(ENCODER.encode({"id": number, "method": method, "arguments": given}))
        except (TypeError, ValueError) as error:
            raise self.failure(f"its call cannot be sent as JSON: {error}") from None
        self.pending[number] = PendingCall(episode, what, reply)
        return number, reply

    async def _read(self, line: Line) -> None:
        process = self.child.process
        try:
            found = await line.ended
        finally:
            line.transport.close()
        why, kind = f"its reply cannot be read: {found}" if found else "", UserCodeFailure
        if self.child.process is process and not why:
            why, kind = f"its process {await self.child.wait_for_end()}", ProgramEnded
        if self.child.process is process:
            is_single = self.about is None or not self.code.threads
            self._kill(self._at_work() or [*self.pending][: int(is_single)], why, kind)

    def _receive(self, message: dict[str, Any]) -> None:
        call = self.pending.get(message["id"])
        if call is None or call.reply.done():
            return
        if "begun" in message:
            call.has_begun = True
        elif "result" in message:
            call.reply.set_result(message["result"])
        else:
            text = message["text"]
            kind = next((kind for kind, name in SENT_AS.items() if name == message["failed"]), UserCodeFailure)
            call.settle(self.failure(text, kind) if issubclass(kind, UserCodeFailure) else kind(text))

    async def _blame(self, number: int, why: str) -> None:
        """Kill the process for a call that is overdue, or for all at work if the process does not reply to anything."""
        life, suspects = self.life, self._at_work() or [number]
        if suspects != [number]:
            with contextlib.suppress(ProcessLost):
                ping, reply = self._send("", "a sign of life", "ping", {})
                await asyncio.wait({reply}, timeout=PING_SECONDS)
                del self.pending[ping]
                suspects = [number] if reply.done() else self._at_work() or [number]
        if self.life == life and number in self.pending and not self.pending[number].reply.done():
            self._kill(suspects, f"{self.pending[suspects[0]].what} {why}", CallTimeout)

    def _at_work(self) -> list[int]:
        return [number for number, call in self.pending.items() if call.has_begun and not call.reply.done()]

    def _kill(self, suspects: list[int], why: str, kind: type[UserCodeFailure]) -> None:
        """Kill the process; an episode that is the only suspect fails, and the others in it are lost."""
        self.child.kill()
        self.end = f"{self.code.name()}: its process was killed because of another episode: {why}"
        is_known = len({self.pending[number].episode for number in suspects}) == 1
        for number, call in self.pending.items():
            lost = ProcessLost(self.end, suspect=number in suspects)
            call.settle(self.failure(why, kind) if lost.suspect and is_known else lost)

    def failure(self, reason: str, kind: type[UserCodeFailure] = UserCodeFailure) -> UserCodeFailure:
        return kind(reason, self.code.name(), log=self.log.name if kind is ProgramEnded else "")

    async def stop(self) -> None:
        self.end, self.is_stopped = f"{self.code.name()}: its process was stopped", True
        self.child.kill()
        for call in self.pending.values():
            call.settle(UserCodeFailure(self.end))
        if self.reader is not None:
            await asyncio.wait([self.reader])  # it reads to the end


class EpisodeCode(Protocol):
    """What serves the episodes of a process; `episode` names whose state is meant."""

    def describe(self) -> dict[str, Any]: ...
    async def close(self, episode: str) -> None: ...


class EpisodeHosts:
    """Several hosts of the same code; an episode stays in the one with the fewest, or in one for itself alone."""

    def __init__(self, code: UserCode, processes: int, log: Path) -> None:
        self.code, self.log = code, log
        self.hosts = [Host(code, log) for _ in range(processes)]
        self.alone: list[Host] = []  # each with the one episode that it was made for
        self.free_alone = asyncio.Semaphore(processes)
        self.free_places = asyncio.Semaphore(processes * code.threads)

    async def place(self, *, alone: bool) -> "EpisodePlace":
        """Return a place as soon as one is free; until then nothing of the episode has begun, and no deadline runs."""
        if alone:
            await self.free_alone.acquire()
            self.alone.append(Host(self.code, self.log))
        else:
            await self.free_places.acquire()
        host = self.alone[-1] if alone else min(self.hosts, key=lambda one: one.episodes)
        host.episodes += 1
        return EpisodePlace(host, self)

    async def leave(self, host: Host) -> None:
        host.episodes -= 1
        if host in self.alone:
            self.alone.remove(host)
            self.free_alone.release()
            await host.stop()
        else:
            self.free_places.release()

    async def stop(self) -> None:
        await asyncio.gather(*(host.stop() for host in [*self.hosts, *self.alone]))


class EpisodePlace:
    def __init__(self, host: Host, hosts: EpisodeHosts) -> None:
        self.host, self.hosts, self.episode, self.life = host, hosts, uuid.uuid4().hex, 0
        self.is_suspect = False  # whether it may have been what ended the process

    async def call(self, method: Method, since: Since | None = None, **given: Any) -> Any:
        try:
            return await self.host.call(method, {"episode": self.episode, **given}, self, since)
        except ProcessLost as lost:
            self.is_suspect |= lost.suspect
            raise

    def settle(self) -> None:
        """Stay with the process that runs now; what the episode had in another one is lost with that."""
        if self.life not in (0, self.host.life):
            raise ProcessLost(self.host.end)
        self.life = self.host.life

    async def close(self) -> None:
        """Let the episode give back what it holds; what fails in that is in the log, and harms nobody."""
        try:
            if self.life and self.life == self.host.life and self.host.child.is_running():
                with contextlib.suppress(UserCodeFailure, PolicyError, ToolRaised):
                    await self.host.call(EpisodeCode.close, {"episode": self.episode}, self)
        finally:
            await self.hosts.leave(self.host)
