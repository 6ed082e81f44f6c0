"""Importance weights for the mismatch between engine and trainer, and metrics of that mismatch.

An engine may sample from another distribution than it reports: `draw_sums` and `draw_metrics` test the samples.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from trueline.config.algorithm import AlgorithmConfig, ImportanceSamplingConfig
from trueline.data.types import Batch, ModelOutput, Sample

# [N] log of w = p_trainer / p_engine -> [N] weight of each token, [N] bool whether it was truncated or masked
Correction = Callable[[Tensor, Batch, ImportanceSamplingConfig], tuple[Tensor, Tensor]]

EXCESS, VARIANCE = "draws/excess", "draws/variance"  # sums over the tokens of an update
LOG_RATIO_LIMIT = 20.0


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp log-ratios before they are exponentiated."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_means(values: Tensor, batch: Batch) -> Tensor:
    """Return the mean over each completion's sampled tokens, [N] -> [B]."""
    return batch.sums(values) / batch.counts().clamp(min=1)  # a filler has no tokens


def no_correction(log_weights: Tensor, batch: Batch, config: ImportanceSamplingConfig) -> tuple[Tensor, Tensor]:
    return torch.ones_like(log_weights), torch.zeros_like(log_weights, dtype=torch.bool)


def token_truncate(log_weights: Tensor, batch: Batch, config: ImportanceSamplingConfig) -> tuple[Tensor, Tensor]:
    """Weight by min(w, cap): truncated importance sampling (Yao et al., Your Efficient RL Framework ..., 2025)."""
    weights = clamp_log_ratio(log_weights).exp()
    return weights.clamp(max=config.cap), weights > config.cap


def token_mask(log_weights: Tensor, batch: Batch, config: ImportanceSamplingConfig) -> tuple[Tensor, Tensor]:
    """Weight by w inside [low, high], and by 0 outside: IcePop (arXiv:2510.18855)."""
    weights = clamp_log_ratio(log_weights).exp()
    outside = (weights < config.low) | (weights > config.high)
    return weights.masked_fill(outside, 0.0), outside


def sequence_truncate(log_weights: Tensor, batch: Batch, config: ImportanceSamplingConfig) -> tuple[Tensor, Tensor]:
    """Weight by min(product of w, cap): sequence-level weights (Liu et al., When Speed Kills Stability, 2025)."""
    weights = batch.spread(clamp_log_ratio(batch.sums(log_weights)).exp())
    return weights.clamp(max=config.cap), weights > config.cap


def sequence_mask(log_weights: Tensor, batch: Batch, config: ImportanceSamplingConfig) -> tuple[Tensor, Tensor]:
    """Like `token_truncate`, but drop completions whose geometric mean of w is off (Liu et al., geometric mask)."""
    means = clamp_log_ratio(sequence_means(log_weights, batch)).exp()
    off = batch.spread((means < config.sequence_low) | (means > config.sequence_high))
    weights, truncated = token_truncate(log_weights, batch, config)
    return weights.masked_fill(off, 0.0), off | truncated


IMPORTANCE_WEIGHTS: dict[str, Correction] = {
    "none": no_correction,
    "token_truncate": token_truncate,
    "token_mask": token_mask,
    "sequence_truncate": sequence_truncate,
    "sequence_mask": sequence_mask,
}


def importance_weights(logprobs: Tensor, batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return token weights [N], without gradient, and whether each was truncated or masked [N]."""
    weights, corrected = mismatch_weights(logprobs, batch, config)
    if (limit := config.importance_sampling.off_policy_mask) is None:
        return weights, corrected
    left_out = has_drifted(logprobs, batch, limit) & (batch.advantages < 0)
    return weights.masked_fill(left_out, 0.0), corrected | left_out


def mismatch_weights(logprobs: Tensor, batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    correct = IMPORTANCE_WEIGHTS[config.importance_sampling.mode]
    if config.old_logprobs == "recompute":
        return correct(batch.old_logprobs - batch.rollout_logprobs, batch, config.importance_sampling)
    # The ratio contains the mismatch already: a token is kept unchanged, or masked.
    weights, _ = correct(logprobs.detach() - batch.rollout_logprobs, batch, config.importance_sampling)
    return (weights > 0).float(), weights == 0


def has_drifted(logprobs: Tensor, batch: Batch, limit: float) -> Tensor:
    """Tell of which completions' tokens [N] the policy has lost more log-prob on average since they were sampled.

    DeepSeek-V3.2 (arXiv:2512.02556, section 3.1) takes no negative advantages from them.
    """
    return batch.spread(sequence_means(batch.rollout_logprobs - logprobs.detach(), batch) > limit)


def mismatch_metrics(samples: list[Sample]) -> dict[str, float]:
    """Compare the log-probs of engine and trainer on sampled tokens."""
    gap = torch.cat([(sample.old_logprobs - sample.rollout_logprobs)[sample.mask] for sample in samples]).double()
    weight = clamp_log_ratio(gap).exp()
    return {
        "mismatch/logprob_gap_mean": gap.abs().mean().item(),
        "mismatch/logprob_gap_max": gap.abs().max().item(),
        "mismatch/kl": (weight - 1 - gap).mean().item(),
        "mismatch/effective_share": (weight.sum().square() / (len(weight) * weight.square().sum())).item(),
        "mismatch/outside_share": ((weight < 0.5) | (weight > 2)).double().mean().item(),
    }


def draw_sums(output: ModelOutput, batch: Batch) -> dict[str, Tensor]:
    """Sum log p - E[log p] and its variance, by the trainer's distributions, over sampled tokens."""
    excess = output.logprobs.detach() + output.entropy.detach()
    return {EXCESS: (excess * batch.mask).sum(), VARIANCE: (output.variance * batch.mask).sum()}


def draw_metrics(excess: float, variance: float) -> dict[str, float]:
    """Test whether tokens were sampled from the trainer's distributions p, by sums over all of them.

    The sum is a martingale, so z is close to N(0, 1) if sequences stop depending only on earlier tokens. Sampling from
    p^(1 + effect), a temperature divided by 1 + effect, adds effect times the variance.
    """
    return {"mismatch/sampler_z": excess / math.sqrt(variance), "mismatch/sampler_effect": excess / variance}
