"""Losses of supervised tasks on single tokens."""

from torch.nn.functional import log_softmax

from trueline.config.preference import DistillConfig
from trueline.data.types import Batch, LossOutput, ModelOutput


def sft(output: ModelOutput, batch: Batch, config: None) -> LossOutput:
    """Compute the negative log-likelihood of the tokens to learn."""
    return LossOutput(-output.logprobs)


def process_reward(output: ModelOutput, batch: Batch, config: None) -> LossOutput:
    """Compute the cross-entropy of a step's verdict (arXiv:2305.20050): score 0 is the logit of bad, 1 that of good."""
    logprobs = log_softmax(output.scores.float(), dim=-1)
    bad, good = logprobs.unbind(-1)
    values = -batch.step_labels * good - (1 - batch.step_labels) * bad
    right = (good > bad) == (batch.step_labels > 0.5)
    return LossOutput(values, {"process_reward/accuracy": right.float()})


def distill(output: ModelOutput, batch: Batch, config: DistillConfig) -> LossOutput:
    """Return the divergence of student and teacher (arXiv:1503.02531), computed where their logits are."""
    return LossOutput(output.divergence)
