"""Divide samples into micro-batches for each rank, and collate them into tensors."""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from trueline.data.pictures import Picture
from trueline.data.types import TOKEN_FIELDS, UNKNOWN_EXPERT, Batch, Kin, Repeat, Sample, is_filled, to_device

FILLER = -1  # in a plan: a sample of weight zero, so that all ranks run the same number of passes
FILLER_TOKENS = 2
SHORTEST_PREFIX = 32  # tokens; computing a shorter one again costs nothing

MicroBatch = list[int]  # positions in the packed samples


class Plan(list[list[MicroBatch]]):
    """The passes of each rank: [rank][pass]."""

    saved: float = 0.0  # share of the tokens that are not computed, because they repeat others; 0: all are computed


class Unit(NamedTuple):
    """Samples that share a pass."""

    places: list[int]
    lengths: list[int]
    tokens: int  # that are computed


@dataclass(frozen=True, slots=True)
class Budget:
    """What fits into one forward pass of one rank."""

    tokens: int  # hard limit, padding included
    samples: int | None = None
    packed: bool = True  # False: sequences are padded to the longest of the pass


def plan_micro_batches(
    lengths: list[int], ranks: int, budget: Budget, samples_per_row: int = 1, kin: Sequence[Kin] = ()
) -> Plan:
    """Distribute samples: no pass exceeds the budget, all ranks get equally many passes, rows are not split.

    With `kin`, common prefixes in a pass count once, and families are cut as little as an even distribution allows.
    """
    rows = [range(start, start + samples_per_row) for start in range(0, len(lengths), samples_per_row)]
    for number, row in enumerate(rows, 1):
        if (tokens := pass_tokens([lengths[at] for at in row], budget)) > budget.tokens:
            raise ValueError(
                f"row {number} has {tokens} tokens, more than micro_batch_tokens={budget.tokens}: raise "
                "micro_batch_tokens or shorten the sequences"
            )
        if budget.samples is not None and len(row) > budget.samples:
            raise ValueError(f"micro_batch_samples={budget.samples} would split a pair: raise it to {len(row)} or more")
    whole = [make_unit(row, lengths, kin) for row in rows]
    cuts = family_cuts(lengths, ranks, budget, kin) if kin and samples_per_row == 1 else [whole]
    filler = [FILLER] * samples_per_row
    found = [(planned_work(shares, ranks), shares) for shares in (divide(units, ranks, budget) for units in cuts)]
    shares = min(found, key=lambda pair: pair[0])[1]
    passes = [[at for unit in share for at in unit.places] or filler for share in shares]
    rounds = [passes[start : start + ranks] for start in range(0, len(passes), ranks)]
    # Every second round is reversed, so that no rank always gets the fuller pass.
    plan = Plan([row[~rank if number % 2 else rank] for number, row in enumerate(rounds)] for rank in range(ranks))
    plan.saved = 1 - sum(map(share_tokens, shares)) / sum(lengths) if kin else 0.0
    return plan


def make_unit(places: Iterable[int], lengths: list[int], kin: Sequence[Kin] = ()) -> Unit:
    """Count the tokens of samples of which each shares a prefix with the first, if they are of one family."""
    members = list(places)
    own, first = [lengths[at] for at in members], members[0]
    repeated = [
        min(kin[at].prefix, kin[first].prefix) for at in members[1:] if kin and kin[at].family == kin[first].family
    ]
    return Unit(members, own, sum(own) - sum(repeated))


def family_cuts(lengths: list[int], ranks: int, budget: Budget, kin: Sequence[Kin]) -> list[list[Unit]]:
    """Return ways to cut families into units: not at all or, if there are several ranks, in halves, quarters, ..."""
    families: dict[int, list[int]] = {}
    for at in sorted(range(len(kin)), key=lambda at: -kin[at].prefix):  # the first of every unit shares the most
        families.setdefault(kin[at].family if kin[at].prefix else ~at, []).append(at)
    largest = max(map(len, families.values()), default=1) if ranks > 1 else 1
    pieces = [2**power for power in range(largest.bit_length())]
    return [[unit for one in families.values() for unit in cut(one, count, lengths, budget, kin)] for count in pieces]


def cut(family: list[int], pieces: int, lengths: list[int], budget: Budget, kin: Sequence[Kin]) -> list[Unit]:
    """Cut a family into equal pieces, or more where these exceed the budget."""
    size, found = math.ceil(len(family) / pieces), [[family[0]]]
    for at in family[1:]:
        longer = [*found[-1], at]
        fits = make_unit(longer, lengths, kin).tokens <= budget.tokens and len(longer) <= (budget.samples or size)
        if fits and len(longer) <= size:
            found[-1] = longer
        else:
            found.append([at])
    return [make_unit(places, lengths, kin) for places in found]


def divide(units: list[Unit], ranks: int, budget: Budget) -> list[list[Unit]]:
    """Distribute units over passes, the fullest first."""
    units = sorted(units, key=lambda unit: -unit.tokens)
    shares = packed_shares(units, ranks, budget) if budget.packed else padded_shares(units, ranks, budget)
    return sorted(shares, key=lambda share: -share_tokens(share))


def share_tokens(share: list[Unit]) -> int:
    return sum(unit.tokens for unit in share)


def planned_work(shares: list[list[Unit]], ranks: int) -> int:
    """Count the tokens of the fullest pass of every round, for which all ranks wait."""
    return sum(share_tokens(share) for share in shares[::ranks])


def pass_tokens(lengths: list[int], budget: Budget) -> int:
    """Count the tokens of one pass over sequences of these lengths, padding included."""
    return sum(lengths) if budget.packed else len(lengths) * max(lengths)


def packed_shares(units: list[Unit], ranks: int, budget: Budget) -> list[list[Unit]]:
    """Make as few passes as possible, with similar numbers of tokens."""
    passes = math.ceil(share_tokens(units) / budget.tokens / ranks)
    if budget.samples is not None:
        passes = max(passes, math.ceil(sum(len(unit.places) for unit in units) / budget.samples / ranks))
    while (shares := longest_first(units, ranks * passes, budget)) is None:
        passes = max(passes + 1, int(passes * 1.02))
    return shares


def longest_first(units: list[Unit], count: int, budget: Budget) -> list[list[Unit]] | None:
    """Give each unit to the share with the fewest tokens; return None if that exceeds the budget."""
    heap = [(0, number) for number in range(count)]
    shares: list[list[Unit]] = [[] for _ in range(count)]
    room = [budget.samples or sum(len(unit.places) for unit in units)] * count
    for unit in units:
        while heap and room[heap[0][1]] < len(unit.places):
            heapq.heappop(heap)
        if not heap or heap[0][0] + unit.tokens > budget.tokens:
            return None
        tokens, number = heap[0]
        shares[number].append(unit)
        room[number] -= len(unit.places)
        heapq.heapreplace(heap, (tokens + unit.tokens, number))
    return shares


def padded_shares(units: list[Unit], ranks: int, budget: Budget) -> list[list[Unit]]:
    """Group similar lengths, so that there is little padding; split or fill up to a multiple of the ranks."""
    shares: list[list[Unit]] = []
    for unit in units:
        lengths = [length for one in (*shares[-1], unit) for length in one.lengths] if shares else []
        fits = lengths and pass_tokens(lengths, budget) <= budget.tokens
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


# Common prefixes


def find_repeats(sequences: Sequence[np.ndarray]) -> list[Repeat]:
    """Return which sequences begin like another one, and with how many tokens; the other one always comes first.

    In alphabetical order, each has its longest common prefix with the one before it.
    """
    order = sorted(range(len(sequences)), key=lambda at: sequences[at].astype(">i8").tobytes())
    pairs = ((at, of, common_prefix(sequences[at], sequences[of])) for of, at in pairwise(order))
    # Every sequence keeps a token of its own.
    found = [Repeat(at, of, min(tokens, len(sequences[at]) - 1)) for at, of, tokens in pairs]
    return [repeat for repeat in found if repeat.tokens >= SHORTEST_PREFIX]


def find_families(sequences: Sequence[np.ndarray]) -> list[Kin]:
    """Return the family of each sequence: those that begin alike, in alphabetical order around the middle one."""
    found = [Kin(at, len(tokens)) for at, tokens in enumerate(sequences)]
    chains: list[list[Repeat]] = []
    for repeat in find_repeats(sequences):
        before = chains[-1][-1] if chains else Repeat(repeat.at, repeat.at, 0)
        if before.at != repeat.of:
            chains.append([repeat])
        # Less than half of what the ones before it have in common: it begins another family.
        elif repeat.tokens >= before.tokens // 2:
            chains[-1].append(repeat)
    for chain in chains:
        members, common = [chain[0].of, *(one.at for one in chain)], [one.tokens for one in chain]
        middle = len(members) // 2
        before_it = zip(members[middle - 1 :: -1], accumulate(common[middle - 1 :: -1], min), strict=True)
        behind_it = zip(members[middle + 1 :], accumulate(common[middle:], min), strict=True)
        for at, prefix in (*before_it, *behind_it):
            found[at] = Kin(members[middle], prefix)
    return found


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


# Tensors


@dataclass(slots=True, frozen=True)
class PackedSamples:
    """Samples for another process: one flat array per field, and the lengths of the samples."""

    lengths: np.ndarray  # [B]
    weights: np.ndarray  # [B]
    labels: np.ndarray  # [B]
    arrays: dict[str, np.ndarray]  # [sum of lengths, ...] each
    shares_prefixes: bool = False
    pictures: tuple[tuple[Picture, ...], ...] = ()  # [B], if any sample has one

    def names(self) -> list[str]:
        return [*self.arrays]

    def pictures_of(self, at: int) -> tuple[Picture, ...]:
        return self.pictures[at] if self.pictures else ()

    def part(self, name: str, at: int) -> np.ndarray:
        """Return a field of one sample."""
        begin = int(self.lengths[:at].sum())
        return self.arrays[name][begin : begin + int(self.lengths[at])]


def pack_samples(samples: list[Sample], *, experts: bool = True, shares: bool = False) -> PackedSamples:
    """Pack all filled fields; experts only if the reader needs them, as they are by far the largest."""
    names = [name for name in TOKEN_FIELDS if is_filled(samples[0], name) and (experts or name != "experts")]
    arrays = {name: torch.cat([getattr(sample, name) for sample in samples]).numpy() for name in names}
    lengths = np.array([sample.length() for sample in samples])
    weights = np.array([sample.weight for sample in samples])
    labels, pictures = np.array([sample.label for sample in samples]), tuple(sample.pictures for sample in samples)
    return PackedSamples(lengths, weights, labels, arrays, shares, pictures if any(pictures) else ())


class SampleReader(Protocol):
    """Samples as a rank reads them."""

    @property
    def lengths(self) -> np.ndarray: ...  # [B]

    @property
    def weights(self) -> np.ndarray: ...  # [B]

    @property
    def labels(self) -> np.ndarray: ...  # [B]

    @property
    def shares_prefixes(self) -> bool: ...  # common prefixes of a pass are computed once

    def names(self) -> list[str]: ...

    def part(self, name: str, at: int) -> np.ndarray:
        """Return a field of one sample, [T, ...]."""

    def pictures_of(self, at: int) -> tuple[Picture, ...]: ...


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
    if samples.shares_prefixes and FILLER not in micro_batch:
        batch.repeats = find_repeats([samples.part("tokens", at) for at in micro_batch])
    pictures = [() if at == FILLER else samples.pictures_of(at) for at in micro_batch]
    batch.pictures = pictures if any(pictures) else []
    for name, tensor in fields.items():
        setattr(batch, name, tensor)
    return batch
