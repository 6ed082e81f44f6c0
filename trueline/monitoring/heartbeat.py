"""Heartbeats: every second, each process writes what it does to a file; other processes read it."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from trueline.files import write_atomically

BEAT_SECONDS = 1.0
BEAT, REQUEST, STACKS = ".beat", ".asked", ".stacks"  # a process that finds a request writes its stacks
RUN = "run"  # name of the driver among the processes of a run
STACK_SECONDS = 5.0
SAME_SECONDS = 2.0  # by which start times may differ, as the clock is set
GONE, STOPPED, ELSEWHERE = "gone", psutil.STATUS_STOPPED, "on another machine"
# A line of a process's own and of py-spy's: file and function, or function and file.
FRAMES = (
    re.compile(r'^ +File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)$', re.MULTILINE),
    re.compile(r"^ +(?P<name>\S+) \((?P<file>[^:()]+):(?P<line>\d+)\)$", re.MULTILINE),
)
MEETINGS = re.compile(r"torch/distributed/distributed_c10d|deepspeed/comm/")  # where ranks wait for each other


@dataclass(slots=True, eq=False, weakref_slot=True)
class Activity:
    kind: str  # phase, call, group, environment, reward, data or part (of a call)
    who: str
    what: str
    outer: "Activity | None"
    inner: int = 0  # activities inside this one
    since: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class ActivityGroup:
    kind: str  # the same in all, as who and what
    who: str
    what: str
    waits: bool  # for another activity
    count: int
    since: float  # of the oldest


@dataclass(frozen=True, slots=True)
class Heartbeat:
    name: str
    pid: int
    born: float  # tells it from a later process with the same number
    host: str
    written: float
    moved: float  # time of the last progress
    rows: list[ActivityGroup]


class ActivityLog:
    """All activities of this process. One that its owner forgets to end disappears with its owner."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.all: weakref.WeakSet[Activity] = weakref.WeakSet()
        self.moved = time.time()
        self.recorder: Callable[[Activity], None] | None = None  # called, under the lock, with each activity that ends

    def begin(self, kind: str, who: str, what: str = "") -> Activity:
        # A part of a call is what the call does, not something else that it waits for.
        doing = Activity(kind, who, what, None if kind == "part" else OUTER.get())
        with self.lock:
            self.all.add(doing)
            if doing.outer is not None:
                doing.outer.inner += 1
        return doing

    def end(self, doing: Activity, *, well: bool = True) -> None:
        """End an activity; only one that ends well is progress."""
        with self.lock:
            if doing not in self.all:
                return
            self.all.discard(doing)
            if doing.outer is not None:
                doing.outer.inner -= 1
            if self.recorder is not None:
                self.recorder(doing)
        if well:
            self.move()

    def move(self) -> None:
        """Record progress of long work that has not ended."""
        self.moved = time.time()

    @contextmanager
    def doing(self, kind: str, who: str, what: str = "") -> Iterator[None]:
        doing, well = self.begin(kind, who, what), False
        if kind == "phase":
            self.move()
        token = OUTER.set(doing)
        try:
            yield
            well = True
        finally:
            OUTER.reset(token)
            self.end(doing, well=well)

    def rows(self) -> list[ActivityGroup]:
        alike: dict[tuple[str, str, str, bool], list[float]] = {}
        with self.lock:
            for one in list(self.all):
                alike.setdefault((one.kind, one.who, one.what, one.inner > 0), []).append(one.since)
        groups = [ActivityGroup(*key, len(times), min(times)) for key, times in alike.items()]
        return sorted(groups, key=lambda row: row.since)

    def beat(self, name: str) -> Heartbeat:
        born, host = psutil.Process().create_time(), socket.gethostname()
        return Heartbeat(name, os.getpid(), born, host, time.time(), self.moved, self.rows())


OUTER: ContextVar[Activity | None] = ContextVar("OUTER", default=None)
WORK = ActivityLog()


def write_beat(folder: Path, beat: Heartbeat) -> None:
    with suppress(OSError):  # the disk is full, or the folder was removed
        ending = f"{BEAT}.{beat.pid}"  # two processes may have one name while one of them ends
        write_atomically(folder / f"{beat.name}{BEAT}", json.dumps(asdict(beat)), ending=ending)
        if (request := folder / f"{beat.name}{REQUEST}").exists():
            write_atomically(request.with_suffix(STACKS), thread_stacks(), ending=ending)
            request.unlink()


def thread_stacks() -> str:
    """Return the stacks of all threads; not for signal handlers, because frames change under them."""
    names, lines = {thread.ident: thread.name for thread in threading.enumerate()}, []
    for ident, innermost in sys._current_frames().items():
        lines.append(f"Thread {names.get(ident, ident)}, the innermost first:")
        for frame, line in traceback.walk_stack(innermost):
            lines.append(f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}')
    return "\n".join(lines)


def read_beat(file: Path) -> Heartbeat | None:
    try:
        beat = json.loads(file.read_text())
        return Heartbeat(**{**beat, "rows": [ActivityGroup(**row) for row in beat["rows"]]})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def start_beating(folder: Path, name: str) -> None:
    def keep_beating() -> None:
        while True:
            write_beat(folder, WORK.beat(name))
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=keep_beating, name="beats", daemon=True).start()


def clear_beats(folder: Path) -> None:
    for kind in (f"{BEAT}*", REQUEST, STACKS):
        for file in folder.glob(f"*{kind}"):
            file.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class SeenProcess:
    beat: Heartbeat
    state: str
    stack: str = ""
    stopped_children: list[str] = field(default_factory=list)

    def collective(self) -> str:
        """Name the call in which it waits for other ranks, or nothing."""
        frames = [hit for pattern in FRAMES for hit in pattern.finditer(self.stack)]
        return next((hit["name"] for hit in frames if MEETINGS.search(hit["file"])), "")


def look_at_process(beat: Heartbeat, folder: Path) -> SeenProcess:
    if (process := process_of(beat)) is None:
        return SeenProcess(beat, ELSEWHERE if beat.host != socket.gethostname() else GONE)
    try:
        state = process.status()
        children = [] if state == STOPPED else [one for one in process.children() if one.status() == STOPPED]
        if beat.pid == os.getpid():
            stack = thread_stacks()
        else:  # from py-spy where it is installed and allowed, or from the process
            stack = run_py_spy(beat.pid) or ("" if state == STOPPED else request_stacks(folder / beat.name))
        return SeenProcess(beat, state, stack, [f"{one.name()}, pid {one.pid}" for one in children])
    except (psutil.Error, OSError):  # it ended meanwhile
        return SeenProcess(beat, GONE)


def process_of(beat: Heartbeat) -> psutil.Process | None:
    """Return the living process that wrote a beat."""
    with suppress(psutil.Error):
        process = psutil.Process(beat.pid)
        if beat.host == socket.gethostname() and abs(process.create_time() - beat.born) < SAME_SECONDS:
            return None if process.status() == psutil.STATUS_ZOMBIE else process
    return None


def run_py_spy(pid: int) -> str:
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    command = [tool or "py-spy", "dump", "--nonblocking", "--pid", str(pid)]
    with suppress(OSError, subprocess.SubprocessError):  # it is not installed, not allowed, or too slow
        return subprocess.run(command, capture_output=True, text=True, timeout=STACK_SECONDS, check=True).stdout
    return ""


def request_stacks(name: Path) -> str:
    """Have a process write its stacks to a file; native code that holds the interpreter prevents that."""
    file, request = Path(f"{name}{STACKS}"), Path(f"{name}{REQUEST}")
    request.touch()
    deadline = time.monotonic() + STACK_SECONDS
    while request.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    if not request.exists():
        return file.read_text()
    request.unlink(missing_ok=True)
    return ""


def other_beats(folder: Path, driver: str) -> list[Heartbeat]:
    found = map(read_beat, sorted(folder.glob(f"*{BEAT}")))
    return [beat for beat in found if beat is not None and beat.name != driver]
