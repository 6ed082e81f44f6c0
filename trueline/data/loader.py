"""The order in which rows are drawn: shuffled anew in every epoch, and resumable from one number."""

import hashlib
import json
from collections.abc import Iterable

import numpy as np

from trueline.config.base import ConfigError, Tree
from trueline.data.readers import value_of
from trueline.data.sources import Located, Row

MIXTURE_BLOCK = 4096  # positions whose sources are drawn at once


class Order:
    """An endless sequence of row numbers that depends on seed and position alone."""

    def __init__(self, rows: int, seed: int, shuffle: bool, position: int = 0) -> None:
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.position = position
        self.epoch = -1
        self.permutation = np.arange(rows)

    def __next__(self) -> int:
        epoch, offset = divmod(self.position, self.rows)
        if self.shuffle and epoch != self.epoch:
            self.permutation = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        self.epoch = epoch
        self.position += 1
        return int(self.permutation[offset])

    def __iter__(self) -> "Order":
        return self


class Mixture:
    """An endless sequence of rows of several sources, numbered as if the sources stood one after the other.

    At every position a source is drawn by its probability and gives the next row of its own order.
    """

    def __init__(
        self, sizes: list[int], probabilities: list[float], seed: int, shuffle: bool, position: int = 0
    ) -> None:
        self.edges = np.cumsum(probabilities)[:-1] / sum(probabilities)
        self.seed, self.position = seed, position
        self.offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        self.block = position // MIXTURE_BLOCK
        self.sources = self._draw(self.block)
        drawn = np.bincount(self.sources[: position % MIXTURE_BLOCK], minlength=len(sizes))
        for block in range(self.block):
            drawn += np.bincount(self._draw(block), minlength=len(sizes))
        self.orders = [
            Order(size, source_seed(seed, number), shuffle, int(drawn[number])) for number, size in enumerate(sizes)
        ]

    def _draw(self, block: int) -> np.ndarray:
        """Draw the sources at a block's positions; they depend on the seed and the block's number alone."""
        return np.searchsorted(self.edges, np.random.default_rng([self.seed, block]).random(MIXTURE_BLOCK), "right")

    def __next__(self) -> int:
        block, offset = divmod(self.position, MIXTURE_BLOCK)
        if block != self.block:
            self.block, self.sources = block, self._draw(block)
        self.position += 1
        source = int(self.sources[offset])
        return self.offsets[source] + next(self.orders[source])

    def __iter__(self) -> "Mixture":
        return self


def make_order(
    sizes: list[int], probabilities: list[float], seed: int, shuffle: bool, position: int
) -> Order | Mixture:
    """Walk through one source, epoch by epoch, or mix several."""
    if len(sizes) == 1:
        return Order(sizes[0], seed, shuffle, position)
    return Mixture(sizes, probabilities, seed, shuffle, position)


def source_seed(seed: int, number: int) -> int:
    """Derive a source's seed: sources of one size must not walk through their rows in step."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def digest_rows(rows: Iterable[Row]) -> str:
    """Return the digest of rows as they were read, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def fingerprint(weights: dict[str, float], sizes: list[int], digests: list[str], seed: int, shuffle: bool) -> Tree:
    """Return all that decides which row stands where in `make_order`, as JSON keeps it; `weights` are the sources'."""
    sources = [
        {"path": path, "rows": rows, "share": weight / sum(weights.values()), "digest": digest}
        for (path, weight), rows, digest in zip(weights.items(), sizes, digests, strict=True)
    ]
    return {"seed": seed if shuffle or len(sources) > 1 else None, "shuffle": shuffle, "sources": sources}


def changes(before: Tree, now: Tree) -> list[str]:
    """Say in words what differs between two fingerprints."""
    keys = {"seed": "seed", "shuffle": "data.shuffle"}
    found = [f"{name} was {before[key]} and is {now[key]}" for key, name in keys.items() if before[key] != now[key]]
    if len(before["sources"]) != len(now["sources"]):
        return [*found, f"{len(before['sources'])} datasets were mixed, {len(now['sources'])} are now"]
    for old, new in zip(before["sources"], now["sources"], strict=True):
        if old["rows"] != new["rows"]:
            found.append(f"{new['path']} had {old['rows']} rows and has {new['rows']} now")
        elif old["digest"] != new["digest"]:
            found.append(f"{new['path']} has {new['rows']} rows as before, but not the same ones in the same order")
        if old["share"] != new["share"]:
            found.append(f"{new['path']} was drawn with probability {old['share']:g}, now with {new['share']:g}")
    return found


def split_rows(rows: list[Located], share: float, by: str | None, seed: int) -> tuple[list[Located], list[Located]]:
    """Return a training and a held-out part, in the rows' order; rows with one value of column `by` stay together."""
    if share == 0:
        return rows, []
    groups: dict[str, list[int]] = {}
    for number, located in enumerate(rows):
        groups.setdefault(str(number) if by is None else repr(value_of(located, by)), []).append(number)
    if len(groups) < 2:
        unit = "one row" if by is None else f"one value in column {by!r}"
        raise ConfigError(
            f"{rows[0].place}: the data has {unit} only, so no part of it can be held out: add rows, or hold none out"
        )
    held_out = hold_out(list(groups.values()), min(round(share * len(rows)), len(rows) - 1), seed)
    return (
        [located for number, located in enumerate(rows) if number not in held_out],
        [located for number, located in enumerate(rows) if number in held_out],
    )


def hold_out(groups: list[list[int]], limit: int, seed: int) -> set[int]:
    """Hold out groups in random order, each that still fits into the limit; where none does, a smallest one."""
    order = np.random.default_rng(seed).permutation(len(groups))
    held_out: set[int] = set()
    for number in order:
        if len(held_out) + len(groups[number]) <= limit:
            held_out.update(groups[number])
    return held_out or set(groups[min(order, key=lambda number: len(groups[number]))])
