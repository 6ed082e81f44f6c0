"""Ring attention: causal attention over sequences divided among ranks, with equal work for each.

Every sequence is padded and split into 2R chunks; rank r has chunks r and 2R-1-r of each sequence.
Keys and values circulate in the ring; in the backward pass their gradients circulate with them.
At each step queries attend to a block of keys, and the results of all blocks merge exactly.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trueline.data.types import to_device

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_MULTIPLE, FLASH_HEAD_SIZE = 8, 256  # head sizes that torch's flash kernels support
TILE = 1024  # queries whose scores are in memory at a time, where there are no such kernels

Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value


@dataclass(frozen=True, slots=True)
class RingGroup:
    rank: int  # in the group
    size: int
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a model: data outermost, then context parallel (a ring), tensor innermost.

    Ranks with different data places see different samples; the others work on the same samples.
    """

    world: int
    ring: int = 1
    tensor: int = 1

    @property
    def width(self) -> int:
        """Return how many ranks work on the same samples."""
        return self.ring * self.tensor

    @property
    def data(self) -> int:
        return self.world // self.width

    def data_place(self, rank: int) -> int:
        return rank // self.width

    def ring_ranks(self, data: int, tensor: int) -> list[int]:
        return [(data * self.ring + place) * self.tensor + tensor for place in range(self.ring)]

    def join_ring(self, rank: int) -> RingGroup | None:
        """Join this rank's context-parallel ring; every rank must call this: torch makes all groups on all ranks."""
        if self.ring == 1:
            return None
        found = None
        for data in range(self.data):
            for tensor in range(self.tensor):
                ranks = self.ring_ranks(data, tensor)
                group = dist.new_group(ranks)
                if rank in ranks:
                    found = RingGroup(ranks.index(rank), self.ring, group)
        return found


@dataclass(frozen=True, slots=True)
class Spans:
    """The sequences of a pack: sequence i of the queries sees only sequence i of the keys."""

    query_lengths: list[int]
    key_lengths: list[int]
    causal: bool  # the queries are the last ones of their sequence
    window: int | None = None  # of keys that a query sees, its own among them; only if causal

    def __post_init__(self) -> None:
        pairs = zip(self.query_lengths, self.key_lengths, strict=True)
        if self.causal and any(queries > keys for queries, keys in pairs):
            raise ValueError("causal attention needs at least as many keys as queries in every sequence")

    def near(self) -> int | None:
        """Return the window, if it hides anything."""
        return self.window if self.window is not None and self.window < max(self.key_lengths) else None


class Attended(NamedTuple):
    """The result of a block, in float32 (float64 for float64 inputs); `lse` weights it against other blocks."""

    out: Tensor  # [n, H, D]
    lse: Tensor  # [n, H]


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], ring: RingGroup, scale: float
) -> Tensor:  # [n, H, D]; query: [n, H, D], key and value: [n, Hkv, D]
    """Attend over a whole ring; `lengths` are the local parts of the sequences, equal on all ranks."""
    if sum(lengths) != len(query) or any(length % 2 for length in lengths):
        raise ValueError(f"{len(query)} positions are not sequences of two equal chunks each: {lengths}")
    return RingAttention.apply(query, key, value, lengths, ring, scale)  # type: ignore[no-any-return]


def gathered_attention(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, spans: Spans, scale: float) -> Tensor:
    """Attend to keys [n, Hkv, D] in the order of `rows` [N]; sequences with a common prefix share its keys."""
    return GatheredAttention.apply(query, key, value, rows, spans, scale)  # type: ignore[no-any-return]


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
        pairs = pass_around(torch.stack([key, value]), ring)
        steps = zip(blocks(lengths, ring, query.device), pairs, strict=True)
        block, (keys, values) = next(steps)
        total = block_forward(query, keys, values, block.spans, scale)
        for block, (keys, values) in steps:
            rows = block.query_rows
            part = block_forward(query[rows], keys[block.key_rows], values[block.key_rows], block.spans, scale)
            total.out[rows], total.lse[rows] = merge(Attended(total.out[rows], total.lse[rows]), part)
        out = total.out.to(query.dtype).contiguous()
        ctx.save_for_backward(query, key, value, out, total.lse)
        ctx.settings = lengths, ring, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, and of keys and values back on their rank."""
        (dout,), (query, key, value, out, lse), (lengths, ring, scale) = gradients, ctx.saved_tensors, ctx.settings
        pair = torch.stack([key, value])
        dquery, dpair = torch.zeros_like(query, dtype=lse.dtype), torch.zeros_like(pair, dtype=lse.dtype)
        arriving = None
        for block, (keys, values) in zip(blocks(lengths, ring, query.device), pass_around(pair, ring), strict=True):
            rows, seen = block.query_rows, block.key_rows
            attended = Attended(out[rows], lse[rows])
            found = block_backward(dout[rows], query[rows], keys[seen], values[seen], attended, block.spans, scale)
            dquery[rows] += found[0]
            if arriving is not None:
                dpair = arriving.wait()
            dpair[:, seen] += torch.stack(found[1:])
            arriving = pass_on(dpair, ring) if ring.size > 1 else None
        dkey, dvalue = dpair if arriving is None else arriving.wait()
        return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), None, None, None


class GatheredAttention(torch.autograd.Function):
    """The backward pass gathers keys again, as they may take several times the memory of the queries."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, spans: Spans, scale: float
    ) -> Tensor:
        attended = block_forward(query, key[rows], value[rows], spans, scale)
        out = attended.out.to(query.dtype).contiguous()
        ctx.save_for_backward(query, key, value, rows, out, attended.lse)
        ctx.settings = spans, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dout,), (query, key, value, rows, out, lse), (spans, scale) = gradients, ctx.saved_tensors, ctx.settings
        dquery, *seen = block_backward(dout, query, key[rows], value[rows], Attended(out, lse), spans, scale)
        dkey, dvalue = (
            torch.zeros_like(one, dtype=part.dtype).index_add_(0, rows, part).to(one.dtype)
            for one, part in zip((key, value), seen, strict=True)
        )
        return dquery.to(query.dtype), dkey, dvalue, None, None, None


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


def block_forward(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> Attended:
    if takes_flash(query):
        return flash_forward(query, key, value, spans, scale)
    heads = query.shape[1]
    return math_forward(query, repeat_heads(key, heads), repeat_heads(value, heads), spans, scale)


def block_backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, spans: Spans, scale: float
) -> Gradients:
    """Compute gradients; they are exact for a part of the keys if `attended` merges all blocks."""
    if takes_flash(query):
        return flash_backward(dout, query, key, value, attended, spans, scale)
    heads, key_heads = query.shape[1], key.shape[1]
    repeated = repeat_heads(key, heads), repeat_heads(value, heads)
    dquery, *shared = math_backward(dout, query, *repeated, attended, spans, scale)
    dkey, dvalue = (one if heads == key_heads else one.unflatten(1, (key_heads, -1)).sum(2) for one in shared)
    return dquery, dkey, dvalue


def merge(one: Attended, other: Attended) -> Attended:
    """Merge two blocks into the attention to the keys of both."""
    lse = torch.logaddexp(one.lse, other.lse)
    shares = [(part.lse - lse).exp().unsqueeze(-1) for part in (one, other)]
    return Attended(one.out * shares[0] + other.out * shares[1], lse)


def takes_flash(query: Tensor) -> bool:
    size = query.shape[-1]
    fits = size % FLASH_MULTIPLE == 0 and size <= FLASH_HEAD_SIZE
    return query.is_cuda and query.dtype in FLASH_DTYPES and fits


def repeat_heads(values: Tensor, heads: int) -> Tensor:
    return values if values.shape[1] == heads else values.repeat_interleave(heads // values.shape[1], dim=1)


def wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def math_forward(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> Attended:
    """Compute one sequence after the other, heads first."""
    outs, lses = [], []
    queries, keys = spans.query_lengths, spans.key_lengths
    for q, k, v in zip(pieces(query, queries), pieces(key, keys), pieces(value, keys), strict=True):
        for rows, seen in tiles(q, k, spans.causal):
            scores = masked_scores(q[:, rows], k[:, seen], spans, scale)
            lse = scores.logsumexp(-1)
            outs.append((scores - lse.unsqueeze(-1)).exp() @ v[:, seen])
            lses.append(lse)
    return Attended(torch.cat(outs, 1).transpose(0, 1), torch.cat(lses, 1).transpose(0, 1))


def math_backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, spans: Spans, scale: float
) -> Gradients:
    """Compute d score = p (dout value^T - delta), with p = exp(score - lse) and delta the sum of dout * out."""
    queries, keys = spans.query_lengths, spans.key_lengths
    delta = (wide(dout) * wide(attended.out)).sum(-1, keepdim=True)
    by_query = [pieces(part, queries) for part in (dout, query, attended.lse.unsqueeze(-1), delta)]
    found = []
    for d, q, lse, offset, k, v in zip(*by_query, pieces(key, keys), pieces(value, keys), strict=True):
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, seen in tiles(q, k, spans.causal):
            share = (masked_scores(q[:, rows], k[:, seen], spans, scale) - lse[:, rows]).exp()
            flow = share * (d[:, rows] @ v[:, seen].mT - offset[:, rows]) * scale
            dq[:, rows] = flow @ k[:, seen]
            dk[:, seen] += flow.mT @ q[:, rows]
            dv[:, seen] += share.mT @ d[:, rows]
        found.append((dq, dk, dv))
    dquery, dkey, dvalue = (torch.cat(parts, 1).transpose(0, 1) for parts in zip(*found, strict=True))
    return dquery, dkey, dvalue


def tiles(query: Tensor, key: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield some queries of a sequence after the other, and the keys that the last one sees, to bound the scores."""
    queries, keys = query.shape[1], key.shape[1]
    for start in range(0, queries, TILE):
        end = min(start + TILE, queries)
        yield slice(start, end), slice(keys - queries + end if causal else keys)


def pieces(values: Tensor, lengths: list[int]) -> list[Tensor]:
    """Split [n, H, D] into [H, length, D] of each sequence, in float32 or more."""
    return [wide(piece).transpose(0, 1) for piece in values.split(lengths)]


def masked_scores(query: Tensor, key: Tensor, spans: Spans, scale: float) -> Tensor:
    scores = query @ key.mT * scale  # [H, queries, keys]
    if not spans.causal:
        return scores
    seen = seen_keys(query.shape[1], key.shape[1], spans.window, scores.device)
    return scores.masked_fill(~seen, -math.inf)


def seen_keys(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys of a sequence its last queries see, [queries, keys] bool."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen if window is None else seen.triu(1 + keys - queries - window)


def flash_forward(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> Attended:
    """Compute all sequences at once; the kernels' log-sum-exp is [H, n]."""
    bounds, (causal, span) = flash_bounds(spans, query.device), flash_mask(spans)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, *bounds, 0.0, causal, False, scale=scale, **span
    )
    return Attended(out.float(), lse.transpose(0, 1))


def flash_backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, spans: Spans, scale: float
) -> Gradients:
    bounds, (causal, span) = flash_bounds(spans, query.device), flash_mask(spans)
    out, lse = attended.out.to(query.dtype), attended.lse.transpose(0, 1).contiguous()
    dropout_state = torch.empty(2, dtype=torch.uint64, device=query.device)  # unused without dropout
    unused = torch.empty(0, device=query.device)
    arguments = dout.to(query.dtype), query, key, value, out, lse, *bounds, 0.0, causal, dropout_state, unused
    dquery, dkey, dvalue = torch.ops.aten._flash_attention_backward(*arguments, scale=scale, **span)
    return dquery.float(), dkey.float(), dvalue.float()


def flash_bounds(spans: Spans, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    queries, keys = tuple(spans.query_lengths), tuple(spans.key_lengths)
    return boundaries(queries, device), boundaries(keys, device), max(queries), max(keys)


def flash_mask(spans: Spans) -> tuple[bool, dict[str, int]]:
    """Return whether a mask is plainly causal, or else the kernels' window; both count from a sequence's last key."""
    near = spans.near() if spans.causal else None
    return spans.causal and near is None, {} if near is None else {"window_size_left": near - 1, "window_size_right": 0}


@lru_cache(maxsize=64)
def boundaries(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where sequences start and end, cached for all layers."""
    return to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
