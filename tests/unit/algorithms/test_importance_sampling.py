import itertools
import math
from statistics import fmean

import pytest
import torch
from torch import Tensor

from trueline.algorithms.importance_sampling import (
    EXCESS,
    VARIANCE,
    draw_metrics,
    draw_sums,
    importance_weights,
    mismatch_metrics,
)
from trueline.config.algorithm import AlgorithmConfig
from trueline.data.types import Batch, ModelOutput, Sample

# w = p_trainer / p_engine of the tokens of two answers
ANSWERS = [[0.1, 0.5, 0.8, 1.0, 2.0], [3.0, 5.0, 9.0]]
WEIGHTS = ANSWERS[0] + ANSWERS[1]


def batch_of(answers: list[list[float]]) -> Batch:
    """Log-probs chosen so that w takes the given values; a prompt token with an absurd gap precedes each answer."""
    lengths = [len(answer) + 1 for answer in answers]
    mask = torch.cat([torch.arange(length) > 0 for length in lengths])
    none = torch.zeros(len(answers))
    batch = Batch(torch.zeros(len(mask)), mask, lengths, none, none)
    weights = [weight for answer in answers for weight in [1e6, *answer]]
    batch.rollout_logprobs = torch.full((len(mask),), -3.0, dtype=torch.float64)
    batch.old_logprobs = batch.rollout_logprobs + torch.tensor(weights, dtype=torch.float64).log()
    return batch


def corrected(answers: list[list[float]] = ANSWERS, **settings: object) -> tuple[list[float], list[bool]]:
    """Weight of each sampled token, and whether it was truncated or masked."""
    batch = batch_of(answers)
    config = AlgorithmConfig.parse({"preset": "dr_grpo", "importance_sampling": settings})
    current = torch.full_like(batch.old_logprobs, -7.0)  # must not count: the trainer has scored before
    weights, touched = importance_weights(current, batch, config)
    return weights[batch.mask].tolist(), touched[batch.mask].tolist()


def test_none_leaves_every_token_alone() -> None:
    assert corrected(mode="none") == ([1.0] * len(WEIGHTS), [False] * len(WEIGHTS))


def test_truncate_caps_from_above_only() -> None:
    weights, touched = corrected(mode="token_truncate", cap=2.5)
    assert weights == pytest.approx([min(weight, 2.5) for weight in WEIGHTS])
    assert touched == [weight > 2.5 for weight in WEIGHTS]


def test_mask_keeps_the_weight_inside_and_drops_the_token_outside() -> None:
    weights, touched = corrected(mode="token_mask", low=0.45, high=5.5)
    assert weights == pytest.approx([weight if 0.45 <= weight <= 5.5 else 0.0 for weight in WEIGHTS])
    assert touched == [not 0.45 <= weight <= 5.5 for weight in WEIGHTS]


def test_the_default_is_truncation_at_two() -> None:
    assert corrected()[0] == pytest.approx([min(weight, 2.0) for weight in WEIGHTS])


def test_sequence_truncate_gives_all_tokens_the_capped_product() -> None:
    """0.1 x 0.5 x 0.8 x 1 x 2 = 0.08 and 3 x 5 x 9 = 135."""
    weights, touched = corrected(mode="sequence_truncate", cap=2.0)
    assert weights == pytest.approx([0.08] * 5 + [2.0] * 3)
    assert touched == [False] * 5 + [True] * 3


def test_sequence_mask_drops_answers_whose_geometric_mean_is_off() -> None:
    """(4 x 0.5 x 0.5)^(1/3) = 1 is kept, and 4 truncated; (1.1 x 1)^(1/2) = 1.049 is not; 1.009 is, however long."""
    weights, touched = corrected([[4.0, 0.5, 0.5], [1.1, 1.0], [1.009] * 3], mode="sequence_mask", cap=2.0)
    assert weights == pytest.approx([2.0, 0.5, 0.5, 0.0, 0.0, 1.009, 1.009, 1.009])
    assert touched == [True, False, False, True, True, False, False, False]


@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_answers_do_not_touch_each_other(mode: str) -> None:
    together = corrected(ANSWERS, mode=mode)
    alone = [corrected([answer], mode=mode) for answer in ANSWERS]
    assert together == (alone[0][0] + alone[1][0], alone[0][1] + alone[1][1])


@pytest.mark.parametrize("mode", ["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_a_filler_without_sampled_tokens_gives_finite_weights(mode: str) -> None:
    batch = batch_of([[], [1.0]])
    config = AlgorithmConfig.parse({"preset": "dr_grpo", "importance_sampling": {"mode": mode}})
    assert importance_weights(batch.old_logprobs, batch, config)[0].isfinite().all()


def bypassed(mode: str) -> tuple[Tensor, Tensor, Batch]:
    """old_logprobs=rollout: the engine's log-probs serve as old ones, and w is that of the present forward pass."""
    batch = batch_of([[0.6, 1.0, 7.0], [1.0, 1.001]])
    current = batch.old_logprobs.clone().requires_grad_()
    batch.old_logprobs = batch.rollout_logprobs
    config = AlgorithmConfig.parse(
        {"preset": "dr_grpo", "old_logprobs": "rollout", "importance_sampling": {"mode": mode}}
    )
    return *importance_weights(current, batch, config), batch


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("none", [1, 1, 1, 1, 1]), ("token_mask", [1, 1, 0, 1, 1]), ("sequence_mask", [0, 0, 0, 1, 1])],
)
def test_with_the_engines_log_probs_as_old_ones_tokens_are_kept_or_masked(mode: str, expected: list[float]) -> None:
    weights, touched, batch = bypassed(mode)
    assert weights[batch.mask].tolist() == expected
    assert touched[batch.mask].tolist() == [not weight for weight in expected]
    assert not weights.requires_grad


DRIFTS = [[0.9, 0.0, 0.3], [0.6, 0.6], [-3.0, 4.0], [0.5]]  # log p_engine / p: means of 0.4, 0.6, 0.5 and 0.5
SIGNS = [[-1.0, -1.0, 2.0], [-1.0, 1.0], [-1.0, -1.0], [-1.0]]


@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
@pytest.mark.parametrize(
    ("limit", "masked"), [(None, []), (0.45, [3, 5, 6, 7]), (0.55, [3]), (0.39, [0, 1, 3, 5, 6, 7]), (0.7, [])]
)
def test_negative_advantages_of_completions_that_the_policy_has_left_are_masked(
    old_logprobs: str, limit: float | None, masked: list[int]
) -> None:
    """By the mean over sampled tokens, under the weights of this pass; a token of another sign is kept."""
    batch = batch_of([[1.5] * len(drifts) for drifts in DRIFTS])
    batch.advantages = torch.cat([torch.tensor([-1.0, *signs]) for signs in SIGNS])
    current = batch.rollout_logprobs - torch.cat([torch.tensor([1e6, *drifts]) for drifts in DRIFTS])
    keys = {"mode": "none", "off_policy_mask": limit}
    config = AlgorithmConfig.parse({"preset": "grpo", "old_logprobs": old_logprobs, "importance_sampling": keys})
    weights, touched = importance_weights(current.requires_grad_(), batch, config)
    assert weights[batch.mask].tolist() == [float(at not in masked) for at in range(8)]
    assert touched[batch.mask].tolist() == [at in masked for at in range(8)]
    assert not weights.requires_grad


def test_the_off_policy_mask_goes_with_other_corrections() -> None:
    batch = batch_of([[4.0, 0.5], [4.0, 0.5]])
    batch.advantages = torch.tensor([0.0, -1.0, -1.0, 0.0, 1.0, 1.0])
    config = AlgorithmConfig.parse({"importance_sampling": {"mode": "token_truncate", "off_policy_mask": 0.5}})
    weights, touched = importance_weights(batch.rollout_logprobs - 0.6, batch, config)
    assert weights[batch.mask].tolist() == pytest.approx([0.0, 0.0, 2.0, 0.5])
    assert touched[batch.mask].tolist() == [True, True, True, False]


def sample(gaps: list[float], outside: float) -> Sample:
    """A prompt token with an absurd gap that must not count, then one token per gap."""
    made = Sample(torch.arange(len(gaps) + 1), torch.tensor([False] + [True] * len(gaps)))
    made.rollout_logprobs = torch.full((len(gaps) + 1,), -1.0)
    made.old_logprobs = made.rollout_logprobs + torch.tensor([outside, *gaps])
    return made


def test_mismatch_is_measured_over_sampled_tokens_of_all_answers() -> None:
    gaps = [0.25, -0.5, 1.0, 0.0, -1.5]
    metrics = mismatch_metrics([sample(gaps[:2], 50.0), sample(gaps[2:], -50.0)])
    weights = [math.exp(gap) for gap in gaps]
    expected = {
        "mismatch/logprob_gap_mean": fmean(map(abs, gaps)),
        "mismatch/logprob_gap_max": 1.5,
        "mismatch/kl": fmean([weight - 1 - gap for weight, gap in zip(weights, gaps, strict=True)]),
        "mismatch/effective_share": sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights)),
        "mismatch/outside_share": 2 / 5,  # exp(1) > 2 and exp(-1.5) < 0.5
    }
    assert metrics == pytest.approx(expected, rel=1e-5)


def test_equal_probabilities_mean_no_mismatch() -> None:
    metrics = mismatch_metrics([sample([0.0, 0.0], 3.0)])
    assert metrics == {
        "mismatch/logprob_gap_mean": 0.0,
        "mismatch/logprob_gap_max": 0.0,
        "mismatch/kl": 0.0,
        "mismatch/effective_share": 1.0,
        "mismatch/outside_share": 0.0,
    }


# What a policy of three words says next: after each word, and at first. The word 0 ends an answer of up to three.
NEXT = torch.tensor([[0.2, 0.5, 0.3], [0.7, 0.2, 0.1], [0.05, 0.05, 0.9], [0.3, 0.3, 0.4]], dtype=torch.float64)
FIRST = 3


def all_answers() -> list[tuple[int, ...]]:
    whole = itertools.product(range(3), repeat=3)
    return sorted({words[: words.index(0) + 1] if 0 in words else words for words in whole})


def chance(answer: tuple[int, ...], power: float = 1.0) -> float:
    """Of an answer, by a sampler that draws from p^power."""
    shares = NEXT.pow(power) / NEXT.pow(power).sum(-1, keepdim=True)
    return math.prod(shares[before, word].item() for before, word in itertools.pairwise((FIRST, *answer)))


def draws_of(answers: list[tuple[int, ...]]) -> tuple[float, float]:
    """The sums of answers behind a prompt of one token, of which the trainer says what must not count."""
    befores = [before for answer in answers for before in (0, FIRST, *answer[:-1])]
    words = [word for answer in answers for word in (0, *answer)]
    output, scores = ModelOutput(), NEXT.log()[befores]
    output.logprobs = scores[range(len(words)), words]
    output.entropy = -(scores.exp() * scores).sum(-1)
    output.variance = (scores.exp() * scores.square()).sum(-1) - output.entropy.square()
    mask = torch.tensor([place > 0 for answer in answers for place in range(len(answer) + 1)])
    none = torch.zeros(len(answers))
    batch = Batch(torch.tensor(words), mask, [len(answer) + 1 for answer in answers], none, none)
    sums = draw_sums(output, batch)
    return sums[EXCESS].item(), sums[VARIANCE].item()


def test_honest_draws_exceed_nothing_and_vary_as_expected_wherever_answers_stop() -> None:
    """Over all answers there are, each by its chance: E[excess] = 0 and E[excess^2] = E[variance]."""
    assert sum(map(chance, all_answers())) == pytest.approx(1)
    found = [(chance(answer), *draws_of([answer])) for answer in all_answers()]
    assert sum(share * excess for share, excess, _ in found) == pytest.approx(0, abs=1e-12)
    varies = sum(share * excess**2 for share, excess, _ in found)
    assert varies == pytest.approx(sum(share * variance for share, _, variance in found))


def test_the_effect_of_another_temperature_is_its_relative_change() -> None:
    for power in (0.99, 1.01):
        found = [(chance(answer, power), *draws_of([answer])) for answer in all_answers()]
        excess, variance = (sum(one[0] * one[at] for one in found) for at in (1, 2))
        assert draw_metrics(excess, variance)["mismatch/sampler_effect"] == pytest.approx(power - 1, rel=0.05)


def test_sums_of_many_answers_make_the_test() -> None:
    answers = all_answers()
    adapter_only = [draws_of([answer]) for answer in answers]
    excess, variance = draws_of(answers)
    assert (excess, variance) == pytest.approx(tuple(map(sum, zip(*adapter_only, strict=True))))
    z, effect = draw_metrics(excess, variance).values()
    assert (z, effect) == pytest.approx((excess / variance**0.5, excess / variance))
