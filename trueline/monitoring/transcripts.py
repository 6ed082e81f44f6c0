"""Transcripts: rows that are read lazily, and per-token numbers in a compact form."""

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from trueline.files import Row, rows_at, whole_lines

NUMBERS = ("logprob", "log_ratio", "advantage", "entropy")  # per token
LARGEST = 6e4  # in float16


class LazyRows(Sequence[Row]):
    """The rows that a file had when it was opened. Only their places are in memory, as the file may be large."""

    def __init__(self, path: Path, key: Callable[[Row], int] | None = None, read: Callable[[Row], Row] = dict) -> None:
        self.path, self.read = path, read
        found: list[tuple[int, int]] = []
        if path.exists():
            with path.open("rb") as stream:
                lines = ((place, line) for place, line in whole_lines(stream) if line.strip())
                found = [(key(json.loads(line)) if key else 0, place) for place, line in lines]
        self.places = [place for _, place in sorted(found)]  # in the order of the key, or of the lines

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
        return map(self.read, rows_at(self.path, places) if places else ())


def pack_numbers(values: np.ndarray) -> str | float:
    """Return numbers as base64 of little-endian float16; a constant as one number."""
    rough = values.clip(-LARGEST, LARGEST).astype("<f2")
    if np.isfinite(rough[0]) and (rough == rough[0]).all():
        return float(f"{rough[0]:.3g}")
    return base64.b64encode(rough.tobytes()).decode()


def unpack_numbers(column: str | float, count: int) -> np.ndarray:
    """Return the numbers of `count` tokens, [T] float32."""
    if isinstance(column, str):
        return np.frombuffer(base64.b64decode(column), "<f2").astype(np.float32)
    return np.full(count, column, np.float32)


def with_arrays(transcript: Row) -> Row:
    """Return a transcript with per-token numbers as arrays; `sampled` is True on tokens of the policy."""
    sequences = []
    for sequence in transcript.get("tokens", []):
        count, turns = len(sequence["text"]), sequence["sampled"]
        numbers = {name: unpack_numbers(sequence[name], count) for name in NUMBERS if name in sequence}
        sequences.append(sequence | numbers | {"sampled": np.repeat(np.arange(len(turns)) % 2 == 0, turns)})
    return transcript | ({"tokens": sequences} if "tokens" in transcript else {})
