"""AdamW and its learning rate."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from trueline.config.model import TrainingConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainingConfig) -> torch.optim.AdamW:
    """Make an AdamW whose weight decay applies to matrices and leaves biases and norms alone."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.betas[0], config.betas[1]),
        eps=config.epsilon,
        fused=True,
    )


def learning_rate_at(step: int, config: TrainingConfig, total_steps: int) -> float:
    """Return the rate of optimizer step `step`, counted from 0, by the step alone, so that resuming is exact."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    remaining = max(total_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / remaining, 1.0)
    factors = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "wsd": min((1.0 - progress) / config.decay_share, 1.0),
    }
    return config.learning_rate * factors[config.schedule]
