"""Ring attention: causal attention over sequences divided among ranks, with equal work for each.

Every sequence is padded and split into 2R chunks; rank r has chunks r and 2R-1-r of each sequence.
Keys and values circulate in the ring; in the backward pass their gradients circulate with them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trueline.models.attention_blocks import Attended, Spans, block_backward, block_forward, merge


@dataclass(frozen=True, slots=True)
class RingGroup:
    rank: int  # in the group
    size: int
    group: dist.ProcessGroup


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], ring: RingGroup, scale: float
) -> Tensor:  # [n, H, D]; query: [n, H, D], key and value: [n, Hkv, D]
    """Attend over a whole ring; `lengths` are the local parts of the sequences, equal on all ranks."""
    if sum(lengths) != len(query) or any(length % 2 for length in lengths):
        raise ValueError(f"{len(query)} positions are not sequences of two equal chunks each: {lengths}")
    return RingAttention.apply(query, key, value, lengths, ring, scale)  # type: ignore[no-any-return]


def gather_ring(values: Tensor, lengths: list[int], ring: RingGroup) -> Tensor:
    """Gather [n, ...] of each rank into [N, ...] on all ranks; all must compute one loss: gradients stay local."""
    return GatherRing.apply(values, lengths, ring)  # type: ignore[no-any-return]


def padded_lengths(lengths: list[int], size: int) -> list[int]:
    chunks = 2 * size
    return [-(-length // chunks) * chunks for length in lengths]


def local_positions(lengths: list[int], ring_rank: int, size: int) -> Tensor:  # [n] int64
    """Return the positions of this rank's values among all padded sequences; `lengths` may be padded or not."""
    padded = padded_lengths(lengths, size)
    found = []
    for end, length in zip(accumulate(padded), padded, strict=True):
        chunks = torch.arange(end - length, end).view(2 * size, -1)
        found += [chunks[ring_rank], chunks[2 * size - 1 - ring_rank]]
    return torch.cat(found)


@dataclass(frozen=True, slots=True)
class Block:
    """Local queries that see keys of one rank, and the keys that they see."""

    query_rows: Tensor | slice
    key_rows: Tensor | slice
    spans: Spans


def blocks(lengths: list[int], ring: RingGroup, device: torch.device) -> Iterator[Block]:
    """Yield a block for each step; at step s the keys are those of the rank s places before."""
    everything = slice(None)
    halves = [length // 2 for length in lengths]
    yield Block(everything, everything, Spans(lengths, lengths, causal=True))
    for step in range(1, ring.size):
        first, second = half_rows(tuple(lengths), device)
        if step <= ring.rank:
            yield Block(everything, first, Spans(lengths, halves, causal=False))
        else:
            yield Block(second, everything, Spans(halves, lengths, causal=False))


@lru_cache(maxsize=64)
def half_rows(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows of the first and second half of every sequence, cached for all layers."""
    rows = torch.arange(sum(lengths)).split(lengths)
    first, second = zip(*(part.chunk(2) for part in rows), strict=True)
    return torch.cat(first).to(device), torch.cat(second).to(device)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer to the next rank; it keeps both buffers alive until it is done."""

    sent: Tensor
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def pass_on(values: Tensor, ring: RingGroup) -> Transfer:
    received = torch.empty_like(values)
    following = dist.get_global_rank(ring.group, (ring.rank + 1) % ring.size)
    preceding = dist.get_global_rank(ring.group, (ring.rank - 1) % ring.size)
    pair = [
        dist.P2POp(dist.isend, values, following, ring.group),
        dist.P2POp(dist.irecv, received, preceding, ring.group),
    ]
    return Transfer(values, received, dist.batch_isend_irecv(pair))


def pass_around(values: Tensor, ring: RingGroup) -> Iterator[Tensor]:
    """Yield the values of this rank, then of each rank before it; the next ones arrive meanwhile."""
    for _ in range(ring.size - 1):
        coming = pass_on(values, ring)
        yield values
        values = coming.wait()
    yield values


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], ring: RingGroup, scale: float
    ) -> Tensor:
        out, lse = ring_forward(query, torch.stack([key, value]), lengths, ring, scale)
        out = out.to(query.dtype).contiguous()
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.settings = lengths, ring, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        lengths, ring, scale = ctx.settings
        queries = gradients[0], query, Attended(out, lse)
        dquery, (dkey, dvalue) = ring_backward(queries, torch.stack([key, value]), lengths, ring, scale)
        return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), None, None, None


def ring_forward(query: Tensor, pair: Tensor, lengths: list[int], ring: RingGroup, scale: float) -> Attended:
    steps = zip(blocks(lengths, ring, query.device), pass_around(pair, ring), strict=True)
    block, (key, value) = next(steps)
    total = block_forward(query, key, value, block.spans, scale)
    for block, (key, value) in steps:
        rows = block.query_rows
        part = block_forward(query[rows], key[block.key_rows], value[block.key_rows], block.spans, scale)
        merged = merge(Attended(total.out[rows], total.lse[rows]), part)
        total.out[rows], total.lse[rows] = merged.out, merged.lse
    return total


def ring_backward(
    queries: tuple[Tensor, Tensor, Attended], pair: Tensor, lengths: list[int], ring: RingGroup, scale: float
) -> tuple[Tensor, Tensor]:
    """Return gradients of queries [n, H, D], and of keys and values [2, n, Hkv, D] back on their rank."""
    dout, query, (out, lse) = queries
    dquery, dpair = torch.zeros_like(query, dtype=lse.dtype), torch.zeros_like(pair, dtype=lse.dtype)
    arriving = None
    for block, (key, value) in zip(blocks(lengths, ring, query.device), pass_around(pair, ring), strict=True):
        rows, key_rows = block.query_rows, block.key_rows
        attended = Attended(out[rows], lse[rows])
        found = block_backward(dout[rows], query[rows], key[key_rows], value[key_rows], attended, block.spans, scale)
        dquery[rows] += found[0]
        if arriving is not None:
            dpair = arriving.wait()
        dpair[:, key_rows] += torch.stack(found[1:])
        arriving = pass_on(dpair, ring) if ring.size > 1 else None
    return dquery, dpair if arriving is None else arriving.wait()


class GatherRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, lengths: list[int], ring: RingGroup) -> Tensor:
        ctx.settings = lengths, ring
        whole = values.new_empty(len(values) * ring.size, *values.shape[1:])
        parts = [values := values.contiguous()]
        if ring.size > 1:
            parts = [torch.empty_like(values) for _ in range(ring.size)]
            dist.all_gather(parts, values, group=ring.group)
        for rank, part in enumerate(parts):
            whole[local_positions(lengths, rank, ring.size).to(values.device)] = part
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        lengths, ring = ctx.settings
        rows = local_positions(lengths, ring.rank, ring.size)
        return gradients[0][rows.to(gradients[0].device)], None, None
