"""Losses of a user's own, for tests that need one to misbehave."""

from torch import Tensor

from trueline.algorithms.policy_losses import ppo_clip
from trueline.config.algorithm import AlgorithmConfig
from trueline.data.types import Batch, LossOutput

CALLS: list[int] = []
BAD_CALL = 2


def bad_once(logprobs: Tensor, batch: Batch, config: AlgorithmConfig) -> LossOutput:
    """PPO's loss, but for one call in a process, which gives no number."""
    loss = ppo_clip(logprobs, batch, config)
    CALLS.append(1)
    if len(CALLS) == BAD_CALL:
        loss.values = loss.values * float("nan")
    return loss
