"""What a process is doing, kept while it lasts, and told every second in a file that other processes can read."""

import json
import os
import socket
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
from types import FrameType

import psutil

BEAT_SECONDS = 1.0
BEAT, ASKED, STACKS = ".beat", ".asked", ".stacks"  # the last is written by a process that finds the one before
RUN = "run"  # name of the driver among the processes of a run


@dataclass(slots=True, eq=False, weakref_slot=True)
class Doing:
    kind: str  # phase, call, group, environment, reward, data or part (of a call)
    who: str
    what: str
    outer: "Doing | None"
    inner: int = 0  # things that are done inside of this one
    since: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Row:
    """Everything of one kind, by the same and about the same, that is being done."""

    kind: str
    who: str
    what: str
    waits: bool  # for something else that is told of
    count: int
    since: float  # of the oldest


@dataclass(frozen=True, slots=True)
class Beat:
    """What one process said of itself, and when."""

    name: str
    pid: int
    born: float  # tells it from a later process with the same number
    host: str
    written: float
    moved: float  # when something last came to its end, or was told to go on
    rows: list[Row]


class Work:
    """All that this process is doing. What its owner forgets to end is gone with its owner."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.all: weakref.WeakSet[Doing] = weakref.WeakSet()
        self.moved = time.time()
        self.recorder: Callable[[Doing], None] | None = None  # is told, under the lock, of what ends

    def begin(self, kind: str, who: str, what: str = "") -> Doing:
        # A part of a call is what the call does, not something else that it waits for.
        doing = Doing(kind, who, what, None if kind == "part" else OUTER.get())
        with self.lock:
            self.all.add(doing)
            if doing.outer is not None:
                doing.outer.inner += 1
        return doing

    def end(self, doing: Doing, *, well: bool = True) -> None:
        """Forget it; only what ends well has moved the run."""
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
        """Tell that long work goes on, though nothing has come to its end."""
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

    def rows(self) -> list[Row]:
        """Return what is being done, the oldest first."""
        alike: dict[tuple[str, str, str, bool], list[float]] = {}
        with self.lock:
            for one in list(self.all):
                alike.setdefault((one.kind, one.who, one.what, one.inner > 0), []).append(one.since)
        return sorted((Row(*key, len(times), min(times)) for key, times in alike.items()), key=lambda row: row.since)

    def beat(self, name: str) -> Beat:
        pid = os.getpid()
        born = psutil.Process(pid).create_time()
        return Beat(name, pid, born, socket.gethostname(), time.time(), self.moved, self.rows())


OUTER: ContextVar[Doing | None] = ContextVar("OUTER", default=None)
WORK = Work()


def write_beat(folder: Path, beat: Beat) -> None:
    with suppress(OSError):  # a disk that is full, or a folder that was removed
        aside = folder / f"{beat.name}{BEAT}.{beat.pid}"
        aside.write_text(json.dumps(asdict(beat)))
        aside.replace(folder / f"{beat.name}{BEAT}")
        if (asked := folder / f"{beat.name}{ASKED}").exists():
            aside.write_text(thread_stacks())
            aside.replace(asked.with_suffix(STACKS))
            asked.unlink()


def thread_stacks() -> str:
    """Return where all threads of this process are; a signal's handler must not look, for frames change under it."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        "\n".join(
            [f"Thread {names.get(ident, ident)}, the innermost first:", *map(frame_line, traceback.walk_stack(at))]
        )
        for ident, at in sys._current_frames().items()
    )


def frame_line(frame: tuple[FrameType, int]) -> str:
    return f'  File "{frame[0].f_code.co_filename}", line {frame[1]} in {frame[0].f_code.co_name}'


def read_beat(file: Path) -> Beat | None:
    try:
        told = json.loads(file.read_text())
        return Beat(**{**told, "rows": [Row(**row) for row in told["rows"]]})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def start_beating(folder: Path, name: str) -> None:
    """Tell from now on, in a file of `folder`, what this process does."""

    def go_on() -> None:
        while True:
            write_beat(folder, WORK.beat(name))
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=go_on, name="beats", daemon=True).start()


def clear_beats(folder: Path) -> None:
    for file in (file for kind in (f"{BEAT}*", ASKED, STACKS) for file in folder.glob(f"*{kind}")):
        file.unlink(missing_ok=True)
