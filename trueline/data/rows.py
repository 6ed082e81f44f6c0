"""Rows of datasets, each decoded when it is drawn: JSON lines by their places in a file, tables by a memory map."""

import hashlib
import json
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, overload

import numpy as np
import pyarrow as arrow
import pyarrow.compute as compute

from trueline.config.base import ConfigError

Row = dict[str, Any]
Item = TypeVar("Item")
LARGE = 20_000  # rows; a dataset of more is decoded, and its prompts measured, as they are drawn
TEXT = "text"  # column of rows that are plain strings
BLOCK_BYTES, BLOCK_ROWS = 2**24, 1000  # read at a time
BYTE_ORDER_MARK, LINE_FEED, CARRIAGE_RETURN = b"\xef\xbb\xbf", 10, 13
LAST_SPACE, FIRST_BEYOND_ASCII = 32, 128


@dataclass(frozen=True, slots=True)
class Located:
    """A row and its place, for error messages."""

    row: Row
    place: str
    padded: bool = False  # absent nested fields are nulls, because Arrow gives all rows the same fields
    bare: bool = False  # a plain string without columns
    folder: Path = Path()  # of the file, from which relative paths in the row begin


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Put a row's place in front of an error."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def is_large(rows: int) -> bool:
    return rows > LARGE


class Lazy(Sequence[Item]):
    """A sequence that makes each item when it is asked for; a slice is a list."""

    @abstractmethod
    def at(self, number: int) -> Item: ...

    @overload
    def __getitem__(self, place: int) -> Item: ...

    @overload
    def __getitem__(self, place: slice) -> list[Item]: ...

    def __getitem__(self, place: int | slice) -> Item | list[Item]:
        if isinstance(place, slice):
            return [self.at(number) for number in range(*place.indices(len(self)))]
        return self.at(range(len(self))[place])


class Joined(Lazy[Item]):
    """Several sequences as one."""

    def __init__(self, parts: Sequence[Sequence[Item]]) -> None:
        self.parts, self.ends = parts, np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __iter__(self) -> Iterator[Item]:
        return chain.from_iterable(self.parts)

    def at(self, number: int) -> Item:
        return self.parts[part := part_of(self.ends, number)][number - int(self.ends[part - 1] if part else 0)]


def part_of(ends: np.ndarray, number: int) -> int:
    return int(np.searchsorted(ends, number, "right"))


class SourceFile:
    """A file that rows are drawn from as long as a run lasts; it is opened for each, as there may be many files."""

    def __init__(self, path: Path) -> None:
        self.path, self.stamp = path, self.stamp_of(path.stat())

    @staticmethod
    def stamp_of(found: os.stat_result) -> tuple[int, int, int]:
        return found.st_mtime_ns, found.st_size, found.st_ino

    def check(self) -> None:
        """Refuse a file that is not what it was when the rows were counted: a row may be another one now."""
        if not self.path.is_file() or self.stamp_of(self.path.stat()) != self.stamp:
            raise ConfigError(
                f"{self.path} was changed while rows were drawn from it: bring it back as it was, and resume"
            )

    def read(self, start: int, end: int) -> bytes:
        self.check()
        with self.path.open("rb", buffering=0) as stream:
            stream.seek(start)
            return stream.read(end - start)

    def digest(self) -> str:
        with self.path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


# JSON lines


class LineIndex(NamedTuple):
    """The lines of a file that are not blank, and the digest of the file."""

    starts: np.ndarray  # bytes
    ends: np.ndarray
    lines: np.ndarray  # their numbers, from 1
    digest: str


class Lines(Lazy[Located]):
    """The rows of a file of JSON lines."""

    def __init__(self, file: Path) -> None:
        self.file = SourceFile(file)
        with file.open("rb") as stream:
            self.starts, self.ends, self.lines, self.digest = index_lines(stream)

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[Located]:
        for start in range(0, len(self), BLOCK_ROWS):
            numbers = range(start, min(start + BLOCK_ROWS, len(self)))
            first = int(self.starts[start])
            block = self.file.read(first, int(self.ends[numbers[-1]]))
            for number in numbers:
                yield self.parse(number, block[self.starts[number] - first : self.ends[number] - first])

    def at(self, number: int) -> Located:
        return self.parse(number, self.file.read(int(self.starts[number]), int(self.ends[number])))

    def parse(self, number: int, line: bytes) -> Located:
        place = f"{self.file.path}, line {self.lines[number]}"
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{place}: not UTF-8 text ({error.reason}): fix or delete this line") from None
        return parse_row(text.replace("\r\n", "\n").replace("\r", "\n"), place, self.file.path.parent)

    def sizes(self, column: str) -> np.ndarray:
        return np.asarray(self.ends - self.starts)


def index_lines(stream: BinaryIO) -> LineIndex:
    """Find the lines of a file without parsing them: line breaks are those of Python's text files."""
    starts, ends, numbers, digest = [], [], [], hashlib.sha256()
    place = lines = 0
    while block := stream.read(BLOCK_BYTES) + stream.readline():  # whole lines
        digest.update(block)
        first, last = split_block(block)
        if place == 0 and block.startswith(BYTE_ORDER_MARK):
            first[0] = len(BYTE_ORDER_MARK)
        filled = ~blank_lines(block, first, last)
        starts.append(first[filled] + place)
        ends.append(last[filled] + place)
        numbers.append(np.flatnonzero(filled) + lines + 1)
        place, lines = place + len(block), lines + len(first)
    empty = np.zeros(0, np.int64)
    first, last, number = (np.concatenate([empty, *parts]) for parts in (starts, ends, numbers))
    return LineIndex(first, last, number, digest.hexdigest())


def split_block(block: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return where each line of a block begins and ends."""
    data = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(data == LINE_FEED) + 1
    if b"\r" in block:
        returns = np.flatnonzero(data == CARRIAGE_RETURN) + 1
        alone = data[np.minimum(returns, len(data) - 1)] != LINE_FEED
        ends = np.union1d(ends, returns[alone])
    if not len(ends) or ends[-1] < len(data):
        ends = np.append(ends, len(data))
    return np.concatenate([[0], ends[:-1]]), ends


def blank_lines(block: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Tell which lines have only white space; a first letter of ASCII shows that a line is none of them."""
    first = np.frombuffer(block, np.uint8)[np.minimum(starts, len(block) - 1)]
    blank = np.zeros(len(starts), bool)
    for at in np.flatnonzero((first <= LAST_SPACE) | (first >= FIRST_BEYOND_ASCII)):
        blank[at] = not block[starts[at] : ends[at]].decode(errors="replace").strip()
    return blank


def parse_row(text: str, place: str, folder: Path) -> Located:
    try:
        row = json.loads(text, object_pairs_hook=single_keys)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not JSON ({error.msg}, column {error.colno}): fix or delete this line") from None
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    return locate_row(row, place, folder)


def single_keys(pairs: list[tuple[str, Any]]) -> Row:
    """Refuse a JSON object with a repeated key, whose first value would be lost."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ConfigError(f"the key {repeats(name for name, _ in pairs)[0]!r} is repeated: delete one")
    return row


def repeats(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def locate_row(row: Any, place: str, folder: Path) -> Located:
    """Return a row with named columns; a plain string has one."""
    if isinstance(row, str):
        return Located({TEXT: row}, place, bare=True)
    if not isinstance(row, dict):
        remedy = "rename a file that is one array to .json" if isinstance(row, list) else "fix or delete it"
        raise ConfigError(f"{place}: expected an object or a string, found {type(row).__name__}: {remedy}")
    return Located(row, place, folder=folder)


# Tables


class TableRows(Lazy[Located]):
    """The rows of an Arrow table, which may lie on disk: in these files."""

    def __init__(self, table: arrow.Table, place: Path | str, files: Sequence[SourceFile] = ()) -> None:
        self.batches, self.place, self.files = table.to_batches(), place, files
        self.folder = place.parent if isinstance(place, Path) else Path()
        self.ends = np.cumsum([batch.num_rows for batch in self.batches], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __iter__(self) -> Iterator[Located]:
        number = 0
        for batch in self.batches:
            for start in range(0, batch.num_rows, BLOCK_ROWS):
                for row in batch.slice(start, BLOCK_ROWS).to_pylist():
                    number += 1
                    yield Located(row, f"{self.place}, row {number}", padded=True, folder=self.folder)

    def at(self, number: int) -> Located:
        part = part_of(self.ends, number)
        start = number - int(self.ends[part - 1] if part else 0)
        for file in self.files:
            file.check()
        (row,) = self.batches[part].slice(start, 1).to_pylist()
        return Located(row, f"{self.place}, row {number + 1}", padded=True, folder=self.folder)

    def sizes(self, column: str) -> np.ndarray:
        if not self.batches or column not in self.batches[0].schema.names:
            return np.zeros(len(self), np.int64)
        return np.concatenate([text_sizes(batch.column(column)) for batch in self.batches])

    @cached_property
    def digest(self) -> str:
        """Return the digest of the files; of a table without any, nothing."""
        return join_digests([file.digest() for file in self.files]) if self.files else ""


def text_sizes(array: arrow.Array) -> np.ndarray:
    """Return how many bytes of text each element has, also within lists and structures."""
    kind = array.type
    if arrow.types.is_struct(kind):
        parts = [text_sizes(array.field(number)) for number in range(kind.num_fields)]
        return np.sum(parts, axis=0) if parts else np.zeros(len(array), np.int64)
    if arrow.types.is_list(kind) or arrow.types.is_large_list(kind):
        sums = np.concatenate([[0], np.cumsum(text_sizes(array.values))])
        return np.diff(sums[array.offsets.to_numpy()])
    if arrow.types.is_string(kind) or arrow.types.is_large_string(kind):
        return compute.fill_null(compute.binary_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.zeros(len(array), np.int64)


# What every kind has


def sizes_of(rows: Sequence[Located], column: str) -> np.ndarray:
    """Return about how long the text of each row is, by what can be known without decoding it."""
    match rows:
        case Lines() | TableRows():
            return rows.sizes(column)
        case Joined():
            return np.concatenate([sizes_of(part, column) for part in rows.parts])
    return np.array([len(str(located.row.get(column))) for located in rows])


def content_digest(rows: Sequence[Located]) -> str:
    """Return the digest of the files that the rows lie in; nothing for rows in memory."""
    match rows:
        case Lines() | TableRows():
            return rows.digest
        case Joined():
            parts = [content_digest(part) for part in rows.parts]
            return join_digests(parts) if all(parts) else ""
    return ""


def join_digests(digests: Sequence[str]) -> str:
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()
