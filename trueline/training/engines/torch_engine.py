"""Plain PyTorch in one process: for debugging and fast learning tests."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trueline.config.model import TrainingConfig
from trueline.models.scorer import hf_name
from trueline.training.engines import optimizer as optimizers
from trueline.training.engines.engine import Chosen, TensorState, TrainEngine
from trueline.training.engines.shards import Shard, whole_shard
from trueline.training.worker import WorkerSpec


class TorchEngine(TrainEngine):
    def __init__(self, module: nn.Module, spec: WorkerSpec, device: torch.device) -> None:
        self.module = module.to(device).train()
        self.config, self.total_steps, self.device = (config := spec.ranks), spec.total_steps, device
        self.named = {hf_name(name): parameter for name, parameter in module.named_parameters()}
        self.trained = {name: parameter for name, parameter in self.named.items() if parameter.requires_grad}
        # Ranks do not know each other: they hold the same and share the work of writing it.
        self.place = (spec.rank, spec.world)
        self.steps, self.average = 0, None
        self.optimizer: Any = None
        if isinstance(config, TrainingConfig):
            self.optimizer = optimizers.make_optimizer(self.trained.items(), config)
            if isinstance(self.optimizer, optimizers.HostMomentsAdamW):
                self.optimizer.reserve(self.trained.values())
            if config.ema_decay:
                self.average = optimizers.MovingAverage(list(self.trained.values()), config.ema_decay)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def scale_gradients(self, factor: float) -> None:
        for parameter in self.trained.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def step_if_finite(self) -> float:
        assert isinstance(self.config, TrainingConfig)
        norm = float(nn.utils.clip_grad_norm_(self.trained.values(), self.config.max_grad_norm or math.inf))
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def discard(self) -> bool:
        self.optimizer.zero_grad()
        return True

    def weights(self, chosen: Chosen | None = None) -> Iterator[tuple[str, Tensor]]:
        named = self.named.items()
        yield from ((name, parameter.detach()) for name, parameter in named if chosen is None or chosen(name))

    def weight_shards(self) -> Iterator[Shard]:
        yield from (whole_shard(name, tensor, *self.place) for name, tensor in self.weights())

    def master_shards(self) -> Iterator[Shard]:
        yield from (whole_shard(name, tensor, *self.place) for name, tensor in self.masters())

    def moment_shards(self) -> Iterator[Shard]:
        for name, parameter in self.trained.items():
            for key, moment in optimizers.moments_of(self.optimizer, parameter).items():
                yield whole_shard(f"{name}/{key}", moment, *self.place)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.trained.items():
            yield name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, parameter.detach()) for name, parameter in self.trained.items())

    def load_state(self, name: str, state: TensorState) -> None:
        parameter = self.trained[name]
        parameter.data.copy_(state["weight"])
        moments = {key: value.to(self.device) for key, value in state.items() if key != "weight"}
        if moments:
            optimizers.set_moments(self.optimizer, parameter, moments, self.steps)

    def set_master(self, name: str, value: Tensor) -> None:
        self.trained[name].data.copy_(value)
