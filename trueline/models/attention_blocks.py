"""Attention of packed sequences to blocks of keys; results of several blocks merge exactly."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from trueline.data.types import to_device

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_MULTIPLE, FLASH_HEAD_SIZE = 8, 256  # head sizes that torch's flash kernels support

Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value


@dataclass(frozen=True, slots=True)
class Spans:
    """The sequences of a pack: sequence i of the queries sees only sequence i of the keys."""

    query_lengths: list[int]
    key_lengths: list[int]
    causal: bool

    def __post_init__(self) -> None:
        if self.causal and self.query_lengths != self.key_lengths:
            raise ValueError("causal attention needs equally many keys and queries in every sequence")


class Attended(NamedTuple):
    """The result of a block, in float32 (float64 for float64 inputs); `lse` weights it against other blocks."""

    out: Tensor  # [n, H, D]
    lse: Tensor  # [n, H]


def block_forward(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> Attended:
    kernel = flash_forward if takes_flash(query) else math_forward
    heads = query.shape[1]
    return kernel(query, repeat_heads(key, heads), repeat_heads(value, heads), spans, scale)


def block_backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, spans: Spans, scale: float
) -> Gradients:
    """Compute gradients; they are exact for a part of the keys if `attended` merges all blocks."""
    kernel = flash_backward if takes_flash(query) else math_backward
    heads, key_heads = query.shape[1], key.shape[1]
    repeated = repeat_heads(key, heads), repeat_heads(value, heads)
    dquery, dkey, dvalue = kernel(dout, query, *repeated, attended, spans, scale)
    return dquery, sum_heads(dkey, key_heads), sum_heads(dvalue, key_heads)


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


def sum_heads(values: Tensor, heads: int) -> Tensor:
    return values if values.shape[1] == heads else values.unflatten(1, (heads, -1)).sum(2)


def wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


# Plain math: one sequence after the other, heads first


def math_forward(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> Attended:
    outs, lses = [], []
    queries, keys = spans.query_lengths, spans.key_lengths
    for q, k, v in zip(pieces(query, queries), pieces(key, keys), pieces(value, keys), strict=True):
        scores = masked_scores(q, k, spans.causal, scale)
        lse = scores.logsumexp(-1)
        outs.append((scores - lse.unsqueeze(-1)).exp() @ v)
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
        share = (masked_scores(q, k, spans.causal, scale) - lse).exp()
        flow = share * (d @ v.mT - offset) * scale
        found.append((flow @ k, flow.mT @ q, share.mT @ d))
    dquery, dkey, dvalue = (torch.cat(parts, 1).transpose(0, 1) for parts in zip(*found, strict=True))
    return dquery, dkey, dvalue


def pieces(values: Tensor, lengths: list[int]) -> list[Tensor]:
    """Split [n, H, D] into [H, length, D] of each sequence, in float32 or more."""
    return [wide(piece).transpose(0, 1) for piece in values.split(lengths)]


def masked_scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    scores = query @ key.mT * scale  # [H, queries, keys]
    if not causal:
        return scores
    later = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, float("-inf"))


# Flash kernels: all sequences at once; their log-sum-exp is [H, n]


def flash_forward(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> Attended:
    bounds = flash_bounds(spans, query.device)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, *bounds, 0.0, spans.causal, False, scale=scale
    )
    return Attended(out.float(), lse.transpose(0, 1))


def flash_backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, spans: Spans, scale: float
) -> Gradients:
    bounds = flash_bounds(spans, query.device)
    out, lse = attended.out.to(query.dtype), attended.lse.transpose(0, 1).contiguous()
    dropout_state = torch.empty(2, dtype=torch.uint64, device=query.device)  # unused without dropout
    unused = torch.empty(0, device=query.device)
    arguments = dout.to(query.dtype), query, key, value, out, lse, *bounds, 0.0, spans.causal, dropout_state, unused
    dquery, dkey, dvalue = torch.ops.aten._flash_attention_backward(*arguments, scale=scale)
    return dquery.float(), dkey.float(), dvalue.float()


def flash_bounds(spans: Spans, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    queries, keys = tuple(spans.query_lengths), tuple(spans.key_lengths)
    return boundaries(queries, device), boundaries(keys, device), max(queries), max(keys)


@lru_cache(maxsize=64)
def boundaries(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where sequences start and end, cached for all layers."""
    return to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
