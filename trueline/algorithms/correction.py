"""Engine and trainer give one token slightly different probabilities; what the loss does about it."""

from collections.abc import Callable

import torch
from torch import Tensor

from trueline.algorithms.kl import bounded
from trueline.config.algorithm import CorrectionConfig
from trueline.data.types import Batch, Sample


def truncate(weight: Tensor, config: CorrectionConfig) -> Tensor:
    """Truncated importance sampling: min(w, cap)."""
    return weight.clamp(max=config.cap)


def mask(weight: Tensor, config: CorrectionConfig) -> Tensor:
    """IcePop: the weight inside [low, high], nothing outside."""
    return torch.where((weight >= config.low) & (weight <= config.high), weight, 0.0)


def uncorrected(weight: Tensor, config: CorrectionConfig) -> Tensor:
    return torch.ones_like(weight)


CORRECTIONS: dict[str, Callable[[Tensor, CorrectionConfig], Tensor]] = {
    "none": uncorrected,
    "truncate": truncate,
    "mask": mask,
}


def correction_weights(batch: Batch, config: CorrectionConfig) -> Tensor:
    """[N] factor on each token's policy loss; no gradient."""
    weight = bounded(batch.old_logprobs - batch.rollout_logprobs).exp()
    return CORRECTIONS[config.kind](weight, config)


def mismatch_metrics(samples: list[Sample]) -> dict[str, float]:
    """How far engine and trainer are apart on the tokens that were sampled."""
    gap = torch.cat([(sample.old_logprobs - sample.rollout_logprobs)[sample.mask] for sample in samples]).double()
    weight = bounded(gap).exp()
    return {
        "mismatch/logprob_gap_mean": gap.abs().mean().item(),
        "mismatch/logprob_gap_max": gap.abs().max().item(),
        "mismatch/kl": (weight - 1 - gap).mean().item(),
        "mismatch/effective_share": (weight.sum().square() / (len(weight) * weight.square().sum())).item(),
        "mismatch/outside_share": ((weight < 0.5) | (weight > 2)).double().mean().item(),
    }
