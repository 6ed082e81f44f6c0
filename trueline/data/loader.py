"""The order of rows: shuffled in every epoch, and resumable from one number."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from trueline.config.base import ConfigError, Tree
from trueline.data.readers import value_of
from trueline.data.rows import Located, Row

CONTENT = "content:"  # begins the digest of the files of a large dataset, in place of one of its rows
MIXTURE_BLOCK = 4096  # positions whose datasets are drawn at once


class Order(Iterator[int]):
    """An endless sequence of row numbers that depends only on seed and position."""

    def __init__(self, rows: int, seed: int, shuffle: bool, position: int = 0) -> None:
        self.rows, self.seed, self.shuffle, self.position = rows, seed, shuffle, position
        self.epoch, self.permutation = -1, np.arange(rows)

    def __next__(self) -> int:
        epoch, offset = divmod(self.position, self.rows)
        if self.shuffle and epoch != self.epoch:
            self.permutation = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        self.epoch = epoch
        self.position += 1
        return int(self.permutation[offset])


class Mixture(Iterator[int]):
    """Rows of several datasets, numbered as if concatenated: each position draws a dataset and its next row."""

    def __init__(self, sizes: list[int], weights: list[float], seed: int, shuffle: bool, position: int = 0) -> None:
        self.edges = np.cumsum(weights)[:-1] / sum(weights)
        self.seed, self.position = seed, position
        self.offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        self.block = position // MIXTURE_BLOCK
        self.sources = self._draw(self.block)
        drawn = np.bincount(self.sources[: position % MIXTURE_BLOCK], minlength=len(sizes))
        for block in range(self.block):
            drawn += np.bincount(self._draw(block), minlength=len(sizes))
        # Datasets of one size must not have the same order.
        seeds = [int(np.random.SeedSequence([seed, at]).generate_state(1)[0]) for at in range(len(sizes))]
        self.orders = [Order(size, seeds[at], shuffle, int(drawn[at])) for at, size in enumerate(sizes)]

    def _draw(self, block: int) -> np.ndarray:
        """Draw the datasets of a block's positions; they depend only on the seed and the block's number."""
        return np.searchsorted(self.edges, np.random.default_rng([self.seed, block]).random(MIXTURE_BLOCK), "right")

    def __next__(self) -> int:
        block, offset = divmod(self.position, MIXTURE_BLOCK)
        if block != self.block:
            self.block, self.sources = block, self._draw(block)
        self.position += 1
        source = int(self.sources[offset])
        return self.offsets[source] + next(self.orders[source])


def make_order(sizes: list[int], weights: list[float], seed: int, shuffle: bool, position: int) -> Order | Mixture:
    """Make the order of one dataset, or of a mixture of several."""
    if len(sizes) == 1:
        return Order(sizes[0], seed, shuffle, position)
    return Mixture(sizes, weights, seed, shuffle, position)


def digest_rows(rows: Iterable[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def fingerprint(weights: dict[str, float], sizes: list[int], digests: list[str], seed: int, shuffle: bool) -> Tree:
    """Return everything that `make_order` depends on, as JSON; `weights` are those of the datasets."""
    sources = [
        {"path": path, "rows": rows, "share": weight / sum(weights.values()), "digest": digest}
        for (path, weight), rows, digest in zip(weights.items(), sizes, digests, strict=True)
    ]
    return {"seed": seed if shuffle or len(sources) > 1 else None, "shuffle": shuffle, "sources": sources}


def changes(before: Tree, now: Tree) -> list[str]:
    """Describe how two fingerprints differ."""
    numbers = {
        "seed": (before["seed"], now["seed"]),
        "data.shuffle": (before["shuffle"], now["shuffle"]),
        "the number of datasets": (len(before["sources"]), len(now["sources"])),
    }
    found = [f"{name} changed from {old} to {new}" for name, (old, new) in numbers.items() if old != new]
    if len(before["sources"]) != len(now["sources"]):
        return found
    for old, new in zip(before["sources"], now["sources"], strict=True):
        if old["rows"] != new["rows"]:
            found.append(f"{new['path']} had {old['rows']} rows and now has {new['rows']}")
        elif old["digest"] != new["digest"]:
            found.append(f"{new['path']} still has {new['rows']} rows, but other ones or in another order")
        if old["share"] != new["share"]:
            found.append(f"the probability of {new['path']} changed from {old['share']:g} to {new['share']:g}")
    return found


def split_rows(rows: Sequence[Located], share: float, by: str | None, seed: int) -> tuple[list[Located], list[Located]]:
    """Split rows into training and held-out ones, in order; rows with one value of column `by` stay together."""
    rows = list(rows)
    if share == 0:
        return rows, []
    groups: dict[str, list[int]] = {}
    for number, located in enumerate(rows):
        groups.setdefault(str(number) if by is None else repr(value_of(located, by)), []).append(number)
    if len(groups) < 2:
        unit = "one row" if by is None else f"one value in column {by!r}"
        raise ConfigError(f"{rows[0].place}: the data has only {unit}: add rows, or set evaluation.share=0")
    # Hold out random groups up to the share, but at least a smallest one.
    limit, lists = min(round(share * len(rows)), len(rows) - 1), list(groups.values())
    order = [lists[number] for number in np.random.default_rng(seed).permutation(len(lists))]
    held_out: set[int] = set()
    for group in order:
        held_out.update(group if len(held_out) + len(group) <= limit else ())
    smallest: list[int] = min(order, key=len)
    held_out = held_out or set(smallest)
    numbered = list(enumerate(rows))
    return [row for at, row in numbered if at not in held_out], [row for at, row in numbered if at in held_out]
