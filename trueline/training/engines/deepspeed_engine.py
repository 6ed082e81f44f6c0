"""DeepSpeed on one rank of a group: ZeRO 0 to 3, tensor parallelism by AutoTP, experts divided over ranks."""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trueline.config.model import TrainingConfig
from trueline.models.loading import DTYPES, ShareOut, shape_of
from trueline.models.scorer import Scorer, hf_name
from trueline.training.engines import optimizer as optimizers
from trueline.training.engines.deepspeed_config import at_once, deepspeed_config, effective_stage, without_mlflow
from trueline.training.engines.deepspeed_experts import divide_experts, group_experts
from trueline.training.engines.engine import Chosen, TensorState, TrainEngine
from trueline.training.engines.shards import Region, Shard
from trueline.training.engines.tensor_cuts import PARTIAL, Cuts, layer_styles, weight_pattern
from trueline.training.worker import WorkerSpec

with without_mlflow():
    import deepspeed
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, is_zero_param
    from deepspeed.utils import groups

AUTOTP: dict[str, dict[str, Any]] = {  # its settings by style
    "colwise": {"partition_type": "column"},
    "rowwise": {"partition_type": "row"},
    PARTIAL: {"partition_type": "skip", "grad_allreduce": True},
}
KEPT = (None, "none", "moments")  # offloads that leave master weights on the device
SHARDED = optimizers.MOMENTS["adamw"]  # ZeRO keeps these alone; Muon needs whole matrices


def join(spec: WorkerSpec) -> None:
    # Plain gloo: the shared-memory collective is compiled at its first use, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.update(RANK=str(spec.rank), LOCAL_RANK="0", WORLD_SIZE=str(spec.world))
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)


def share_out(spec: WorkerSpec, device: torch.device) -> ShareOut | None:
    """Return how ranks divide a model while they read it: at ZeRO 3, unless whole layers have to be split first."""
    is_cut = spec.model.tensor_parallel > 1 or spec.ranks.deepspeed.expert_parallel > 1
    return ZeroShareOut(spec) if effective_stage(spec.ranks, spec.model.dtype) == 3 and not is_cut else None


class ZeroShareOut(ShareOut):
    """Shards parameters over the ranks like ZeRO 3; rank 0 reads them, and DeepSpeed broadcasts what it has."""

    def __init__(self, spec: WorkerSpec) -> None:
        join(spec)
        self.reads, self.dtype = spec.rank == 0, DTYPES[spec.model.dtype]
        # With an empty module DeepSpeed makes all its other preparations.
        config = deepspeed_config(spec.ranks, spec.model.dtype)
        self.ranks = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=config)

    def shard(self, parameter: nn.Parameter) -> None:
        if not is_zero_param(parameter):
            # A copy: a broadcast into the pages of a mapped file would make them private to this process.
            parameter.data = parameter.data.to(self.dtype, copy=self.reads)
            self.ranks._convert_to_zero_parameters([parameter])

    def hand_out(self, tensor: Tensor) -> None:
        sent = tensor.to(self.ranks.local_device).contiguous()
        dist.broadcast(sent.view(-1).view(torch.uint8), 0)
        if not self.reads:
            tensor.copy_(sent)


class DeepSpeedEngine(TrainEngine):
    def __init__(self, module: Scorer, spec: WorkerSpec, device: torch.device) -> None:
        join(spec)
        dtype, config = str(next(module.parameters()).dtype).removeprefix("torch."), spec.ranks
        self.config, self.total_steps, self.device = config, spec.total_steps, device
        # Without ZeRO, DeepSpeed steps the plain optimizer on the plain parameters.
        self.stage = effective_stage(config, dtype)
        self.plain, divided = self.stage == 0, config.deepspeed.expert_parallel
        cuts = tensor_parallel(module.model, spec.model.tensor_parallel)
        elements = sum(math.prod(shape_of(parameter)) for parameter in module.parameters())
        self.gathered = at_once(elements)
        experts = divide_experts(module.model, divided) if divided > 1 else None
        optimizer: Any = None
        if isinstance(config, TrainingConfig):
            optimizer = optimizers.make_optimizer(module.named_parameters(), config)
            if experts is not None and not self.plain:
                group_experts(optimizer, divided)
        self.module, self.optimizer, _, _ = deepspeed.initialize(
            model=(module.to(device) if cuts is None else module).train(),  # AutoTP moves its part of each layer
            optimizer=optimizer,
            config=deepspeed_config(config, dtype, cuts, elements),
        )
        self.named = {hf_name(name): parameter for name, parameter in self.module.module.named_parameters()}
        self.trained = {name: parameter for name, parameter in self.named.items() if parameter.requires_grad}
        self.base = optimizer
        self.cuts = experts or find_cuts(self.module.module, spec.model.tensor_parallel)
        self.replicas = dist.get_world_size() // spec.model.tensor_parallel
        if self.stage == 3 and optimizer is not None and dtype == "float32" and config.offload in KEPT:
            for weights, masters in zip(self.optimizer.fp16_partitioned_groups_flat, self._shards(), strict=True):
                masters.data = weights  # as DeepSpeed 0.19 intends, but it compares a device with its name
        if isinstance(optimizer, optimizers.HostMomentsAdamW):
            optimizer.reserve(self._shards())
        self.steps, self.average = 0, None
        if isinstance(config, TrainingConfig) and config.ema_decay:
            self.average = optimizers.MovingAverage(self._shards(), config.ema_decay)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Multiply the loss by the number of replicas, over which DeepSpeed averages, and run backward."""
        self.module.set_gradient_accumulation_boundary(last)
        self.module.backward(loss * self.replicas)

    def scale_gradients(self, factor: float) -> None:
        if not self.plain:
            self.optimizer.loss_scale = 1 / factor  # by which ZeRO divides, wherever its gradients are
            return
        for parameter in self.trained.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def step_if_finite(self) -> float:
        if self.plain:  # DeepSpeed neither computes the norm nor checks it
            gradients = {name: parameter.grad for name, parameter in self.trained.items()}
            norm = float(gradient_norm(gradients, self.cuts))
            if math.isfinite(norm):
                self._clip(norm)
                self.module.step()
            else:
                self.module.zero_grad()
            return norm
        self.module.step()  # ZeRO changes nothing if the norm over all ranks is not finite
        self.optimizer.loss_scale = 1.0
        if not self.optimizer.overflow:
            return float(self.module.get_global_grad_norm())
        # With an offloaded optimizer, DeepSpeed 0.19 would add the next step's gradients to these.
        self.optimizer.averaged_gradients.clear()
        return math.nan

    def _clip(self, norm: float) -> None:
        assert isinstance(self.config, TrainingConfig)
        most = self.config.max_grad_norm or math.inf
        if norm > most:
            self.scale_gradients(most / norm)

    def discard(self) -> bool:
        """Discard gradients, also those in buckets; under ZeRO 3 and offload that is not possible."""
        if self.stage == 3 or self.config.offload in ("optimizer", "all"):
            return False
        self.module.zero_grad()
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

    def weights(self, chosen: Chosen | None = None) -> Iterator[tuple[str, Tensor]]:
        named = {name: one for name, one in self.named.items() if chosen is None or chosen(name)}
        if self.stage < 3:
            yield from ((name, self.cuts.whole(name, parameter.detach())) for name, parameter in named.items())
            return
        for names in self._gather_groups(named):
            with GatheredParameters([named[name] for name in names]):
                yield from ((name, self.cuts.whole(name, named[name].detach())) for name in names)

    def _gather_groups(self, named: dict[str, Any]) -> Iterator[list[str]]:
        names: list[str] = []
        elements = 0
        for name, parameter in named.items():
            if names and elements + parameter.ds_numel > self.gathered:
                yield names
                names, elements = [], 0
            names.append(name)
            elements += parameter.ds_numel
        if names:
            yield names

    def weight_shards(self) -> Iterator[Shard]:
        for name, parameter in self.named.items():
            held = parameter.ds_tensor if self.stage == 3 else parameter
            yield self._shard(name, held, self._region(name, stepped=False), self.stage == 3)

    def master_shards(self) -> Iterator[Shard]:
        for name, parameter in self.trained.items():
            yield self._shard(name, self._stepped_part(parameter), self._region(name), not self.plain)

    def moment_shards(self) -> Iterator[Shard]:
        self._link_moments()
        for name, parameter in self.trained.items():
            keys = optimizers.moments_of(self.base, parameter) if self.plain else SHARDED if self.steps else ()
            for key in keys:
                moment = self._stepped_part(parameter, key)
                yield replace(self._shard(name, moment, self._region(name), not self.plain), name=f"{name}/{key}")

    def _shard(self, name: str, held: Tensor, region: Region, divided: bool) -> Shard:
        """Make a shard of what this rank holds; if it is not divided over data ranks, all of them hold the same."""
        alone = name in self.cuts.dims or not self.cuts.alike
        place, places = (0, 1) if alone else (self.cuts.rank, self.cuts.size)
        if not divided:
            data_place, data_places = self.cuts.data_place(name)
            place, places = place + places * data_place, places * data_places
        return Shard(name, region, held.detach().flatten()[: region.size()], place, places)

    def _region(self, name: str, *, stepped: bool = True) -> Region:
        """Return where this rank's elements lie: those that it steps, or else those that it computes with."""
        parameter = self.named[name]
        region = self.cuts.region(name, shape_of(parameter))
        if self.stage == 3:
            length, (place, _) = parameter.ds_tensor.ds_numel, self.cuts.data_place(name)
            return region.part(*(min(edge * length, region.size()) for edge in (place, place + 1)))
        if self.plain or not stepped:
            return region
        if parameter._hp_mapping is None:
            return region.part(0, 0)  # other ranks step it
        address = parameter._hp_mapping.lp_fragment_address
        return region.part(address.start, address.start + address.numel)

    def _stepped_part(self, parameter: Any, moment: str | None = None) -> Tensor:
        """Return what this rank steps of a parameter, or a moment of that."""
        if self.plain:
            return parameter if moment is None else optimizers.moments_of(self.base, parameter)[moment]
        if self.stage == 3:
            return self.optimizer.get_local_fp32_param(parameter, moment)
        mapping = parameter._hp_mapping
        return torch.empty(0) if mapping is None else mapping.get_hp_fragment(moment)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.trained.items():
            gradient = parameter.grad if self.plain else deepspeed.utils.safe_get_full_grad(parameter)
            yield name, self.cuts.whole(name, gradient)

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.trained.items():
            part = parameter.detach() if self.plain else deepspeed.utils.safe_get_full_fp32_param(parameter)
            yield name, self.cuts.whole(name, part)

    def start_loading(self, steps: int) -> None:
        self.steps = steps
        for shard in self._shards() if steps and not self.plain else ():
            state = self.base.state[shard]
            state.update({key: torch.zeros_like(shard) for key in SHARDED if key not in state})
            optimizers.set_moments(self.base, shard, {}, steps)
        self._link_moments()

    def _link_moments(self) -> None:
        """Link all parameters to their moments; DeepSpeed 0.19 does so when only the first group has some."""
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
        # Under ZeRO 3, the rank at place 0 hands the weight to the others.
        computes = part == "weight" and (self.stage < 3 or self.cuts.data_place(name)[0] == 0)
        whole = self.cuts.region(name, shape_of(self.trained[name]))
        return (whole if computes else self._region(name)).bounds()

    def load_state(self, name: str, state: TensorState) -> None:
        parameter = self.trained[name]
        moments = {key: self.cuts.part(name, value).to(self.device) for key, value in state.items()}
        weight = moments.pop("weight")
        with GatheredParameters([parameter], modifier_rank=0, enabled=self.stage == 3):
            parameter.data.copy_(weight)
        if not self.plain:
            self._set(name, weight)
            for key in SHARDED if self.steps else ():
                self._set(name, moments[key], key)
        elif moments:
            optimizers.set_moments(self.base, parameter, moments, self.steps)

    def _set(self, name: str, value: Tensor, moment: str | None = None) -> None:
        """Set the master weight or a moment; ZeRO 3's own setter fails if ranks do not divide the elements."""
        parameter = self.trained[name]
        setters = deepspeed.utils.safe_set_full_fp32_param, deepspeed.utils.safe_set_full_optimizer_state
        if self.stage == 3:
            setters = deepspeed.utils.safe_set_local_fp32_param, deepspeed.utils.safe_set_local_optimizer_state
            length, (place, places) = parameter.ds_tensor.ds_numel, self.cuts.data_place(name)
            padded = nn.functional.pad(value.flatten(), (0, length * places - value.numel()))
            value = padded.split(length)[place]
        if moment is None:
            setters[0](parameter, value)
        else:
            setters[1](parameter, value, moment)

    def use_masters(self) -> None:
        for parameter in [] if self.plain else self.trained.values():
            master = deepspeed.utils.safe_get_full_fp32_param(parameter)
            with GatheredParameters([parameter], modifier_rank=0, enabled=self.stage == 3):
                parameter.data.copy_(master)

    def set_master(self, name: str, value: Tensor) -> None:
        part = self.cuts.part(name, value).to(self.device)
        if self.plain:
            self.trained[name].data.copy_(part)
        else:
            self._set(name, part)


def tensor_parallel(model: Any, size: int) -> dict[str, Any] | None:
    """Return AutoTP's rules for a model."""
    # DeepSpeed's groups last as long as the process, for every later engine.
    if groups.mpu is not None and groups.get_tensor_model_parallel_world_size() != size:
        raise RuntimeError(f"this process has used another size: model.tensor_parallel={size} needs a new process")
    if size == 1:
        return None
    plan = layer_styles(model, size)
    specs = [{"patterns": [weight_pattern(layer)], **AUTOTP[style]} for layer, style in plan.items()]
    return {"autotp_size": size, "partition_config": {"use_default_specs": False, "layer_specs": specs}}


def find_cuts(module: nn.Module, size: int) -> Cuts:
    """Return what AutoTP has split."""
    dims: dict[str, int] = {}
    if size == 1:
        return Cuts()
    for name, layer in module.named_modules():
        if isinstance(layer, LinearAllreduce):  # its bias is added after the sum, so every rank has it whole
            dims[hf_name(f"{name}.weight")] = 1
        elif isinstance(layer, LinearLayer):
            dims |= {hf_name(f"{name}.{part}"): 0 for part, _ in layer.named_parameters()}
    return Cuts(size, dims, groups.get_tensor_model_parallel_group(), groups.get_tensor_model_parallel_rank())


def gradient_norm(gradients: dict[str, Tensor], cuts: Cuts) -> Tensor:
    """Return the norm of all gradients; those of whole parameters, which every rank has, count once."""
    cut = nn.utils.get_total_norm([gradient for name, gradient in gradients.items() if name in cuts.dims]) ** 2
    whole = nn.utils.get_total_norm([gradient for name, gradient in gradients.items() if name not in cuts.dims])
    if cuts.dims:
        dist.all_reduce(cut, group=cuts.group)
    return (cut + whole**2).sqrt()
