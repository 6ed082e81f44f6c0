"""Programs in the sandbox reach no network, file or process outside, and honest ones run."""

import ctypes
import itertools
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trueline.rewards.code import code
from trueline.usercode import linux, sandbox
from trueline.usercode.sandbox import ProgramLimits, ProgramResult, run_python

ADD = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3\nassert add(0, 0) == 0"


def run(source: str, seconds: float = 10.0, memory_gib: float = 1.0, stdin: str = "", **allowed: bool) -> ProgramResult:
    return run_python(source, stdin, ProgramLimits(seconds, memory_gib, **allowed))


# Network


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server whose queue takes connections without anybody to accept them."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


CONNECT = "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5)\nprint('connected')"


LOCAL_SOCKETS = ("AF_UNIX", "AF_NETLINK", "AF_VSOCK")


def test_there_is_no_network(port: int) -> None:
    ended = run(CONNECT.format(port=port))
    assert ended.status == 1
    assert "PermissionError" in ended.error
    for kind in ("AF_INET6", *LOCAL_SOCKETS):
        assert "PermissionError" in run(f"import socket\nsocket.socket(socket.{kind}, socket.SOCK_DGRAM)").error
    assert "PermissionError" in run("import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)").error
    assert run("import asyncio\nasync def f(): print('works')\nasyncio.run(f())").output == "works\n"


def test_network_can_be_allowed(port: int) -> None:
    assert code(CONNECT.format(port=port), label=[{"input": "", "output": "connected"}], network=True) == 1.0
    assert run("import socket\nprint(socket.getaddrinfo('localhost', 80)[0][4][1])", network=True).output == "80\n"
    for kind in LOCAL_SOCKETS:  # services of this machine are no network
        assert "PermissionError" in run(f"import socket\nsocket.socket(socket.{kind})", network=True).error


def test_without_a_filter_code_is_not_run_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "call_filter", lambda *, network, files: None)  # as on other systems
    with pytest.raises(RuntimeError, match=r"reward\.options\.network=true"):
        code(ADD, tests=TESTS)
    assert code(ADD, tests=TESTS, network=True) == 1.0


def test_every_machine_with_a_filter_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    filters = set()
    for machine in linux.ARCHITECTURES:
        monkeypatch.setattr(linux.platform, "machine", lambda machine=machine: machine)
        choices = itertools.product((True, False), repeat=2)
        filters |= {linux.call_filter(network=network, files=files) for network, files in choices}
    assert len(filters) == 8 and None not in filters
    monkeypatch.setattr(linux.platform, "machine", lambda: "riscv64")
    assert linux.call_filter(network=True, files=True) is None


def test_a_filter_that_the_kernel_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "call_filter", lambda *, network, files: b"\xff" * 8)
    with pytest.raises(RuntimeError, match="seccomp"):
        code(ADD, tests=TESTS)


# Attacks

ATTACK = """
import ctypes, os, resource, sys
parent, secret, folder = os.getppid(), {secret!r}, {folder!r}

def call(name, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc[name](*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

"""
ATTACKS = [
    # its parent, and other processes
    "open(f'/proc/{parent}/mem', 'r+b')",
    "open(f'/proc/{parent}/mem', 'rb')",
    "open(f'/proc/{parent}/environ')",
    "open(f'/proc/{parent}/oom_score_adj', 'w')",
    "os.readlink(f'/proc/{parent}/cwd')",
    "os.listdir('/proc')",
    "os.kill(parent, 0)",
    "os.kill(-1, 0)",
    "call('ptrace', 16, parent, 0, 0)",  # PTRACE_ATTACH
    "call('process_vm_readv', parent, None, 0, None, 0, 0)",
    "resource.prlimit(parent, resource.RLIMIT_CORE)",
    "os.sched_setaffinity(parent, {0})",
    "os.setpriority(os.PRIO_PROCESS, parent, os.getpriority(os.PRIO_PROCESS, parent))",
    "call('shmget', 0, 4096, 0o1600)",
    "open('/dev/shm/trueline-attack', 'w')",
    # reading
    "open(secret)",
    "os.listdir(folder)",
    "os.symlink(secret, 'mine')\nopen('mine')",
    "os.link(secret, 'mine')",
    "open('/etc/passwd')",
    "os.execv('/bin/cat', ['cat', secret])",
    # writing
    "open(folder + '/new', 'w')",
    "open(secret, 'a')",
    "os.truncate(secret, 0)",
    "os.open(secret, os.O_RDONLY | os.O_TRUNC)",
    "os.remove(secret)",
    "os.rename(secret, 'mine')",
    "os.rename('program.py', folder + '/new')",
    "os.mkdir(folder + '/new')",
    "os.chmod(secret, 0)",
    "os.chown(secret, os.getuid(), os.getgid())",
    "os.utime(secret)",
    "os.setxattr(secret, 'user.mine', b'')",
    "open(os.__file__, 'a')",
    "os.chmod(os.open(os.__file__, os.O_RDONLY), os.stat(os.__file__).st_mode & 0o777)",
    # rights
    "os.setuid(os.getuid() + 1)",
    "os.chroot('.')",
    "call('unshare', 0x10000000)",  # CLONE_NEWUSER
]


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A file that anybody on the machine may read and write, but no program of the model's."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    file = tmp_path / "secret"
    file.write_text("hidden")
    file.chmod(0o666)
    before = file.stat()
    yield file
    after = file.stat()
    assert (file.read_text(), os.listdir(tmp_path)) == ("hidden", ["secret"])
    assert (after.st_mode, after.st_uid, after.st_mtime_ns) == (before.st_mode, before.st_uid, before.st_mtime_ns)


@pytest.mark.parametrize("attack", ATTACKS)
def test_programs_reach_nothing_outside(attack: str, secret: Path) -> None:
    ended = run(ATTACK.format(secret=str(secret), folder=str(secret.parent)) + attack)
    assert (ended.status, ended.output) == (1, "")
    assert re.match("PermissionError: |OSError: .*cross-device", ended.error.splitlines()[-1])


def test_the_network_does_not_open_files(secret: Path) -> None:
    ended = run(f"open({str(secret)!r})", network=True)
    assert "PermissionError" in ended.error


def test_files_can_be_allowed(secret: Path) -> None:
    show = f"import os\nopen('mine', 'w').close()\nos.chmod('mine', 0o600)\nprint(open({str(secret)!r}).read())"
    assert code(show, label=[{"input": "", "output": "hidden"}], files=True) == 1.0
    assert code(show, label=[{"input": "", "output": "hidden"}]) == 0.0


def test_without_landlock_code_is_not_run_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "landlock_version", lambda: 0)  # as on older systems
    with pytest.raises(RuntimeError, match=r"reward\.options\.files=true"):
        code(ADD, tests=TESTS)
    assert code(ADD, tests=TESTS, files=True) == 1.0


@pytest.mark.parametrize("version", range(1, linux.landlock_version() + 1))
def test_older_versions_of_landlock_keep_files_too(version: int, secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "landlock_version", lambda: version)
    assert "PermissionError" in run(f"open({str(secret)!r})").error
    assert run("open('mine', 'w').write('x')\nprint(open('mine').read())").output == "x\n"


def test_programs_have_no_capabilities() -> None:
    """Not even those of the super-user, and Python has not brought them back."""
    show = "import ctypes, struct\nheld = ctypes.create_string_buffer(24)\n"
    show += "ctypes.CDLL(None).capget(struct.pack('Ii', 0x20080522, 0), held)\nprint(held.raw == bytes(24))"
    assert run(show).output == "True\n"


def test_who_runs_programs_cannot_be_traced() -> None:
    run("")
    assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0  # PR_GET_DUMPABLE


@pytest.mark.skipif(os.geteuid() != 0, reason="only the super-user can become another")
def test_the_super_users_programs_run_as_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    python = Path("/usr/bin/python3").resolve()
    if not python.exists():
        pytest.skip("needs a Python that everybody may use")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(sandbox, "INTERPRETER", [*sandbox.LIBRARIES, str(python)])
    monkeypatch.setattr(sandbox, "other_user", sandbox.other_user.__wrapped__)
    show = "import os\nprint(os.getresuid(), os.getresgid(), os.getgroups())\nopen('mine', 'w').write(input())"
    show += "\nprint(open('/dev/stdin').read(), open('mine').read())"
    assert run(show, stdin="x").output == f"{(65534,) * 3} {(65534,) * 3} []\nx x\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only the super-user can become another")
def test_a_python_that_nobody_can_reach_runs_as_the_super_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(sandbox, "INTERPRETER", [*sandbox.INTERPRETER, str(tmp_path)])
    monkeypatch.setattr(sandbox, "other_user", sandbox.other_user.__wrapped__)
    assert run("import os\nprint(os.getuid())").output == "0\n"


def test_a_sandbox_in_which_nothing_runs_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [f"{prefix}/lib" for prefix in sandbox.PREFIXES]
    monkeypatch.setattr(sandbox, "INTERPRETER", [path for path in sandbox.INTERPRETER if path not in own])
    with pytest.raises(
        RuntimeError, match=r"Python does not start in the sandbox \(status \d+\): .*Fatal Python error"
    ):
        code(
            ADD, tests=TESTS, memory_gib=0.75
        )  # limits that no other test has, for what has run once is not tried again


CALLS = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    found = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    print(found if found >= 0 else errno.errorcode[ctypes.get_errno()])
"""
SHOUT = """
import fcntl, os, socket, struct, termios
mine, other = socket.socketpair()
for attempt in (
    lambda: fcntl.fcntl(mine, fcntl.F_SETOWN, {victim}),
    lambda: fcntl.fcntl(mine, 15, struct.pack("ii", 1, {victim})),  # F_SETOWN_EX
    lambda: fcntl.fcntl(mine, fcntl.F_SETSIG, 9),
    lambda: fcntl.ioctl(mine, 0x8901, struct.pack("i", {victim})),  # FIOSETOWN
    lambda: fcntl.ioctl(mine, 0x8902, struct.pack("i", {victim})),  # SIOCSPGRP
    lambda: fcntl.fcntl(mine, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK),
    lambda: other.send(b"x"),
):
    try:
        print("done", attempt())
    except OSError as error:
        print(error.strerror)
"""


def test_memory_without_a_name_is_refused() -> None:
    """Its pages belong to a file that no limit of the process counts."""
    held = "import os\nheld = [os.memfd_create('x')]\nos.write(held[0], bytes(2**20))"
    ended = run(held, memory_gib=0.5)
    assert ended.status == 1 and "PermissionError" in ended.error
    assert "PermissionError" in run(held, memory_gib=0.5, files=True, network=True).error


@pytest.mark.parametrize(
    ("version", "allowed"),
    [
        (None, {}),
        (None, {"files": True}),
        (5, {}),
        (5, {"network": True}),
        (5, {"files": True}),
        (0, {"files": True}),
        (0, {"files": True, "network": True}),
    ],
)
def test_the_kernel_sends_no_signals_in_a_programs_name(
    version: int | None, allowed: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Landlock keeps them to the sandbox from version 6 on; the filter does so without it."""
    if version is not None:
        monkeypatch.setattr(linux, "landlock_version", lambda: version)
    with subprocess.Popen(["sleep", "1000"], **sandbox.other_user()) as victim:
        try:
            ended = run(SHOUT.format(victim=victim.pid), **allowed)
            refused = ["Operation not permitted"] * 3 + ["Inappropriate ioctl for device"] * 2
            assert ended.output.splitlines() == [*refused, "done 0", "done 1"]
            assert victim.poll() is None
        finally:
            victim.kill()


def test_calls_that_are_not_listed_are_refused() -> None:
    """Of old ones programs are told that they may not; of new ones, that there are none, so that they do without."""
    place = list(linux.ARCHITECTURES).index(linux.platform.machine())
    old = {"memfd_create": (319, 279), "sync": (162, 81), "vmsplice": (278, 75), "io_setup": (206, 0)}
    new = {"pidfd_open": 434, "io_uring_setup": 425, "memfd_secret": 447, "of a kernel to come": 4000}
    numbers = [*(row[place] for row in old.values()), *new.values()]
    ended = run(CALLS + "".join(f"call({number}, 0, 0)\n" for number in numbers))
    assert ended.output.split() == ["EPERM"] * len(old) + ["ENOSYS"] * len(new)
    listed = run(CALLS + f"call({linux.ALLOWED['getpid'][place]})").output
    assert int(listed) > 0


@pytest.mark.parametrize("command", ["F_SETPIPE_SZ", "F_SETLEASE", "F_NOTIFY"])
def test_commands_of_files_that_are_not_listed_are_refused(command: str) -> None:
    ended = run(f"import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.{command}, 2**20)")
    assert "PermissionError" in ended.error


def test_the_table_of_calls_is_that_of_the_kernels_headers() -> None:
    headers = [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h")]
    if not all(header.exists() for header in headers):
        pytest.skip("needs the kernel's headers")
    own, generic = (dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", header.read_text())) for header in headers)
    generic["newfstatat"] = generic["fstatat"]
    for name, row in (linux.ALLOWED | linux.WITH_NETWORK | linux.WITH_FILES | linux.WITH_RULES).items():
        for number, known in zip(row, (own, generic), strict=True):
            if name in known or number is None:
                assert known.get(name) == (None if number is None else str(number)), name


def test_files_that_are_allowed_do_not_lift_landlock(secret: Path) -> None:
    """Whoever may read all files is still kept from other processes' signals and memory."""
    given: list[dict[str, int]] = []
    own = linux.allow_only
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linux, "allow_only", lambda paths: given.append(paths) or own(paths))
        script = "import os\nos.mkdir('a')\nos.rename('program.py', 'a/b')\nprint(open({!r}).read())"
        assert run(script.format(str(secret)), files=True).output == "hidden\n"
    assert given == [{"/": linux.ALL}]
    show = "print([line for line in open('/proc/self/status') if line.startswith(('NoNewPrivs', 'Seccomp:'))])"
    assert run(show, files=True).output == "['NoNewPrivs:\\t1\\n', 'Seccomp:\\t2\\n']\n"
    for attack in ("open(f'/proc/{os.getppid()}/mem', 'rb')", "os.kill(os.getppid(), 0)"):
        assert "PermissionError" in run("import os\n" + attack, files=True).error


# What honest programs need

HONEST = [
    "import asyncio, bisect, collections, datetime, decimal, functools, hashlib, heapq, itertools, json, math, numpy",
    "import os, random, re, sqlite3, ssl, string, sys, tempfile, threading, typing, zlib\nos.urandom(1)",
    "import hashlib\nhashlib.md5(b'').hexdigest()",
    "import zoneinfo\nassert 'UTC' in zoneinfo.available_timezones()",
    "import numpy\nassert numpy.linalg.inv(numpy.eye(2)).sum() == 2",
    "import tempfile\ntempfile.NamedTemporaryFile().write(b'x')",
    "import pathlib, shutil\npathlib.Path('a').touch()\nshutil.copyfile('a', 'b')\nshutil.move('b', 'c')",
    "import os\nos.makedirs('a/b')\nos.replace('program.py', 'a/b/c')\nos.remove('a/b/c')\nos.removedirs('a/b')",
    "assert open('/dev/stdin').read() == 'given'\nopen('/dev/null', 'w').write('x')",
    "from concurrent.futures import ThreadPoolExecutor\nassert list(ThreadPoolExecutor(2).map(abs, [-1])) == [1]",
    "import resource\nresource.getrlimit(resource.RLIMIT_STACK)",
    "import sympy\nx = sympy.Symbol('x')\nassert sympy.integrate(2 * x, x) == x**2",
    "import numpy\na = numpy.random.default_rng(0).normal(size=(200, 200))\n"
    "assert (a @ a).shape == numpy.fft.fft2(a).shape\nnumpy.save('a', a)",
    "import json, re\nassert json.loads(re.sub('[0-9]+', '1', '{\"a\": 42}')) == {'a': 1}",
    "from decimal import Decimal, getcontext\ngetcontext().prec = 50\nassert str(Decimal(2).sqrt())[:4] == '1.41'",
    "import threading, queue\nq = queue.Queue()\nt = [threading.Thread(target=q.put, args=(i,)) for i in range(20)]\n"
    "for one in t: one.start()\nfor one in t: one.join(60)\nassert sorted(q.queue) == list(range(20))",
    "import asyncio\nasync def f():\n    return await asyncio.gather(asyncio.sleep(0.01), asyncio.to_thread(int))\n"
    "asyncio.run(f())",
    "import signal, time\nsignal.signal(signal.SIGALRM, lambda *a: None)\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\n"
    "signal.pause()",
    "import sqlite3\nbase = sqlite3.connect('base')\nbase.execute('create table a (b)')\nbase.commit()\nbase.close()",
    "import os, fcntl\nr, w = os.pipe()\nos.set_blocking(r, False)\nfcntl.flock(open('a', 'w'), fcntl.LOCK_EX)\n"
    "fcntl.lockf(open('a', 'w'), fcntl.LOCK_EX)\nassert not os.isatty(1)",
    "import mmap, shutil, os\nm = mmap.mmap(-1, 4096)\nm[:2] = b'ab'\nos.mkfifo('f')\nshutil.disk_usage('.')",
    "import ctypes, platform, time, uuid\nplatform.platform()\ntime.process_time()\nuuid.uuid4()",
    "import tempfile, zipfile, gzip, csv, pickle\nwith tempfile.TemporaryDirectory() as d:\n"
    "    zipfile.ZipFile(d + '/z', 'w').writestr('a', 'b')",
]


def test_honest_programs_run_many_at_a_time() -> None:
    """On a busy machine, with files and network or without."""
    cases = [(program, allowed) for program in HONEST for allowed in ({}, {"files": True, "network": True})]

    def judged(case: tuple[str, dict[str, bool]]) -> ProgramResult:
        return run(f"{case[0]}\nprint('done')", seconds=600, stdin="given", **case[1])

    with ThreadPoolExecutor(8) as threads:
        ended = list(threads.map(judged, cases))
    assert [one.error for one in ended if one.output != "done\n"] == []


@pytest.mark.parametrize("program", HONEST)
def test_honest_programs_run(program: str) -> None:
    assert code(program + "\nprint('done')", label=[{"input": "given", "output": "done"}]) == 1.0
