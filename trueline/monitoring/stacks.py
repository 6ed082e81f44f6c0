"""The processes of a run seen from outside: whether they live, and the stacks of their threads."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from trueline.monitoring.beats import ASKED, BEAT, STACKS, Beat, read_beat, thread_stacks

STACK_SECONDS = 5.0
SAME_SECONDS = 2.0  # by which the time of birth may differ, as the clock is set
GONE, STOPPED, ELSEWHERE = "gone", psutil.STATUS_STOPPED, "on another machine"
# A line of a process's own and of py-spy's: file and function, or function and file.
FRAMES = (
    re.compile(r'^ +File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)$', re.MULTILINE),
    re.compile(r"^ +(?P<name>\S+) \((?P<file>[^:()]+):(?P<line>\d+)\)$", re.MULTILINE),
)
MEETINGS = re.compile(r"torch/distributed/distributed_c10d|deepspeed/comm/")  # where ranks wait for each other


@dataclass(frozen=True, slots=True)
class Seen:
    """A process: what it says of itself, and what can be seen of it."""

    beat: Beat
    state: str
    stack: str = ""
    stopped_children: list[str] = field(default_factory=list)

    def collective(self) -> str:
        """Name the call in which it waits for other ranks, or nothing."""
        frames = [hit for pattern in FRAMES for hit in pattern.finditer(self.stack)]
        return next((hit["name"] for hit in frames if MEETINGS.search(hit["file"])), "")


def look(beat: Beat, folder: Path) -> Seen:
    process = process_of(beat)
    if process is None:
        return Seen(beat, ELSEWHERE if beat.host != socket.gethostname() else GONE)
    try:
        state = process.status()
        children = [] if state == STOPPED else [one for one in process.children() if one.status() == STOPPED]
        return Seen(beat, state, stack_of(beat, folder, state), [f"{one.name()}, pid {one.pid}" for one in children])
    except (psutil.Error, OSError):  # it went, with its files, while it was looked at
        return Seen(beat, GONE)


def process_of(beat: Beat) -> psutil.Process | None:
    """Return the living process that wrote a beat."""
    with suppress(psutil.Error):
        process = psutil.Process(beat.pid)
        if beat.host == socket.gethostname() and abs(process.create_time() - beat.born) < SAME_SECONDS:
            return None if process.status() == psutil.STATUS_ZOMBIE else process
    return None


def stack_of(beat: Beat, folder: Path, state: str) -> str:
    """Return the stacks of all threads: by py-spy where it is installed and allowed, or by asking the process."""
    if beat.pid == os.getpid():
        return thread_stacks()
    return spied(beat.pid) or ("" if state == STOPPED else asked(folder / beat.name))


def spied(pid: int) -> str:
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if tool is None:
        return ""
    command = [tool, "dump", "--nonblocking", "--pid", str(pid)]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=STACK_SECONDS, check=False)
        return done.stdout if done.returncode == 0 else ""
    return ""


def asked(name: Path) -> str:
    """Have a process write its stacks to a file; one whose interpreter is held by native code does not come to it."""
    file, request = Path(f"{name}{STACKS}"), Path(f"{name}{ASKED}")
    request.touch()
    deadline = time.monotonic() + STACK_SECONDS
    while request.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    answered = not request.exists()
    request.unlink(missing_ok=True)
    return file.read_text() if answered else ""


def other_beats(folder: Path, driver: str) -> list[Beat]:
    found = [read_beat(file) for file in sorted(folder.glob(f"*{BEAT}"))]
    return [beat for beat in found if beat is not None and beat.name != driver]
