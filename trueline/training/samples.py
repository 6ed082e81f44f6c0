"""Samples by reference: their arrays stay in the object store, and each rank fetches those that it trains on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trueline.data.types import TOKEN_FIELDS, Sample
from trueline.runtime.actors import Stored

Arrays = dict[str, np.ndarray]  # [sum of lengths, ...] each


@dataclass(slots=True)
class SampleNumbers:
    """A sample as the controller knows it: everything but its tokens."""

    length: int
    sampled: int  # tokens that the policy sampled
    group: int
    episode: int  # in the step
    version: int  # of the oldest sampled token
    task_reward: float
    baseline: float
    truncated: bool
    reward: float = 0.0  # after shaping and KL
    filtered: bool = False  # not in the loss
    label: float = 0.0
    weight: float = 0.0

    def sampled_tokens(self) -> int:
        return self.sampled

    def whose(self) -> int:
        return self.episode


@dataclass(frozen=True, slots=True)
class SampleBlock:
    """Arrays of some samples, one after the other in the object store."""

    names: tuple[str, ...]
    samples: tuple[int, ...]  # their numbers in the step
    arrays: Stored[Arrays]


@dataclass(slots=True)
class StoredSamples:
    """Some samples of a step. `all_lengths` are of every sample of the step, by which blocks are divided."""

    numbers: list[int]  # in the step
    rows: list[SampleNumbers]
    all_lengths: list[int]
    blocks: list[SampleBlock]
    same: dict[str, str] = field(default_factory=dict)  # fields that are another one, e.g. old log-probs
    found: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)  # what this process has fetched

    def __getstate__(self) -> tuple[object, ...]:
        return self.numbers, self.rows, self.all_lengths, self.blocks, self.same

    def __setstate__(self, state: tuple[object, ...]) -> None:
        for name, value in zip(("numbers", "rows", "all_lengths", "blocks", "same"), state, strict=True):
            setattr(self, name, value)
        self.found = {}

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([row.length for row in self.rows])

    @property
    def weights(self) -> np.ndarray:
        return np.array([row.weight for row in self.rows])

    @property
    def labels(self) -> np.ndarray:
        return np.array([row.label for row in self.rows])

    def names(self) -> list[str]:
        """Return the fields that losses read."""
        known = {*self.same, *(name for block in self.blocks for name in block.names)}
        return [name for name in TOKEN_FIELDS if name in known]

    def part(self, name: str, at: int) -> np.ndarray:
        """Return a field of one sample; its block is fetched the first time."""
        name, number = self.same.get(name, name), self.numbers[at]
        if number not in self.found.get(name, ()):
            block = next(one for one in reversed(self.blocks) if name in one.names and number in one.samples)
            self._open(block)
        return self.found[name][number]

    def _open(self, block: SampleBlock) -> None:
        ends = np.cumsum([self.all_lengths[number] for number in block.samples])
        for name, array in block.arrays.fetch().items():
            views = self.found.setdefault(name, {})
            for number, end in zip(block.samples, ends, strict=True):
                views[number] = array[end - self.all_lengths[number] : end]

    def add(self, block: SampleBlock) -> None:
        """Add fields that a later stage has computed; they replace those of the same name."""
        self.blocks.append(block)
        for name in block.names:
            self.same.pop(name, None)

    def subset(self, places: Iterable[int]) -> "StoredSamples":
        chosen = list(places)
        rows = [self.rows[at] for at in chosen]
        return StoredSamples([self.numbers[at] for at in chosen], rows, self.all_lengths, self.blocks, self.same)

    def without_experts(self) -> "StoredSamples":
        return replace(self, blocks=[block for block in self.blocks if block.names != ("experts",)], found={})


Samples = Sequence[Sample] | StoredSamples


def lengths_of(samples: Samples) -> list[int]:
    rows = samples.rows if isinstance(samples, StoredSamples) else samples
    return [row.length if isinstance(row, SampleNumbers) else row.length() for row in rows]
