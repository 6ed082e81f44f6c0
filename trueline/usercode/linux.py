"""Linux only: children that end with their parent, a filter of system calls (seccomp), and Landlock.

By Landlock a process, even of root, gives up all files except those that it names.
"""

import ctypes
import os
import platform
import signal
import stat
import struct
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def parse_table(table: str) -> dict[str, tuple[int | None, ...]]:
    """Return system calls with their numbers in the order of ARCHITECTURES; - means that a machine has none."""
    words = table.split()
    numbers = [None if word == "-" else int(word) for word in words if word == "-" or word.isdigit()]
    return dict(zip(words[::3], zip(numbers[::2], numbers[1::2], strict=True), strict=True))


ALLOWED = parse_table(
    # memory; none that is held by a file without a name, which no limit of the process counts
    "brk 12 214 mmap 9 222 munmap 11 215 mremap 25 216 mprotect 10 226 madvise 28 233 msync 26 227 mincore 27 232 "
    "membarrier 324 283 "
    # threads and time
    "exit 60 93 exit_group 231 94 futex 202 98 set_robust_list 273 99 get_robust_list 274 100 set_tid_address 218 96 "
    "rseq 334 293 arch_prctl 158 - sched_yield 24 124 sched_getaffinity 204 123 sched_getparam 143 121 "
    "sched_getscheduler 145 120 sched_get_priority_max 146 125 sched_get_priority_min 147 126 "
    "sched_rr_get_interval 148 127 getcpu 309 168 time 201 - gettimeofday 96 169 clock_gettime 228 113 "
    "clock_getres 229 114 clock_nanosleep 230 115 nanosleep 35 101 times 100 153 alarm 37 - setitimer 38 103 "
    "getitimer 36 102 pause 34 - restart_syscall 219 128 "
    # signals that it gets, none that it sends
    "rt_sigaction 13 134 rt_sigprocmask 14 135 rt_sigreturn 15 139 rt_sigpending 127 136 rt_sigsuspend 130 133 "
    "rt_sigtimedwait 128 137 sigaltstack 131 132 "
    # open files
    "read 0 63 write 1 64 readv 19 65 writev 20 66 pread64 17 67 pwrite64 18 68 preadv 295 69 pwritev 296 70 "
    "preadv2 327 286 pwritev2 328 287 lseek 8 62 close 3 57 close_range 436 436 dup 32 23 dup2 33 - dup3 292 24 "
    "pipe 22 - pipe2 293 59 ftruncate 77 46 fallocate 285 47 fsync 74 82 fdatasync 75 83 flock 73 32 "
    "fadvise64 221 223 sendfile 40 71 copy_file_range 326 285 poll 7 - ppoll 271 73 select 23 - pselect6 270 72 "
    "epoll_create 213 - epoll_create1 291 20 epoll_ctl 233 21 epoll_wait 232 - epoll_pwait 281 22 "
    "epoll_pwait2 441 441 eventfd 284 - eventfd2 290 19 timerfd_create 283 85 timerfd_settime 286 86 "
    "timerfd_gettime 287 87 signalfd 282 - signalfd4 289 74 "
    # files by name, which Landlock sees
    "open 2 - openat 257 56 creat 85 - stat 4 - fstat 5 80 lstat 6 - newfstatat 262 79 statx 332 291 access 21 - "
    "faccessat 269 48 faccessat2 439 439 readlink 89 - readlinkat 267 78 getdents 78 - getdents64 217 61 getcwd 79 17 "
    "chdir 80 49 fchdir 81 50 rename 82 - renameat 264 38 renameat2 316 276 mkdir 83 - mkdirat 258 34 rmdir 84 - "
    "unlink 87 - unlinkat 263 35 link 86 - linkat 265 37 symlink 88 - symlinkat 266 36 mknod 133 - mknodat 259 33 "
    "umask 95 166 statfs 137 43 fstatfs 138 44 getxattr 191 8 lgetxattr 192 9 fgetxattr 193 10 listxattr 194 11 "
    "llistxattr 195 12 flistxattr 196 13 "
    # the process itself
    "execve 59 221 wait4 61 260 waitid 247 95 getpid 39 172 getppid 110 173 gettid 186 178 getuid 102 174 "
    "geteuid 107 175 getgid 104 176 getegid 108 177 getresuid 118 148 getresgid 120 150 getgroups 115 158 "
    "getpgid 121 155 getpgrp 111 - getsid 124 156 getpriority 140 141 getrlimit 97 163 setrlimit 160 164 "
    "getrusage 98 165 sysinfo 99 179 uname 63 160 getrandom 318 278 capget 125 90 "
    # pairs of sockets, which reach nobody else
    "sendto 44 206 recvfrom 45 207 sendmsg 46 211 recvmsg 47 212 shutdown 48 210 getsockname 51 204 "
    "getpeername 52 205 getsockopt 55 209 setsockopt 54 208 "
)
WITH_NETWORK = parse_table(
    "connect 42 203 bind 49 200 listen 50 201 accept 43 202 accept4 288 242 sendmmsg 307 269 recvmmsg 299 243"
)
WITH_FILES = parse_table(  # changes of files that are not written to, and news of them, which Landlock does not see
    "truncate 76 45 chmod 90 - fchmod 91 52 fchmodat 268 53 fchmodat2 452 452 chown 92 - fchown 93 55 lchown 94 - "
    "fchownat 260 54 utime 132 - utimes 235 - futimesat 261 - utimensat 280 88 setxattr 188 5 lsetxattr 189 6 "
    "fsetxattr 190 7 setxattrat 463 463 removexattr 197 14 lremovexattr 198 15 fremovexattr 199 16 "
    "removexattrat 466 466 file_setattr 469 469 inotify_init 253 - inotify_init1 294 26 inotify_add_watch 254 27 "
    "inotify_rm_watch 255 28 "
)
WITH_RULES = parse_table(
    "socket 41 198 socketpair 53 199 clone 56 220 clone3 435 435 prctl 157 167 prlimit64 302 261 fcntl 72 25 "
    "ioctl 16 29"
)
# Commands that reach no other process. Those that name an owner of a file would have the kernel send it signals.
FCNTL = {
    **{"F_DUPFD": 0, "F_GETFD": 1, "F_SETFD": 2, "F_GETFL": 3, "F_SETFL": 4, "F_GETLK": 5, "F_SETLK": 6, "F_SETLKW": 7},
    **{"F_GETOWN": 9, "F_OFD_GETLK": 36, "F_OFD_SETLK": 37, "F_OFD_SETLKW": 38, "F_DUPFD_CLOEXEC": 1030},
    **{"F_GETPIPE_SZ": 1032},
}
IOCTL = {
    **{"TCGETS": 0x5401, "TCGETS2": 0x802C542A, "TIOCGWINSZ": 0x5413, "FIONREAD": 0x541B, "FIONBIO": 0x5421},
    **{"FIONCLEX": 0x5450, "FIOCLEX": 0x5451, "FICLONE": 0x40049409},
}
PRCTL = {
    **{"PR_GET_PDEATHSIG": 2, "PR_GET_DUMPABLE": 3, "PR_SET_NAME": 15, "PR_GET_NAME": 16, "PR_GET_SECCOMP": 21},
    **{"PR_GET_NO_NEW_PRIVS": 39},
}

# Instructions of the filter (linux/bpf_common.h), where they look (linux/seccomp.h), and what they decide.
LOAD, AND, IF_EQUAL, IF_AT_LEAST, IF_BITS, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24
ALLOW, KILL = 0x7FFF0000, 0x80000000
NOT_PERMITTED, NO_SUCH_CALL, NOT_FOR_THIS_FILE = 0x00050001, 0x00050026, 0x00050019
NEW_CALLS = 424  # from this number on; programs do without these on kernels that lack them
X32_NUMBERS = 0x40000000  # x86_64 knows its calls by a second set of numbers, from here on
CLONE_THREAD, SOCKET_TYPES, STREAM, AF_INET, AF_INET6, THIS_PROCESS = 0x10000, 0xF, 1, 2, 10, 0
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 4, 22, 38, 2
CAPABILITIES_OF_THIS_PROCESS = struct.pack("Ii", 0x20080522, 0)  # linux/capability.h, version 3

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls, by the same numbers on every machine
VERSION_ONLY, PATH_BENEATH = 1, 1
# linux/landlock.h: executing, reading a file and listing a folder; writing a file; all that can be done with a file
# alone; and how many kinds of access there are, by the version of Landlock.
READ, WRITE, OF_FILES = 0b1101, 0b10, 0b1100_0000_0000_0111
KINDS = {1: 13, 2: 14, 3: 15, 4: 15}
NEWEST_KINDS = 16
SIGNALS_AND_SOCKETS = 0b11  # to processes outside, from version 6 on
ALL = (1 << NEWEST_KINDS) - 1

Instruction = tuple[int, int, int, int]  # operation, steps to skip if true, and if false, operand
REFUSE_ELSE_ALLOW: list[Instruction] = [(RETURN, 0, 0, NOT_PERMITTED), (RETURN, 0, 0, ALLOW)]
LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, however busy it is."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prctl(option: int, *values: int) -> None:
    """Set an option of this process; other systems than Linux have none."""
    padded = map(ctypes.c_ulong, (*values, 0, 0, 0, 0)[:4])
    if sys.platform == "linux" and LIBC.prctl(option, *padded):
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def drop_capabilities() -> None:
    """Drop every capability irrevocably; no executed program gets one back."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if sys.platform == "linux" and LIBC.capset(CAPABILITIES_OF_THIS_PROCESS, bytes(24)):
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")


def call_filter(*, network: bool, files: bool) -> bytes | None:
    """Return a filter that allows the calls of honest programs only; None if this machine has no filters."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        return None
    place, special = list(ARCHITECTURES).index(machine), rules_of(network)
    rules = [(LOAD, 0, 0, ARCHITECTURE), (IF_EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, KILL)]
    rules += [(LOAD, 0, 0, NUMBER), (IF_AT_LEAST, 0, 1, X32_NUMBERS), (RETURN, 0, 0, NOT_PERMITTED)]
    for name, row in (ALLOWED | (WITH_NETWORK if network else {}) | (WITH_FILES if files else {}) | WITH_RULES).items():
        number, then = row[place], special.get(name, [(RETURN, 0, 0, ALLOW)])
        rules += [] if number is None else [(IF_EQUAL, 0, len(then), number), *then]
    rules += [(IF_AT_LEAST, 0, 1, NEW_CALLS), (RETURN, 0, 0, NO_SUCH_CALL), (RETURN, 0, 0, NOT_PERMITTED)]
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)


def rules_of(network: bool) -> dict[str, list[Instruction]]:
    second = (LOAD, 0, 0, SECOND_ARGUMENT)
    return {
        # Sockets of this machine alone lead to its services, such as the one that starts containers.
        "socket": only(FIRST_ARGUMENT, [AF_INET, AF_INET6] if network else []),
        # asyncio needs a pair of streams
        "socketpair": [second, (AND, 0, 0, SOCKET_TYPES), (IF_EQUAL, 1, 0, STREAM), *REFUSE_ELSE_ALLOW],
        "clone": [(LOAD, 0, 0, FIRST_ARGUMENT), (IF_BITS, 1, 0, CLONE_THREAD), *REFUSE_ELSE_ALLOW],
        "clone3": [(RETURN, 0, 0, NO_SUCH_CALL)],  # its flags cannot be seen; libc then takes clone
        # A program that lifts the death signal would outlive its parent.
        "prctl": only(FIRST_ARGUMENT, PRCTL.values()),
        "prlimit64": only(FIRST_ARGUMENT, [THIS_PROCESS]),
        "fcntl": only(SECOND_ARGUMENT, FCNTL.values()),
        "ioctl": only(SECOND_ARGUMENT, IOCTL.values(), NOT_FOR_THIS_FILE),
    }


def only(argument: int, values: Collection[int], otherwise: int = NOT_PERMITTED) -> list[Instruction]:
    """Let a call through where an argument has one of these values."""
    looks = [(IF_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return [(LOAD, 0, 0, argument), *looks, (RETURN, 0, 0, otherwise), (RETURN, 0, 0, ALLOW)]


def install_filter(instructions: bytes) -> None:
    """Install a filter for this process, which has no privileges, and all its programs, irrevocably."""
    rules, count = ctypes.create_string_buffer(instructions), len(instructions) // struct.calcsize("HBBI")
    program = ctypes.create_string_buffer(struct.pack("HP", count, ctypes.addressof(rules)))  # struct sock_fprog
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))


def landlock_version() -> int:
    """Return the version of this machine's Landlock, or 0 where it has none."""
    with suppress(OSError):
        return call_landlock(CREATE_RULESET, None, 0, VERSION_ONLY) if sys.platform == "linux" else 0
    return 0


@contextmanager
def allow_only(paths: Mapping[str, int]) -> Iterator[int]:
    """Yield a ruleset of Landlock as an open file: the access to each path and below. Missing paths are skipped."""
    handled = (1 << KINDS.get(landlock_version(), NEWEST_KINDS)) - 1
    attributes = struct.pack("QQQ", handled, 0, SIGNALS_AND_SOCKETS if landlock_version() >= 6 else 0)
    with closing_file(call_landlock(CREATE_RULESET, attributes, len(attributes), 0)) as ruleset:
        for path, access in paths.items():
            with suppress(FileNotFoundError, PermissionError), closing_file(os.open(path, os.O_PATH)) as place:
                kinds = access & handled & (ALL if stat.S_ISDIR(os.fstat(place).st_mode) else OF_FILES)
                call_landlock(ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", kinds, place), 0)
        yield ruleset


@contextmanager
def closing_file(file: int) -> Iterator[int]:
    try:
        yield file
    finally:
        os.close(file)


def restrict_files(ruleset: int) -> None:
    """Restrict this process and its programs to a ruleset, irrevocably."""
    call_landlock(RESTRICT_SELF, ruleset, 0)


def call_landlock(number: int, *arguments: int | bytes | None) -> int:
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in (number, *arguments)]
    result = int(LIBC.syscall(*wide))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
