"""What the critic learns, and how well it predicts."""

import torch

from trueline.config.algorithm import AlgorithmConfig
from trueline.data.types import Batch, LossOutput, ModelOutput, Sample


def value(output: ModelOutput, batch: Batch, config: AlgorithmConfig) -> LossOutput:
    """Compute half the squared gap to the return, pessimistic beyond the clip (PPO's code; arXiv:1811.02553)."""
    values = output.values.float()
    error = (values - batch.returns).square()
    means = {"critic/value": values.detach(), "critic/clip_fraction": torch.zeros_like(error)}
    if config.value_clip > 0:
        near = batch.values + (values - batch.values).clamp(-config.value_clip, config.value_clip)
        clipped_error = (near - batch.returns).square()
        means["critic/clip_fraction"] = (clipped_error > error).float()
        error = torch.maximum(error, clipped_error)
    return LossOutput(0.5 * error, means)


def explained_variance(samples: list[Sample]) -> float:
    """Compute 1 - var(returns - values) / var(returns) over sampled tokens, or 0 where the returns do not vary."""
    returns = torch.cat([sample.returns[sample.mask] for sample in samples]).double()
    values = torch.cat([sample.values[sample.mask] for sample in samples]).double()
    variance = returns.var(correction=0).item()
    return 1 - (returns - values).var(correction=0).item() / variance if variance > 0 else 0.0
