"""What only Linux offers: children that end with their parent, and a filter of system calls (seccomp)."""

import ctypes
import os
import platform
import signal
import struct
import sys

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS: dict[str, tuple[int | None, int | None]] = {  # numbers of system calls, in the order of ARCHITECTURES
    "socket": (41, 198),
    "socketpair": (53, 199),
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "io_uring_setup": (425, 425),
    "prctl": (157, 167),
}
# A call of its own opens sockets; io_uring does so too. The rest reaches into processes that are not the program's.
NETWORK = ("socket", "io_uring_setup")
OTHERS = tuple(name for name in CALLS if name not in (*NETWORK, "socketpair", "clone", "clone3", "prctl"))

# Instructions of the filter (linux/bpf_common.h), where they look (linux/seccomp.h), and what they decide.
LOAD, AND, IF_EQUAL, IF_AT_LEAST, IF_BITS, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24
ALLOW, KILL, NOT_PERMITTED, NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
X32_NUMBERS = 0x40000000  # x86_64 knows its calls by a second set of numbers, from here on
CLONE_THREAD, SOCKET_TYPES, STREAM = 0x10000, 0xF, 1
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2

Instruction = tuple[int, int, int, int]  # operation, steps to skip if true, and if false, operand
LIBC = ctypes.CDLL(None, use_errno=True)


class Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends, however busy it is."""
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prctl(option: int, *values: int | ctypes.c_void_p) -> None:
    padded = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in (*values, 0, 0, 0, 0)[:4]]
    if LIBC.prctl(option, *padded):
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def call_filter(*, network: bool) -> bytes | None:
    """Refuses processes, signals to others and sockets; threads and pairs of pipes stay. None: not on this machine."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        return None
    place = list(ARCHITECTURES).index(machine)
    numbers = {name: number for name, row in CALLS.items() if (number := row[place]) is not None}
    rules = [(LOAD, 0, 0, ARCHITECTURE), *unless(ARCHITECTURES[machine], KILL), (LOAD, 0, 0, NUMBER)]
    rules += [(IF_AT_LEAST, 0, 1, X32_NUMBERS), (RETURN, 0, 0, NOT_PERMITTED)]
    for name in OTHERS + (() if network else NETWORK):
        rules += on(numbers[name], [(RETURN, 0, 0, NOT_PERMITTED)]) if name in numbers else []
    rules += on(numbers["clone3"], [(RETURN, 0, 0, NO_SUCH_CALL)])  # its flags cannot be seen; libc then takes clone
    rules += on(numbers["clone"], [(LOAD, 0, 0, FIRST_ARGUMENT), (IF_BITS, 1, 0, CLONE_THREAD), *REFUSE_ELSE_ALLOW])
    # Whoever could lift the death signal would outlive its parent.
    look = [(LOAD, 0, 0, FIRST_ARGUMENT), (IF_EQUAL, 0, 1, PR_SET_PDEATHSIG)]
    rules += on(numbers["prctl"], [*look, *REFUSE_ELSE_ALLOW])
    if not network:  # asyncio needs a pair of streams, which reach nobody else
        look = [(LOAD, 0, 0, SECOND_ARGUMENT), (AND, 0, 0, SOCKET_TYPES), (IF_EQUAL, 1, 0, STREAM)]
        rules += on(numbers["socketpair"], [*look, *REFUSE_ELSE_ALLOW])
    return b"".join(struct.pack("HBBI", *rule) for rule in (*rules, (RETURN, 0, 0, ALLOW)))


REFUSE_ELSE_ALLOW: list[Instruction] = [(RETURN, 0, 0, NOT_PERMITTED), (RETURN, 0, 0, ALLOW)]


def on(number: int, then: list[Instruction]) -> list[Instruction]:
    return [(IF_EQUAL, 0, len(then), number), *then]


def unless(value: int, verdict: int) -> list[Instruction]:
    return [(IF_EQUAL, 1, 0, value), (RETURN, 0, 0, verdict)]


def install_filter(instructions: bytes) -> None:
    """For this process and all that it becomes; there is no way back."""
    program = Program(len(instructions) // struct.calcsize("HBBI"), instructions)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.cast(ctypes.pointer(program), ctypes.c_void_p))
