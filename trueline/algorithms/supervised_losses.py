"""Losses of supervised tasks on single tokens, and the table of every loss that a worker can be asked for."""

from collections.abc import Callable
from typing import Any

from torch.nn.functional import log_softmax

from trueline.algorithms.policy_losses import policy_loss
from trueline.algorithms.preference_losses import kto, preference, reward_model
from trueline.algorithms.value_loss import value
from trueline.config.preference import DistillConfig
from trueline.data.types import Batch, LossOutput, ModelOutput

Loss = Callable[[ModelOutput, Batch, Any], LossOutput]


def sft(output: ModelOutput, batch: Batch, config: None) -> LossOutput:
    """Negative log-likelihood of the tokens to learn."""
    return LossOutput(-output.logprobs)


def process_reward(output: ModelOutput, batch: Batch, config: None) -> LossOutput:
    """Cross-entropy of a step's verdict (arXiv:2305.20050): score 0 is the logit of bad, score 1 that of good."""
    logprobs = log_softmax(output.scores.float(), dim=-1)
    bad, good = logprobs.unbind(-1)
    values = -batch.step_labels * good - (1 - batch.step_labels) * bad
    right = (good > bad) == (batch.step_labels > 0.5)
    return LossOutput(values, {"process_reward/accuracy": right.float()})


def distill(output: ModelOutput, batch: Batch, config: DistillConfig) -> LossOutput:
    """Divergence of student and teacher (arXiv:1503.02531), computed where their logits are."""
    return LossOutput(output.divergence)


LOSSES: dict[str, Loss] = {
    "policy": policy_loss,
    "value": value,
    "sft": sft,
    "preference": preference,
    "kto": kto,
    "reward_model": reward_model,
    "process_reward": process_reward,
    "distill": distill,
}
WITH_ENTROPY = frozenset({"policy"})  # losses that read the entropy, which costs another pass over the logits
