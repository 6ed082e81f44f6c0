"""Which samples go into which forward pass of which rank, and how they become tensors."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trueline.data.types import Batch, PackedSamples

FILLER = -1  # in a plan: a sample of weight zero, so that every rank does the same number of passes

MicroBatch = list[int]  # positions in the packed samples
Plan = list[list[MicroBatch]]  # [rank][pass]


@dataclass(frozen=True, slots=True)
class Budget:
    """What fits into one forward pass of one rank."""

    tokens: int  # hard limit, padding included
    samples: int | None = None


def plan_micro_batches(lengths: list[int], ranks: int, budget: Budget) -> Plan:
    """Spread samples over ranks: no pass above the budget, the same number of passes on every rank.

    Samples are dealt out longest first, so ranks get like amounts of work and passes little padding.
    """
    too_long = [position for position, length in enumerate(lengths) if length > budget.tokens]
    if too_long:
        raise ValueError(
            f"sample {too_long[0]} has {lengths[too_long[0]]} tokens, more than micro_batch_tokens={budget.tokens}: "
            "raise micro_batch_tokens or shorten the sequences"
        )
    order = sorted(range(len(lengths)), key=lambda position: -lengths[position])
    dealt = [deal(order, rank, ranks) for rank in range(ranks)]
    plan = [fill(share, lengths, budget) for share in dealt]
    passes = max(len(micro_batches) for micro_batches in plan)
    return [stretch(micro_batches, passes) for micro_batches in plan]


def deal(order: list[int], rank: int, ranks: int) -> list[int]:
    """Every other round runs backwards (0 1 2, 2 1 0, ...), so that no rank always gets the longer one."""
    rounds = [order[start : start + ranks] for start in range(0, len(order), ranks)]
    places = [rank if number % 2 == 0 else ranks - 1 - rank for number in range(len(rounds))]
    return [row[place] for row, place in zip(rounds, places, strict=True) if place < len(row)]


def fill(share: list[int], lengths: list[int], budget: Budget) -> list[MicroBatch]:
    """Cut a list sorted longest first into passes; the first sample of a pass sets its padded width."""
    micro_batches: list[MicroBatch] = []
    for position in share:
        current = micro_batches[-1] if micro_batches else []
        rows = len(current) + 1
        fits = current and rows * lengths[current[0]] <= budget.tokens
        if fits and (budget.samples is None or rows <= budget.samples):
            current.append(position)
        else:
            micro_batches.append([position])
    return micro_batches


def stretch(micro_batches: list[MicroBatch], passes: int) -> list[MicroBatch]:
    """Split the fullest passes, or add fillers, until there are `passes` of them."""
    stretched = [list(micro_batch) for micro_batch in micro_batches]
    while len(stretched) < passes:
        fullest = max(range(len(stretched)), key=lambda index: len(stretched[index]), default=None)
        if fullest is None or len(stretched[fullest]) < 2:
            stretched.append([FILLER])
        else:
            rows = stretched[fullest]
            stretched[fullest : fullest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return stretched


def collate(packed: PackedSamples, micro_batch: MicroBatch, device: torch.device) -> Batch:
    """Cut the named samples out of the flat arrays and pad them on the right."""
    ends = np.cumsum(packed.lengths)
    spans = [(0, 1) if at == FILLER else (int(ends[at] - packed.lengths[at]), int(ends[at])) for at in micro_batch]
    width = max(end - start for start, end in spans)

    def padded(array: np.ndarray) -> Tensor:
        rows = np.zeros((len(spans), width), dtype=array.dtype)
        for row, (start, end) in enumerate(spans):
            rows[row, : end - start] = array[start:end]
        return torch.from_numpy(rows).to(device)

    fields = {name: padded(array) for name, array in packed.arrays.items()}
    shares = [0.0 if at == FILLER else float(packed.weights[at]) for at in micro_batch]
    weights = torch.tensor(shares, dtype=torch.float32, device=device)[:, None] * fields["mask"]
    batch = Batch(fields.pop("tokens"), fields.pop("mask"), weights)
    for name, tensor in fields.items():
        setattr(batch, name, tensor)
    return batch
