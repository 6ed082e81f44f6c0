"""How sequences share a forward pass (packed, padded, with common prefixes, in a ring), and packed attention.

Packed attention works for every Hugging Face decoder that uses transformers' attention interface. The current layout
stays until the next forward pass, because gradient checkpointing computes attention again in the backward pass.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from trueline.config.base import ConfigError
from trueline.data.types import UNKNOWN_EXPERT, Repeat, to_device
from trueline.models import ring_attention as rings
from trueline.models.ring_attention import RingGroup, Spans, boundaries, takes_flash

NAME = "trueline_packed"
KINDS = "token_type_ids"  # by which a model finds the tokens of pictures
REFUSED = {  # arguments of some architectures' attention functions
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "head_mask": "head masks",
    "position_bias": "position biases",
    "attention_mask": "an attention mask of its own",
}


@dataclass(slots=True)
class PackedLayout:
    """How the tokens of one forward pass are divided into sequences."""

    lengths: list[int]  # on this rank; those of queries, where keys are shared
    ring: RingGroup | None = None  # other ranks hold the rest of each sequence
    keys: "SharedKeys | None" = None  # some sequences begin with tokens of others
    blocks: Tensor | None = None  # [n], the number of each token's picture, whose tokens see each other; -1: words
    calls: int = 0  # of the attention function, during this pass


@dataclass(frozen=True, slots=True)
class SharedKeys:
    lengths: list[int]  # of whole sequences
    rows: Tensor  # [N], where the key of each of their tokens is among those that are computed


class Current:
    """The layout of this process's current forward pass."""

    layout = PackedLayout([])


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
    given = others | {"attention_mask": attention_mask}
    if refused := [what for name, what in REFUSED.items() if given.get(name) is not None]:
        raise ConfigError(
            f"this architecture uses {refused[0]}, which packed attention does not support: set training.packing=false "
            "(and model.context_parallel=1)"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    window = others.get("sliding_window")
    parts = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [n, H, D] each
    if layout.ring is not None and layout.ring.size > 1:
        limit = max(layout.lengths) * layout.ring.size
        if window is not None and window < limit:
            raise ConfigError(
                f"model.context_parallel={layout.ring.size} does not support this model's attention window of {window} "
                f"tokens, shorter than a sequence of {limit}: set model.context_parallel=1"
            )
        out = rings.ring_attention(parts[0], parts[1], parts[2], layout.lengths, layout.ring, scale)
    elif layout.keys is not None and not takes_flash(parts[0]):
        keys, values = (part[layout.keys.rows] for part in parts[1:])
        out = sequence_by_sequence(parts[0], keys, values, layout.lengths, scale, window, layout.keys.lengths)
    elif layout.keys is not None:
        spans = Spans(layout.lengths, layout.keys.lengths, causal=True, window=window)
        out = rings.gathered_attention(parts[0], parts[1], parts[2], layout.keys.rows, spans, scale)
    elif layout.blocks is not None:
        out = two_way_attention(parts, layout.lengths, layout.blocks, scale, window)
    else:
        attend = varlen_attention if takes_flash(parts[0]) else sequence_by_sequence
        out = attend(parts[0], parts[1], parts[2], layout.lengths, scale, window)
    return out[None], None


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float, window: int | None
) -> Tensor:
    """Run torch's flash kernels over sequences of different lengths, with grouped heads too."""
    ends, longest = boundaries(tuple(lengths), query.device), max(lengths)
    near = window is not None and window < longest
    span = {"window_size_left": window - 1, "window_size_right": 0} if near else {}  # type: ignore[operator]
    out, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, ends, ends, longest, longest, 0.0, not near, False, scale=scale, **span
    )
    return out  # type: ignore[no-any-return]


def sequence_by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    scale: float,
    window: int | None,
    whole: list[int] | None = None,
) -> Tensor:
    """Attend causally in one sequence after the other, exact on every device; queries are the last of `whole` ones."""
    outs, grouped, keys = [], query.shape[1] != key.shape[1], whole or lengths
    for piece in zip(query.split(lengths), key.split(keys), value.split(keys), strict=True):
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in piece)  # [1, heads, T, D] each
        seen, length, total = None, len(piece[0]), len(piece[1])
        if length < total or (window is not None and window < total):
            seen = rings.seen_keys(length, total, window, query.device)
        out = scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=scale, enable_gqa=grouped)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def two_way_attention(
    parts: list[Tensor], lengths: list[int], blocks: Tensor, scale: float, window: int | None
) -> Tensor:
    """Attend causally in one sequence after the other, and in both directions inside of blocks."""
    outs, grouped = [], parts[0].shape[1] != parts[1].shape[1]
    for *piece, block in zip(*(part.split(lengths) for part in (*parts, blocks)), strict=True):
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in piece)  # [1, heads, T, D] each
        together = (block[:, None] == block) & (block >= 0)
        seen = rings.seen_keys(len(block), len(block), None, block.device) | together
        seen = seen if window is None else seen.triu(1 - window)  # which holds for pictures too
        out = scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=grouped)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def blocks_of(pictured: Tensor) -> Tensor:
    """Number the runs of tokens of pictures, [N] bool -> [N]."""
    begins = pictured & ~torch.cat([pictured.new_zeros(1), pictured[:-1]])
    return torch.where(pictured, begins.cumsum(0), -1)


AttentionInterface.register(NAME, packed_attention)


class Arrangement:
    """Convert between the flat axis [N] of a batch and the input of one rank's model, in which it stays flat."""

    pictured: Tensor | None = None  # [N] bool, tokens of pictures, where those of one see each other

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return the model's arguments."""
        blocks = None if self.pictured is None else blocks_of(self.pictured)
        Current.layout = PackedLayout(self.lengths, blocks=blocks)
        return {"input_ids": tokens[None], "position_ids": positions(self.lengths, tokens.device)[None]}

    def spatial(self, places: Tensor) -> Tensor:
        """Arrange positions in three dimensions as the model takes them, [N, 3] -> [3, rows, n]."""
        return places.T[:, None]

    def hidden_rows(self, states: Tensor) -> Tensor:
        """Return the last hidden states as [n, H], one row per local position."""
        return states[0]

    def local(self, values: Tensor) -> Tensor:
        """Take this rank's part, [N] -> [n]."""
        return values

    def whole(self, values: Tensor) -> Tensor:
        """Join the parts of all ranks, [n, ...] -> [N, ...]."""
        return values

    def rows(self, places: Tensor) -> Tensor:
        """Return which rows of the hidden states belong to these local positions."""
        return places

    def spread(self, values: Tensor) -> Tensor:
        """Give every token the values of its row, [rows, ...] -> [N, ...]."""
        return self.whole(values)

    def expert_rows(self, experts: Tensor) -> Tensor:
        """Arrange experts as routers see tokens: one list, padding included, [N, ...] -> [rows, ...]."""
        return experts


class Padded(Arrangement):
    """Sequences padded on the right, so that causal attention needs no mask."""

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        given = {"input_ids": tokens} if self.pictured is None else {"input_ids": tokens, KINDS: self.pictured.long()}
        parts = {name: tensor.split(self.lengths) for name, tensor in given.items()}
        return {name: torch.nn.utils.rnn.pad_sequence(part, batch_first=True) for name, part in parts.items()}

    def spatial(self, places: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(places.split(self.lengths), batch_first=True).permute(2, 0, 1)

    def hidden_rows(self, states: Tensor) -> Tensor:
        return torch.cat([row[:length] for row, length in zip(states, self.lengths, strict=True)])

    def expert_rows(self, experts: Tensor) -> Tensor:
        parts = experts.split(self.lengths)
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=UNKNOWN_EXPERT).flatten(0, 1)


class Shared(Arrangement):
    """Sequences that begin alike: their common tokens are computed once, in one of them.

    What a model computes of a token depends only on the tokens before it, so all of them read the same row.
    """

    def __init__(self, lengths: list[int], repeats: list[Repeat], device: torch.device) -> None:
        super().__init__(lengths)
        sources, self.own = list(torch.arange(sum(lengths)).split(lengths)), list(lengths)
        for at, of, tokens in repeats:  # a sequence that repeats another comes after it
            sources[at] = torch.cat([sources[of][:tokens], sources[at][tokens:]])
            self.own[at] -= tokens
        source = torch.cat(sources)  # [N], the position whose row a token reads
        computed = source == torch.arange(len(source))
        self.computed = to_device(computed.nonzero()[:, 0], device)
        self.row_of = to_device((computed.cumsum(0) - 1)[source], device)

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        Current.layout = PackedLayout(self.own, keys=SharedKeys(self.lengths, self.row_of))
        places = positions(self.lengths, tokens.device)
        return {"input_ids": tokens[self.computed][None], "position_ids": places[self.computed][None]}

    def spatial(self, places: Tensor) -> Tensor:
        return super().spatial(places[self.computed])

    def rows(self, places: Tensor) -> Tensor:
        return self.row_of[places]

    def spread(self, values: Tensor) -> Tensor:
        return values[self.row_of]

    def expert_rows(self, experts: Tensor) -> Tensor:
        return experts[self.computed]


class Ringed(Arrangement):
    """Each sequence is padded to a length that the ring divides; added tokens are last and dropped."""

    def __init__(self, lengths: list[int], ring: RingGroup, device: torch.device) -> None:
        super().__init__(lengths)
        self.ring, self.stretched = ring, rings.padded_lengths(lengths, ring.size)
        *starts, self.total = accumulate(self.stretched, initial=0)
        real = torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
        here = rings.local_positions(self.stretched, ring.rank, ring.size)
        self.real, self.here = ({place.device: place, device: to_device(place, device)} for place in (real, here))

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        Current.layout = PackedLayout([length // self.ring.size for length in self.stretched], self.ring)
        places = positions(self.stretched, tokens.device)[self.here[tokens.device]]
        return {"input_ids": self.local(tokens)[None], "position_ids": places[None]}

    def expert_rows(self, experts: Tensor) -> Tensor:
        return self.local(experts, UNKNOWN_EXPERT)

    def local(self, values: Tensor, added: int = 0) -> Tensor:
        stretched = values.new_full((self.total, *values.shape[1:]), added)
        stretched[self.real[values.device]] = values
        return stretched[self.here[values.device]]

    def whole(self, values: Tensor) -> Tensor:
        return rings.gather_ring(values, self.stretched, self.ring)[self.real[values.device]]


def positions(lengths: list[int], device: torch.device) -> Tensor:
    return to_device(torch.cat([torch.arange(length) for length in lengths]), device)
