"""Plain PyTorch in one process: for debugging and fast learning tests."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trueline.config.model import RanksConfig, TrainingConfig
from trueline.data.types import Batch, ModelOutput
from trueline.models.scorer import hf_name
from trueline.training.engine import MOMENTS, StepInfo, TensorState
from trueline.training.optimizer import learning_rate_at, make_optimizer


class TorchEngine:
    def __init__(self, module: nn.Module, config: RanksConfig, total_steps: int, device: torch.device) -> None:
        self.module = module.to(device).train()
        self.config, self.total_steps, self.device = config, total_steps, device
        self.named = {hf_name(name): parameter for name, parameter in module.named_parameters()}
        self.steps = 0
        self.optimizer = make_optimizer(module.parameters(), config) if isinstance(config, TrainingConfig) else None

    def forward(self, batch: Batch, temperature: float) -> ModelOutput:
        return ModelOutput(*self.module(batch.tokens, batch.mask, temperature))

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self) -> StepInfo:
        assert self.optimizer is not None and isinstance(self.config, TrainingConfig)
        limit = self.config.max_grad_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), limit)
        rate = learning_rate_at(self.steps, self.config, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return StepInfo(float(norm), rate)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.named.items():
            yield name, parameter.detach()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.named.items():
            yield name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def state(self) -> Iterator[tuple[str, TensorState]]:
        assert self.optimizer is not None
        for name, parameter in self.named.items():
            moments = self.optimizer.state.get(parameter, {})
            yield name, {"weight": parameter.detach(), **{key: moments[key] for key in MOMENTS if key in moments}}

    def start_loading(self, steps: int) -> None:
        self.steps = steps

    def load_state(self, name: str, state: TensorState) -> None:
        assert self.optimizer is not None
        parameter = self.named[name]
        parameter.data.copy_(state["weight"])
        if self.steps:
            moments = {key: state[key].to(self.device).clone() for key in MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(self.steps)), **moments}
