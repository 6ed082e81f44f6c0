"""Log-probs of tokens that were sampled from the likeliest ones alone, against those of the sampler."""

import pytest
import torch
from torch import Tensor

from trueline.algorithms.importance_sampling import draw_metrics
from trueline.models.head import ChunkedHead, HeadWork
from trueline.models.truncation import Truncation, truncate, truncate_around
from trueline.rollout.engine import SamplingParams
from trueline.rollout.hf_engine import shape_logits

HEAT = 0.8
NARROWED = [Truncation(5, 1.0, 0.0), Truncation(0, 0.7, 0.0), Truncation(0, 1.0, 0.2), Truncation(6, 0.9, 0.05)]


def material(rows: int, vocabulary: int = 30) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(rows, 8, generator=generator), torch.randn(vocabulary, 8, generator=generator) / 2


def engine_logprobs(logits: Tensor, how: Truncation) -> Tensor:
    params = SamplingParams(HEAT, 1, (), top_p=how.top_p, top_k=how.top_k, min_p=how.min_p)
    return torch.stack([shape_logits(row, params, []) for row in logits]).log_softmax(-1)


def test_by_hand() -> None:
    """Of 0.5, 0.3, 0.15 and 0.05."""
    logits = torch.tensor([[0.3, 0.05, 0.5, 0.15]]).log()

    def kept(*how: float) -> list[bool]:
        return truncate(logits, Truncation(int(how[0]), how[1], how[2])).isfinite()[0].tolist()

    assert kept(2, 1.0, 0.0) == [True, False, True, False]
    assert kept(0, 0.75, 0.0) == [True, False, True, False]
    assert kept(0, 0.85, 0.0) == [True, False, True, True]
    assert kept(0, 1.0, 0.25) == [True, False, True, True]
    assert kept(9, 1e-9, 0.0) == [False, False, True, False]  # one always stays
    assert kept(3, 0.8, 0.0) == [True, False, True, False]  # top_p counts shares of what top_k left


@pytest.mark.parametrize("how", NARROWED, ids=str)
def test_the_trainers_log_probs_are_the_engines(how: Truncation) -> None:
    hidden, weight = material(50)
    expected = engine_logprobs(hidden @ weight.T, how)
    tokens = torch.multinomial(expected.exp(), 1, generator=torch.Generator().manual_seed(1))[:, 0]
    work = HeadWork(HEAT, 7, entropy=True, squares=True, kept=how)
    logprobs, entropy, variance, squares = ChunkedHead.apply(hidden, weight, None, tokens, work)
    torch.testing.assert_close(logprobs, expected.gather(-1, tokens[:, None])[:, 0])
    shares = expected.exp()
    surprise = -torch.where(shares > 0, expected, 0.0)
    torch.testing.assert_close(entropy, (shares * surprise).sum(-1))
    torch.testing.assert_close(variance, (shares * (surprise - entropy[:, None]) ** 2).sum(-1), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(squares, shares.square().sum(-1))
    plain = ChunkedHead.apply(hidden, weight, None, tokens, HeadWork(HEAT, 7, True))[0]
    assert (logprobs > plain + 1e-3).any()


@pytest.mark.parametrize("how", NARROWED, ids=str)
def test_gradients_are_those_of_a_fixed_set(how: Truncation) -> None:
    hidden, weight = material(20)
    expected = engine_logprobs(hidden @ weight.T, how)
    tokens, left_out = expected.argmax(-1), expected.isinf()
    ours, theirs = (weight.clone().requires_grad_() for _ in range(2))
    logprobs, entropy, *_ = ChunkedHead.apply(hidden, ours, None, tokens, HeadWork(HEAT, 7, True, kept=how))
    flow = torch.linspace(-1, 2, len(tokens))
    (flow * logprobs + flow.square() * entropy).sum().backward()
    scores = (hidden @ theirs.T / HEAT).masked_fill(left_out, -1e9).log_softmax(-1)
    surprise = -(scores.exp() * scores).sum(-1)
    (flow * scores.gather(-1, tokens[:, None])[:, 0] + flow.square() * surprise).sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_a_sampled_token_stays_though_rounding_would_leave_it_out() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    found = truncate_around(torch.tensor([2, 0]), logits, Truncation(1, 1.0, 0.0))
    assert found.tolist() == [[3.0, -1e9, 1.0], [3.0, -1e9, -1e9]]
    assert logits.tolist() == [[3.0, 2.0, 1.0]] * 2


@pytest.mark.parametrize("how", NARROWED, ids=str)
def test_the_test_of_draws_finds_narrowed_sampling_honest(how: Truncation) -> None:
    hidden, weight = material(3000)
    shares = engine_logprobs(hidden @ weight.T, how).exp()
    tokens = torch.multinomial(shares, 1, generator=torch.Generator().manual_seed(2))[:, 0]
    logprobs, entropy, variance, _ = ChunkedHead.apply(
        hidden, weight, None, tokens, HeadWork(HEAT, 128, entropy=True, kept=how)
    )
    assert abs(draw_metrics((logprobs + entropy).sum().item(), variance.sum().item())["mismatch/sampler_z"]) < 4
