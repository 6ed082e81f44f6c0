"""The head's likeliest tokens and all others together, against whole distributions.

Covers `trueline.algorithms.divergences`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trueline.algorithms.divergences import DIVERGENCES
from trueline.models.head import HeadWork, chunked_likeliest

ROWS, SIZE, WORDS = 7, 5, 13


def make(seed: int = 0) -> tuple[Tensor, nn.Linear]:
    torch.manual_seed(seed)
    return torch.randn(ROWS, SIZE, requires_grad=True), nn.Linear(SIZE, WORDS)


def whole(hidden: Tensor, head: nn.Linear, temperature: float) -> Tensor:
    return (nn.functional.linear(hidden, head.weight, head.bias) / temperature).log_softmax(-1)


def with_rest(scores: Tensor, ids: Tensor) -> Tensor:
    """Probabilities of some tokens, and of all others: one minus their sum."""
    chosen = scores.exp().gather(-1, ids)
    return torch.cat([chosen, 1 - chosen.sum(-1, keepdim=True)], -1).log()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("top_k", [1, 4])
def test_the_likeliest_and_the_rest_are_those_of_the_whole_distribution(
    top_k: int, chunk: int, temperature: float
) -> None:
    hidden, head = make()
    ids, logprobs = chunked_likeliest(hidden, head, top_k, HeadWork(temperature, chunk, entropy=False))
    scores = whole(hidden, head, temperature)
    assert ids.dtype == torch.int32 and ids.tolist() == scores.topk(top_k).indices.tolist()
    torch.testing.assert_close(logprobs, with_rest(scores, ids.long()), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(ROWS))


@pytest.mark.parametrize("wanted", [WORDS, 1000])
def test_the_whole_vocabulary_leaves_no_rest(wanted: int) -> None:
    hidden, head = make()
    ids, logprobs = chunked_likeliest(hidden, head, wanted, HeadWork(1.0, 3, entropy=False))
    assert logprobs.shape == ids.shape == (ROWS, WORDS)
    torch.testing.assert_close(logprobs, whole(hidden, head, 1.0).gather(-1, ids.long()))


def test_a_rest_of_next_to_nothing_is_exact() -> None:
    """1 - p would be 0 in float32."""
    head = nn.Linear(1, 3, bias=False)
    head.weight.data.copy_(torch.tensor([[60.0], [0.0], [1.0]]))
    _, logprobs = chunked_likeliest(torch.ones(1, 1), head, 1, HeadWork(1.0, 1, entropy=False))
    assert logprobs[0, 1].item() == pytest.approx(torch.tensor([0.0, 1.0]).logsumexp(0).item() - 60.0, rel=1e-5)


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("top_k", [3, WORDS])
@pytest.mark.parametrize("kind", sorted(DIVERGENCES))
def test_gradients_of_divergences_are_those_of_plain_autograd(kind: str, top_k: int, chunk: int) -> None:
    """Teacher and student are two models; the student is asked about the teacher's tokens."""

    def gradients(ours: bool) -> list[Any]:
        (hidden, head), (taught, other), work = make(0), make(1), HeadWork(0.7, chunk, entropy=False)
        ids, teacher = chunked_likeliest(taught.detach(), other, top_k, work)
        if ours:
            _, student = chunked_likeliest(hidden, head, ids, work)
        else:
            scores = whole(hidden, head, 0.7)
            student = with_rest(scores, ids.long()) if top_k < WORDS else scores.gather(-1, ids.long())
        p, q = teacher.detach().exp(), student.exp()
        m = (p + q) / 2
        plain = {
            "forward": (p * (p / q).log()).sum(-1),
            "reverse": (q * (q / p).log()).sum(-1),
            "jsd": ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2,
        }
        values = DIVERGENCES[kind](teacher.detach(), student) if ours else plain[kind]
        (values * torch.linspace(-1, 2, ROWS)).sum().backward()
        return [values.detach(), hidden.grad, head.weight.grad, head.bias.grad]

    for one, other in zip(gradients(ours=True), gradients(ours=False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_no_rows_are_no_numbers() -> None:
    _, head = make()
    ids, logprobs = chunked_likeliest(torch.zeros(0, SIZE), head, 4, HeadWork(1.0, 3, entropy=False))
    assert ids.shape == (0, 4) and logprobs.shape == (0, 5)
