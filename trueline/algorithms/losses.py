"""Losses of supervised tasks and of the critic, and the table of every loss that a worker computes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import log_softmax

from trueline.algorithms.policy_losses import label_good_completions, policy_loss
from trueline.algorithms.preference_losses import Score, kto, mismatch_kl, preference, reward_model, reward_scale
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.supervised import DistillConfig
from trueline.data.types import Batch, LossOutput, ModelOutput, Sample


def sft(output: ModelOutput, batch: Batch, config: None) -> LossOutput:
    """Compute the negative log-likelihood of the tokens to learn."""
    return LossOutput(-output.logprobs)


def process_reward(output: ModelOutput, batch: Batch, config: None) -> LossOutput:
    """Compute the cross-entropy of step labels (arXiv:2305.20050): score 0 is the logit of bad, 1 that of good."""
    logprobs = log_softmax(output.scores.float(), dim=-1)
    bad, good = logprobs.unbind(-1)
    values = -batch.step_labels * good - (1 - batch.step_labels) * bad
    right = (good > bad) == (batch.step_labels > 0.5)
    return LossOutput(values, {"process_reward/accuracy": right.float()})


def distill(output: ModelOutput, batch: Batch, config: DistillConfig) -> LossOutput:
    """Return the divergence of student and teacher (arXiv:1503.02531), which the head computes."""
    return LossOutput(output.divergence)


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


Numbers = Callable[[list[Sample], Any, Score], dict[str, float]]  # Any: the section of the configuration


def none(samples: list[Sample], section: Any, score: Score) -> dict[str, float]:
    return {}


@dataclass(frozen=True, slots=True)
class Loss:
    compute: Callable[[ModelOutput, Batch, Any], LossOutput]
    prepare: Numbers = none  # statistics of the whole minibatch, before the loss
    facts: Numbers = none  # saved with the model after an evaluation
    entropy: bool = False  # whether it reads the entropy, which costs a pass over the logits


LOSSES: dict[str, Loss] = {
    "policy": Loss(policy_loss, prepare=label_good_completions, entropy=True),
    "value": Loss(value),
    "sft": Loss(sft),
    "preference": Loss(preference),
    "kto": Loss(kto, prepare=mismatch_kl),
    "reward_model": Loss(reward_model, facts=reward_scale),
    "process_reward": Loss(process_reward),
    "distill": Loss(distill),
}
