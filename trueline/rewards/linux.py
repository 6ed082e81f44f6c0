"""What only Linux offers: children that end with their parent, and a filter of system calls (seccomp)."""

import ctypes
import os
import platform
import signal
import struct
import sys

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def numbered(table: str) -> dict[str, tuple[int | None, ...]]:
    """Return system calls with their numbers in the order of ARCHITECTURES; - stands where a machine has none."""
    words = table.split()
    numbers = [None if word == "-" else int(word) for word in words if word == "-" or word.isdigit()]
    return dict(zip(words[::3], zip(numbers[::2], numbers[1::2], strict=True), strict=True))


WITH_RULES = numbered("socket 41 198 socketpair 53 199 clone 56 220 clone3 435 435 prctl 157 167 prlimit64 302 261")
REFUSED = numbered(
    # new processes, and other ones: their end, memory, files, limits and turns
    "fork 57 - vfork 58 - kill 62 129 tkill 200 130 tgkill 234 131 rt_sigqueueinfo 129 138 rt_tgsigqueueinfo 297 240 "
    "pidfd_send_signal 424 424 ptrace 101 117 process_vm_readv 310 270 process_vm_writev 311 271 pidfd_getfd 438 438 "
    "kcmp 312 272 process_madvise 440 440 migrate_pages 256 238 move_pages 279 239 setpriority 141 140 "
    "ioprio_set 251 30 sched_setaffinity 203 122 sched_setattr 314 274 sched_setparam 142 118 "
    "sched_setscheduler 144 119 "
    # what processes of a user share without a file
    "shmget 29 194 shmat 30 196 shmctl 31 195 semget 64 190 semop 65 193 semctl 66 191 semtimedop 220 192 "
    "msgget 68 186 msgsnd 69 189 msgrcv 70 188 msgctl 71 187 mq_open 240 180 mq_unlink 241 181 "
    "add_key 248 217 request_key 249 218 keyctl 250 219 "
    # ways around the filter, and doors to the kernel that no program needs
    "io_uring_setup 425 425 unshare 272 97 setns 308 268 open_by_handle_at 304 265 bpf 321 280 "
    "perf_event_open 298 241 userfaultfd 323 282 "
)
UNSEEN_BY_LANDLOCK = numbered(  # changes of files that are not written to, and news of them
    "truncate 76 45 chmod 90 - fchmod 91 52 fchmodat 268 53 fchmodat2 452 452 chown 92 - fchown 93 55 lchown 94 - "
    "fchownat 260 54 utime 132 - utimes 235 - futimesat 261 - utimensat 280 88 setxattr 188 5 lsetxattr 189 6 "
    "fsetxattr 190 7 setxattrat 463 463 removexattr 197 14 lremovexattr 198 15 fremovexattr 199 16 "
    "removexattrat 466 466 file_setattr 469 469 inotify_add_watch 254 27 fanotify_init 300 262 "
)

# Instructions of the filter (linux/bpf_common.h), where they look (linux/seccomp.h), and what they decide.
LOAD, AND, IF_EQUAL, IF_AT_LEAST, IF_BITS, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24
ALLOW, KILL, NOT_PERMITTED, NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
X32_NUMBERS = 0x40000000  # x86_64 knows its calls by a second set of numbers, from here on
CLONE_THREAD, SOCKET_TYPES, STREAM, AF_INET, AF_INET6, THIS_PROCESS = 0x10000, 0xF, 1, 2, 10, 0
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 4, 22, 38, 2
CAPABILITIES_OF_THIS_PROCESS = struct.pack("Ii", 0x20080522, 0)  # linux/capability.h, version 3

Instruction = tuple[int, int, int, int]  # operation, steps to skip if true, and if false, operand
LIBC = ctypes.CDLL(None, use_errno=True)


class Program(ctypes.Structure):
    """The kernel's struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, however busy it is."""
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prctl(option: int, *values: int | ctypes.c_void_p) -> None:
    padded = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in (*values, 0, 0, 0, 0)[:4]]
    if LIBC.prctl(option, *padded):
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def hide_memory() -> None:
    """Keep other processes of the same user from tracing this one and from opening its memory in /proc."""
    if sys.platform == "linux":
        prctl(PR_SET_DUMPABLE, 0)


def renounce() -> None:
    """Give up every capability for good: nothing that is executed later brings one back."""
    if sys.platform == "linux":
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        if LIBC.capset(CAPABILITIES_OF_THIS_PROCESS, bytes(24)):
            raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")


def call_filter(*, network: bool, files: bool) -> bytes | None:
    """Return a filter against processes, reach into others and sockets, not threads and socket pairs; or None."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        return None
    place = list(ARCHITECTURES).index(machine)
    rules = [(LOAD, 0, 0, ARCHITECTURE), *unless(ARCHITECTURES[machine], KILL), (LOAD, 0, 0, NUMBER)]
    rules += [(IF_AT_LEAST, 0, 1, X32_NUMBERS), (RETURN, 0, 0, NOT_PERMITTED)]
    for row in (REFUSED if files else REFUSED | UNSEEN_BY_LANDLOCK).values():
        rules += on(row[place], [(RETURN, 0, 0, NOT_PERMITTED)])
    for name, row in WITH_RULES.items():
        rules += on(row[place], rules_of(network)[name])
    return b"".join(struct.pack("HBBI", *rule) for rule in (*rules, (RETURN, 0, 0, ALLOW)))


def rules_of(network: bool) -> dict[str, list[Instruction]]:
    first, second = (LOAD, 0, 0, FIRST_ARGUMENT), (LOAD, 0, 0, SECOND_ARGUMENT)
    refuse: list[Instruction] = [(RETURN, 0, 0, NOT_PERMITTED)]
    # Sockets of this machine alone lead to its services, such as the one that starts containers.
    internet = [first, (IF_EQUAL, 2, 0, AF_INET), (IF_EQUAL, 1, 0, AF_INET6), *REFUSE_ELSE_ALLOW]
    return {
        "socket": internet if network else refuse,
        # asyncio needs a pair of streams, which reach nobody else
        "socketpair": [second, (AND, 0, 0, SOCKET_TYPES), (IF_EQUAL, 1, 0, STREAM), *REFUSE_ELSE_ALLOW],
        "clone": [first, (IF_BITS, 1, 0, CLONE_THREAD), *REFUSE_ELSE_ALLOW],
        "clone3": [(RETURN, 0, 0, NO_SUCH_CALL)],  # its flags cannot be seen; libc then takes clone
        # Whoever could lift the death signal would outlive its parent.
        "prctl": [first, (IF_EQUAL, 0, 1, PR_SET_PDEATHSIG), *REFUSE_ELSE_ALLOW],
        "prlimit64": [first, (IF_EQUAL, 1, 0, THIS_PROCESS), *REFUSE_ELSE_ALLOW],
    }


REFUSE_ELSE_ALLOW: list[Instruction] = [(RETURN, 0, 0, NOT_PERMITTED), (RETURN, 0, 0, ALLOW)]


def on(number: int | None, then: list[Instruction]) -> list[Instruction]:
    return [] if number is None else [(IF_EQUAL, 0, len(then), number), *then]


def unless(value: int, verdict: int) -> list[Instruction]:
    return [(IF_EQUAL, 1, 0, value), (RETURN, 0, 0, verdict)]


def install_filter(instructions: bytes) -> None:
    """Install a filter for this process, which has renounced its privileges, and all that it becomes, for good."""
    program = Program(len(instructions) // struct.calcsize("HBBI"), instructions)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.cast(ctypes.pointer(program), ctypes.c_void_p))
