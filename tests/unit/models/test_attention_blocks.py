"""Blocks of packed attention against a plain softmax in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from trueline.models import ring_attention
from trueline.models.ring_attention import Attended, Spans, block_backward, block_forward, merge, takes_flash

SIZE, SCALE = 16, 0.3
SPANS = [
    Spans([7], [7], causal=True),
    Spans([5, 8, 1, 12], [5, 8, 1, 12], causal=True),
    Spans([5, 8, 2], [5, 8, 2], causal=False),
    Spans([4, 6, 1], [2, 9, 140], causal=False),
    Spans([4, 6, 1], [4, 9, 140], causal=True),
    Spans([4, 6, 1, 9], [4, 9, 140, 9], causal=True, window=5),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PLACES = [  # device, dtype, relative error
    pytest.param((CPU, torch.float64, 1e-12), id="cpu-float64"),
    pytest.param((CPU, torch.float32, 1e-5), id="cpu-float32"),
    pytest.param((CPU, torch.bfloat16, 1e-5), id="cpu-bfloat16"),  # computed in float32
    pytest.param((CUDA, torch.float32, 1e-5), id="cuda-float32", marks=pytest.mark.gpu),
    pytest.param((CUDA, torch.float16, 2e-3), id="cuda-float16", marks=pytest.mark.gpu),
    pytest.param((CUDA, torch.bfloat16, 2e-2), id="cuda-bfloat16", marks=pytest.mark.gpu),
]
Place = tuple[torch.device, torch.dtype, float]
every_place = pytest.mark.parametrize("place", PLACES)
every_span = pytest.mark.parametrize(
    "spans", SPANS, ids=["one", "several", "not causal", "other lengths", "last queries", "window"]
)
every_grouping = pytest.mark.parametrize("key_heads", [4, 2, 1])


def make_inputs(spans: Spans, key_heads: int, place: Place) -> list[Tensor]:
    """Query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(len(spans.query_lengths))
    queries, keys = sum(spans.query_lengths), sum(spans.key_lengths)
    shapes = [(queries, 4), (keys, key_heads), (keys, key_heads), (queries, 4)]
    made = [torch.randn(*shape, SIZE, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(place[0], place[1]) for tensor in made]


def plain(query: Tensor, key: Tensor, value: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
    """One query of one head of one sequence after the other."""
    group = query.shape[1] // key.shape[1]
    outs, lses = [], []
    cuts = query.split(spans.query_lengths), key.split(spans.key_lengths), value.split(spans.key_lengths)
    for q, k, v in zip(*cuts, strict=True):
        for position in range(len(q)):
            last = position + 1 + len(k) - len(q)
            seen = slice(max(last - (spans.window or len(k)), 0), last) if spans.causal else slice(None)
            scores = [SCALE * k[seen, head // group] @ q[position, head] for head in range(q.shape[1])]
            outs.append(torch.stack([row.softmax(0) @ v[seen, head // group] for head, row in enumerate(scores)]))
            lses.append(torch.stack([row.exp().sum().log() for row in scores]))
    return torch.stack(outs), torch.stack(lses)


def expected(inputs: list[Tensor], spans: Spans) -> list[Tensor]:
    """Output, log-sum-exp and the gradients of query, key and value."""
    query, key, value, dout = (tensor.cpu().double() for tensor in inputs)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out, lse = plain(query, key, value, spans)
    return [out, lse, *torch.autograd.grad(out, leaves, dout)]


def accept(found: list[Any], wanted: list[Tensor], place: Place) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert one.dtype == (torch.float64 if place[1] == torch.float64 else torch.float32)
        assert (one.cpu().double() - other).norm() <= place[2] * other.norm()


@every_place
@every_span
@every_grouping
def test_values_and_gradients_are_those_of_the_plain_softmax(place: Place, spans: Spans, key_heads: int) -> None:
    inputs = make_inputs(spans, key_heads, place)
    query, key, value, dout = inputs
    assert takes_flash(query) is (place[0].type == "cuda" and place[1] != torch.float32)
    attended = block_forward(query, key, value, spans, SCALE)
    gradients = block_backward(dout, query, key, value, attended, spans, SCALE)
    accept([*attended, *gradients], expected(inputs, spans), place)


@every_span
def test_queries_are_computed_a_few_at_a_time(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_attention, "TILE", 3)
    test_values_and_gradients_are_those_of_the_plain_softmax((CPU, torch.float64, 1e-12), spans, 2)


@every_place
@every_grouping
def test_two_blocks_merge_to_the_whole(place: Place, key_heads: int) -> None:
    whole = Spans([4, 6], [7, 9], causal=False)
    inputs = make_inputs(whole, key_heads, place)
    query, key, value, dout = inputs
    spans = [Spans([4, 6], [3, 4], causal=False), Spans([4, 6], [4, 5], causal=False)]
    rows = [torch.tensor([0, 1, 2, 7, 8, 9, 10]), torch.tensor([3, 4, 5, 6, 11, 12, 13, 14, 15])]
    parts = [(key[seen.to(place[0])], value[seen.to(place[0])], span) for seen, span in zip(rows, spans, strict=True)]

    merged = merge(*(block_forward(query, *part, SCALE) for part in parts))

    found = [block_backward(dout, query, part[0], part[1], merged, part[2], SCALE) for part in parts]
    back = torch.cat(rows).argsort().to(place[0])  # from the order of the blocks to that of the keys
    gradients = [found[0][0] + found[1][0], *(torch.cat([found[0][i], found[1][i]])[back] for i in (1, 2))]
    accept([*merged, *gradients], expected(inputs, whole), place)


def test_a_block_that_weighs_nothing_changes_nothing() -> None:
    one = Attended(torch.randn(3, 2, 4), torch.zeros(3, 2))
    nothing = Attended(torch.randn(3, 2, 4), torch.full((3, 2), -200.0))
    for order in ((one, nothing), (nothing, one)):
        torch.testing.assert_close(merge(*order), one, rtol=0, atol=0)


def test_scores_too_large_for_exp_are_exact() -> None:
    spans = Spans([6], [6], causal=True)
    query, key, value, dout = make_inputs(spans, 4, (CPU, torch.float64, 0))
    query = query * 1e3  # exp of these scores overflows
    attended = block_forward(query, key, value, spans, SCALE)
    gradients = block_backward(dout, query, key, value, attended, spans, SCALE)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    out = plain(leaves[0], leaves[1], leaves[2], spans)[0]
    torch.testing.assert_close(attended.out, out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients, torch.autograd.grad(out, leaves, dout), rtol=1e-9, atol=1e-9)


def test_causal_blocks_need_as_many_keys_as_queries() -> None:
    with pytest.raises(ValueError, match="at least as many keys as queries"):
        Spans([3, 5], [3, 4], causal=True)
