"""A process of user code that can be killed with all that it started."""

import asyncio
import contextlib
import os
import signal
import uuid
from pathlib import Path

import psutil

END_SECONDS = 5
LONGEST_LINE = 64 * 2**20
# Each arena takes 64 MiB of the addresses that a child may have, and else there are up to 8 for every core.
FEW_ARENAS = {"MALLOC_ARENA_MAX": "2"}
MARK = "TRUELINE_REWARD_PROCESS"  # environment variable by which what user code started is found again


class ChildProcess:
    """A child that talks by lines over its standard streams; what it writes to its standard error goes to the log."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.command, self.log = command, log
        self.mark = uuid.uuid4().hex
        self.process: asyncio.subprocess.Process | None = None
        self.killed: asyncio.subprocess.Process | None = None  # the last one

    def runs(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def open(self) -> None:
        with self.log.open("a") as output:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                limit=LONGEST_LINE,
                start_new_session=True,
                env={**FEW_ARENAS, **os.environ, MARK: self.mark},
            )

    def kill(self) -> None:
        """Kill the child with all that it started: its session, and whatever left that but still carries its mark."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for other in psutil.process_iter(["environ"]):
            if (other.info["environ"] or {}).get(MARK) == self.mark:
                with contextlib.suppress(psutil.NoSuchProcess):
                    other.kill()
        self.process, self.killed = None, self.process

    async def stop(self) -> None:
        self.kill()
        if self.killed is not None:
            await end_of(self.killed)


async def end_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await process.stdout.read()  # to its end; what is left open complains when the loop is closed
            await process.wait()
    status = process.returncode
    if status is None:
        return "closed its answers"
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"died with exit status {status}"
