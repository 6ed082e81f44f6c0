"""Landlock: a process, even of root, gives up all files except those that it names."""

import ctypes
import os
import stat
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from trueline.usercode.linux import LIBC

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls, by the same numbers on every machine
VERSION_ONLY, PATH_BENEATH = 1, 1
# linux/landlock.h: executing, reading a file and listing a folder; writing a file; all that can be done with a file
# alone; and how many kinds of access there are, by the version of Landlock.
READ, WRITE, OF_FILES = 0b1101, 0b10, 0b1100_0000_0000_0111
KINDS = {1: 13, 2: 14, 3: 15, 4: 15}
NEWEST_KINDS = 16
SIGNALS_AND_SOCKETS = 0b11  # to processes outside, from version 6 on
ALL = (1 << NEWEST_KINDS) - 1


def version() -> int:
    """Return the version of this machine's Landlock, or 0 where it has none."""
    return max(call(CREATE_RULESET, None, 0, VERSION_ONLY), 0) if sys.platform == "linux" else 0


@contextmanager
def allow_only(paths: Mapping[str, int]) -> Iterator[int]:
    """Yield a ruleset as an open file: the access to each path and below. Missing paths are skipped."""
    handled = (1 << KINDS.get(version(), NEWEST_KINDS)) - 1
    scoped = SIGNALS_AND_SOCKETS if version() >= 6 else 0
    attributes = struct.pack("QQQ", handled, 0, scoped)
    with closing_file(check_result(call(CREATE_RULESET, attributes, len(attributes), 0))) as ruleset:
        for path, access in paths.items():
            with suppress(FileNotFoundError, PermissionError):
                add(ruleset, path, access & handled)
        yield ruleset


def add(ruleset: int, path: str, access: int) -> None:
    with closing_file(os.open(path, os.O_PATH)) as place:
        kinds = access if stat.S_ISDIR(os.fstat(place).st_mode) else access & OF_FILES
        check_result(call(ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", kinds, place), 0))


@contextmanager
def closing_file(file: int) -> Iterator[int]:
    try:
        yield file
    finally:
        os.close(file)


def restrict(ruleset: int) -> None:
    """Restrict this process and its programs to a ruleset, irrevocably."""
    check_result(call(RESTRICT_SELF, ruleset, 0))


def call(number: int, *arguments: int | bytes | None) -> int:
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in (number, *arguments)]
    return int(LIBC.syscall(*wide))


def check_result(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
