"""PyTorch's FSDP2 on one rank of a group: `fully_shard` for each block, over DTensors."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TensorShard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from trueline.config.model import TrainingConfig
from trueline.data.types import Batch, ModelOutput
from trueline.models.loading import DTYPES, ShareOut
from trueline.models.scorer import Scorer, hf_name
from trueline.models.truncation import Truncation
from trueline.training.engines import optimizer as optimizers
from trueline.training.engines.engine import Chosen, TensorState, TrainEngine
from trueline.training.engines.fsdp2_config import copies, reduces_each_pass, reshards
from trueline.training.engines.shards import Region, Shard
from trueline.training.engines.tensor_cuts import PARTIAL, Cuts, layer_styles
from trueline.training.worker import WorkerSpec

PARALLEL: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
PART = "own_rows"  # attribute of a parameter whose other rows are not here


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's places: replicas outermost, then shards, tensor parallelism innermost."""

    replica: int
    replicas: int
    shard: int
    shards: int
    tensor: int
    tensors: int

    @classmethod
    def of(cls, spec: WorkerSpec) -> "Ranks":
        tensors = spec.model.tensor_parallel
        replicas = copies(spec.ranks, spec.world // tensors)
        shards = spec.world // tensors // replicas
        data, tensor = divmod(spec.rank, tensors)
        return cls(data // shards, replicas, data % shards, shards, tensor, tensors)

    def rows(self, count: int) -> tuple[int, int]:
        """Return which rows of a tensor this rank holds; FSDP2 divides them as `torch.chunk` does."""
        each = -(-count // self.shards)
        return min(self.shard * each, count), min((self.shard + 1) * each, count)


class OwnRows(ShareOut):
    """Keeps this rank's rows of each parameter; rank 0 reads the whole, one tensor at a time."""

    def __init__(self, spec: WorkerSpec, device: torch.device) -> None:
        self.reads, self.ranks, self.device = spec.rank == 0, Ranks.of(spec), device

    def shard(self, parameter: nn.Parameter) -> None:
        if PART in vars(parameter):
            return
        first, last = self.ranks.rows(len(parameter))
        sent = parameter.data.to(self.device, copy=True).contiguous()
        dist.broadcast(sent.view(-1).view(torch.uint8), 0)
        setattr(parameter, PART, sent[first:last].clone())
        parameter.data = sent.new_empty(()).expand(sent.shape)  # takes no memory

    def hand_out(self, tensor: Tensor) -> None:
        sent = tensor.to(self.device).contiguous()
        dist.broadcast(sent.view(-1).view(torch.uint8), 0)
        if not self.reads:
            tensor.copy_(sent)


def share_out(spec: WorkerSpec, device: torch.device) -> ShareOut | None:
    """Return how ranks divide a model while they read it; one that tensor parallelism splits is read whole."""
    ranks = Ranks.of(spec)
    return OwnRows(spec, device) if ranks.shards > 1 and ranks.tensors == 1 and not spec.model.lora.quantize else None


class FSDP2Engine(TrainEngine):
    def __init__(self, module: Scorer, spec: WorkerSpec, device: torch.device) -> None:
        self.config, self.total_steps, self.device = spec.ranks, spec.total_steps, device
        self.ranks, self.dtype = Ranks.of(spec), DTYPES[spec.model.dtype]
        self.reshards = reshards(spec.ranks, self.ranks.shards)
        self.reduces_each_pass = reduces_each_pass(spec.ranks, self.ranks.shards)
        places = self.ranks.replicas, self.ranks.shards, self.ranks.tensors
        self.mesh = init_device_mesh(device.type, places, mesh_dim_names=("replica", "shard", "tensor"))
        self.cuts, self.partial = split_layers(module.model, self.mesh["tensor"])
        self.module: Any = self._fully_shard(module).train()
        named = {hf_name(name): parameter for name, parameter in module.named_parameters()}
        self.named: dict[str, Any] = named
        self.trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self.steps = 0
        self.average: optimizers.MovingAverage | None = None
        self.optimizer: Any = None
        if isinstance(self.config, TrainingConfig):
            self._make_optimizer(self.config)

    def _fully_shard(self, module: Scorer) -> Scorer:
        """Shard every block, then the rest; a whole model is cast and moved block by block."""
        trained, offloads = isinstance(self.config, TrainingConfig), self.config.offload == "all"
        if not trained:
            module.requires_grad_(False)  # what no optimizer steps stays in the type that it computes in
        quantized = {one for one in module.parameters() if not one.is_floating_point()}
        settings: dict[str, Any] = {
            "mesh": self.mesh["replica", "shard"] if self.ranks.replicas > 1 else self.mesh["shard"],
            "mp_policy": MixedPrecisionPolicy(
                self.dtype if trained else None, torch.float32, cast_forward_inputs=False
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if offloads else OffloadPolicy(),
            "ignored_params": quantized,
        }
        for one in [*blocks_of(module), module]:
            own = take_out_rows(one, quantized)
            fully_shard(one, reshard_after_forward=self.reshards and one is not module, **settings)
            self._fill(one, own)
        for one in fsdp_modules(module):
            one.set_gradient_divide_factor(1.0)  # a loss is a sum over all ranks
            one.set_force_sum_reduction_for_comms(True)
        as_sharded: Any = module
        as_sharded._get_fsdp_state()._lazy_init()  # now, because it may move what the optimizer steps
        return module

    def _fill(self, block: Any, own: dict[str, Tensor]) -> None:
        """Give the parameters of a block that have no values the rows of this rank."""
        parts = {parameter: own[name] for name, parameter in block.named_parameters() if name in own}
        home = torch.device("cpu") if self.config.offload == "all" else self.device

        def fill(tensor: Any) -> Any:
            if tensor not in parts:
                return tensor if tensor.is_meta else tensor.to(tensor.device)
            return like(tensor, parts[tensor].to(home))

        if parts:
            block._apply(fill)

    def _make_optimizer(self, config: TrainingConfig) -> None:
        # Muon steps whole matrices, which DTensors gather; AdamW steps what this rank holds.
        kinds = {name: optimizers.stepped_by(name, one.dim(), config) for name, one in self.trained.items()}
        self.stepped: dict[str, Any] = {
            name: one if kinds[name] == "muon" else nn.Parameter(local_of(one)) for name, one in self.trained.items()
        }
        self.optimizer = optimizers.make_optimizer(self.stepped.items(), config)
        held = [local_of(one) for one in self.stepped.values()]
        if isinstance(self.optimizer, optimizers.HostMomentsAdamW):
            self.optimizer.reserve(self.stepped.values())
        if config.ema_decay:
            self.average = optimizers.MovingAverage(held, config.ema_decay)

    def forward(
        self, batch: Batch, temperature: float, entropy: bool, squares: bool = False, kept: Truncation | None = None
    ) -> ModelOutput:
        output = super().forward(batch, temperature, entropy, squares, kept)
        if not torch.is_grad_enabled():  # no backward pass will free what was gathered, or gather it anew
            for one in fsdp_modules(self.module):
                one.reshard()
        return output

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.module.set_requires_gradient_sync(last or self.reduces_each_pass)
        self.module.set_requires_all_reduce(last)
        self.module.set_reshard_after_backward(last or self.reshards)
        loss.backward()
        for name in self.partial if last else ():
            if (gradient := self.named[name].grad) is not None:
                dist.all_reduce(local_of(gradient), group=self.mesh["tensor"].get_group())

    def _gradients(self) -> dict[str, Tensor]:
        return {name: local_of(one.grad) for name, one in self.trained.items() if one.grad is not None}

    def scale_gradients(self, factor: float) -> None:
        for gradient in self._gradients().values():
            gradient.mul_(factor)

    def step_if_finite(self) -> float:
        assert isinstance(self.config, TrainingConfig)
        gradients = self._gradients()
        norm = self._norm(gradients)
        if math.isfinite(norm):
            if (most := self.config.max_grad_norm) and norm > most:
                self.scale_gradients(most / (norm + 1e-6))
            for name, gradient in gradients.items():
                if self.stepped[name] is not self.trained[name]:
                    self.stepped[name].grad = gradient
            self.optimizer.step()
        self._forget()
        return norm

    def _norm(self, gradients: dict[str, Tensor]) -> float:
        """Return the norm over all ranks; what several ranks hold counts once."""
        total = torch.zeros((), device=self.device)
        for cut in (True, False):
            held = [one for name, one in gradients.items() if (name in self.cuts.dims) == cut and one.numel()]
            if held:
                holders = self.ranks.replicas * (1 if cut else self.ranks.tensors)
                total += nn.utils.get_total_norm(held).to(self.device) ** 2 / holders
        dist.all_reduce(total)
        return math.sqrt(total.item())

    def _forget(self) -> None:
        for one in (*self.trained.values(), *self.stepped.values()):
            one.grad = None

    def discard(self) -> bool:
        """Discard gradients, also in the middle of a pass, where FSDP2 would expect the rest of it."""
        self._forget()
        for state in (one._get_fsdp_state() for one in fsdp_modules(self.module)):
            state._training_state = TrainingState.IDLE
            state._state_ctx.iter_forward_root = None
            state._state_ctx.post_backward_final_callback_queued = False
            if (group := state._fsdp_param_group) is not None:
                reset(group)
        return True

    def weights(self, chosen: Chosen | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.named.items():
            if chosen is None or chosen(name):
                yield name, self._whole(name, self._as_computed(local_of(parameter)))

    def _as_computed(self, values: Tensor) -> Tensor:
        """Return values as layers compute with them; those in 4 bits stay as they are."""
        return values.to(self.dtype) if values.is_floating_point() else values

    def _whole(self, name: str, local: Tensor) -> Tensor:
        """Gather a parameter, or what is shaped like it, from all ranks that have parts of it."""
        if self.ranks.shards > 1 and isinstance(self.named[name], DTensor):
            shape = self._part_shape(name)
            each = -(-shape[0] // self.ranks.shards)
            padded = local.new_zeros((each, *shape[1:]), device=self.device)
            padded[: len(local)] = local
            gathered = padded.new_empty((each * self.ranks.shards, *shape[1:]))
            dist.all_gather_into_tensor(gathered, padded, group=self.mesh["shard"].get_group())
            local = gathered[: shape[0]]
        return self.cuts.whole(name, local.to(self.device))

    def _part_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of what tensor parallelism leaves of a parameter, before it is sharded."""
        shape = list(self.named[name].shape)
        if name in self.cuts.dims:
            shape[self.cuts.dims[name]] //= self.ranks.tensors
        return tuple(shape)

    def _shard(self, name: str, values: Tensor, key: str = "") -> Shard:
        place, places = (0, 1) if name in self.cuts.dims else (self.ranks.tensor, self.ranks.tensors)
        at, copies = (self.ranks.replica, self.ranks.replicas)
        if not isinstance(self.named[name], DTensor):  # not sharded
            at, copies = at * self.ranks.shards + self.ranks.shard, copies * self.ranks.shards
        flat = values.detach().flatten()
        return Shard(name + key, self._region(name), flat, place + places * at, places * copies)

    def _region(self, name: str) -> Region:
        shape = self._part_shape(name)
        region = self.cuts.region(name, shape)
        if not isinstance(self.named[name], DTensor):
            return region
        return region.part(*(edge * math.prod(shape[1:]) for edge in self.ranks.rows(shape[0])))

    def weight_shards(self) -> Iterator[Shard]:
        yield from (self._shard(name, self._as_computed(local_of(one))) for name, one in self.named.items())

    def master_shards(self) -> Iterator[Shard]:
        yield from (self._shard(name, local_of(one)) for name, one in self.trained.items())

    def moment_shards(self) -> Iterator[Shard]:
        for name, stepped in self.stepped.items():
            for key, moment in optimizers.moments_of(self.optimizer, stepped).items():
                yield self._shard(name, local_of(moment), f"/{key}")

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        held = self._gradients()
        for name, parameter in self.trained.items():
            yield name, self._whole(name, held.get(name, torch.zeros_like(local_of(parameter))))

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, self._whole(name, local_of(one))) for name, one in self.trained.items())

    def needed_slice(self, name: str, part: str) -> slice:
        return self._region(name).bounds()

    def load_state(self, name: str, state: TensorState) -> None:
        self.set_master(name, state["weight"])
        moments = {key: self._own(name, value) for key, value in state.items() if key != "weight"}
        if moments:
            stepped = self.stepped[name]
            if isinstance(stepped, DTensor):
                moments = {key: like(stepped, one) for key, one in moments.items()}
            optimizers.set_moments(self.optimizer, stepped, moments, self.steps)

    def _own(self, name: str, whole: Tensor) -> Tensor:
        """Return what this rank holds of a whole tensor."""
        first, last = self.ranks.rows(self._part_shape(name)[0])
        return self.cuts.part(name, whole)[first:last].to(local_of(self.trained[name]).device)

    def set_master(self, name: str, value: Tensor) -> None:
        local_of(self.trained[name]).copy_(self._own(name, value))


def reset(group: Any) -> None:
    """Leave the pass that a group of parameters is in, without its gradients."""
    group._training_state = TrainingState.IDLE
    group._partial_reduce_output = group._all_gather_result = None
    group._post_forward_indices.clear()
    group.comm_ctx.post_forward_order.clear()
    for parameter in group.fsdp_params:
        parameter.unsharded_accumulated_grad = None
        if (whole := vars(parameter).get("_unsharded_param")) is not None:
            whole.grad = None
    group.reshard()


def take_out_rows(block: nn.Module, quantized: set[nn.Parameter]) -> dict[str, Tensor]:
    """Cast a block's parameters to the type that the optimizer steps, and return the rows of those that are divided.

    These become parameters without values, which `fully_shard` divides without reading them.
    """
    own = {}
    for name, parameter in block.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names != ("tensor",):
            continue  # of a block inside that is done
        dtype = torch.float32 if parameter.requires_grad else parameter.dtype
        if PART in vars(parameter):
            own[name] = vars(parameter).pop(PART).to(dtype)
            empty = torch.empty(parameter.shape, dtype=dtype, device="meta")
            torch.utils.swap_tensors(parameter, nn.Parameter(empty, parameter.requires_grad))
        elif parameter not in quantized:
            parameter.data = parameter.data.to(dtype)
    return own


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(tensor: Any, local: Tensor) -> Any:
    """Return a DTensor that is divided as another one, with other values on this rank."""
    places = tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, *places, run_check=False, shape=tensor.shape, stride=tensor.stride())


def fsdp_modules(module: Any) -> list[Any]:
    return [one for one in module.modules() if isinstance(one, FSDPModule)]


def blocks_of(scorer: Scorer) -> list[nn.Module]:
    """Return the blocks that are gathered as a whole, inner ones first: those that Transformers would not divide."""
    names = set(scorer.model._no_split_modules or ())
    layers = set(scorer.model.get_decoder().layers)
    found = [one for one in scorer.modules() if type(one).__name__ in names or one in layers]
    return found[::-1]


def split_layers(model: Any, mesh: DeviceMesh) -> tuple[Cuts, list[str]]:
    """Split layers over tensor-parallel ranks; return what is cut, and whose gradients are sums over these ranks."""
    if mesh.size() == 1:
        return Cuts(), []
    styles = layer_styles(model, mesh.size())
    plan = {layer: PARALLEL[style]() for layer, style in styles.items() if style in PARALLEL}
    parallelize_module(model.get_decoder(), mesh, plan, src_data_rank=None)
    dims, partial = dict[str, int](), list[str]()
    for name, parameter in model.named_parameters():
        placed = parameter.placements[0] if isinstance(parameter, DTensor) else None
        if isinstance(placed, TensorShard):
            dims[name] = placed.dim
    partial = [f"{name}.weight" for name, _ in model.named_modules() if is_partial(name, styles)]
    return Cuts(mesh.size(), dims, mesh.get_group(), mesh.get_local_rank()), partial


def is_partial(name: str, styles: dict[str, str]) -> bool:
    layers = [layer.split(".") for layer, style in styles.items() if style == PARTIAL]
    parts = name.split(".")
    return any(
        len(parts) >= len(layer)
        and all(own in ("*", part) for own, part in zip(layer, parts[-len(layer) :], strict=True))
        for layer in layers
    )
