"""AdamW, or Muon beside it, what they keep of each parameter, and their learning rate."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trueline.config.model import TrainingConfig

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}
IN_LAYER = re.compile(r"(^|\.)\d+\.")  # a numbered layer; embeddings, the last norm and heads stand outside

Parameters = list[nn.Parameter]


def make_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: TrainingConfig) -> torch.optim.Optimizer:
    """Make an optimizer whose weight decay applies to matrices and leaves biases and norms alone."""
    parts: dict[str, Parameters] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            parts.setdefault(stepped_by(name, parameter.ndim, config), []).append(parameter)
    made = [MAKERS[kind](parameters, config) for kind, parameters in parts.items()]
    return made[0] if len(made) == 1 else Together(made)


def stepped_by(name: str, dimensions: int, config: TrainingConfig) -> str:
    """Return the row of MAKERS that steps a parameter: Muon is for matrices of hidden layers."""
    return "muon" if config.optimizer == "muon" and dimensions == 2 and IN_LAYER.search(name) else "adamw"


def make_adamw(parameters: Parameters, config: TrainingConfig) -> torch.optim.Optimizer:
    groups = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.betas[0], config.betas[1]),
        eps=config.epsilon,
        fused=True,
    )


def make_muon(parameters: Parameters, config: TrainingConfig) -> torch.optim.Optimizer:
    """Make a Muon whose updates are as large as AdamW's, so that both take one learning rate."""
    return torch.optim.Muon(
        parameters, lr=config.learning_rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )


MAKERS: dict[str, Callable[[Parameters, TrainingConfig], torch.optim.Optimizer]] = {
    "adamw": make_adamw,
    "muon": make_muon,
}


class Together(torch.optim.Optimizer):
    """Several optimizers as one: their parameter groups in one list, and one state."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def moments_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return what the optimizer keeps of a parameter: nothing before its first step."""
    return {key: value for key, value in optimizer.state.get(parameter, {}).items() if key != "step"}


def set_moments(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, moments: dict[str, Tensor], steps: int
) -> None:
    """Let the optimizer go on from copies of moments that it had after `steps`."""
    step = torch.tensor(float(steps), device=parameter.device)
    optimizer.state[parameter] = {"step": step} | {key: value.clone() for key, value in moments.items()}


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
