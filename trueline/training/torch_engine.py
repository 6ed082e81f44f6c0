"""Plain PyTorch in one process: for debugging and fast learning tests."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trueline.config.model import TrainingConfig
from trueline.data.types import Batch, ModelOutput
from trueline.models.scorer import hf_name
from trueline.training.engines import TensorState, model_output, pass_arguments
from trueline.training.moving_average import MovingAverage
from trueline.training.optimizer import HostMomentsAdamW, learning_rate_at, make_optimizer, moments_of, set_moments
from trueline.training.worker import WorkerSpec


class TorchEngine:
    def __init__(self, module: nn.Module, spec: WorkerSpec, device: torch.device) -> None:
        self.module = module.to(device).train()
        self.config, self.total_steps, self.device = (config := spec.ranks), spec.total_steps, device
        self.named = {hf_name(name): parameter for name, parameter in module.named_parameters()}
        self.trained = {name: parameter for name, parameter in self.named.items() if parameter.requires_grad}
        self.steps = 0
        self.optimizer: torch.optim.Optimizer | None = None
        self.average: MovingAverage | None = None
        if isinstance(config, TrainingConfig):
            self.optimizer = make_optimizer(self.trained.items(), config)
            if isinstance(self.optimizer, HostMomentsAdamW):
                self.optimizer.reserve(self.trained.values())
            if config.ema_decay:
                self.average = MovingAverage(list(self.trained.values()), config.ema_decay)

    def forward(self, batch: Batch, temperature: float, entropy: bool) -> ModelOutput:
        return model_output(self.module(*pass_arguments(batch, temperature, entropy)))

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self) -> dict[str, float]:
        assert self.optimizer is not None and isinstance(self.config, TrainingConfig)
        limit = self.config.max_grad_norm or float("inf")
        norm = float(nn.utils.clip_grad_norm_(self.trained.values(), limit))
        rate = learning_rate_at(self.steps, self.config, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        finite = math.isfinite(norm)
        if finite:
            self.optimizer.step()
            self.steps += 1
        self.optimizer.zero_grad()
        if finite and self.average is not None:
            self.average.update()
        return {"grad_norm": norm, "learning_rate": rate, "skipped": float(not finite)}

    def discard(self) -> bool:
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        return True

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.named.items():
            yield name, parameter.detach()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.trained.items():
            yield name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def state(self) -> Iterator[tuple[str, TensorState]]:
        assert self.optimizer is not None
        for name, parameter in self.trained.items():
            yield name, {"weight": parameter.detach(), **moments_of(self.optimizer, parameter)}

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.trained.items():
            yield name, parameter.detach()

    def averages(self) -> Iterator[tuple[str, Tensor]]:
        if self.average is not None:
            with self.average.in_place():
                yield from self.masters()

    def start_loading(self, steps: int) -> None:
        self.steps = steps

    def wanted(self, name: str, part: str) -> slice:
        return slice(None)

    def load_state(self, name: str, state: TensorState) -> None:
        assert self.optimizer is not None
        parameter = self.trained[name]
        parameter.data.copy_(state["weight"])
        moments = {key: value.to(self.device) for key, value in state.items() if key != "weight"}
        if moments:
            set_moments(self.optimizer, parameter, moments, self.steps)

    def load_averages(self, averages: Iterator[tuple[str, Tensor]]) -> None:
        if self.average is not None:
            self.average.restart()
            with self.average.in_place():
                for name, tensor in averages:
                    self.trained[name].data.copy_(tensor)
