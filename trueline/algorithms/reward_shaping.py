"""Reward shaping: length, truncation and the KL to the reference."""

import math
from collections import Counter, defaultdict
from statistics import fmean

from torch import Tensor

from trueline.config.algorithm import AlgorithmConfig, KLConfig, ShapingConfig
from trueline.data.types import Sample, Whose

KL_ERROR_LIMIT = 0.2


def shape_rewards(samples: list[Sample], config: AlgorithmConfig, max_new_tokens: int, kl_coefficient: float) -> None:
    """Fill `reward`, `token_rewards` and `filtered` from task rewards and log-probs."""
    coefficient, shaping = kl_coefficient if config.kl.place == "reward" else 0.0, config.shaping
    lengths, penalties = Counter[Whose](), defaultdict[Whose, float](float)  # of whole episodes, or of roles in them
    for sample in samples:
        lengths[sample.whose()] += sample.sampled_tokens()
    for sample in samples:
        sample.filtered = shaping.overlong_filter and sample.truncated
        sample.reward = cosine_reward(sample.task_reward, lengths[sample.whose()] / max_new_tokens, shaping)
        sample.reward = truncated_reward(sample.reward, shaping) if sample.truncated else sample.reward
        if shaping.overlong_factor > 0:
            punishment = overlong_punishment(lengths[sample.whose()], max_new_tokens, shaping.overlong_share)
            sample.reward += shaping.overlong_factor * punishment
        sample.token_rewards = sample.token_rewards.clone()
        sample.token_rewards[sample.mask.nonzero()[-1]] += sample.reward - sample.task_reward
        if coefficient > 0:
            penalty = coefficient * token_kl(sample)
            sample.token_rewards = sample.token_rewards - penalty
            penalties[sample.whose()] += penalty.double().sum().item()
    for sample in samples:
        sample.reward -= penalties[sample.whose()]


def cosine_reward(reward: float, share: float, config: ShapingConfig) -> float:
    """Return the reward of a completion of this share of the longest (arXiv:2502.03373): half a cosine."""
    if config.cosine_correct is None:
        return reward
    short, full = config.cosine_correct if reward > 0 else config.cosine_wrong
    return full + (short - full) * (1 + math.cos(math.pi * min(share, 1.0))) / 2


def truncated_reward(reward: float, config: ShapingConfig) -> float:
    """Return the reward of a truncated completion; `multiply` never raises a negative reward."""
    value = config.truncated_value
    return {"keep": reward, "multiply": min(reward, value * reward), "set": value}[config.truncated]


def overlong_punishment(length: int, longest: int, share: float) -> float:
    """Return DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13): 0, and falling to -1 over the last share."""
    cache = share * longest
    return -min(max((length - (longest - cache)) / cache, 0.0), 1.0)


def token_kl(sample: Sample) -> Tensor:
    """Return k1 [T] on sampled tokens: its policy gradient in the reward is the sequence KL's (arXiv:2506.09477)."""
    return (sample.old_logprobs - sample.ref_logprobs) * sample.mask


def sequence_kl(samples: list[Sample]) -> float:
    """Return the mean over completions of the sum of k1."""
    return fmean(token_kl(sample).double().sum().item() for sample in samples)


def adapt_coefficient(coefficient: float, kl: float, completions: int, config: KLConfig) -> float:
    """Adapt the KL coefficient after a step (arXiv:1909.08593, section 2.2); without a target, keep it."""
    if config.target is None:
        return coefficient
    error = min(max(kl / config.target - 1, -KL_ERROR_LIMIT), KL_ERROR_LIMIT)
    return coefficient * max(1 + error * completions / config.horizon, 0.0)
