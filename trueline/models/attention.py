"""Attention over packed sequences, for every Hugging Face decoder that asks transformers' attention interface.

The layout of the forward pass under way is one object that the attention function reads. It stays until the next
forward pass, because gradient checkpointing computes attention again during the backward pass.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from trueline.config.base import ConfigError
from trueline.models.attention_blocks import boundaries, takes_flash
from trueline.models.ring_attention import Ring, ring_attention

NAME = "trueline_packed"
REFUSED = {  # what some architectures hand to their attention function, and what it is called
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "head_mask": "head masks",
    "position_bias": "position biases",
    "attention_mask": "an attention mask of its own",
}


@dataclass(slots=True)
class Layout:
    """How the tokens of one forward pass are divided into sequences."""

    lengths: list[int]  # on this rank
    ring: Ring | None = None  # other ranks hold the rest of each sequence
    calls: int = 0  # of the attention function, during this pass


class Current:
    """The layout of this process's forward pass under way."""

    layout = Layout([])


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, n, D]
    key: Tensor,  # [1, Hkv, n, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    layout = Current.layout
    layout.calls += 1
    refuse(others | {"attention_mask": attention_mask})
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    window = others.get("sliding_window")
    parts = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [n, H, D] each
    if layout.ring is not None and layout.ring.size > 1:
        limit = max(layout.lengths) * layout.ring.size
        if window is not None and window < limit:
            raise ConfigError(
                f"model.context_parallel={layout.ring.size}: this model's attention window of {window} tokens is "
                f"shorter than a sequence of {limit}; windows are not divided over a ring: set model.context_parallel=1"
            )
        out = ring_attention(parts[0], parts[1], parts[2], layout.lengths, layout.ring, scale)
    else:
        out = whole_attention(parts, layout.lengths, scale, window)
    return out[None], None


def refuse(others: dict[str, Any]) -> None:
    found = [what for name, what in REFUSED.items() if others.get(name) is not None]
    if found:
        raise ConfigError(
            f"this architecture uses {found[0]}, which packed attention does not know: "
            "set training.packing=false (and model.context_parallel=1)"
        )


def whole_attention(parts: list[Tensor], lengths: list[int], scale: float, window: int | None) -> Tensor:
    query, key, value = parts
    attend = varlen_attention if takes_flash(query) else sequence_by_sequence
    return attend(query, key, value, lengths, scale, window)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float, window: int | None
) -> Tensor:
    """Run torch's flash kernels over sequences of different lengths; several heads may share one of keys."""
    ends, longest = boundaries(tuple(lengths), query.device), max(lengths)
    near = window is not None and window < longest
    span = {"window_size_left": window - 1, "window_size_right": 0} if near else {}  # type: ignore[operator]
    out, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, ends, ends, longest, longest, 0.0, not near, False, scale=scale, **span
    )
    return out  # type: ignore[no-any-return]


def sequence_by_sequence(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float, window: int | None
) -> Tensor:
    """Attend causally in one sequence after the other, which is exact on every device."""
    pieces = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    return torch.cat([one_sequence(*piece, scale=scale, window=window) for piece in pieces])


def one_sequence(query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None) -> Tensor:
    """Attend causally within one sequence; query, key and value are [T, heads, D] each."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    length, grouped = query.shape[2], query.shape[1] != key.shape[1]
    near = None
    if window is not None and window < length:
        places = torch.arange(length, device=query.device)
        distance = places[:, None] - places
        near = (distance >= 0) & (distance < window)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=near, is_causal=near is None, scale=scale, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)


AttentionInterface.register(NAME, packed_attention)
