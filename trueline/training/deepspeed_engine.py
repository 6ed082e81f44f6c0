"""DeepSpeed on one rank of a group: ZeRO 0 to 3."""

import datetime
import os
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

from trueline.config.model import RanksConfig, TrainingConfig
from trueline.data.types import Batch, ModelOutput
from trueline.models.scorer import hf_name
from trueline.training.deepspeed_config import deepspeed_config, effective_stage
from trueline.training.engine import MOMENTS, StepInfo, TensorState
from trueline.training.optimizer import learning_rate_at, make_optimizer

GATHER_ELEMENTS = 64 * 2**20  # weights gathered at once under ZeRO 3


def join_ranks(store: Callable[[], Any], rank: int, world: int, timeout_seconds: float, device: torch.device) -> None:
    """Connect to the other ranks through a store that they all know; a process that has joined stays joined."""
    # The shared-memory collective is compiled at its first use (minutes, and a compiler); plain gloo serves.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if device.type == "cuda" else "gloo"
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world))
    if not dist.is_initialized():
        timeout = datetime.timedelta(seconds=timeout_seconds)
        dist.init_process_group(backend, store=store(), rank=rank, world_size=world, timeout=timeout)
    deepspeed.init_distributed(dist_backend=backend, verbose=False)


class DeepSpeedEngine:
    def __init__(self, module: nn.Module, config: RanksConfig, total_steps: int, device: torch.device) -> None:
        dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
        self.config, self.total_steps, self.device = config, total_steps, device
        self.stage = effective_stage(config, dtype)
        optimizer = make_optimizer(module.parameters(), config) if isinstance(config, TrainingConfig) else None
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=module.to(device).train(), optimizer=optimizer, config=deepspeed_config(config, dtype)
        )
        self.named = {hf_name(name): parameter for name, parameter in self.engine.module.named_parameters()}
        self.base: Any = optimizer
        self.world = dist.get_world_size()
        # Without ZeRO, DeepSpeed steps the plain optimizer on the plain parameters.
        self.plain = self.stage == 0
        self.steps = 0

    def forward(self, batch: Batch, temperature: float) -> ModelOutput:
        return ModelOutput(*self.engine(batch.tokens, batch.mask, temperature))

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """DeepSpeed averages over ranks; the loss is a share of a sum, so it is multiplied back."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self.world)

    def step(self) -> StepInfo:
        assert isinstance(self.config, TrainingConfig)
        rate = learning_rate_at(self.steps, self.config, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        plain_norm = self._plain_norm() if self.plain else None
        self.engine.step()
        self.steps += 1
        norm = self.engine.get_global_grad_norm() if plain_norm is None else plain_norm
        return StepInfo(float(norm), rate)

    def _plain_norm(self) -> Tensor:
        """DeepSpeed reports no norm where it steps the plain optimizer."""
        return nn.utils.get_total_norm([parameter.grad for parameter in self.named.values()])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.stage < 3:
            yield from ((name, parameter.detach()) for name, parameter in self.named.items())
            return
        for names in self._gather_groups():
            with GatheredParameters([self.named[name] for name in names]):
                yield from ((name, self.named[name].detach()) for name in names)

    def _gather_groups(self) -> Iterator[list[str]]:
        names: list[str] = []
        elements = 0
        for name, parameter in self.named.items():
            if names and elements + parameter.ds_numel > GATHER_ELEMENTS:
                yield names
                names, elements = [], 0
            names.append(name)
            elements += parameter.ds_numel
        yield names

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.named.items():
            yield name, parameter.grad if self.plain else safe_get_full_grad(parameter)

    def state(self) -> Iterator[tuple[str, TensorState]]:
        self._link_moments()
        for name, parameter in self.named.items():
            yield name, self._plain_state(parameter) if self.plain else self._sharded_state(parameter)

    def _plain_state(self, parameter: nn.Parameter) -> TensorState:
        moments = self.base.state.get(parameter, {})
        return {"weight": parameter.detach(), **{key: moments[key] for key in MOMENTS if key in moments}}

    def _sharded_state(self, parameter: nn.Parameter) -> TensorState:
        state = {"weight": safe_get_full_fp32_param(parameter)}
        if self.steps:
            state |= {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
        return state

    def start_loading(self, steps: int) -> None:
        self.steps = steps
        if not steps or self.plain:
            return
        for shard in self._shards():
            moments = {key: torch.zeros_like(shard) for key in MOMENTS}
            self.base.state[shard] = {"step": torch.tensor(float(steps)), **moments}
        self._link_moments()

    def _link_moments(self) -> None:
        """DeepSpeed 0.19 links parameters to their moments after the first parameter group's first step, when
        the other groups have none yet; asking again once all have stepped links them all.
        """
        if self.steps and not self.plain and self.stage < 3:
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def _shards(self) -> list[Tensor]:
        """The flat float32 tensors that the inner optimizer steps on this rank."""
        if self.stage == 3:
            return list(self.optimizer.fp32_partitioned_groups_flat)
        return list(self.optimizer.single_partition_of_fp32_groups)

    def load_state(self, name: str, state: TensorState) -> None:
        parameter = self.named[name]
        values = {key: value.to(self.device) for key, value in state.items()}
        with GatheredParameters([parameter], modifier_rank=0, enabled=self.stage == 3):
            parameter.data.copy_(values["weight"])
        if self.plain:
            if self.steps:
                moments = {key: values[key].clone() for key in MOMENTS}
                self.base.state[parameter] = {"step": torch.tensor(float(self.steps)), **moments}
            return
        safe_set_full_fp32_param(parameter, values["weight"])
        if self.steps:
            for key in MOMENTS:
                safe_set_full_optimizer_state(parameter, values[key], key)
