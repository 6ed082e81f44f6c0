"""JSON lines and atomic writes: what a run leaves on disk can be read after a kill, and while it is written."""

import csv
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

Row = dict[str, Any]
UNFINISHED = ".unfinished"  # ends the name of what is still being written
ANYONE, PRIVATE_FILE = 0o666, 0o600  # permissions; the first is narrowed by the user's umask


def parse_line(line: bytes) -> Row | None:
    """Parse a JSON object; None for anything else, such as half a line that a kill or a full disk left."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a file of JSON lines; a missing file has none, and torn lines are skipped."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [row for line in lines if (row := parse_line(line)) is not None]


def read_table(path: Path) -> list[list[str]]:
    """Read the rows of a CSV file below its header."""
    with path.open(newline="", encoding="utf-8") as lines:
        return list(csv.reader(lines))[1:]


def whole_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield each line and the byte it begins at; a last line without its line break is still being written."""
    place = 0
    for line in stream:
        if line.endswith(b"\n"):
            yield place, line
        place += len(line)


def rows_at(path: Path, places: Iterable[int]) -> Iterator[Row]:
    """Yield the rows that begin at these bytes, in this order."""
    with path.open("rb") as stream:
        for place in places:
            stream.seek(place)
            yield json.loads(stream.readline())


@contextmanager
def atomic_path(path: Path, ending: str = UNFINISHED) -> Iterator[Path]:
    """Give a file to write to, which replaces `path` once it is whole; after an error `path` is as it was."""
    aside = path.with_name(path.name + ending)
    try:
        yield aside
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes, *, mode: int = ANYONE, ending: str = UNFINISHED) -> None:
    """Write a file that has its old content or its new one at every moment."""
    with atomic_path(path, ending) as aside:
        aside.unlink(missing_ok=True)
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)


def write_once(path: Path, content: bytes) -> None:
    """Write a file that is named by its content, unless it is there."""
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, content)


def flush(path: Path) -> None:
    """Make sure that the disk has a file or folder, not only the system's cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
