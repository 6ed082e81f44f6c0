"""Python programs of unknown manners: each in a process without network, without children, and with limits."""

import contextlib
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trueline.rewards.linux import call_filter, die_with_parent, install_filter

FILE_BYTES = 16 * 2**20  # of one file, and so of what a program prints
ENVIRONMENT = {"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1"}  # NumPy takes address space for every thread
NO_FILTER = (
    "the network cannot be kept from code here (it takes Linux with seccomp on x86_64 or aarch64); "
    "set reward.options.network=true to run code that can use the network, and start processes"
)


@dataclass(frozen=True, slots=True)
class Limits:
    seconds: float
    memory_gib: float
    network: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    status: int | None  # None: it was out of time; below 0: minus the signal that ended it
    output: str
    error: str


def run_python(source: str, stdin: str, limits: Limits) -> Ended:
    """Run a program to its end or to its limits, in a folder of its own that is removed after it."""
    with (
        tempfile.TemporaryDirectory(prefix="trueline-code-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as error,
    ):
        program = Path(folder, "program.py")
        program.write_bytes(source.encode(errors="replace"))
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        status = run_program(program, (given, output, error), limits)
        return Ended(status, text_of(output), text_of(error))


def run_program(program: Path, streams: tuple[IO[bytes], IO[bytes], IO[bytes]], limits: Limits) -> int | None:
    instructions = call_filter(network=limits.network)
    if instructions is None and not limits.network:
        raise RuntimeError(NO_FILTER)

    bounds = resource_limits(limits)

    def confine() -> None:  # between fork and exec
        for kind, most in bounds.items():
            resource.setrlimit(kind, (most, most))
        die_with_parent()
        if instructions is not None:
            install_filter(instructions)

    command = [sys.executable, "-I", "-B", "-X", "utf8", str(program)]
    stdin, stdout, stderr = streams
    try:
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=program.parent,
            env=ENVIRONMENT,
            start_new_session=True,
            preexec_fn=confine,
        )
    except subprocess.SubprocessError:  # the limits are within this process's own, so that only the filter can fail
        if instructions is None:
            raise
        raise RuntimeError(NO_FILTER) from None
    return wait_or_kill(process, limits.seconds)


def resource_limits(limits: Limits) -> dict[int, int]:
    """At most what this process may have itself, for nobody can be given more."""
    wanted = {
        resource.RLIMIT_AS: int(limits.memory_gib * 2**30),
        resource.RLIMIT_CPU: math.ceil(limits.seconds) + 1,  # of all its threads
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    own = {kind: most for kind in wanted if (most := resource.getrlimit(kind)[1]) != resource.RLIM_INFINITY}
    memory = own.get(resource.RLIMIT_AS, math.inf)
    if wanted[resource.RLIMIT_AS] > memory:
        raise RuntimeError(
            f"reward.options.memory_gib={limits.memory_gib:g} is more than the {memory / 2**30:.2f} GiB that the "
            "reward's own process may have: lower it, or raise reward.memory_gib"
        )
    return {kind: min(most, own.get(kind, most)) for kind, most in wanted.items()}


def wait_or_kill(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself, and nothing of it is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(FILE_BYTES).decode(errors="replace")
