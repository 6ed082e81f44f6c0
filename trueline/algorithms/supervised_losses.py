"""Losses of supervised tasks, and the table of every loss that a worker can be asked for."""

from collections.abc import Callable
from typing import Any

from trueline.algorithms.policy_losses import policy_loss
from trueline.data.types import Batch, LossOutput, ModelOutput

Loss = Callable[[ModelOutput, Batch, Any], LossOutput]


def sft(output: ModelOutput, batch: Batch, config: None) -> LossOutput:
    """Negative log-likelihood of the tokens to learn."""
    return LossOutput(-output.logprobs, {"sft/entropy": output.entropy.detach()})


LOSSES: dict[str, Loss] = {"policy": policy_loss, "sft": sft}
