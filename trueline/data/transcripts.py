"""Rows of JSON lines, each read when it is asked for; numbers of tokens, in few bytes there and arrays here."""

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

Row = dict[str, Any]
NUMBERS = ("logprob", "log_ratio", "advantage", "entropy")  # of a token
LARGEST = 6e4  # that two bytes can hold


class LazyRows(Sequence[Row]):
    """The rows that a file held when it was opened. Only their places are kept, for the file may be large."""

    def __init__(self, path: Path, key: Callable[[Row], int] | None = None, read: Callable[[Row], Row] = dict) -> None:
        self.path, self.read = path, read
        self.places = find_lines(path, key) if path.exists() else []  # in the order of the lines, or of the key

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Row]:
        return self._rows(self.places)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return list(self._rows(self.places[index]))
        return next(self._rows([self.places[index]]))

    def __repr__(self) -> str:
        return f"<{len(self)} rows of {self.path}>"

    def _rows(self, places: list[int]) -> Iterator[Row]:
        if not places:
            return
        with self.path.open("rb") as stream:
            for place in places:
                stream.seek(place)
                yield self.read(json.loads(stream.readline()))


def find_lines(path: Path, key: Callable[[Row], int] | None) -> list[int]:
    """Return where the lines of a file begin; a last one that is still being written has no end yet."""
    found: list[tuple[int, int]] = []
    place = 0
    with path.open("rb") as stream:
        for line in stream:
            if line.endswith(b"\n") and line.strip():
                found.append((key(json.loads(line)) if key else 0, place))
            place += len(line)
    return [place for _, place in sorted(found)]


def packed(values: np.ndarray) -> str | float:
    """Return numbers as base64 of their float16, little-endian; one that all tokens share as itself."""
    rough = values.clip(-LARGEST, LARGEST).astype("<f2")
    if np.isfinite(rough[0]) and (rough == rough[0]).all():
        return float(f"{rough[0]:.3g}")
    return base64.b64encode(rough.tobytes()).decode()


def unpacked(column: str | float, count: int) -> np.ndarray:
    """Return the numbers of so many tokens, [T] float32."""
    if isinstance(column, str):
        return np.frombuffer(base64.b64decode(column), "<f2").astype(np.float32)
    return np.full(count, column, np.float32)


def with_arrays(transcript: Row) -> Row:
    """Return a transcript with the numbers of its tokens as arrays; `sampled` is True where the policy spoke."""
    if "tokens" not in transcript:
        return transcript
    return transcript | {"tokens": [sequence_arrays(sequence) for sequence in transcript["tokens"]]}


def sequence_arrays(sequence: Row) -> Row:
    count, turns = len(sequence["text"]), sequence["sampled"]
    numbers = {name: unpacked(sequence[name], count) for name in NUMBERS if name in sequence}
    return sequence | numbers | {"sampled": np.repeat(np.arange(len(turns)) % 2 == 0, turns)}
