"""A sandbox for untrusted Python programs: no network, children and files, and limits on time and memory."""

import contextlib
import functools
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from trueline.usercode import linux

CODE_SECONDS = 10.0  # for the program of one completion, unless options set another limit
START_SECONDS = 60.0  # for Python without a program
FILE_BYTES = 16 * 2**20  # of one file, and so of what a program prints
ENVIRONMENT = {"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1"}  # NumPy takes address space for every thread
NO_FILTER = (
    "the network cannot be kept from code here (it takes Linux with seccomp on x86_64 or aarch64); "
    "set {place}.options.network=true to run code that can use the network, and start processes"
)
NO_LANDLOCK = (
    "files cannot be kept from code here (it takes Linux 5.13 or newer, with Landlock switched on); set "
    "{place}.options.files=true to run code that can read, and outside of its folder write, what its user can"
)
NOBODY = 65534  # the user who owns nothing
PREFIXES = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store", "/usr/share/zoneinfo")
INTERPRETER = [  # what Python reads until a program runs, and while it runs
    *(sys.executable, os.path.realpath(sys.executable), *LIBRARIES),
    *(f"{prefix}/{part}" for prefix in PREFIXES for part in ("lib", "lib64", "pyvenv.cfg", "ssl/openssl.cnf")),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/ssl/openssl.cnf", "/etc/pki/tls/openssl.cnf"),
    *("/dev/zero", "/dev/random", "/dev/urandom"),
]
NAMES_AND_CERTIFICATES = [  # with the network
    *("/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf"),
    *("/etc/ssl/certs", "/etc/pki", "/etc/ca-certificates", "/usr/share/ca-certificates"),
]

Streams = tuple[IO[bytes] | int, IO[bytes] | int, IO[bytes] | int]


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    seconds: float
    memory_gib: float
    network: bool = False
    files: bool = False
    place: str = "reward"  # where the configuration has these options


@dataclass(frozen=True, slots=True)
class ProgramResult:
    status: int | None  # None: it was out of time; below 0: minus the signal that ended it
    output: str
    error: str


def run_python(source: str, stdin: str, limits: ProgramLimits) -> ProgramResult:
    """Run a program to its end or its limits, in a temporary folder of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="trueline-code-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile(dir=folder) as given,  # there, it can be opened as /dev/stdin too
        tempfile.TemporaryFile(dir=folder) as output,
        tempfile.TemporaryFile(dir=folder) as error,
    ):
        program = Path(folder, "program.py")
        program.write_bytes(source.encode(errors="replace"))
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        give_to_nobody(folder, program, given.fileno(), output.fileno(), error.fileno())
        status = wait_or_kill(start_confined(program, (given, output, error), limits), limits.seconds)
        return ProgramResult(status, text_of(output), text_of(error))


def give_to_nobody(*files: str | Path | int) -> None:
    """Change the owner of files, by name or open, to the user of programs."""
    for file in files if other_user() else ():
        os.chown(file, NOBODY, NOBODY)


@functools.cache
def other_user() -> dict[str, Any]:
    """Return the user of programs for subprocess: those of root run as nobody, if nobody can read Python."""
    if os.geteuid() != 0:
        return {}
    nobody: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    places = [path for path in (*INTERPRETER, tempfile.gettempdir()) if os.path.isdir(path)]
    command = [sys.executable, "-I", "-c", "import os, sys\nfor path in sys.argv[1:]: os.listdir(path)", *places]
    try:
        tried = subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=False, **nobody)
    except (OSError, subprocess.SubprocessError):  # Python is out of reach, or this super-user cannot become another
        return {}
    return {} if tried.returncode else nobody


def start_confined(program: Path, streams: Streams, limits: ProgramLimits) -> subprocess.Popen[bytes]:
    """Start a program within its limits; it ends with the thread that started it, at the latest."""
    instructions = linux.call_filter(network=limits.network, files=limits.files)
    if instructions is None and not limits.network:
        raise RuntimeError(NO_FILTER.format(place=limits.place))
    if not limits.files and not linux.landlock_version():
        raise RuntimeError(NO_LANDLOCK.format(place=limits.place))
    command, (stdin, stdout, stderr) = [sys.executable, "-I", "-B", "-X", "utf8", str(program)], streams
    options = {"cwd": program.parent, "env": ENVIRONMENT, "start_new_session": True, **other_user()}
    bounds = resource_limits(limits)
    # Other processes of the same user, such as the program, can then not trace this one nor open its memory in /proc.
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    paths = reachable(program.parent, limits)
    with linux.allow_only(paths) if linux.landlock_version() else contextlib.nullcontext() as ruleset:

        def confine() -> None:  # between fork and exec
            for kind, most in bounds.items():
                resource.setrlimit(kind, (most, most))
            linux.drop_capabilities()
            linux.die_with_parent()
            if ruleset is not None:
                linux.restrict_files(ruleset)
            if instructions is not None:
                linux.install_filter(instructions)

        try:
            return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, preexec_fn=confine, **options)
        except subprocess.SubprocessError:  # the limits are within this process's own, so that only the filter can fail
            if instructions is None:
                raise
            raise RuntimeError(NO_FILTER.format(place=limits.place)) from None


def reachable(folder: Path, limits: ProgramLimits) -> dict[str, int]:
    """Return the access rights of a program by path; all other paths are closed."""
    if limits.files:  # even so, Landlock keeps it from other processes
        return {"/": linux.ALL}
    read = dict.fromkeys([*INTERPRETER, *(NAMES_AND_CERTIFICATES if limits.network else ())], linux.READ)
    return {**read, os.devnull: linux.READ | linux.WRITE, str(folder): linux.ALL}


def resource_limits(limits: ProgramLimits) -> dict[int, int]:
    """Return a program's limits, at most those of this process itself."""
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
            f"{limits.place}.options.memory_gib={limits.memory_gib:g} is more than the {memory / 2**30:.2f} GiB that "
            f"the {limits.place}'s own process may have: lower it, or raise {limits.place}.memory_gib"
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
