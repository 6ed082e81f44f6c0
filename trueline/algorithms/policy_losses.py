"""Policy losses: (log-probs, batch) -> the loss of each token; averaging is in the batch's weights."""

from collections.abc import Callable

import torch
from torch import Tensor

from trueline.algorithms.correction import correction_weights
from trueline.algorithms.kl import KL_ESTIMATORS, bounded
from trueline.algorithms.lookup import lookup
from trueline.config.algorithm import AlgorithmConfig
from trueline.data.types import Batch, LossOutput, ModelOutput

PolicyLoss = Callable[[Tensor, Batch, AlgorithmConfig], LossOutput]


def ppo_clip(ratio: Tensor, batch: Batch, config: AlgorithmConfig) -> LossOutput:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7); clip_high > clip_low is DAPO's clip-higher."""
    free = ratio * batch.advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * batch.advantages
    return LossOutput(-torch.minimum(free, clipped), {"policy/clipped_share": (clipped < free).float()})


POLICY_LOSSES: dict[str, PolicyLoss] = {"ppo_clip": ppo_clip}


def policy_loss(output: ModelOutput, batch: Batch, config: AlgorithmConfig) -> LossOutput:
    """The named loss, corrected for engine mismatch, plus the KL and entropy terms."""
    ratio = bounded(output.logprobs - batch.old_logprobs).exp()
    loss = lookup(POLICY_LOSSES, config.loss, "algorithm.loss")(ratio, batch, config)
    loss.values = loss.values * correction_weights(batch, config.correction)
    loss.means["policy/entropy"] = output.entropy.detach()
    loss.means["policy/ratio"] = ratio.detach()
    loss.maxima["policy/ratio_deviation_max"] = (ratio.detach() - 1).abs()
    if config.kl.coefficient > 0:
        kl = KL_ESTIMATORS[config.kl.estimator](output.logprobs - batch.ref_logprobs, ratio)
        loss.values = loss.values + config.kl.coefficient * kl
        loss.means["policy/kl"] = kl.detach()
    if config.entropy_coefficient > 0:
        loss.values = loss.values - config.entropy_coefficient * output.entropy
    return loss
