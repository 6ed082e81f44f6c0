"""DeepSpeed on one rank of a group: ZeRO 0 to 3, tensor parallelism by AutoTP."""

import math
import os
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, is_zero_param
from torch import Tensor, nn

from trueline.config.model import TrainingConfig
from trueline.data.types import Batch, ModelOutput
from trueline.models.loading import DTYPES, ShareOut, shape_of
from trueline.models.scorer import Scorer, hf_name
from trueline.training import optimizer as optimizers
from trueline.training.deepspeed_config import at_once, deepspeed_config, effective_stage
from trueline.training.deepspeed_tensor_parallel import Cuts, tensor_parallel
from trueline.training.engines import TensorState, TrainEngine, model_output, pass_arguments
from trueline.training.worker import WorkerSpec

KEPT = (None, "none", "moments")  # offloads that leave master weights on the device
SHARDED = optimizers.MOMENTS["adamw"]  # ZeRO keeps these alone; Muon needs whole matrices


def join(spec: WorkerSpec) -> None:
    # Plain gloo: the shared-memory collective is compiled at its first use, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.update(RANK=str(spec.rank), LOCAL_RANK="0", WORLD_SIZE=str(spec.world))
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)


def share_out(spec: WorkerSpec) -> ShareOut:
    """Return a function that shards a parameter over the ranks like ZeRO 3, with rank 0's values."""
    join(spec)
    dtype = spec.model.dtype
    # With an empty module DeepSpeed makes all its other preparations.
    ranks = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=deepspeed_config(spec.ranks, dtype))

    def shard(parameter: nn.Parameter) -> None:
        if not is_zero_param(parameter):
            # A copy: a broadcast into the pages of a mapped file would make them private to this process.
            parameter.data = parameter.data.to(DTYPES[dtype], copy=True)
            ranks._convert_to_zero_parameters([parameter])

    return shard


class DeepSpeedEngine(TrainEngine):
    def __init__(self, module: Scorer, spec: WorkerSpec, device: torch.device) -> None:
        join(spec)
        dtype, config = str(next(module.parameters()).dtype).removeprefix("torch."), spec.ranks
        self.config, self.total_steps, self.device = config, spec.total_steps, device
        self.stage = effective_stage(config, dtype)
        cuts = tensor_parallel(module.model, spec.model.tensor_parallel)
        elements = sum(math.prod(shape_of(parameter)) for parameter in module.parameters())
        self.gathered = at_once(elements)
        optimizer: Any = None
        if isinstance(config, TrainingConfig):
            optimizer = optimizers.make_optimizer(module.named_parameters(), config)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=(module.to(device) if cuts is None else module).train(),  # AutoTP moves its part of each layer
            optimizer=optimizer,
            config=deepspeed_config(config, dtype, cuts, elements),
        )
        self.named = {hf_name(name): parameter for name, parameter in self.engine.module.named_parameters()}
        self.trained = {name: parameter for name, parameter in self.named.items() if parameter.requires_grad}
        self.base = optimizer
        self.cuts = Cuts(self.engine.module, spec.model.tensor_parallel)
        self.replicas = dist.get_world_size() // spec.model.tensor_parallel
        # Without ZeRO, DeepSpeed steps the plain optimizer on the plain parameters.
        self.plain = self.stage == 0
        if self.stage == 3 and optimizer is not None and dtype == "float32" and config.offload in KEPT:
            for weights, masters in zip(self.optimizer.fp16_partitioned_groups_flat, self._shards(), strict=True):
                masters.data = weights  # as DeepSpeed 0.19 intends, but it compares a device with its name
        if isinstance(optimizer, optimizers.HostMomentsAdamW):
            optimizer.reserve(self._shards())
        self.steps = 0
        self.average = None
        if isinstance(config, TrainingConfig) and config.ema_decay:
            self.average = optimizers.MovingAverage(self._shards(), config.ema_decay)

    def forward(self, batch: Batch, temperature: float, entropy: bool) -> ModelOutput:
        return model_output(self.engine(*pass_arguments(batch, temperature, entropy)))

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Multiply the loss by the number of replicas, over which DeepSpeed averages, and run backward."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self.replicas)

    def step_if_finite(self) -> float:
        return self._plain_step() if self.plain else self._sharded_step()

    def _plain_step(self) -> float:
        """Return the norm, and step if it is finite: DeepSpeed checks neither here."""
        norm = float(self.cuts.norm({name: parameter.grad for name, parameter in self.trained.items()}))
        if math.isfinite(norm):
            self.engine.step()
        else:
            self.engine.zero_grad()
        return norm

    def _sharded_step(self) -> float:
        """Step and return the norm over all ranks, or NaN if it is not finite: then ZeRO changes nothing."""
        self.engine.step()
        if not self.optimizer.overflow:
            return float(self.engine.get_global_grad_norm())
        # With an offloaded optimizer, DeepSpeed 0.19 would add the next step's gradients to these.
        self.optimizer.averaged_gradients.clear()
        return math.nan

    def discard(self) -> bool:
        """Discard gradients, also those in buckets; under ZeRO 3 and offload that is not possible."""
        if self.stage == 3 or self.config.offload in ("optimizer", "all"):
            return False
        self.engine.zero_grad()
        if not self.plain:
            zero = self.optimizer
            zero.zero_grad(set_to_none=True)
            for bucket in zero.ipg_buckets.values():
                bucket.clear()
            zero._release_ipg_buffers()
            for kept in (zero.extra_large_param_to_reduce, zero.averaged_gradients, zero.all_grad_tensors):
                kept.clear()
            zero.params_already_reduced = [False] * len(zero.params_already_reduced)
            zero._backward_active_depth = 0
        return True

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.stage < 3:
            yield from ((name, self.cuts.whole(name, parameter.detach())) for name, parameter in self.named.items())
            return
        for names in self._gather_groups():
            with GatheredParameters([self.named[name] for name in names]):
                yield from ((name, self.cuts.whole(name, self.named[name].detach())) for name in names)

    def _gather_groups(self) -> Iterator[list[str]]:
        names: list[str] = []
        elements = 0
        for name, parameter in self.named.items():
            if names and elements + parameter.ds_numel > self.gathered:
                yield names
                names, elements = [], 0
            names.append(name)
            elements += parameter.ds_numel
        yield names

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.trained.items():
            yield (
                name,
                self.cuts.whole(name, parameter.grad if self.plain else deepspeed.utils.safe_get_full_grad(parameter)),
            )

    def state(self) -> Iterator[tuple[str, TensorState]]:
        self._link_moments()
        for name, parameter in self.trained.items():
            parts = {
                "weight": parameter.detach() if self.plain else deepspeed.utils.safe_get_full_fp32_param(parameter)
            }
            if self.plain:
                parts |= optimizers.moments_of(self.base, parameter)
            elif self.steps:
                parts |= {key: deepspeed.utils.safe_get_full_optimizer_state(parameter, key) for key in SHARDED}
            yield name, {key: self.cuts.whole(name, part) for key, part in parts.items()}

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.trained.items():
            part = parameter.detach() if self.plain else deepspeed.utils.safe_get_full_fp32_param(parameter)
            yield name, self.cuts.whole(name, part)

    def start_loading(self, steps: int) -> None:
        self.steps = steps
        if not steps or self.plain:
            return
        for shard in self._shards():
            state = self.base.state[shard]
            state.update({key: torch.zeros_like(shard) for key in SHARDED if key not in state})
            optimizers.set_moments(self.base, shard, {}, steps)
        self._link_moments()

    def _link_moments(self) -> None:
        """Link all parameters to their moments: DeepSpeed 0.19 does so after the first step of the first parameter
        group, when the other groups have no moments yet.
        """
        if self.steps and not self.plain and self.stage < 3:
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def _shards(self) -> list[Tensor]:
        """Return the tensors that the inner optimizer steps on this rank; under ZeRO they are flat and float32."""
        if self.plain:
            return list(self.trained.values())
        if self.stage == 3:
            return list(self.optimizer.fp32_partitioned_groups_flat)
        return list(self.optimizer.single_partition_of_fp32_groups)

    def needed_slice(self, name: str, part: str) -> slice:
        parameter, dim, place = self.trained[name], self.cuts.dims.get(name), dist.get_rank() // self.cuts.size
        elements = parameter.ds_numel if self.stage == 3 else parameter.numel()
        before = self.cuts.rank * elements if dim == 0 else 0  # of other tensor-parallel ranks
        computes = part == "weight" and (self.stage < 3 or place == 0)  # under ZeRO 3, place 0 hands it to the others
        if dim == 1:
            return slice(None)  # a few elements of every row
        if self.plain or computes:
            return slice(before, before + elements)
        if self.stage == 3:
            length = parameter.ds_tensor.ds_numel
            return slice(before + place * length, before + min((place + 1) * length, elements))
        if parameter._hp_mapping is None:
            return slice(0)  # other ranks step it
        address = parameter._hp_mapping.lp_fragment_address
        return slice(before + address.start, before + address.start + address.numel)

    def load_state(self, name: str, state: TensorState) -> None:
        parameter = self.trained[name]
        values = {key: self.cuts.part(name, value).to(self.device) for key, value in state.items()}
        with GatheredParameters([parameter], modifier_rank=0, enabled=self.stage == 3):
            parameter.data.copy_(values["weight"])
        weight = values.pop("weight")
        if self.plain:
            if values:
                optimizers.set_moments(self.base, parameter, values, self.steps)
            return
        self._set(parameter, weight)
        if self.steps:
            for key in SHARDED:
                self._set(parameter, values[key], key)

    def _set(self, parameter: Any, value: Tensor, moment: str | None = None) -> None:
        """Set the master weight or a moment; ZeRO 3's own setter fails if ranks do not divide the elements."""
        if self.stage < 3:
            if moment is None:
                deepspeed.utils.safe_set_full_fp32_param(parameter, value)
            else:
                deepspeed.utils.safe_set_full_optimizer_state(parameter, value, moment)
            return
        length = parameter.ds_tensor.ds_numel
        padded = nn.functional.pad(value.flatten(), (0, length * self.replicas - value.numel()))
        shard = padded.split(length)[dist.get_rank() // self.cuts.size]
        if moment is None:
            deepspeed.utils.safe_set_local_fp32_param(parameter, shard)
        else:
            deepspeed.utils.safe_set_local_optimizer_state(parameter, shard, moment)

    def set_master(self, name: str, value: Tensor) -> None:
        part = self.cuts.part(name, value).to(self.device)
        if self.plain:
            self.trained[name].data.copy_(part)
        else:
            self._set(self.trained[name], part)
