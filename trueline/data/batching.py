"""Divide samples into micro-batches for each rank, and collate them into tensors."""

import heapq
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trueline.data.types import UNKNOWN_EXPERT, Batch, to_device

FILLER = -1  # in a plan: a sample of weight zero, so that all ranks run the same number of passes
FILLER_TOKENS = 2

MicroBatch = list[int]  # positions in the packed samples
Plan = list[list[MicroBatch]]  # [rank][pass]
Unit = list[int]  # lengths of the sequences of one row, which share a pass


@dataclass(frozen=True, slots=True)
class Budget:
    """What fits into one forward pass of one rank."""

    tokens: int  # hard limit, padding included
    samples: int | None = None
    packed: bool = True  # False: sequences are padded to the longest of the pass


def plan_micro_batches(lengths: list[int], ranks: int, budget: Budget, samples_per_row: int = 1) -> Plan:
    """Distribute samples: no pass exceeds the budget, all ranks get equally many passes, rows are not split."""
    units = [lengths[start : start + samples_per_row] for start in range(0, len(lengths), samples_per_row)]
    for number, unit in enumerate(units, 1):
        if (tokens := pass_tokens(unit, budget)) > budget.tokens:
            raise ValueError(
                f"row {number} has {tokens} tokens, more than micro_batch_tokens={budget.tokens}: raise "
                "micro_batch_tokens or shorten the sequences"
            )
        if budget.samples is not None and len(unit) > budget.samples:
            raise ValueError(
                f"micro_batch_samples={budget.samples} would split a pair: raise it to {len(unit)} or more"
            )
    order = sorted(range(len(units)), key=lambda unit: -sum(units[unit]))
    shares = packed_shares(order, units, ranks, budget) if budget.packed else padded_shares(order, units, ranks, budget)
    shares.sort(key=lambda share: -sum(sum(units[unit]) for unit in share))
    filler = [FILLER] * samples_per_row
    passes = [
        [unit * samples_per_row + at for unit in share for at in range(samples_per_row)] or filler for share in shares
    ]
    rounds = [passes[start : start + ranks] for start in range(0, len(passes), ranks)]
    # Every second round is reversed, so that no rank always gets the fuller pass.
    return [[row[~rank if number % 2 else rank] for number, row in enumerate(rounds)] for rank in range(ranks)]


def pass_tokens(lengths: list[int], budget: Budget) -> int:
    """Count the tokens of one pass over sequences of these lengths, padding included."""
    return sum(lengths) if budget.packed else len(lengths) * max(lengths)


def packed_shares(order: list[int], units: list[Unit], ranks: int, budget: Budget) -> list[list[int]]:
    """Make as few passes as possible, with similar numbers of tokens."""
    passes = math.ceil(sum(map(sum, units)) / budget.tokens / ranks)
    if budget.samples is not None:
        passes = max(passes, math.ceil(sum(map(len, units)) / budget.samples / ranks))
    while (shares := longest_first(order, units, ranks * passes, budget)) is None:
        passes = max(passes + 1, int(passes * 1.02))
    return shares


def longest_first(order: list[int], units: list[Unit], count: int, budget: Budget) -> list[list[int]] | None:
    """Give each unit to the share with the fewest tokens; return None if that exceeds the budget."""
    heap = [(0, number) for number in range(count)]
    shares: list[list[int]] = [[] for _ in range(count)]
    for unit in order:
        if not heap:
            return None
        tokens, number = heapq.heappop(heap)
        tokens += sum(units[unit])
        if tokens > budget.tokens:
            return None
        shares[number].append(unit)
        if budget.samples is None or (len(shares[number]) + 1) * len(units[unit]) <= budget.samples:
            heapq.heappush(heap, (tokens, number))
    return shares


def padded_shares(order: list[int], units: list[Unit], ranks: int, budget: Budget) -> list[list[int]]:
    """Group similar lengths, so that there is little padding; split or fill up to a multiple of the ranks."""
    shares: list[list[int]] = []
    for unit in order:
        current = [*shares[-1], unit] if shares else []
        lengths = [length for one in current for length in units[one]]
        fits = current and pass_tokens(lengths, budget) <= budget.tokens
        if fits and (budget.samples is None or len(lengths) <= budget.samples):
            shares[-1].append(unit)
        else:
            shares.append([unit])
    while len(shares) % ranks:
        fullest = max(range(len(shares)), key=lambda number: len(shares[number]))
        rows = shares[fullest]
        half = len(rows) // 2
        shares[fullest : fullest + 1] = [rows[:half], rows[half:]] if half else [rows, []]
    return shares


class SampleReader(Protocol):
    """Samples as a rank reads them."""

    @property
    def lengths(self) -> np.ndarray: ...  # [B]

    @property
    def weights(self) -> np.ndarray: ...  # [B]

    @property
    def labels(self) -> np.ndarray: ...  # [B]

    def names(self) -> list[str]: ...

    def part(self, name: str, at: int) -> np.ndarray:
        """Return a field of one sample, [T, ...]."""


def collate(samples: SampleReader, micro_batch: MicroBatch, device: torch.device, *, experts: bool = True) -> Batch:
    """Concatenate the samples of a micro-batch, with or without the engine's experts."""
    first = next((at for at in micro_batch if at != FILLER), 0)

    def concatenate(name: str) -> Tensor:
        like, fill = samples.part(name, first), UNKNOWN_EXPERT if name == "experts" else 0
        filler = np.full((FILLER_TOKENS, *like.shape[1:]), fill, dtype=like.dtype)
        return torch.from_numpy(
            np.concatenate([filler if at == FILLER else samples.part(name, at) for at in micro_batch])
        )

    def per_sequence(array: np.ndarray) -> Tensor:
        values = [0.0 if at == FILLER else float(array[at]) for at in micro_batch]
        return to_device(torch.tensor(values, dtype=torch.float32), device)

    mask = concatenate("mask")
    names = [name for name in samples.names() if name != "mask" and (experts or name != "experts")]
    fields = {name: to_device(concatenate(name), device) for name in names}
    batch = Batch(
        tokens=fields.pop("tokens").long(),
        mask=to_device(mask, device),
        lengths=[FILLER_TOKENS if at == FILLER else int(samples.lengths[at]) for at in micro_batch],
        shares=per_sequence(samples.weights),
        labels=per_sequence(samples.labels),
        host_mask=mask,
    )
    for name, tensor in fields.items():
        setattr(batch, name, tensor)
    return batch
