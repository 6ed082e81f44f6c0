import math
from statistics import fmean

import pytest
import torch
from torch import Tensor

from trueline.algorithms.correction import correction_weights, mismatch_metrics
from trueline.config.algorithm import CorrectionConfig
from trueline.data.types import Batch, Sample

WEIGHTS = [0.1, 0.5, 0.8, 1.0, 2.0, 3.0, 5.0, 9.0]


def corrected(config: CorrectionConfig) -> Tensor:
    """With log-probs chosen so that w = p_trainer / p_engine takes each of WEIGHTS."""
    width = len(WEIGHTS)
    batch = Batch(torch.zeros(width), torch.ones(width, dtype=torch.bool), [width], torch.ones(1), torch.zeros(1))
    batch.rollout_logprobs = torch.full((width,), -3.0, dtype=torch.float64)
    batch.old_logprobs = batch.rollout_logprobs + torch.tensor(WEIGHTS, dtype=torch.float64).log()
    return correction_weights(batch, config)


def test_none_leaves_every_token_alone() -> None:
    assert corrected(CorrectionConfig(kind="none")).tolist() == [1.0] * len(WEIGHTS)


def test_truncate_caps_from_above_only() -> None:
    expected = [min(weight, 2.5) for weight in WEIGHTS]
    assert corrected(CorrectionConfig(kind="truncate", cap=2.5)).tolist() == pytest.approx(expected)


def test_mask_keeps_the_weight_inside_and_drops_the_token_outside() -> None:
    expected = [weight if 0.45 <= weight <= 5.5 else 0.0 for weight in WEIGHTS]
    assert corrected(CorrectionConfig(kind="mask", low=0.45, high=5.5)).tolist() == pytest.approx(expected)


def test_the_default_is_truncation_at_two() -> None:
    assert corrected(CorrectionConfig()).tolist() == pytest.approx([min(weight, 2.0) for weight in WEIGHTS])


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
