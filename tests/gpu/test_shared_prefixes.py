"""Attention to gathered keys on a GPU, by flash kernels, against FlexAttention with a mask of the same families."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from trueline.data.types import Repeat
from trueline.models.attention import Shared
from trueline.models.ring_attention import Spans, gathered_attention

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
PROMPT, ANSWERS, HEADS, KEY_HEADS, SIZE = 512, [130, 64, 1, 200], 12, 2, 128
SCALE = SIZE**-0.5


def by_flex(query: Tensor, key: Tensor, value: Tensor, own: list[int]) -> Tensor:
    """The first sequence is whole; others see their own tokens, and the first ones of that."""
    sequence = torch.repeat_interleave(torch.tensor(own)).to(DEVICE)  # of each computed token

    def sees(batch: Tensor, head: Tensor, at: Tensor, of: Tensor) -> Tensor:
        return ((sequence[at] == sequence[of]) & (of <= at)) | ((sequence[at] > 0) & (of < PROMPT))

    mask = create_block_mask(sees, None, None, len(query), len(query), device=DEVICE)
    given = (one.transpose(0, 1)[None] for one in (query, key, value))
    out = torch.compile(flex_attention)(*given, block_mask=mask, scale=SCALE, enable_gqa=True)
    return out[0].transpose(0, 1)


def test_families_attend_as_flexattention_lets_them() -> None:
    lengths = [PROMPT + answer for answer in ANSWERS]
    shared = Shared(lengths, [Repeat(at, 0, PROMPT) for at in range(1, len(lengths))], DEVICE)
    random = torch.Generator(DEVICE).manual_seed(0)

    def some(heads: int) -> Tensor:
        made = torch.randn(sum(shared.own), heads, SIZE, generator=random, device=DEVICE, dtype=torch.bfloat16)
        return made.requires_grad_()

    parts, flow = [some(HEADS), some(KEY_HEADS), some(KEY_HEADS)], some(HEADS).detach()
    spans = Spans(shared.own, lengths, causal=True)
    outs = [gathered_attention(*parts, shared.row_of, spans, SCALE), by_flex(*parts, shared.own)]
    found, expected = ([out, *torch.autograd.grad(out, parts, flow)] for out in outs)
    assert sum(shared.own) == PROMPT + sum(ANSWERS)
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).norm() <= 2e-2 * other.float().norm()
