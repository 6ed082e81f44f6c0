"""The processes that environments, tools and agents run in, as the run sees them: calls with a deadline that kills."""

import asyncio
import contextlib
import itertools
import json
import math
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueline.config.environment import EnvironmentConfig
from trueline.environments.base import EnvironmentFailure, EnvironmentLost, WrongResult
from trueline.rewards.child import ChildProcess, end_of

START_SECONDS = 120.0
PING_SECONDS = 2.0  # in which a process answers whose interpreter is not held up as a whole

Since = Callable[[], float | None]  # when the wait for an answer began; None while the wait is not the child's fault


class Mistake(Exception):
    """What the policy asked of a tool cannot be done; it is told so."""


class Raised(Exception):
    """A user's tool raised an exception; the policy is told which."""


@dataclass(slots=True, eq=False)
class Waiting:
    episode: str
    what: str
    answer: asyncio.Future[Any]
    begun: bool = False  # so that it may be what holds up or ends the process


@dataclass(frozen=True, slots=True)
class Program:
    """What a host loads."""

    kind: str  # a row of process.STAGES
    specification: list[str]
    key: str  # of the configuration, for errors
    config: EnvironmentConfig

    def command(self) -> list[str]:
        limits = str(self.config.memory_gib), str(self.config.episodes_per_process)
        return [sys.executable, "-m", "trueline.environments.process", self.kind, *limits]

    def words(self) -> str:
        return f"environment.{self.key}={' '.join(self.specification)}"


@dataclass(slots=True, eq=False)
class Host:
    """One process with many episodes; where one of them ends it, the others may begin anew."""

    program: Program
    log: Path
    child: ChildProcess = field(init=False)
    about: dict[str, Any] = field(default_factory=dict)  # what it says of what it loaded
    episodes: int = 0
    life: int = 0  # how often it was started
    ended: str = ""  # why it was last ended
    stopped: bool = False  # for good
    waiting: dict[int, Waiting] = field(default_factory=dict)
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    reader: "asyncio.Task[None] | None" = None
    threads: asyncio.Semaphore = field(init=False)  # of the process that no call has

    def __post_init__(self) -> None:
        self.child = ChildProcess(self.program.command(), self.log)
        self.threads = asyncio.Semaphore(self.program.config.episodes_per_process)

    async def start(self) -> None:
        async with self.opening:
            if self.child.runs():
                return
            if self.stopped:
                raise EnvironmentFailure(self.ended)
            try:
                await self.child.open()
            except OSError as error:
                raise self.failure(f"its process cannot be started: {error}") from None
            self.life += 1
            self.reader = asyncio.create_task(self._read())
            config = self.program.config
            given = {"specification": self.program.specification, "options": config.options}
            self.about = await self._ask("", "open", given, START_SECONDS, None)

    async def ask(self, place: "Place", method: str, given: dict[str, Any], since: Since | None = None) -> Any:
        """Ask once a thread is free; whoever is cancelled meanwhile leaves the call its thread and its deadline."""
        await self.threads.acquire()
        return await asyncio.shield(self._ask_in_thread(place, method, given, since))

    async def _ask_in_thread(self, place: "Place", method: str, given: dict[str, Any], since: Since | None) -> Any:
        try:
            await self.start()
            place.settle()
            return await self._ask(place.episode, method, given, self.program.config.timeout_seconds, since)
        finally:
            self.threads.release()

    async def _ask(self, episode: str, method: str, given: dict[str, Any], seconds: float, since: Since | None) -> Any:
        number = next(self.numbers)
        answer = asyncio.get_running_loop().create_future()
        self.waiting[number] = Waiting(episode, f"`{method}`", answer)
        begun = time.monotonic()

        def silent() -> float | None:
            quiet = since() if since else begun
            return None if quiet is None else max(begun, quiet)

        try:
            await self._send({"id": number, "episode": episode, "method": method, "arguments": given})
            while not await settled(answer, seconds, silent):
                if (silent() or math.inf) + seconds <= time.monotonic():
                    await self._blame(number, f"took more than {seconds:g} s and was killed")
            return answer.result()
        finally:
            self.waiting.pop(number, None)

    async def _send(self, message: dict[str, Any]) -> None:
        process = self.child.process
        if process is None or process.stdin is None:
            raise EnvironmentLost(self.ended)
        with contextlib.suppress(ConnectionError):  # who reads will see its end
            process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
            await process.stdin.drain()

    async def _read(self) -> None:
        process = self.child.process
        assert process is not None and process.stdout is not None
        try:
            while line := await process.stdout.readline():
                self._hear(json.loads(line))
            why = f"its process {await end_of(process)} (see {self.log.name})"
        except ValueError as error:  # no JSON, or a line above the limit
            why = f"its answer cannot be read: {error}"
        if self.child.process is process:
            self._end(self._at_work(), why)

    def _hear(self, message: dict[str, Any]) -> None:
        waiting = self.waiting.get(message["id"])
        if waiting is None or waiting.answer.done():
            return
        if "begun" in message:
            waiting.begun = True
        elif "result" in message:
            waiting.answer.set_result(message["result"])
        elif "mistake" in message:
            waiting.answer.set_exception(Mistake(message["mistake"]))
        elif "raised" in message:
            waiting.answer.set_exception(Raised(message["raised"]))
        else:
            failure = WrongResult if "unfit" in message else EnvironmentFailure
            waiting.answer.set_exception(self.failure(message["error"], failure))

    async def _blame(self, number: int, why: str) -> None:
        """End the process for a call that is overdue, or for those at work when it does not answer anything."""
        life, ping = self.life, next(self.numbers)
        answer = asyncio.get_running_loop().create_future()
        self.waiting[ping] = Waiting("", "a sign of life", answer)
        with contextlib.suppress(TimeoutError, EnvironmentFailure):
            await self._send({"id": ping, "episode": "", "method": "ping"})
            await asyncio.wait_for(asyncio.shield(answer), PING_SECONDS)
        self.waiting.pop(ping, None)
        if self.life != life or number not in self.waiting or self.waiting[number].answer.done():
            return
        suspects = [number] if answer.done() else self._at_work() or [number]
        self._end(suspects, f"{self.waiting[suspects[0]].what} {why}")

    def _at_work(self) -> list[int]:
        return [number for number, call in self.waiting.items() if call.begun and not call.answer.done()]

    def _end(self, suspects: list[int], why: str) -> None:
        """Kill the process; an episode that alone is suspect fails, and those beside it are lost."""
        self.child.kill()
        self.ended = f"{self.program.words()}: its process was ended for another episode: {why}"
        known = len({self.waiting[number].episode for number in suspects}) == 1
        for number, waiting in self.waiting.items():
            if not waiting.answer.done():
                suspect = number in suspects
                lost = EnvironmentLost(self.ended, suspect=suspect)
                waiting.answer.set_exception(self.failure(why) if suspect and known else lost)
                waiting.answer.exception()  # whoever asked may be gone

    def failure(self, reason: str, kind: type[EnvironmentFailure] = EnvironmentFailure) -> EnvironmentFailure:
        return kind(f"{self.program.words()}: {reason}")

    async def stop(self) -> None:
        self.ended, self.stopped = f"{self.program.words()}: its process was stopped", True
        self.child.kill()
        for waiting in self.waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(EnvironmentFailure(self.ended))
        if self.reader is not None:
            await self.reader  # it reads to the end


async def settled(answer: "asyncio.Future[Any]", seconds: float, since: Since) -> bool:
    """Wait for an answer as long as it may take; tell whether it is there."""
    begun = since()
    left = seconds if begun is None else max(begun + seconds - time.monotonic(), 0.0)
    await asyncio.wait({answer}, timeout=left)
    return answer.done()


class Hosts:
    """Several hosts of one program; an episode stays in the one with the fewest, or in one for itself alone."""

    def __init__(self, program: Program, log: Path) -> None:
        self.program, self.log = program, log
        self.hosts = [Host(program, log) for _ in range(program.config.processes)]
        self.alone: list[Host] = []  # each with the one episode that it was made for
        self.rooms = asyncio.Semaphore(program.config.processes)  # for those
        self.places = asyncio.Semaphore(program.config.processes * program.config.episodes_per_process)

    async def place(self, *, alone: bool) -> "Place":
        """Return a place as soon as one is free; until then nothing of the episode has begun, and no deadline runs."""
        if alone:
            await self.rooms.acquire()
            self.alone.append(Host(self.program, self.log))
        else:
            await self.places.acquire()
        host = self.alone[-1] if alone else min(self.hosts, key=lambda one: one.episodes)
        host.episodes += 1
        return Place(host, self)

    async def left(self, host: Host) -> None:
        host.episodes -= 1
        if host in self.alone:
            self.alone.remove(host)
            self.rooms.release()
            await host.stop()
        else:
            self.places.release()

    async def stop(self) -> None:
        await asyncio.gather(*(host.stop() for host in [*self.hosts, *self.alone]))


class Place:
    """An episode's place in a host."""

    def __init__(self, host: Host, hosts: Hosts) -> None:
        self.host, self.hosts, self.episode, self.life = host, hosts, uuid.uuid4().hex, 0
        self.suspect = False  # whether it may have been what ended the process

    async def ask(self, method: str, since: Since | None = None, **given: Any) -> Any:
        try:
            return await self.host.ask(self, method, given, since)
        except EnvironmentLost as lost:
            self.suspect |= lost.suspect
            raise

    def settle(self) -> None:
        """Stay with the process that runs now; what the episode had in another one went with that."""
        if self.life not in (0, self.host.life):
            raise EnvironmentLost(self.host.ended)
        self.life = self.host.life

    async def close(self) -> None:
        """Let the episode give back what it holds; what fails in that is in the log, and harms nobody."""
        try:
            if self.life and self.life == self.host.life and self.host.child.runs():
                with contextlib.suppress(EnvironmentFailure, Mistake):
                    await self.host.ask(self, "close", {})
        finally:
            await self.hosts.left(self.host)
